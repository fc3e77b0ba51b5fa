//! Detects rules that forward to each other: a datagram would circulate forever, and connections would be opened
//! until the descriptors run out. Only literal addresses and `localhost` are checked here; the forwarder
//! detects loops through other names at run time.

use std::{
    cell::LazyCell,
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use turnpike_rules::{Bind, Host, Protocol, Rule, hears};

use crate::Mistake;
use turnpike_convert::forward::{draft::Draft, parts};

const LOCALHOST: &str = "localhost";

/// A port of a rule: the index of the rule, and the offset in its port range.
type RulePort = (usize, u16);

pub(crate) fn check(drafts: &[Draft], problems: &mut Vec<Mistake>) {
    let map = Map::new(drafts);
    let mut state: HashMap<RulePort, VisitState> = HashMap::new();
    for start in map.nodes() {
        let Some(circle) = find(&map, start, &mut state) else { continue };
        let first = circle.iter().copied().min().unwrap_or(start);
        let draft = &drafts[first.0];
        let mut others: Vec<usize> =
            circle.iter().map(|(rule, _)| *rule).filter(|rule| *rule != first.0).collect();
        others.sort_unstable();
        others.dedup();
        let by: Vec<String> = others.iter().map(|rule| drafts[*rule].origin.to_string()).collect();
        let problem = match (&by[..], port_of(&draft.rule, first.1)) {
            ([], listener) => format!("the rule forwards to its own listener {listener}"),
            ([one], listener) => {
                format!("the rule forwards back to its own listener {listener} through the rule at {one}")
            }
            (several, listener) => {
                format!(
                    "the rule forwards back to its own listener {listener} through the rules at {}",
                    several.join(" and at ")
                )
            }
        };
        let expected = "a target that is not a listener of this forwarder";
        problems.push(Mistake::new(draft.origin_of("rule.target"), "rule.target", problem, expected));
        // One error per rule instead of one per port of a range.
        for rule in circle.iter().map(|(rule, _)| *rule) {
            let ports = drafts[rule].rule.ports;
            state.extend((0..=ports.last - ports.first).map(|offset| ((rule, offset), VisitState::Done)));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum VisitState {
    OnPath,
    Done,
}

/// Finds a loop from `start`. Iterative, because a chain can be as long as the list of rules.
fn find(map: &Map<'_>, start: RulePort, state: &mut HashMap<RulePort, VisitState>) -> Option<Vec<RulePort>> {
    if state.contains_key(&start) {
        return None;
    }
    let mut path: Vec<(RulePort, Vec<RulePort>)> = vec![(start, map.next(start))];
    state.insert(start, VisitState::OnPath);
    let mut circle = None;
    while let Some((node, nexts)) = path.last_mut() {
        let node = *node;
        let Some(next) = nexts.pop() else {
            state.insert(node, VisitState::Done);
            path.pop();
            continue;
        };
        match state.get(&next) {
            None => {
                state.insert(next, VisitState::OnPath);
                path.push((next, map.next(next)));
            }
            Some(VisitState::OnPath) if circle.is_none() => {
                let nodes = path.iter().map(|(node, _)| *node);
                circle = Some(nodes.skip_while(|node| *node != next).collect());
            }
            Some(_) => {}
        }
    }
    circle
}

struct Map<'a> {
    drafts: &'a [Draft],
    binds: Vec<Option<IpAddr>>,
    /// Keyed by transport (true for UDP) and port.
    listeners: HashMap<(bool, u16), Vec<usize>>,
    own: Vec<IpAddr>,
}

impl<'a> Map<'a> {
    fn new(drafts: &'a [Draft]) -> Self {
        let mut listeners: HashMap<(bool, u16), Vec<usize>> = HashMap::new();
        let mut own = Vec::new();
        let localhost = LazyCell::new(|| parts::local_address(LOCALHOST, super::machine().resolve).ok());
        let address = |draft: &Draft| match &draft.rule.bind {
            Bind::Ip(ip) => Some(ip.ip().to_canonical()),
            Bind::Name(name) if name == LOCALHOST => *localhost,
            Bind::Name(_) | Bind::Unix(_) => None,
        };
        let binds: Vec<_> = drafts.iter().map(address).collect();
        for (at, (Draft { rule, .. }, bind)) in drafts.iter().zip(&binds).enumerate() {
            let Some(ip) = *bind else { continue };
            own.extend((!ip.is_unspecified()).then_some(ip));
            for port in (rule.ports.first..=rule.ports.last).filter(|port| *port != 0) {
                listeners.entry((hears_udp(rule), port)).or_default().push(at);
            }
        }
        Self { drafts, binds, listeners, own }
    }

    fn nodes(&self) -> impl Iterator<Item = RulePort> {
        let each = self.drafts.iter().enumerate();
        each.filter(|(_, draft)| draft.rule.targets.iter().any(|target| self.is_here(&target.host))).flat_map(
            |(at, draft)| {
                let ports = draft.rule.ports;
                (0..=ports.last - ports.first).map(move |offset| (at, offset))
            },
        )
    }

    fn is_here(&self, host: &Host) -> bool {
        match host {
            Host::Ip(ip) => {
                let ip = ip.to_canonical();
                ip.is_loopback() || ip.is_unspecified() || self.own.contains(&ip)
            }
            Host::Unix(_) => true,
            Host::Name(name) => name == LOCALHOST,
        }
    }

    fn next(&self, (at, offset): RulePort) -> Vec<RulePort> {
        let rule = &self.drafts[at].rule;
        // A rule with a mark or device may use another routing table, which can route the same address to a
        // different machine.
        if rule.mark.is_some() || rule.device.is_some() {
            return Vec::new();
        }
        let speaks_udp = matches!(rule.protocol, Protocol::Udp | Protocol::TcpToUdp { .. });
        let mut found = Vec::new();
        for target in rule.targets.iter().filter(|target| target.weight > 0 && self.is_here(&target.host)) {
            if let Host::Unix(name) = &target.host {
                let listens = |draft: &Draft| matches!(&draft.rule.bind, Bind::Unix(own) if own == name);
                found.extend(self.drafts.iter().position(listens).map(|at| (at, 0)));
                continue;
            }
            let ports = target.ports;
            let port =
                if ports.first == ports.last { ports.first } else { ports.first.saturating_add(offset) };
            let Some(listeners) = self.listeners.get(&(speaks_udp, port)) else { continue };
            let reached = listeners.iter().filter(|at| self.hears(**at, &target.host));
            found.extend(reached.map(|at| (*at, port - self.drafts[*at].rule.ports.first)));
        }
        found
    }

    /// Returns true if connections to this host reach the rule's listener.
    fn hears(&self, at: usize, host: &Host) -> bool {
        let Some(bind) = self.binds[at] else { return false };
        let reached = |ip| hears(bind, self.drafts[at].rule.ipv6_only, ip);
        match host {
            Host::Ip(ip) => reached(*ip),
            Host::Name(_) => reached(Ipv4Addr::LOCALHOST.into()) && reached(Ipv6Addr::LOCALHOST.into()),
            Host::Unix(_) => false,
        }
    }
}

fn hears_udp(rule: &Rule) -> bool {
    matches!(rule.protocol, Protocol::Udp | Protocol::UdpToTcp { .. })
}

fn port_of(rule: &Rule, offset: u16) -> String {
    parts::show_listener(&rule.bind, (rule.ports.first + offset).into())
}

#[cfg(test)]
mod tests {
    use crate::{Flags, Sources, forward::ForwardSources};

    fn told(rules: &[&str]) -> Vec<String> {
        let sources = ForwardSources {
            sources: Sources::new(None, Vec::new(), Flags::new()),
            arguments: rules.iter().map(|&rule| rule.to_owned()).collect(),
        };
        sources
            .merge(None, Vec::new())
            .map_or_else(|mistakes| mistakes.0.iter().map(ToString::to_string).collect(), |_| Vec::new())
    }

    #[test]
    fn forwarding_loops_are_refused_with_both_positions() {
        let told = told(&["udp://127.0.0.1:35663=127.0.0.1:35664", "udp://127.0.0.1:35664=127.0.0.1:35663"]);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(
            told[0].contains(
                "rule.target: the rule forwards back to its own listener 127.0.0.1:35663 through the rule at "
            ),
            "{told:?}"
        );
        assert!(told[0].ends_with("expected a target that is not a listener of this forwarder"), "{told:?}");
    }

    #[test]
    fn each_loop_is_reported_once() {
        for rules in [
            &["udp://0.0.0.0:53=127.0.0.1:53"][..],
            &["tcp://10.0.0.1:80=10.0.0.1:80"],
            &["tcp://[::]:80=127.0.0.1:80?ipv6_only=false"],
            &["udp://0.0.0.0:9000-9010=127.0.0.1:9000-9010"],
            &[
                "tcp://0.0.0.0:1=127.0.0.1:2",
                "tcp://0.0.0.0:2=127.0.0.1:3",
                "tcp://0.0.0.0:3=10.0.0.9:1,127.0.0.1:1",
            ],
            &["udptotcp://0.0.0.0:1=127.0.0.1:2", "tcptoudp://0.0.0.0:2=127.0.0.1:1"],
            &["unix:///run/a=127.0.0.1:1", "tcp://127.0.0.1:1=unix:/run/a"],
            &["udp://0.0.0.0:1-3=127.0.0.1:2-4", "udp://0.0.0.0:4=0.0.0.0:2"],
            // Tests resolve localhost to 127.0.0.1.
            &["tcp://localhost:80=127.0.0.1:80"],
            &["tcp://[::]:80=localhost:80?ipv6_only=false"],
            &["tcp://localhost:80=127.0.0.1:81", "tcp://0.0.0.0:81=127.0.0.1:80"],
        ] {
            assert_eq!(told(rules).len(), 1, "{rules:?}: {:?}", told(rules));
        }
    }

    #[test]
    fn chains_and_targets_on_other_machines_are_not_loops() {
        for rules in [
            &["tcp://0.0.0.0:80=127.0.0.1:81", "tcp://127.0.0.1:81=10.0.0.2:80"][..],
            &["tcp://0.0.0.0:80=10.0.0.2:80"],
            &["tcp://127.0.0.1:80=127.0.0.2:80"],
            &["udp://0.0.0.0:53=127.0.0.1:54", "tcp://0.0.0.0:54=127.0.0.1:53"],
            &["tcp://[::]:80=127.0.0.1:80"],
            &["udp://0.0.0.0:1-3=127.0.0.1:2-4"],
            &["tcp://0.0.0.0:80=127.0.0.1:80*0,10.0.0.2:80"],
            &["tcp://0.0.0.0:80=127.0.0.1:80?mark=7"],
            &["tcp://localhost:80=[::1]:80"],
            // A server may be listening on the name's other address.
            &["tcp://[::1]:80=localhost:80"],
            &["tcp://127.0.0.1:80=localhost:80"],
            &["tcp://nowhere:80=127.0.0.1:80"],
            &["tcp://127.0.0.1:80=0.0.0.0:81", "tcp://127.0.0.2:81=127.0.0.1:80"],
        ] {
            assert_eq!(told(rules), [""; 0], "{rules:?}");
        }
    }
}
