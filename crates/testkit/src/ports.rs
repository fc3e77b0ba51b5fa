//! Free ports for programs that cannot let the kernel choose, and for addresses without a listener.

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

/// First port to hand out. The range does not overlap the kernel's ephemeral ports (`net.ipv4.ip_local_port_range`) or the relay ports of
/// test servers, so a free port stays free.
const FIRST: u16 = 10_000;
/// Number of ports to hand out. Only even ones are used, so that the next port is also free, as needed for RTP and RTCP.
const PAIRS: u32 = 5_000;

/// Returns an even port that is free at `ip` for UDP and TCP. No other test in the network namespace gets this port until the process ends.
pub fn free_port(ip: IpAddr) -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    eventually("a free port", || {
        // Test programs that run at the same time start at different ports.
        let turn = std::process::id().wrapping_mul(401).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = FIRST + 2 * u16::try_from(turn % PAIRS).expect("less than PAIRS");
        // A socket name reserves the port: abstract names belong to the network namespace, as ports do, and disappear with the process.
        let name = UnixAddr::from_abstract_name(format!("turnpike-test-port-{port}")).expect("a short name");
        let held = UnixDatagram::bind_addr(&name).ok()?;
        let is_free = UdpSocket::bind((ip, port)).is_ok() && TcpListener::bind((ip, port)).is_ok();
        is_free.then(|| {
            mem::forget(held);
            port
        })
    })
}

pub fn free_address() -> SocketAddr {
    let ip = Ipv4Addr::LOCALHOST.into();
    SocketAddr::new(ip, free_port(ip))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_port_is_given_out_only_once() {
        let addresses: BTreeSet<SocketAddr> = (0..100).map(|_| free_address()).collect();
        assert_eq!(addresses.len(), 100);
        for address in addresses {
            let name =
                UnixAddr::from_abstract_name(format!("turnpike-test-port-{}", address.port())).unwrap();
            assert!(UnixDatagram::bind_addr(&name).is_err(), "{address} is not reserved");
            assert!(UdpSocket::bind(address).is_ok() && TcpListener::bind(address).is_ok());
        }
    }
}
