//! Rules of this machine whose verdict may differ between the datagrams of a flow, because they count, limit,
//! log, queue, or inspect single datagrams. With leases, these rules would see only a few of the datagrams,
//! so flows stay in user space while any of these rules exists.

use std::{fs, io};

use aya::programs::{SchedClassifier, TcAttachType};
use rustix::{io::Errno, net::netlink};

use crate::{
    netlink::{Interface, Netlink, attributes, text, u32_be},
    object::PROGRAM,
};

/// NFNL_SUBSYS_NFTABLES with NFT_MSG_GETRULE and NFT_MSG_NEWRULE.
const GET_RULE: u16 = 10 << 8 | 7;
const NEW_RULE: u16 = 10 << 8 | 6;
/// XFRM_MSG_GETPOLICY and XFRM_MSG_NEWPOLICY.
const GET_POLICY: u16 = 0x15;
const NEW_POLICY: u16 = 0x13;
/// RTM_GETRULE and RTM_NEWRULE.
const GET_ROUTING_RULE: u16 = 34;
const NEW_ROUTING_RULE: u16 = 32;
/// RTM_GETTFILTER and RTM_NEWTFILTER.
const GET_FILTER: u16 = 46;
const NEW_FILTER: u16 = 44;
/// Ingress of the queueing disciplines clsact and ingress.
const AT_INGRESS: u32 = 0xffff_fff2;

/// Families whose rules see IP datagrams of this machine: inet, ip, netdev, ip6.
const FAMILIES: [u8; 4] = [1, 2, 5, 10];

/// nf_tables expressions whose result is the same for all datagrams of a flow, and expressions that only
/// count.
const CONSTANT: [&str; 21] = [
    "bitwise",
    "byteorder",
    "cmp",
    "counter",
    "ct",
    "dup",
    "fib",
    "flow_offload",
    "fwd",
    "hash",
    "immediate",
    "lookup",
    "masq",
    "meta",
    "nat",
    "notrack",
    "payload",
    "range",
    "redir",
    "reject",
    "rt",
];

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

/// xtables matches whose result differs between datagrams.
const VARYING_MATCHES: [&str; 16] = [
    "bpf",
    "connbytes",
    "connlimit",
    "hashlimit",
    "hl",
    "length",
    "limit",
    "mac",
    "nth",
    "quota",
    "rateest",
    "recent",
    "statistic",
    "string",
    "ttl",
    "u32",
];

/// Describes the first rule that prevents leases. Fails if the rules cannot be read. `links` is true if the
/// programs are attached by links (tcx).
pub(crate) fn find(netlink: &mut Netlink, links: bool) -> io::Result<Option<String>> {
    for found in [nf_tables()?, legacy_tables()?, ipsec()?, routing(netlink)?] {
        if found.is_some() {
            return Ok(found);
        }
    }
    for interface in netlink.interfaces()?.iter().filter(|interface| interface.is_up) {
        let found = filters(netlink, interface)?.or_else(|| programs(interface, links));
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Routing rules with a selector that is not part of a flow's route look-up: user, ports, DSCP, flow label.
fn routing(netlink: &mut Netlink) -> io::Result<Option<String>> {
    let mut found = None;
    netlink.dump(GET_ROUTING_RULE, &[0; 12], |kind, body| {
        let (Some(tos), Some(rest)) = (body.get(3), body.get(12..)) else { return };
        let mut kinds = attributes(rest).map(|(kind, _)| kind);
        if kind == NEW_ROUTING_RULE && (*tos != 0 || kinds.any(|kind| matches!(kind, 20 | 23..=26))) {
            found = Some("a routing rule (ip rule) selects by user, port, DSCP or flow label".to_owned());
        }
    })?;
    Ok(found)
}

/// Ingress filters of tc, which run after our program and may police a rate.
fn filters(netlink: &mut Netlink, interface: &Interface) -> io::Result<Option<String>> {
    let mut body = [0; 20];
    body[4..8].copy_from_slice(&interface.number.to_ne_bytes());
    body[12..16].copy_from_slice(&AT_INGRESS.to_ne_bytes());
    let mut found = None;
    let asked = netlink.dump(GET_FILTER, &body, |kind, body| {
        let Some(rest) = body.get(20..).filter(|_| kind == NEW_FILTER) else { return };
        let of_it =
            |wanted: u16| attributes(rest).find(|(kind, _)| *kind & 0x3fff == wanted).map(|(_, value)| value);
        let options = of_it(2).unwrap_or_default();
        let name = attributes(options).find(|(kind, _)| *kind & 0x3fff == 7).map(|(_, name)| text(name));
        if !options.is_empty() && name.as_deref() != Some(PROGRAM) {
            let kind = of_it(1).map(text).unwrap_or_default();
            found = Some(format!("a tc filter ({kind}) at the ingress of {}", interface.name));
        }
    });
    // The interface has no classifiers, or is gone.
    match asked {
        Err(error) if [Errno::NODEV, Errno::NOENT].iter().any(|errno| is(&error, *errno)) => Ok(None),
        other => unless_absent(other).map(|()| found),
    }
}

/// Other BPF programs that run after ours at ingress.
fn programs(interface: &Interface, links: bool) -> Option<String> {
    let (_, programs) =
        links.then(|| SchedClassifier::query_tcx(&interface.name, TcAttachType::Ingress).ok())??;
    let names = programs.iter().map(|program| program.name_as_str().unwrap_or_default());
    let mut behind = names.skip_while(|name| *name != PROGRAM).filter(|name| *name != PROGRAM);
    behind.next().map(|name| format!("a BPF program ({name}) after ours at ingress of {}", interface.name))
}

fn nf_tables() -> io::Result<Option<String>> {
    let Some(mut netlink) = of_kernel(netlink::NETFILTER)? else { return Ok(None) };
    let mut found = None;
    // This struct nfgenmsg selects all families.
    let asked = netlink.dump(GET_RULE, &[0; 4], |kind, body| {
        if kind != NEW_RULE || found.is_some() || !body.first().is_some_and(|it| FAMILIES.contains(it)) {
            return;
        }
        found = body.get(4..).and_then(obstacle_of);
    });
    unless_absent(asked).map(|()| found)
}

/// iptables-legacy: the kernel lists the loaded matches, but not the rules that use them.
fn legacy_tables() -> io::Result<Option<String>> {
    for family in ["ip", "ip6"] {
        let names = listed(family, "names");
        if names.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) {
            if may_have_tables(family, &fs::read_to_string("/proc/modules").unwrap_or_default()) {
                return Ok(Some(format!("only root can read legacy {family}tables rules")));
            }
            continue;
        }
        if names?.trim().is_empty() {
            continue;
        }
        if let Some(name) = listed(family, "matches")?.lines().find(|name| VARYING_MATCHES.contains(name)) {
            return Ok(Some(format!("legacy {family}tables rules may use the match {name}")));
        }
    }
    Ok(None)
}

/// True if there may be legacy tables. Each is a kernel module, unless the kernel was built without modules.
fn may_have_tables(family: &str, modules: &str) -> bool {
    modules.is_empty() || modules.lines().any(|line| line.starts_with(&format!("{family}table_")))
}

/// Loaded matches or targets; empty if the kernel has no legacy tables.
fn listed(family: &str, what: &str) -> io::Result<String> {
    match fs::read_to_string(format!("/proc/net/{family}_tables_{what}")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other,
    }
}

fn ipsec() -> io::Result<Option<String>> {
    let Some(mut netlink) = of_kernel(netlink::XFRM)? else { return Ok(None) };
    let mut any = false;
    // struct xfrm_userpolicy_id.
    let asked = netlink.dump(GET_POLICY, &[0; 64], |kind, _| any |= kind == NEW_POLICY);
    unless_absent(asked).map(|()| any.then(|| "there are IPsec policies".to_owned()))
}

fn of_kernel(protocol: rustix::net::Protocol) -> io::Result<Option<Netlink>> {
    match Netlink::of_protocol(protocol) {
        Ok(netlink) => Ok(Some(netlink)),
        Err(error) if is(&error, Errno::PROTONOSUPPORT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Ignores the error of a kernel without nf_tables, which does not know the message.
fn unless_absent(asked: io::Result<()>) -> io::Result<()> {
    match asked {
        Err(error) if [Errno::INVAL, Errno::OPNOTSUPP].iter().any(|errno| is(&error, *errno)) => Ok(()),
        other => other,
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// The rule's attributes are table, chain, handle and expressions (linux/netfilter/nf_tables.h).
fn obstacle_of(rule: &[u8]) -> Option<String> {
    let (mut table, mut chain, mut what) = (String::new(), String::new(), None);
    for (kind, value) in attributes(rule) {
        match kind & 0x3fff {
            1 => table = text(value),
            2 => chain = text(value),
            4 => what = first_varying(attributes(value).map(|(_, expression)| expression)),
            _ => {}
        }
    }
    what.map(|what| format!("a rule in nftables chain {table} {chain} uses {what}"))
}

/// Property that the first varying expression depends on. Expressions after a comparison with another
/// protocol do not apply to UDP.
fn first_varying<'e>(expressions: impl Iterator<Item = &'e [u8]>) -> Option<String> {
    let mut has_protocol = false;
    for expression in expressions {
        let (name, data) = parts(expression);
        if has_protocol && name == "cmp" && is_other_protocol(data) {
            return None;
        }
        // NFT_META_L4PROTO.
        has_protocol = name == "meta" && number(data, 2) == Some(16);
        if let Some(by) = varies(&name, data) {
            return Some(by);
        }
    }
    None
}

/// Name and attributes of an expression.
fn parts(expression: &[u8]) -> (String, &[u8]) {
    let (mut name, mut data) = (String::new(), &[][..]);
    for (kind, value) in attributes(expression) {
        match kind & 0x3fff {
            1 => name = text(value),
            2 => data = value,
            _ => {}
        }
    }
    (name, data)
}

fn number(data: &[u8], wanted: u16) -> Option<u32> {
    let found = attributes(data).find(|(kind, _)| kind & 0x3fff == wanted);
    found.and_then(|(_, value)| u32_be(value))
}

/// True for a comparison `== PROTOCOL` (NFT_CMP_EQ), unless the protocol is UDP.
fn is_other_protocol(compare: &[u8]) -> bool {
    let data = attributes(compare).find(|(kind, _)| kind & 0x3fff == 3).map_or(&[][..], |(_, data)| data);
    let value = attributes(data).find(|(kind, _)| kind & 0x3fff == 1).map(|(_, value)| value);
    number(compare, 2) == Some(0) && value.is_some_and(|value| value.len() == 1 && value != [17])
}

/// Property that an expression depends on, if it differs between datagrams of a flow.
fn varies(name: &str, data: &[u8]) -> Option<String> {
    let number = |wanted| number(data, wanted);
    let inner = || attributes(data).find(|(kind, _)| kind & 0x3fff == 1).map(|(_, value)| text(value));
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
        known if CONSTANT.contains(&known) => return None,
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
    use super::*;

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
        let nested = 0x8000;
        let list = expressions.iter().flat_map(|(name, data)| {
            let expression = [named(name), attribute(2 | nested, data)].concat();
            attribute(1 | nested, &expression)
        });
        let list: Vec<u8> = list.collect();
        [named("filter"), attribute(2, b"input\0"), attribute(4 | nested, &list)].concat()
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
            let found = obstacle_of(&rule(&[("cmp", Vec::new()), expression]));
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
        let is_obstacle = |expressions: &[(&str, Vec<u8>)]| obstacle_of(&rule(expressions)).is_some();
        assert!(!is_obstacle(&[meta.clone(), compare(6), limit.clone()]));
        assert!(is_obstacle(&[meta.clone(), compare(17), limit.clone()]));
        assert!(is_obstacle(&[limit.clone(), meta.clone(), compare(6)]));
        // Compares something other than the protocol.
        assert!(is_obstacle(&[("meta", numbers(&[(2, 4)])), compare(6), limit]));
    }

    #[test]
    fn unreadable_legacy_tables_are_an_obstacle_if_loaded() {
        let modules = "ip_tables 28672 1 - Live 0x0\nnf_tables 1 0 - Live 0x0\n";
        assert!(!may_have_tables("ip", modules));
        let modules = format!("{modules}iptable_nat 16384 1 - Live 0x0\n");
        assert!(may_have_tables("ip", &modules) && !may_have_tables("ip6", &modules));
        assert!(may_have_tables("ip", ""));
    }

    #[test]
    fn truncated_rules_do_not_panic() {
        let whole = rule(&[("payload", numbers(&[(2, 1), (3, 8), (4, 1)])), ("limit", Vec::new())]);
        for end in 0..whole.len() {
            let _ = obstacle_of(&whole[..end]);
        }
    }
}
