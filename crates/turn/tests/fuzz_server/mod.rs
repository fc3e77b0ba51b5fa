//! Fuzz target: the whole server under any sequence of requests, data, runtime reports, time, reloads and
//! upgrades. A table built from its effects checks every step.

mod mirror;
mod requests;
mod script;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use stun_types::message::Message;
use turnpike_testkit::fuzz::{self, Input};
use turnpike_turn::{
    server::{
        AllocationSlot, Client, ClosedReason, ConnectError, ConnectRequest, ConnectionId, CredentialQuery,
        Effect, Family, IcmpError, Link, LookupResult, Moved, OpenRequest, OpenResult, OwnedUser,
        PeerConnection, PeerRules, RelayId, RelayTransport, Server, ServerConfig, ServerLimits, Source,
        Transport, Verdict, WorkerId,
    },
    time::Now,
    wire::{
        integrity::Key,
        stun::{View, kind},
    },
};

use self::{
    mirror::{Mirror, MirroredAllocation},
    requests::{RELAYED, client_numbered, peer, send},
    script::seeds,
};
use crate::common::{TestPolicy, channel_data, client, everything, password, seed, streams};

/// Longer sequences take more time but find nothing new.
const MOST_EVENTS: usize = 200;
/// Quotas and limits, low enough to be reached.
const PER_USER: usize = 3;
const TOTAL: usize = 5;
const MOST_BINDINGS: usize = 4;
const MOST_CONNECTIONS: usize = 2;
/// Bytes that this configuration adds to a challenge: the longer realm and the server name for tokens.
const CONFIGURED: usize = 8 + 20;
/// Maximum number of effects of one call, which may end everything that five allocations have.
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

struct Run {
    server: Server<TestPolicy>,
    config: ServerConfig,
    now: Now,
    ports: u16,
    table: Mirror,
    client: Client,
    challenges: Vec<(Client, Vec<u8>, Vec<u8>)>,
    /// Relay sockets to open; false if the allocation has ended in the meantime.
    opening: Vec<(OpenRequest, bool)>,
    connecting: Vec<ConnectRequest>,
    timed_out: Vec<(AllocationSlot, ConnectionId)>,
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
            limits: ServerLimits {
                permissions: MOST_BINDINGS,
                channels: MOST_BINDINGS,
                peer_connections_per_allocation: MOST_CONNECTIONS,
                ..ServerLimits::default()
            },
            listeners: streams().listeners,
            ..everything()
        };
        let policy = TestPolicy {
            per_user: PER_USER,
            total: TOTAL,
            later: flags & 2 != 0,
            relayed: vec![(RELAYED.parse().expect("an address"), RelayTransport::Udp)],
            ..TestPolicy::default()
        };
        Self {
            server: Server::for_worker(
                Arc::new(config.clone()),
                policy,
                WorkerId::ONLY,
                seed(WorkerId::ONLY),
            ),
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
            10 => self.peer_sends(input),
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

    fn datagram(&mut self, bytes: &[u8]) {
        self.last = bytes.to_vec();
        let source = Source { client: self.client, link: Link(self.client.address.port().into()) };
        match self.server.from_client(self.now, &source, bytes) {
            Verdict::ToPeer { relay, peer, payload, .. } => {
                // An empty payload may point to the end of the datagram.
                let is_within = payload.is_empty() || bytes.as_ptr_range().contains(&payload.as_ptr());
                assert!(payload.len() < bytes.len() && is_within);
                // The datagram may have moved the allocation to its source.
                self.hear();
                self.may_be_sent(relay, peer, bytes);
            }
            Verdict::ToClient { .. } => panic!("a client's datagram went to a client"),
            Verdict::Reply { client, bytes: reply, .. } => {
                assert_eq!(client.address.ip(), self.client.address.ip(), "the reply went to another client");
                let read = |bytes| View::new_checked(bytes).or_else(|_| View::new_checked_classic(bytes));
                let (request, answer) = (
                    read(bytes).expect("only valid requests are answered"),
                    read(reply).expect("our own message is valid"),
                );
                assert_eq!(bytes[4..8], reply[4..8], "the cookie, or its RFC 3489 replacement");
                assert_eq!(answer.header().transaction, request.header().transaction);
                assert_eq!(answer.has_fingerprint(), request.has_fingerprint());
                let transport = self.config.listener(self.client.listener).transport;
                if self.config.authenticate && answer.mac().is_none() && transport == Transport::Udp {
                    let most = 4 * bytes.len() + CONFIGURED;
                    assert!(reply.len() <= most, "{} bytes in response to {}", reply.len(), bytes.len());
                }
                let reply = reply.to_vec();
                self.learn(self.client, &reply);
            }
            Verdict::Drop(_) => {}
            Verdict::Wait { otherwise, .. } => panic!("waits without limits: {otherwise:?}"),
        }
    }

    fn may_be_sent(&self, relay: RelayId, peer: SocketAddr, datagram: &[u8]) {
        let mirrored = self.mirrored(relay.allocation);
        assert_eq!(mirrored.client, self.client);
        assert!(self.config.peers.permits_endpoint(peer), "{peer} is refused by the peer rules");
        // RFC 8656 section 12: a channel outlives its permission and suffices for data to the peer.
        if datagram[0] & 0xC0 == 0x40 {
            let number = u16::from_be_bytes([datagram[0], datagram[1]]);
            assert_eq!(mirrored.channels.get(&number).map(|(peer, _)| *peer), Some(peer));
        } else {
            assert!(mirrored.permissions.contains_key(&peer.ip()), "{peer} has no permission");
        }
    }

    fn learn(&mut self, client: Client, reply: &[u8]) {
        assert!(reply.len() <= 2048, "{} bytes", reply.len());
        assert!(Message::from_bytes(reply).is_ok(), "the oracle cannot read {reply:02x?}");
        let view = View::new_checked(reply).expect("our own message is valid");
        if let (Some(realm), Some(nonce)) = (view.get(kind::REALM), view.get(kind::NONCE)) {
            self.challenges.retain(|(known, ..)| *known != client);
            self.challenges.push((client, realm.to_vec(), nonce.to_vec()));
        }
        self.tickets.extend(view.get(kind::MOBILITY_TICKET).map(<[u8]>::to_vec));
        if let Some(token) = view.get(kind::RESERVATION_TOKEN) {
            self.reservation = token.to_vec();
        }
    }

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

    fn peer_sends(&mut self, input: &mut Input<'_>) {
        let (Some(allocation), from) = (self.some_allocation(input), peer(input.byte())) else { return };
        let relay = RelayId { allocation, family: family(from) };
        let mirrored = self.table.get(allocation).expect("an allocation in the table");
        let passes = mirrored.permissions.contains_key(&from.ip()) && !mirrored.is_away;
        match self.server.data.from_peer(self.now, relay, from, input.bytes()) {
            Verdict::ToClient { client, .. } => assert_eq!((client, passes), (mirrored.client, true)),
            Verdict::Drop(Some(_)) => assert!(!passes, "{from} has a permission"),
            _ => panic!("neither relayed nor dropped"),
        }
    }

    fn icmp(&mut self, input: &mut Input<'_>) {
        let (Some(allocation), to) = (self.some_allocation(input), peer(input.byte())) else { return };
        let relay = RelayId { allocation, family: family(to) };
        let error = IcmpError { icmp_type: input.below(13), code: input.byte(), info: input.u32() };
        if let Verdict::Reply { client, .. } = self.server.data.from_icmp(self.now, relay, to, error) {
            let mirrored = self.mirrored(allocation);
            assert!(client == mirrored.client && mirrored.permissions.contains_key(&to.ip()));
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
        let relay = RelayId { allocation, family: family(from) };
        let mirrored = self.table.get(allocation).expect("an allocation in the table");
        if let PeerConnection::Accept { connection, client, bytes, .. } =
            self.server.peer_connected(self.now, relay, from)
        {
            assert!(client == mirrored.client && mirrored.permissions.contains_key(&from.ip()));
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
            OwnedUser::Name(name) => name,
            OwnedUser::Hash(_) => "alice".into(),
        };
        let key = Key::long_term(query.algorithm, &name, &query.realm, password(&name).as_bytes());
        let found = match input.below(5) {
            0 | 1 => LookupResult::Keys { username: name.clone(), identity: name, keys: vec![(key, None)] },
            2 => LookupResult::NoSuchUser,
            3 => LookupResult::Keys { username: name.clone(), identity: name, keys: vec![(key, Some(1))] },
            _ => LookupResult::Unavailable,
        };
        let reply = late(self.server.finish_lookup(self.now, query.lookup, found));
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
            0 => self.server.set_draining(true),
            1 => self.server.close_all(self.now, ClosedReason::Shutdown),
            _ => {
                if let Some(allocation) = self.some_allocation(input) {
                    assert!(self.server.close_one(self.now, allocation, ClosedReason::Administrator));
                }
            }
        }
    }

    fn upgrade(&mut self) {
        let written = self.table.iter().map(|(id, mirrored)| {
            let mut moved = self.server.snapshot(self.now, id).expect("an open allocation");
            moved.keep_arrival(|_| false);
            (mirrored.client, mirrored.is_away, serde_json::to_string(&moved).expect("plain data"))
        });
        let written: Vec<_> = written.collect();
        self.server.close_all(self.now, ClosedReason::Shutdown);
        self.hear();
        let policy = self.server.policy_mut().clone();
        self.server =
            Server::for_worker(Arc::new(self.config.clone()), policy, WorkerId::ONLY, seed(WorkerId::ONLY));
        self.opening.clear();
        self.lookups.clear();
        for (client, is_away, text) in &written {
            let moved: Moved = serde_json::from_str(text).expect("a serialized allocation");
            let restored = self.server.restore(self.now, moved, Link(9));
            let restored = restored.unwrap_or_else(|_| panic!("not restored"));
            self.hear();
            assert_eq!(self.mirrored(restored).client, *client);
            self.table.get_mut(restored).expect("the allocation was restored").is_away = *is_away;
        }
        assert_eq!(self.table.len(), written.len());
    }

    fn some_allocation(&self, input: &mut Input<'_>) -> Option<AllocationSlot> {
        let number = usize::from(input.byte());
        let (allocation, _) = self.table.iter().nth(number.checked_rem(self.table.len())?)?;
        Some(allocation)
    }

    fn mirrored(&self, allocation: AllocationSlot) -> &MirroredAllocation {
        self.table.get(allocation).expect("an allocation in the table")
    }

    fn learn_late(&mut self, reply: Option<(Client, Vec<u8>)>) {
        reply.into_iter().for_each(|(client, reply)| self.learn(client, &reply));
    }

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
                | Effect::Decline { .. }
                | Effect::MoveOver { .. }
                | Effect::Deleted { .. }
                | Effect::Fetch { .. }
                | Effect::Move(_)
                | Effect::Answer { .. }
                | Effect::Exported { .. }
                | Effect::Returned { .. } => panic!("an effect for another worker"),
                _ => {}
            }
        }
        assert!(told <= MOST_EFFECTS, "{told} effects from one event");
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
        assert_eq!(self.server.policy_mut().held(), allocations);
        assert!(allocations <= TOTAL);
        assert!(self.server.connections() <= MOST_CONNECTIONS * allocations);
        assert!(self.table.len() == 0 || self.server.poll_timeout().is_some());
        for (_, mirrored) in self.table.iter() {
            assert!(mirrored.permissions.len() <= MOST_BINDINGS && mirrored.channels.len() <= MOST_BINDINGS);
        }
    }

    /// Without refreshes, everything must expire.
    fn ends(mut self) {
        for (request, _) in std::mem::take(&mut self.opening) {
            let second = request.second.map(|_| OpenResult::NoCapacity);
            let _ = late(self.server.opened(self.now, request.allocation, OpenResult::NoCapacity, second));
        }
        self.hear();
        self.sleep(60);
        self.hear();
        self.sleep(2 * u64::from(self.config.limits.max_lifetime));
        self.hear();
        assert_eq!((self.server.allocations(), self.server.connections()), (0, 0));
        assert_eq!((self.server.policy_mut().held(), self.table.len()), (0, 0));
        assert_eq!(self.server.poll_timeout(), None);
    }
}

fn family(peer: SocketAddr) -> Family {
    if peer.is_ipv4() { Family::V4 } else { Family::V6 }
}

/// Response to an earlier request, if the verdict is one.
fn late(verdict: Verdict<'_>) -> Option<(Client, Vec<u8>)> {
    match verdict {
        Verdict::Reply { client, bytes, .. } => Some((client, bytes.to_vec())),
        Verdict::Drop(_) => None,
        Verdict::ToPeer { .. } | Verdict::ToClient { .. } | Verdict::Wait { .. } => {
            panic!("relayed although no datagram was fed")
        }
    }
}
