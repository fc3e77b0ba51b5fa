//! Cloud firewalls. They filter per machine, so openings that differ only in the address become one rule.

use std::{fmt::Write as _, ops::RangeInclusive};

use super::{Firewall, FirewallProtocol, host, plain};

struct CloudRule {
    transport: FirewallProtocol,
    ports: RangeInclusive<u16>,
    v4: bool,
    v6: bool,
    what: String,
}

pub(super) fn aws(firewall: &Firewall) -> String {
    let mut text =
        String::from("# Opens the ports that turnpike listens on, in the security group GROUP_ID.\n");
    text += &host::notes(firewall);
    let all = ports(firewall);
    if all.is_empty() {
        return text;
    }
    let permissions: Vec<String> = all.iter().map(permission).collect();
    let _ = writeln!(
        text,
        "aws ec2 authorize-security-group-ingress --group-id \"${{GROUP_ID:?}}\" --ip-permissions '[\n{}\n]'",
        permissions.join(",\n")
    );
    text
}

fn permission(of: &CloudRule) -> String {
    let transport: &str = of.transport.into();
    let range = |open: bool, key: &str, everybody: &str| {
        let entry = format!("{{\"{key}\":\"{everybody}\",\"Description\":\"turnpike: {}\"}}", of.what);
        if open { entry } else { String::new() }
    };
    format!(
        "  {{\"IpProtocol\":\"{transport}\",\"FromPort\":{},\"ToPort\":{},\"IpRanges\":[{}],\"Ipv6Ranges\":[{}]}}",
        of.ports.start(),
        of.ports.end(),
        range(of.v4, "CidrIp", "0.0.0.0/0"),
        range(of.v6, "CidrIpv6", "::/0")
    )
}

/// One gcloud rule per family, because a rule cannot mix source families.
pub(super) fn gcp(firewall: &Firewall) -> String {
    let mut text = String::from(
        "# Opens the ports that turnpike listens on, for machines with the network tag turnpike.\n",
    );
    text += &host::notes(firewall);
    let all = ports(firewall);
    for (name, everybody, has) in [
        ("turnpike", "0.0.0.0/0", (|of| of.v4) as fn(&CloudRule) -> bool),
        ("turnpike-ipv6", "::/0", |of| of.v6),
    ] {
        let shown = |of: &CloudRule| {
            let transport: &str = of.transport.into();
            match (of.ports.start(), of.ports.end()) {
                (first, last) if first == last => format!("{transport}:{first}"),
                (first, last) => format!("{transport}:{first}-{last}"),
            }
        };
        let rules: Vec<String> = all.iter().filter(|of| has(of)).map(shown).collect();
        if !rules.is_empty() {
            let _ = writeln!(
                text,
                "gcloud compute firewall-rules create {name} --network=\"${{NETWORK:-default}}\" --direction=INGRESS \
                 --action=ALLOW --rules={} --source-ranges={everybody} --target-tags=turnpike",
                rules.join(",")
            );
        }
    }
    text
}

fn ports(firewall: &Firewall) -> Vec<CloudRule> {
    let mut all: Vec<CloudRule> = Vec::new();
    for opening in &firewall.openings {
        let (v4, v6) = (opening.place.has_v4(), opening.place.has_v6());
        let same = |of: &&mut CloudRule| of.transport == opening.transport && of.ports == opening.ports;
        match all.iter_mut().find(same) {
            Some(of) => (of.v4, of.v6) = (of.v4 || v4, of.v6 || v6),
            None => all.push(CloudRule {
                transport: opening.transport,
                ports: opening.ports.clone(),
                v4,
                v6,
                what: plain(&opening.what),
            }),
        }
    }
    all
}
