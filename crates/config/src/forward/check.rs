//! Checks of rules that are valid key by key but cannot work as a whole, or together with another rule.

use std::net::{IpAddr, Ipv6Addr};

use turnpike_rules::{
    Access, Balance, Bind, CopyMode, Host, Pattern, PortRange, Protocol, Proxy, ProxyVersion, Rule, TcpTimers,
};

use turnpike_convert::forward::{draft::Draft, parts};

use super::settings::ForwardSettings;
use crate::{Mistake, Origin};

/// Maximum listeners of one rule. A range of all ports would need 65,535 sockets per worker.
const MOST_PORTS: u16 = 4096;

pub(crate) fn rule(draft: &Draft, problems: &mut Vec<Mistake>) {
    let mut refuse = |path: &'static str, problem: String, expected: &str| {
        problems.push(Mistake::new(draft.origin_of(path), path, problem, expected));
    };
    addresses(&draft.rule, &mut refuse);
    unix(draft, &mut refuse);
    weights(&draft.rule, &mut refuse);
    let protocol = draft.rule.protocol;
    let rule = &draft.rule;
    let asks = rule.health_question.is_some();
    let begins = "only TCP connections start with a PROXY header";
    let announces_datagrams = protocol == Protocol::Udp && rule.send_proxy == Some(ProxyVersion::V2);
    let only_tcp = "a rule from TCP to TCP";
    let limit = rule.limits.max_bytes_per_second.or(rule.limits.max_bytes_per_second_per_connection);
    // A key that has no effect for a protocol is rejected instead of being ignored.
    let everywhere = [
        (
            asks && rule.health.is_none(),
            if draft.has("rule.health_send") { "rule.health_send" } else { "rule.health_expect" },
            "there are no health checks: the rule has no health",
            "health as well, the seconds between two checks",
        ),
        (
            protocol != Protocol::Udp && rule.any_port,
            "rule.any_port",
            "only a UDP target can answer from another port",
            "a rule from UDP to UDP",
        ),
        (
            !rule.keepalive && TcpTimers { user_timeout: None, ..rule.timers } != TcpTimers::default(),
            "rule.keepalive",
            "the rule configures keepalive probes and turns them off",
            "true, or no keepalive_idle, keepalive_interval and keepalive_count",
        ),
        (
            protocol == Protocol::Udp && rule.timers != TcpTimers::default(),
            ["rule.keepalive_idle", "rule.keepalive_interval", "rule.keepalive_count"]
                .into_iter()
                .find(|path| draft.has(path))
                .unwrap_or("rule.user_timeout"),
            "UDP has no such timers",
            "a rule without this key",
        ),
        (
            rule.transparent && rule.source.is_some(),
            "rule.transparent",
            "a transparent rule sends from the client's address, not from rule.source",
            "one of the two",
        ),
        (
            rule.copy == CopyMode::Kernel && limit.is_some(),
            "rule.copy",
            "a rate limit needs the user-space copy",
            "another copy mode, or no rate limit",
        ),
        (
            protocol == Protocol::Udp && rule.kernel == Some(true) && rule.kernel_obstacle().is_some(),
            "rule.kernel",
            rule.kernel_obstacle().unwrap_or_default(),
            "false, or a rule without this key",
        ),
        (
            protocol != Protocol::Udp && draft.has("rule.kernel"),
            "rule.kernel",
            "it applies only to rules from UDP to UDP",
            "a rule without this key",
        ),
    ];
    let with_udp = [
        (!rule.proxy_protocol_from.is_empty(), "rule.proxy_protocol_from", begins, only_tcp),
        (rule.half_close_timeout.is_some(), "rule.half_close_timeout", "UDP has no half-close", only_tcp),
        (
            rule.send_proxy.is_some() && !announces_datagrams,
            "rule.proxy",
            "PROXY headers exist for TCP and, in version 2, also for UDP",
            "a rule from TCP to TCP, or v2 in a rule from UDP to UDP",
        ),
        (
            draft.has("rule.copy"),
            "rule.copy",
            "it applies only to rules from TCP to TCP",
            "a rule without this key",
        ),
        (
            rule.idle.is_none(),
            "rule.idle",
            "a UDP session ends only by timeout",
            "1 or more seconds, because one side is UDP",
        ),
    ];
    let with_udp = with_udp.into_iter().filter(|_| protocol != Protocol::Tcp);
    for (wrong, path, problem, expected) in everywhere.into_iter().chain(with_udp) {
        if wrong {
            refuse(path, problem.to_owned(), expected);
        }
    }
}

fn addresses(rule: &Rule, refuse: &mut impl FnMut(&'static str, String, &str)) {
    let listens_on = length(rule.ports);
    if listens_on > MOST_PORTS {
        refuse("rule.listen", format!("{listens_on} ports"), "at most 4096 ports in one rule");
    }
    for target in &rule.targets {
        let wanted = length(target.ports);
        if wanted != 1 && wanted != listens_on {
            refuse(
                "rule.target",
                format!("{target} has {wanted} ports, the listener has {listens_on}"),
                "as many ports as the listener has, or one for all of them",
            );
        }
        if let (Some(source), Host::Ip(target)) = (rule.source, &target.host)
            && source.ip().is_ipv4() != target.is_ipv4()
        {
            refuse(
                "rule.source",
                format!("{source} and the target {target} are of different families"),
                "an address of the target's family",
            );
        }
    }
    if !rule.ipv6_only && rule.bind != Bind::Ip(Ipv6Addr::UNSPECIFIED.into()) {
        let listener = parts::show_listener(&rule.bind, rule.ports);
        let expected = "the listener [::], the only one that can accept IPv4 too";
        refuse("rule.ipv6_only", format!("{listener} has only one family"), expected);
    }
}

fn weights(rule: &Rule, refuse: &mut impl FnMut(&'static str, String, &str)) {
    if rule.targets.iter().all(|target| target.weight == 0) {
        let problem = "every target has the weight 0, so no client would be served".to_owned();
        refuse("rule.target", problem, "a weight above 0 for one of them");
    }
    if let Some(target) = rule.targets.iter().find(|target| target.weight > 1)
        && rule.balance == Balance::Failover
    {
        let target = parts::show_target(target);
        let problem = format!("{target} has a weight, but failover uses the first healthy target");
        refuse("rule.target", problem, "with failover, no weight other than 0, or another balance");
    }
}

pub(crate) fn doubts(draft: &Draft) -> Vec<String> {
    let everybody = |proxy: &&Proxy| matches!(proxy, Proxy::Network(Pattern::Prefix(_, 0)));
    let all = draft.rule.proxy_protocol_from.iter().find(everybody).map(|all| {
        let place = draft.origin_of("rule.proxy_protocol_from");
        format!(
            "{place}: rule.proxy_protocol_from: {} lets every client claim any address, and refuses those without a PROXY header; list the \
             proxies' own addresses",
            parts::show_proxy(all)
        )
    });
    let Access { allow, deny } = &draft.rule.access;
    let of_lists = [("rule.allow", allow), ("rule.deny", deny)].into_iter().flat_map(|(path, patterns)| {
        patterns_that_miss(patterns).map(move |miss| format!("{}: {path}: {miss}", draft.origin_of(path)))
    });
    all.into_iter().chain(of_lists).collect()
}

pub(crate) fn doubts_about_all(settings: &ForwardSettings) -> Vec<String> {
    let lists = [("forward.allow", &settings.access.allow), ("forward.deny", &settings.access.deny)];
    let each = lists.into_iter().flat_map(|(key, patterns)| {
        let place = settings.origins.get(key).unwrap_or(&Origin::Default);
        patterns_that_miss(patterns).map(move |miss| format!("{place}: {key}: {miss}"))
    });
    each.collect()
}

fn patterns_that_miss(patterns: &[Pattern]) -> impl Iterator<Item = String> {
    patterns.iter().filter_map(|pattern| {
        let shown = parts::show_pattern(pattern);
        let meant = parts::did_you_mean(parts::meant_prefix(&shown));
        parts::misses_zeros(pattern).then(|| {
            format!("{shown:?} matches only addresses that are written with these zeros, but most are written with ::{meant}")
        })
    })
}

/// Rejects keys that do not apply to Unix sockets, which are streams and have no addresses.
fn unix(draft: &Draft, refuse: &mut impl FnMut(&'static str, String, &str)) {
    let rule = &draft.rule;
    let listens = matches!(rule.bind, Bind::Unix(_));
    let target = rule.targets.iter().find(|target| matches!(target.host, Host::Unix(_)));
    let from_tcp_to_tcp = rule.protocol == Protocol::Tcp;
    let named = rule.proxy_protocol_from.contains(&Proxy::Unix);
    if listens && !from_tcp_to_tcp {
        refuse(
            "rule.listen",
            "only stream-type Unix sockets are supported".to_owned(),
            "an address and port, because one side is UDP",
        );
    }
    if target.is_some() && !from_tcp_to_tcp {
        refuse(
            "rule.target",
            "only stream-type Unix sockets are supported".to_owned(),
            "an address and port, because one side is UDP",
        );
    }
    if named && !listens {
        let problem = "the rule does not listen on a Unix socket".to_owned();
        refuse(
            "rule.proxy_protocol_from",
            problem,
            "unix: together with a listener such as unix:/run/app.sock",
        );
    }
    if rule.freebind && listens {
        let problem = "a Unix socket has no IP address".to_owned();
        refuse("rule.freebind", problem, "a rule without this key");
    }
    if rule.socket_mode.is_some() && !listens {
        let problem = "the rule does not listen on a Unix socket".to_owned();
        refuse("rule.socket_mode", problem, "a listener such as unix:/run/app.sock");
    }
    if (listens || target.is_some()) && rule.copy == CopyMode::Kernel {
        refuse(
            "rule.copy",
            "the kernel forwards only between TCP sockets".to_owned(),
            "another copy mode for a Unix socket",
        );
    }
    if let Some(target) = target {
        for (path, set) in [
            ("rule.source", rule.source.is_some()),
            ("rule.device", rule.device.is_some()),
            ("rule.mark", rule.mark.is_some()),
            ("rule.transparent", rule.transparent),
        ] {
            if set {
                let problem = format!("{} has no address and no route", target);
                refuse(path, problem, "targets with addresses");
            }
        }
    }
    // Behind a proxy, clients have the addresses given in its headers.
    if listens && !named {
        for (path, set) in [
            ("rule.transparent", rule.transparent),
            ("rule.allow", !rule.access.allow.is_empty()),
            ("rule.deny", !rule.access.deny.is_empty()),
            ("rule.max_connections_per_client", rule.limits.max_connections_per_client.is_some()),
            ("rule.new_connections_per_client", rule.limits.new_connections_per_client.is_some()),
        ] {
            if set {
                let problem = "clients of a Unix socket have no address".to_owned();
                refuse(
                    path,
                    problem,
                    "rule.socket_mode and the permissions of its directory, or rule.proxy_protocol_from = \"unix:\"",
                );
            }
        }
    }
}

pub(crate) fn together(drafts: &[Draft], problems: &mut Vec<Mistake>) {
    for (index, draft) in drafts.iter().enumerate() {
        let mut refuse = |path: &str, problem: String, expected: &str| {
            problems.push(Mistake::new(draft.origin_of(path), path, problem, expected));
        };
        let rule = &draft.rule;
        if let Some(other) = drafts[..index].iter().find(|other| collide(&other.rule, rule)) {
            let listener = parts::show_listener(&rule.bind, rule.ports);
            refuse(
                "rule.listen",
                format!("{listener} is already used by the rule at {}", other.origin),
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

/// Returns true if the kernel cannot bind the listeners of both rules. IPv6 listeners accept IPv4 only if
/// configured to.
fn collide(a: &Rule, b: &Rule) -> bool {
    let transport = |rule: &Rule| matches!(rule.protocol, Protocol::Tcp | Protocol::TcpToUdp { .. });
    let both_families = |rule: &Rule, ip: IpAddr| ip.is_ipv6() && !rule.ipv6_only;
    let same_address = match (&a.bind, &b.bind) {
        (Bind::Ip(from), Bind::Ip(other)) => {
            let (from, other) = (from.ip().to_canonical(), other.ip().to_canonical());
            let same_family =
                from.is_ipv4() == other.is_ipv4() || both_families(a, from) || both_families(b, other);
            from == other || same_family && (from.is_unspecified() || other.is_unspecified())
        }
        (Bind::Unix(from), Bind::Unix(other)) => return from == other,
        (from, other) => from == other,
    };
    transport(a) == transport(b)
        && same_address
        && a.ports.first != 0
        && b.ports.first != 0
        && a.ports.first <= b.ports.last
        && b.ports.first <= a.ports.last
}

fn length(ports: PortRange) -> u16 {
    // The difference is at most 65,534, because port 0 cannot start a range of several ports.
    (ports.last - ports.first).saturating_add(1)
}
