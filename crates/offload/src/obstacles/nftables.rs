//! Rules of nf_tables, including those of iptables-nft. The chains show which rules a relayed datagram can
//! reach, and which limits only decide how much is logged.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use crate::netlink::{Netlink, attributes, text, u32_be};

/// NFNL_SUBSYS_NFTABLES with NFT_MSG_GETCHAIN, NFT_MSG_NEWCHAIN, NFT_MSG_GETRULE and NFT_MSG_NEWRULE.
const GET_CHAIN: u16 = 10 << 8 | 4;
const NEW_CHAIN: u16 = 10 << 8 | 3;
const GET_RULE: u16 = 10 << 8 | 7;
const NEW_RULE: u16 = 10 << 8 | 6;

/// Families whose rules see IP datagrams of this machine: inet, ip, netdev, ip6.
const FAMILIES: [u8; 4] = [1, 2, 5, 10];
/// NFPROTO_NETDEV, whose hooks have other numbers.
const NETDEV: u8 = 5;
/// NF_INET_FORWARD, which relayed datagrams do not pass.
const FORWARD: u32 = 2;

/// Expressions that only compare, read or count, with the same result for all datagrams of a flow.
const MATCHING: [&str; 11] =
    ["bitwise", "byteorder", "cmp", "counter", "ct", "fib", "hash", "meta", "payload", "range", "rt"];
/// Expressions that treat all datagrams of a flow in the same way, but do more than match.
const CONSTANT: [&str; 8] = ["dup", "flow_offload", "fwd", "masq", "nat", "notrack", "redir", "reject"];

/// xtables matches and targets whose result is the same for all datagrams of a flow.
const CONSTANT_MATCHES: [&str; 28] = [
    "addrtype",
    "cgroup",
    "comment",
    "conntrack",
    "connmark",
    "cpu",
    "devgroup",
    "dscp",
    "esp",
    "helper",
    "icmp",
    "icmp6",
    "iprange",
    "mark",
    "multiport",
    "owner",
    "physdev",
    "pkttype",
    "policy",
    "rpfilter",
    "sctp",
    "set",
    "socket",
    "state",
    "tcp",
    "tcpmss",
    "tos",
    "udp",
];
const CONSTANT_TARGETS: [&str; 16] = [
    "CHECKSUM",
    "CLASSIFY",
    "CONNMARK",
    "CT",
    "DNAT",
    "DSCP",
    "ERROR",
    "MARK",
    "MASQUERADE",
    "NETMAP",
    "NOTRACK",
    "REDIRECT",
    "REJECT",
    "SNAT",
    "TCPMSS",
    "TOS",
];

/// Describes the first rule that prevents leases.
pub(super) fn find(netlink: &mut Netlink) -> io::Result<Option<String>> {
    let mut rules = Ruleset::default();
    // A struct nfgenmsg that selects all families.
    netlink.dump(GET_CHAIN, &[0; 4], |kind, body| {
        if let Some((family, body)) = of_ip(body).filter(|_| kind == NEW_CHAIN) {
            rules.add_chain(family, body);
        }
    })?;
    netlink.dump(GET_RULE, &[0; 4], |kind, body| {
        if let Some((family, body)) = of_ip(body).filter(|_| kind == NEW_RULE) {
            rules.add_rule(family, body);
        }
    })?;
    Ok(rules.obstacle())
}

fn of_ip(body: &[u8]) -> Option<(u8, &[u8])> {
    let family = *body.first()?;
    FAMILIES.contains(&family).then_some((family, body.get(4..)?))
}

/// Family, table and name.
type ChainName = (u8, String, String);

#[derive(Default)]
struct Ruleset {
    chains: BTreeMap<ChainName, Chain>,
}

#[derive(Default)]
struct Chain {
    /// Attached to a hook that relayed datagrams pass.
    is_entry: bool,
    /// A rule decides about a datagram, or changes it.
    acts: bool,
    /// A rule continues in the chain that a map contains, which may be any chain of the table.
    uses_map: bool,
    jumps: BTreeSet<String>,
    varying: Vec<VaryingRule>,
}

/// A rule whose result may differ between the datagrams of a flow.
struct VaryingRule {
    by: String,
    /// Only logs, up to a limit, and jumps to chains.
    only_logs: bool,
    returns: bool,
    jumps: Vec<String>,
}

/// Parts of a rule.
#[derive(Default)]
struct RuleParts {
    varies: Vec<String>,
    has_limit: bool,
    logs_everything: bool,
    acts: bool,
    returns: bool,
    uses_map: bool,
    jumps: Vec<String>,
}

impl Ruleset {
    /// The attributes are table, handle, name and hook (linux/netfilter/nf_tables.h).
    fn add_chain(&mut self, family: u8, chain: &[u8]) {
        let (mut table, mut name, mut hook) = (String::new(), String::new(), None);
        for (kind, value) in attributes(chain) {
            match kind & 0x3fff {
                1 => table = text(value),
                3 => name = text(value),
                4 => hook = number(value, 1),
                _ => {}
            }
        }
        let is_entry = hook.is_some_and(|hook| family == NETDEV || hook != FORWARD);
        self.chains.entry((family, table, name)).or_default().is_entry |= is_entry;
    }

    /// The attributes are table, chain, handle and expressions.
    fn add_rule(&mut self, family: u8, rule: &[u8]) {
        let (mut table, mut name, mut parts) = (String::new(), String::new(), RuleParts::default());
        for (kind, value) in attributes(rule) {
            match kind & 0x3fff {
                1 => table = text(value),
                2 => name = text(value),
                4 => parts = RuleParts::new(attributes(value).map(|(_, expression)| expression)),
                _ => {}
            }
        }
        let chain = self.chains.entry((family, table, name)).or_default();
        chain.acts |= parts.acts;
        chain.uses_map |= parts.uses_map;
        chain.jumps.extend(parts.jumps.iter().cloned());
        if let Some(by) = parts.varies.first() {
            let only_logs = !parts.acts && !parts.uses_map && parts.only_limits_logs();
            let RuleParts { returns, jumps, .. } = parts;
            chain.varying.push(VaryingRule { by: by.clone(), only_logs, returns, jumps });
        }
    }

    fn obstacle(&self) -> Option<String> {
        let mut logging = BTreeMap::new();
        self.reachable().into_iter().find_map(|name| {
            let (family, table, chain) = name;
            let rule = self.chains[name].varying.iter().find(|rule| {
                let mut logs = |chain: &ChainName| self.only_logs(chain, &mut logging);
                let stays_here = !rule.returns || logs(name);
                let mut jumps = rule.jumps.iter().map(|to| (*family, table.clone(), to.clone()));
                !(rule.only_logs && stays_here && jumps.all(|to| logs(&to)))
            })?;
            Some(format!("a rule in nftables chain {table} {chain} uses {}", rule.by))
        })
    }

    fn reachable(&self) -> BTreeSet<&ChainName> {
        let mut reached: BTreeSet<&ChainName> = BTreeSet::new();
        let entries = self.chains.iter().filter(|(_, chain)| chain.is_entry);
        let mut next: Vec<&ChainName> = entries.map(|(name, _)| name).collect();
        while let Some(name) = next.pop() {
            if !reached.insert(name) {
                continue;
            }
            let chain = &self.chains[name];
            let leads_to = |(family, table, to): &ChainName| {
                (family, table) == (&name.0, &name.1) && (chain.uses_map || chain.jumps.contains(to))
            };
            next.extend(self.chains.keys().filter(|to| leads_to(to)));
        }
        reached
    }

    /// True if the chain and those it jumps to only match and log, so that a datagram continues behind the
    /// jump unchanged. The kernel permits no loops.
    fn only_logs(&self, name: &ChainName, known: &mut BTreeMap<ChainName, bool>) -> bool {
        if let Some(known) = known.get(name) {
            return *known;
        }
        let Some(chain) = self.chains.get(name) else { return false };
        known.insert(name.clone(), false);
        let to = |to: &String| (name.0, name.1.clone(), to.clone());
        let only_logs =
            !chain.acts && !chain.uses_map && chain.jumps.iter().all(|it| self.only_logs(&to(it), known));
        known.insert(name.clone(), only_logs);
        only_logs
    }
}

impl RuleParts {
    /// Expressions after a comparison with another protocol do not apply to UDP.
    fn new<'e>(expressions: impl Iterator<Item = &'e [u8]>) -> Self {
        let (mut rule, mut has_protocol) = (Self::default(), false);
        for expression in expressions {
            let (name, data) = parts(expression);
            if has_protocol && name == "cmp" && is_other_protocol(data) {
                // A limit before the comparison also counts UDP.
                rule.acts = !rule.varies.is_empty();
                return rule;
            }
            // NFT_META_L4PROTO, or the protocol in the IPv4 header.
            has_protocol = (name == "meta" && number(data, 2) == Some(16))
                || (name == "payload" && [2, 3, 4].map(|it| number(data, it)) == [Some(1), Some(9), Some(1)]);
            rule.add(&name, data);
        }
        rule
    }

    fn add(&mut self, name: &str, data: &[u8]) {
        let inner = || attributes(data).find(|(kind, _)| kind & 0x3fff == 1).map(|(_, value)| text(value));
        match name {
            "immediate" => self.add_verdict(data),
            // A register for the result other than the verdict (NFTA_LOOKUP_DREG).
            "lookup" => self.uses_map |= number(data, 3) == Some(0),
            "limit" => self.has_limit = true,
            "log" => self.logs_everything |= !self.has_limit,
            "match" => self.has_limit |= inner().as_deref() == Some("limit"),
            "target" if inner().as_deref() == Some("LOG") => self.logs_everything |= !self.has_limit,
            // The source register (NFTA_META_SREG, NFTA_CT_SREG, NFTA_PAYLOAD_SREG) of an expression that
            // writes.
            "meta" => self.acts |= number(data, 3).is_some(),
            "ct" => self.acts |= number(data, 4).is_some(),
            "payload" => self.acts |= number(data, 5).is_some(),
            other => self.acts |= !MATCHING.contains(&other),
        }
        self.varies.extend(varies(name, data));
    }

    /// NFTA_IMMEDIATE_DATA with NFTA_DATA_VERDICT, which has a code and, for a jump, a chain.
    fn add_verdict(&mut self, immediate: &[u8]) {
        let Some(verdict) = attribute(immediate, 2).and_then(|data| attribute(data, 2)) else { return };
        let chain = attribute(verdict, 2).map(text);
        match number(verdict, 1).map(u32::cast_signed) {
            // NFT_CONTINUE and NFT_BREAK.
            Some(-2 | -1) => {}
            // NFT_JUMP.
            Some(-3) => self.jumps.extend(chain),
            // NFT_RETURN.
            Some(-5) => self.returns = true,
            // NFT_GOTO, or a decision.
            _ => {
                self.acts = true;
                self.jumps.extend(chain);
            }
        }
    }

    fn only_limits_logs(&self) -> bool {
        let is_log = |by: &String| ["log", "the target LOG"].contains(&&by[..]);
        let is_limit = |by: &String| ["limit", "the match limit"].contains(&&by[..]);
        self.has_limit && !self.logs_everything && self.varies.iter().all(|by| is_limit(by) || is_log(by))
    }
}

fn attribute(of: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(of).find(|(kind, _)| kind & 0x3fff == wanted).map(|(_, value)| value)
}

/// Name and attributes of an expression.
fn parts(expression: &[u8]) -> (String, &[u8]) {
    (attribute(expression, 1).map(text).unwrap_or_default(), attribute(expression, 2).unwrap_or_default())
}

fn number(data: &[u8], wanted: u16) -> Option<u32> {
    attribute(data, wanted).and_then(u32_be)
}

/// True for a comparison `== PROTOCOL` (NFT_CMP_EQ), unless the protocol is UDP.
fn is_other_protocol(compare: &[u8]) -> bool {
    let value = attribute(compare, 3).and_then(|data| attribute(data, 1));
    number(compare, 2) == Some(0) && value.is_some_and(|value| value.len() == 1 && value != [17])
}

/// Property that an expression depends on, if it differs between datagrams of a flow.
fn varies(name: &str, data: &[u8]) -> Option<String> {
    let number = |wanted| number(data, wanted);
    let inner = || attribute(data, 1).map(text);
    let by = match name {
        // NFT_META_LEN, NFT_META_CPU, NFT_META_PRANDOM.
        "meta" => {
            matches!(number(2), Some(0 | 20 | 24)).then_some("the length, the CPU or a random number")?
        }
        // NFT_CT_EXPIRATION, NFT_CT_PKTS, NFT_CT_BYTES, NFT_CT_AVGPKT.
        "ct" => matches!(number(2), Some(5 | 14..=16)).then_some("counters of conntrack")?,
        "payload" => {
            is_of_datagram(number(2)?, number(3)?, number(4)?).then_some("the payload or a varying header")?
        }
        // NFTA_LOG_GROUP passes the datagrams to programs (NFLOG).
        "log" => attribute(data, 1).map_or("log", |_| "log group"),
        "match" => {
            return inner()
                .filter(|it| !CONSTANT_MATCHES.contains(&&it[..]))
                .map(|it| format!("the match {it}"));
        }
        "target" => {
            return inner()
                .filter(|it| !CONSTANT_TARGETS.contains(&&it[..]))
                .map(|it| format!("the target {it}"));
        }
        "immediate" | "lookup" => return None,
        known if MATCHING.contains(&known) || CONSTANT.contains(&known) => return None,
        other => other,
    };
    Some(by.to_owned())
}

/// Returns true for header or payload bytes that may differ between datagrams of a flow. DSCP is not
/// included, because leases are per DSCP. Expressions that write (the checksum after NAT) have no length
/// attribute.
fn is_of_datagram(base: u32, offset: u32, length: u32) -> bool {
    let end = offset.saturating_add(length);
    let touches = |from: u32, to: u32| offset < to && end > from;
    match base {
        // Network header of either family: length, ID and TTL of IPv4; length and hop limit of IPv6.
        1 => touches(2, 6) || (touches(7, 9) && length <= 2),
        // UDP: ports only.
        2 => end > 4,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::Ruleset;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).expect("short");
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn named(name: &str) -> Vec<u8> {
        attribute(1, format!("{name}\0").as_bytes())
    }

    fn rule(expressions: &[(&str, Vec<u8>)]) -> Vec<u8> {
        rule_in("input", expressions)
    }

    fn rule_in(chain: &str, expressions: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let nested = 0x8000;
        let list = expressions.iter().flat_map(|(name, data)| {
            let expression = [named(name), attribute(2 | nested, data)].concat();
            attribute(1 | nested, &expression)
        });
        let list: Vec<u8> = list.collect();
        let chain = attribute(2, format!("{chain}\0").as_bytes());
        [named("filter"), chain, attribute(4 | nested, &list)].concat()
    }

    /// The chain `input` at the hook, and the chains of the rules.
    fn obstacle_at(hook: u32, rules: &[Vec<u8>]) -> Option<String> {
        let mut all = Ruleset::default();
        let chain =
            [named("filter"), attribute(3, b"input\0"), attribute(4, &numbers(&[(1, hook)]))].concat();
        all.add_chain(2, &chain);
        rules.iter().for_each(|rule| all.add_rule(2, rule));
        all.obstacle()
    }

    fn obstacle_of(rule: &[u8]) -> Option<String> {
        obstacle_at(1, &[rule.to_vec()])
    }

    /// `code` is NFT_JUMP (-3), NFT_GOTO (-4), NFT_RETURN (-5), NF_DROP (0) or NF_ACCEPT (1).
    fn verdict(code: i32, chain: &str) -> (&'static str, Vec<u8>) {
        let chain = if chain.is_empty() { Vec::new() } else { attribute(2, format!("{chain}\0").as_bytes()) };
        let verdict = [numbers(&[(1, code.cast_unsigned())]), chain].concat();
        ("immediate", [numbers(&[(1, 0)]), attribute(2, &attribute(2, &verdict))].concat())
    }

    fn numbers(numbers: &[(u16, u32)]) -> Vec<u8> {
        numbers.iter().flat_map(|(kind, number)| attribute(*kind, &number.to_be_bytes())).collect()
    }

    #[test]
    fn rules_that_count_or_inspect_single_datagrams_are_obstacles() {
        let payload = |base, offset, length| ("payload", numbers(&[(2, base), (3, offset), (4, length)]));
        for (expression, by) in [
            (("limit", Vec::new()), Some("limit")),
            (("quota", Vec::new()), Some("quota")),
            (("queue", Vec::new()), Some("queue")),
            (("dynset", Vec::new()), Some("dynset")),
            (("anything new", Vec::new()), Some("anything new")),
            (("counter", Vec::new()), None),
            (("meta", numbers(&[(2, 3)])), None),
            (("meta", numbers(&[(2, 24)])), Some("random")),
            (("ct", numbers(&[(2, 0)])), None),
            (("ct", numbers(&[(2, 15)])), Some("counters of conntrack")),
            (payload(1, 12, 4), None),
            (payload(1, 1, 1), None),
            (payload(1, 8, 1), Some("payload")),
            (payload(1, 8, 16), None),
            (payload(1, 2, 2), Some("payload")),
            (payload(2, 2, 2), None),
            (payload(2, 0, 4), None),
            (payload(2, 8, 4), Some("payload")),
            (payload(0, 6, 6), Some("payload")),
            (("match", named("hashlimit")), Some("the match hashlimit")),
            (("match", named("conntrack")), None),
            (("target", named("NFLOG")), Some("the target NFLOG")),
            (("target", named("MASQUERADE")), None),
        ] {
            let name = expression.0;
            let found = obstacle_of(&rule(&[("cmp", Vec::new()), expression, verdict(0, "")]));
            match by {
                None => assert_eq!(found, None, "{name}"),
                Some(by) => assert!(
                    found.as_ref().is_some_and(|it| it.contains("filter input") && it.contains(by)),
                    "{name}: {found:?}"
                ),
            }
        }
    }

    #[test]
    fn rules_for_other_protocols_are_not_obstacles() {
        let compare = |protocol: u8| {
            let value = attribute(3 | 0x8000, &attribute(1, &[protocol]));
            ("cmp", [numbers(&[(1, 1), (2, 0)]), value].concat())
        };
        let (meta, limit) = (("meta", numbers(&[(2, 16), (1, 1)])), ("limit", Vec::new()));
        let is_obstacle = |expressions: &[(&str, Vec<u8>)]| {
            obstacle_of(&rule(&[expressions, &[verdict(0, "")]].concat())).is_some()
        };
        assert!(!is_obstacle(&[meta.clone(), compare(6), limit.clone()]));
        assert!(is_obstacle(&[meta.clone(), compare(17), limit.clone()]));
        assert!(is_obstacle(&[limit.clone(), meta.clone(), compare(6)]));
        // Compares something other than the protocol.
        assert!(is_obstacle(&[("meta", numbers(&[(2, 4)])), compare(6), limit]));
    }

    #[test]
    fn truncated_rules_do_not_panic() {
        let whole = rule(&[("payload", numbers(&[(2, 1), (3, 8), (4, 1)])), ("limit", Vec::new())]);
        for end in 0..whole.len() {
            let _ = obstacle_of(&whole[..end]);
        }
    }

    #[test]
    fn limit_that_only_affects_logging_is_no_obstacle() {
        let (limit, log) = (("limit", Vec::new()), ("log", Vec::new()));
        let to = |chain| verdict(-3, chain);
        let (back, accept) = (verdict(-5, ""), verdict(1, ""));
        let logging = rule_in("logging", &[limit.clone(), log.clone()]);
        for (rules, is_obstacle) in [
            (vec![rule(&[limit.clone(), log.clone()])], false),
            (vec![rule(&[limit.clone(), ("target", named("LOG"))])], false),
            (vec![rule(&[log.clone(), limit.clone()])], true),
            (vec![rule(std::slice::from_ref(&log))], true),
            (vec![rule(&[limit.clone(), ("log", attribute(1, &[0, 3]))])], true),
            (vec![rule(&[limit.clone(), log.clone(), accept.clone()])], true),
            (vec![rule(&[limit.clone(), ("meta", numbers(&[(2, 3), (3, 1)]))])], true),
            (vec![rule(&[limit.clone(), to("logging")]), logging.clone()], false),
            (
                vec![rule(&[limit.clone(), to("logging")]), logging.clone(), rule_in("logging", &[accept])],
                true,
            ),
            (vec![rule(&[limit.clone(), to("absent")])], true),
            (
                vec![rule(&[to("logging")]), logging, rule_in("logging", &[limit.clone(), back.clone()])],
                false,
            ),
            (
                vec![
                    rule(&[to("other")]),
                    rule_in("other", &[limit, back]),
                    rule_in("other", &[verdict(0, "")]),
                ],
                true,
            ),
        ] {
            let found = obstacle_at(1, &rules);
            assert_eq!(found.is_some(), is_obstacle, "{found:?} {rules:?}");
        }
    }

    #[test]
    fn only_rules_that_relayed_datagrams_can_reach_are_obstacles() {
        let limited = || rule_in("other", &[("limit", Vec::new()), verdict(0, "")]);
        let jump = || rule(&[verdict(-3, "other")]);
        let by_map = || rule(&[("lookup", numbers(&[(2, 1), (3, 0)]))]);
        let by_set = || rule(&[("lookup", numbers(&[(2, 1)]))]);
        let forward = 2;
        assert_eq!(obstacle_at(1, &[limited()]), None);
        assert_eq!(obstacle_at(1, &[by_set(), limited()]), None);
        assert_eq!(obstacle_at(forward, &[jump(), limited()]), None);
        for rule in [jump(), by_map(), rule(&[verdict(-4, "other")])] {
            let found = obstacle_at(1, &[rule, limited()]);
            assert_eq!(found.as_deref(), Some("a rule in nftables chain filter other uses limit"));
        }
    }
}
