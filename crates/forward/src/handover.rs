//! Detects a port used only by a draining forwarder, whose remaining sockets are all connected to clients.
//! The kernel's table of UDP sockets shows this (proc(5), /proc/net/udp).

use procfs::net::{UdpState, udp, udp6};

/// True if the port has UDP sockets in this network namespace and all are connected.
pub(crate) fn is_left(port: u16) -> bool {
    let sockets = [udp(), udp6()].into_iter().flatten().flatten();
    let mut held = sockets.filter(|socket| socket.local_address.port() == port).peekable();
    held.peek().is_some() && held.all(|socket| socket.state == UdpState::Established)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn port_counts_as_draining_only_if_all_its_sockets_are_connected() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        assert!(!is_left(port), "the socket is listening");
        socket.connect("127.0.0.1:9").unwrap();
        assert!(is_left(port));
        let v6 = UdpSocket::bind(("::1", port));
        assert!(v6.is_err() || !is_left(port), "one of the two sockets is listening");
        drop((socket, v6));
        assert!(!is_left(port), "the port is free");
    }
}
