//! The targets of a rule: which is tried first, which addresses it has, and whether it answers.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use crate::{
    Address, Balance, Endpoint, Host, Rule,
    resolver::{Name, Resolver},
};

/// A target that could not be reached is not the first choice for so long, in milliseconds.
const SUSPECT_MS: u64 = 1000;

/// All targets of one rule; shared by all workers.
pub(crate) struct Targets {
    list: Vec<Target>,
    balance: Balance,
    turn: AtomicUsize,
    began: Instant,
}

struct Target {
    endpoint: Endpoint,
    /// `None` for a literal address.
    name: Option<Arc<Name>>,
    active: AtomicUsize,
    healthy: AtomicBool,
    /// Milliseconds from [`Targets::began`]; 0 when it is not suspected.
    suspect_until: AtomicU64,
    /// Which of a name's addresses UDP sessions use: the next one after each failure.
    address: AtomicUsize,
}

/// One step of trying a target's addresses in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Candidate {
    /// Connect here.
    At(Address),
    /// There is no such address (any more): try the next target.
    Exhausted,
    /// The name has not been resolved yet.
    Pending,
}

impl Targets {
    pub(crate) fn new(rule: &Rule, resolver: &Resolver) -> Self {
        let list = rule
            .targets
            .iter()
            .map(|endpoint| Target {
                endpoint: endpoint.clone(),
                name: match &endpoint.host {
                    Host::Ip(_) | Host::Unix(_) => None,
                    Host::Name(name) => Some(resolver.name(name)),
                },
                active: AtomicUsize::new(0),
                healthy: AtomicBool::new(true),
                suspect_until: AtomicU64::new(0),
                address: AtomicUsize::new(0),
            })
            .collect();
        Self { list, balance: rule.balance, turn: AtomicUsize::new(0), began: Instant::now() }
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// The target to try first. With none healthy all count as healthy: a check that fails must not turn away clients that a
    /// target would serve.
    pub(crate) fn choose(&self) -> usize {
        if self.list.len() < 2 {
            return 0;
        }
        let healthy = |index: &usize| self.is_healthy(*index);
        let count = self.list.len();
        match self.balance {
            Balance::RoundRobin => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed) % count;
                (turn..count).chain(0..turn).find(healthy).unwrap_or(turn)
            }
            Balance::LeastConnections => {
                // Equals take turns, so that idle targets share the load.
                let turn = self.turn.fetch_add(1, Ordering::Relaxed) % count;
                let fewest = |all: bool| {
                    (turn..count)
                        .chain(0..turn)
                        .filter(|index| all || healthy(index))
                        .min_by_key(|index| self.list[*index].active.load(Ordering::Relaxed))
                };
                fewest(false).or_else(|| fewest(true)).unwrap_or(0)
            }
            Balance::Failover => (0..count).find(healthy).unwrap_or(0),
        }
    }

    /// The target to try after `tried` targets, the first of which was `first`. Failover goes down its list from the top.
    pub(crate) fn following(&self, first: usize, tried: usize) -> Option<usize> {
        (tried < self.list.len()).then(|| (first + tried) % self.list.len())
    }

    /// Address number `nth` of a target; `offset` is the listener's port less the first of its range.
    pub(crate) fn candidate(&self, target: usize, nth: usize, offset: u16) -> Candidate {
        let Some(target) = self.list.get(target) else { return Candidate::Exhausted };
        let ports = target.endpoint.ports;
        let port = if ports.first == ports.last { ports.first } else { ports.first.saturating_add(offset) };
        let at = |ip: IpAddr| Candidate::At(SocketAddr::new(ip, port).into());
        let literal = |ip: IpAddr| {
            if nth == 0 { at(ip) } else { Candidate::Exhausted }
        };
        match (&target.endpoint.host, &target.name) {
            (Host::Ip(ip), _) => literal(*ip),
            (Host::Unix(name), _) if nth == 0 => Candidate::At(Address::Unix(name.clone())),
            (Host::Unix(_), _) => Candidate::Exhausted,
            (Host::Name(_), Some(name)) => {
                let answer = name.answer.read().unwrap_or_else(PoisonError::into_inner);
                match answer.as_ref() {
                    None => Candidate::Pending,
                    Some(addresses) => addresses.get(nth).map_or(Candidate::Exhausted, |ip| at(*ip)),
                }
            }
            (Host::Name(_), None) => Candidate::Exhausted,
        }
    }

    /// One more connection to a target.
    pub(crate) fn enter(&self, target: usize) {
        if let Some(target) = self.list.get(target) {
            target.active.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// One less.
    pub(crate) fn leave(&self, target: usize) {
        if let Some(target) = self.list.get(target) {
            target.active.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// A target for a session that has one address for its life.
    pub(crate) fn pick(&self, offset: u16) -> Option<(usize, SocketAddr)> {
        let first = self.choose();
        (0..self.list.len()).find_map(|tried| {
            let index = self.following(first, tried)?;
            let turn = self.list[index].address.load(Ordering::Relaxed) % self.address_count(index).max(1);
            match self.candidate(index, turn, offset) {
                Candidate::At(Address::Ip(address)) => Some((index, address)),
                // Datagrams do not go to a stream.
                Candidate::At(Address::Unix(_)) | Candidate::Exhausted | Candidate::Pending => None,
            }
        })
    }

    /// A target could not be reached: others are tried first for a while, and its other addresses.
    pub(crate) fn suspect(&self, target: usize) {
        let Some(suspect) = self.list.get(target) else { return };
        suspect.address.fetch_add(1, Ordering::Relaxed);
        if self.list.len() > 1 {
            suspect.suspect_until.store(self.now() + SUSPECT_MS, Ordering::Relaxed);
        }
    }

    fn is_healthy(&self, target: usize) -> bool {
        self.list.get(target).is_some_and(|target| {
            let until = target.suspect_until.load(Ordering::Relaxed);
            target.healthy.load(Ordering::Relaxed) && (until == 0 || until <= self.now())
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn address_count(&self, target: usize) -> usize {
        let Some(name) = &self.list[target].name else { return 1 };
        name.answer.read().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, Vec::len)
    }

    /// Whether a target fails its health checks while another one does not.
    pub(crate) fn is_down(&self, target: usize) -> bool {
        let healthy = |target: &Target| target.healthy.load(Ordering::Relaxed);
        self.list.get(target).is_some_and(|target| !healthy(target)) && self.list.iter().any(healthy)
    }

    /// What a health check found; `true` when that is news.
    pub(crate) fn set_healthy(&self, target: usize, healthy: bool) -> bool {
        self.list.get(target).is_some_and(|target| target.healthy.swap(healthy, Ordering::Relaxed) != healthy)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::PortRange;

    fn targets(hosts: &[&str], balance: Balance) -> Targets {
        let resolver = Resolver::start(Duration::from_secs(60), |_| Ok(vec![]), || ()).unwrap();
        let mut rule = crate::testing::rule("t", SocketAddr::from(([127, 0, 0, 1], 0)));
        rule.balance = balance;
        rule.targets = hosts
            .iter()
            .map(|host| Endpoint {
                host: Host::Ip(host.parse().unwrap()),
                ports: PortRange { first: 80, last: 82 },
            })
            .collect();
        Targets::new(&rule, &resolver)
    }

    #[test]
    fn round_robin_takes_turns_and_skips_the_unhealthy() {
        let targets = targets(&["10.0.0.1", "10.0.0.2", "10.0.0.3"], Balance::RoundRobin);
        let first: Vec<usize> = (0..4).map(|_| targets.choose()).collect();
        assert_eq!(first, [0, 1, 2, 0]);
        assert!(targets.set_healthy(1, false));
        assert_eq!(targets.choose(), 2);
        assert!(!targets.set_healthy(1, false));
    }

    #[test]
    fn least_connections_takes_the_emptiest() {
        let targets = targets(&["10.0.0.1", "10.0.0.2"], Balance::LeastConnections);
        targets.enter(0);
        assert_eq!(targets.choose(), 1);
        targets.enter(1);
        targets.enter(1);
        assert_eq!(targets.choose(), 0);
        targets.leave(1);
        targets.leave(1);
        assert_eq!(targets.choose(), 1);
    }

    #[test]
    fn failover_takes_the_first_healthy_one_and_the_first_when_none_is() {
        let targets = targets(&["10.0.0.1", "10.0.0.2"], Balance::Failover);
        assert_eq!((targets.choose(), targets.choose()), (0, 0));
        targets.set_healthy(0, false);
        assert_eq!(targets.choose(), 1);
        targets.set_healthy(1, false);
        assert_eq!(targets.choose(), 0);
        assert_eq!(targets.following(1, 1), Some(0));
        assert_eq!(targets.following(1, 2), None);
    }

    #[test]
    fn a_range_of_ports_maps_one_to_one() {
        let targets = targets(&["10.0.0.1"], Balance::RoundRobin);
        assert_eq!(targets.candidate(0, 0, 2), Candidate::At(Address::Ip("10.0.0.1:82".parse().unwrap())));
        assert_eq!(targets.candidate(0, 1, 2), Candidate::Exhausted);
    }

    #[test]
    fn a_name_gives_its_addresses_in_turn_and_keeps_the_last_good_answer() {
        use std::sync::atomic::AtomicU32;
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let lookup = |_: &str| match CALLS.fetch_add(1, Ordering::SeqCst) {
            0 => Ok(vec!["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()]),
            1 => Ok(vec!["10.0.0.9".parse().unwrap()]),
            _ => Err(std::io::Error::other("no answer")),
        };
        let resolver = Resolver::start(Duration::from_millis(20), lookup, || ()).unwrap();
        let mut rule = crate::testing::rule("t", SocketAddr::from(([127, 0, 0, 1], 0)));
        rule.targets =
            vec![Endpoint { host: Host::Name("x".to_owned()), ports: PortRange { first: 80, last: 80 } }];
        let targets = Targets::new(&rule, &resolver);
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut seen = Vec::new();
        while CALLS.load(Ordering::SeqCst) < 5 {
            assert!(Instant::now() < deadline, "seen {seen:?}");
            let now = (targets.candidate(0, 0, 0), targets.candidate(0, 1, 0));
            if seen.last() != Some(&now) {
                seen.push(now);
            }
            std::thread::yield_now();
        }
        let at = |text: &str| Candidate::At(Address::Ip(text.parse().unwrap()));
        assert!(seen.contains(&(at("10.0.0.1:80"), at("10.0.0.2:80"))), "{seen:?}");
        assert_eq!(seen.last(), Some(&(at("10.0.0.9:80"), Candidate::Exhausted)));
    }
}
