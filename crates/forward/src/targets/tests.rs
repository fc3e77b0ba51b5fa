//! Tests of members that change, and of the choice among them.

use std::{
    io,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::*;
use crate::{PortRange, resolver::Resolver};

fn endpoint(text: &str) -> Endpoint {
    let (host, weight) = text.split_once('*').unwrap_or((text, "1"));
    let host = host.parse().map_or_else(|_| Host::Name(host.to_owned()), Host::Ip);
    Endpoint { host, ports: PortRange { first: 80, last: 82 }, weight: weight.parse().unwrap() }
}

fn rule(targets: &[&str], balance: Balance) -> Rule {
    let mut rule = crate::testing::rule("t", SocketAddr::from(([127, 0, 0, 1], 0)));
    rule.balance = balance;
    rule.targets = targets.iter().map(|target| endpoint(target)).collect();
    rule
}

fn targets(all: &[&str], balance: Balance) -> Targets {
    let resolver = Resolver::start(Duration::from_secs(60), |_| Ok(vec![]), || ()).unwrap();
    Targets::new(&rule(all, balance), |host, any_route| resolver.name(host, any_route))
}

fn client(last: u8) -> IpAddr {
    [192, 0, 2, last].into()
}

fn seat(pick: Pick) -> Option<(Seat, String)> {
    match pick {
        Pick::At(seat, address) => Some((seat, ip_of(&address))),
        Pick::NoTarget | Pick::Pending => None,
    }
}

fn ip_of(address: &Address) -> String {
    address.ip().unwrap().to_string()
}

/// Name of the member chosen for the next client, whose seat is released.
fn next(targets: &Targets) -> String {
    seat(targets.pick(Some(client(1)), 0, &[], true)).map_or_else(|| "nobody".to_owned(), |(_, ip)| ip)
}

fn set_healthy(targets: &Targets, ip: &str, healthy: bool) -> bool {
    let all = targets.current();
    all.iter().find(|member| ip_of(&member.address(0)) == ip).unwrap().set_healthy(healthy)
}

#[test]
fn round_robin_takes_turns_and_skips_unhealthy_targets() {
    let targets = targets(&["10.0.0.1", "10.0.0.2", "10.0.0.3"], Balance::RoundRobin);
    let first: Vec<String> = (0..4).map(|_| next(&targets)).collect();
    assert_eq!(first, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1"]);
    assert!(set_healthy(&targets, "10.0.0.2", false));
    assert!(!set_healthy(&targets, "10.0.0.2", false));
    let mut then = [next(&targets), next(&targets)];
    then.sort();
    assert_eq!(then, ["10.0.0.1", "10.0.0.3"]);
}

#[test]
fn least_connections_counts_seats() {
    let targets = targets(&["10.0.0.1", "10.0.0.2"], Balance::LeastConnections);
    let take = || seat(targets.pick(Some(client(1)), 0, &[], true)).unwrap();
    let (one, two) = (take(), take());
    assert_ne!(one.1, two.1);
    drop(two.0);
    let slot = take().0.keep();
    assert_ne!(next(&targets), next(&targets), "a kept seat is still counted");
    targets.leave(slot);
    assert_eq!(next(&targets), two.1);
    assert_eq!(next(&targets), two.1);
    drop(one);
    assert_ne!(next(&targets), next(&targets));
}

#[test]
fn failover_takes_the_first_healthy_target_or_the_first_of_all() {
    let targets = targets(&["10.0.0.1", "10.0.0.2"], Balance::Failover);
    assert_eq!((next(&targets), next(&targets)), ("10.0.0.1".to_owned(), "10.0.0.1".to_owned()));
    set_healthy(&targets, "10.0.0.1", false);
    assert_eq!(next(&targets), "10.0.0.2");
    set_healthy(&targets, "10.0.0.2", false);
    assert_eq!(next(&targets), "10.0.0.1");
}

#[test]
fn tried_targets_are_not_picked_again() {
    for balance in [Balance::RoundRobin, Balance::LeastConnections, Balance::Failover, Balance::Source] {
        let targets = targets(&["10.0.0.1", "10.0.0.2", "10.0.0.3"], balance);
        let mut tried = Vec::new();
        while let Some((seat, _)) = seat(targets.pick(Some(client(9)), 0, &tried, true)) {
            assert!(!tried.contains(&seat.slot()));
            targets.suspect(seat.member());
            tried.push(seat.slot());
        }
        assert_eq!(tried.len(), 3, "{balance:?}");
    }
}

#[test]
fn weight_0_gets_no_new_connection_even_as_a_last_resort() {
    for balance in [Balance::RoundRobin, Balance::LeastConnections, Balance::Failover, Balance::Source] {
        let targets = targets(&["10.0.0.1*0", "10.0.0.2"], balance);
        set_healthy(&targets, "10.0.0.2", false);
        assert!((0..20).all(|_| next(&targets) == "10.0.0.2"), "{balance:?}");
    }
}

#[test]
fn client_keeps_its_target_while_others_change() {
    let targets = targets(&["10.0.0.1", "10.0.0.2", "10.0.0.3"], Balance::Source);
    let of = |last| seat(targets.pick(Some(client(last)), 0, &[], true)).unwrap().1;
    let before: Vec<String> = (0..100).map(of).collect();
    assert_eq!(before, (0..100).map(of).collect::<Vec<_>>());
    set_healthy(&targets, "10.0.0.2", false);
    for (last, before) in (0..100).zip(&before) {
        assert!(of(last) == *before || before == "10.0.0.2");
    }
    set_healthy(&targets, "10.0.0.2", true);
    assert_eq!(before, (0..100).map(of).collect::<Vec<_>>());
}

#[test]
fn port_ranges_map_one_to_one() {
    let targets = targets(&["10.0.0.1"], Balance::RoundRobin);
    let Pick::At(_, address) = targets.pick(Some(client(1)), 2, &[], true) else { panic!("no target") };
    assert_eq!(address.to_string(), "10.0.0.1:82");
}

#[test]
fn addresses_of_a_family_other_than_the_source_are_left_out() {
    let resolver = Resolver::start(Duration::from_secs(60), |_| Ok(vec![]), || ()).unwrap();
    let mut rule = rule(&["10.0.0.1", "2001:db8::1"], Balance::RoundRobin);
    rule.source = Some([127, 0, 0, 1].into());
    let one = Targets::new(&rule, |host, any_route| resolver.name(host, any_route));
    assert_eq!([next(&one), next(&one)], ["10.0.0.1", "10.0.0.1"]);
    (rule.source, rule.transparent) = (None, true);
    let other = Targets::new(&rule, |host, any_route| resolver.name(host, any_route));
    let of = |client: &str| seat(other.pick(client.parse().ok(), 0, &[], true)).unwrap().1;
    assert!((0..4).all(|_| of("2001:db8::9") == "2001:db8::1" && of("192.0.2.9") == "10.0.0.1"));
}

/// A name whose lookups the test controls; `None` is a failed lookup.
struct Named {
    answer: Arc<Mutex<Option<Vec<ZonedIp>>>>,
    lookups: Arc<AtomicU32>,
    _resolver: Resolver,
    targets: Targets,
}

impl Named {
    fn start(all: &[&str], balance: Balance) -> Self {
        let answer: Arc<Mutex<Option<Vec<ZonedIp>>>> = Arc::default();
        let lookups = Arc::new(AtomicU32::new(0));
        let (given, counted) = (Arc::clone(&answer), Arc::clone(&lookups));
        let lookup = move |_: &str| {
            counted.fetch_add(1, Ordering::SeqCst);
            given.lock().unwrap().clone().ok_or(io::Error::other("no answer"))
        };
        let resolver = Resolver::start(Duration::from_millis(10), lookup, || ()).unwrap();
        let mut rule = rule(all, balance);
        // The test's addresses have no route; with `mark`, they are used anyway.
        rule.mark = Some(1);
        let targets = Targets::new(&rule, |host, any_route| resolver.name(host, any_route));
        Self { answer, lookups, _resolver: resolver, targets }
    }

    fn answer(&self, all: &[&str]) {
        *self.answer.lock().unwrap() = Some(all.iter().map(|ip| ip.parse().unwrap()).collect());
    }

    /// Waits until a lookup that started after this call has ended; lookups are sequential.
    fn look_up(&self) {
        let enough = self.lookups.load(Ordering::SeqCst) + 2;
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.lookups.load(Ordering::SeqCst) < enough {
            assert!(Instant::now() < deadline, "no lookup");
            std::thread::yield_now();
        }
    }

    fn wait(&self, count: usize, first: &str) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let all = self.targets.current();
            if all.len() == count && ip_of(&all[0].address(0)) == first {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "timed out waiting for {count} addresses starting with {first}"
            );
            std::thread::yield_now();
        }
    }
}

#[test]
fn every_address_of_a_name_is_used_along_with_other_targets() {
    let named = Named::start(&["x*2", "10.0.0.9*2"], Balance::RoundRobin);
    named.answer(&["10.0.0.1", "2001:db8::1"]);
    named.wait(3, "10.0.0.1");
    let mut seen: Vec<String> = (0..6).map(|_| next(&named.targets)).collect();
    seen.sort();
    assert_eq!(seen, ["10.0.0.1", "10.0.0.1", "10.0.0.9", "10.0.0.9", "2001:db8::1", "2001:db8::1"]);
}

#[test]
fn remaining_members_keep_their_state_and_removed_members_their_seats() {
    let named = Named::start(&["x"], Balance::Failover);
    named.answer(&["10.0.0.1", "10.0.0.2"]);
    named.wait(2, "10.0.0.1");
    let (seat_of_first, _) = seat(named.targets.pick(Some(client(1)), 0, &[], true)).unwrap();
    set_healthy(&named.targets, "10.0.0.2", false);
    let mut tallies = Tallies::default();
    tallies.of(seat_of_first.slot()).open += 1;

    named.answer(&["10.0.0.2", "10.0.0.3"]);
    named.wait(2, "10.0.0.2");
    assert_eq!(next(&named.targets), "10.0.0.3", "a remaining member keeps its health");
    let shown = named.targets.describe(&tallies);
    assert_eq!((shown.len(), ip_of(&shown[0].address)), (1, "10.0.0.1".to_owned()));

    // A member disappears with its last connection, even if another member reuses its slot.
    drop(seat_of_first);
    named.answer(&["10.0.0.4", "10.0.0.5"]);
    named.wait(2, "10.0.0.4");
    assert_eq!(named.targets.describe(&tallies).len(), 0);
    assert!(named.targets.current().iter().all(|member| member.slot.at < 5), "slots are reused");
}

#[test]
fn last_good_answer_is_kept_when_lookups_fail() {
    let named = Named::start(&["x"], Balance::RoundRobin);
    named.answer(&["10.0.0.1"]);
    named.wait(1, "10.0.0.1");
    let name = named.targets.read().configured[0].name.clone().unwrap();
    let version = name.version();
    *named.answer.lock().unwrap() = None;
    named.look_up();
    assert_eq!((next(&named.targets).as_str(), name.version()), ("10.0.0.1", version));
    named.answer(&[]);
    named.look_up();
    assert_eq!((next(&named.targets).as_str(), name.version()), ("10.0.0.1", version));
}

#[test]
fn unresolved_name_is_awaited_if_it_can_change_the_choice() {
    let (block, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = Mutex::new(blocked);
    let lookup = move |_: &str| {
        let _ = blocked.lock().unwrap().recv();
        Ok(vec![[10, 0, 0, 1].into()])
    };
    let resolver = Resolver::start(Duration::from_secs(60), lookup, || ()).unwrap();
    let pending = |all: &[&str], balance, wait| {
        let targets = Targets::new(&rule(all, balance), |host, any_route| resolver.name(host, any_route));
        matches!(targets.pick(Some(client(1)), 0, &[], wait), Pick::Pending)
    };
    assert!(pending(&["x"], Balance::RoundRobin, true));
    assert!(!pending(&["x"], Balance::RoundRobin, false));
    assert!(!pending(&["x", "10.0.0.2"], Balance::RoundRobin, true));
    assert!(!pending(&["x", "10.0.0.2"], Balance::LeastConnections, true));
    assert!(pending(&["x", "10.0.0.2"], Balance::Failover, true));
    assert!(!pending(&["10.0.0.2", "x"], Balance::Failover, true));
    assert!(pending(&["10.0.0.2", "x"], Balance::Source, true));
    assert!(!pending(&["10.0.0.2", "x*0"], Balance::Source, true));
    assert!(!pending(&["10.0.0.2", "x"], Balance::Source, false));
    drop(block);
}
