//! Profiles over real sockets: each direction is measured separately, and packets that a middlebox drops or
//! duplicates are counted in the right direction.

use std::{
    collections::VecDeque,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::common::{
    Dir, PASSWORD, USER, Wishes, certificate, free_address, listen_to_all, listener, loopback, relay,
    relay_with,
};
use turnpike_load::{
    ClientTransport, HEADER_LEN, Leg, LoadError, LoadReport, ProfileReport, StopHandle,
    options::parse,
    turn::{self, DataVia},
    udp,
};

fn straight(name: &str) -> udp::UdpLoadConfig {
    let server = free_address();
    parse(&format!("{server} --profile {name} --clients 4 --warmup 0.2 --duration 1")).unwrap()
}

fn through(server: SocketAddr, flags: &str) -> turn::TurnLoadConfig {
    let usual =
        format!("{server} --user {USER}:{PASSWORD} --profile call --clients 3 --warmup 0.2 --duration 1");
    parse(&format!("{usual} {flags}")).unwrap()
}

/// Checks that everything arrived and that the totals are the sums of their parts.
fn is_whole(report: &LoadReport, context: &str) {
    let profile = report.profile.as_ref().unwrap();
    assert_eq!((report.lost, report.duplicated, report.reordered), (0, 0, 0), "{context}: {report:?}");
    assert!(report.errors.is_empty(), "{context}: {report:?}");
    adds_up(report, profile);
    for leg in profile.streams.iter().map(|stream| &stream.leg) {
        assert_eq!(leg.sent, leg.received, "{context}: {report:?}");
    }
}

fn adds_up(report: &LoadReport, profile: &ProfileReport) {
    let legs = [&profile.to_peer, &profile.to_client];
    let sum = |of: fn(&Leg) -> u64| legs.into_iter().map(of).sum::<u64>();
    let found = (sum(|leg| leg.sent), sum(|leg| leg.received), sum(|leg| leg.lost));
    assert_eq!(found, (report.sent, report.received, report.lost), "{report:?}");
    let streams = |of: fn(&Leg) -> u64| profile.streams.iter().map(|stream| of(&stream.leg)).sum::<u64>();
    assert_eq!(streams(|leg| leg.sent), report.sent, "{report:?}");
    assert_eq!(streams(|leg| leg.received), report.received, "{report:?}");
}

fn quiet_turn(config: &turn::TurnLoadConfig) -> Result<LoadReport, LoadError> {
    turn::run(config, &StopHandle::default(), |_| {}).map(|outcome| outcome.report)
}

fn quiet_udp(config: &udp::UdpLoadConfig) -> Result<LoadReport, LoadError> {
    udp::run(config, &StopHandle::default(), |_| {}).map(|outcome| outcome.report)
}

#[test]
fn every_profile_sends_in_both_directions_without_loss() {
    for name in ["audio", "call", "sfu", "screen", "vpn"] {
        let report = quiet_udp(&straight(name)).unwrap();
        is_whole(&report, name);
        let profile = report.profile.unwrap();
        assert!(profile.to_peer.sent > 0 && profile.to_client.sent > 0, "{name}: {profile:?}");
        assert!(profile.to_peer.latency_us.max > 0 && profile.to_client.latency_us.max > 0, "{profile:?}");
    }
}

#[test]
fn a_call_passes_a_server_over_every_transport() {
    let certificate = certificate("turn.example.org");
    let relay = relay_with(&Wishes::default(), |config| listen_to_all(config, Some(&certificate)));
    let dir = Dir::new();
    let ca = dir.file("ca.pem", &certificate.pem);
    for transport in ClientTransport::ALL {
        for via in [DataVia::Channel, DataVia::Send] {
            let trust = format!("--server-name turn.example.org --ca {}", ca.display());
            let flags = format!("--transport {transport} --via {via} --threads 2 {trust}");
            let config = through(listener(&relay, transport), &flags);
            let report = quiet_turn(&config).unwrap();
            is_whole(&report, &format!("{transport} {via}"));
            let profile = report.profile.unwrap();
            let audio = profile.streams.iter().filter(|stream| stream.name == "audio");
            // 50 packets per second for each client and direction.
            assert!(audio.map(|stream| stream.leg.sent).eq([150, 150]), "{profile:?}");
        }
    }
    crate::common::wait_until_empty(&relay);
}

#[test]
fn the_seed_determines_the_packets() {
    let sent = |seed: u64, threads: usize, relay: &turnpike_relay::Relay| {
        let config = through(relay.listeners().udp[0], &format!("--seed {seed} --threads {threads}"));
        let report = quiet_turn(&config).unwrap();
        let streams = report.profile.unwrap().streams;
        streams.into_iter().map(|stream| (stream.leg.sent, stream.leg.recv_bps)).collect::<Vec<_>>()
    };
    let relay = relay(&Wishes::default());
    let first = sent(7, 1, &relay);
    assert_eq!(first, sent(7, 3, &relay));
    assert_ne!(first, sent(8, 1, &relay));
}

/// Counters of a [`MiddleBox`] for one direction; probes are not counted.
#[derive(Default)]
struct Way {
    seen: AtomicU64,
    dropped: AtomicU64,
    doubled: AtomicU64,
}

/// Forwarder between client and peer that drops, duplicates or delays packets.
struct MiddleBox {
    address: SocketAddr,
    to_peer: Arc<Way>,
    to_client: Arc<Way>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mischief {
    None,
    Drop,
    Double,
    Delay,
}

const DELAY: Duration = Duration::from_millis(40);

impl MiddleBox {
    fn start(peer: SocketAddr, up: Mischief, down: Mischief) -> Self {
        let client_side = UdpSocket::bind(loopback(0)).unwrap();
        let peer_side = UdpSocket::bind(loopback(0)).unwrap();
        let address = client_side.local_addr().unwrap();
        for socket in [&client_side, &peer_side] {
            socket.set_nonblocking(true).unwrap();
        }
        let (to_peer, to_client, stop) =
            (Arc::<Way>::default(), Arc::<Way>::default(), Arc::<AtomicBool>::default());
        let (ways, stopped) = ([Arc::clone(&to_peer), Arc::clone(&to_client)], Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let (mut buffer, mut client, mut held) = ([0; 65_536], None, VecDeque::new());
            while !stopped.load(SeqCst) {
                let mut idle = true;
                if let Ok((len, from)) = client_side.recv_from(&mut buffer) {
                    client = Some(from);
                    held.push_back((Instant::now(), buffer[..len].to_vec()));
                    idle = false;
                }
                let late = if up == Mischief::Delay { DELAY } else { Duration::ZERO };
                while let Some((_, packet)) = held.pop_front_if(|(came, _)| came.elapsed() >= late) {
                    pass(&ways[0], up, &peer_side, peer, &packet);
                }
                if let (Ok((len, _)), Some(client)) = (peer_side.recv_from(&mut buffer), client) {
                    pass(&ways[1], down, &client_side, client, &buffer[..len]);
                    idle = false;
                }
                if idle {
                    thread::sleep(Duration::from_micros(200));
                }
            }
        });
        Self { address, to_peer, to_client, stop, thread: Some(thread) }
    }
}

impl Drop for MiddleBox {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn pass(way: &Way, mischief: Mischief, through: &UdpSocket, to: SocketAddr, packet: &[u8]) {
    // The probe that precedes the traffic is shorter than any packet of these streams.
    let counts = packet.len() > HEADER_LEN;
    let tenth = counts && (way.seen.fetch_add(1, SeqCst) + 1).is_multiple_of(10);
    if tenth && mischief == Mischief::Drop {
        way.dropped.fetch_add(1, SeqCst);
        return;
    }
    through.send_to(packet, to).unwrap();
    if tenth && mischief == Mischief::Double {
        way.doubled.fetch_add(1, SeqCst);
        through.send_to(packet, to).unwrap();
    }
}

#[test]
fn loss_and_duplicates_are_counted_in_their_direction_only() {
    for (up, down) in [
        (Mischief::Drop, Mischief::None),
        (Mischief::None, Mischief::Drop),
        (Mischief::Double, Mischief::Drop),
    ] {
        let peer = free_address();
        let middle = MiddleBox::start(peer, up, down);
        let flags = format!("{} --peer {peer} --profile call --warmup 0 --duration 1", middle.address);
        let config = parse(&flags).unwrap();
        let report = quiet_udp(&config).unwrap();
        let profile = report.profile.as_ref().unwrap();
        adds_up(&report, profile);
        for (leg, way) in [(&profile.to_peer, &middle.to_peer), (&profile.to_client, &middle.to_client)] {
            let (seen, dropped) = (way.seen.load(SeqCst), way.dropped.load(SeqCst));
            assert!(seen > 100, "{report:?}");
            assert_eq!((leg.sent, leg.lost), (seen, dropped), "{report:?}");
            assert_eq!(leg.received, seen - dropped, "{report:?}");
            // The last copy may be in flight when the run ends.
            let doubled = way.doubled.load(SeqCst);
            assert!((doubled.saturating_sub(1)..=doubled).contains(&leg.duplicated), "{doubled}: {report:?}");
        }
    }
}

#[test]
fn latency_is_one_way() {
    let peer = free_address();
    let middle = MiddleBox::start(peer, Mischief::Delay, Mischief::None);
    let config =
        udp::UdpLoadConfig { server: middle.address, peer: Some(peer), clients: 1, ..straight("audio") };
    let profile = quiet_udp(&config).unwrap().profile.unwrap();
    let least = u64::try_from(DELAY.as_micros()).unwrap();
    assert!(profile.to_peer.latency_us.min >= least, "{profile:?}");
    assert!(profile.to_client.latency_us.min < least, "{profile:?}");
}

#[test]
fn packets_that_a_server_refuses_are_lost() {
    // The peer's packets pass only with a permission, but the only permission is for another address.
    let strict = relay(&Wishes { allow_loopback: false, ..Wishes::default() });
    let error = quiet_turn(&through(strict.listeners().udp[0], "")).unwrap_err();
    assert!(matches!(error, LoadError::Refused { code: 403, .. }), "{error:?}");
}

#[test]
fn an_unusable_peer_address_is_reported() {
    // A documentation address (RFC 5737), which no machine has.
    let nowhere: SocketAddr = "192.0.2.1:5000".parse().unwrap();
    let config = udp::UdpLoadConfig { peer: Some(nowhere), ..straight("audio") };
    let error = quiet_udp(&config).unwrap_err().to_string();
    assert!(error.contains("192.0.2.1:5000") && error.contains("--peer"), "{error}");
}

#[test]
fn a_stopped_run_reports_the_time_before_the_stop() {
    let stop = StopHandle::default();
    let mut config = straight("call");
    (config.run.duration, config.run.warmup) = (Duration::from_secs(3_600), Duration::ZERO);
    let outcome = udp::run(&config, &stop, |interval| {
        if interval.received > 0 {
            stop.stop();
        }
    });
    let outcome = outcome.unwrap();
    assert!(outcome.interrupted);
    is_whole(&outcome.report, "until the run was stopped");
}
