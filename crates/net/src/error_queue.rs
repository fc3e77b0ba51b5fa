//! ICMP errors from a socket's error queue (ip(7), IP_RECVERR).

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd},
};

use crate::{
    UdpSocket,
    sys::{self, ControlBuffer, RawAddress},
};

/// ICMP error about a datagram sent by this socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuedError {
    /// Destination of the datagram; an IPv4-mapped address is converted to IPv4.
    pub to: SocketAddr,
    pub icmp_type: u8,
    pub code: u8,
    /// Next-hop MTU for "packet too big" and "fragmentation needed", else 0.
    pub info: u32,
    pub v6: bool,
}

pub(crate) fn read(socket: &UdpSocket, limit: usize, mut each: impl FnMut(QueuedError)) -> io::Result<usize> {
    for count in 0..limit {
        let mut name = RawAddress::empty();
        let mut control = ControlBuffer([0; 256]);
        // The datagram's own bytes are not needed; one byte makes a valid iovec.
        let mut byte = 0_u8;
        let mut iov = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let mut header = sys::empty_message().msg_hdr;
        header.msg_name = (&raw mut name).cast();
        header.msg_namelen = RawAddress::SIZE;
        header.msg_iov = &raw mut iov;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = control.0.len() as _;
        // SAFETY: every pointer in `header` is to a live local of the length given with it.
        let got = unsafe {
            libc::recvmsg(
                socket.as_fd().as_raw_fd(),
                &raw mut header,
                libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT,
            )
        };
        if got < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(count) } else { Err(error) };
        }
        let written: usize = header.msg_controllen as _;
        for message in sys::control_messages(&control.0[..written]) {
            let is_error = matches!(
                (message.level, message.kind),
                (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
            );
            // struct sock_extended_err { u32 errno; u8 origin, type, code, pad; u32 info, data; }
            let (true, Some(raw)) = (is_error, message.data.first_chunk::<12>()) else { continue };
            let v6 = match raw[4] {
                libc::SO_EE_ORIGIN_ICMP => false,
                libc::SO_EE_ORIGIN_ICMP6 => true,
                _ => continue,
            };
            let info = u32::from_ne_bytes([raw[8], raw[9], raw[10], raw[11]]);
            if let Some(to) = name.get() {
                each(QueuedError { to, icmp_type: raw[5], code: raw[6], info, v6 });
            }
        }
    }
    Ok(limit)
}
