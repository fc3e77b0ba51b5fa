//! Kernel interfaces that no library wraps: socket addresses, options, control messages.
//!
//! Lengths in musl's `msghdr` have a different type from those in glibc, hence the `as _`. The padding after
//! them must be zero, because the kernel reads length and padding as one number.

use std::{
    io, mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::{AsRawFd, BorrowedFd},
};

use libc::{c_int, c_void};
use rustix::net::{SocketAddrAny, getsockname};

/// UDP_SEGMENT and UDP_GRO of linux/udp.h, and IPPROTO_UDP as a level.
pub(crate) const UDP_SEGMENT: c_int = 103;
pub(crate) const UDP_GRO: c_int = 104;
pub(crate) const SOL_UDP: c_int = 17;

/// Socket address of either family in the kernel's layout (ip(7), ipv6(7)):
///
/// ```text
/// 0        2      4           8           16          24      28
/// │ family │ port │ IPv4      │ 8 zeroes  │
/// │ family │ port │ flow info │ IPv6                  │ scope │
/// ```
#[derive(Clone, Copy)]
#[repr(C, align(4))]
pub(crate) struct RawAddress([u8; 28]);

impl RawAddress {
    pub(crate) const SIZE: u32 = mem::size_of::<Self>() as u32;

    pub(crate) const fn empty() -> Self {
        Self([0; 28])
    }

    /// Writes an address and returns its length for the kernel.
    pub(crate) fn set(&mut self, address: SocketAddr) -> u32 {
        let [p0, p1] = address.port().to_be_bytes();
        match address {
            SocketAddr::V4(a) => {
                let [f0, f1] = (libc::AF_INET as libc::sa_family_t).to_ne_bytes();
                let [a, b, c, d] = a.ip().octets();
                // Copy everything at once, because several small writes take three times as long.
                self.0[..16].copy_from_slice(&[f0, f1, p0, p1, a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0]);
                16
            }
            SocketAddr::V6(a) => {
                let [f0, f1] = (libc::AF_INET6 as libc::sa_family_t).to_ne_bytes();
                self.0[..4].copy_from_slice(&[f0, f1, p0, p1]);
                self.0[4..8].copy_from_slice(&a.flowinfo().to_ne_bytes());
                self.0[8..24].copy_from_slice(&a.ip().octets());
                self.0[24..].copy_from_slice(&a.scope_id().to_ne_bytes());
                28
            }
        }
    }

    /// Reads the address. IPv4-mapped becomes IPv4; zone and flow label are dropped.
    #[inline]
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        let [f0, f1, p0, p1, ..] = self.0;
        let port = u16::from_be_bytes([p0, p1]);
        match c_int::from(libc::sa_family_t::from_ne_bytes([f0, f1])) {
            libc::AF_INET => {
                let ip: [u8; 4] = *self.0[4..].first_chunk()?;
                Some(SocketAddr::V4(SocketAddrV4::new(ip.into(), port)))
            }
            libc::AF_INET6 => {
                let ip: [u8; 16] = *self.0[8..].first_chunk()?;
                Some(canonical(SocketAddrV6::new(ip.into(), port, 0, 0)))
            }
            _ => None,
        }
    }
}

/// Converts IPv4-mapped to IPv4.
#[inline]
fn canonical(address: SocketAddrV6) -> SocketAddr {
    match address.ip().to_ipv4_mapped() {
        Some(v4) => SocketAddrV4::new(v4, address.port()).into(),
        None => address.into(),
    }
}

/// Converts an address from rustix, with or without its zone. EAFNOSUPPORT for families other than IP.
pub(crate) fn address(any: SocketAddrAny, with_zone: bool) -> io::Result<SocketAddr> {
    Ok(match SocketAddr::try_from(any)? {
        SocketAddr::V6(v6) => {
            let zone = if with_zone { v6.scope_id() } else { 0 };
            canonical(SocketAddrV6::new(*v6.ip(), v6.port(), 0, zone))
        }
        v4 @ SocketAddr::V4(_) => v4,
    })
}

/// Bound address, including the zone, which may be needed to bind other sockets to that address.
pub(crate) fn local_address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    address(getsockname(fd)?, true)
}

pub(crate) fn check(value: c_int) -> io::Result<c_int> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

pub(crate) fn empty_message() -> libc::mmsghdr {
    // SAFETY: all members are integers and pointers, for which zero is valid.
    unsafe { mem::zeroed() }
}

/// sendmmsg(2) with MSG_DONTWAIT. musl's wrapper calls sendmsg(2) for each message instead, because it cannot
/// rely on the padding of lengths being zero, whereas this crate can.
///
/// # Safety
/// `messages` must point at `count` headers that describe live memory and have zeroed padding.
#[inline]
pub(crate) unsafe fn sendmmsg(fd: c_int, messages: *mut libc::mmsghdr, count: u32) -> c_int {
    #[cfg(not(target_env = "musl"))]
    // SAFETY: promised by the caller.
    return unsafe { libc::sendmmsg(fd, messages, count, libc::MSG_DONTWAIT) };
    #[cfg(target_env = "musl")]
    // SAFETY: promised by the caller. The result is a count or -1.
    return unsafe { libc::syscall(libc::SYS_sendmmsg, fd, messages, count, libc::MSG_DONTWAIT) as c_int };
}

/// setsockopt(2) with an integer, for options that rustix and socket2 lack.
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

pub(crate) fn get_option(fd: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value = [0; mem::size_of::<c_int>()];
    get_option_bytes(fd, level, name, &mut value)?;
    Ok(c_int::from_ne_bytes(value))
}

/// getsockopt(2) for a structure, truncated if it does not fit. Returns the bytes written by the kernel.
pub(crate) fn get_option_bytes<'a>(
    fd: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: &'a mut [u8],
) -> io::Result<&'a [u8]> {
    let mut len = u32::try_from(value.len()).unwrap_or(u32::MAX);
    // SAFETY: the pointer and length describe `value`, and the kernel writes no more.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), level, name, value.as_mut_ptr().cast::<c_void>(), &raw mut len)
    })?;
    Ok(&value[..len as usize])
}

/// Control messages, aligned for `cmsghdr`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct ControlBuffer<const N: usize>(pub(crate) [u8; N]);

/// Alignment of control messages and size of their header (cmsg(3), include/linux/socket.h of the kernel):
///
/// ```text
/// │ length, header included │ level (4) │ kind (4) │ data │ padding to a multiple of WORD │ …
/// ```
const WORD: usize = mem::size_of::<usize>();
const HEAD: usize = WORD + 8;

pub(crate) struct ControlWriter<'a> {
    buffer: &'a mut [u8],
    used: usize,
}

impl<'a> ControlWriter<'a> {
    pub(crate) fn new<const N: usize>(control: &'a mut ControlBuffer<N>) -> Self {
        Self { buffer: &mut control.0, used: 0 }
    }

    /// Appends a message. Its data is a byte array, because a type with padding would leave uninitialised
    /// bytes in the buffer.
    pub(crate) fn push<const N: usize>(&mut self, level: c_int, kind: c_int, data: [u8; N]) {
        let len = HEAD + N;
        let space = len.next_multiple_of(WORD);
        assert!(self.used + space <= self.buffer.len(), "control buffer is too small");
        let place = &mut self.buffer[self.used..self.used + space];
        place[..WORD].copy_from_slice(&len.to_ne_bytes());
        place[WORD..WORD + 4].copy_from_slice(&level.to_ne_bytes());
        place[WORD + 4..HEAD].copy_from_slice(&kind.to_ne_bytes());
        place[HEAD..len].copy_from_slice(&data);
        self.used += space;
    }

    pub(crate) fn len(&self) -> usize {
        self.used
    }
}

pub(crate) struct ControlMessage<'a> {
    pub(crate) level: c_int,
    pub(crate) kind: c_int,
    pub(crate) data: &'a [u8],
}

impl ControlMessage<'_> {
    pub(crate) fn int(&self) -> Option<c_int> {
        self.data.first_chunk().map(|b| c_int::from_ne_bytes(*b))
    }

    /// Destination address of a packet information message.
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

/// Iterates over the control messages in the first `msg_controllen` bytes of a buffer.
#[inline]
pub(crate) fn control_messages(mut rest: &[u8]) -> impl Iterator<Item = ControlMessage<'_>> {
    std::iter::from_fn(move || {
        let (head, _) = rest.split_at_checked(HEAD)?;
        let int = |at: usize| head[at..].first_chunk().map(|b| c_int::from_ne_bytes(*b));
        let len = usize::from_ne_bytes(*head.first_chunk()?);
        let data = rest.get(HEAD..len)?;
        let message = ControlMessage { level: int(WORD)?, kind: int(WORD + 4)?, data };
        rest = rest.get(len.next_multiple_of(WORD)..).unwrap_or(&[]);
        Some(message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Vec<(c_int, c_int, Vec<u8>)> {
        control_messages(bytes).map(|message| (message.level, message.kind, message.data.to_vec())).collect()
    }

    #[test]
    fn control_messages_are_read_as_they_are_written() {
        let mut control = ControlBuffer([0; 64]);
        let mut writer = ControlWriter::new(&mut control);
        writer.push(SOL_UDP, UDP_SEGMENT, 1200_u16.to_ne_bytes());
        writer.push(libc::IPPROTO_IP, libc::IP_TOS, [2]);
        let len = writer.len();
        let expected = [
            (SOL_UDP, UDP_SEGMENT, 1200_u16.to_ne_bytes().to_vec()),
            (libc::IPPROTO_IP, libc::IP_TOS, vec![2]),
        ];
        assert_eq!(read(&control.0[..len]), expected);
        assert_eq!(read(&control.0[..len / 2]), expected[..1]);
        assert_eq!(read(&[]), []);
    }

    /// The kernel never writes such lengths, but the reader must still stay within the buffer.
    #[test]
    fn control_messages_of_impossible_lengths_end_the_walk() {
        for len in [0_usize, 1, 15, 17, 64, usize::MAX] {
            let mut control = ControlBuffer([0; 16]);
            control.0[..8].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(read(&control.0), [], "{len}");
        }
        assert_eq!(read(&[0xFF; 15]), []);
    }

    #[test]
    fn raw_addresses_are_read_in_their_canonical_form() {
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
