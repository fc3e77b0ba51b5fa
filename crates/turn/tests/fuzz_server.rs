//! Fuzz target: the whole server by a sequence of events: requests with any attributes, signed or not, data, ICMP errors, what the
//! runtime and the credential store report and when, time, reloads, an upgrade. Whatever it does is held against a table that is kept
//! from what it tells.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use stun_types::message::Message;
use turnpike_testkit::fuzz::{self, Input};
use turnpike_turn::{
    access_token::{AccessToken, TokenKey},
    server::{
        AllocationId, Asked, Client, ClosedReason, ConnectError, ConnectRequest, ConnectionId,
        CredentialQuery, Credentials, Effect, Family, Link, ListenerId, Moved, OpenRequest, OpenResult,
        PeerConnection, PeerRules, RelayId, RelayTransport, Seat, Server, ServerConfig, Source, Verdict,
    },
    time::Now,
    wire::{
        integrity::{Key, KeyAlgorithm, Mac, userhash},
        stun::{Class, Header, View, Writer, kind, method},
    },
};

use crate::{
    common::{REALM, TestGate, address, channel_data, client, everything, password, seed, stream, streams},
    server_effects::{Mirror, Session},
};

const METHODS: [u16; 7] = [
    method::ALLOCATE,
    method::REFRESH,
    method::CREATE_PERMISSION,
    method::CHANNEL_BIND,
    method::CONNECT,
    method::CONNECTION_BIND,
    method::BINDING,
];
const USERS: [&str; 5] = ["alice", "bob", "north", "old", "nobody"];
const TENANT: &str = "tenant.example";
const MAC_KEY: [u8; 20] = [5; 20];
/// The first relayed address.
const RELAYED: &str = "203.0.113.1:50002";

/// Beyond this many a sequence shows nothing new, and takes longer.
const MOST_EVENTS: usize = 200;
/// Quotas and limits, low enough to be reached.
const PER_USER: usize = 3;
const TOTAL: usize = 5;
const MOST_BINDINGS: usize = 4;
const MOST_CONNECTIONS: usize = 2;
/// What one call may leave in the queue: all that five allocations have.
const MOST_EFFECTS: usize = TOTAL * (2 * MOST_BINDINGS + 2 * MOST_CONNECTIONS + 4);

#[test]
fn server() {
    fuzz::target("server", seeds, |bytes| {
        let mut input = Input::new(bytes);
        let mut run = Run::new(input.byte());
        for _ in 0..MOST_EVENTS {
            if input.is_empty() {
                break;
            }
            run.event(&mut input);
            run.books_agree();
        }
        run.ends();
    });
}

/// A server, what it has told, and what its runtime and its clients have of it.
struct Run {
    server: Server<TestGate>,
    config: ServerConfig,
    now: Now,
    ports: u16,
    table: Mirror,
    client: Client,
    /// The challenge that each client had last.
    challenges: Vec<(Client, Vec<u8>, Vec<u8>)>,
    /// Relay sockets to open; false where the allocation has ended meanwhile.
    opening: Vec<(OpenRequest, bool)>,
    connecting: Vec<ConnectRequest>,
    timed_out: Vec<(AllocationId, ConnectionId)>,
    lookups: Vec<CredentialQuery>,
    connections: Vec<ConnectionId>,
    tickets: Vec<Vec<u8>>,
    reservation: Vec<u8>,
    last: Vec<u8>,
}

impl Run {
    fn new(flags: u8) -> Self {
        let config = ServerConfig {
            authenticate: flags & 1 == 0,
            mobility: flags & 4 == 0,
            max_permissions: MOST_BINDINGS,
            max_channels: MOST_BINDINGS,
            max_connections: MOST_CONNECTIONS,
            listeners: streams().listeners,
            ..everything()
        };
        let gate = TestGate {
            per_user: PER_USER,
            total: TOTAL,
            later: flags & 2 != 0,
            relayed: vec![(RELAYED.parse().expect("an address"), RelayTransport::Udp)],
            ..TestGate::default()
        };
        Self {
            server: Server::of_many(Arc::new(config.clone()), gate, Seat::ONLY, seed(Seat::ONLY)),
            config,
            now: Now { ms: 1_000_000, unix: 1_800_000_000 },
            ports: 50_000,
            table: Mirror::default(),
            client: client(40_000),
            challenges: Vec::new(),
            opening: Vec::new(),
            connecting: Vec::new(),
            timed_out: Vec::new(),
            lookups: Vec::new(),
            connections: Vec::new(),
            tickets: Vec::new(),
            reservation: Vec::new(),
            last: Vec::new(),
        }
    }

    fn event(&mut self, input: &mut Input<'_>) {
        match input.below(20) {
            0 => self.datagram(input.long_bytes()),
            1 | 2 => {
                let request = self.request(input);
                self.datagram(&request);
            }
            3 => {
                if let Some(request) = self.signed_again(input.long_bytes()) {
                    self.datagram(&request);
                }
            }
            4 => self.datagram(&channel_data(0x4000 + u16::from(input.below(6)), input.bytes())),
            5 => self.datagram(&send(input.byte(), input.bytes())),
            6 => self.datagram(&self.last.clone()),
            7 => self.client = client_numbered(input.byte()),
            8 => self.sleep(input.u16().into()),
            9 => self.open(input),
            10 => self.from_peer(input),
            11 => self.icmp(input),
            12 => self.connect(input),
            13 => self.peer_connects(input),
            14 => self.connection_ends(input),
            15 => self.disconnect(input),
            16 => self.answer(input),
            17 => self.reconfigure(input),
            18 => self.end_some(input),
            _ => self.upgrade(),
        }
        self.hear();
    }

    fn sleep(&mut self, seconds: u64) {
        self.now.ms += seconds * 1000;
        self.now.unix += seconds;
        self.server.handle_timeout(self.now);
    }

    // What clients send.

    fn datagram(&mut self, bytes: &[u8]) {
        self.last = bytes.to_vec();
        let source = Source { client: self.client, link: Link(self.client.address.port().into()) };
        match self.server.from_client(self.now, &source, bytes) {
            Verdict::ToPeer { relay, peer, payload, .. } => {
                assert!(payload.len() < bytes.len() && bytes.as_ptr_range().contains(&payload.as_ptr()));
                // It may be what moves the allocation to where it came from.
                self.hear();
                self.may_be_sent(relay, peer, bytes);
            }
            Verdict::ToClient { .. } => panic!("a client's datagram went to a client"),
            Verdict::Reply { client, bytes: reply, .. } => {
                assert_eq!(client.address.ip(), self.client.address.ip(), "an answer to somebody else");
                let (request, answer) = (View::new_checked(bytes), View::new_checked(reply));
                let (request, answer) = (request.expect("it is answered"), answer.expect("ours"));
                assert_eq!(answer.header().transaction, request.header().transaction);
                assert_eq!(answer.has_fingerprint(), request.has_fingerprint());
                if self.config.authenticate && answer.mac().is_none() {
                    assert!(reply.len() <= 3 * bytes.len(), "{} bytes for {}", reply.len(), bytes.len());
                }
                let reply = reply.to_vec();
                self.learn(self.client, &reply);
            }
            Verdict::Drop(_) => {}
        }
    }

    fn may_be_sent(&self, relay: RelayId, peer: SocketAddr, datagram: &[u8]) {
        let session = self.session(relay.allocation);
        assert_eq!(session.client, self.client);
        assert!(session.permissions.contains_key(&peer.ip()), "nobody has permitted {peer}");
        assert!(self.config.peers.permits_endpoint(peer), "{peer} is refused to all");
        if datagram[0] & 0xC0 == 0x40 {
            let number = u16::from_be_bytes([datagram[0], datagram[1]]);
            assert_eq!(session.channels.get(&number).map(|(peer, _)| *peer), Some(peer));
        }
    }

    /// A request made of attributes that mean something, signed as clients do it or almost so.
    fn request(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let (method, how) = (input.below(8), input.u16());
        let method = METHODS.get(usize::from(method)).copied().unwrap_or_else(|| input.u16() & 0xFFF);
        let header = Header { class: Class::Request, method, transaction: [input.byte(); 12] };
        let mut buffer = Vec::new();
        let mut writer = Writer::begin(&mut buffer, header);
        for _ in 0..input.below(8) {
            self.attribute(&mut writer, input);
        }
        self.sign(&mut writer, how);
        writer.finish(how & 1 != 0);
        buffer
    }

    fn attribute(&self, writer: &mut Writer<'_>, input: &mut Input<'_>) {
        match input.below(20) {
            0 | 1 => writer.xor_address(kind::XOR_PEER_ADDRESS, peer(input.byte())),
            2 => writer.number(kind::CHANNEL_NUMBER, u32::from(0x4000 + u16::from(input.below(6))) << 16),
            3 => writer.number(kind::LIFETIME, input.u16().into()),
            4 => writer.number(kind::REQUESTED_TRANSPORT, u32::from(*input.choice(&[17, 6, 132])) << 24),
            5 => writer.number(kind::REQUESTED_ADDRESS_FAMILY, u32::from(*input.choice(&[1, 2, 3])) << 24),
            6 => writer.number(kind::ADDITIONAL_ADDRESS_FAMILY, u32::from(*input.choice(&[2, 1])) << 24),
            7 => writer.attribute(kind::EVEN_PORT, &[*input.choice(&[0x80, 0])]),
            8 => writer.attribute(kind::RESERVATION_TOKEN, &self.reservation),
            9 => writer.attribute(kind::DONT_FRAGMENT, &[]),
            10 => writer.attribute(kind::MOBILITY_TICKET, &[]),
            11 => {
                let number = usize::from(input.byte());
                let mut ticket = self.tickets.iter().rev().nth(number).cloned().unwrap_or_default();
                // Altered, as often as not.
                if let (Some(byte), mask) = (ticket.get_mut(number % 32), input.below(2)) {
                    *byte ^= mask;
                }
                writer.attribute(kind::MOBILITY_TICKET, &ticket)
            }
            12 => {
                let known = self.connections.get(usize::from(input.byte()));
                writer.number(kind::CONNECTION_ID, known.map_or_else(|| input.u32(), |known| known.0))
            }
            13 => writer.number(kind::CHANGE_REQUEST, u32::from(input.below(8))),
            14 => writer.attribute(kind::PADDING, &vec![0; 8 * usize::from(input.byte())]),
            15 => writer.attribute(kind::RESPONSE_PORT, &input.u16().to_be_bytes()),
            16 => {
                let lifetime = input.u16();
                let age = u64::from(input.byte());
                let token =
                    AccessToken::new(&MAC_KEY, self.now.unix + 30 - age, lifetime.into()).expect("a key");
                writer.attribute(
                    kind::ACCESS_TOKEN,
                    &token.seal(&TokenKey::A128Gcm([1; 16]), "turn.example.org", [9; 12]),
                )
            }
            17 => writer.number(kind::DRAFT_ADDITIONAL_ADDRESS_FAMILY, 2 << 24),
            18 => writer
                .attribute(*input.choice(&[0x7FFF, kind::DATA, kind::ICMP, kind::PRIORITY]), input.bytes()),
            _ => writer.attribute(input.u16(), input.bytes()),
        };
    }

    /// Credentials as `how` says: whose, by which algorithms, and what is wrong with them.
    fn sign(&self, writer: &mut Writer<'_>, how: u16) {
        if how & 2 != 0 {
            return;
        }
        let user = USERS[usize::from(how >> 2 & 7) % USERS.len()];
        let challenge = self.challenges.iter().find(|(client, ..)| *client == self.client);
        let (mut realm, mut nonce) = challenge.map_or_else(
            || (REALM.as_bytes().to_vec(), Vec::new()),
            |(_, realm, nonce)| (realm.clone(), nonce.clone()),
        );
        if how & 0x20 != 0 {
            realm = TENANT.as_bytes().to_vec();
        }
        if let (true, Some(byte)) = (how & 0x40 != 0, nonce.last_mut()) {
            *byte ^= 1;
        }
        let text = String::from_utf8_lossy(&realm).into_owned();
        let (algorithm, mac) = match how >> 8 & 3 {
            0 => (KeyAlgorithm::Md5, Mac::Sha1),
            1 => (KeyAlgorithm::Md5, Mac::Sha256),
            _ => (KeyAlgorithm::Sha256, Mac::Sha256),
        };
        if how >> 8 & 3 == 3 {
            writer.attribute(kind::USERHASH, &userhash(user, &text));
        } else {
            writer.attribute(kind::USERNAME, user.as_bytes());
        }
        writer.attribute(kind::REALM, &realm).attribute(kind::NONCE, &nonce);
        if algorithm == KeyAlgorithm::Sha256 {
            let offered = [KeyAlgorithm::Sha256, KeyAlgorithm::Md5].map(KeyAlgorithm::attribute).concat();
            writer.attribute(kind::PASSWORD_ALGORITHMS, &offered);
            writer.attribute(kind::PASSWORD_ALGORITHM, &algorithm.attribute());
        }
        let secret = if how & 0x80 != 0 { "wrong".to_owned() } else { password(user) };
        let key = match user {
            "north" => Key::from_bytes(&MAC_KEY),
            _ => Key::long_term(algorithm, user, &text, secret.as_bytes()),
        };
        writer.sign(&key, mac);
    }

    /// What a real client once sent, as it would send it here: under its own attributes and our credentials.
    fn signed_again(&self, message: &[u8]) -> Option<Vec<u8>> {
        let view = View::new_checked(message).ok()?;
        let mut buffer = Vec::new();
        let mut writer = Writer::begin(&mut buffer, view.header());
        let credentials = [
            kind::USERNAME,
            kind::USERHASH,
            kind::REALM,
            kind::NONCE,
            kind::PASSWORD_ALGORITHM,
            kind::PASSWORD_ALGORITHMS,
        ];
        for attribute in view.attributes().filter(|attribute| !credentials.contains(&attribute.kind)) {
            writer.attribute(attribute.kind, attribute.value);
        }
        match view.mac() {
            Some(Mac::Sha1) => self.sign(&mut writer, 0),
            Some(Mac::Sha256) => self.sign(&mut writer, 0x200),
            None => {}
        }
        writer.finish(view.has_fingerprint());
        Some(buffer)
    }

    /// What a client takes from an answer, which the oracle reads as we do.
    fn learn(&mut self, client: Client, reply: &[u8]) {
        assert!(reply.len() <= 2048, "{} bytes", reply.len());
        assert!(Message::from_bytes(reply).is_ok(), "the oracle reads it: {reply:02x?}");
        let view = View::new_checked(reply).expect("ours");
        if let (Some(realm), Some(nonce)) = (view.get(kind::REALM), view.get(kind::NONCE)) {
            self.challenges.retain(|(known, ..)| *known != client);
            self.challenges.push((client, realm.to_vec(), nonce.to_vec()));
        }
        self.tickets.extend(view.get(kind::MOBILITY_TICKET).map(<[u8]>::to_vec));
        if let Some(token) = view.get(kind::RESERVATION_TOKEN) {
            self.reservation = token.to_vec();
        }
    }

    // What the runtime does.

    fn open(&mut self, input: &mut Input<'_>) {
        if self.opening.is_empty() {
            return;
        }
        let (request, _) = self.opening.remove(usize::from(input.byte()) % self.opening.len());
        let how = input.byte();
        let mut result = |family, how: u8| match how & 3 {
            0 | 1 => {
                self.ports += 2;
                let ip: IpAddr = match family {
                    Family::V4 => [203, 0, 113, 1].into(),
                    Family::V6 => [0x2001, 0xDB8, 0, 0, 0, 0, 0, 1].into(),
                };
                OpenResult::Opened { relayed: (ip, self.ports).into() }
            }
            2 => OpenResult::NoCapacity,
            _ => OpenResult::UnsupportedFamily,
        };
        let first = result(request.first.family, how);
        let second = request.second.map(|second| result(second.family, how >> 2));
        let reply = late(self.server.opened(self.now, request.allocation, first, second));
        self.learn_late(reply);
    }

    fn from_peer(&mut self, input: &mut Input<'_>) {
        let (Some(allocation), from) = (self.some_allocation(input), peer(input.byte())) else { return };
        let relay = RelayId { allocation, family: Family::of(from.ip()) };
        let session = self.session(allocation);
        let passes = session.permissions.contains_key(&from.ip()) && !session.is_away;
        match self.server.from_peer(self.now, relay, from, input.bytes()) {
            Verdict::ToClient { client, .. } => assert_eq!((client, passes), (session.client, true)),
            Verdict::Drop(Some(_)) => assert!(!passes, "{from} has a permission"),
            _ => panic!("neither passed on nor dropped"),
        }
    }

    fn icmp(&mut self, input: &mut Input<'_>) {
        let (Some(allocation), to) = (self.some_allocation(input), peer(input.byte())) else { return };
        let relay = RelayId { allocation, family: Family::of(to.ip()) };
        let (icmp_type, code, info) = (input.below(13), input.byte(), input.u32());
        if let Verdict::Reply { client, .. } =
            self.server.from_icmp(self.now, relay, to, icmp_type, code, info)
        {
            let session = self.session(allocation);
            assert!(client == session.client && session.permissions.contains_key(&to.ip()));
        }
    }

    fn connect(&mut self, input: &mut Input<'_>) {
        if self.connecting.is_empty() {
            return;
        }
        let request = self.connecting.remove(usize::from(input.byte()) % self.connecting.len());
        let result = *input.choice(&[Ok(()), Err(ConnectError::Failed), Err(ConnectError::NoCapacity)]);
        let allocation = request.relay.allocation;
        let reply = late(self.server.connected(self.now, allocation, request.connection, result));
        self.learn_late(reply);
        if result.is_ok() {
            self.connections.push(request.connection);
        }
    }

    fn peer_connects(&mut self, input: &mut Input<'_>) {
        let (Some(allocation), from) = (self.some_allocation(input), peer(input.byte())) else { return };
        let relay = RelayId { allocation, family: Family::of(from.ip()) };
        let session = self.session(allocation);
        if let PeerConnection::Accept { connection, client, bytes, .. } =
            self.server.peer_connected(self.now, relay, from)
        {
            assert!(client == session.client && session.permissions.contains_key(&from.ip()));
            assert!(View::new_checked(bytes).is_ok());
            self.connections.push(connection);
        }
    }

    fn connection_ends(&mut self, input: &mut Input<'_>) {
        if !self.connections.is_empty() {
            let at = usize::from(input.byte()) % self.connections.len();
            self.server.connection_ended(self.now, self.connections.remove(at), 1, 2);
        }
    }

    fn disconnect(&mut self, input: &mut Input<'_>) {
        let client = client_numbered(input.byte());
        if self.config.listener(client.listener).transport.is_stream() {
            self.server.disconnected(self.now, &client);
        }
    }

    fn answer(&mut self, input: &mut Input<'_>) {
        if self.lookups.is_empty() {
            return;
        }
        let query = self.lookups.remove(usize::from(input.byte()) % self.lookups.len());
        let name: Box<str> = match query.user {
            Asked::Name(name) => name,
            Asked::Hash(_) => "alice".into(),
        };
        let key = Key::long_term(query.algorithm, &name, &query.realm, password(&name).as_bytes());
        let found = match input.below(5) {
            0 | 1 => Credentials::Keys { username: name.clone(), identity: name, keys: vec![key] },
            2 => Credentials::NoSuchUser,
            3 => Credentials::Expired { ago: 5 },
            _ => Credentials::Unavailable,
        };
        let reply = late(self.server.credentials(self.now, query.lookup, found));
        self.learn_late(reply);
    }

    fn reconfigure(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let denied = if how & 1 == 0 { vec![] } else { vec!["198.41.0.0/31".parse().expect("a network")] };
        self.config.peers = PeerRules { deny: denied, ..PeerRules::default() };
        self.config.mobility = how & 2 == 0;
        self.config.tcp_relay = how & 4 == 0;
        self.config.tenants = if how & 8 == 0 { everything().tenants } else { Vec::new() };
        self.server.reconfigure(self.now, Arc::new(self.config.clone()));
    }

    fn end_some(&mut self, input: &mut Input<'_>) {
        match input.below(8) {
            0 => self.server.drain(),
            1 => self.server.close_all(self.now, ClosedReason::Shutdown),
            _ => {
                if let Some(allocation) = self.some_allocation(input) {
                    assert!(self.server.close_one(self.now, allocation, ClosedReason::Administrator));
                }
            }
        }
    }

    /// Another process takes over: what can be written goes along, the rest ends.
    fn upgrade(&mut self) {
        let written = self.table.iter().map(|(id, session)| {
            let moved = self.server.snapshot(self.now, id).expect("it has its sockets");
            (session.client, session.is_away, serde_json::to_string(&moved).expect("plain data"))
        });
        let written: Vec<_> = written.collect();
        self.server.close_all(self.now, ClosedReason::Shutdown);
        self.hear();
        let gate = self.server.gate_mut().clone();
        self.server = Server::of_many(Arc::new(self.config.clone()), gate, Seat::ONLY, seed(Seat::ONLY));
        self.opening.clear();
        self.lookups.clear();
        for (client, is_away, text) in &written {
            let moved: Moved = serde_json::from_str(text).expect("what was written is read");
            let restored = self.server.restore(self.now, moved, Link(9));
            let restored = restored.unwrap_or_else(|_| panic!("there is room"));
            self.hear();
            assert_eq!(self.session(restored).client, *client);
            self.table.get_mut(restored).expect("it is there").is_away = *is_away;
        }
        assert_eq!(self.table.len(), written.len());
    }

    fn some_allocation(&self, input: &mut Input<'_>) -> Option<AllocationId> {
        let number = usize::from(input.byte());
        let (allocation, _) = self.table.iter().nth(number.checked_rem(self.table.len())?)?;
        Some(allocation)
    }

    fn session(&self, allocation: AllocationId) -> &Session {
        self.table.get(allocation).expect("an allocation that has been told")
    }

    fn learn_late(&mut self, reply: Option<(Client, Vec<u8>)>) {
        reply.into_iter().for_each(|(client, reply)| self.learn(client, &reply));
    }

    // What must hold.

    /// Takes all that is told, into the table and to the runtime.
    fn hear(&mut self) {
        let mut told = 0;
        while let Some(effect) = self.server.poll_effect() {
            told += 1;
            self.table.hear(&effect);
            match effect {
                Effect::Open(request) => self.opening.push((request, true)),
                Effect::Connect(request) => {
                    assert!(self.config.peers.permits_endpoint(request.peer));
                    self.connecting.push(request);
                }
                Effect::LookUp(query) => self.lookups.push(query),
                Effect::Closed { allocation, .. } => {
                    self.connecting.retain(|request| request.relay.allocation != allocation);
                    let ended = self.opening.iter_mut().find(|(request, _)| request.allocation == allocation);
                    ended.into_iter().for_each(|(_, exists)| *exists = false);
                }
                Effect::ConnectionClosed { connection, .. } => {
                    self.connecting.retain(|request| request.connection != connection);
                    self.connections.retain(|known| *known != connection);
                }
                Effect::ConnectTimedOut { allocation, connection } => {
                    self.connecting.retain(|request| request.connection != connection);
                    self.timed_out.push((allocation, connection));
                }
                Effect::HandOver { .. }
                | Effect::Forward { .. }
                | Effect::Fetch { .. }
                | Effect::Move(_)
                | Effect::Answer { .. }
                | Effect::Exported { .. }
                | Effect::Returned { .. } => panic!("there is one worker"),
                _ => {}
            }
        }
        assert!(told <= MOST_EFFECTS, "{told} effects of one event");
        if let Some((allocation, connection)) = self.timed_out.pop() {
            let reply =
                late(self.server.connected(self.now, allocation, connection, Err(ConnectError::TimedOut)));
            self.learn_late(reply);
            self.hear();
        }
    }

    fn books_agree(&mut self) {
        let opening = self.opening.iter().filter(|(_, exists)| *exists).count();
        let allocations = self.table.len() + opening;
        assert_eq!(self.server.allocations(), allocations);
        assert_eq!(self.server.gate_mut().held(), allocations);
        assert!(allocations <= TOTAL);
        assert!(self.server.connections() <= MOST_CONNECTIONS * allocations);
        assert!(allocations == 0 || self.server.poll_timeout().is_some());
        for (_, session) in self.table.iter() {
            assert!(session.permissions.len() <= MOST_BINDINGS && session.channels.len() <= MOST_BINDINGS);
        }
    }

    /// Nothing stays that nobody refreshes.
    fn ends(mut self) {
        for (request, _) in std::mem::take(&mut self.opening) {
            let second = request.second.map(|_| OpenResult::NoCapacity);
            let _ = late(self.server.opened(self.now, request.allocation, OpenResult::NoCapacity, second));
        }
        self.hear();
        self.sleep(60);
        self.hear();
        self.sleep(2 * u64::from(self.config.max_lifetime));
        self.hear();
        assert_eq!((self.server.allocations(), self.server.connections()), (0, 0));
        assert_eq!((self.server.gate_mut().held(), self.table.len()), (0, 0));
        assert_eq!(self.server.poll_timeout(), None);
    }
}

/// The answer to what was asked before.
fn late(verdict: Verdict<'_>) -> Option<(Client, Vec<u8>)> {
    match verdict {
        Verdict::Reply { client, bytes, .. } => Some((client, bytes.to_vec())),
        Verdict::Drop(_) => None,
        Verdict::ToPeer { .. } | Verdict::ToClient { .. } => panic!("no datagram was fed"),
    }
}

/// Over UDP, TCP, TLS and DTLS; the last one comes from a relayed address.
fn client_numbered(number: u8) -> Client {
    match number % 7 {
        0 => client(40_000),
        1 => client(40_001),
        2 => stream(41_000),
        3 => stream(41_001),
        4 => Client { listener: ListenerId(2), ..client(42_000) },
        5 => Client { listener: ListenerId(3), ..client(43_000) },
        _ => Client { address: address(RELAYED), ..client(1) },
    }
}

fn peer(number: u8) -> SocketAddr {
    let of = u16::from(number / 8);
    match number % 8 {
        0..4 => ([198, 41, 0, number % 4], 7000 + of % 3).into(),
        4 | 5 => ([0x2606, 0x4700, 0, 0, 0, 0, 0, of], 7000).into(),
        6 => *[
            address("10.0.0.1:7000"),
            address("[::ffff:198.41.0.1]:7000"),
            address(RELAYED),
            address("0.0.0.0:7000"),
            address("[64:ff9b::a00:1]:7000"),
            address("192.0.2.1:3478"),
        ]
        .get(usize::from(of) % 6)
        .expect("of six"),
        _ => ([198, 41, 0, 1], of % 2).into(),
    }
}

fn send(to: u8, data: &[u8]) -> Vec<u8> {
    let mut buffer = Vec::new();
    let header = Header { class: Class::Indication, method: method::SEND, transaction: [to; 12] };
    let mut writer = Writer::begin(&mut buffer, header);
    writer.xor_address(kind::XOR_PEER_ADDRESS, peer(to)).attribute(kind::DATA, data);
    writer.finish(to & 1 != 0);
    buffer
}

// Seeds.

/// Events as [`Run::event`] reads them.
#[derive(Clone, Default)]
struct Script(Vec<u8>);

impl Script {
    fn new(flags: u8) -> Self {
        Self(vec![flags])
    }

    fn event(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// A method by its place, and whole attributes.
    fn request(self, method: u8, how: u16, attributes: &[&[u8]]) -> Self {
        let [high, low] = how.to_be_bytes();
        let count = u8::try_from(attributes.len()).expect("few");
        let transaction = u8::try_from(self.0.len() % 251).expect("a byte");
        self.event(&[&[1, method, high, low, transaction, count][..], &attributes.concat()].concat())
    }

    /// The client is challenged, has an allocation with these attributes, and both sockets open.
    fn allocated(self, how: u16, attributes: &[&[u8]]) -> Self {
        self.request(0, 2, &[&[4, 0]]).request(0, how, attributes).event(&[9, 0, 0])
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let (udp, tcp, ticket, dual): ([u8; 2], [u8; 2], [u8; 1], [u8; 2]) = ([4, 0], [4, 1], [10], [6, 0]);
    let relaying = |script: Script, how| {
        script
            .request(2, how, &[&[0, 0], &[0, 1]])
            .request(3, how, &[&[2, 0], &[0, 0]])
            .event(&[4, 0, 3, 1, 2, 3])
            .event(&[5, 1, 3, 1, 2, 3])
            .event(&[10, 0, 0, 3, 1, 2, 3])
            .event(&[10, 0, 1, 2, 1, 2])
            .event(&[11, 0, 0, 3, 4, 0, 0, 5, 0x78])
    };
    let mut seeds = Vec::new();
    // Each scheme, and a token.
    for how in [0, 0x100, 0x200, 0x300, 0x08] {
        let token: &[u8] = if how == 8 { &[16, 2, 0, 30] } else { &[9] };
        seeds.push(relaying(Script::new(0).allocated(how, &[&udp, token]), how).request(
            1,
            how,
            &[&[3, 0, 0], token],
        ));
    }
    for flags in [0, 1] {
        let dual = Script::new(flags).allocated(0, &[&udp, &dual, &[7, 0]]);
        let expiring = relaying(dual, 0).event(&[8, 1, 44]).event(&[8, 2, 88]).event(&[8, 16, 0]);
        seeds.push(expiring);
        // Mobile, from another address, upgraded in between.
        let moving =
            relaying(Script::new(flags).allocated(0, &[&udp, &ticket]), 0).event(&[19]).event(&[7, 1]);
        let moving = moving.request(1, 2, &[]).request(1, 0, &[&[11, 0, 0]]).event(&[4, 0, 1, 1]);
        seeds.push(moving.request(1, 0, &[&[11, 0, 1]]).event(&[15, 2]));
        // Connections to and from peers.
        let relaying_tcp = Script::new(flags).event(&[7, 2]).allocated(0, &[&tcp]).request(4, 0, &[&[0, 0]]);
        let bound =
            relaying_tcp.event(&[12, 0, 0]).request(2, 0, &[&[0, 1]]).event(&[13, 0, 1]).event(&[7, 3]);
        let bound =
            bound.request(5, 2, &[&[12, 0]]).request(5, 0, &[&[12, 0]]).event(&[14, 0]).event(&[8, 0, 31]);
        seeds.push(bound.event(&[15, 2]));
    }
    // A store that has to be asked; reloads; the end of things.
    let asked =
        Script::new(2).request(0, 2, &[&udp]).request(0, 0, &[&udp]).event(&[16, 0, 0]).event(&[9, 0, 0]);
    seeds.push(asked.request(1, 0, &[&[3, 2, 0]]).event(&[8, 0, 11]).event(&[16, 0, 4]));
    let reloaded = relaying(Script::new(0).allocated(0, &[&udp]), 0).event(&[17, 9]).event(&[4, 0, 1, 1]);
    seeds.push(
        reloaded
            .event(&[18, 2, 0])
            .allocated(0, &[&udp])
            .event(&[18, 1])
            .event(&[18, 0])
            .allocated(0, &[&udp]),
    );
    // What asks for NAT discovery.
    let discovery = Script::new(0).request(6, 2, &[]).request(6, 3, &[&[13, 6]]).request(6, 2, &[&[14, 8]]);
    seeds.push(discovery.request(6, 2, &[&[15, 0x9C, 0x40]]).request(6, 2, &[&[18, 0, 0]]));
    // Real clients, one after the other, with whatever is wanted from the runtime at once.
    for messages in fuzz::captured("stun").chunks(12) {
        let mut script = Script::new(0).request(0, 2, &[&udp]);
        for message in messages {
            let length = u16::try_from(message.len()).expect("a datagram").to_be_bytes();
            script =
                script.event(&[&[3][..], &length, message].concat()).event(&[9, 0, 0]).event(&[12, 0, 0]);
        }
        seeds.push(script);
    }
    seeds.into_iter().map(|script| script.0).collect()
}

/// The seeds are to reach what they are for, or they are worth nothing.
#[test]
fn seeds_of_the_server_relay_move_and_connect() {
    let mut reached = [0; 7];
    for seed in seeds() {
        let mut input = Input::new(&seed);
        let mut run = Run::new(input.byte());
        while !input.is_empty() {
            run.event(&mut input);
        }
        let stats = run.server.stats();
        reached[0] += stats.to_peer_datagrams;
        reached[1] += stats.to_client_datagrams;
        reached[2] += stats.icmp_relayed;
        reached[3] += stats.mobility.iter().sum::<u64>();
        reached[4] += stats.connection_events.iter().sum::<u64>();
        reached[5] += stats.nat_discovery.iter().sum::<u64>();
        reached[6] += stats.retransmits + stats.allocations_closed.iter().sum::<u64>();
    }
    assert!(reached.iter().all(|count| *count > 0), "{reached:?}");
}
