//! The few kernel calls that the data path makes, each wrapped once: socket addresses, options, control messages.
//!
//! Lengths in `msghdr` and `cmsghdr` are of other types in musl than in glibc, and beside unused bytes that have to be zero: the kernel
//! reads both as one. Hence `as _` where such a length is written.

use std::{
    io, mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::{AsRawFd, BorrowedFd},
};

use libc::{c_int, c_void, cmsghdr, msghdr, sockaddr_in, sockaddr_in6};

/// UDP_SEGMENT and UDP_GRO of linux/udp.h; SO_RXQ_OVFL of asm-generic/socket.h.
pub(crate) const UDP_SEGMENT: c_int = 103;
pub(crate) const UDP_GRO: c_int = 104;
pub(crate) const SOL_UDP: c_int = 17;

/// Room for a socket address of either family, as the kernel wants it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union RawAddress {
    family: libc::sa_family_t,
    v4: sockaddr_in,
    v6: sockaddr_in6,
}

impl RawAddress {
    pub(crate) const SIZE: u32 = mem::size_of::<Self>() as u32;

    pub(crate) const fn empty() -> Self {
        // SAFETY: all three members are plain integers, for which zero is a value.
        unsafe { mem::zeroed() }
    }

    /// Writes an address and returns the length that the kernel wants for it.
    pub(crate) fn set(&mut self, address: SocketAddr) -> u32 {
        match address {
            SocketAddr::V4(a) => {
                self.v4 = sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: a.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(a.ip().octets()) },
                    sin_zero: [0; 8],
                };
                mem::size_of::<sockaddr_in>() as u32
            }
            SocketAddr::V6(a) => {
                self.v6 = sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: a.port().to_be(),
                    sin6_flowinfo: a.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: a.ip().octets() },
                    sin6_scope_id: a.scope_id(),
                };
                mem::size_of::<sockaddr_in6>() as u32
            }
        }
    }

    /// The address, canonical: an IPv4-mapped one is IPv4, zone and flow label are dropped.
    #[inline]
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        self.read::<false>()
    }

    /// With the zone, if it is wanted.
    #[inline]
    fn read<const ZONE: bool>(&self) -> Option<SocketAddr> {
        // SAFETY: every member begins with the family, and all bytes were initialised by `empty`.
        match c_int::from(unsafe { self.family }) {
            libc::AF_INET => {
                // SAFETY: the family says that this member was written.
                let a = unsafe { self.v4 };
                let ip = Ipv4Addr::from(a.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(a.sin_port))))
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that this member was written.
                let a = unsafe { self.v6 };
                let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
                let port = u16::from_be(a.sin6_port);
                Some(match ip.to_ipv4_mapped() {
                    Some(v4) => SocketAddr::V4(SocketAddrV4::new(v4, port)),
                    None => {
                        SocketAddr::V6(SocketAddrV6::new(ip, port, 0, if ZONE { a.sin6_scope_id } else { 0 }))
                    }
                })
            }
            _ => None,
        }
    }
}

/// Turns a C return value into a result.
pub(crate) fn check(value: c_int) -> io::Result<c_int> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// sendmmsg(2), without waiting. musl's own makes a sendmsg(2) of each message, because it does not trust the unused bytes of their
/// lengths; ours are zero.
///
/// # Safety
/// `messages` must point at `count` headers that describe live memory, all unused bytes being zero.
#[inline]
pub(crate) unsafe fn sendmmsg(fd: c_int, messages: *mut libc::mmsghdr, count: u32) -> c_int {
    #[cfg(not(target_env = "musl"))]
    // SAFETY: the caller's promise.
    return unsafe { libc::sendmmsg(fd, messages, count, libc::MSG_DONTWAIT) };
    #[cfg(target_env = "musl")]
    // SAFETY: the caller's promise. The result is a count or -1.
    return unsafe { libc::syscall(libc::SYS_sendmmsg, fd, messages, count, libc::MSG_DONTWAIT) as c_int };
}

/// setsockopt(2) with an integer.
pub(crate) fn set_option(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: the pointer and length describe `value`, which outlives the call.
    check(unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw const value).cast::<c_void>(),
            mem::size_of::<c_int>() as u32,
        )
    })
    .map(|_| ())
}

/// getsockopt(2) of an integer.
pub(crate) fn get_option(fd: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = mem::size_of::<c_int>() as u32;
    // SAFETY: the pointer and length describe `value`, and the kernel writes no more.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast::<c_void>(), &raw mut len)
    })?;
    Ok(value)
}

/// The address that a socket is bound to, with its zone: others may be bound there too.
pub(crate) fn local_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let mut raw = RawAddress::empty();
    let mut len = RawAddress::SIZE;
    // SAFETY: the pointer and length describe `raw`; the kernel writes no more than `len`.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), (&raw mut raw).cast(), &raw mut len) })?;
    raw.read::<true>().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
}

/// Bytes for control messages, aligned as `cmsghdr` wants it.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct Control<const N: usize>(pub(crate) [u8; N]);

/// Writes control messages into a [`Control`], front to back.
pub(crate) struct ControlWriter<'a> {
    buffer: &'a mut [u8],
    used: usize,
}

impl<'a> ControlWriter<'a> {
    pub(crate) fn new<const N: usize>(control: &'a mut Control<N>) -> Self {
        Self { buffer: &mut control.0, used: 0 }
    }

    /// Appends one. Its data are bytes, because a type with padding would leave uninitialised ones in the buffer.
    pub(crate) fn push<const N: usize>(&mut self, level: c_int, kind: c_int, data: [u8; N]) {
        // SAFETY: CMSG_SPACE and CMSG_LEN only compute.
        let (space, len) =
            unsafe { (libc::CMSG_SPACE(N as u32) as usize, libc::CMSG_LEN(N as u32) as usize) };
        assert!(self.used + space <= self.buffer.len(), "control buffer is too small for what is sent");
        let at = self.buffer[self.used..].as_mut_ptr();
        // SAFETY: `space` bytes at `at` are inside the buffer (checked above); the buffer and every `space` are
        // multiples of 8, so that `at` is aligned for `cmsghdr`; the data has no alignment.
        unsafe {
            let mut header: cmsghdr = mem::zeroed();
            header.cmsg_len = len as _;
            header.cmsg_level = level;
            header.cmsg_type = kind;
            at.cast::<cmsghdr>().write(header);
            at.add(mem::size_of::<cmsghdr>()).cast::<[u8; N]>().write(data);
        }
        self.used += space;
    }

    pub(crate) fn len(&self) -> usize {
        self.used
    }
}

/// One received control message.
pub(crate) struct Received<'a> {
    pub(crate) level: c_int,
    pub(crate) kind: c_int,
    pub(crate) data: &'a [u8],
}

impl Received<'_> {
    pub(crate) fn int(&self) -> Option<c_int> {
        self.data.first_chunk().map(|b| c_int::from_ne_bytes(*b))
    }

    /// The destination address in a packet information message.
    pub(crate) fn packet_info(&self) -> Option<IpAddr> {
        match (self.level, self.kind) {
            // struct in_pktinfo { int ifindex; in_addr spec_dst; in_addr addr; }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                let bytes: [u8; 4] = self.data.get(8..12)?.try_into().ok()?;
                Some(IpAddr::V4(Ipv4Addr::from(bytes)))
            }
            // struct in6_pktinfo { in6_addr addr; int ifindex; }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                let bytes: [u8; 16] = self.data.get(..16)?.try_into().ok()?;
                Some(IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical())
            }
            _ => None,
        }
    }
}

/// Walks the control messages that the kernel wrote for `header`.
///
/// # Safety
/// `header.msg_control` must point at `header.msg_controllen` bytes that outlive `'a`.
pub(crate) unsafe fn control_messages<'a>(header: &msghdr) -> impl Iterator<Item = Received<'a>> + use<'a> {
    let bytes: &'a [u8] = if header.msg_controllen == 0 {
        &[]
    } else {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(header.msg_control.cast::<u8>(), header.msg_controllen as _) }
    };
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let head = mem::size_of::<cmsghdr>();
        if rest.len() < head {
            return None;
        }
        // SAFETY: there are enough bytes; any bytes are a valid `cmsghdr`.
        let message: cmsghdr = unsafe { rest.as_ptr().cast::<cmsghdr>().read_unaligned() };
        let len: usize = message.cmsg_len as _;
        if len < head || len > rest.len() {
            return None;
        }
        let data = &rest[head..len];
        rest = rest.get(len.next_multiple_of(8)..).unwrap_or(&[]);
        Some(Received { level: message.cmsg_level, kind: message.cmsg_type, data })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is read from control messages of so many bytes.
    fn read<const N: usize>(control: &mut Control<N>, len: usize) -> Vec<(c_int, c_int, Vec<u8>)> {
        // SAFETY: all members are integers and pointers, for which zero is a value.
        let mut header: msghdr = unsafe { mem::zeroed() };
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = len as _;
        // SAFETY: the pointer and the length are those of `control`, which lives until the messages have been copied.
        let messages = unsafe { control_messages(&header) };
        messages.map(|message| (message.level, message.kind, message.data.to_vec())).collect()
    }

    #[test]
    fn control_messages_are_read_as_they_are_written() {
        let mut control = Control([0; 64]);
        let mut writer = ControlWriter::new(&mut control);
        writer.push(SOL_UDP, UDP_SEGMENT, 1200_u16.to_ne_bytes());
        writer.push(libc::IPPROTO_IP, libc::IP_TOS, [2]);
        let len = writer.len();
        let expected = [
            (SOL_UDP, UDP_SEGMENT, 1200_u16.to_ne_bytes().to_vec()),
            (libc::IPPROTO_IP, libc::IP_TOS, vec![2]),
        ];
        assert_eq!(read(&mut control, len), expected);
        assert_eq!(read(&mut control, len / 2), expected[..1]);
        assert_eq!(read(&mut control, 0), []);
    }

    /// The kernel writes none such; whoever reads them must not go beyond the buffer all the same.
    #[test]
    fn control_messages_of_impossible_lengths_end_the_walk() {
        for len in [0_usize, 1, 15, 17, 64, usize::MAX] {
            let mut control = Control([0; 16]);
            control.0[..8].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(read(&mut control, 16), [], "{len}");
        }
        let mut control = Control([0xFF; 16]);
        assert_eq!(read(&mut control, 15), []);
    }

    #[test]
    fn an_address_is_read_as_it_was_written_but_for_other_spellings() {
        for (written, shown) in [
            ("192.0.2.1:3478", "192.0.2.1:3478"),
            ("[2001:db8::1]:65535", "[2001:db8::1]:65535"),
            ("[::ffff:192.0.2.1]:1", "192.0.2.1:1"),
            ("[fe80::1%7]:1", "[fe80::1]:1"),
        ] {
            let mut raw = RawAddress::empty();
            let len = raw.set(written.parse().unwrap());
            assert!(len <= RawAddress::SIZE);
            assert_eq!(raw.get(), Some(shown.parse().unwrap()), "{written}");
        }
        assert_eq!(RawAddress::empty().get(), None);
    }
}
