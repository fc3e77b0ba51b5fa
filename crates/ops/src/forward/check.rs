//! Rules that are right key by key and impossible as a whole, or impossible together.

use std::net::IpAddr;

use turnpike_forward::{Balance, Host, PortRange, Protocol, Rule};

use super::{parts, rule_keys::Draft};
use crate::config::ConfigError;

/// Listeners of one rule; a range of every port would need 65,535 sockets a worker.
const MOST_PORTS: u16 = 4096;

/// Appends what cannot work about one rule.
pub(crate) fn rule(draft: &Draft, problems: &mut Vec<ConfigError>) {
    let Rule { protocol, ports, targets, .. } = &draft.rule;
    let mut refuse = |path: &'static str, problem: String, expected: &str| {
        problems.push(ConfigError {
            origin: draft.origin_of(path).clone(),
            key: path.to_owned(),
            problem,
            expected: expected.to_owned(),
            suggestion: None,
        });
    };
    let rule = &draft.rule;
    if length(*ports) > MOST_PORTS {
        refuse("rule.listen", format!("{} ports", length(*ports)), "at most 4096 ports in one rule");
    }
    for target in targets {
        let wanted = length(target.ports);
        if wanted != 1 && wanted != length(*ports) {
            refuse(
                "rule.target",
                format!(
                    "{} has {wanted} ports, the listener has {}",
                    parts::show_endpoint(target),
                    length(*ports)
                ),
                "as many ports as the listener has, or one for all of them",
            );
        }
        if let (Some(source), Host::Ip(target)) = (rule.source, &target.host)
            && source.is_ipv4() != target.is_ipv4()
        {
            refuse(
                "rule.source",
                format!("{source} has another family than the target {target}"),
                "an address of the target's family",
            );
        }
    }
    if rule.targets.iter().all(|target| target.weight == 0) {
        refuse(
            "rule.target",
            "every target has the weight 0, so that nobody would be served".to_owned(),
            "a weight above 0 for one of them",
        );
    }
    if let Some(target) = rule.targets.iter().find(|target| target.weight > 1)
        && rule.balance == Balance::Failover
    {
        refuse(
            "rule.target",
            format!(
                "{} has a weight, and failover takes the first that is healthy",
                parts::show_target(target)
            ),
            "no weight but 0 with failover, or another balance",
        );
    }
    // Silence about what the runtime does not do for other protocols would be a promise.
    let only_tcp = "a rule from TCP to TCP";
    if *protocol != Protocol::Tcp {
        if rule.health_check.is_some() {
            refuse("rule.health", "targets are checked by a TCP connect".to_owned(), only_tcp);
        }
        if rule.accept_proxy {
            refuse("rule.accept_proxy", "a PROXY header begins a TCP connection".to_owned(), only_tcp);
        }
        if rule.send_proxy.is_some() {
            refuse("rule.proxy", "a PROXY header begins a TCP connection".to_owned(), only_tcp);
        }
        if draft.has("rule.copy") {
            refuse("rule.copy", "only TCP to TCP has a choice".to_owned(), "no such key in this rule");
        }
    }
    if rule.idle_timeout.is_none() && *protocol != Protocol::Tcp {
        refuse(
            "rule.idle",
            "a UDP session has no end of its own".to_owned(),
            "1 or more seconds where one side is UDP",
        );
    }
    if rule.transparent && rule.source.is_some() {
        refuse(
            "rule.transparent",
            "a transparent rule sends from the client's address, not from rule.source".to_owned(),
            "one of the two",
        );
    }
}

/// Appends what two rules cannot both have: a name, a listener.
pub(crate) fn together(drafts: &[Draft], problems: &mut Vec<ConfigError>) {
    for (index, draft) in drafts.iter().enumerate() {
        let mut refuse = |path: &str, problem: String, expected: &str| {
            problems.push(ConfigError {
                origin: draft.origin_of(path).clone(),
                key: path.to_owned(),
                problem,
                expected: expected.to_owned(),
                suggestion: None,
            });
        };
        let rule = &draft.rule;
        if let Some(other) = drafts[..index].iter().find(|other| collide(&other.rule, rule)) {
            let listener = parts::show_listener(rule.bind, rule.ports);
            refuse(
                "rule.listen",
                format!("{listener} is already listened on by the rule at {}", other.origin),
                "each address and port once per protocol",
            );
        } else if let Some(other) = drafts[..index].iter().find(|other| other.rule.id == rule.id) {
            refuse(
                "rule.name",
                format!("the rule at {} is also named {:?}", other.origin, rule.id.0),
                "each name once",
            );
        }
    }
}

/// The kernel lets nobody listen on a port of one address and of all addresses at once. IPv6 listeners take no IPv4.
fn collide(a: &Rule, b: &Rule) -> bool {
    let transport = |rule: &Rule| matches!(rule.protocol, Protocol::Tcp | Protocol::TcpToUdp { .. });
    let same_address = |a: IpAddr, b: IpAddr| {
        let (a, b) = (a.to_canonical(), b.to_canonical());
        a == b || a.is_ipv4() == b.is_ipv4() && (a.is_unspecified() || b.is_unspecified())
    };
    transport(a) == transport(b)
        && same_address(a.bind, b.bind)
        && a.ports.first != 0
        && b.ports.first != 0
        && a.ports.first <= b.ports.last
        && b.ports.first <= a.ports.last
}

fn length(ports: PortRange) -> u16 {
    // At most 65,534: a range that starts at 0 ends there.
    (ports.last - ports.first).saturating_add(1)
}
