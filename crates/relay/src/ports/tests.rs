//! Tests of the relay ports.

use super::*;
use std::{
    net::{IpAddr, Ipv4Addr},
    ops::Range,
};
use turnpike_testkit::randomness;

use crate::RealmLimits;

const ALICE: UserRef<'static> = UserRef::new("here", "alice");

fn ports(range: RangeInclusive<u16>) -> Ports {
    ports_on(range, &[IpAddr::V4(Ipv4Addr::LOCALHOST)])
}

fn ports_on(range: RangeInclusive<u16>, addresses: &[IpAddr]) -> Ports {
    let on = |bind: &IpAddr| RelayAddress { bind: *bind, external: None };
    ports_of(range, addresses.iter().map(on).collect())
}

fn ports_of(range: RangeInclusive<u16>, relay: Vec<RelayAddress>) -> Ports {
    Ports::new(&Config { relay, ports: range, ..Config::default() })
}

fn wish(port: PortRequest) -> OpenRelay {
    OpenRelay { family: Family::V4, transport: RelayTransport::Udp, port }
}

impl Ports {
    fn get(&self, port: PortRequest, now_ms: u64) -> Result<OpenedPort, Refusal> {
        self.open(&wish(port), ALICE, None, now_ms)
    }
}

fn all(ports: &Ports, open: &mut Vec<OpenedPort>) -> Refusal {
    loop {
        match ports.get(PortRequest::Any, 0) {
            Ok(opened) => open.push(opened),
            Err(refusal) => return refusal,
        }
    }
}

#[test]
fn reservation_keeps_its_expiry_in_another_process() {
    let (here, there) = (ports(22_140..=22_147), ports(22_140..=22_147));
    let token = [5; 8];
    let opened = here.get(PortRequest::EvenAndReserveNext(token), 1000).unwrap();
    let lent = here.lend_reserved(11_000).unwrap();
    for (reserved, socket) in lent {
        let text = serde_json::to_string(&reserved).unwrap();
        there.adopt_reserved(500, serde_json::from_str(&text).unwrap(), socket).unwrap();
    }
    there.adopt(opened.socket.local_addr());
    here.surrender_reserved(11_000);
    let next = opened.relayed.port() + 1;
    assert!(there.are_relayed((Ipv4Addr::LOCALHOST, next).into(), RelayTransport::Udp));
    assert!(!here.are_relayed((Ipv4Addr::LOCALHOST, next).into(), RelayTransport::Udp));
    let reserved = wish(PortRequest::Reserved(token));
    assert_eq!(here.open(&reserved, ALICE, None, 11_000).err(), Some(Refusal::Reservation));
    there.expire(20_499);
    assert_eq!(there.open(&reserved, ALICE, None, 20_499).unwrap().relayed.port(), next);
    let others: Vec<_> = (0..6).map(|_| there.get(PortRequest::Any, 0).unwrap()).collect();
    assert_eq!(others.len(), 6);
    assert_eq!(there.get(PortRequest::Any, 0).err(), Some(Refusal::Port));
}

#[test]
fn every_port_of_the_range_is_used_once() {
    let ports = ports(22_100..=22_115);
    let mut open = Vec::new();
    let refusal = all(&ports, &mut open);
    assert_eq!(refusal, Refusal::Port);
    let mut given: Vec<u16> = open.iter().map(|o| o.relayed.port()).collect();
    let in_order = given.clone();
    given.sort_unstable();
    given.dedup();
    assert_eq!(given.len(), open.len());
    assert!(open.len() >= 10, "most of the range is free on this machine: {given:?}");
    assert_ne!(in_order, given, "random, not in ascending order");
    ports.release(open.pop().unwrap().socket.local_addr(), 0);
    assert!(ports.get(PortRequest::Any, 0).is_ok());
}

/// RFC 8656 section 7.2 requires unpredictable ports. They return to the pool after their quarantine.
#[test]
fn relay_ports_are_random() {
    let ports = ports(49_152..=65_535);
    let drawn = (0..randomness::SAMPLES as u64).map(|n| {
        let now_ms = n * QUARANTINE_MS;
        let opened = ports.get(PortRequest::Any, now_ms).unwrap();
        ports.release(opened.socket.local_addr(), now_ms);
        (opened.relayed.port() - 49_152).to_be_bytes().to_vec()
    });
    randomness::judge(&drawn.collect::<Vec<_>>(), &[0x3F, 0xFF]).unwrap();
}

fn one_after_the_other(ports: &Ports, wish: &OpenRelay, times: Range<u64>) -> Vec<u16> {
    let turn = |now_ms| {
        let opened = ports.open(wish, ALICE, None, now_ms).unwrap();
        ports.release(opened.socket.local_addr(), now_ms);
        opened.relayed.port()
    };
    times.map(turn).collect()
}

#[test]
fn ports_are_reused_oldest_first_once_all_are_used() {
    let ports = ports(24_000..=24_015);
    let first = one_after_the_other(&ports, &wish(PortRequest::Any), 0..16);
    // Other programs may be using some of the ports. The remaining ports are reused in the order of the
    // first round.
    let period = first.iter().skip(1).position(|port| *port == first[0]).map_or(16, |at| at + 1);
    assert!(period >= 10, "most of the range is free on this machine: {first:?}");
    let second = one_after_the_other(&ports, &wish(PortRequest::Any), 16..16 + 3 * period as u64);
    let all = [first, second].concat();
    assert!(all.iter().zip(&all[period..]).all(|(before, after)| before == after), "{all:?}");
}

#[test]
fn two_ports_are_used_alternately() {
    for port in [PortRequest::Any, PortRequest::Own] {
        let ports = ports(24_020..=24_021);
        let drawn = one_after_the_other(&ports, &wish(port), 0..20);
        assert!(drawn.windows(2).all(|two| two[0] != two[1]), "{drawn:?}");
    }
    let tcp = ports(24_020..=24_021);
    let drawn: Vec<u16> = (0..20)
        .map(|now_ms| {
            let (listener, told) = tcp.open_tcp(Family::V4, "here", None, now_ms).unwrap();
            tcp.release(listener.local_addr(), now_ms);
            told.port()
        })
        .collect();
    assert!(drawn.windows(2).all(|two| two[0] != two[1]), "{drawn:?}");
}

#[test]
fn single_port_of_a_range_is_reused_immediately() {
    let ports = ports(24_022..=24_022);
    assert_eq!(one_after_the_other(&ports, &wish(PortRequest::Any), 0..3), [24_022; 3]);
    assert_eq!(one_after_the_other(&ports, &wish(PortRequest::Even), 3..5), [24_022; 2]);
}

#[test]
fn quarantined_port_is_closed_and_then_free_again() {
    let ports = ports(24_024..=24_025);
    let opened = ports.get(PortRequest::Any, 0).unwrap();
    let bound = opened.socket.local_addr();
    drop(opened);
    ports.release(bound, 5);
    let pool = ports.plan().pools[0].clone();
    assert!(!ports.are_relayed(bound, RelayTransport::Udp));
    assert!(pool.bits.is_taken(bound.port()));
    pool.bits.end_quarantine(4 + QUARANTINE_MS);
    assert!(pool.bits.is_taken(bound.port()));
    pool.bits.end_quarantine(5 + QUARANTINE_MS);
    assert!(!pool.bits.is_taken(bound.port()));
    assert!(pool.bits.quarantined().is_empty());
}

#[test]
fn free_port_of_another_address_precedes_a_quarantined_one() {
    let addresses = ["127.0.0.1", "127.0.0.2"].map(|ip| ip.parse().unwrap());
    let ports = ports_on(24_026..=24_027, &addresses);
    let mut used = std::collections::HashSet::new();
    for now_ms in 0..4 {
        let opened = ports.get(PortRequest::Any, now_ms).unwrap();
        ports.release(opened.socket.local_addr(), now_ms);
        assert!(used.insert(opened.relayed), "{} was reused while another port was free", opened.relayed);
    }
}

/// Random draws would usually miss the only free port.
#[test]
fn last_port_not_used_by_other_programs_is_found() {
    let range = 24_100..=24_163;
    let ports = ports(range.clone());
    let others: Vec<_> = range
        .filter(|port| *port != 24_121)
        .filter_map(|port| std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok())
        .collect();
    for now_ms in 0..10 {
        let opened = ports.get(PortRequest::Any, now_ms).unwrap();
        assert_eq!(opened.relayed.port(), 24_121);
        ports.release(opened.socket.local_addr(), now_ms);
    }
    drop(others);
    assert!(drawn(&ports, ALICE).len() >= 32);
}

/// Another program may bind a port while it is in quarantine.
#[test]
fn unbindable_port_stays_in_quarantine() {
    let ports = ports(24_040..=24_041);
    one_after_the_other(&ports, &wish(PortRequest::Any), 0..2);
    let quarantined = || ports.plan().pools[0].bits.quarantined();
    let before = quarantined();
    let bind = |held: &Quarantined| std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, held.port)).unwrap();
    let _others: Vec<_> = before.iter().map(bind).collect();
    let pair = PortRequest::EvenAndReserveNext([1; 8]);
    for (port, refusal) in [(PortRequest::Any, Refusal::PortsHeld), (pair, Refusal::Port)] {
        assert_eq!(ports.get(port, 2).err(), Some(refusal));
        assert_eq!(quarantined(), before);
    }
}

#[test]
fn free_ports_are_found_in_any_range() {
    let bits = PoolBits::default();
    let free = [0, 63, 64, 100, 127, 128, 4000, 65_535];
    (0..=u16::MAX).filter(|port| !free.contains(port)).for_each(|port| assert!(bits.take(port)));
    for start in free {
        for end in free.into_iter().filter(|end| *end >= start) {
            let within: Vec<u16> = free.into_iter().filter(|port| (start..=end).contains(port)).collect();
            assert_eq!(bits.not_taken(start..=end).collect::<Vec<_>>(), within);
        }
    }
}

#[test]
fn ports_held_by_others_and_exhausted_ports_are_refused_differently() {
    let ports = ports(24_290..=24_297);
    let held: Vec<_> = (24_290..=24_295)
        .map(|port| std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).unwrap())
        .collect();
    let mut open = Vec::new();
    assert_eq!((all(&ports, &mut open), open.len()), (Refusal::PortsHeld, 2));
    assert_eq!(Refusal::PortsHeld.result(), OpenResult::PortsHeld);
    drop(held);
    assert_eq!((all(&ports, &mut open), open.len()), (Refusal::Port, 8));
}

#[test]
fn pair_of_ports_leaves_quarantine_together() {
    let ports = ports(24_030..=24_031);
    let pair = |token: u8, now_ms| {
        let opened = ports.get(PortRequest::EvenAndReserveNext([token; 8]), now_ms).unwrap();
        let next = ports.get(PortRequest::Reserved([token; 8]), now_ms).unwrap();
        assert_eq!((opened.relayed.port(), next.relayed.port()), (24_030, 24_031));
        [opened, next]
    };
    let [first, second] = pair(1, 0);
    ports.release(first.socket.local_addr(), 1);
    assert_eq!(
        ports.get(PortRequest::EvenAndReserveNext([2; 8]), 2).err(),
        Some(Refusal::Port),
        "half of the range is in use"
    );
    ports.release(second.socket.local_addr(), 3);
    drop((first, second));
    let open = pair(3, 2 + QUARANTINE_MS);
    open.iter().for_each(|opened| ports.release(opened.socket.local_addr(), 2 + QUARANTINE_MS));
    drop(open);
    pair(4, 2 + QUARANTINE_MS);
}

#[test]
fn quarantine_continues_in_another_process() {
    let (here, there) = (ports(24_034..=24_035), ports(24_034..=24_035));
    let used = one_after_the_other(&here, &wish(PortRequest::Any), 50_000..50_001)[0];
    let text = serde_json::to_string(&here.quarantined(54_000)).unwrap();
    there.adopt_quarantined(100, &serde_json::from_str::<Vec<LateUse>>(&text).unwrap());
    let held = there.plan().pools[0].bits.quarantined();
    assert_eq!(held, [Quarantined { port: used, until_ms: 100 + QUARANTINE_MS - 4000 }]);
    assert_ne!(one_after_the_other(&there, &wish(PortRequest::Any), 101..102), [used]);
}

#[test]
fn request_for_an_even_port_reserves_the_next_one_for_the_token() {
    let ports = ports(22_200..=22_299);
    let first = ports.get(PortRequest::EvenAndReserveNext([7; 8]), 1000).unwrap();
    assert_eq!(first.relayed.port() % 2, 0);
    assert_eq!(ports.get(PortRequest::Reserved([8; 8]), 1000).err(), Some(Refusal::Reservation));
    let second = ports.get(PortRequest::Reserved([7; 8]), 30_999).unwrap();
    assert_eq!(second.relayed.port(), first.relayed.port() + 1);
    assert_eq!(ports.get(PortRequest::Reserved([7; 8]), 1000).err(), Some(Refusal::Reservation));
}

#[test]
fn request_for_an_even_port_never_gets_an_odd_one() {
    let ports = ports(22_501..=22_504);
    let even = || ports.get(PortRequest::Even, 0).map(|opened| opened.relayed.port());
    let mut given = [even().unwrap(), even().unwrap()];
    given.sort_unstable();
    assert_eq!(given, [22_502, 22_504]);
    assert_eq!(even(), Err(Refusal::Port));
}

#[test]
fn reservation_expires_after_thirty_seconds_and_frees_its_port() {
    let ports = ports(22_300..=22_301);
    let first = ports.get(PortRequest::EvenAndReserveNext([7; 8]), 0).unwrap();
    assert_eq!(ports.get(PortRequest::Any, 0).err(), Some(Refusal::Port));
    ports.expire(29_999);
    assert_eq!(ports.reservations().len(), 1);
    ports.expire(30_000);
    assert_eq!(ports.reservations().len(), 0);
    let again = ports.get(PortRequest::Any, 0).unwrap();
    assert_eq!(again.relayed.port(), first.relayed.port() + 1);
}

#[test]
fn relayed_addresses_are_known_by_transport_while_open() {
    let external = "192.0.2.9".parse().ok();
    let address = RelayAddress { bind: "127.0.0.1".parse().unwrap(), external };
    let ports = ports_of(22_700..=22_799, vec![address]);
    let (udp, tcp) = (RelayTransport::Udp, RelayTransport::Tcp);
    let opened = ports.get(PortRequest::Any, 0).unwrap();
    let (bound, told) = (opened.socket.local_addr(), opened.relayed);
    assert!(ports.are_relayed(bound, udp) && ports.are_relayed(told, udp));
    assert!(!ports.are_relayed(bound, tcp), "a TCP client may have the same port number");
    assert!(!ports.are_relayed(SocketAddr::new("127.0.0.2".parse().unwrap(), bound.port()), udp));
    ports.release(bound, 0);
    assert!(!ports.are_relayed(bound, udp) && !ports.are_relayed(told, udp));

    let (listener, told) = ports.open_tcp(Family::V4, "here", None, 0).unwrap();
    assert!(ports.are_relayed(listener.local_addr(), tcp) && ports.are_relayed(told, tcp));
    assert!(!ports.are_relayed(told, udp));
    // A port that another program blocks does not count as relayed.
    let program = std::net::UdpSocket::bind("127.0.0.1:22800").unwrap();
    let one = ports_of(22_800..=22_800, vec![address]);
    assert_eq!(one.get(PortRequest::Any, 0).err(), Some(Refusal::PortsHeld));
    assert!(!one.are_relayed(program.local_addr().unwrap(), udp));
}

#[test]
fn family_without_an_address_has_its_own_refusal() {
    let ports = ports(22_400..=22_401);
    let v6 = OpenRelay { family: Family::V6, transport: RelayTransport::Udp, port: PortRequest::Any };
    assert_eq!(ports.open(&v6, ALICE, None, 0).err(), Some(Refusal::Family));
}

fn arriving_at(local: &str, from: &str) -> Client {
    let [local, address] = [local, from].map(|text| text.parse().unwrap());
    Client { listener: turnpike_turn::server::ListenerId(0), address, local }
}

#[test]
fn client_gets_the_relay_address_to_which_it_sent_or_that_of_its_route() {
    let addresses = ["127.0.0.1", "127.0.0.2"].map(|ip| ip.parse().unwrap());
    let ports = ports_on(22_100..=22_100, &addresses);
    let client = arriving_at("127.0.0.2:3478", "127.0.0.9:5000");
    assert_eq!(ports.address_for(Family::V4, &client), Some(addresses[1]));
    let elsewhere = arriving_at("192.0.2.1:3478", "127.0.0.9:5000");
    assert_eq!(
        ports.address_for(Family::V4, &elsewhere),
        Some(addresses[0]),
        "the source address of the route"
    );
    assert_eq!(ports.address_for(Family::V6, &client), None);
    assert_eq!(ports_on(22_100..=22_100, &addresses[..1]).address_for(Family::V4, &client), None);

    let opened: Vec<_> =
        (0..2).map(|_| ports.open(&wish(PortRequest::Any), ALICE, Some(addresses[1]), 0).unwrap()).collect();
    assert_eq!(
        [&opened[0], &opened[1]].map(|it| it.relayed.ip()),
        [addresses[1], addresses[0]],
        "the first address is full"
    );

    let relay = addresses.map(|bind| RelayAddress { bind, external: None }).to_vec();
    let in_turn = Ports::new(&Config { relay, relay_in_turn: true, ..Config::default() });
    assert_eq!(in_turn.address_for(Family::V4, &client), None);
}

#[test]
fn dual_stack_allocations_use_all_ports_of_each_address() {
    let addresses = ["127.0.0.1", "127.0.0.2", "::1"].map(|ip| ip.parse().unwrap());
    let ports = ports_on(22_500..=22_531, &addresses);
    let v6 = OpenRelay { family: Family::V6, transport: RelayTransport::Udp, port: PortRequest::Any };
    let mut open = Vec::new();
    for _ in 0..16 {
        open.push(ports.get(PortRequest::Any, 0).unwrap());
        // The other half of a dual-stack allocation, which fails on machines without IPv6.
        open.extend(ports.open(&v6, ALICE, None, 0));
    }
    let on = |open: &[OpenedPort], ip: &IpAddr| open.iter().filter(|o| o.relayed.ip() == *ip).count();
    assert_eq!((on(&open, &addresses[0]), on(&open, &addresses[1])), (8, 8), "in turn");

    // If the next address in turn is full, the other one is used.
    let (first, kept): (Vec<_>, Vec<_>) = open.into_iter().partition(|o| o.relayed.ip() == addresses[0]);
    first.iter().for_each(|opened| ports.release(opened.socket.local_addr(), 0));
    drop(first);
    let mut open = kept;
    let refusal = all(&ports, &mut open);
    assert_eq!(refusal, Refusal::Port);
    assert!(on(&open, &addresses[0]) >= 28 && on(&open, &addresses[1]) >= 28);
}

#[test]
fn token_is_valid_only_for_its_owner() {
    let ports = ports(22_700..=22_799);
    let first = ports.get(PortRequest::EvenAndReserveNext([7; 8]), 0).unwrap();
    for (realm, identity) in
        [("here", "bob"), ("there", "alice"), ("", ""), ("here", ""), ("here\0alice", "")]
    {
        let thief = UserRef::new(realm, identity);
        let stolen = ports.open(&wish(PortRequest::Reserved([7; 8])), thief, None, 0);
        assert_eq!(stolen.err(), Some(Refusal::Reservation), "{thief:?}");
    }
    let second = ports.get(PortRequest::Reserved([7; 8]), 0).unwrap();
    assert_eq!(second.relayed.port(), first.relayed.port() + 1);
}

#[test]
fn reservations_are_limited_per_user_and_in_total() {
    let ports = ports(22_800..=23_311);
    assert_eq!(ports.plan().most_reservations, 32);
    let reserve = |owner: UserRef<'_>, token: u64| {
        let opened =
            ports.open(&wish(PortRequest::EvenAndReserveNext(token.to_be_bytes())), owner, None, 0)?;
        ports.release(opened.socket.local_addr(), 0);
        Ok(())
    };
    let taken = |owner| (0..50).take_while(|_| reserve(owner, rand::random()).is_ok()).count();
    assert_eq!(taken(ALICE), MOST_PER_USER);
    assert_eq!(taken(UserRef::new("there", "alice")), MOST_PER_USER, "same name in another realm");
    assert_eq!(taken(UserRef::new("here", "bob")), MOST_PER_USER);
    // Used reservations are no longer counted, and only their owner may replace them.
    ports.reservations().retain(|_, held| *held.owner != *UserRef::new("here", "bob").key());
    assert_eq!(reserve(ALICE, 1).err(), Some(Refusal::Reservation));
    assert_eq!(reserve(UserRef::new("here", "bob"), 1), Ok(()));
    assert!(
        ports
            .open(&wish(PortRequest::Reserved(1_u64.to_be_bytes())), UserRef::new("here", "bob"), None, 0)
            .is_ok()
    );
    assert_eq!(taken(UserRef::new("here", "bob")), MOST_PER_USER);
    // The limit for all users together also applies.
    let users: Vec<String> = (0..20).map(|n| format!("user{n}")).collect();
    let all: usize = users.iter().map(|user| taken(UserRef::new("here", user))).sum();
    assert_eq!(all, ports.plan().most_reservations - 3 * MOST_PER_USER);
}

#[test]
fn user_limit_of_reservations_applies_to_short_ranges() {
    let ports = ports(23_400..=23_463);
    assert_eq!(ports.plan().most_reservations, 4);
    let reserve = |owner, token: [u8; 8]| {
        ports.open(&wish(PortRequest::EvenAndReserveNext(token)), owner, None, 0).map(drop)
    };
    assert_eq!(reserve(ALICE, [1; 8]), Ok(()));
    assert_eq!(
        reserve(ALICE, [2; 8]),
        Err(Refusal::Reservation),
        "a user may have at most a quarter of four reservations"
    );
    assert_eq!(reserve(UserRef::new("here", "bob"), [3; 8]), Ok(()));
}

#[test]
fn reservations_cannot_take_all_ports() {
    let ports = ports(22_600..=22_663);
    let mut given = 0;
    for n in 0..200_u64 {
        let user = n.to_string();
        let wish = wish(PortRequest::EvenAndReserveNext(n.to_be_bytes()));
        let Ok(opened) = ports.open(&wish, UserRef::new("here", &user), None, 0) else { break };
        given += 1;
        ports.release(opened.socket.local_addr(), 0);
    }
    assert_eq!(given, 4, "reservations may use a sixteenth of the ports");
    assert_eq!(ports.get(PortRequest::EvenAndReserveNext([9; 8]), 29_999).err(), Some(Refusal::Reservation));
    assert!(ports.get(PortRequest::Any, 0).is_ok(), "plain requests still succeed");
    assert!(ports.get(PortRequest::EvenAndReserveNext([9; 8]), 30_000).is_ok());
}

fn realm(realm: &str, range: RangeInclusive<u16>) -> RealmLimits {
    RealmLimits { realm: realm.to_owned(), relay_ports: Some(range), ..RealmLimits::default() }
}

fn drawn(ports: &Ports, owner: UserRef<'_>) -> Vec<u16> {
    let open = std::iter::from_fn(|| ports.open(&wish(PortRequest::Any), owner, None, 0).ok());
    // All ports are open at the same time, so that none is chosen twice.
    let open: Vec<_> = open.collect();
    open.iter().for_each(|opened| ports.release(opened.socket.local_addr(), 0));
    let mut drawn: Vec<u16> = open.iter().map(|opened| opened.relayed.port()).collect();
    drawn.sort_unstable();
    drawn
}

#[test]
fn ports_of_a_realm_belong_to_it_alone() {
    let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let config = Config {
        relay: vec![RelayAddress { bind, external: None }],
        ports: 23_500..=23_547,
        realm_limits: vec![
            realm("blue", 23_510..=23_519),
            realm("red", 23_520..=23_529),
            realm("also red", 23_520..=23_529),
        ],
        ..Config::default()
    };
    let ports = Ports::new(&config);
    for (of, range) in [("blue", 23_510..=23_519), ("red", 23_520..=23_529), ("also red", 23_520..=23_529)] {
        let drawn = drawn(&ports, UserRef::new(of, "alice"));
        assert!(drawn.len() >= 8 && drawn.iter().all(|port| range.contains(port)), "{of}: {drawn:?}");
    }
    let others = drawn(&ports, ALICE);
    let is_others = |port: &u16| (23_500..=23_509).contains(port) || (23_530..=23_547).contains(port);
    assert!(others.len() >= 20 && others.iter().all(is_others), "{others:?}");
    // Both ports of a pair are within the range.
    for token in 0..4_u64 {
        let pair = PortRequest::EvenAndReserveNext(token.to_be_bytes());
        let Ok(opened) = ports.open(&wish(pair), UserRef::new("blue", &token.to_string()), None, 0) else {
            continue;
        };
        assert!((23_510..=23_518).contains(&opened.relayed.port()), "{}", opened.relayed);
    }
}

#[test]
fn reload_uses_the_new_range_and_keeps_open_ports() {
    let external = |text: &str| text.parse().ok();
    let at = |ip: &str, external| RelayAddress { bind: ip.parse().unwrap(), external };
    let config = |relay: Vec<RelayAddress>, range| Config { relay, ports: range, ..Config::default() };
    let ports = Ports::new(&config(vec![at("127.0.0.1", external("192.0.2.1"))], 23_600..=23_619));
    let opened = ports.get(PortRequest::Any, 0).unwrap();
    let bound = opened.socket.local_addr();
    let next = vec![at("127.0.0.1", external("192.0.2.9")), at("127.0.0.2", None)];
    ports.reconfigure(&config(next, 23_700..=23_719));
    assert!(
        ports.are_relayed(opened.relayed, RelayTransport::Udp),
        "the port is still known by its old external address"
    );
    assert!(ports.are_relayed(bound, RelayTransport::Udp));
    let mut told = std::collections::HashSet::new();
    for _ in 0..4 {
        let new = ports.get(PortRequest::Any, 0).unwrap();
        assert!((23_700..=23_719).contains(&new.relayed.port()));
        told.insert(new.relayed.ip().to_string());
        ports.release(new.socket.local_addr(), 0);
    }
    assert_eq!(told.len(), 2, "{told:?}");
    assert_eq!(ports.addresses().len(), 3);
    assert_eq!(ports.former_ranges(), [23_600..=23_619]);
    // A removed address is forgotten once no port is open on it.
    ports.reconfigure(&config(vec![at("127.0.0.2", None)], 23_700..=23_719));
    assert!(ports.are_relayed(bound, RelayTransport::Udp));
    ports.release(bound, 0);
    ports.reconfigure(&config(vec![at("127.0.0.2", None)], 23_700..=23_719));
    assert_eq!(ports.addresses(), [at("127.0.0.2", None)]);
    assert!(ports.former_ranges().is_empty());
    assert!(!ports.are_relayed(bound, RelayTransport::Udp));
    // After the address returns, no port is chosen twice.
    ports.reconfigure(&config(vec![at("127.0.0.1", None)], 23_600..=23_619));
    drop(opened);
    assert!(drawn(&ports, ALICE).len() >= 16);
}
