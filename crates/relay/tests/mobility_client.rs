//! Mobility (RFC 8016) of this workspace's client, `turn::client`, which moves between real sockets connected
//! to a running relay.

use crate::prelude::*;
use turnpike_turn::client::{Client, Config, Incoming, Timing};
use turnpike_wire::{
    frame::{self, Framer, MAX_MESSAGE_LEN},
    indication::MAX_HEADER_LEN,
};

/// Enough moves that some lead from one of two workers to the other.
const MOVES: usize = 8;
const SHORT: Duration = Duration::from_millis(20);

enum Way {
    Udp(UdpSocket),
    Tcp(TcpStream, Framer),
}

impl Way {
    fn new(world: &World, over_tcp: bool) -> Self {
        if over_tcp {
            let stream = connect(world.tcp());
            stream.set_read_timeout(Some(SHORT)).unwrap();
            return Self::Tcp(stream, Framer::new());
        }
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.connect(world.udp()).unwrap();
        socket.set_read_timeout(Some(SHORT)).unwrap();
        Self::Udp(socket)
    }

    fn send(&mut self, message: &[u8]) {
        match self {
            Self::Udp(socket) => _ = socket.send(message).unwrap(),
            Self::Tcp(stream, _) => stream.write_all(message).unwrap(),
        }
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        let mut buffer = [0; 4096];
        let (read, mut messages) = match self {
            Self::Udp(socket) => (socket.recv(&mut buffer), Vec::new()),
            Self::Tcp(stream, _) => (stream.read(&mut buffer), Vec::new()),
        };
        let received = match read {
            Ok(len) => &buffer[..len],
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return messages;
            }
            Err(error) => panic!("{error}"),
        };
        match self {
            Self::Udp(_) => messages.push(received.to_vec()),
            Self::Tcp(_, framer) => {
                framer.feed(received, MAX_MESSAGE_LEN, |message| messages.push(message.to_vec())).unwrap();
            }
        }
        messages
    }
}

struct Traveller {
    client: Client,
    way: Way,
    started: Instant,
    heard: Vec<Vec<u8>>,
}

impl Traveller {
    fn new(world: &World, over_tcp: bool) -> Self {
        let mut config = Config::new("", "");
        config.mobility = true;
        if over_tcp {
            config.timing = Timing::RELIABLE;
        }
        Self {
            client: Client::new(Arc::new(config), turnpike_turn::random::Seed(rand::random())),
            way: Way::new(world, over_tcp),
            started: Instant::now(),
            heard: Vec::new(),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap()
    }

    fn step(&mut self) {
        while let Some(message) = self.client.poll_transmit() {
            self.way.send(message);
        }
        for message in self.way.receive() {
            let now = self.now();
            if let Incoming::Data { payload, .. } = self.client.handle_datagram(now, &message) {
                self.heard.push(payload.to_vec());
            }
        }
        let now = self.now();
        if self.client.poll_timeout().is_some_and(|due| due <= now) {
            self.client.handle_timeout(now);
        }
    }

    fn until<T>(&mut self, wanted: impl Fn(&Event) -> Option<T>) -> T {
        let deadline = Instant::now() + SOON;
        loop {
            self.step();
            while let Some(event) = self.client.poll_event() {
                assert!(!matches!(event, Event::Failed { .. }), "{event:?}");
                if let Some(found) = wanted(&event) {
                    return found;
                }
            }
            assert!(Instant::now() < deadline, "the event did not arrive in time");
        }
    }

    /// Exchanges a word that needs no padding with the peer, with retransmissions; returns the client's
    /// address as seen by the peer.
    fn converse(&mut self, peer: &UdpSocket, word: &[u8]) -> SocketAddr {
        peer.set_read_timeout(Some(SHORT)).unwrap();
        let deadline = Instant::now() + SOON;
        let to = peer.local_addr().unwrap();
        loop {
            let mut header = [0; MAX_HEADER_LEN];
            let len = self.client.send_header(to, word.len().try_into().unwrap(), &mut header);
            let padding = vec![0; usize::from(frame::padding(word.len()))];
            self.way.send(&[&header[..len], word, &padding].concat());
            let mut buffer = [0; 2048];
            let heard = peer.recv_from(&mut buffer);
            if let Ok((len, relayed)) = heard
                && buffer[..len] == *word
            {
                peer.send_to(word, relayed).unwrap();
                self.step();
                if self.heard.drain(..).any(|heard| heard == word) {
                    return relayed;
                }
            }
            assert!(Instant::now() < deadline, "{word:?} did not arrive");
        }
    }
}

fn travels(over_tcp: bool, workers: usize) {
    let world = support::start_workers(workers);
    let peer = peer();
    let to = peer.local_addr().unwrap();
    let mut traveller = Traveller::new(&world, over_tcp);
    traveller.client.allocate(0).unwrap();
    let allocation = traveller.until(|event| match event {
        Event::Allocated(allocation) => Some(*allocation),
        _ => None,
    });
    assert!(traveller.client.can_migrate());
    let now = traveller.now();
    traveller.client.bind_channel(now, to).unwrap();
    traveller.until(|event| matches!(event, Event::Bound(..)).then_some(()));
    let relayed = traveller.converse(&peer, b"home");
    assert_eq!(relayed, allocation.relayed);
    for stop in 0..MOVES {
        let old = std::mem::replace(&mut traveller.way, Way::new(&world, over_tcp));
        // Over TCP, every second connection is lost before the move.
        let old = (stop % 2 == 0).then_some(old);
        let now = traveller.now();
        traveller.client.migrate(now).unwrap();
        let lifetime = traveller.until(|event| match event {
            Event::Migrated { lifetime } => Some(*lifetime),
            _ => None,
        });
        assert!(lifetime > 0);
        assert!(traveller.client.channel(to).is_some());
        assert_eq!(traveller.converse(&peer, format!("stop{stop:04}").as_bytes()), relayed);
        drop(old);
    }
    world.wait_for_counter("mobility", "arrived", MOVES as u64);
    let now = traveller.now();
    traveller.client.delete(now).unwrap();
    traveller.until(|event| matches!(event, Event::Deleted).then_some(()));
    support::eventually("the allocation is gone", || {
        world.relay.snapshots().iter().all(|snapshot| snapshot.allocations == 0)
    });
    assert!(!traveller.client.can_migrate());
}

#[test]
fn our_client_keeps_its_allocation_over_udp() {
    travels(false, 1);
}

#[test]
fn our_client_keeps_its_allocation_over_udp_between_workers() {
    travels(false, 2);
}

#[test]
fn our_client_keeps_its_allocation_over_tcp() {
    travels(true, 1);
}

#[test]
fn our_client_keeps_its_allocation_over_tcp_between_workers() {
    travels(true, 2);
}
