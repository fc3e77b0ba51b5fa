//! Detects forwarding loops within this process. A chain of rules is fine, but a loop would forward a
//! datagram forever, or open connections until descriptors run out. Connections and sessions to our own
//! listeners ([`crate::here`]) are recorded by local address, so that the rule at the other end knows
//! through how many rules its client has come.
//!
//! This code runs only when connections start and end, and only connections to our own listeners
//! take a lock.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hashbrown::{HashMap, hash_map::Entry};
use turnpike_net::{SocketProtocol, TcpSocket};
use turnpike_wire::address::canonical;

use crate::{
    EndReason,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Maximum number of this process's rules that a connection or session may pass through.
const MOST_HOPS: u8 = 8;

#[derive(Default)]
pub struct Circles {
    links: Mutex<LocalEnds>,
    /// Number of entries in `links`, readable without the lock.
    count: AtomicUsize,
}

/// Local ends of connections and sessions to our own listeners.
type LocalEnds = HashMap<End, LocalEnd>;
type End = (SocketProtocol, SocketAddr);

/// Connections that share a local address; they may have different targets.
struct LocalEnd {
    links: u32,
    /// Highest number of rules that a client of any of them has passed.
    hops: u8,
}

/// Connection or session to a rule of this process; dropping it removes the record.
pub struct Link {
    circles: Arc<Circles>,
    local: End,
}

impl Circles {
    /// Returns the number of rules through which a client has come, or [`EndReason::Circle`] if that number
    /// exceeds the limit.
    pub(crate) fn hops(&self, transport: SocketProtocol, client: SocketAddr) -> Result<u8, EndReason> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        match self.lock().get(&(transport, canonical(client))).map_or(0, |known| known.hops) {
            MOST_HOPS.. => Err(EndReason::Circle),
            hops => Ok(hops),
        }
    }

    /// Connects to another rule of ours, for a client that has come through `hops` rules. That rule may
    /// accept before connect(2) returns; [`Circles::hops`] blocks it until the connection is recorded.
    pub(crate) fn connect(
        self: &Arc<Self>,
        hops: u8,
        connect: impl FnOnce() -> io::Result<TcpSocket>,
    ) -> io::Result<(TcpSocket, Box<Link>)> {
        let mut links = self.lock();
        self.count.store(links.len() + 1, Ordering::Release);
        let connected = connect().and_then(|socket| {
            let local = (SocketProtocol::Tcp, canonical(socket.local_addr()?));
            Ok((socket, self.insert(&mut links, local, hops)))
        });
        self.count.store(links.len(), Ordering::Release);
        connected
    }

    /// Records a connection or session to another rule of ours, made for a client that has come through
    /// `hops` rules.
    pub(crate) fn link(
        self: &Arc<Self>,
        transport: SocketProtocol,
        local: SocketAddr,
        hops: u8,
    ) -> Box<Link> {
        let mut links = self.lock();
        let link = self.insert(&mut links, (transport, canonical(local)), hops);
        self.count.store(links.len(), Ordering::Release);
        link
    }

    fn insert(self: &Arc<Self>, links: &mut LocalEnds, local: End, hops: u8) -> Box<Link> {
        let known = links.entry(local).or_insert(LocalEnd { links: 0, hops: 0 });
        known.links += 1;
        known.hops = known.hops.max(hops + 1);
        Box::new(Link { circles: Arc::clone(self), local })
    }

    fn lock(&self) -> MutexGuard<'_, LocalEnds> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let mut links = self.circles.lock();
        if let Entry::Occupied(mut known) = links.entry(self.local) {
            known.get_mut().links -= 1;
            if known.get().links == 0 {
                known.remove();
            }
        }
        self.circles.count.store(links.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread, time::Duration};

    use turnpike_net::ConnectOptions;

    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn client_that_comes_through_too_many_rules_is_refused() {
        let circles = Arc::<Circles>::default();
        let mut links = Vec::new();
        let mut client = at("10.0.0.1:9");
        for hop in 0..MOST_HOPS {
            assert_eq!(circles.hops(SocketProtocol::Udp, client), Ok(hop));
            let local = SocketAddr::from(([127, 0, 0, 1], 1000 + u16::from(hop)));
            links.push(circles.link(SocketProtocol::Udp, local, hop));
            client = local;
        }
        assert_eq!(circles.hops(SocketProtocol::Udp, client), Err(EndReason::Circle));
        assert_eq!(circles.hops(SocketProtocol::Udp, at("[::ffff:127.0.0.1]:1007")), Err(EndReason::Circle));
        assert_eq!(circles.hops(SocketProtocol::Tcp, client), Ok(0));
        drop(links);
        assert_eq!(circles.hops(SocketProtocol::Udp, client), Ok(0));
        assert_eq!(circles.count.load(Ordering::Acquire), 0);
    }

    #[test]
    fn connection_is_recorded_before_its_other_end_is_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        let circles = Arc::<Circles>::default();
        let hops = || circles.hops(SocketProtocol::Tcp, listener.accept().unwrap().1);
        thread::scope(|scope| {
            let (connected, link) = circles
                .connect(3, || {
                    let socket = TcpSocket::connect(target, &ConnectOptions::default());
                    let acceptor = scope.spawn(hops);
                    // Long enough for a wrong result to appear.
                    thread::sleep(Duration::from_millis(50));
                    assert!(!acceptor.is_finished(), "the acceptor did not wait");
                    socket
                })
                .unwrap();
            let local = connected.local_addr().unwrap();
            assert_eq!(circles.hops(SocketProtocol::Tcp, local), Ok(4));
            drop(link);
            assert_eq!(circles.hops(SocketProtocol::Tcp, local), Ok(0));
        });
    }

    #[test]
    fn connections_that_share_a_local_port_are_removed_one_by_one() {
        let circles = Arc::<Circles>::default();
        let local = at("10.0.0.1:9");
        let [first, second] = [5, 1].map(|hops| circles.link(SocketProtocol::Tcp, local, hops));
        assert_eq!(circles.hops(SocketProtocol::Tcp, local), Ok(6));
        drop(first);
        assert_ne!(circles.hops(SocketProtocol::Tcp, local), Ok(0));
        drop(second);
        assert_eq!(circles.hops(SocketProtocol::Tcp, local), Ok(0));
    }
}
