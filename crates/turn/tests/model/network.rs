//! Network that loses, duplicates and reorders datagrams. Each datagram goes to the server and to the model,
//! and their results must be identical.

use super::prelude::*;
use turnpike_turn::{
    server::{IcmpError, PeerConnection, ReplayGuard, Verdict, WorkerId},
    time::Now,
};

use super::{
    cast,
    clients::Memory,
    message::{Answer, Datagram, Learned, Told, check_attempt, check_framing, check_icmp},
    reference::{Allocation, DATAGRAMS, Expected, Model, Nonce, Place, family_of},
    requests::network,
    runtime::{Job, Mail},
    step::{Asked, Setup, Step, Way},
};
use crate::common::seed;

pub(super) struct Network {
    pub(super) setup: Setup,
    pub(super) model: Model,
    pub(super) workers: Vec<Worker>,
    pub(super) ends: Vec<End>,
    flying: Vec<Flight>,
    pub(super) sockets: BTreeMap<SocketAddr, (usize, RelayId)>,
    /// Closed relay sockets, which late datagrams may still refer to.
    pub(super) closed: Vec<(usize, RelayId)>,
    /// Connections to peers, including attempts; if bound, with the client's end.
    pub(super) connections: BTreeMap<(usize, u32), Option<usize>>,
    pub(super) reserved: HashMap<[u8; 8], SocketAddr>,
    pub(super) ports: u16,
    pub(super) memory: Memory,
    pub(super) process: u8,
    pub(super) replays: ReplayGuard,
    pub(super) reached: Reached,
    pub(super) counted: Stats,
    payloads: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reached {
    pub(super) upgraded: u64,
    /// Another process took over an allocation with a pending move.
    pub(super) arriving: u64,
    /// A process refused to take over because of its limits.
    pub(super) refused: u64,
    pub(super) denied: u64,
    /// A reload ended permissions of an allocation in transit between two workers.
    pub(super) denied_on_the_way: u64,
}

impl Reached {
    pub(super) fn merge(&mut self, other: Self) {
        let Self { upgraded, arriving, refused, denied, denied_on_the_way } = other;
        self.upgraded += upgraded;
        self.arriving += arriving;
        self.refused += refused;
        self.denied += denied;
        self.denied_on_the_way += denied_on_the_way;
    }
}

pub(super) struct Worker {
    pub(super) server: Server<TestPolicy>,
    pub(super) mail: VecDeque<Mail>,
    pub(super) full: bool,
    pub(super) jobs: VecDeque<Job>,
    pub(super) questions: VecDeque<LookupId>,
}

pub(super) struct End {
    pub(super) worker: usize,
    /// Incremented with each connection, and whenever it is passed to another worker.
    pub(super) life: u64,
    pub(super) open: bool,
    /// The 5-tuple is in transit between two workers.
    pub(super) travels: bool,
    /// Peer connection to which this client connection is bound.
    pub(super) bound: Option<(usize, u32)>,
}

#[derive(Clone)]
struct Flight {
    from: usize,
    life: u64,
    datagram: Datagram,
    bytes: Vec<u8>,
}

pub(super) enum Done {
    ToPeer { relay: RelayId, peer: SocketAddr, payload: Vec<u8>, dont_fragment: bool },
    ToClient { to: Source, bytes: Vec<u8> },
    Reply { to: Source, bytes: Vec<u8> },
    Drop(Option<DropReason>),
}

impl From<Verdict<'_>> for Done {
    fn from(verdict: Verdict<'_>) -> Self {
        match verdict {
            Verdict::ToPeer { relay, peer, payload, dont_fragment } => {
                Self::ToPeer { relay, peer, payload: payload.to_vec(), dont_fragment }
            }
            Verdict::ToClient { client, link, header, payload, padding } => {
                let padding = vec![0; usize::from(padding)];
                let bytes = [header.as_slice(), payload, &padding].concat();
                Self::ToClient { to: Source { client, link }, bytes }
            }
            Verdict::Reply { client, link, bytes } => {
                Self::Reply { to: Source { client, link }, bytes: bytes.to_vec() }
            }
            Verdict::Drop(reason) => Self::Drop(reason),
            Verdict::Wait { otherwise, .. } => panic!("waits without limits: {otherwise:?}"),
        }
    }
}

impl Network {
    pub(super) fn new(setup: Setup) -> Self {
        let workers = setup.workers;
        let model = Model::new(setup.clone());
        let (policy, config) = (policy(&setup), cast::Rules::default().config());
        let worker = |number| Worker {
            server: server(number, workers, &policy, &config, 0),
            mail: VecDeque::new(),
            full: false,
            jobs: VecDeque::new(),
            questions: VecDeque::new(),
        };
        let end = |number: usize| End {
            worker: number % workers,
            life: 0,
            open: true,
            travels: false,
            bound: None,
        };
        Self {
            model,
            workers: (0..workers).map(worker).collect(),
            ends: (0..cast::CLIENTS).map(end).collect(),
            setup,
            flying: Vec::new(),
            sockets: BTreeMap::new(),
            closed: Vec::new(),
            connections: BTreeMap::new(),
            reserved: HashMap::new(),
            ports: 50_000,
            memory: Memory::default(),
            process: 0,
            replays: config.replays.clone(),
            reached: Reached::default(),
            counted: Stats::default(),
            payloads: 0,
        }
    }

    pub(super) fn step(&mut self, step: &Step) {
        match *step {
            Step::Ask { from, knows, user, realm, nonce, ref asked, way } => {
                let whom = if knows { self.aim(from, asked) } else { None };
                self.ask(whom, from, (user, realm, nonce), asked, way);
            }
            Step::Data { from, knows, channel, peer, length, way } => {
                let whom = if knows { self.aim(from, &Asked::Permit(Vec::new())) } else { None };
                self.data(whom, from, channel, peer, length, way);
            }
            Step::Noise { from, keepalive } => {
                let datagram = if keepalive { Datagram::Keepalive } else { Datagram::Noise };
                self.send(from, datagram, Way::AT_ONCE);
            }
            Step::Deliver { which, again, way } => self.deliver(which, again, way),
            Step::Lose(which) => {
                if let Some(which) = pick(which, self.flying.len()) {
                    self.flying.remove(which);
                }
            }
            Step::Copy { which, from } => self.copy(which, from),
            Step::FromPeer { relay, peer, length } => self.peer_sends(relay, peer, length),
            Step::Late { relay, peer } => self.peer_sends_late(relay, peer),
            Step::Icmp { relay, peer, error } => self.icmp(relay, peer, error),
            Step::PeerConnects { relay, peer } => self.peer_connects(relay, peer),
            Step::ConnectionEnds { which, bytes } => self.connection_ends(which, bytes),
            Step::Disconnect(from) => self.disconnect(from),
            Step::Rivals { from, ends } => self.rivals(from, ends),
            Step::Overtaken { from, which, everywhere } => self.overtaken(from, which, everywhere),
            Step::Work { worker, luck } => _ = self.work(worker % self.setup.workers, luck),
            Step::Mail(worker) => _ = self.mail(worker % self.setup.workers),
            Step::Settle(luck) => self.settle(luck),
            Step::Full { worker, full } => self.workers[worker % self.setup.workers].full = full,
            Step::Prompt(prompt) => self.set_prompt(prompt),
            Step::Store { worker, says } => _ = self.store_answers(worker % self.setup.workers, says),
            Step::Sleep { ms, exact } => self.sleep(ms, exact),
            Step::Brink { which, before } => self.brink(which, before),
            Step::Reload { worker, variant } => self.reload(worker, variant),
            Step::Deny { worker, which } => self.deny(worker, which),
            Step::Drain(worker) => self.drain(worker % self.setup.workers),
            Step::Close(which) => self.close_one(which),
            Step::Across { which, datagrams } => self.across(which, datagrams),
            Step::Upgrade { remembers, variant, tight } => self.upgrade(remembers, variant, tight),
            Step::Probe => self.probe(),
        }
        self.compare();
    }

    pub(super) fn finish(mut self) {
        self.settle(0);
        self.probe();
        self.compare();
        // Sleeps past every deadline. Messages in transit have arrived by then.
        self.sleep(3_700_000, true);
        self.settle(0);
        self.sleep(3_700_000, false);
        self.settle(0);
        self.compare();
        assert_eq!(self.model.held_by_all(), 0, "the model must be empty");
        for (at, worker) in self.workers.iter_mut().enumerate() {
            assert_eq!(worker.server.allocations(), 0, "allocations of worker {at}");
            assert_eq!(worker.server.connections(), 0, "connections of worker {at}");
            assert_eq!(worker.server.poll_timeout(), None, "timers of worker {at}");
        }
        assert!(self.sockets.is_empty(), "relay sockets left open: {:?}", self.sockets);
        assert!(self.connections.is_empty(), "connections: {:?}", self.connections);
        assert_eq!(self.workers[0].server.policy_mut().held(), 0, "quotas");
    }

    pub(super) fn now(&self, at: usize) -> Now {
        Now { ms: Model::clock(at, self.model.ms), unix: self.model.unix }
    }

    pub(super) fn source(&self, from: usize) -> Source {
        let client = cast::client(from);
        let is_plain = client.listener.0 == 0;
        let link = if is_plain { DATAGRAMS } else { Link(1000 * (from as u64 + 1) + self.ends[from].life) };
        Source { client, link }
    }

    pub(super) fn is_here(&self, source: &Source) -> bool {
        let from = cast::number_of(&source.client);
        self.ends[from].open && self.source(from).link == source.link
    }

    pub(super) fn payload(&mut self, length: usize) -> Vec<u8> {
        self.payloads += 1;
        let stamp = self.payloads.to_be_bytes();
        (0..length).map(|at| stamp[at % 4] ^ (at / 4).to_le_bytes()[0]).collect()
    }

    pub(super) fn send(&mut self, from: usize, datagram: Datagram, way: Way) {
        let from = from % cast::CLIENTS;
        if self.ends[from].bound.is_some() || self.ends[from].travels {
            return;
        }
        if !self.ends[from].open {
            let workers = self.setup.workers;
            let end = &mut self.ends[from];
            (end.open, end.worker, end.life) = (true, from % workers, end.life + 1);
        }
        let bytes = datagram.bytes();
        let flight = Flight { from, life: self.ends[from].life, datagram, bytes };
        // Streams preserve the order and lose nothing.
        if way.flies && !Model::is_stream(&cast::client(from)) {
            self.flying.push(flight);
        } else {
            self.arrives(&flight, way);
        }
    }

    fn deliver(&mut self, which: usize, again: bool, way: Way) {
        let Some(which) = pick(which, self.flying.len()) else { return };
        let flight = if again { self.flying[which].clone() } else { self.flying.remove(which) };
        self.arrives(&flight, way);
    }

    /// Acts as an attacker on the network: sends the same bytes from another 5-tuple.
    fn copy(&mut self, which: usize, from: usize) {
        let Some(which) = pick(which, self.flying.len()) else { return };
        let datagram = self.flying[which].datagram.clone();
        self.send(from, datagram, Way::AT_ONCE);
    }

    fn arrives(&mut self, flight: &Flight, way: Way) {
        let Flight { from, life, ref datagram, ref bytes } = *flight;
        let end = &self.ends[from];
        if end.life != life || !end.open || end.travels || end.bound.is_some() {
            return;
        }
        let (at, source) = (end.worker, self.source(from));
        let learned = self.feed(at, source, datagram, bytes);
        if way.heard
            && let Some((learned, answered)) = learned
        {
            self.learn(from, &learned, &answered);
        }
        if way.settle {
            self.settle(way.luck);
        }
    }

    pub(super) fn feed(
        &mut self,
        at: usize,
        source: Source,
        datagram: &Datagram,
        bytes: &[u8],
    ) -> Option<(Learned, Answer)> {
        let expected = self.model.from_client(at, source, datagram);
        let now = self.now(at);
        let done = self.workers[at].server.from_client(now, &source, bytes).into();
        self.judge(at, expected, &done, datagram)
    }

    /// Compares the verdict with the expected one and executes its effects.
    pub(super) fn judge(
        &mut self,
        at: usize,
        expected: Expected,
        done: &Done,
        datagram: &Datagram,
    ) -> Option<(Learned, Answer)> {
        let learned = self.compare_verdict(&expected, done);
        self.take_effects(at, Some(expected), datagram);
        learned
    }

    fn compare_verdict(&mut self, expected: &Expected, done: &Done) -> Option<(Learned, Answer)> {
        let mut learned = None;
        let agrees = match (expected, done) {
            (
                Expected::ToPeer { relay, peer, payload, dont_fragment },
                Done::ToPeer { relay: by, peer: to, payload: bytes, dont_fragment: df },
            ) => (relay, peer, payload, dont_fragment) == (by, to, bytes, df),
            (Expected::ToClient { to, framing, payload }, Done::ToClient { to: client, bytes }) => {
                check_framing(*framing, payload, bytes).unwrap_or_else(|why| panic!("{why}"));
                to == client
            }
            (Expected::Icmp { to, peer, value }, Done::Reply { to: client, bytes }) => {
                check_icmp(*peer, *value, bytes).unwrap_or_else(|why| panic!("{why}"));
                to == client
            }
            (Expected::Reply { to, answer }, Done::Reply { to: client, bytes }) => {
                learned = Some((self.read(answer, to, bytes), answer.clone()));
                to == client
            }
            (Expected::Drop(reason), Done::Drop(Some(dropped))) => reason == dropped,
            (Expected::Goes(_) | Expected::Answered { .. }, Done::Drop(None)) => true,
            _ => false,
        };
        assert!(agrees, "expected {expected:?}, got {}", done.name());
        learned
    }

    pub(super) fn read(&mut self, answer: &Answer, to: &Source, bytes: &[u8]) -> Learned {
        let learned = answer.check(bytes).unwrap_or_else(|why| panic!("{answer:?}: {why}"));
        if let (Some(nonce), Told::Challenge { realm, repeats: None, .. }) = (&learned.nonce, &answer.told) {
            let given = Nonce { network: network(to.client.address.ip()), realm, unix: self.model.unix };
            let before = self.model.nonces.insert(nonce.clone(), given);
            assert!(
                before.is_none_or(|before| before == given),
                "one nonce for both {before:?} and {given:?}"
            );
        }
        self.model.remember_ticket(answer, learned.ticket.clone());
        learned
    }

    fn relay(&self, which: usize, transport: RelayTransport) -> Option<(usize, RelayId)> {
        let is_such = |(at, relay): &&(usize, RelayId)| {
            let number = self.model.named(*at, relay.allocation);
            number.is_some_and(|number| self.model.allocations[number].transport == transport)
        };
        let such: Vec<_> = self.sockets.values().filter(is_such).copied().collect();
        pick(which, such.len()).map(|which| such[which])
    }

    fn peer_sends(&mut self, relay: usize, peer: u8, length: u16) {
        let Some((at, relay)) = self.relay(relay, RelayTransport::Udp) else { return };
        let Some(peer) = self.sending_peer(peer, at, relay) else { return };
        self.from_peer(at, relay, peer, usize::from(length));
    }

    /// Delivers a datagram or connection that was received before its socket was closed.
    fn peer_sends_late(&mut self, relay: usize, peer: u8) {
        let Some(which) = pick(relay, self.closed.len()) else { return };
        let (at, relay) = self.closed[which];
        let is_gone = self.model.named(at, relay.allocation).is_none();
        match self.sending_peer(peer, at, relay).filter(|_| is_gone) {
            Some(to) if peer.is_multiple_of(2) => self.from_peer(at, relay, to, 10),
            Some(to) => self.connects(at, relay, to),
            None => {}
        }
    }

    /// Peer that sends to this relay socket. `peer` below 5 selects any peer, otherwise a permitted one.
    fn sending_peer(&self, peer: u8, at: usize, relay: RelayId) -> Option<SocketAddr> {
        let it = self.model.named(at, relay.allocation).map(|number| &self.model.allocations[number]);
        let is_permitted = |peer: &SocketAddr| it.is_some_and(|it| it.permits(peer.ip(), self.model.ms));
        let of_family = |peer: &SocketAddr| family_of(peer.ip()) == relay.family;
        let peers: Vec<_> = (0..cast::SENDING_PEERS).map(cast::peer).filter(of_family).collect();
        let permitted: Vec<_> = peers.iter().copied().filter(is_permitted).collect();
        let peers = if peer >= 5 && !permitted.is_empty() { permitted } else { peers };
        pick(usize::from(peer), peers.len()).map(|which| peers[which])
    }

    fn from_peer(&mut self, at: usize, relay: RelayId, peer: SocketAddr, length: usize) {
        let peer = self.model.workers[at].rules.reached(peer);
        let payload = self.payload(length);
        let expected = self.model.from_peer(at, relay, peer, &payload);
        let now = self.now(at);
        let done = self.workers[at].server.data.from_peer(now, relay, peer, &payload).into();
        self.judge(at, expected, &done, &Datagram::Noise);
    }

    fn icmp(&mut self, relay: usize, peer: u8, error: (u8, u8, u32)) {
        let Some((at, relay)) = self.relay(relay, RelayTransport::Udp) else { return };
        let Some(peer) = self.sending_peer(peer, at, relay) else { return };
        let peer = self.model.workers[at].rules.reached(peer);
        let expected = self.model.from_icmp(at, relay, peer, error);
        let (now, (icmp_type, code, info)) = (self.now(at), error);
        let error = IcmpError { icmp_type, code, info };
        let done = self.workers[at].server.data.from_icmp(now, relay, peer, error).into();
        self.judge(at, expected, &done, &Datagram::Noise);
    }

    fn peer_connects(&mut self, relay: usize, peer: u8) {
        let Some((at, relay)) = self.relay(relay, RelayTransport::Tcp) else { return };
        let Some(peer) = self.sending_peer(peer, at, relay) else { return };
        self.connects(at, relay, peer);
    }

    fn connects(&mut self, at: usize, relay: RelayId, peer: SocketAddr) {
        let peer = self.model.workers[at].rules.reached(peer);
        let name = self.model.known_as(at, relay, peer);
        let expected = self.model.peer_connected(at, relay, peer);
        let now = self.now(at);
        match (self.workers[at].server.peer_connected(now, relay, peer), expected) {
            (PeerConnection::Accept { connection, client, link, bytes }, Ok((number, to))) => {
                assert_eq!(Source { client, link }, to);
                check_attempt(name, connection.0, bytes).unwrap_or_else(|why| panic!("{why}"));
                self.model.name_connection(number, connection.0);
                assert!(
                    self.connections.insert((at, connection.0), None).is_none(),
                    "a CONNECTION-ID was reused"
                );
                self.memory.ids.push(connection.0);
            }
            (PeerConnection::Refuse(reason), Err(expected)) => assert_eq!(reason, expected),
            (PeerConnection::Accept { .. }, expected) => panic!("accepted, expected {expected:?}"),
            (PeerConnection::Refuse(reason), expected) => panic!("{reason:?}, expected {expected:?}"),
        }
        self.take_effects(at, None, &Datagram::Noise);
    }

    /// Each client sends on every channel and to every peer, and every peer to every relayed address.
    pub(super) fn probe(&mut self) {
        for at in 0..self.setup.workers {
            for number in self.model.in_slots(at) {
                let it = &self.model.allocations[number];
                let (client, link, away) = (it.client, it.link, it.away);
                let relays = [Family::V4, Family::V6].into_iter().filter(|family| it.has(*family));
                let relays: Vec<RelayId> =
                    relays.map(|family| RelayId { allocation: it.id(), family }).collect();
                let is_udp = it.transport == RelayTransport::Udp;
                let source = Source { client, link };
                let tries = if away { 0 } else { cast::PEERS };
                for which in 0..tries {
                    let channel = u16::try_from(which).expect("few");
                    let data = self.payload(3);
                    let peer = cast::peer(which);
                    for datagram in [
                        Datagram::ChannelData { number: 0x4000 + channel, data: data.clone() },
                        Datagram::Send { peer, data, dont_fragment: false },
                    ] {
                        let bytes = datagram.bytes();
                        self.feed(at, source, &datagram, &bytes);
                    }
                }
                for relay in relays.into_iter().filter(|_| is_udp) {
                    for peer in (0..cast::SENDING_PEERS).map(cast::peer) {
                        if family_of(peer.ip()) == relay.family {
                            self.from_peer(at, relay, peer, 5);
                        }
                    }
                }
            }
        }
    }

    pub(super) fn compare(&mut self) {
        let mut relays = BTreeMap::new();
        let mut connections = BTreeSet::new();
        for it in &self.model.allocations {
            let Place::At(at, allocation) = it.place else { continue };
            for (address, _) in it.relays.iter().flatten() {
                relays.insert(*address, (at, RelayId { allocation, family: family_of(address.ip()) }));
            }
            connections.extend(it.connections.iter().map(|connection| (at, connection.id)));
        }
        assert_eq!(self.sockets, relays, "open relay sockets");
        assert!(self.connections.keys().eq(&connections), "{:?}, expected {connections:?}", self.connections);
        assert!(self.model.told.is_empty(), "effects missing: {:?}", self.model.told);
        assert!(self.model.moving.is_empty(), "moves missing: {:?}", self.model.moving);
        for at in 0..self.setup.workers {
            self.compare_views(at);
            let server = &self.workers[at].server;
            assert!(!server.has_effects());
            let desk = &self.model.workers[at];
            if *server.stats() != desk.stats {
                let both = server.stats().counters().zip(desk.stats.counters().map(|(.., value)| value));
                let other: Vec<_> = both.filter(|((.., value), model)| value != model).collect();
                panic!("counters of worker {at}, actual and expected: {other:?}");
            }
            assert_eq!(server.allocations(), self.model.of(at).count(), "allocations of worker {at}");
            assert_eq!(server.connections(), self.model.connections_at(at), "connections of worker {at}");
            match (server.poll_timeout(), self.model.next_deadline(at)) {
                (due, Some(deadline)) => {
                    let deadline = Model::clock(at, deadline);
                    assert!(
                        due.is_some_and(|due| due <= deadline),
                        "worker {at} sleeps until {due:?}, past {deadline}"
                    );
                }
                (due, None) if server.allocations() == 0 => {
                    assert_eq!(due, None, "worker {at} has a timer without a deadline");
                }
                _ => {}
            }
        }
        let held = self.workers[0].server.policy_mut().held.borrow().clone();
        for (realm, user) in cast::REALMS.into_iter().flat_map(|realm| cast::USERS.map(|user| (realm, user)))
        {
            let key = if realm == REALM { user.to_owned() } else { format!("{user}@{realm}") };
            let counted = held.get(&key).copied().unwrap_or(0);
            assert_eq!(counted, self.model.held(realm, user), "the quota of {key}");
        }
        let at = self.workers[0].server.policy_mut().prefixes.borrow().clone();
        for prefix in (0..cast::CLIENTS).map(|number| network(cast::client(number).address.ip())) {
            let counted = at.get(&prefix).copied().unwrap_or(0);
            assert_eq!(counted, self.model.held_at(prefix), "the quota of {prefix}");
        }
    }

    fn compare_views(&mut self, at: usize) {
        let (now, ms) = (self.now(at), self.model.ms);
        let open = self.model.of(at).map(|(_, it)| it).filter(|it| it.pending.is_none());
        let mut open: BTreeMap<u32, &Allocation> = open.map(|it| (it.id().index, it)).collect();
        let server = &mut self.workers[at].server;
        for slot in 0..server.slots() {
            let (view, it) = (server.view(now, slot), open.remove(&slot));
            assert_eq!(view.is_some(), it.is_some(), "slot {slot} of worker {at}");
            let (Some(view), Some(it)) = (view, it) else { continue };
            assert_eq!((view.allocation(), view.id()), (it.id(), it.name));
            assert_eq!((&**view.realm(), view.username(), view.identity()), (it.realm, it.user, it.user));
            assert_eq!((view.client(), view.transport()), (it.client, cast::transport(it.client.listener)));
            assert_eq!((view.relay_transport(), view.connections()), (it.transport, it.connections.len()));
            assert_eq!((view.is_mobile(), view.is_away()), (it.mobility.is_some(), it.away));
            assert_eq!(
                (view.age_ms(), view.to_peer(), view.to_client()),
                (ms - it.opened, it.to_peer, it.to_client)
            );
            let left = |until: u64| until.saturating_sub(ms);
            let relayed = it.relays.iter().flatten().map(|(address, until)| (*address, left(*until)));
            assert!(
                view.relayed().eq(relayed),
                "{:?}, expected {:?}",
                view.relayed().collect::<Vec<_>>(),
                it.relays
            );
            let permissions: BTreeMap<_, _> = view.permissions().filter(|(_, left)| *left > 0).collect();
            let expected = it.permissions.iter().map(|(ip, until)| (*ip, left(*until)));
            assert_eq!(permissions, expected.filter(|(_, left)| *left > 0).collect());
            let channels: BTreeMap<_, _> =
                view.channels().map(|(number, peer, left)| (number, (peer, left))).collect();
            let expected = it.channels.iter().map(|(number, (peer, until))| (*number, (*peer, left(*until))));
            let alive = |(_, (_, left)): &(u16, (SocketAddr, u64))| *left > 0;
            assert_eq!(
                channels.into_iter().filter(alive).collect::<Vec<_>>(),
                expected.filter(alive).collect::<Vec<_>>()
            );
        }
        assert!(open.is_empty(), "missing from the slots of worker {at}: {open:?}");
    }
}

impl Done {
    fn name(&self) -> String {
        match self {
            Self::ToPeer { relay, peer, payload, .. } => {
                format!("{} bytes to {peer} via {relay:?}", payload.len())
            }
            Self::ToClient { to, bytes } => format!("{} bytes to {to:?}", bytes.len()),
            Self::Reply { to, bytes } => {
                format!("a reply to {to:?}: {:?}", crate::common::Reply(bytes.clone()).code())
            }
            Self::Drop(reason) => format!("dropped: {reason:?}"),
        }
    }
}

pub(super) fn pick(which: usize, of: usize) -> Option<usize> {
    (of > 0).then(|| which % of)
}

pub(super) fn policy(setup: &Setup) -> TestPolicy {
    let relayed = vec![(cast::client(cast::LOOP).address, RelayTransport::Udp)];
    let Setup { per_user, per_prefix, total, .. } = *setup;
    let timed_until = cast::TIMED_UNTIL;
    TestPolicy { per_user, per_prefix, total, relayed, timed_until, ..TestPolicy::default() }
}

/// Shares the tables of the first configuration. Each process has different random numbers.
pub(super) fn server(
    number: usize,
    workers: usize,
    policy: &TestPolicy,
    config: &Arc<ServerConfig>,
    process: u8,
) -> Server<TestPolicy> {
    let of = |count: usize| u16::try_from(count).expect("few enough workers");
    let worker_id = WorkerId::new(of(number), of(workers)).expect("a valid worker");
    let mut seed = seed(worker_id);
    seed.0[31] = process;
    Server::for_worker(Arc::clone(config), policy.clone(), worker_id, seed)
}

pub(super) fn is_for_the_log(effect: &Effect) -> bool {
    matches!(effect, Effect::Refused { .. } | Effect::PeerRefused { .. } | Effect::RequestRefused { .. })
}
