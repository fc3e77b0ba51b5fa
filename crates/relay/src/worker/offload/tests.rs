//! Compares the kernel's flow table with the state machine while clients bind and lose thousands of channels
//! in simulated time.
#![allow(clippy::unwrap_used, reason = "clippy.toml exempts test functions, but not their helpers")]

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use turnpike_net::Datapath;
use turnpike_offload::{Hook, Kernel, KernelSettings, OffloadError, layout::FlowKey};
use turnpike_testkit::{
    alone::{in_network_namespace, run, skip},
    stun::{message, xor_address},
};
use turnpike_turn::{
    server::{
        ClosedReason, ListenerId, PeerRules, ServerConfig, ServerLimits, Source, Tap, TappedDatagram, Verdict,
    },
    time::Now,
};

use super::*;
use crate::{
    AllocationLog, Config, RelayAddress,
    common::RelayCommon,
    listening::ListenerPlaces,
    worker::{NO_TRAILING, Worker},
};

const CLIENTS: u16 = 200;
const NUMBERS: u16 = 64;
/// Number of binds between two comparisons, as many as a busy server handles in one second.
const EACH: u64 = 10_000;
/// Milliseconds between two binds: it takes about a minute to bind all channels of all clients.
const STEP_MS: u64 = 60;

#[derive(Default)]
struct Told {
    clients: HashMap<AllocationSlot, Client>,
    used: HashSet<(AllocationSlot, ChannelNumber)>,
}

impl AllocationLog for Mutex<Told> {
    fn effect(&self, _: usize, effect: &Effect) {
        let told = &mut *self.lock().unwrap();
        match effect {
            Effect::Opened { allocation, client, .. } => _ = told.clients.insert(*allocation, *client),
            Effect::Used { allocation, number } => {
                assert!(told.used.insert((*allocation, *number)), "reported twice");
            }
            Effect::Unbound { allocation, number, .. } => _ = told.used.remove(&(*allocation, *number)),
            Effect::Closed { allocation, .. } => {
                told.clients.remove(allocation);
                told.used.retain(|(of, _)| of != allocation);
            }
            _ => {}
        }
    }
}

struct Bench {
    worker: Worker,
    kernel: Arc<Kernel>,
    flows: Flows,
    now: Now,
    random: StdRng,
    told: Arc<Mutex<Told>>,
    binds: u64,
    id: u8,
}

fn client(number: u16) -> Client {
    let address = SocketAddr::from(([10, 78, 0, 2], 1000 + number));
    Client { listener: ListenerId(0), address, local: SocketAddr::from(([10, 78, 0, 1], 3478)) }
}

impl Bench {
    fn set_active(&mut self, is_active: bool) {
        self.worker.offload.as_mut().unwrap().set_active(is_active, &self.worker.sockets);
    }

    /// Shares `shared_ports` relay sockets among all clients (0 for none) and limits the table to `flows`.
    /// Returns `None` if privileges are missing.
    fn new(shared_ports: usize, flows: u32) -> Option<Self> {
        for words in [
            "link add one type veth peer name other",
            "addr add 10.78.0.1/16 dev one",
            "link set one up",
            "link set other up",
        ] {
            run("ip", &words.split(' ').collect::<Vec<_>>());
        }
        let listen = client(0).local;
        let settings = KernelSettings {
            listeners: vec![listen],
            relay_ports: 49_152..=65_535,
            flows,
            sockets: 1000,
            hook: Hook::Best,
            leases: false,
            measures: false,
        };
        let kernel = match Kernel::start(&settings) {
            Ok(kernel) => Arc::new(kernel),
            Err(OffloadError::Capability { missing, .. }) => {
                skip(&format!("this process lacks {missing}"));
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let config = Config {
            listen: vec![listen],
            datapath: Datapath::Mmsg,
            relay: vec![RelayAddress { bind: [10, 78, 0, 1].into(), external: None }],
            shared_ports,
            server: ServerConfig {
                authenticate: false,
                limits: ServerLimits {
                    channels: NUMBERS.into(),
                    permissions: 1000,
                    ..ServerLimits::default()
                },
                peers: PeerRules { allow: vec!["10.78.0.0/16".parse().unwrap()], ..PeerRules::default() },
                ..ServerConfig::default()
            },
            ..Config::default()
        };
        let layout = config.layout();
        let change =
            ListenerPlaces::default().change(&layout, &config).unwrap_or_else(|error| panic!("{error}"));
        let sockets = change.sockets.into_iter().next().unwrap();
        let told = Arc::<Mutex<Told>>::default();
        let log = Arc::clone(&told);
        let common = RelayCommon::new(config, layout, Arc::new(()), log, Some(Arc::clone(&kernel)), false);
        let worker = Worker::new(0, &common, sockets).unwrap_or_else(|error| panic!("{error}"));
        let flows = kernel.flows().unwrap();
        let now = Now { ms: 1000, unix: 1_800_000_000 };
        let random = StdRng::seed_from_u64(7);
        Some(Self { worker, kernel, flows, now, random, told, binds: 0, id: 0 })
    }

    fn ask(&mut self, client: Client, kind: u16, attributes: &[(u16, &[u8])]) -> bool {
        let request = message(kind, self.id, attributes);
        let verdict = self.worker.server.from_client(self.now, &Source::from(client), &request);
        let succeeded =
            matches!(verdict, Verdict::Reply { bytes, .. } if bytes[..2] == (kind | 0x100).to_be_bytes());
        self.worker.carry_out_effects(self.now, NO_TRAILING);
        succeeded
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap()
    }

    fn allocate(&mut self, client: Client) -> bool {
        self.id = self.id.wrapping_add(1);
        self.ask(client, 0x0003, &[(0x0019, &[17, 0, 0, 0])]);
        self.told().clients.values().any(|its| *its == client)
    }

    fn refresh(&mut self, client: Client, seconds: u32) -> bool {
        self.id = self.id.wrapping_add(1);
        self.ask(client, 0x0004, &[(0x000D, &seconds.to_be_bytes())])
    }

    fn channel(&mut self, client: Client, number: u16, peer: SocketAddr) -> bool {
        self.id = self.id.wrapping_add(1);
        let [high, low] = number.to_be_bytes();
        let peer = xor_address(peer, self.id);
        self.ask(client, 0x0009, &[(0x000C, &[high, low, 0, 0]), (0x0012, &peer)])
    }

    fn client_sends(&mut self, client: Client, number: u16) -> Option<(RelayId, SocketAddr)> {
        let [high, low] = number.to_be_bytes();
        let data = [high, low, 0, 0];
        let verdict = self.worker.server.from_client(self.now, &Source::from(client), &data);
        let to = match verdict {
            Verdict::ToPeer { relay, peer, .. } => Some((relay, peer)),
            _ => None,
        };
        self.end_tick();
        to
    }

    fn peer_sends(&mut self, relay: RelayId, peer: SocketAddr) -> bool {
        let back = self.worker.server.data.from_peer(self.now, relay, peer, b"");
        let is_relayed = matches!(back, Verdict::ToClient { header, .. } if header.as_slice().len() == 4);
        self.end_tick();
        is_relayed
    }

    fn end_tick(&mut self) {
        self.worker.carry_out_effects(self.now, NO_TRAILING);
        self.worker.flush();
    }

    fn counts(&self) -> (u64, u64) {
        let snapshot = self.kernel.snapshot();
        (snapshot.flows, snapshot.refused)
    }

    /// Advances time and binds a channel. A third of the channels are used by the client, a third by the
    /// peer, and a third stay unused.
    fn bind(&mut self) {
        self.pass(STEP_MS);
        let (of, number) = (self.random.random_range(0..CLIENTS), self.random.random_range(0..NUMBERS));
        // A channel number usually has the same peer each time; rarely, it gets another client's peer, which
        // conflicts on a shared relay socket.
        let whose =
            if self.random.random_range(0..16) == 0 { self.random.random_range(0..CLIENTS) } else { of };
        let [whose, number_of_peer] = [whose + 1, number].map(|octet| u8::try_from(octet).unwrap());
        let peer = SocketAddr::from((
            [10, 78, whose, number_of_peer],
            2000 + self.random.random_range(0..8_u16) / 7,
        ));
        if !self.channel(client(of), 0x4000 + number, peer) {
            self.allocate(client(of));
            return;
        }
        self.binds += 1;
        match self.random.random_range(0..3) {
            0 => assert!(self.client_sends(client(of), 0x4000 + number).is_some()),
            1 => {
                let is_it = |(_, its): &(&AllocationSlot, &Client)| **its == client(of);
                let (allocation, family) = (*self.told().clients.iter().find(is_it).unwrap().0, Family::V4);
                assert!(self.peer_sends(RelayId { allocation, family }, peer));
            }
            _ => {}
        }
    }

    fn pass(&mut self, ms: u64) {
        self.now.ms += ms;
        while self.worker.server.poll_timeout().is_some_and(|due| due <= self.now.ms) {
            self.worker.server.handle_timeout(self.now);
            self.worker.carry_out_effects(self.now, NO_TRAILING);
        }
    }

    /// Flows that should exist, found by sending datagrams through the state machine on all used channels.
    fn expected(&mut self) -> HashSet<FlowKey> {
        let mut keys = HashSet::new();
        let used: Vec<_> = {
            let told = self.told();
            told.used.iter().map(|(allocation, number)| (told.clients[allocation], *number)).collect()
        };
        for (client, number) in used {
            let (relay, peer) =
                self.client_sends(client, number.get()).expect("a used channel that is still bound");
            keys.insert(FlowKey::new(client.address, client.local, Some(number)));
            keys.insert(FlowKey::new(client.address, client.local, None));
            let socket = self.worker.out.relay_socket(relay).unwrap();
            let bound = self.worker.sockets.get(socket).unwrap().local_addr();
            if self.peer_sends(relay, peer) {
                keys.insert(FlowKey::new(peer, bound, None));
            }
        }
        keys
    }

    fn compare(&mut self) {
        // Timers fire on whole seconds.
        self.pass(1000 - self.now.ms % 1000);
        let (expected, found) = (self.expected(), self.flows.keys().into_iter().collect::<HashSet<_>>());
        let (left_over, missing) = (found.difference(&expected).count(), expected.difference(&found).count());
        assert_eq!(
            (left_over, missing),
            (0, 0),
            "flows left over and missing, of {} after {} binds",
            found.len(),
            self.binds
        );
        let clients =
            expected.iter().filter(|key| key.channel == [0; 2] && key.local_port == 3478_u16.to_be_bytes());
        let counted = u64::try_from(expected.len() - clients.count()).unwrap();
        let snapshot = self.kernel.snapshot();
        assert_eq!((snapshot.flows, snapshot.refused), (counted, 0));
    }
}

fn peer(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 78, 1, 1], port))
}

#[test]
fn channel_has_flows_after_its_first_datagram() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let Some(mut bench) = Bench::new(0, 65_536) else { return };
        assert!(bench.allocate(client(0)) && bench.refresh(client(0), 3600));
        for number in 1..=3_u16 {
            assert!(bench.channel(client(0), 0x4000 + number, peer(number)));
            assert!(bench.channel(client(0), 0x4000 + number, peer(number)), "renewed");
        }
        bench.end_tick();
        assert_eq!((bench.flows.keys().len(), bench.flows.routes()), (0, 0));
        let (relay, to) = bench.client_sends(client(0), 0x4001).unwrap();
        assert_eq!((to, bench.counts(), bench.flows.keys().len()), (peer(1), (2, 0), 3));
        assert!(bench.peer_sends(relay, peer(2)));
        assert_eq!((bench.counts(), bench.flows.keys().len()), ((4, 0), 5));
        // More datagrams change nothing, and only the flows of used channels are extended.
        bench.pass(60_000);
        for number in 1..=2_u16 {
            assert!(bench.client_sends(client(0), 0x4000 + number).is_some());
            assert!(bench.peer_sends(relay, peer(number)));
        }
        (1..=3).for_each(|number| assert!(bench.channel(client(0), 0x4000 + number, peer(number))));
        assert_eq!(bench.counts(), (4, 0));
        // Channels are marked as used even while the kernel path is inactive.
        let set_active = |bench: &mut Bench, is_active| {
            bench.set_active(is_active);
            bench.worker.walk_offload();
        };
        set_active(&mut bench, false);
        assert!(bench.client_sends(client(0), 0x4003).is_some());
        assert_eq!((bench.counts(), bench.flows.keys().len()), ((0, 0), 0));
        set_active(&mut bench, true);
        assert_eq!((bench.counts(), bench.flows.keys().len()), ((6, 0), 7));
        // A channel that has expired and is bound again counts as unused.
        bench.pass(500_000);
        assert!(bench.channel(client(0), 0x4001, peer(1)));
        bench.pass(500_000);
        assert_eq!(
            (bench.counts(), bench.flows.keys().len()),
            ((2, 0), 3),
            "a bound channel keeps its peer permitted"
        );
        assert!(bench.channel(client(0), 0x4003, peer(3)));
        assert_eq!((bench.counts(), bench.flows.keys().len()), ((2, 0), 3), "unused channels have no flows");
        bench.worker.server.close_all(bench.now, ClosedReason::Shutdown);
        bench.end_tick();
        assert_eq!((bench.counts(), bench.flows.keys().len(), bench.flows.routes()), ((0, 0), 0, 0));
    });
}

/// A single worker acts as both processes.
#[test]
fn channels_with_flows_from_another_process_count_as_used() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let Some(mut bench) = Bench::new(0, 65_536) else { return };
        assert!(bench.allocate(client(0)));
        for number in 1..=2_u16 {
            assert!(bench.channel(client(0), 0x4000 + number, peer(number)));
        }
        let (relay, _) = bench.client_sends(client(0), 0x4001).unwrap();
        let keys = |bench: &Bench| bench.flows.keys().into_iter().collect::<HashSet<_>>();
        let before = keys(&bench);
        assert_eq!(before.len(), 3);
        let (now, worker) = (bench.now, &mut bench.worker);
        let passed = worker.offload.as_mut().unwrap().export(relay.allocation, &mut worker.server).unwrap();
        let moved = worker.server.snapshot(now, relay.allocation).unwrap();
        worker.offload.as_mut().unwrap().leave();
        let sockets = worker.detach_sockets(relay.allocation);
        worker.server.surrender(now, relay.allocation);
        let restored = worker.server.restore(now, moved, ClientLinkKind::Datagrams.link());
        let allocation = restored.unwrap_or_else(|_| panic!("not restored"));
        worker.attach_sockets(now, allocation, sockets);
        worker.offload.as_mut().unwrap().adopt(
            allocation,
            &passed,
            &mut worker.server,
            &worker.out.listeners,
        );
        assert_eq!(keys(&bench), before);
        // After deactivation and reactivation without a datagram, only used channels have flows again.
        for (is_active, left) in [(false, HashSet::new()), (true, before)] {
            bench.set_active(is_active);
            bench.worker.walk_offload();
            assert_eq!(keys(&bench), left, "{is_active}");
        }
    });
}

/// GRO must be restored before a new process takes over the sockets, because that process does not know their
/// GRO state.
#[test]
fn gro_is_restored_when_the_kernel_path_stops() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let Some(mut bench) = Bench::new(0, 65_536) else { return };
        let (listener, _) = bench.worker.out.listeners[0].unwrap();
        let gathers = |bench: &Bench| bench.worker.sockets.get(listener).unwrap().gathers().unwrap();
        bench.worker.offload.as_mut().unwrap().sockets.adopt(listener, || 0);
        assert!(bench.worker.sockets.get(listener).unwrap().set_gro(false).unwrap());
        assert!(!gathers(&bench));
        bench.set_active(false);
        assert!(gathers(&bench));
    });
}

/// The other worker has rejected the allocation.
#[test]
fn returned_allocation_gets_its_flows_back() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let Some(mut bench) = Bench::new(0, 65_536) else { return };
        assert!(bench.allocate(client(0)));
        assert!(bench.channel(client(0), 0x4001, peer(1)));
        let (relay, _) = bench.client_sends(client(0), 0x4001).unwrap();
        assert_eq!(bench.counts(), (2, 0));
        let (now, worker) = (bench.now, &mut bench.worker);
        let moved = worker.server.snapshot(now, relay.allocation).unwrap();
        worker.offload.as_mut().unwrap().release(relay.allocation, &mut worker.server);
        let sockets = worker.detach_sockets(relay.allocation);
        worker.server.surrender(now, relay.allocation);
        let allocation = worker.server.take_back(now, moved).expect("the 5-tuple is free");
        worker.attach_sockets(now, allocation, sockets);
        bench.end_tick();
        assert_eq!(bench.counts(), (0, 0), "no datagram has been sent since then");
        assert!(bench.client_sends(client(0), 0x4001).is_some());
        assert_eq!(bench.counts(), (2, 0));
    });
}

#[derive(Debug)]
struct Counter(Arc<Mutex<usize>>);

impl Tap for Counter {
    fn relayed(&mut self, _: &TappedDatagram<'_>) {
        *self.0.lock().unwrap() += 1;
    }
}

#[test]
fn captured_allocation_is_not_relayed_by_the_kernel() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let Some(mut bench) = Bench::new(0, 65_536) else { return };
        for of in 0..2_u16 {
            assert!(bench.allocate(client(of)));
            assert!(bench.channel(client(of), 0x4001, peer(1 + of)));
        }
        let (relay, _) = bench.client_sends(client(0), 0x4001).unwrap();
        assert!(bench.client_sends(client(1), 0x4001).is_some());
        assert_eq!(bench.counts(), (4, 0));
        let slot = relay.allocation.index;
        let id = bench.worker.server.view(bench.now, slot).expect("an allocation").id();
        let seen = Arc::<Mutex<usize>>::default();
        let begun = bench.worker.server.tap(slot, id, Box::new(Counter(Arc::clone(&seen))));
        assert_eq!(begun, Ok(()));
        bench.end_tick();
        assert_eq!(bench.counts(), (2, 0), "those of the other client");
        let (relay, to) = bench.client_sends(client(0), 0x4001).unwrap();
        assert!(bench.peer_sends(relay, to));
        assert_eq!((bench.counts(), *seen.lock().unwrap()), ((2, 0), 2));
        bench.worker.server.untap(slot, id);
        bench.end_tick();
        assert_eq!(bench.counts(), (4, 0));
    });
}

#[test]
fn full_table_is_not_retried_on_every_datagram() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let Some(mut bench) = Bench::new(0, 2) else { return };
        for of in 0..2_u16 {
            assert!(bench.allocate(client(of)));
            assert!(bench.channel(client(of), 0x4000, peer(1)));
            assert!(bench.client_sends(client(of), 0x4000).is_some());
        }
        let (flows, refused) = bench.counts();
        assert!((flows, refused > 0) == (2, true), "{flows} flows, {refused} refused");
        for _ in 0..10 {
            let (relay, to) = bench.client_sends(client(1), 0x4000).unwrap();
            assert!(bench.peer_sends(relay, to));
        }
        assert_eq!(bench.counts(), (2, refused));
        assert!(bench.refresh(client(0), 0));
        assert!(bench.client_sends(client(1), 0x4000).is_some());
        assert_eq!(bench.counts(), (0, refused));
        assert!(bench.channel(client(1), 0x4000, peer(1)));
        assert_eq!(bench.counts(), (2, refused));
    });
}

#[test]
fn many_new_channels_are_installed_in_batches() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let Some(mut bench) = Bench::new(0, 65_536) else { return };
        let each = u16::try_from(BEGIN).unwrap();
        for of in 0..3 {
            assert!(bench.allocate(client(of)));
            for number in 0..each {
                assert!(bench.channel(client(of), 0x4000 + number, peer(1 + number)));
            }
        }
        // All channels are used in one tick; then one allocation ends before its flows are installed.
        for of in 0..3 {
            for number in 0..each {
                let [high, low] = (0x4000 + number).to_be_bytes();
                let (source, data) = (Source::from(client(of)), [high, low, 0, 0]);
                let verdict = bench.worker.server.from_client(bench.now, &source, &data);
                assert!(matches!(verdict, Verdict::ToPeer { .. }));
            }
        }
        let flows = 2 * u64::from(each);
        let is_due = |bench: &Bench| bench.worker.due() == Some(0);
        bench.end_tick();
        assert_eq!((bench.counts(), is_due(&bench)), ((flows, 0), true));
        assert!(bench.refresh(client(1), 0));
        bench.end_tick();
        assert_eq!((bench.counts(), is_due(&bench)), ((2 * flows, 0), false));
        bench.compare();
    });
}

#[test]
fn thousands_of_binds_and_expiries_keep_the_table_exact() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let Some(mut bench) = Bench::new(0, 65_536) else { return };
        come_and_go(&mut bench);
        assert_eq!(bench.worker.server.stats().shared_peer_limit, 0);
    });
}

#[test]
fn flows_of_a_shared_relay_socket_follow_their_clients() {
    in_network_namespace(turnpike_testkit::this_test!(), || {
        let Some(mut bench) = Bench::new(2, 65_536) else { return };
        come_and_go(&mut bench);
        assert!(bench.worker.server.stats().shared_peer_limit > 0, "no conflict over a peer");
    });
}

/// Runs for a minute at 10,000 binds per second if `TURNPIKE_SOAK=600000` is set.
fn come_and_go(bench: &mut Bench) {
    let wanted = std::env::var("TURNPIKE_SOAK").map_or(2 * EACH, |wanted| wanted.parse().unwrap());
    let started = Instant::now();
    let mut most = 0;
    while bench.binds < wanted {
        let next = bench.binds + EACH;
        while bench.binds < next.min(wanted) {
            bench.bind();
        }
        bench.compare();
        most = most.max(bench.kernel.snapshot().flows);
    }
    let took = started.elapsed();
    println!("{} binds in {took:?}, {most} flows at most", bench.binds);
    assert!(most > 1000);
    bench.pass(3_600_000);
    assert!(bench.flows.keys().is_empty() && bench.expected().is_empty());
    assert_eq!((bench.kernel.snapshot().flows, bench.flows.routes()), (0, 0));
    (0..1000).for_each(|_| bench.bind());
    bench.compare();
    assert!(bench.kernel.snapshot().flows > 0);
    bench.worker.server.close_all(bench.now, ClosedReason::Shutdown);
    bench.worker.carry_out_effects(bench.now, NO_TRAILING);
    assert_eq!((bench.kernel.snapshot().flows, bench.flows.keys().len(), bench.flows.routes()), (0, 0, 0));
}
