//! Rules of this machine whose verdict may differ between the datagrams of a flow, because they count, limit,
//! log, queue, or inspect single datagrams. With leases, these rules would see only a few of the datagrams,
//! so flows stay in user space while any of these rules exists.

mod nftables;

use std::{fs, io};

use aya::programs::{SchedClassifier, TcAttachType};
use rustix::{io::Errno, net::netlink};

use crate::{
    netlink::{Interface, Netlink, attributes, text},
    object::PROGRAM,
};

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
    unless_absent(nftables::find(&mut netlink).map(|it| found = it)).map(|()| found)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_legacy_tables_are_an_obstacle_if_loaded() {
        let modules = "ip_tables 28672 1 - Live 0x0\nnf_tables 1 0 - Live 0x0\n";
        assert!(!may_have_tables("ip", modules));
        let modules = format!("{modules}iptable_nat 16384 1 - Live 0x0\n");
        assert!(may_have_tables("ip", &modules) && !may_have_tables("ip6", &modules));
        assert!(may_have_tables("ip", ""));
    }
}
