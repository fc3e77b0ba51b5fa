//! Ports for programs that cannot let the kernel choose one, and for addresses where nobody listens.

use std::{
    mem,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr as UnixAddr, UnixDatagram},
    },
    sync::atomic::{AtomicU32, Ordering},
};

use crate::eventually;

/// The first of the ports given away. The kernel gives nobody anything here by itself (`net.ipv4.ip_local_port_range`), and no server of
/// a test has its relay ports here: what is free stays free until it is used.
const FIRST: u16 = 10_000;
/// Even ports, so that the next one is free too, as for RTP and RTCP.
const PAIRS: u32 = 5_000;

/// An even port that is free at `ip` for UDP and TCP, and that this function gives to nobody else in this network namespace until the
/// process ends: not to another test, and not to another test program either.
pub fn free_port(ip: IpAddr) -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    eventually("a free port", || {
        // Test programs that run at the same time begin elsewhere.
        let turn = std::process::id().wrapping_mul(401).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = FIRST + 2 * u16::try_from(turn % PAIRS).expect("less than PAIRS");
        // Names of this kind belong to the network namespace, as ports do, and end with who holds them.
        let name = UnixAddr::from_abstract_name(format!("turnpike-test-port-{port}")).expect("a short name");
        let held = UnixDatagram::bind_addr(&name).ok()?;
        let is_free = UdpSocket::bind((ip, port)).is_ok() && TcpListener::bind((ip, port)).is_ok();
        is_free.then(|| {
            mem::forget(held);
            port
        })
    })
}

/// The same with its address, that of IPv4's loopback.
pub fn free_address() -> SocketAddr {
    let ip = Ipv4Addr::LOCALHOST.into();
    SocketAddr::new(ip, free_port(ip))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_port_is_given_to_one_caller_only() {
        let addresses: BTreeSet<SocketAddr> = (0..100).map(|_| free_address()).collect();
        assert_eq!(addresses.len(), 100);
        for address in addresses {
            let name =
                UnixAddr::from_abstract_name(format!("turnpike-test-port-{}", address.port())).unwrap();
            assert!(UnixDatagram::bind_addr(&name).is_err(), "{address} is not held");
            assert!(UdpSocket::bind(address).is_ok() && TcpListener::bind(address).is_ok());
        }
    }
}
