//! Calls with one impaired direction each, compared with what both ends counted. `cargo xtask quality` runs 100 of them.
//!
//! ```text
//!  client ── network ── c ────── c ── relay ── p ────── p ── network ── peer
//! ```
//!
//! The networks are queues in the ends, because many kernels lack netem.

use crate::prelude::*;
use rand::{Rng, SeedableRng, rngs::StdRng};
use turnpike_testkit::stun::{attribute::*, kind::*};
use turnpike_trials::links::{CLIENT, Links, PEER, Server};

use super::end::{Counted, End, Form, Impairment};

/// Calls at the same time; more would add jitter of their own on two cores.
const AT_ONCE: usize = 17;
const CHANNEL: [u8; 2] = [0x40, 0];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    ClientUplink,
    ClientDownlink,
    PeerUplink,
    PeerDownlink,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    place: Place,
    impairment: Impairment,
    by_channel: bool,
    has_second: bool,
    duplicates: f64,
}

impl Place {
    const ALL: [Self; 4] = [Self::ClientUplink, Self::ClientDownlink, Self::PeerUplink, Self::PeerDownlink];

    fn leg(self) -> &'static str {
        if matches!(self, Self::ClientUplink | Self::ClientDownlink) { "client" } else { "peer" }
    }

    fn direction(self) -> &'static str {
        if matches!(self, Self::ClientUplink | Self::PeerUplink) { "uplink" } else { "downlink" }
    }
}

impl Case {
    fn random(random: &mut StdRng) -> Self {
        let impairment = match random.random_range(0..10) {
            0 => Impairment::None,
            1..=4 => Impairment::Loss(random.random_range(0.03..0.15)),
            5..=7 => Impairment::Jitter(random.random_range(70..130)),
            _ => Impairment::Delay(random.random_range(350..600)),
        };
        Self {
            place: Place::ALL[random.random_range(0..4)],
            impairment,
            by_channel: random.random_bool(0.7),
            has_second: random.random_bool(0.5),
            duplicates: if random.random_bool(0.3) { 0.02 } else { 0.0 },
        }
    }

    /// Impairments of an end, towards the relay and from it.
    fn of(&self, leg: &str) -> [Impairment; 2] {
        ["uplink", "downlink"].map(|direction| {
            let is_it = (self.place.leg(), self.place.direction()) == (leg, direction);
            if is_it { self.impairment } else { Impairment::None }
        })
    }
}

struct Call {
    case: Case,
    client: End,
    peer: End,
    id: String,
}

impl Call {
    fn new(server: &Server<'_>, case: Case) -> Self {
        let client = stun::Client::from(CLIENT[0], SocketAddr::new(SERVER[0], 3478));
        let peer = UdpSocket::bind((PEER[0], 0)).expect("the address is up");
        let local = peer.local_addr().expect("the socket is bound");
        let address = stun::xor_address(local, 0);
        let answer = client.ask(&stun::plain_message(ALLOCATE, &[(REQUESTED_TRANSPORT, &stun::UDP)]));
        assert_eq!(answer.error(), None, "{case:?}");
        let relayed = answer.address(XOR_RELAYED_ADDRESS);
        let channel = [CHANNEL[0], CHANNEL[1], 0, 0];
        let request = if case.by_channel {
            stun::plain_message(CHANNEL_BIND, &[(CHANNEL_NUMBER, &channel), (XOR_PEER_ADDRESS, &address)])
        } else {
            stun::plain_message(CREATE_PERMISSION, &[(XOR_PEER_ADDRESS, &address)])
        };
        assert_eq!(client.ask(&request).error(), None, "{case:?}");
        let form = if case.by_channel { Form::ChannelData(CHANNEL) } else { Form::Indications(local) };
        let socket = client.socket().try_clone().expect("a descriptor is free");
        let from = socket.local_addr().expect("the socket is bound");
        let id = allocation_of(server, from);
        let end = |leg, socket, form, ssrc| End {
            socket,
            form,
            ssrc,
            has_second: case.has_second,
            impairments: case.of(leg),
            duplicates: case.duplicates,
        };
        Self {
            case,
            client: end("client", socket, form, 1000),
            peer: end("peer", peer, Form::Plain(relayed), 2000),
            id,
        }
    }
}

fn get(server: &Server<'_>, path: &str) -> Value {
    serde_json::from_str(&server.get(path)).expect("JSON")
}

fn allocation_of(server: &Server<'_>, client: SocketAddr) -> String {
    let all = get(server, "/v1/allocations?limit=1000");
    let all = all["allocations"].as_array().expect("a list");
    let of = all.iter().find(|one| one["client"] == client.to_string()).expect("the allocation is listed");
    of["id"].as_str().expect("an id").to_owned()
}

/// Compares one call; returns its row, and what differs.
fn judge(server: &Server<'_>, call: &Call, client: &Counted, peer: &Counted) -> (String, Vec<String>) {
    let allocation = get(server, &format!("/v1/allocations/{}", call.id));
    let (quality, problem) = (&allocation["quality"], &allocation["quality_problem"]);
    let Case { place, impairment, .. } = call.case;
    let mut wrong = Vec::new();
    let named = format!("{} {}", text(&problem["leg"]), text(&problem["direction"]));
    let expected = match impairment {
        Impairment::None => "- -".to_owned(),
        Impairment::Delay(_) => format!("{} -", place.leg()),
        _ => format!("{} {}", place.leg(), place.direction()),
    };
    if named != expected {
        wrong.push(format!("named {named}: {}", text(&problem["sentence"])));
    }
    // Only one direction of one leg is impaired, so each end knows what arrived at the relay.
    let (sender, receiver) = match place {
        Place::ClientUplink | Place::PeerDownlink => (client, peer),
        Place::ClientDownlink | Place::PeerUplink => (peer, client),
    };
    let flow = &quality[place.leg()][place.direction()];
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let (truth, measured) = match impairment {
        Impairment::None | Impairment::Loss(_) => (
            (sender.sent - receiver.received) as f64 / sender.sent as f64 * 100.0,
            number(&flow["lost"]) / number(&flow["expected"]) * 100.0,
        ),
        Impairment::Jitter(_) => (receiver.jitter_ms, number(&flow["jitter_ms"])),
        Impairment::Delay(_) => {
            // Checks of the other end pass this leg there and back.
            let end = if place.leg() == "client" { peer } else { client };
            (end.round_trip_ms.unwrap_or(f64::NAN), number(&quality[place.leg()]["round_trip_ms"]))
        }
    };
    let (unit, most) = match impairment {
        Impairment::None => ("% lost", 0.2),
        Impairment::Loss(_) => ("% lost", truth * 0.1),
        Impairment::Jitter(_) => ("ms jitter", truth * 0.2),
        Impairment::Delay(_) => ("ms round trip", truth * 0.2),
    };
    let difference = (measured - truth).abs();
    // Not a number is wrong, too.
    if !matches!(difference.partial_cmp(&most), Some(std::cmp::Ordering::Less | std::cmp::Ordering::Equal)) {
        wrong.push(format!("measured {measured:.2} instead of {truth:.2} {unit}: {quality}"));
    }
    let row = format!("{expected}|{}|{truth:.2} {unit}|{measured:.2}|{named}", impairment.short());
    (row, wrong)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("-")
}

/// Runs calls at the same time.
fn run_calls(
    links: &Links,
    datapath: &str,
    cases: &[Case],
    duration: Duration,
) -> Vec<(String, Vec<String>)> {
    let dir = Dir::new();
    let config = dir.file("turnpike.toml", "[server]\nquality = \"on\"\n").display().to_string();
    let server = links.serve(&["--datapath", datapath, "-c", &config]);
    let calls: Vec<Call> = cases.iter().map(|case| Call::new(&server, *case)).collect();
    let began = Instant::now();
    let counted: Vec<(Counted, Counted)> = thread::scope(|scope| {
        let run = |end| scope.spawn(move || End::run(end, began, duration));
        let running: Vec<_> = calls.iter().map(|call| (run(&call.client), run(&call.peer))).collect();
        let join = |(client, peer): (thread::ScopedJoinHandle<'_, _>, thread::ScopedJoinHandle<'_, _>)| {
            (client.join().expect("the client ran"), peer.join().expect("the peer ran"))
        };
        running.into_iter().map(join).collect()
    });
    // The next report is at most ten seconds away.
    thread::sleep(Duration::from_secs(11));
    calls.iter().zip(&counted).map(|(call, (client, peer))| judge(&server, call, client, peer)).collect()
}

fn from_environment<T: std::str::FromStr>(name: &str, otherwise: T) -> T {
    env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn impaired_legs_are_named_and_measured() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let cases = from_environment("TURNPIKE_QUALITY_CASES", 4);
        let seed = from_environment("TURNPIKE_QUALITY_SEED", 11);
        let mut random = StdRng::seed_from_u64(seed);
        let cases: Vec<Case> = (0..cases).map(|_| Case::random(&mut random)).collect();
        let duration = Duration::from_secs(if cases.len() > 4 { 25 } else { 14 });
        let mut wrong = Vec::new();
        println!("seed {seed}");
        for (datapath, cases) in ["kernel", "gso"].into_iter().cycle().zip(cases.chunks(AT_ONCE)) {
            for (case, (row, differences)) in cases.iter().zip(run_calls(links, datapath, cases, duration)) {
                let form = if case.by_channel { "channel" } else { "indications" };
                let verdict = if differences.is_empty() { "right" } else { "wrong" };
                println!("QUALITY: {datapath}, {form}|{row}|{verdict}");
                wrong.extend(differences.into_iter().map(|difference| format!("{case:?}: {difference}")));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    });
}
