//! Keys of one rule, for `[[rule]]` in TOML files and `?key=value` on the command line.

use std::{fmt::Write as _, time::Duration};

use turnpike_convert::toml_text::{list, quoted};
use turnpike_rules::{
    Balance, CopyMode, Endpoint, MOST_WEIGHT, Pattern, Protocol, Proxy, ProxyVersion, Question, Rule, RuleId,
};

use turnpike_strict::{TableEntry, Value, ValueNode, find, nearest};

use turnpike_convert::forward::{
    draft::{Draft, default_id, defaults},
    parts,
};

use crate::{
    Checks, Mistake, Origin,
    key::{KeySpec, ValueKind, field, kind, named, number, scalar},
    keys,
    read::ValueReader,
};

/// Reads a rule; errors go to `problems`. Returns `None` if a mandatory key is missing or a value is
/// invalid.
pub(crate) fn read_rule(
    entries: &[TableEntry],
    origin: Origin,
    problems: &mut Vec<Mistake>,
) -> Option<Draft> {
    let mut draft = Draft::new(origin);
    let mut good = true;
    for entry in entries.iter().filter(|entry| RULE_KEYS.iter().all(|spec| spec.name() != entry.key)) {
        problems.push(unknown_key(entry));
        good = false;
    }
    // The order of the table matters: the valid values can depend on the protocol.
    for spec in RULE_KEYS {
        for entry in entries.iter().filter(|entry| entry.key == spec.name()) {
            if draft.has(spec.path) {
                problems.push(said_twice(spec, entry));
                good = false;
                continue;
            }
            if spec.read(&entry.node, &mut draft.rule, Checks::NONE, problems).is_none() {
                good = false;
            }
            // Recorded even if the value is wrong, so that the key is not reported as missing too.
            draft.origins.insert(spec.path, entry.node.origin.clone());
        }
    }
    for path in ["rule.listen", "rule.target"].into_iter().filter(|path| !draft.has(path)) {
        problems.push(Mistake::new(
            &draft.origin,
            path,
            "the rule lacks this key",
            spec_of(path).map_or("", |spec| spec.expected),
        ));
        good = false;
    }
    good.then(|| draft.with_defaults())
}

/// Reads one or two rules: `tcp+udp` becomes one rule per protocol. Errors are reported once.
pub(crate) fn read_rules(entries: &[TableEntry], origin: &Origin, problems: &mut Vec<Mistake>) -> Vec<Draft> {
    let is_both = |entry: &&TableEntry| {
        entry.key == "protocol" && matches!(&entry.node.value, Value::Text(text) if **text == BOTH)
    };
    if !entries.iter().any(|entry| is_both(&entry)) {
        return read_rule(entries, origin.clone(), problems).into_iter().collect();
    }
    let before = problems.len();
    let mut drafts = Vec::new();
    for (protocol, foreign) in [("tcp", ONLY_UDP), ("udp", ONLY_TCP)] {
        let mut entries = entries.to_vec();
        entries.retain(|entry| !foreign.contains(&entry.key.as_str()));
        for entry in &mut entries {
            let text = match (entry.key.as_str(), &entry.node.value) {
                ("protocol", _) => protocol.to_owned(),
                ("name", Value::Text(name)) => format!("{}-{protocol}", name.as_str()),
                _ => continue,
            };
            entry.node.value = Value::text(&text);
        }
        drafts.extend(read_rule(&entries, origin.clone(), problems));
        if problems.len() > before {
            break;
        }
    }
    drafts
}

/// Writes the rule as a `[[rule]]`, leaving out keys that have their default or the value set for all
/// rules.
pub(crate) fn as_toml(rule: &Rule, max_connections: usize, copy: CopyMode) -> String {
    let mut text = "[[rule]]\n".to_owned();
    let plain = Rule {
        id: default_id(rule),
        max_connections,
        copy,
        ..defaults(with_framing(rule.protocol, false).unwrap_or(rule.protocol))
    };
    for spec in RULE_KEYS {
        let shown = (spec.show)(rule);
        let needed = ["rule.protocol", "rule.listen", "rule.target"].contains(&spec.path);
        if needed || shown != (spec.show)(&plain) {
            let _ = writeln!(text, "{} = {shown}", spec.name());
        }
    }
    text
}

/// TCP and UDP on the same port, as two rules.
pub(crate) const BOTH: &str = "tcp+udp";
/// Keys that only the TCP rule of [`BOTH`] gets.
const ONLY_TCP: &[&str] = &[
    "half_close_timeout",
    "keepalive_idle",
    "keepalive_interval",
    "keepalive_count",
    "user_timeout",
    "copy",
];
const ONLY_UDP: &[&str] = &["any_port", "kernel"];

fn spec_of(path: &str) -> Option<&'static KeySpec<Rule>> {
    RULE_KEYS.iter().find(|spec| spec.path == path)
}

fn said_twice(spec: &KeySpec<Rule>, entry: &TableEntry) -> Mistake {
    Mistake::new(
        &entry.origin,
        spec.path,
        "the key is given twice",
        "each key once; lists are separated by commas",
    )
}

fn unknown_key(entry: &TableEntry) -> Mistake {
    if entry.key == "accept_proxy" {
        return Mistake::new(
            &entry.origin,
            "rule.accept_proxy",
            "it would trust every client that connects",
            format!("proxy_protocol_from, the addresses of the proxies: {}", parts::PROXY_FORM),
        );
    }
    let names: Vec<&str> = RULE_KEYS.iter().map(KeySpec::name).collect();
    let unknown = entry.unknown("rule", &names);
    match SYNONYMS.iter().find(|(other, _)| *other == entry.key) {
        Some((_, ours)) => unknown.suggesting_instead(Some(ours)),
        None => unknown,
    }
}

const SYNONYMS: [(&str, &str); 22] = [
    ("targets", "target"),
    ("to", "target"),
    ("remote", "target"),
    ("backend", "target"),
    ("upstream", "target"),
    ("from", "listen"),
    ("bind", "listen"),
    ("local", "listen"),
    ("timeout", "idle"),
    ("udp_timeout", "idle"),
    ("idle_timeout", "idle"),
    ("tcp_timeout", "connect_timeout"),
    ("send_proxy", "proxy"),
    ("proxy_protocol", "proxy"),
    ("check", "health"),
    ("health_check", "health"),
    ("maxconn", "max_connections"),
    ("policy", "balance"),
    ("strategy", "balance"),
    ("interface", "device"),
    ("through", "source"),
    ("tcp_nodelay", "nodelay"),
];

const HEALTH: ValueKind<Option<Duration>> =
    seconds::<86_400>("seconds between two checks of a target, 1 to 86400, or 0 for none");
const IDLE: ValueKind<Option<Duration>> =
    seconds::<LONGEST>("seconds without a byte, 1 to 31536000, or 0 for no limit");
const HALF_CLOSE: ValueKind<Option<Duration>> = seconds::<LONGEST>(
    "seconds without a byte after one side has finished sending, 1 to 31536000, or 0 for no limit",
);
const LONGEST: u64 = 31_536_000;
const KEEPALIVE_IDLE: ValueKind<Option<Duration>> = seconds::<32_767>(
    "seconds without traffic before the first keepalive probe, 1 to 32767, or 0 for the system default",
);
const KEEPALIVE_INTERVAL: ValueKind<Option<Duration>> =
    seconds::<32_767>("seconds between two keepalive probes, 1 to 32767, or 0 for the system default");
const USER_TIMEOUT: ValueKind<Option<Duration>> =
    seconds::<86_400>("seconds without an acknowledgement, 1 to 86400, or 0 for the system default");
const KEEPALIVE_COUNT: ValueKind<Option<u32>> = ValueKind::one(
    "keepalive probes without an answer, 1 to 127, or 0 for the system default",
    |reader, node| reader.integer(node, &(0..=127)).map(|count: u32| (count > 0).then_some(count)),
    |count| count.unwrap_or(0).to_string(),
);

/// A duration in seconds; 0 means none.
const fn seconds<const MOST: u64>(expected: &'static str) -> ValueKind<Option<Duration>> {
    ValueKind::one(
        expected,
        |reader, node| {
            let seconds = reader.integer(node, &(0..=MOST))?;
            Some((seconds > 0).then(|| Duration::from_secs(seconds)))
        },
        |seconds| seconds.map_or(0, |seconds| seconds.as_secs()).to_string(),
    )
}

/// Keys in display order.
pub(crate) static RULE_KEYS: &[KeySpec<Rule>] = &[
    scalar!(
        "rule.name",
        "a name of 1 to 64 characters without control characters, \" or \\",
        |reader, node, rule| {
            let name = reader.text(node)?;
            let bad = |c: char| c.is_control() || c == '"' || c == '\\';
            if name.is_empty() || name.chars().count() > 64 || name.contains(bad) {
                return reader.refuse(node, None);
            }
            rule.id = RuleId(name);
            Some(())
        },
        |rule| quoted(&rule.id.0),
    ),
    scalar!(
        "rule.protocol",
        "\"tcp\", \"udp\", \"tcp+udp\" for one rule of each, \"udptotcp\" or \"tcptoudp\"",
        |reader, node, rule| {
            rule.protocol = reader.parsed(node, |text| Protocol::from_name(text).ok_or(""))?;
            Some(())
        },
        |rule| quoted(rule.protocol.name()),
    ),
    scalar!(
        "rule.framed",
        kind::SWITCH.expected,
        |reader, node, rule| {
            let framed = reader.boolean(node)?;
            match with_framing(rule.protocol, framed) {
                Some(protocol) => rule.protocol = protocol,
                None if !framed => {}
                None => {
                    let why = "only \"udptotcp\" and \"tcptoudp\" carry datagrams in a stream";
                    return reader.refuse(node, Some(why.to_owned()));
                }
            }
            Some(())
        },
        |rule| framed(rule.protocol).to_string(),
    ),
    scalar!(
        "rule.listen",
        parts::LISTEN_FORM,
        |reader, node, rule| {
            let text = reader.text(node)?;
            match parts::listener(&text) {
                Ok(listener) => (rule.bind, rule.ports) = listener,
                Err(why) => {
                    let meant = parts::meant_listener(&text);
                    return reader.refuse_suggesting(node, Some(why), meant.as_deref());
                }
            }
            Some(())
        },
        |rule| quoted(&parts::show_listener(&rule.bind, rule.ports)),
    ),
    field!(reload "rule.ipv6_only", ipv6_only, kind::SWITCH),
    field!(reload "rule.freebind", freebind, kind::SWITCH),
    scalar!(
        "rule.socket_mode",
        "permissions in octal, such as \"660\", or \"\" to apply the umask",
        |reader, node, rule| {
            rule.socket_mode = reader.parsed(node, |text| {
                let octal =
                    (3..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
                match (text, u32::from_str_radix(text, 8)) {
                    ("", _) => Ok(None),
                    (_, Ok(mode @ ..=0o777)) if octal => Ok(Some(mode)),
                    _ => Err(""),
                }
            })?;
            Some(())
        },
        |rule| quoted(&rule.socket_mode.map_or_else(String::new, |mode| format!("{mode:03o}"))),
    ),
    field!(reload "rule.target", targets, TARGETS),
    field!(reload "rule.balance", balance, BALANCE),
    field!(reload "rule.health", health, HEALTH),
    scalar!(
        "rule.health_send",
        parts::PAYLOAD_FORM,
        |reader, node, rule| {
            let send = reader.parsed(node, parts::payload)?;
            if send.is_empty() {
                return reader.refuse(
                    node,
                    Some("leave this key out to send nothing, or an empty datagram over UDP".to_owned()),
                );
            }
            rule.health_question = Some(Question { send, expect: Vec::new() });
            Some(())
        },
        |rule| parts::show_payload(rule.health_question.as_ref().map(|question| &question.send[..])),
    ),
    scalar!(
        "rule.health_expect",
        parts::PAYLOAD_FORM,
        |reader, node, rule| {
            let expect = reader.parsed(node, parts::payload)?;
            let speaks_first = matches!(rule.protocol, Protocol::Tcp | Protocol::UdpToTcp { .. });
            match &mut rule.health_question {
                Some(question) => question.expect = expect,
                // Without `health_send`, only a TCP server can be expected to speak first.
                None if expect.is_empty() => {}
                None if speaks_first => rule.health_question = Some(Question { send: Vec::new(), expect }),
                None => {
                    return reader.refuse(node, Some("the rule has no health_send".to_owned()));
                }
            }
            Some(())
        },
        |rule| parts::show_payload(rule.health_question.as_ref().map(|question| &question.expect[..])),
    ),
    scalar!(
        "rule.source",
        "an IP address of this machine; a link-local one needs its interface (fe80::1%eth0)",
        |reader, node, rule| {
            rule.source = Some(reader.parsed(node, |text| keys::zoned(text.trim().parse()))?);
            Some(())
        },
        |rule| quoted(&rule.source.map(|source| source.to_string()).unwrap_or_default()),
    ),
    scalar!(
        "rule.device",
        "the name of a network interface, 1 to 15 bytes, such as \"eth0\"",
        |reader, node, rule| {
            let device = reader.text(node)?;
            // The kernel's dev_valid_name() rejects the same characters.
            let bad = |c: char| c.is_whitespace() || c == '/' || c == ':';
            if device.is_empty()
                || device.len() > 15
                || device == "."
                || device == ".."
                || device.contains(bad)
            {
                return reader.refuse(node, None);
            }
            rule.device = Some(device);
            Some(())
        },
        |rule| quoted(rule.device.as_deref().unwrap_or_default()),
    ),
    scalar!(
        "rule.mark",
        "a firewall mark, 0 to 4294967295, or hexadecimal such as 0x10",
        |reader, node, rule| {
            rule.mark = Some(match &node.value {
                Value::Text(text) if node.origin.is_textual() && text.starts_with("0x") => {
                    reader.parsed(node, |text| u32::from_str_radix(&text[2..], 16).map_err(|_| ""))?
                }
                _ => reader.integer(node, &(0..=u32::MAX))?,
            });
            Some(())
        },
        |rule| rule.mark.map_or_else(|| quoted(""), |mark| mark.to_string()),
    ),
    field!(reload "rule.transparent", transparent, kind::SWITCH),
    field!(reload "rule.proxy_protocol_from", proxy_protocol_from, PROXIES),
    scalar!(
        "rule.proxy",
        "\"v1\", \"v2\" or \"off\"",
        |reader, node, rule| {
            rule.send_proxy = reader.parsed(node, |text| match text {
                "v1" => Ok(Some(ProxyVersion::V1)),
                "v2" => Ok(Some(ProxyVersion::V2)),
                "off" => Ok(None),
                _ => Err(""),
            })?;
            Some(())
        },
        |rule| {
            quoted(match rule.send_proxy {
                Some(ProxyVersion::V1) => "v1",
                Some(ProxyVersion::V2) => "v2",
                None => "off",
            })
        },
    ),
    field!(reload "rule.allow", access.allow, PATTERNS),
    field!(reload "rule.deny", access.deny, PATTERNS),
    field!(reload "rule.idle", idle, IDLE),
    field!(reload "rule.half_close_timeout", half_close_timeout, HALF_CLOSE),
    scalar!(
        "rule.connect_timeout",
        "seconds, 1 to 3600",
        |reader, node, rule| {
            rule.connect_timeout = Duration::from_secs(reader.integer(node, &(1..=3600))?);
            Some(())
        },
        |rule| rule.connect_timeout.as_secs().to_string(),
    ),
    field!(reload "rule.keepalive", keepalive, kind::SWITCH),
    field!(reload "rule.keepalive_idle", timers.keepalive_idle, KEEPALIVE_IDLE),
    field!(reload "rule.keepalive_interval", timers.keepalive_interval, KEEPALIVE_INTERVAL),
    field!(reload "rule.keepalive_count", timers.keepalive_count, KEEPALIVE_COUNT),
    field!(reload "rule.user_timeout", timers.user_timeout, USER_TIMEOUT),
    field!(reload "rule.nodelay", nodelay, kind::SWITCH),
    field!(reload "rule.max_connections", max_connections, number!(usize, "a number", 1..=1_000_000)),
    field!(reload "rule.max_connections_per_client", limits.max_connections_per_client, PER_CLIENT),
    field!(reload "rule.new_connections_per_client", limits.new_connections_per_client, PER_CLIENT),
    field!(reload "rule.max_bytes_per_second", limits.max_bytes_per_second, BYTES),
    field!(reload "rule.max_bytes_per_second_per_connection", limits.max_bytes_per_second_per_connection, BYTES),
    field!(reload "rule.any_port", any_port, kind::SWITCH),
    field!(reload "rule.copy", copy, COPY),
    scalar!(
        "rule.kernel",
        kind::SWITCH.expected,
        |reader, node, rule| {
            rule.kernel = Some(reader.boolean(node)?);
            Some(())
        },
        |rule| rule.kernel.map_or_else(|| quoted(""), |kernel| kernel.to_string()),
    ),
];

/// Concurrent or new connections of one client.
const PER_CLIENT: ValueKind<Option<u32>> = ValueKind::one(
    "a number, 1 to 1000000, or 0 for no limit",
    |reader, node| reader.integer(node, &(0..=1_000_000)).map(|most: u32| (most > 0).then_some(most)),
    |most| most.unwrap_or(0).to_string(),
);

/// Bytes per second in each direction.
const BYTES: ValueKind<Option<u64>> = ValueKind::one(
    "bytes a second, 1000 to 1000000000000, or 0 for no limit",
    |reader, node| match reader.integer(node, &(0..=1_000_000_000_000_u64))? {
        0 => Some(None),
        1..1000 => reader.refuse(node, None),
        rate => Some(Some(rate)),
    },
    |rate| rate.unwrap_or(0).to_string(),
);

pub(crate) const COPY: ValueKind<CopyMode> = named!(
    "\"auto\", \"splice\", \"buffer\" or \"kernel\"",
    "auto" => CopyMode::Auto,
    "splice" => CopyMode::Splice,
    "buffer" => CopyMode::Buffer,
    "kernel" => CopyMode::Kernel,
);

pub(crate) const PATTERNS: ValueKind<Vec<Pattern>> = ValueKind::list(
    parts::PATTERN_FORM,
    |reader, node| one_or_several(reader, node, pattern),
    |patterns| list(patterns.iter().map(|pattern| quoted(&parts::show_pattern(pattern)))),
);

/// Rejects patterns that match no address: a deny list would silently let those clients in.
fn pattern(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<Pattern> {
    let pattern = reader.parsed(node, parts::pattern)?;
    if pattern.fits_some_address() {
        return Some(pattern);
    }
    let meant = parts::meant_pattern(&reader.text(node)?);
    reader.refuse_suggesting(node, Some("no address matches it".to_owned()), meant.as_deref())
}

const PROXIES: ValueKind<Vec<Proxy>> = ValueKind::list(
    parts::PROXY_FORM,
    |reader, node| one_or_several(reader, node, |reader, node| reader.parsed(node, parts::proxy)),
    |proxies| list(proxies.iter().map(|proxy| quoted(&parts::show_proxy(proxy)))),
);

const TARGETS: ValueKind<Vec<Endpoint>> = ValueKind::list(
    parts::TARGET_FORM,
    |reader, node| {
        let targets = one_or_several(reader, node, target)?;
        if targets.is_empty() {
            return reader.refuse(node, Some("the list is empty".to_owned()));
        }
        Some(targets)
    },
    |targets| match &targets[..] {
        [target] => quoted(&parts::show_target(target)),
        targets => list(targets.iter().map(|target| quoted(&parts::show_target(target)))),
    },
);

/// Reads a target, which is text or a table with a separate weight.
fn target(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<Endpoint> {
    if !matches!(node.value, Value::Table(_)) {
        return reader.parsed(node, parts::endpoint);
    }
    let entries = reader.table(node, &["address", "weight"])?;
    let Some(address) = find(entries, "address") else {
        return reader.refuse(node, Some("it has no address".to_owned()));
    };
    let mut endpoint = reader.parsed(address, parts::endpoint)?;
    if let Some(weight) = find(entries, "weight") {
        let read = match weight.value {
            Value::Integer(weight) => u16::try_from(weight).ok().filter(|weight| *weight <= MOST_WEIGHT),
            _ => None,
        };
        let Some(read) = read else {
            return reader.refuse(weight, Some(format!("a weight is a number, 0 to {MOST_WEIGHT}")));
        };
        endpoint.weight = read;
    }
    Some(endpoint)
}

const BALANCES: [(&str, Balance); 4] = [
    ("round-robin", Balance::RoundRobin),
    ("least-connections", Balance::LeastConnections),
    ("failover", Balance::Failover),
    ("source", Balance::Source),
];

const BALANCE: ValueKind<Balance> = ValueKind::one(
    "\"round-robin\", \"least-connections\", \"failover\" or \"source\"",
    |reader, node| {
        let text = reader.text(node)?;
        if let Some((_, balance)) = BALANCES.iter().find(|(name, _)| *name == text) {
            return Some(*balance);
        }
        let plain: String = text.chars().filter(char::is_ascii_alphanumeric).collect();
        let meant = match plain.to_ascii_lowercase().as_str() {
            "leastconn" | "leastconns" | "leastconnection" | "least" => Some("least-connections"),
            "roundrobin" | "rr" => Some("round-robin"),
            "backup" | "first" | "activepassive" => Some("failover"),
            "iphash" | "sourcehash" | "srchash" | "sticky" => Some("source"),
            _ => nearest(&text, BALANCES.iter().map(|(name, _)| *name)),
        };
        reader.refuse_suggesting(node, None, meant)
    },
    |balance| {
        let found = BALANCES.iter().find(|(_, other)| other == balance);
        quoted(found.map_or("", |(name, _)| name))
    },
);

fn one_or_several<T>(
    reader: &mut ValueReader<'_>,
    node: &ValueNode,
    mut item: impl FnMut(&mut ValueReader<'_>, &ValueNode) -> Option<T>,
) -> Option<Vec<T>> {
    match &node.value {
        Value::Text(text) if node.origin.is_textual() => {
            let nodes = text
                .split(',')
                .map(|part| ValueNode { value: Value::text(part), origin: node.origin.clone() });
            let list = ValueNode { value: Value::List(nodes.collect()), origin: node.origin.clone() };
            reader.list(&list, item)
        }
        Value::Text(_) | Value::Table(_) => item(reader, node).map(|item| vec![item]),
        _ => reader.list(node, item),
    }
}

fn framed(protocol: Protocol) -> bool {
    matches!(protocol, Protocol::UdpToTcp { framed: true } | Protocol::TcpToUdp { framed: true })
}

fn with_framing(protocol: Protocol, framed: bool) -> Option<Protocol> {
    match protocol {
        Protocol::UdpToTcp { .. } => Some(Protocol::UdpToTcp { framed }),
        Protocol::TcpToUdp { .. } => Some(Protocol::TcpToUdp { framed }),
        Protocol::Tcp | Protocol::Udp => None,
    }
}
