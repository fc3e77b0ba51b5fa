//! Payloads relayed by the kernel arrive unchanged, in both directions and with every combination of address
//! families; totals are exact.

use super::{
    CLIENT, Links, PEER, RELAY, SERVER, Server, by_each,
    client::{Client, bound, received},
    on_links, run,
};
use crate::prelude::*;

const CHANNEL: u16 = 0x4001;

pub(crate) struct Pair {
    pub(crate) client: Client,
    pub(crate) peer: UdpSocket,
    pub(crate) sent: u64,
}

impl Pair {
    pub(crate) fn new(client_family: usize, peer_family: usize) -> Self {
        let server = SocketAddr::new(SERVER[client_family], 3478);
        let client = Client::allocate(CLIENT[client_family], server, peer_family == 1);
        assert_eq!(client.relayed.ip(), RELAY[peer_family]);
        let peer = bound(PEER[peer_family]);
        client.bind(CHANNEL, peer.local_addr().expect("bound"));
        Self { client, peer, sent: 0 }
    }

    pub(crate) fn apart(end: u8) -> Self {
        let address = format!("10.77.2.{end}");
        run("ip", &["addr", "add", &format!("{address}/24"), "dev", "p"]);
        let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
        let peer = bound(address.parse().expect("an address"));
        client.bind(CHANNEL, peer.local_addr().expect("bound"));
        Self { client, peer, sent: 0 }
    }

    pub(crate) fn exchange(&mut self, len: usize) {
        self.sent += 1;
        let first = self.sent.to_le_bytes()[0];
        let payload: Vec<u8> = (first..=255).cycle().map(|byte| byte.wrapping_mul(31)).take(len).collect();
        self.client.send(CHANNEL, &payload);
        assert_eq!(received(&self.peer), (payload.clone(), self.client.relayed));
        self.peer.send_to(&payload, self.client.relayed).expect("the send succeeds");
        assert_eq!(self.client.receive(), Some((CHANNEL, payload)));
    }

    /// Sends until data arrives and the kernel has relayed more than `across` datagrams; earlier ones may be lost.
    pub(crate) fn reach_again(&self, server: &Server<'_>, across: u64) {
        self.peer.set_read_timeout(Some(Duration::from_millis(100))).expect("not zero");
        eventually("the kernel relays to the peer again", || {
            self.client.send(CHANNEL, b"where are you?");
            let is_there = self.peer.recv(&mut [0; 100]).is_ok();
            is_there && server.across() > across
        });
        while self.peer.recv(&mut [0; 100]).is_ok() {}
        self.peer.set_read_timeout(Some(SOON)).expect("not zero");
    }

    pub(crate) fn settle(&mut self, server: &Server<'_>) {
        let [before, peer] = counts(server);
        eventually("the kernel has taken the flow", || {
            self.exchange(20);
            let [after, back] = counts(server);
            after > before && back > peer
        });
    }
}

fn counts(server: &Server<'_>) -> [u64; 2] {
    ["to_peer", "to_client"].map(|direction| {
        server.metrics().sum("turnpike_kernel_datagrams_total", &format!("direction=\"{direction}\""))
    })
}

pub(crate) fn number(line: &str, name: &str) -> u64 {
    let (_, rest) = line.split_once(&format!(" {name}=")).unwrap_or_else(|| panic!("no {name} in {line}"));
    rest.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("bad {name}: {line}"))
}

/// Lengths near boundaries: empty, odd, Ethernet padding, the MTU.
const LENGTHS: [usize; 14] = [0, 1, 2, 3, 4, 17, 18, 19, 100, 101, 1000, 1231, 1232, 1233];

fn all_families(links: &Links, datapath: &str) {
    let mut server = links.serve(&["--datapath", datapath]);
    for (client, peer) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let mut pair = Pair::new(client, peer);
        pair.settle(&server);
        let before = counts(&server);
        for len in LENGTHS {
            pair.exchange(len);
        }
        // User space handles the three longest datagrams, which exceed the IPv6 limit.
        let least = LENGTHS.len() as u64 - 3;
        eventually("the kernel relayed the datagrams", || {
            let [to_peer, to_client] = counts(&server);
            to_peer >= before[0] + least && to_client >= before[1] + least
        });
        pair.client.refresh(0);
        let line = server.program.line_with(&format!("relayed={}", pair.client.relayed));
        assert_eq!(number(&line, "to_peer_datagrams"), pair.sent, "{line}");
        assert_eq!(number(&line, "to_client_datagrams"), pair.sent, "{line}");
    }
    let metrics = server.metrics();
    assert_eq!(metrics.sum("turnpike_kernel_flows", ""), 0);
    assert_eq!(metrics.sum("turnpike_kernel_dropped_total", ""), 0);
}

#[test]
fn payloads_are_unchanged_in_every_combination_of_families() {
    by_each(turnpike_testkit::this_test!(), all_families);
}

#[test]
fn request_response_flow_uses_the_kernel() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let mut pair = Pair::new(0, 0);
        // Each datagram follows the previous answer after a network delay, and nothing else wakes the server.
        for number in 0..500 {
            pair.exchange(60);
            // XDP starts only after a pause.
            let rests = datapath == "xdp" && number % 100 == 0;
            thread::sleep(Duration::from_micros(if rests { 5000 } else { 100 }));
        }
        eventually("the kernel relayed most", || server.across() > 500);
    });
}

#[test]
fn relay_behind_a_nat_sends_from_its_own_address() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&["--relay-ip", "10.77.2.1=198.51.100.77"]);
        let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
        assert_eq!(client.relayed.ip().to_string(), "198.51.100.77");
        let peer = bound(PEER[0]);
        client.bind(CHANNEL, peer.local_addr().expect("bound"));
        let inner = SocketAddr::new(RELAY[0], client.relayed.port());
        eventually("the kernel has taken the flow", || {
            client.send(CHANNEL, b"out");
            assert_eq!(received(&peer), (b"out".to_vec(), inner));
            peer.send_to(b"in", inner).expect("the send succeeds");
            assert_eq!(client.receive(), Some((CHANNEL, b"in".to_vec())));
            server.across() > 4
        });
    });
}

#[test]
fn wildcard_listener_answers_from_the_requested_address() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = links.serve(&["--listen", "0.0.0.0:3479", "--listen", "[::]:3479"]);
        for family in [0, 1] {
            let at = SocketAddr::new(SERVER[family], 3479);
            let client = Client::allocate(CLIENT[family], at, false);
            let peer = bound(PEER[0]);
            client.bind(CHANNEL, peer.local_addr().expect("bound"));
            let before = server.across();
            eventually("the kernel has taken the flow", || {
                client.send(CHANNEL, b"out");
                assert_eq!(received(&peer).0, b"out");
                peer.send_to(b"in", client.relayed).expect("the send succeeds");
                // The client's socket is connected and so receives nothing from other addresses.
                assert_eq!(client.receive(), Some((CHANNEL, b"in".to_vec())));
                server.across() > before + 4
            });
        }
    });
}

fn clients_reach_each_other(links: &Links, datapath: &str, relayed: [&str; 2], more: &[&str]) {
    let mut server = links.serve(&[&["--datapath", datapath], more].concat());
    for (family, relayed) in relayed.into_iter().enumerate() {
        let [one, other] =
            [0, 1].map(|at| Client::allocate(CLIENT[at], SocketAddr::new(SERVER[at], 3478), family == 1));
        assert_eq!([&one, &other].map(|client| client.relayed.ip().to_string()), [relayed; 2]);
        one.bind(CHANNEL, other.relayed);
        other.bind(CHANNEL + 1, one.relayed);
        let before = server.across();
        let mut sent = 0;
        eventually("the kernel hairpins datagrams", || {
            let payload = vec![7; sent % 200];
            one.send(CHANNEL, &payload);
            assert_eq!(other.receive(), Some((CHANNEL + 1, payload.clone())));
            other.send(CHANNEL + 1, &payload);
            assert_eq!(one.receive(), Some((CHANNEL, payload)));
            sent += 1;
            // Each datagram is counted twice, as in user space.
            server.across() > before + 100
        });
        one.refresh(0);
        let line = server.program.line_with(&format!("relayed={}", one.relayed));
        assert_eq!(
            [number(&line, "to_peer_datagrams"), number(&line, "to_client_datagrams")],
            [sent as u64; 2]
        );
        other.refresh(0);
    }
    assert_eq!(server.metrics().sum("turnpike_kernel_dropped_total", ""), 0);
}

#[test]
fn clients_of_one_server_reach_each_other_in_the_kernel() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        clients_reach_each_other(links, datapath, ["10.77.2.1", "fd77:2::1"], &[]);
    });
}

/// There is no NAT that could hairpin the packets, and no machine has the public addresses.
#[test]
fn clients_of_a_server_behind_nat_reach_each_other_in_the_kernel() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let public = ["198.41.0.9", "2600:1::5"];
        let relays = ["--relay-ip", "10.77.2.1=198.41.0.9", "--relay-ip", "fd77:2::1=2600:1::5"];
        clients_reach_each_other(links, datapath, public, &relays);
    });
}

/// Flow keys include the peer, so several clients may share a relayed address.
#[test]
fn kernel_separates_clients_with_a_shared_relayed_address() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let mut server = links.serve(&["--shared-ports", "1"]);
        let mut pairs: Vec<Pair> = (3..=5).map(Pair::apart).collect();
        let relayed = pairs[0].client.relayed;
        assert!(pairs.iter().all(|pair| pair.client.relayed == relayed), "one address for all");
        for pair in &mut pairs {
            pair.settle(&server);
        }
        assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), 6);
        // A peer with only a permission goes through user space to the client that permitted it.
        let before = server.passes("unknown_peer");
        let stranger = bound(pairs[1].peer.local_addr().expect("bound").ip());
        stranger.send_to(b"strange", relayed).expect("the send succeeds");
        let mut buffer = [0; 200];
        let len = pairs[1].client.socket().recv(&mut buffer).expect("a Data indication");
        assert_eq!(buffer[..2], [0x00, 0x17], "{:02x?}", &buffer[..len]);
        eventually("user space relayed the datagram", || server.passes("unknown_peer") > before);
        let gone = pairs.remove(0);
        gone.client.refresh(0);
        let line = server.program.line_with(&format!("to_peer_datagrams={}", gone.sent));
        assert_eq!(number(&line, "to_client_datagrams"), gone.sent, "{line}");
        assert_eq!(server.metrics().sum("turnpike_kernel_flows", ""), 4);
        let before = counts(&server);
        for _ in 0..20 {
            pairs.iter_mut().for_each(|pair| pair.exchange(50));
        }
        eventually("the kernel still relays the others", || {
            let [to_peer, to_client] = counts(&server);
            to_peer >= before[0] + 30 && to_client >= before[1] + 30
        });
    });
}
