//! A worker whose clients bind channels and lose them by the thousand, in a time that the test makes: the kernel's table has what the state
//! machine's has, and nothing else.
#![allow(clippy::unwrap_used, reason = "clippy.toml excuses test functions, not their helpers")]

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::Instant,
};

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use turnpike_net::Datapath;
use turnpike_offload::{Hook, Kernel, OffloadError, Settings, layout::FlowKey};
use turnpike_testkit::{
    alone::{in_network_namespace, run, skip},
    stun::{message, xor_address},
};
use turnpike_turn::{
    server::{ClosedReason, ListenerId, PeerRules, ServerConfig, Source, Verdict},
    time::Now,
};

use super::*;
use crate::{
    Config, RelayAddress,
    listening::Places,
    runtime::Common,
    worker::{NOTHING, Worker},
};

const CLIENTS: u16 = 200;
/// Of each client.
const NUMBERS: u16 = 64;
/// Binds between two comparisons of the tables: a second's.
const EACH: u64 = 10_000;
/// Between two binds: about a minute for so many as a client may have, of all clients.
const STEP_MS: u64 = 60;

struct Bench {
    worker: Worker,
    kernel: Arc<Kernel>,
    flows: Flows,
    now: Now,
    random: StdRng,
    /// What was ever bound, by client and number.
    bound: BTreeSet<(u16, u16)>,
    /// Successful ones.
    binds: u64,
    /// Of the next request.
    id: u8,
}

fn client(number: u16) -> Client {
    let address = SocketAddr::from(([10, 78, 0, 2], 1000 + number));
    Client { listener: ListenerId(0), address, local: SocketAddr::from(([10, 78, 0, 1], 3478)) }
}

impl Bench {
    /// With so many relay sockets that all clients share, or none. `None`, and said, where nobody may.
    fn new(shared_ports: usize) -> Option<Self> {
        for words in [
            "link add one type veth peer name other",
            "addr add 10.78.0.1/16 dev one",
            "link set one up",
            "link set other up",
        ] {
            run("ip", &words.split(' ').collect::<Vec<_>>());
        }
        let listen = client(0).local;
        let settings = Settings {
            listeners: vec![listen],
            relay_ports: 49_152..=65_535,
            flows: 65_536,
            sockets: 1000,
            hook: Hook::Best,
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
                max_channels: NUMBERS.into(),
                max_permissions: 1000,
                peers: PeerRules { allow: vec!["10.78.0.0/16".parse().unwrap()], ..PeerRules::default() },
                ..ServerConfig::default()
            },
            ..Config::default()
        };
        let layout = config.layout();
        let change = Places::default().change(&layout, &config).unwrap_or_else(|error| panic!("{error}"));
        let sockets = change.sockets.into_iter().next().unwrap();
        let common =
            Common::new(config, layout, Arc::new(()), Arc::new(()), Some(Arc::clone(&kernel)), false);
        let (worker, ..) = Worker::new(0, &common, sockets).unwrap_or_else(|error| panic!("{error}"));
        let flows = kernel.flows().unwrap();
        let now = Now { ms: 1000, unix: 1_800_000_000 };
        let (random, bound) = (StdRng::seed_from_u64(7), BTreeSet::new());
        Some(Self { worker, kernel, flows, now, random, bound, binds: 0, id: 0 })
    }

    /// Whether the server answers by a success.
    fn ask(&mut self, client: Client, kind: u16, attributes: &[(u16, &[u8])]) -> bool {
        let request = message(kind, self.id, attributes);
        let verdict = self.worker.server.from_client(self.now, &Source::from(client), &request);
        let succeeded =
            matches!(verdict, Verdict::Reply { bytes, .. } if bytes[..2] == (kind | 0x100).to_be_bytes());
        self.worker.carry_out_effects(self.now, NOTHING);
        succeeded
    }

    /// Time goes on, and a client binds a channel.
    fn bind(&mut self) {
        self.pass(STEP_MS);
        self.id = self.id.wrapping_add(1);
        let (of, number) = (self.random.random_range(0..CLIENTS), self.random.random_range(0..NUMBERS));
        // The same peer for the same number, mostly; and seldom another client's, which it cannot have on a relay socket of both.
        let whose =
            if self.random.random_range(0..16) == 0 { self.random.random_range(0..CLIENTS) } else { of };
        let [whose, number_of_peer] = [whose + 1, number].map(|octet| u8::try_from(octet).unwrap());
        let peer = SocketAddr::from((
            [10, 78, whose, number_of_peer],
            2000 + self.random.random_range(0..8_u16) / 7,
        ));
        let [high, low] = (0x4000 + number).to_be_bytes();
        let peer_attribute = xor_address(peer, self.id);
        if self.ask(client(of), 0x0009, &[(0x000C, &[high, low, 0, 0]), (0x0012, &peer_attribute)]) {
            self.binds += 1;
            self.bound.insert((of, 0x4000 + number));
            return;
        }
        // It may have no allocation, or have one and another peer on this channel.
        self.ask(client(of), 0x0003, &[(0x0019, &[17, 0, 0, 0])]);
    }

    fn pass(&mut self, ms: u64) {
        self.now.ms += ms;
        while self.worker.server.poll_timeout().is_some_and(|due| due <= self.now.ms) {
            self.worker.server.handle_timeout(self.now);
            self.worker.carry_out_effects(self.now, NOTHING);
        }
    }

    /// What the kernel's table has to hold, asked of the state machine by what it would do with datagrams.
    fn expected(&mut self) -> HashSet<FlowKey> {
        let mut keys = HashSet::new();
        for (of, number) in &self.bound {
            let client = client(*of);
            let [high, low] = number.to_be_bytes();
            let data = [high, low, 0, 0];
            let verdict = self.worker.server.from_client(self.now, &Source::from(client), &data);
            let Verdict::ToPeer { relay, peer, .. } = verdict else { continue };
            keys.insert(FlowKey::new(client.address, client.local, ChannelNumber::new(*number)));
            keys.insert(FlowKey::new(client.address, client.local, None));
            let socket = self.worker.out.relay_socket(relay).unwrap();
            let bound = self.worker.sockets.get(socket).unwrap().local_addr();
            let back = self.worker.server.from_peer(self.now, relay, peer, b"");
            if matches!(back, Verdict::ToClient { header, .. } if header.as_slice().len() == 4) {
                keys.insert(FlowKey::new(peer, bound, None));
            }
        }
        keys
    }

    fn compare(&mut self) {
        // Timers fire at whole seconds.
        self.pass(1000 - self.now.ms % 1000);
        let (expected, found) = (self.expected(), self.flows.keys().into_iter().collect::<HashSet<_>>());
        let (left_over, missing) = (found.difference(&expected).count(), expected.difference(&found).count());
        assert_eq!((left_over, missing), (0, 0), "of {} after {} binds", found.len(), self.binds);
        let clients =
            expected.iter().filter(|key| key.channel == [0; 2] && key.local_port == 3478_u16.to_be_bytes());
        let counted = u64::try_from(expected.len() - clients.count()).unwrap();
        let snapshot = self.kernel.snapshot();
        assert_eq!((snapshot.flows, snapshot.refused), (counted, 0));
        self.worker.flush();
    }
}

#[test]
fn binds_and_expiries_by_the_thousand_leave_no_flow_and_lose_none() {
    const TEST: &str =
        "worker::offload::tests::binds_and_expiries_by_the_thousand_leave_no_flow_and_lose_none";
    in_network_namespace(TEST, || {
        let Some(mut bench) = Bench::new(0) else { return };
        come_and_go(&mut bench);
        assert_eq!(bench.worker.server.stats().shared_peer_limit, 0);
    });
}

#[test]
fn flows_of_a_shared_relay_socket_come_and_go_each_with_its_own_client() {
    const TEST: &str =
        "worker::offload::tests::flows_of_a_shared_relay_socket_come_and_go_each_with_its_own_client";
    in_network_namespace(TEST, || {
        let Some(mut bench) = Bench::new(2) else { return };
        come_and_go(&mut bench);
        assert!(bench.worker.server.stats().shared_peer_limit > 0, "no two clients wanted the same peer");
    });
}

/// `TURNPIKE_SOAK=600000` makes it a minute of ten thousand a second.
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
    // Some had channels to lose, by expiry and as their allocations ended.
    assert!(most > 1000);
    bench.pass(3_600_000);
    assert!(bench.flows.keys().is_empty() && bench.expected().is_empty());
    assert_eq!((bench.kernel.snapshot().flows, bench.flows.routes()), (0, 0));
    // And those who are there when the server ends.
    (0..1000).for_each(|_| bench.bind());
    bench.compare();
    assert!(bench.kernel.snapshot().flows > 0);
    bench.worker.server.close_all(bench.now, ClosedReason::Shutdown);
    bench.worker.carry_out_effects(bench.now, NOTHING);
    assert_eq!((bench.kernel.snapshot().flows, bench.flows.keys().len(), bench.flows.routes()), (0, 0, 0));
}
