//! A whole server goes on in another process: whatever happened before, and whatever comes, nobody can tell it from one that stayed.

use std::collections::BTreeMap;

use crate::common::*;
use proptest::prelude::*;
use turnpike_turn::server::{
    Bandwidth, ClosedReason, DropReason, Effect, Link, Moved, Rates, RelayId, ReplayGuard, ServerConfig,
    stats::MobilityEvent,
};

/// A server, and which of its allocations are whose: clients are named by their ports.
struct Process {
    world: World,
    replays: ReplayGuard,
    relays: BTreeMap<u16, RelayId>,
    ends: Vec<End>,
}

/// Port, reason, age, and what it counted.
type End = (u16, ClosedReason, u64, (u64, u64), (u64, u64));

impl Process {
    fn new(config: ServerConfig) -> Self {
        let replays = config.replays.clone();
        Self { world: World::with(config), replays, relays: BTreeMap::new(), ends: Vec::new() }
    }

    /// The same server in another process, whose clock is another.
    fn upgraded(mut self) -> Self {
        let mut there = Self::new(config());
        let World { server, now, client, ports, .. } = &mut self.world;
        there.world.now = turnpike_turn::time::Now { ms: 5_000, unix: now.unix };
        (there.world.client, there.world.ports) = (*client, *ports);
        assert!(there.replays.take_over(&self.replays.to_bytes()));
        there.world.server.remember_deletions(there.world.now, &server.deletions(*now));
        for allocation in server.portable(|_| true) {
            let moved = server.snapshot(*now, allocation).expect("it is there");
            let text = serde_json::to_string(&moved).unwrap();
            let moved: Moved = serde_json::from_str(&text).unwrap();
            server.surrender(*now, allocation);
            let now = there.world.now;
            let restored = there.world.server.restore(now, moved, Link(0));
            let restored = restored.unwrap_or_else(|_| panic!("there is room"));
            let its = self.relays.iter().find(|(_, relay)| relay.allocation == allocation);
            let (port, relay) = its.expect("somebody's");
            there.relays.insert(*port, RelayId { allocation: restored, ..*relay });
        }
        assert_eq!((server.allocations(), server.gate_mut().held()), (0, 0));
        let left: Vec<Effect> = std::iter::from_fn(|| server.poll_effect()).collect();
        assert!(left.iter().all(|effect| matches!(effect, Effect::Exported { .. })), "{left:?}");
        there.ends = self.ends;
        there.world.all_effects();
        there
    }

    fn feed(&mut self, port: u16, bytes: &[u8]) -> Outcome {
        self.world.client = client(port);
        let mut outcome = self.world.feed(bytes);
        if let Outcome::Open(request) = &outcome {
            let reply = self.world.open(request);
            self.relays.insert(port, RelayId { allocation: request.allocation, ..RELAY });
            outcome = Outcome::Reply(reply.0);
        }
        self.note();
        comparable(outcome)
    }

    fn peer_sends(&mut self, port: u16, peer: &str) -> Option<Outcome> {
        let relay = *self.relays.get(&port)?;
        Some(comparable(self.world.peer_sends(relay, peer, b"from a peer")))
    }

    fn sleep(&mut self, seconds: u64) {
        self.world.sleep(seconds);
        self.note();
    }

    fn note(&mut self) {
        for effect in self.world.effects() {
            if let Effect::Closed { client, reason, lived_ms, to_peer, to_client, .. } = effect {
                self.relays.remove(&client.address.port());
                self.ends.push((client.address.port(), reason, lived_ms, to_peer, to_client));
            }
        }
        self.ends.sort_by_key(|end| (end.0, end.2));
    }
}

const RELAY: RelayId = RelayId {
    allocation: turnpike_turn::server::AllocationId { index: 0, generation: 0 },
    family: turnpike_turn::server::Family::V4,
};

/// Without the names that each process has for allocations, and the transaction IDs of indications.
fn comparable(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::ToPeer { peer, payload, dont_fragment, .. } => {
            Outcome::ToPeer { relay: RELAY, peer, payload, dont_fragment }
        }
        Outcome::ToClient { client, mut bytes } => {
            if bytes[0] < 0x40 {
                bytes[8..20].fill(0);
            }
            Outcome::ToClient { client, bytes }
        }
        outcome => outcome,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u16),
    Refresh(u16, u32),
    Permit(u16, u8),
    Bind(u16, u16, u8),
    Data(u16, u16),
    Copy(usize),
    FromPeer(u16, u8),
    Sleep(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let port = 40_000..40_004_u16;
    let (peer, channel) = (0..4_u8, 0x4000..0x4006_u16);
    prop_oneof![
        port.clone().prop_map(Step::Allocate),
        (port.clone(), prop_oneof![Just(0), 100..2000_u32])
            .prop_map(|(port, time)| Step::Refresh(port, time)),
        (port.clone(), peer.clone()).prop_map(|(port, peer)| Step::Permit(port, peer)),
        (port.clone(), channel.clone(), peer.clone())
            .prop_map(|(port, channel, peer)| Step::Bind(port, channel, peer)),
        (port.clone(), channel).prop_map(|(port, channel)| Step::Data(port, channel)),
        (0..50_usize).prop_map(Step::Copy),
        (port, peer).prop_map(|(port, peer)| Step::FromPeer(port, peer)),
        prop_oneof![1..30_u64, 200..700_u64].prop_map(Step::Sleep),
    ]
}

fn peer(number: u8) -> String {
    format!("198.41.0.{}:{}", 4 + number / 2, 7000 + u16::from(number))
}

/// Has all of these processes do the same; whether they said the same.
fn go(
    processes: &mut [Process],
    steps: &[Step],
    sent: &mut Vec<(u16, Vec<u8>)>,
) -> Result<(), TestCaseError> {
    for step in steps {
        let alice = processes[0].world.credentials("alice", Scheme::Md5);
        let request = match step {
            Step::Allocate(port) => Some((*port, Ask::allocate().signed(&alice).bytes())),
            Step::Refresh(port, time) => Some((*port, Ask::refresh(*time).signed(&alice).bytes())),
            Step::Permit(port, at) => Some((*port, Ask::permit(&peer(*at)).signed(&alice).bytes())),
            Step::Bind(port, channel, at) => {
                Some((*port, Ask::bind(*channel, &peer(*at)).signed(&alice).bytes()))
            }
            Step::Data(port, channel) => Some((*port, channel_data(*channel, b"to a peer"))),
            Step::Copy(which) => sent.get(*which).cloned(),
            Step::FromPeer(port, at) => {
                let heard: Vec<_> =
                    processes.iter_mut().map(|process| process.peer_sends(*port, &peer(*at))).collect();
                prop_assert!(heard.windows(2).all(|two| two[0] == two[1]), "{step:?}: {heard:?}");
                None
            }
            Step::Sleep(seconds) => {
                processes.iter_mut().for_each(|process| process.sleep(*seconds));
                None
            }
        };
        if let Some((port, bytes)) = request {
            let said: Vec<_> = processes.iter_mut().map(|process| process.feed(port, &bytes)).collect();
            prop_assert!(said.windows(2).all(|two| two[0] == two[1]), "{step:?}: {said:?}");
            sent.push((port, bytes));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        // Each is some hundred signed requests.
        cases: 64,
        ..crate::kept_seeds()
    })]

    /// Twice upgraded, once upgraded, and never.
    #[test]
    fn nobody_can_tell_an_upgraded_server_from_one_that_stayed(
        first in prop::collection::vec(step(), 1..40),
        second in prop::collection::vec(step(), 1..20),
        third in prop::collection::vec(step(), 1..40),
    ) {
        let mut processes: Vec<Process> = (0..3).map(|_| Process::new(config())).collect();
        let mut sent = Vec::new();
        go(&mut processes, &first, &mut sent)?;
        for _ in 0..2 {
            let goes = processes.remove(1);
            processes.push(goes.upgraded());
        }
        go(&mut processes, &second, &mut sent)?;
        let goes = processes.pop().expect("three");
        processes.push(goes.upgraded());
        go(&mut processes, &third, &mut sent)?;
        for process in &mut processes {
            // Until each has expired.
            process.sleep(3600);
            prop_assert_eq!((process.world.server.allocations(), process.world.server.gate_mut().held()), (0, 0));
        }
        let ends: Vec<_> = processes.iter().map(|process| &process.ends).collect();
        prop_assert!(ends.windows(2).all(|two| two[0] == two[1]), "{ends:?}");
    }
}

#[test]
fn a_client_that_was_on_its_way_arrives_in_the_other_process() {
    for workers in [1, 2] {
        let mut here = World::workers(&config(), workers);
        let last = here.len() - 1;
        let alice = here[0].credentials("alice", Scheme::Md5);
        let reply = here[0].ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success();
        let relay = here[0].last_opened();
        here[0].ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
        // It shows its ticket from elsewhere, to the worker where it is now; and then there is another process.
        let present = Ask::present(&reply.ticket().unwrap()).signed(&alice).bytes();
        let new = client(50_001);
        if workers == 1 {
            here[0].client = new;
            assert!(matches!(here[0].feed(&present), Outcome::Reply(_)));
        } else {
            let (outcome, pending_move) = here[0].forwarded(1, new, &present);
            assert!(matches!(outcome, Outcome::Reply(_)), "{outcome:?}");
            here[1].server.expect(pending_move.expect("its client is expected there"));
        }
        let mut there = World::workers(&config(), workers);
        for (here, there) in here.iter_mut().zip(&mut there) {
            there.now.ms = 77_000;
            for pending_move in here.server.expected() {
                let text = serde_json::to_string(&pending_move).unwrap();
                there.server.expect(serde_json::from_str(&text).unwrap());
            }
        }
        let (before, now) = (here[0].now, there[0].now);
        let moved = here[0].server.snapshot(before, relay.allocation).expect("it is there");
        let restored = there[0].server.restore(now, moved, Link(0)).unwrap_or_else(|_| panic!());
        there[last].client = new;
        let outcome = there[last].feed(&channel_data(0x4000, b"here I am"));
        if workers == 1 {
            assert!(matches!(outcome, Outcome::ToPeer { relay, .. } if relay.allocation == restored));
            assert_eq!(there[0].server.stats().mobility[MobilityEvent::Moved as usize], 1);
        } else {
            let Outcome::Move(request) = outcome else { panic!("{outcome:?}") };
            let now = there[0].now;
            let moved = there[0].server.export(now, &request).expect("it is to go there");
            assert!(there[1].server.import(now, moved).is_ok());
        }
    }
}

#[test]
fn a_limit_of_bits_per_second_goes_on_where_it_was() {
    let config = || {
        let rates = Rates { per_allocation: Some(8_000_000), ..Rates::default() };
        ServerConfig { bandwidth: Bandwidth { rates, burst_ms: 100, ..Bandwidth::default() }, ..config() }
    };
    let passing = |world: &mut World| {
        let datagram = channel_data(0x4000, &[7; 1000]);
        (0..1000).take_while(|_| matches!(world.feed(&datagram), Outcome::ToPeer { .. })).count()
    };
    let mut here = World::with(config());
    let (alice, relay) = here.allocated();
    here.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    assert_eq!(passing(&mut here), 100);
    here.now.ms += 30;
    let moved = here.server.snapshot(here.now, relay.allocation).expect("it is there");
    let text = serde_json::to_string(&moved).unwrap();
    let mut there = World::with(config());
    there.now.ms = 123_456;
    there.client = here.client;
    let moved: Moved = serde_json::from_str(&text).unwrap();
    there.server.restore(there.now, moved, Link(0)).unwrap_or_else(|_| panic!("there is room"));
    there.all_effects();
    there.now.ms += 5;
    assert_eq!(passing(&mut there), 35);
}

#[test]
fn what_needs_something_of_its_process_stays_there() {
    let mut here = World::with(streams());
    let is_datagrams = |link: Link| link == Link(0);
    let (_, udp) = here.allocated();
    here.client = stream(41_500);
    let bob = here.credentials("bob", Scheme::Md5);
    let allocate = Ask::allocate().raw(TICKET, &[]).signed(&bob).bytes();
    let source = turnpike_turn::server::Source { client: here.client, link: Link(9) };
    here.server.from_client(here.now, &source, &allocate);
    let Some(Effect::Open(request)) = here.server.poll_effect() else { panic!() };
    assert_eq!(here.server.portable(|_| true).len(), 1, "one that is being made is nobody's to give");
    here.open(&request).success();
    here.allocated_tcp();
    assert_eq!(here.server.portable(is_datagrams), [udp.allocation]);
    // A mobile one needs no connection, once that is closed.
    here.server.disconnected(here.now, &source.client);
    assert_eq!(here.server.portable(is_datagrams), [udp.allocation, request.allocation]);
    let moved = here.server.snapshot(here.now, request.allocation).expect("it is there");
    let mut there = World::with(streams());
    assert!(moved.was().is_none());
    assert!(there.server.restore(there.now, moved, Link(0)).is_ok());
    assert_eq!(there.peer_sends(RELAY, PEER, b"x"), Outcome::Drop(DropReason::ClientAway));
}

#[test]
fn requests_that_wait_for_credentials_are_forgotten_by_who_goes() {
    let mut here =
        World::with_gate(config(), TestGate { per_user: 10, total: 10, later: true, ..TestGate::default() });
    let alice = here.credentials("alice", Scheme::Md5);
    let Outcome::LookUp(query) = here.feed(&Ask::allocate().signed(&alice).bytes()) else { panic!() };
    here.server.forget_lookups(|link| link != Link(0));
    assert!(here.server.poll_timeout().is_some(), "it waits");
    here.server.forget_lookups(|link| link == Link(0));
    assert!(here.server.poll_timeout().is_none());
    let found = here.found(query.lookup, turnpike_turn::server::Credentials::NoSuchUser);
    assert!(matches!(found, Outcome::Drop(_) | Outcome::Later), "{found:?}");
}

/// What the previous version wrote: a session that named two workers, and an arrival with a time.
#[test]
fn a_mobile_session_of_the_previous_version_goes_on() {
    let mut here = World::with(config());
    let alice = here.credentials("alice", Scheme::Md5);
    let reply = here.ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success();
    let relay = here.last_opened();
    let moved = here.server.snapshot(here.now, relay.allocation).expect("it is there");
    let mut written = serde_json::to_value(&moved).unwrap();
    let mobility = written["1"]["mobility"].as_object_mut().expect("it is mobile");
    mobility.extend([("via".to_owned(), 1.into()), ("owner".to_owned(), 0.into())]);
    let moved: Moved = serde_json::from_value(written).unwrap();
    let mut there = World::with(config());
    let restored =
        there.server.restore(there.now, moved, Link(0)).unwrap_or_else(|_| panic!("there is room"));
    there.client = client(50_001);
    there.ask(&Ask::present(&reply.ticket().unwrap()).signed(&alice)).success();
    assert!(there.server.close_one(there.now, restored, ClosedReason::Administrator));

    let mut workers = World::workers(&config(), 2);
    let ticket = {
        let alice = workers[0].credentials("alice", Scheme::Md5);
        workers[0].ask(&Ask::allocate().raw(TICKET, &[]).signed(&alice)).success().ticket().unwrap()
    };
    let present = Ask::present(&ticket).signed(&workers[0].credentials("alice", Scheme::Md5)).bytes();
    let (_, pending_move) = workers[0].forwarded(1, client(50_001), &present);
    let mut written = serde_json::to_value(pending_move.expect("its client is expected there")).unwrap();
    written["patience_ms"] = 600_000.into();
    workers[1].server.expect(serde_json::from_value(written).unwrap());
    assert_eq!(workers[1].server.expected().len(), 1);
}
