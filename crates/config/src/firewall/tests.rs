//! Tests of the openings and of each output format. An end-to-end test runs nft on the generated file.

use super::*;
use crate::{Checks, Flags, Sources, forward::ForwardSources};

fn of_server(flags: &[(&'static str, &[&str])]) -> Firewall {
    let mut all = Flags::new();
    for (key, values) in flags {
        all.set(key, "--flag", values.iter().map(|value| (*value).to_owned()));
    }
    let loaded = Sources::new(None, Vec::new(), all).settings();
    Firewall::of_server(&loaded.expect("a valid configuration"))
}

fn of_rules(rules: &[&str]) -> Firewall {
    let rules = rules.iter().map(|rule| (*rule).to_owned()).collect();
    let loaded = ForwardSources::from_process(None, rules, Flags::new(), Checks::NONE).load();
    Firewall::of_forwarder(&loaded.expect("valid rules").settings)
}

fn opened(firewall: &Firewall) -> Vec<String> {
    firewall.openings.iter().map(ToString::to_string).collect()
}

#[test]
fn default_server_opens_its_port_and_the_relay_range() {
    let firewall = of_server(&[]);
    assert_eq!(
        opened(&firewall),
        [
            "udp port 3478 (clients)",
            "tcp port 3478 (clients)",
            "udp port 49152-65535 (peers, to relayed addresses)",
            "tcp port 49152-65535 (peers, to relayed addresses)",
        ]
    );
    assert!(firewall.openings.iter().all(|opening| opening.place == FirewallTarget::All));
    assert!(firewall.notes.is_empty(), "the admin page is on loopback: {:?}", firewall.notes);
}

#[test]
fn port_80_is_opened_only_for_http_challenges() {
    let flags = |listen: &'static [&'static str]| {
        of_server(&[("server.listen", listen), ("tls.acme", &["turn.example.org"]), ("store.state", &["/s"])])
    };
    let of_port_80 =
        |firewall: Firewall| opened(&firewall).into_iter().filter(|line| line.contains("80 ")).collect();
    let lines: Vec<String> = of_port_80(flags(&["0.0.0.0:3478"]));
    assert_eq!(lines, ["tcp port 80 (certificate authority)"]);
    let lines: Vec<String> = of_port_80(flags(&["0.0.0.0:3478", "0.0.0.0:443"]));
    assert_eq!(lines, [] as [&str; 0]);
}

#[test]
fn stun_only_server_opens_no_relay_ports() {
    let firewall = of_server(&[("server.stun_only", &["true"])]);
    assert_eq!(opened(&firewall), ["udp port 3478 (clients)", "tcp port 3478 (clients)"]);
}

#[test]
fn each_transport_is_opened_only_on_its_listeners() {
    let firewall = of_server(&[
        ("server.listen", &["203.0.113.5:3478", "0.0.0.0:443", "127.0.0.1:3478"]),
        ("server.tcp", &["false"]),
        ("relay.addresses", &["10.0.0.5=203.0.113.5", "2001:db8::5"]),
        ("relay.ports", &["50000-50999"]),
        ("relay.tcp", &["false"]),
        ("admin.listen", &["0.0.0.0:9641"]),
        ("admin.tls_cert", &["/cert.pem"]),
        ("admin.tls_key", &["/key.pem"]),
        ("admin.tokens", &["0123456789abcdef"]),
        ("credentials.listen", &["127.0.0.1:8443", "203.0.113.5:8443"]),
        ("credentials.tls_cert", &["/cert.pem"]),
        ("credentials.tls_key", &["/key.pem"]),
        ("nat_discovery.addresses", &["203.0.113.5", "203.0.113.6"]),
    ]);
    assert_eq!(
        opened(&firewall),
        [
            "udp 203.0.113.5:3478 (clients, NAT behavior discovery)",
            "udp port 443 (clients)",
            "tcp 203.0.113.5:8443 (applications, for credentials)",
            "udp 203.0.113.5:3479 (NAT behavior discovery)",
            "udp 203.0.113.6:3478 (NAT behavior discovery)",
            "udp 203.0.113.6:3479 (NAT behavior discovery)",
            "udp 10.0.0.5:50000-50999 (peers, to relayed addresses)",
            "udp [2001:db8::5]:50000-50999 (peers, to relayed addresses)",
        ]
    );
    assert_eq!(firewall.openings[1].place, FirewallTarget::AllV4);
    assert_eq!(firewall.notes.len(), 3, "{:?}", firewall.notes);
    assert!(
        firewall.notes[0].starts_with("udp 127.0.0.1:3478") && firewall.notes[2].contains("0.0.0.0:9641")
    );
    assert!(firewall.notes[1].starts_with("tcp 127.0.0.1:8443"));
}

#[test]
fn forwarder_rules_open_their_ports() {
    let firewall = of_rules(&[
        "tcp://0.0.0.0:9000-9010=10.0.0.2:9000-9010",
        "udp://[::]:53=10.0.0.3:53?ipv6_only=false",
        "udptotcp://10.0.0.1:5000=10.0.0.3:5000",
        "tcptoudp://10.0.0.1:5000=10.0.0.3:5000",
        "tcp://127.0.0.1:80=10.0.0.3:80",
    ]);
    let places: Vec<FirewallTarget> = firewall.openings.iter().map(|opening| opening.place).collect();
    let one = FirewallTarget::One([10, 0, 0, 1].into());
    assert_eq!(places, [FirewallTarget::AllV4, FirewallTarget::All, one, one], "[::] accepts IPv4 too");
    let shown = opened(&firewall);
    assert!(shown[0].starts_with("tcp port 9000-9010 (rule "), "{shown:?}");
    assert!(
        shown[2].starts_with("udp 10.0.0.1:5000 ") && shown[3].starts_with("tcp 10.0.0.1:5000 "),
        "{shown:?}"
    );
    assert!(firewall.notes[0].contains("127.0.0.1:80") && firewall.notes.len() == 1, "{:?}", firewall.notes);
}

#[test]
fn duplicate_openings_are_merged() {
    let firewall = of_server(&[
        ("server.listen", &["0.0.0.0:3478", "[::]:3478", "10.0.0.1:3478"]),
        ("relay.addresses", &["10.0.0.5"]),
    ]);
    let clients: Vec<&FirewallOpening> =
        firewall.openings.iter().filter(|opening| opening.what == CLIENTS).collect();
    assert_eq!(clients.len(), 2, "UDP and TCP: {clients:?}");
    assert!(clients.iter().all(|opening| opening.place == FirewallTarget::All));
}

#[test]
fn each_firewall_format_has_its_own_syntax() {
    let firewall = of_server(&[
        ("server.listen", &["0.0.0.0:3478", "[2001:db8::1]:3478"]),
        ("server.tcp", &["false"]),
        ("relay.addresses", &["10.0.0.5"]),
        ("relay.tcp", &["false"]),
    ]);
    for (format, lines) in [
        (
            FirewallFormat::Nftables,
            &[
                "meta nfproto ipv4 udp dport 3478 accept comment \"clients\"",
                "ip6 daddr 2001:db8::1 udp dport 3478 accept comment \"clients\"",
                "ip daddr 10.0.0.5 udp dport 49152-65535 accept comment \"peers, to relayed addresses\"",
            ][..],
        ),
        (
            FirewallFormat::Iptables,
            &[
                "iptables -w -A TURNPIKE -p udp --dport 3478 -j ACCEPT # clients",
                "ip6tables -w -A TURNPIKE -p udp -d 2001:db8::1 --dport 3478 -j ACCEPT # clients",
                "iptables -w -A TURNPIKE -p udp -d 10.0.0.5 --dport 49152:65535 -j ACCEPT # peers, to relayed addresses",
            ],
        ),
        (
            FirewallFormat::Ufw,
            &[
                "ufw allow proto udp to 0.0.0.0/0 port 3478 comment 'turnpike: clients'",
                "ufw allow proto udp to 2001:db8::1 port 3478 comment 'turnpike: clients'",
            ],
        ),
        (
            FirewallFormat::Aws,
            &["{\"IpProtocol\":\"udp\",\"FromPort\":3478,\"ToPort\":3478,\
                 \"IpRanges\":[{\"CidrIp\":\"0.0.0.0/0\",\"Description\":\"turnpike: clients\"}],\
                 \"Ipv6Ranges\":[{\"CidrIpv6\":\"::/0\",\"Description\":\"turnpike: clients\"}]},"],
        ),
        (
            FirewallFormat::Gcp,
            &[
                "gcloud compute firewall-rules create turnpike --network=\"${NETWORK:-default}\" --direction=INGRESS --action=ALLOW \
                 --rules=udp:3478,udp:49152-65535 --source-ranges=0.0.0.0/0 --target-tags=turnpike",
                "gcloud compute firewall-rules create turnpike-ipv6 --network=\"${NETWORK:-default}\" --direction=INGRESS \
                 --action=ALLOW --rules=udp:3478 --source-ranges=::/0 --target-tags=turnpike",
            ],
        ),
    ] {
        let shown = firewall.show(format);
        for line in lines {
            assert!(shown.lines().any(|found| found.trim() == *line), "no {line} in\n{shown}");
        }
    }
}

#[test]
fn empty_firewall_prints_a_note_and_no_rules() {
    let firewall = of_rules(&["tcp://127.0.0.1:80=10.0.0.3:80"]);
    for format in FirewallFormat::VARIANTS {
        let shown = firewall.show(*format);
        assert!(shown.contains("# No ports need to be opened.") && !shown.contains("ACCEPT"), "{shown}");
        assert!(!shown.contains("authorize") && !shown.contains("gcloud compute"), "{shown}");
    }
}

/// Rule names are arbitrary text, and a shell runs the output.
#[test]
fn rule_names_cannot_break_out_of_a_comment() {
    let firewall = of_rules(&["tcp://0.0.0.0:80=10.0.0.3:80?name=x';$(reboot)`"]);
    for format in FirewallFormat::VARIANTS {
        let shown = firewall.show(*format);
        assert!(!shown.contains("$(reboot)") && !shown.contains("x'") && !shown.contains("x\""), "{shown}");
    }
}
