//! Rules of this process that lead to each other. A chain of rules is fine; a circle of them would carry one datagram round for ever, or
//! open connections until no descriptor is left. A connection or session towards a port of ours is remembered by its local address, so
//! that the rule at its other end knows how many rules its client has come through.
//!
//! Only beginnings and ends of connections come here, and only those towards a port that a rule listens on take a lock.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use hashbrown::{HashMap, HashSet};
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
pub(crate) struct Circles {
    /// Ports of the rules in force.
    listening: RwLock<HashSet<(Transport, u16)>>,
    /// Local ends of connections and sessions towards those ports: how many rules lead up to them.
    links: Mutex<HashMap<(Transport, SocketAddr), u8>>,
    /// Number of links, for those who only want to know that there are none.
    count: AtomicUsize,
}

/// A connection or session that leads to a rule of this process, until it is dropped.
pub struct Link {
    circles: Arc<Circles>,
    local: (Transport, SocketAddr),
}

impl Circles {
    /// Takes the ports of the rules in force.
    pub(crate) fn set_listening(&self, ports: impl Iterator<Item = (Transport, u16)>) {
        *self.listening.write().unwrap_or_else(PoisonError::into_inner) = ports.collect();
    }

    /// Number of rules that a client has come through.
    ///
    /// # Errors
    /// [`EndReason::Circle`] where they are too many.
    pub(crate) fn hops(&self, transport: Transport, client: SocketAddr) -> Result<u8, EndReason> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        match links.get(&(transport, canonical(client))).copied().unwrap_or(0) {
            MOST_HOPS.. => Err(EndReason::Circle),
            hops => Ok(hops),
        }
    }

    /// Connects a client that has come through `hops` rules, and remembers the connection if it leads to another rule. That one may accept
    /// before connect(2) has returned; it gets no answer from [`Circles::hops`] until the connection is known.
    ///
    /// # Errors
    /// Those of `connect`.
    pub(crate) fn connect(
        self: &Arc<Self>,
        target: SocketAddr,
        hops: u8,
        connect: impl FnOnce() -> io::Result<TcpSocket>,
    ) -> io::Result<(TcpSocket, Option<Box<Link>>)> {
        if !self.is_listening(Transport::Tcp, target) {
            return Ok((connect()?, None));
        }
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        self.count.store(links.len() + 1, Ordering::Release);
        let connected = connect().map(|socket| {
            let local = socket.local_addr().ok().map(|local| (Transport::Tcp, canonical(local)));
            links.extend(local.map(|local| (local, hops + 1)));
            (socket, local.map(|local| Box::new(Link { circles: Arc::clone(self), local })))
        });
        self.count.store(links.len(), Ordering::Release);
        connected
    }

    fn is_listening(&self, transport: Transport, target: SocketAddr) -> bool {
        let listening = self.listening.read().unwrap_or_else(PoisonError::into_inner);
        listening.contains(&(transport, target.port()))
    }

    /// Remembers a connection or session of a client that has come through `hops` rules, if it leads to another one of ours.
    pub(crate) fn link(
        self: &Arc<Self>,
        transport: Transport,
        target: SocketAddr,
        local: impl FnOnce() -> io::Result<SocketAddr>,
        hops: u8,
    ) -> Option<Box<Link>> {
        if !self.is_listening(transport, target) {
            return None;
        }
        let local = (transport, canonical(local().ok()?));
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.insert(local, hops + 1);
        self.count.store(links.len(), Ordering::Release);
        drop(links);
        Some(Box::new(Link { circles: Arc::clone(self), local }))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let mut links = self.circles.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.remove(&self.local);
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
        circles.set_listening([(Transport::Udp, 53)].into_iter());
        let mut links = Vec::new();
        let mut client = at("10.0.0.1:9");
        for hop in 0..MOST_HOPS {
            assert_eq!(circles.hops(Transport::Udp, client), Ok(hop));
            let local = SocketAddr::from(([127, 0, 0, 1], 1000 + u16::from(hop)));
            links.extend(circles.link(Transport::Udp, at("127.0.0.1:53"), || Ok(local), hop));
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
        circles.set_listening([(Transport::Tcp, target.port())].into_iter());
        let hops = || circles.hops(Transport::Tcp, listener.accept().unwrap().1);
        thread::scope(|scope| {
            let (connected, link) = circles
                .connect(target, 3, || {
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
    fn what_leads_to_no_port_of_ours_is_not_remembered() {
        let circles = Arc::<Circles>::default();
        circles.set_listening([(Transport::Udp, 53)].into_iter());
        for (transport, target) in [(Transport::Tcp, "127.0.0.1:53"), (Transport::Udp, "127.0.0.1:54")] {
            assert!(circles.link(transport, at(target), || panic!("not wanted"), 0).is_none());
        }
    }
}
