//! Relay sockets shared by many allocations (`Config::shared_ports`): each client receives only from its own
//! peers, no socket is opened per client, and one system call serves several clients.

use crate::prelude::*;
use std::collections::BTreeSet;

use turnpike_net::{RxStats, TxStats};

use crate::support::*;

const REQUESTED_TRANSPORT: (u16, &[u8]) = (0x0019, &[17, 0, 0, 0]);

fn start_shared(shared_ports: usize, workers: usize) -> World {
    start_with(|config| (config.shared_ports, config.workers) = (shared_ports, workers))
}

struct Sharer {
    socket: UdpSocket,
    relayed: SocketAddr,
}

impl Sharer {
    fn new(world: &World) -> Self {
        Self::with(world, &[])
    }

    fn with(world: &World, attributes: &[(u16, &[u8])]) -> Self {
        let socket = peer();
        socket.connect(world.udp()).unwrap();
        let mut sharer = Self { socket, relayed: world.udp() };
        let attributes = [&[REQUESTED_TRANSPORT], attributes].concat();
        let answer = sharer.ask(&stun(ALLOCATE, 1, &attributes));
        assert_eq!(answer.kind(), ALLOCATE | 0x0100, "{answer:?}");
        sharer.relayed = plain(&answer.attribute(XOR_RELAYED_ADDRESS));
        sharer
    }

    fn ask(&self, request: &[u8]) -> Message {
        self.socket.send(request).unwrap();
        Message(heard(&self.socket))
    }

    fn code(&self, request: &[u8]) -> u16 {
        let answer = self.ask(request);
        answer.error().unwrap_or(0)
    }

    fn converses(&self, peer: &UdpSocket, word: &[u8]) {
        self.socket.send(&channel_data(word)).unwrap();
        let mut buffer = [0; 100];
        let (len, from) = peer.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from), (word, self.relayed));
        peer.send_to(word, self.relayed).unwrap();
        assert_eq!(Message(heard(&self.socket)).payload(), word);
    }
}

pub(crate) fn peer_at(number: u8) -> UdpSocket {
    let socket = UdpSocket::bind((Ipv4Addr::new(127, 0, 1, number), 0)).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket
}

/// Clients that share one relayed address, each with a channel to its own peer.
fn pairs(world: &World, count: u8) -> Vec<(Sharer, UdpSocket)> {
    let pair = |number| {
        let (client, peer) = (Sharer::new(world), peer_at(number));
        assert_eq!(client.code(&bind(peer.local_addr().unwrap())), 0);
        (client, peer)
    };
    (1..=count).map(pair).collect()
}

#[test]
fn clients_on_one_relayed_address_receive_from_their_own_peers() {
    let world = start_shared(1, 1);
    let pairs = pairs(&world, 20);
    let relayed = pairs[0].0.relayed;
    for (number, (client, peer)) in (0..).zip(&pairs) {
        assert_eq!(client.relayed, relayed);
        client.converses(peer, &[number; 9]);
    }
    // A permission covers all ports of the address.
    let (client, _) = &pairs[7];
    let stranger = peer_at(8);
    stranger.send_to(b"strange", relayed).unwrap();
    let indication = Message(heard(&client.socket));
    assert_eq!(indication.kind(), DATA);
    assert_eq!(indication.attribute(0x0013), b"strange");
    assert_eq!(indication.address(XOR_PEER_ADDRESS), stranger.local_addr().unwrap());
    peer_at(200).send_to(b"lost", relayed).unwrap();
    world.wait_for_counter("dropped_datagrams", "no_permission", 1);
}

#[test]
fn shared_socket_closes_with_its_last_allocation() {
    let world = start_shared(1, 1);
    let mut pairs = pairs(&world, 3);
    let relayed = pairs[0].0.relayed;
    let end = stun(REFRESH, 5, &[(0x000D, &[0; 4])]);
    while let Some((client, _)) = pairs.pop() {
        for (other, peer) in &pairs {
            other.converses(peer, b"open");
        }
        assert!(UdpSocket::bind(relayed).is_err(), "the relay still has the port");
        assert_eq!(client.code(&end), 0);
    }
    eventually("the port is free", || UdpSocket::bind(relayed).ok());
    let (client, peer) = (Sharer::new(&world), peer_at(1));
    assert_eq!(client.code(&bind(peer.local_addr().unwrap())), 0);
    client.converses(&peer, b"anew");
}

#[test]
fn icmp_error_is_reported_to_the_sender() {
    let world = start_shared(1, 1);
    let pairs = pairs(&world, 4);
    let gone = peer_at(9);
    let at = gone.local_addr().unwrap();
    drop(gone);
    let client = &pairs[2].0;
    assert_eq!(client.code(&permit(at)), 0);
    let send = stun(SEND, 6, &[(0x0012, &xored(at)), (0x0013, b"anybody?")]);
    client.socket.send(&send).unwrap();
    let indication = Message(heard(&client.socket));
    assert_eq!((indication.kind(), indication.address(XOR_PEER_ADDRESS)), (DATA, at));
    // ICMP type and code: port unreachable.
    assert_eq!(indication.attribute(0x8004)[2..4], [3, 3]);
    // Other clients get no indication, and their datagrams are unaffected.
    for (other, peer) in &pairs {
        other.converses(peer, b"well");
    }
}

#[test]
fn each_worker_has_its_own_shared_ports() {
    let world = start_shared(1, 2);
    // Both workers get some of the clients in all but one of 2^31 runs.
    let pairs = pairs(&world, 32);
    let ports: BTreeSet<_> = pairs.iter().map(|(client, _)| client.relayed).collect();
    assert_eq!(ports.len(), 2);
    for (client, peer) in &pairs {
        client.converses(peer, b"here");
    }
}

fn counted(world: &World) -> (RxStats, TxStats) {
    let snapshot = &world.relay.snapshots()[0];
    (snapshot.rx, snapshot.tx)
}

/// Separate sockets would take a system call per datagram.
#[test]
fn one_call_receives_from_many_peers() {
    let world = start_shared(1, 1);
    let pairs = pairs(&world, 60);
    let relayed = pairs[0].0.relayed;
    let several = || counted(&world).0.batch[2..].iter().sum::<u64>();
    // The worker sometimes reads too quickly for datagrams to accumulate.
    eventually("a call returns four datagrams or more", || {
        for (_, peer) in &pairs {
            peer.send_to(b"in", relayed).unwrap();
        }
        for (client, _) in &pairs {
            assert_eq!(Message(heard(&client.socket)).payload(), b"in");
        }
        several() > 0
    });
}

#[test]
fn one_call_sends_to_many_peers() {
    let world = start_shared(1, 1);
    let pairs = pairs(&world, 60);
    eventually("a call sends to several peers", || {
        for (client, _) in &pairs {
            client.socket.send(&channel_data(b"out")).unwrap();
        }
        for (_, peer) in &pairs {
            assert_eq!(heard(peer), b"out");
        }
        let sent = counted(&world).1;
        sent.messages > sent.calls
    });
}
