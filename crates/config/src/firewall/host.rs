//! Host firewalls.

use std::{fmt::Write as _, net::IpAddr};

use super::{Firewall, FirewallOpening, FirewallTarget, plain};

/// A separate chain in the table `inet filter`. The file flushes it first, so it can be loaded repeatedly.
pub(super) fn nftables(firewall: &Firewall) -> String {
    let mut text = String::from(
        "#!/usr/sbin/nft -f\n\
         # Opens the ports that turnpike listens on. Run this once, so that the chain that drops everything else jumps to it:\n\
         #   nft insert rule inet filter input jump turnpike\n",
    );
    text += &notes(firewall);
    text += "add table inet filter\n\
             add chain inet filter turnpike\n\
             flush chain inet filter turnpike\n\
             table inet filter {\n\
             \tchain turnpike {\n";
    for opening in &firewall.openings {
        let place = match opening.place {
            FirewallTarget::All => String::new(),
            FirewallTarget::AllV4 => "meta nfproto ipv4 ".to_owned(),
            FirewallTarget::AllV6 => "meta nfproto ipv6 ".to_owned(),
            FirewallTarget::One(IpAddr::V4(ip)) => format!("ip daddr {ip} "),
            FirewallTarget::One(IpAddr::V6(ip)) => format!("ip6 daddr {ip} "),
        };
        let (transport, ports, what) = parts(opening, "-");
        let _ = writeln!(text, "\t\t{place}{transport} dport {ports} accept comment \"{what}\"");
    }
    text + "\t}\n}\n"
}

/// A separate chain, recreated on each run and evaluated before all other rules.
pub(super) fn iptables(firewall: &Firewall) -> String {
    let mut text = String::from(
        "#!/bin/sh\n\
         # Opens the ports that turnpike listens on, in a chain of its own. Run as root; can be repeated.\n",
    );
    text += &notes(firewall);
    text += "set -e\n";
    let families = [
        ("iptables", FirewallTarget::has_v4 as fn(FirewallTarget) -> bool),
        ("ip6tables", FirewallTarget::has_v6),
    ];
    for (program, has) in families {
        let mut openings = firewall.openings.iter().filter(|opening| has(opening.place)).peekable();
        if openings.peek().is_none() {
            continue;
        }
        let _ = writeln!(text, "{program} -w -N TURNPIKE 2>/dev/null || {program} -w -F TURNPIKE");
        for opening in openings {
            let place = opening.place.address().map_or_else(String::new, |ip| format!(" -d {ip}"));
            let (transport, ports, what) = parts(opening, ":");
            let _ = writeln!(
                text,
                "{program} -w -A TURNPIKE -p {transport}{place} --dport {ports} -j ACCEPT # {what}"
            );
        }
        let _ = writeln!(
            text,
            "{program} -w -C INPUT -j TURNPIKE 2>/dev/null || {program} -w -I INPUT -j TURNPIKE"
        );
    }
    text
}

/// One command per rule. ufw skips rules that exist already.
pub(super) fn ufw(firewall: &Firewall) -> String {
    let mut text = String::from("# Opens the ports that turnpike listens on. Run as root.\n");
    text += &notes(firewall);
    for opening in &firewall.openings {
        let place = match opening.place {
            FirewallTarget::All => "any".to_owned(),
            FirewallTarget::AllV4 => "0.0.0.0/0".to_owned(),
            FirewallTarget::AllV6 => "::/0".to_owned(),
            FirewallTarget::One(ip) => ip.to_string(),
        };
        let (transport, ports, what) = parts(opening, ":");
        let _ =
            writeln!(text, "ufw allow proto {transport} to {place} port {ports} comment 'turnpike: {what}'");
    }
    text
}

pub(super) fn notes(firewall: &Firewall) -> String {
    let none = firewall.openings.is_empty().then(|| "No ports need to be opened.".to_owned());
    let lines = firewall.notes.iter().cloned().chain(none);
    lines.map(|note| format!("# {}\n", plain(&note))).collect()
}

fn parts(opening: &FirewallOpening, between: &str) -> (&'static str, String, String) {
    (opening.transport.into(), opening.ports(between), plain(&opening.what))
}
