//! Random packets and tables: the programs and their mirror agree on each packet's destination, reason and
//! bytes.

use crate::prelude::*;
use std::{collections::BTreeMap, net::Ipv4Addr, panic::AssertUnwindSafe};

use proptest::{
    prelude::*,
    sample::select,
    strategy::ValueTree as _,
    test_runner::{RngAlgorithm, TestRng, TestRunner},
};
use strum::VariantArray as _;
use turnpike_offload::{
    layout::{BEHIND, BURST, BY_REDIRECTION, ONLY_FROM_THERE},
    mirror::Decision,
};
use turnpike_testkit::fuzz::{self, Input};
use turnpike_wire::channel_data::ChannelRange;

use crate::program::{LOOPBACK, MTU, Outcome, PLACES, Program, has_xdp, places, with_program};

/// Time until live entries expire: half an hour, in nanoseconds.
const ALIVE: u64 = 1_800_000_000_000;

const SERVERS: [&str; 2] = ["192.0.2.1:3478", "[2001:db8::1]:3478"];
const RELAYS: [&str; 3] = ["192.0.2.2:49160", "[2001:db8::2]:49160", "192.0.2.2:3478"];
const OTHERS: [&str; 6] = [
    "198.51.100.7:5000",
    "198.51.100.7:5001",
    "203.0.113.9:49152",
    "[2001:db8:7::7]:5000",
    "[2001:db8:9::9]:49152",
    "198.51.100.8:1",
];

#[derive(Clone, Debug)]
struct FlowRecipe {
    kind: Kind,
    remote: SocketAddr,
    local: SocketAddr,
    channel: u16,
    from: SocketAddr,
    to: SocketAddr,
    places: [u32; 4],
    alive: bool,
    /// Selects a mismatch of the stamps or the key.
    torn: u8,
    lease: LeaseRecipe,
}

#[derive(Clone, Copy, Debug)]
enum LeaseRecipe {
    Held,
    /// The lease has ended, belongs to an earlier flow, is for another interface, or covers few DSCPs.
    Over,
    Other,
    From(u32),
    For(u64),
    Asked,
    Refused,
}

impl LeaseRecipe {
    fn build(self, now: u64) -> Lease {
        let held = Lease { of: 7, until: now + ALIVE, dscps: u64::MAX, from: LOOPBACK, ..Lease::default() };
        match self {
            Self::Held => held,
            Self::Over => Lease { until: 1, ..held },
            Self::Other => Lease { of: 6, ..held },
            Self::From(from) => Lease { from, ..held },
            Self::For(dscps) => Lease { dscps, ..held },
            Self::Asked => Lease { asked_by: 7, asked: 1, asked_from: LOOPBACK, ..Lease::default() },
            Self::Refused => Lease { refused: 1, ..Lease::default() },
        }
    }
}

fn lease() -> impl Strategy<Value = LeaseRecipe> {
    prop_oneof![
        9 => Just(LeaseRecipe::Held),
        1 => Just(LeaseRecipe::Over),
        1 => Just(LeaseRecipe::Other),
        1 => (0..3_u32).prop_map(LeaseRecipe::From),
        1 => any::<u64>().prop_map(LeaseRecipe::For),
        1 => Just(LeaseRecipe::Asked),
        1 => Just(LeaseRecipe::Refused),
    ]
}

fn address(of: &'static [&'static str]) -> impl Strategy<Value = SocketAddr> {
    select(of).prop_map(|text| text.parse().expect("an address"))
}

fn of_family(address: SocketAddr, among: &[&str], other: SocketAddr) -> SocketAddr {
    let alike = |address: &SocketAddr| address.is_ipv4() == other.is_ipv4();
    let mut candidates =
        std::iter::once(address).chain(among.iter().map(|text| text.parse().expect("an address")));
    candidates.find(alike).expect("the list has an address of each family")
}

fn flow() -> impl Strategy<Value = FlowRecipe> {
    let kind = prop_oneof![1 => Just(Kind::Client), 4 => Just(Kind::ToPeer), 4 => Just(Kind::ToClient),
        3 => Just(Kind::Forward)];
    let ends = (address(&OTHERS), address(&SERVERS), address(&RELAYS), address(&OTHERS));
    let channel = prop_oneof![4 => 0x4000..0x4003_u16, 1 => 0x4000..0x8000_u16];
    let places = [0..4_u32, 0..4_u32, 0..4_u32, 0..4_u32];
    let torn = prop_oneof![15 => Just(0_u8), 1 => 1..3_u8];
    (kind, ends, channel, places, prop::bool::weighted(0.9), torn, lease()).prop_map(
        |(kind, (client, server, relay, peer), channel, places, alive, torn, lease)| {
            // Each pair has one family; the two pairs may differ.
            let server = of_family(server, &SERVERS, client);
            let relay = of_family(relay, &RELAYS, peer);
            let (remote, local, from, to) = match kind {
                Kind::Client => (client, server, server, client),
                Kind::ToPeer => (client, server, relay, peer),
                // Responses to a forwarder; requests look the same.
                Kind::ToClient | Kind::Forward => (peer, relay, server, client),
            };
            FlowRecipe { kind, remote, local, channel, from, to, places, alive, torn, lease }
        },
    )
}

impl FlowRecipe {
    fn build(&self, now: u64) -> (FlowKey, Flow) {
        let number = ChannelNumber::within(ChannelRange::Rfc5766, self.channel).expect("in range");
        let key = FlowKey::new(self.remote, self.local, (self.kind == Kind::ToPeer).then_some(number));
        let [route, back, state, socket] = self.places;
        let flow = Flow {
            stamp: 7,
            key: if self.torn == 2 { FlowKey { remote_port: [9, 9], ..key } } else { key },
            from: mapped(self.from.ip()),
            to: mapped(self.to.ip()),
            from_port: self.from.port().to_be_bytes(),
            to_port: self.to.port().to_be_bytes(),
            channel: if self.kind == Kind::ToClient { self.channel.to_be_bytes() } else { [0; 2] },
            kind: self.kind as u8,
            unused: 0,
            route,
            back,
            state,
            socket,
            expires: if self.alive { now + ALIVE } else { 1 },
            stamp_end: if self.torn == 1 { 8 } else { 7 },
            lease: self.lease.build(now),
        };
        (key, flow)
    }
}

#[derive(Clone, Copy, Debug)]
enum Check {
    Right,
    Wrong,
    Nothing,
    PseudoHeader,
}

#[derive(Clone, Debug)]
enum Oddity {
    None,
    /// Addressed to another machine on this link.
    OtherMachine,
    Protocol(u16),
    Options(u8),
    Fragment(u16),
    Next(u8),
    Version(u8),
    HeaderChecksum,
    /// Errors in the lengths of IP, UDP and ChannelData.
    Lengths(i8, i8, i8),
    Cut(u8),
    Flipped(u16, u8),
    /// IPv4 addresses in an IPv6 header.
    Disguised,
}

#[derive(Clone, Debug)]
struct PacketRecipe {
    of: prop::sample::Index,
    tos: u8,
    ttl: u8,
    payload: Vec<u8>,
    check: Check,
    trailer: usize,
    segments: (u32, u32),
    complete: bool,
    channel: Option<u16>,
    oddity: Oddity,
}

fn oddity() -> impl Strategy<Value = Oddity> {
    prop_oneof![
        12 => Just(Oddity::None),
        1 => Just(Oddity::OtherMachine),
        1 => select(&[0x0806_u16, 0x8100, 0x0800, 0x86dd]).prop_map(Oddity::Protocol),
        1 => any::<u8>().prop_map(Oddity::Options),
        1 => any::<u16>().prop_map(Oddity::Fragment),
        1 => select(&[0_u8, 6, 17, 43, 44, 58, 60]).prop_map(Oddity::Next),
        1 => any::<u8>().prop_map(Oddity::Version),
        1 => Just(Oddity::HeaderChecksum),
        2 => (-9..10_i8, -9..10_i8, -9..10_i8).prop_map(|(ip, udp, data)| Oddity::Lengths(ip, udp, data)),
        2 => (-3..4_i8).prop_map(|data| Oddity::Lengths(0, 0, data)),
        1 => any::<u8>().prop_map(Oddity::Cut),
        2 => any::<(u16, u8)>().prop_map(|(at, mask)| Oddity::Flipped(at, mask)),
        1 => Just(Oddity::Disguised),
    ]
}

fn packet() -> impl Strategy<Value = PacketRecipe> {
    let length =
        prop_oneof![4 => 0..64_usize, 2 => 100..1400_usize, 1 => 1320..1400_usize, 1 => 1400..2100_usize];
    let payload = (length, any::<u8>(), any::<u8>()).prop_map(|(length, first, step)| {
        let bytes =
            std::iter::successors(Some(first), |last| Some(last.wrapping_mul(5).wrapping_add(step | 1)));
        bytes.take(length).collect::<Vec<u8>>()
    });
    let check = prop_oneof![
        8 => Just(Check::Right), 1 => Just(Check::Wrong), 2 => Just(Check::Nothing), 2 => Just(Check::PseudoHeader)
    ];
    let ttl = prop_oneof![8 => 2..=255_u8, 1 => 0..3_u8];
    let trailer = prop_oneof![4 => Just(0_usize), 1 => 1..20_usize];
    let segments = prop_oneof![
        9 => (0..2_u32).prop_map(|count| (count, 0)),
        1 => (2..9_u32, prop_oneof![Just(0), Just(200)]),
        1 => (0..2_u32).prop_map(|count| (count, 200)),
    ];
    let channel = prop::option::weighted(0.15, any::<u16>());
    let shape = (any::<u8>(), ttl, payload, check, trailer);
    (any::<prop::sample::Index>(), shape, segments, any::<bool>(), channel, oddity()).prop_map(
        |(of, (tos, ttl, payload, check, trailer), segments, complete, channel, oddity)| PacketRecipe {
            of,
            tos,
            ttl,
            payload,
            check,
            trailer,
            segments,
            complete,
            channel,
            oddity,
        },
    )
}

fn sum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).expect("folded")
}

fn octets(address: SocketAddr) -> Vec<u8> {
    match address.ip() {
        std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
        std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

impl PacketRecipe {
    fn build(&self, flows: &[FlowRecipe]) -> Vec<u8> {
        let flow = self.of.get(flows);
        let (remote, local) = (flow.remote, flow.local);
        let mut data = Vec::new();
        if flow.kind == Kind::ToPeer {
            data.extend(self.channel.unwrap_or(flow.channel).to_be_bytes());
            data.extend(u16::try_from(self.payload.len()).expect("short").to_be_bytes());
        }
        data.extend(&self.payload);
        if let (Oddity::Lengths(_, _, more), Kind::ToPeer) = (&self.oddity, flow.kind) {
            data[3] = data[3].wrapping_add_signed(*more);
        }
        let length = 8 + data.len();
        let as_bytes = |length: usize, more: i8| {
            let length = i32::try_from(length).expect("short") + i32::from(more);
            u16::try_from(length.max(0)).expect("short").to_be_bytes()
        };
        let (more_ip, more_udp) = match self.oddity {
            Oddity::Lengths(ip, udp, _) => (ip, udp),
            _ => (0, 0),
        };
        let mut udp = Vec::new();
        udp.extend(remote.port().to_be_bytes());
        udp.extend(local.port().to_be_bytes());
        udp.extend(as_bytes(length, more_udp));
        udp.extend([0, 0]);
        udp.extend(&data);
        let mut pseudo = [octets(remote), octets(local)].concat();
        pseudo.extend([udp[4], udp[5], 0, 17]);
        let check = match self.check {
            Check::Right | Check::Wrong => {
                let whole = [pseudo.clone(), udp.clone()].concat();
                let check = if sum(&whole) == 0xffff { 0xffff } else { !sum(&whole) };
                if matches!(self.check, Check::Wrong) { check.wrapping_add(1) } else { check }
            }
            Check::Nothing => 0,
            Check::PseudoHeader => sum(&pseudo),
        };
        udp[6..8].copy_from_slice(&check.to_be_bytes());

        let mut frame = vec![0; 12];
        if matches!(self.oddity, Oddity::OtherMachine) {
            frame[5] = 9;
        }
        if remote.is_ipv4() {
            let options = if let Oddity::Options(words) = self.oddity { usize::from(words % 11) } else { 0 };
            let mut ip = vec![0; 20 + 4 * options];
            ip[0] = 0x45 + u8::try_from(options).expect("few");
            if let Oddity::Version(first) = self.oddity {
                ip[0] = first;
            }
            let total = ip.len() + length;
            ip[1] = self.tos;
            ip[2..4].copy_from_slice(&as_bytes(total, more_ip));
            if let Oddity::Fragment(bits) = self.oddity {
                ip[6..8].copy_from_slice(&bits.to_be_bytes());
            } else {
                // Sets DF, as in most packets.
                ip[6] = 0x40;
            }
            ip[8..10].copy_from_slice(&[self.ttl, 17]);
            ip[12..16].copy_from_slice(&octets(remote));
            ip[16..20].copy_from_slice(&octets(local));
            let check = !sum(&ip);
            let wrong = u16::from(matches!(self.oddity, Oddity::HeaderChecksum));
            ip[10..12].copy_from_slice(&check.wrapping_add(wrong).to_be_bytes());
            frame.extend([8, 0]);
            frame.extend(ip);
        } else {
            let mut ip = vec![0x60 | self.tos >> 4, self.tos << 4 | 0x0a, 0xbc, 0xde];
            if let Oddity::Version(first) = self.oddity {
                ip[0] = first;
            }
            ip.extend(as_bytes(length, more_ip));
            ip.extend([if let Oddity::Next(next) = self.oddity { next } else { 17 }, self.ttl]);
            ip.extend([octets(remote), octets(local)].concat());
            frame.extend([0x86, 0xdd]);
            frame.extend(ip);
        }
        if let Oddity::Protocol(protocol) = self.oddity {
            frame[12..14].copy_from_slice(&protocol.to_be_bytes());
        }
        if matches!(self.oddity, Oddity::Disguised) && remote.is_ipv6() {
            frame[22..38].copy_from_slice(&Ipv4Addr::new(198, 51, 100, 7).to_ipv6_mapped().octets());
        }
        frame.extend(udp);
        frame.extend(std::iter::repeat_n(0xee, self.trailer));
        match self.oddity {
            Oddity::Cut(bytes) => frame.truncate(frame.len().saturating_sub(usize::from(bytes)).max(14)),
            // The Ethernet addresses control the kernel's test and stay unchanged.
            Oddity::Flipped(at, mask) => {
                let at = 12 + usize::from(at) % (frame.len() - 12);
                frame[at] ^= mask;
            }
            _ => {}
        }
        frame
    }
}

fn turned_back() -> impl Strategy<Value = Vec<FlowRecipe>> {
    let clients = [address(&OTHERS), address(&OTHERS)];
    let places = [0..4_u32, 0..4_u32, 0..4_u32, 0..4_u32];
    let family =
        select(&[["192.0.2.2:49160", "192.0.2.2:49170"], ["[2001:db8::2]:49160", "[2001:db8::2]:49170"]][..]);
    let kind = prop_oneof![9 => Just(Kind::ToClient), 1 => Just(Kind::Client)];
    let torn = prop_oneof![9 => Just(0_u8), 1 => 1..3_u8];
    (clients, family, places, prop::bool::weighted(0.9), kind, torn, lease()).prop_map(
        |([one, other], relays, places, alive, kind, torn, lease)| {
            let [from, to] = relays.map(|text| text.parse().expect("an address"));
            let server = |client| of_family(SERVERS[0].parse().expect("an address"), &SERVERS, client);
            let [route, back, state, socket] = places;
            let first = FlowRecipe {
                kind: Kind::ToPeer,
                remote: one,
                local: server(one),
                channel: 0x4000,
                from,
                to,
                places: [NOWHERE, back, state, socket],
                alive: true,
                torn: 0,
                lease: LeaseRecipe::Held,
            };
            let places = [route, NOWHERE, socket, state];
            let (remote, local, from, to) = (from, to, server(other), other);
            vec![
                first,
                FlowRecipe { kind, remote, local, channel: 0x4abc, from, to, places, alive, torn, lease },
            ]
        },
    )
}

const NOWHERE: u32 = 4;

#[derive(Clone, Debug)]
struct Surroundings {
    states: [StateRecipe; 4],
    drained: [u64; 4],
    routes: [u64; 4],
    hops: [[u64; HOP_WORDS]; 5],
}

/// Time of the last packet to user space; whether the flow is calm; whether XDP is counting; the count of XDP;
/// whether XDP relayed a packet just now.
type StateRecipe = (u64, bool, bool, u64, bool);

fn time() -> impl Strategy<Value = u64> {
    prop_oneof![4 => Just(0_u64), 1 => Just(5_u64), 1 => Just(10_u64)]
}

fn state() -> impl Strategy<Value = StateRecipe> {
    let arrived = prop_oneof![6 => 0..BURST, 1 => Just(BURST), 1 => BURST..1000];
    (time(), prop::bool::weighted(0.05), any::<bool>(), arrived, prop::bool::weighted(0.3))
}

fn drained() -> impl Strategy<Value = u64> {
    (time(), prop::bool::weighted(0.2)).prop_map(|(at, behind)| (at + 3) | if behind { BEHIND } else { 0 })
}

fn route() -> impl Strategy<Value = u64> {
    // Interface 77 has MTU 0, so nothing fits.
    prop_oneof![
        5 => Just(route_by(LOOPBACK, MTU)),
        1 => Just(route_by(LOOPBACK, MTU) | BY_REDIRECTION),
        1 => Just(route_by(LOOPBACK, MTU) | ONLY_FROM_THERE),
        1 => Just(77 | ONLY_FROM_THERE),
        1 => Just(77_u64),
        1 => Just(0_u64),
    ]
}

/// Frames go to loopback's address, which is all zeros.
fn hop() -> impl Strategy<Value = [u64; HOP_WORDS]> {
    prop_oneof![
        8 => (1..1_u64 << 48).prop_map(|to| [to, 0]),
        1 => (1..1_u64 << 48).prop_map(|to| [to, 9]),
        1 => Just([0, 0]),
    ]
}

fn surroundings() -> impl Strategy<Value = Surroundings> {
    use prop::array::{uniform4, uniform5};
    (uniform4(state()), uniform4(drained()), uniform4(route()), uniform5(hop()))
        .prop_map(|(states, drained, routes, hops)| Surroundings { states, drained, routes, hops })
}

impl Surroundings {
    fn build(&self, flows: &[FlowRecipe], now: u64) -> Tables {
        let state = |(up, is_calming, is_counting, arrived, is_leaving): StateRecipe| State {
            up,
            calm: if is_calming { now + ALIVE } else { 0 },
            // Stays recent, however long the test takes.
            since: if is_counting { now + ALIVE } else { 0 },
            arrived,
            across: if is_leaving { now + ALIVE } else { 0 },
        };
        Tables {
            flows: flows.iter().map(|flow| flow.build(now)).collect(),
            states: self.states.map(state).to_vec(),
            drained: self.drained.to_vec(),
            routes: [&self.routes[..], &[0]].concat(),
            hops: self.hops.to_vec(),
            classes: classes(&[3478], 49_152..=65_535),
            leases: true,
        }
    }
}

/// The mirror's decision in the form of the program's outcome: any time within the call is accepted.
fn mirrored(decision: &Decision, tables: &Tables, outcome: &Outcome, before: u64, after: u64) -> Outcome {
    let mut states = tables.states.clone();
    states.resize(PLACES as usize, State::default());
    if let Some((number, expected)) = decision.state {
        let got = outcome.states[number as usize];
        let at = |expected: u64, got: u64| {
            let is_near = expected >= before && (expected..=expected + (after - before)).contains(&got);
            if is_near { got } else { expected }
        };
        states[number as usize] = State {
            up: at(expected.up, got.up),
            calm: at(expected.calm, got.calm),
            since: at(expected.since, got.since),
            arrived: expected.arrived,
            across: at(expected.across, got.across),
        };
    }
    Outcome { action: decision.action.clone(), states }
}

fn is_padded(frame: &[u8]) -> bool {
    let number =
        |at: usize| frame.get(at..at + 2).map_or(0, |pair| usize::from(pair[0]) << 8 | usize::from(pair[1]));
    let end = if frame[12..14] == [8, 0] { 14 + number(16) } else { 14 + 40 + number(18) };
    end < frame.len()
}

type Case = (Vec<FlowRecipe>, Surroundings, PacketRecipe);

fn case() -> impl Strategy<Value = Case> {
    let flows = prop_oneof![2 => prop::collection::vec(flow(), 1..8), 1 => turned_back()];
    (flows, surroundings(), packet())
}

fn agree(
    place: Place,
    program: &mut Program,
    (flows, around, packet): &Case,
) -> Result<Option<Count>, TestCaseError> {
    let tables = around.build(flows, now_ns());
    program.fill(&tables);
    let frame = packet.build(flows);
    // When the kernel trims padding it discards the sum (CHECKSUM_NONE), and its test cannot report the sum
    // afterwards.
    let complete = packet.complete && !is_padded(&frame) && place == Place::Tc && program.knows_complete();
    let arrived = Frame {
        bytes: &frame,
        interface: LOOPBACK,
        for_us: frame[..6] == [0; 6],
        segments: packet.segments.0,
        segment_size: packet.segments.1,
        summed: if complete { Summed::Complete } else { Summed::Nothing },
    };
    let before = now_ns();
    let outcome = program.run(place, &arrived);
    let after = now_ns();
    // The kernel's test rejects frames that end within the IP header.
    prop_assume!(outcome.is_ok() || frame.len() >= 14 + 40);
    let outcome = outcome.map_err(|error| TestCaseError::fail(format!("{error}: {frame:02x?}")))?;
    let id = match &outcome.action {
        Action::Across { bytes, .. } => [bytes[18], bytes[19]],
        Action::Up(_) | Action::Dropped(_) => [0; 2],
    };
    let decision = decide(place, &arrived, &tables, &Moment { now: before, id });
    let count = match &decision.action {
        Action::Up(count) => *count,
        Action::Dropped(count) | Action::Across { count, .. } => Some(*count),
    };
    let expected = mirrored(&decision, &tables, &outcome, before, after);
    prop_assert_eq!(outcome, expected);
    Ok(count)
}

#[test]
fn the_program_at_tc_and_its_mirror_agree() {
    they_agree(Place::Tc, &[Count::Failed, Count::Bulk, Count::NoNeighbour]);
}

#[test]
fn the_program_in_the_driver_and_its_mirror_agree() {
    if !has_xdp() {
        return skip("this kernel does not accept the XDP program");
    }
    they_agree(Place::Xdp, &[Count::Failed, Count::SuperPacket]);
}

fn they_agree(place: Place, never: &[Count]) {
    with_program(|program| {
        let seen = RefCell::new(BTreeMap::new());
        let program = RefCell::new(program);
        let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(4000);
        let config = ProptestConfig {
            cases,
            failure_persistence: None,
            max_shrink_iters: 3000,
            ..ProptestConfig::default()
        };
        let outcome = TestRunner::new(config).run(&case(), |case| {
            let count = agree(place, &mut program.borrow_mut(), &case)?;
            *seen.borrow_mut().entry(count.map_or("nothing", Into::into)).or_insert(0) += 1;
            Ok(())
        });
        outcome.expect("program and mirror agree");
        // Module `streams` tests measured flows.
        let is_possible =
            |count: &&Count| !never.contains(count) && !count.is_refusal() && **count != Count::Measured;
        for count in Count::VARIANTS.iter().filter(is_possible) {
            let seen = seen.borrow();
            assert!(seen.contains_key(<&str>::from(count)), "no case reached {count:?}: {seen:?}");
        }
    });
}

#[test]
fn offload_mirror() {
    with_program(|program| {
        let program = AssertUnwindSafe(RefCell::new(program));
        fuzz::target("offload_mirror", seeds, |bytes| {
            let mut input = Input::new(bytes);
            let place = *input.choice(&[Place::Tc, Place::Xdp]);
            if !places().contains(&place) {
                return;
            }
            let case = case_of(&mut input);
            match agree(place, &mut program.borrow_mut(), &case) {
                Ok(_) | Err(TestCaseError::Reject(_)) => {}
                Err(TestCaseError::Fail(why)) => panic!("{why}: {place:?} {case:?}"),
            }
        });
    });
}

fn case_of(input: &mut Input<'_>) -> Case {
    let oddity = drawn(&oddity(), input, 24, 12);
    let packet = PacketRecipe { oddity, ..drawn(&packet(), input, 80, 10) };
    let flows = match usize::from(input.below(8)) {
        0 => drawn(&turned_back(), input, 90, 2),
        count => (0..count).map(|_| drawn(&flow(), input, 96, 4)).collect(),
    };
    let around = Surroundings {
        states: std::array::from_fn(|_| drawn(&state(), input, 40, 4)),
        drained: std::array::from_fn(|_| drawn(&drained(), input, 12, 2)),
        routes: std::array::from_fn(|_| drawn(&route(), input, 4, 5)),
        hops: std::array::from_fn(|_| drawn(&hop(), input, 12, 2)),
    };
    (flows, around, packet)
}

/// Value that a strategy generates from the next bytes. Each alternative before the chosen one takes half
/// of the remaining buffer, so its length is doubled `halvings` times. The rest is filled with ones,
/// because a range could reject zeros forever.
fn drawn<S: Strategy>(strategy: &S, input: &mut Input<'_>, bytes: usize, halvings: u32) -> S::Value {
    let mut chance = vec![0xFF; (2 * bytes) << halvings];
    chance[..bytes].fill_with(|| input.byte());
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let chance = TestRng::from_seed(RngAlgorithm::PassThrough, &chance);
    let tree = strategy.new_tree(&mut TestRunner::new_with_rng(config, chance));
    tree.expect("nothing is filtered").current()
}

/// Pseudo-random bytes with a fixed seed.
fn seeds() -> Vec<Vec<u8>> {
    let mut state = 1_u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    (0..40).map(|_| (0..1100).map(|_| byte()).collect()).collect()
}
