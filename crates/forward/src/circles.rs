//! Rules of this process that lead to each other. A chain of rules is fine; a circle of them would carry one datagram round for ever, or
//! open connections until no descriptor is left. A connection or session towards a listener of ours ([`crate::here`]) is remembered by its
//! local address, so that the rule at its other end knows how many rules its client has come through.
//!
//! Only beginnings and ends of connections come here, and only those that lead to a listener of ours take a lock.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hashbrown::{HashMap, hash_map::Entry};
use turnpike_net::{TcpSocket, passed::Transport};
use turnpike_wire::address::canonical;

use crate::{
    EndReason,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Rules in a row that a client may come through.
const MOST_HOPS: u8 = 8;

/// Shared by all workers.
#[derive(Default)]
pub struct Circles {
    links: Mutex<Links>,
    /// Number of local ends in `links`, readable without the lock.
    count: AtomicUsize,
}

/// Local ends of connections and sessions towards listeners of ours.
type Links = HashMap<End, Known>;
type End = (Transport, SocketAddr);

/// Connections with the same local end: to different targets they may share a port.
struct Known {
    links: u32,
    /// Most rules that lead up to one of them.
    hops: u8,
}

/// A connection or session that leads to a rule of this process, until it is dropped.
pub struct Link {
    circles: Arc<Circles>,
    local: End,
}

impl Circles {
    /// Number of rules that a client has come through.
    ///
    /// # Errors
    /// [`EndReason::Circle`] where they are too many.
    pub(crate) fn hops(&self, transport: Transport, client: SocketAddr) -> Result<u8, EndReason> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        match self.lock().get(&(transport, canonical(client))).map_or(0, |known| known.hops) {
            MOST_HOPS.. => Err(EndReason::Circle),
            hops => Ok(hops),
        }
    }

    /// Connects a client that has come through `hops` rules to another rule of ours. That one may accept before connect(2) has
    /// returned; it gets no answer from [`Circles::hops`] until the connection is known.
    ///
    /// # Errors
    /// Those of `connect`, and of getsockname(2).
    pub(crate) fn connect(
        self: &Arc<Self>,
        hops: u8,
        connect: impl FnOnce() -> io::Result<TcpSocket>,
    ) -> io::Result<(TcpSocket, Box<Link>)> {
        let mut links = self.lock();
        self.count.store(links.len() + 1, Ordering::Release);
        let connected = connect().and_then(|socket| {
            let local = (Transport::Tcp, canonical(socket.local_addr()?));
            Ok((socket, self.insert(&mut links, local, hops)))
        });
        self.count.store(links.len(), Ordering::Release);
        connected
    }

    /// Remembers a connection or session of a client that has come through `hops` rules, towards another rule of ours.
    pub(crate) fn link(self: &Arc<Self>, transport: Transport, local: SocketAddr, hops: u8) -> Box<Link> {
        let mut links = self.lock();
        let link = self.insert(&mut links, (transport, canonical(local)), hops);
        self.count.store(links.len(), Ordering::Release);
        link
    }

    fn insert(self: &Arc<Self>, links: &mut Links, local: End, hops: u8) -> Box<Link> {
        let known = links.entry(local).or_insert(Known { links: 0, hops: 0 });
        known.links += 1;
        known.hops = known.hops.max(hops + 1);
        Box::new(Link { circles: Arc::clone(self), local })
    }

    fn lock(&self) -> MutexGuard<'_, Links> {
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
    fn a_client_that_has_come_through_too_many_rules_is_refused() {
        let circles = Arc::<Circles>::default();
        let mut links = Vec::new();
        let mut client = at("10.0.0.1:9");
        for hop in 0..MOST_HOPS {
            assert_eq!(circles.hops(Transport::Udp, client), Ok(hop));
            let local = SocketAddr::from(([127, 0, 0, 1], 1000 + u16::from(hop)));
            links.push(circles.link(Transport::Udp, local, hop));
            client = local;
        }
        assert_eq!(circles.hops(Transport::Udp, client), Err(EndReason::Circle));
        assert_eq!(circles.hops(Transport::Udp, at("[::ffff:127.0.0.1]:1007")), Err(EndReason::Circle));
        assert_eq!(circles.hops(Transport::Tcp, client), Ok(0));
        drop(links);
        assert_eq!(circles.hops(Transport::Udp, client), Ok(0));
        assert_eq!(circles.count.load(Ordering::Acquire), 0);
    }

    #[test]
    fn a_connection_is_known_before_its_other_end_is_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        let circles = Arc::<Circles>::default();
        let hops = || circles.hops(Transport::Tcp, listener.accept().unwrap().1);
        thread::scope(|scope| {
            let (connected, link) = circles
                .connect(3, || {
                    let socket = TcpSocket::connect(target, &ConnectOptions::default());
                    let acceptor = scope.spawn(hops);
                    // Time enough for an answer that is wrong.
                    thread::sleep(Duration::from_millis(50));
                    assert!(!acceptor.is_finished(), "it did not wait");
                    socket
                })
                .unwrap();
            let local = connected.local_addr().unwrap();
            assert_eq!(circles.hops(Transport::Tcp, local), Ok(4));
            drop(link);
            assert_eq!(circles.hops(Transport::Tcp, local), Ok(0));
        });
    }

    #[test]
    fn connections_that_share_a_local_port_are_forgotten_one_by_one() {
        let circles = Arc::<Circles>::default();
        let local = at("10.0.0.1:9");
        let [first, second] = [5, 1].map(|hops| circles.link(Transport::Tcp, local, hops));
        assert_eq!(circles.hops(Transport::Tcp, local), Ok(6));
        drop(first);
        assert_ne!(circles.hops(Transport::Tcp, local), Ok(0));
        drop(second);
        assert_eq!(circles.hops(Transport::Tcp, local), Ok(0));
    }
}
