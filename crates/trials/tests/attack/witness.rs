//! Clients that relay through the attacked worker over each transport: unless it is saturated, they lose nothing and see no errors.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{TRANSPORTS, floods, is_thorough, row};
use turnpike_trials::{Certificate, Load, Metrics, Program, Reflect, SOON, Serve, V4, eventually};

/// Peer address that no attack uses.
pub(super) const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 9, 9, 9));
const CLIENTS: u64 = 2;
/// Datagrams per second and transport; a second's worth of them fits into a socket buffer.
fn rate() -> &'static str {
    if is_thorough() { "100" } else { "25" }
}

pub(super) struct Witnesses {
    loads: Vec<(&'static str, Program)>,
    _reflect: Reflect,
    before: u64,
}

pub(super) struct Seen(Vec<(&'static str, Value)>);

pub(super) fn relayed(metrics: &Metrics) -> u64 {
    metrics.sum("turnpike_relayed_datagrams_total", "direction=\"to_peer\"")
}

impl Witnesses {
    /// Starts clients over these transports with peers at `peer`, and waits until all of them relay.
    pub(super) fn begin(
        transports: &[&'static str],
        server: impl Fn(&str) -> SocketAddr,
        peer: IpAddr,
        metrics: impl Fn() -> Metrics,
    ) -> Self {
        let opened = || metrics().sum("turnpike_allocations_opened_total", "");
        let clients = CLIENTS * transports.len() as u64;
        let (before, wanted) = (relayed(&metrics()), opened() + clients);
        let reflect = Reflect::start(peer, &[]);
        let loads = transports.iter().map(|&transport| {
            let load = Load::new(server(transport)).to(reflect.address);
            let load = load.with(&format!("--transport {transport} --clients {CLIENTS}"));
            let load = load.with_words(&["--rate", rate(), "--warmup", "0", "--duration", "3600"]);
            let secure = if transport.ends_with("tls") { &["--insecure"][..] } else { &[] };
            (transport, load.with_words(secure).start())
        });
        let loads = loads.collect();
        eventually("all witnesses are connected", || opened() >= wanted);
        eventually("clients relay", || relayed(&metrics()) >= before + 4 * clients);
        Self { loads, _reflect: reflect, before }
    }

    /// Stops the clients and asserts that nothing was lost and that no other peer received data.
    pub(super) fn end(self, what: &str, metrics: impl Fn() -> Metrics) -> Seen {
        self.loads.iter().for_each(|(_, load)| load.signal("INT"));
        let seen = self.loads.into_iter().map(|(transport, load)| {
            let run = load.wait(SOON);
            (transport, run.result(), run.output())
        });
        let seen: Vec<_> = seen.collect();
        let mut was_slow = false;
        for (transport, result, said) in &seen {
            assert!(result["sent"].as_u64() > Some(0), "{what}: {transport}: {said}");
            for figure in ["duplicated", "reordered"] {
                assert_eq!(result[figure], 0, "{what}: {figure} over {transport}: {said}");
            }
            // On a slow machine, a client may repeat a request, which is then answered twice.
            let is_known = |error: &String| error == "unexpected_datagram";
            let errors = result["errors"].as_object().expect("the errors are an object");
            assert!(errors.keys().all(is_known), "{what}: over {transport}: {said}");
            // A generator that stalls does not send datagrams that are overdue.
            let is_slow = result["late_us"]["max"].as_u64() > Some(100_000);
            assert!(
                result["lost"] == 0 || is_slow && !is_thorough(),
                "{what}: lost over {transport}: {said}"
            );
            was_slow |= result["lost"] != 0;
        }
        let seen = Seen(seen.into_iter().map(|(transport, result, _)| (transport, result)).collect());
        let sent = seen.sum("sent");
        let least = if was_slow { seen.sum("received") } else { sent };
        let found = || relayed(&metrics()) - self.before;
        // Kernel counters are up to a second old.
        eventually("all of the witnesses' datagrams are relayed", || found() >= least);
        assert!(found() <= sent, "{what}: {} datagrams to peers, {sent} from witnesses", found());
        seen
    }
}

impl Seen {
    fn sum(&self, figure: &str) -> u64 {
        self.0.iter().map(|(_, result)| result[figure].as_u64().expect("a number")).sum()
    }

    pub(super) fn say(&self, what: &str, done: &str) {
        let p99 = |transport: &str| {
            let found = self.0.iter().find(|(name, _)| *name == transport);
            found.map_or("-".to_owned(), |(_, result)| result["rtt_us"]["p99"].to_string())
        };
        let [udp, tcp, tls, dtls] = TRANSPORTS.map(p99);
        let (sent, lost) = (self.sum("sent"), self.sum("lost"));
        row("witness", &[&what, &done, &sent, &lost, &udp, &tcp, &tls, &dtls]);
    }
}

#[test]
fn clients_on_the_attacked_worker_lose_nothing() {
    let duration = Duration::from_millis(if is_thorough() { 10_000 } else { 300 });
    let certificate = Certificate::new(&["turn.example.org"]);
    let applications = floods::Applications::new();
    let flags = applications.flags();
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(["--workers", "1"]).collect();
    let serve = Serve::start_secured(&certificate, &flags);
    for flood in floods::all(&applications.key) {
        let at = |transport: &str| serve.address_of(transport, V4);
        let witnesses = Witnesses::begin(&TRANSPORTS, at, PEER, || serve.metrics());
        let begun = Instant::now();
        let mut attack = (flood.begin)(&serve);
        let mut done = 0;
        for turn in 0.. {
            done += attack(turn);
            if begun.elapsed() >= duration {
                break;
            }
            // A few thousand packets per second do not saturate the worker.
            thread::sleep(Duration::from_millis(5));
        }
        let seen = witnesses.end(flood.name, || serve.metrics());
        drop(attack);
        seen.say(flood.name, &done.to_string());
    }
}
