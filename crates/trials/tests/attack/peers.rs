//! Peers that are refused, no longer allowed, or without a permission from any client exchange no data with the clients, through
//! channels or permissions, in either direction. Other peers of the same clients lose nothing. The tests count data at both ends.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    path::PathBuf,
    thread,
    time::Duration,
};

use turnpike_testkit::{
    alone::run,
    stun::{self, attribute::*, kind::*, xor_address},
};

use super::{
    Asked, TRANSPORTS, by_each_in_the_kernel, is_thorough, row,
    wire::{User, Wire},
};
use turnpike_trials::{Certificate, Dir, PASSWORD, SOON, Serve, USER, Upgraded, eventually};

const COUNT: usize = 10;
/// Time to wait for data that must not arrive, after the last expected datagram.
const GRACE: Duration = Duration::from_millis(300);
const FORBIDDEN: u16 = 403;

struct Peer {
    number: u8,
    ip: IpAddr,
    bound: UdpSocket,
    /// Port without a channel, reached only through the permission.
    bare: UdpSocket,
}

impl Peer {
    fn at(number: u8, ip: IpAddr) -> Self {
        let socket = || UdpSocket::bind((ip, 0)).expect("the address is local");
        Self { number, ip, bound: socket(), bare: socket() }
    }

    fn channel(&self) -> [u8; 2] {
        [0x40, self.number]
    }

    fn sockets(&self) -> [&UdpSocket; 2] {
        [&self.bound, &self.bare]
    }

    fn send(&self, to: SocketAddr, turn: u8) {
        for socket in self.sockets() {
            (0..COUNT)
                .for_each(|_| _ = socket.send_to(&[self.number, turn, 0, 0], to).expect("the send succeeds"));
        }
    }
}

fn next(socket: &UdpSocket, wait: Duration) -> Option<([u8; 4], SocketAddr)> {
    socket.set_read_timeout(Some(wait)).expect("the timeout is not zero");
    let mut buffer = [0; 64];
    let (len, from) = socket.recv_from(&mut buffer).ok()?;
    assert_eq!(len, 4, "{:?}", &buffer[..len]);
    Some(([buffer[0], buffer[1], buffer[2], buffer[3]], from))
}

fn address(socket: &UdpSocket) -> SocketAddr {
    socket.local_addr().expect("the socket is bound")
}

struct Client {
    transport: &'static str,
    user: User,
    relayed: SocketAddr,
}

impl Client {
    fn new<S: Asked>(server: &S, transport: &'static str) -> Self {
        let mut user = User::new(Wire::new(transport, server.at(transport)), USER, PASSWORD);
        let relayed = user.allocate(17, &[]).address(XOR_RELAYED_ADDRESS);
        Self { transport, user, relayed }
    }

    /// Requests a permission and a channel for a peer; returns the error codes.
    fn ask_for(&mut self, peer: &Peer) -> [Option<u16>; 2] {
        let (bound, bare) = (xor_address(address(&peer.bound), 0), xor_address(address(&peer.bare), 0));
        let [high, low] = peer.channel();
        let channel = [(CHANNEL_NUMBER, &[high, low, 0, 0][..]), (XOR_PEER_ADDRESS, &bound)];
        [
            self.user.ask(CREATE_PERMISSION, &[(XOR_PEER_ADDRESS, &bare)]).error(),
            self.user.ask(CHANNEL_BIND, &channel).error(),
        ]
    }

    /// Sends datagrams to both ports of a peer, through the channel and as Send indications.
    fn send(&mut self, peer: &Peer, turn: u8) {
        let payload = [peer.number, turn, 0, 0];
        let [high, low] = peer.channel();
        let on_channel = [&[high, low, 0, 4][..], &payload].concat();
        let bare = xor_address(address(&peer.bare), 0);
        for _ in 0..COUNT {
            self.user.wire.send(&on_channel);
            let indication = stun::plain_message(SEND, &[(XOR_PEER_ADDRESS, &bare), (PAYLOAD, &payload)]);
            self.user.wire.send(&indication);
        }
    }

    fn hear(&mut self) -> [u8; 4] {
        let message = self.user.wire.hear();
        let data = if message[0] & 0xC0 == 0x40 {
            message[4..8].to_vec()
        } else {
            assert_eq!(message[..2], DATA.to_be_bytes(), "{message:02x?}");
            stun::Message(message).attribute(PAYLOAD)
        };
        data.try_into().expect("there is one figure per transport")
    }
}

/// Exchanges one round of data in both directions: data of refused peers must not arrive, all other data must.
fn only_these_pass(clients: &mut [Client], refused: &[&Peer], allowed: &[&Peer], turn: u8) {
    for client in &mut *clients {
        // Refused peers come first, so that later data on the same path proves that the round is over.
        refused.iter().chain(allowed).for_each(|peer| client.send(peer, turn));
    }
    for peer in allowed {
        for socket in peer.sockets() {
            for _ in 0..COUNT * clients.len() {
                let (said, from) = next(socket, SOON).expect("the datagram arrives");
                assert_eq!(said[..2], [peer.number, turn], "from {from}");
                assert!(clients.iter().any(|client| client.relayed == from), "from {from}");
            }
        }
    }
    thread::sleep(GRACE);
    for socket in refused.iter().chain(allowed).flat_map(|peer| peer.sockets()) {
        let more = next(socket, Duration::from_millis(1));
        assert!(more.is_none(), "{more:?} at {}", address(socket));
    }
    for client in clients {
        refused.iter().chain(allowed).for_each(|peer| peer.send(client.relayed, turn));
        let expect = |client: &mut Client, count: usize, turn: u8| {
            for _ in 0..count {
                let said = client.hear();
                let is_allowed = allowed.iter().any(|peer| said[..2] == [peer.number, turn]);
                assert!(is_allowed, "{said:?} over {}", client.transport);
            }
        };
        expect(client, allowed.len() * 2 * COUNT, turn);
        thread::sleep(GRACE);
        // Everything that was in flight arrives before this datagram.
        let last = u8::MAX - turn;
        let fence = [allowed[0].number, last, 0, 0];
        allowed[0].bound.send_to(&fence, client.relayed).expect("the send succeeds");
        expect(client, 1, last);
    }
}

struct Place {
    _dir: Dir,
    file: PathBuf,
    peers: [Peer; 4],
}

impl Place {
    /// `prefix` is the first three bytes of the addresses.
    fn new(prefix: [u8; 3]) -> Self {
        let dir = Dir::new();
        let file = dir.file("turnpike.toml", "[peers]\ndeny = []\n");
        let [a, b, c] = prefix;
        let peers = [11, 12, 13, 14].map(|number| Peer::at(number, IpAddr::from([a, b, c, number])));
        Self { _dir: dir, file, peers }
    }

    fn on_loopback() -> Self {
        Self::new([127, 9, 8])
    }

    fn on_links() -> Self {
        for number in 11..15 {
            run("ip", &["address", "replace", &format!("10.77.2.{number}/24"), "dev", "p"]);
        }
        Self::new([10, 77, 2])
    }

    fn path(&self) -> &str {
        self.file.to_str().expect("the test's path is UTF-8")
    }

    fn refuse(&self, peers: &[&Peer]) {
        let denied: Vec<String> = peers.iter().map(|peer| format!("\"{}\"", peer.ip)).collect();
        fs::write(&self.file, format!("[peers]\ndeny = [{}]\n", denied.join(", ")))
            .expect("the file belongs to the test");
    }

    fn serve(&self, certificate: &Certificate, datapath: &str) -> Serve {
        let flags = ["--workers", "1", "--datapath", datapath, "-c", self.path()];
        Serve::start_secured(certificate, &flags)
    }
}

fn by_each_in_user_space(body: impl Fn(&mut Serve, &Place, &str) + Sync) {
    const DATAPATHS: [&str; 3] = ["basic", "mmsg", "gso"];
    let certificate = Certificate::new(&["turn.example.org"]);
    let by = &|datapath: &str| {
        let place = Place::on_loopback();
        body(&mut place.serve(&certificate, datapath), &place, datapath);
    };
    if is_thorough() {
        return DATAPATHS.into_iter().for_each(by);
    }
    // Most of the time is spent waiting for data that must not arrive.
    thread::scope(|scope| {
        DATAPATHS.into_iter().for_each(|datapath| _ = scope.spawn(move || by(datapath)));
    });
}

fn by_each_where_the_kernel_relays(
    test: &str,
    body: impl Fn(&mut turnpike_trials::links::Server<'_>, &Place, &str),
) {
    by_each_in_the_kernel(test, |links, datapath| {
        let certificate = Certificate::new(&["turn.example.org"]);
        let place = Place::on_links();
        let user = format!("{USER}:{PASSWORD}");
        let mut flags = vec!["--user", &user, "--datapath", datapath, "-c", place.path()];
        flags.extend(["--dtls-listen", "10.77.1.1:3478"]);
        flags.extend(certificate.flags());
        body(&mut links.serve(&flags), &place, datapath);
    });
}

/// Clients over all transports with channels and permissions for `peers`; their data uses kernel flows if available.
fn clients_of<S: Asked>(server: &S, peers: &[&Peer], refused: &[&Peer]) -> Vec<Client> {
    let mut clients: Vec<Client> =
        TRANSPORTS.into_iter().map(|transport| Client::new(server, transport)).collect();
    for client in &mut clients {
        for peer in peers {
            assert_eq!(client.ask_for(peer), [None; 2], "{} over {}", peer.ip, client.transport);
        }
    }
    only_these_pass(&mut clients, refused, peers, 0);
    flows_are(server, &mut clients, peers, 0);
    clients
}

/// Waits for the kernel flows of these peers, if the kernel path is in use: one in each direction per UDP client.
fn flows_are<S: Asked>(server: &S, clients: &mut [Client], peers: &[&Peer], turn: u8) {
    if server.flows().is_none() {
        return;
    }
    eventually("each channel has its flows, and no other flows exist", || {
        only_these_pass(clients, &[], peers, turn);
        server.flows() == Some(2 * peers.len() as u64)
    });
}

fn say(what: &str, way_in: &str, clients: &[Client], turns: usize, refused: usize) {
    let each = 4 * COUNT * turns * refused;
    let cell = |transport: &str| {
        let there = clients.iter().any(|client| client.transport == transport);
        if there { each.to_string() } else { "-".to_owned() }
    };
    let [udp, tcp, tls, dtls] = TRANSPORTS.map(cell);
    row("peers", &[&what, &way_in, &udp, &tcp, &tls, &dtls, &0]);
}

#[test]
fn no_data_passes_to_or_from_a_peer_without_permission() {
    by_each_in_user_space(not_permitted);
}

#[test]
#[ignore = "thorough: cargo xtask attack"]
fn no_data_passes_without_permission_on_the_kernel_path() {
    by_each_where_the_kernel_relays(turnpike_testkit::this_test!(), |server, place, datapath| {
        not_permitted(server, place, datapath);
    });
}

fn not_permitted<S: Asked>(server: &mut S, place: &Place, datapath: &str) {
    let [stranger, _, _, known] = &place.peers;
    let mut clients = clients_of(server, &[known], &[stranger]);
    let mut other = [Client::new(server, "udp")];
    assert_eq!(other[0].ask_for(stranger), [None; 2]);
    only_these_pass(&mut other, &[known], &[stranger], 1);
    only_these_pass(&mut clients, &[stranger], &[known], 2);
    say(&format!("{datapath}, peer without a permission"), "channel and Send, both ways", &clients, 2, 1);
}

#[test]
#[ignore = "thorough: cargo xtask attack"]
fn a_reload_or_upgrade_stops_traffic_with_peers_it_refuses() {
    by_each_in_user_space(refused_later);
}

#[test]
fn a_reload_or_upgrade_stops_refused_peers_on_the_kernel_path() {
    by_each_where_the_kernel_relays(turnpike_testkit::this_test!(), |server, place, datapath| {
        refused_later(server, place, datapath);
    });
}

fn refused_later<S: Asked>(server: &mut S, place: &Place, datapath: &str) {
    let [by_reload, by_upgrade, _, kept] = &place.peers;
    let mut clients = clients_of(server, &[by_reload, by_upgrade, kept], &[]);

    place.refuse(&[by_reload]);
    server.program().signal("HUP");
    server.program().line_with("configuration reloaded");
    // Once the only worker refuses a new client, it has applied the new rules.
    let mut newcomer = Client::new(server, "udp");
    eventually("the new rules have taken effect", || newcomer.ask_for(by_reload) == [Some(FORBIDDEN); 2]);
    only_these_pass(&mut clients, &[by_reload], &[by_upgrade, kept], 1);
    flows_are(server, &mut clients, &[by_upgrade, kept], 2);
    for client in &mut clients {
        assert_eq!(client.ask_for(by_reload), [Some(FORBIDDEN); 2], "over {}", client.transport);
    }
    only_these_pass(&mut clients, &[by_reload], &[by_upgrade, kept], 3);
    say(&format!("{datapath}, peer denied by a reload"), "existing channel and permission", &clients, 2, 1);

    place.refuse(&[by_reload, by_upgrade]);
    let mut upgraded = Upgraded::new(server.program());
    upgraded.upgrade();
    // The new process owns the UDP allocations; other allocations stay in the old process, with its rules (docs/upgrade.md).
    let mut stayed = clients.split_off(1);
    let mut moved = clients;
    only_these_pass(&mut moved, &[by_reload, by_upgrade], &[kept], 4);
    only_these_pass(&mut stayed, &[by_reload], &[kept], 5);
    flows_are(server, &mut moved, &[kept], 6);
    for transport in TRANSPORTS {
        let mut newcomer = Client::new(server, transport);
        for peer in [by_reload, by_upgrade] {
            assert_eq!(newcomer.ask_for(peer), [Some(FORBIDDEN); 2], "{} over {transport}", peer.ip);
        }
    }
    let what = format!("{datapath}, after an upgrade");
    say(&format!("{what}, the same peer"), "existing channel and permission", &stayed, 1, 1);
    say(&format!("{what} that denies a different peer"), "existing channel and permission", &moved, 1, 2);
}

/// RFC 6062: connections to a peer that a reload refuses are closed; connections to other peers stay open.
#[test]
#[ignore = "thorough: cargo xtask attack"]
fn a_reload_closes_connections_to_peers_it_refuses() {
    let certificate = Certificate::new(&["turn.example.org"]);
    let place = Place::on_loopback();
    let mut serve = place.serve(&certificate, "gso");
    let [refused, .., kept] = &place.peers;
    let server = serve.at("tcp");
    let user = || User::new(Wire::tcp(server), USER, PASSWORD);
    let mut owner = user();
    owner.allocate(6, &[]);
    let listeners =
        [refused, kept].map(|peer| TcpListener::bind((peer.ip, 0)).expect("the address is local"));
    let mut connect = |listener: &TcpListener| {
        let peer = xor_address(listener.local_addr().expect("the socket is bound"), 0);
        owner.ask(CONNECT, &[(XOR_PEER_ADDRESS, &peer)])
    };
    let joined = listeners.each_ref().map(|listener| {
        let answer = connect(listener);
        assert_eq!(answer.error(), None, "the peer is allowed");
        let (stream, _) = listener.accept().expect("the socket is connected");
        stream.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
        let mut data = user();
        let bound = data.ask(CONNECTION_BIND, &[(CONNECTION_ID, &answer.attribute(CONNECTION_ID))]);
        assert_eq!(bound.error(), None, "the connection is the user's own");
        (data, stream)
    });
    place.refuse(&[refused]);
    serve.program.signal("HUP");
    serve.program.line_with("configuration reloaded");
    let [(_data, mut gone), (mut data, mut stream)] = joined;
    let ended = gone.read(&mut [0; 4]);
    let is_closed =
        ended.as_ref().map_or_else(|error| error.kind() != ErrorKind::WouldBlock, |len| *len == 0);
    assert!(is_closed, "{ended:?}");
    data.wire.send(b"here");
    let mut buffer = [0; 4];
    stream.read_exact(&mut buffer).expect("the datagram arrives");
    assert_eq!(&buffer, b"here");
    stream.write_all(b"back").expect("the connection is open");
    assert_eq!(data.wire.read(4), b"back");
    assert_eq!(connect(&listeners[0]).error(), Some(FORBIDDEN));
}
