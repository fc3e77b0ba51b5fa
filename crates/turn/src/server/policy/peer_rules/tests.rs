use super::*;
use crate::ip_range::{IpRange, difference};

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn allow(rules: &[&str]) -> Vec<AllowRule> {
    rules.iter().map(|rule| rule.parse().unwrap()).collect()
}

/// Rules of a server on 198.41.0.4 (external address 198.41.0.9) and 2606:4700::4, with a wildcard listener
/// and one on the first address.
fn ours(rules: &[&str]) -> PeerRules {
    let ips = |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
    let listeners = ["0.0.0.0:3478", "198.41.0.4:50000"].map(|at| at.parse().unwrap());
    let relays = [("198.41.0.4".parse().unwrap(), "198.41.0.9".parse().ok())];
    let own = OwnEndpoints::new(ips(&["2606:4700::4"]), relays, listeners, 49_152..=65_535);
    PeerRules { allow: allow(rules), own, ..PeerRules::default() }
}

fn permitted(rules: &PeerRules, peer: &str) -> bool {
    rules.permits_endpoint(peer.parse().unwrap())
}

#[test]
fn an_allow_rule_is_a_prefix_or_one_address_with_ports() {
    for text in ["10.0.0.0/8", "192.0.2.1/32", "192.0.2.1:22", "192.0.2.1:22-1000", "[2001:db8::1]:22"] {
        assert_eq!(text.parse::<AllowRule>().unwrap().to_string(), text);
    }
    assert_eq!(allow(&["192.0.2.1", "[::ffff:192.0.2.1]:22"]), allow(&["192.0.2.1/32", "192.0.2.1:22"]));
    for (text, expected) in [
        ("10.0.0.0/33", "expected 0 to 32"),
        ("10.0.0.0/8:22", "is not an address with ports"),
        ("[2001:db8::/32]:22", "is not an address with ports"),
        ("[2001:db8::1]", "is not an address with ports"),
        ("192.0.2.1:0", "expected 1 to 65535"),
        ("192.0.2.1:2-1", "expected 1 to 65535"),
        ("192.0.2.1:", "expected 1 to 65535"),
        ("0.0.0.0", "write 0.0.0.0/0"),
        ("[::]:22", "write ::/0"),
    ] {
        let error = text.parse::<AllowRule>().unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn a_rule_with_a_port_opens_only_that_port() {
    let rules = PeerRules { allow: allow(&["10.0.0.1:5060-5061"]), ..PeerRules::default() };
    assert!(rules.permits("10.0.0.1".parse().unwrap()), "a permission has no port");
    for (peer, expected) in [
        ("10.0.0.1:5059", false),
        ("10.0.0.1:5060", true),
        ("10.0.0.1:5061", true),
        ("10.0.0.1:5062", false),
        ("10.0.0.2:5060", false),
        ("[64:ff9b::10.0.0.1]:5060", true),
        ("[64:ff9b::10.0.0.1]:5062", false),
    ] {
        assert_eq!(permitted(&rules, peer), expected, "{peer}");
    }
}

/// 198.41.0.4 is c629:0004 in hexadecimal, and its inverse is 39d6:fffb.
const SPELLINGS: [&str; 12] = [
    "198.41.0.4",
    "::198.41.0.4",
    "::ffff:0:198.41.0.4",
    "64:ff9b::198.41.0.4",
    "2002:c629:4::1",
    "2001:0:c629:4::f7f7:f7f7",
    "2001:0:808:808::39d6:fffb",
    "2a00::5efe:c629:4",
    // Prefixes of 48, 56, 64 and 96 bits within 64:ff9b:1::/48 (RFC 8215).
    "64:ff9b:1:c629:0:400::",
    "64:ff9b:1:99c6:29:4::",
    "64:ff9b:1:9999:c6:2900:400:0",
    "64:ff9b:1:9999::198.41.0.4",
];

#[test]
fn the_servers_addresses_expose_only_relay_ports_in_any_notation() {
    let wide = [
        "0.0.0.0/0",
        "::/0",
        "2000::/3",
        "64:ff9b:1::/48",
        "::/96",
        "2002::/16",
        "2001::/32",
        "64:ff9b::/96",
        "::ffff:0:0:0/96",
        "2a00::5efe:0:0/96",
    ];
    let rules = ours(&wide);
    for ip in SPELLINGS.iter().chain(&["198.41.0.9", "2606:4700::4"]) {
        let at = |port: u16| SocketAddr::new(ip.parse().unwrap(), port);
        for port in [22, 3478, 6379, 9641, 49_151] {
            assert!(!rules.permits_endpoint(at(port)), "{}", at(port));
        }
        assert!(rules.permits_endpoint(at(60_000)), "{}", at(60_000));
        assert!(rules.permits(at(0).ip()), "{ip}");
    }
    // There is no relay port on loopback, where other services listen.
    for loopback in ["127.0.0.1:22", "127.9.9.9:60000", "[::1]:60000", "[64:ff9b::127.0.0.1]:60000"] {
        assert!(!permitted(&rules, loopback), "{loopback}");
    }
    let on_loopback = OwnEndpoints::new([], [("127.0.0.1".parse().unwrap(), None)], [], 49_152..=65_535);
    let on_loopback = PeerRules { own: on_loopback, ..rules.clone() };
    assert!(permitted(&on_loopback, "127.0.0.1:60000") && !permitted(&on_loopback, "127.0.0.1:22"));
    let former = rules.own.clone().with_former_ports([40_000..=40_009]);
    let reloaded = PeerRules { own: former, ..rules.clone() };
    for (peer, expected) in
        [("198.41.0.4:40009", true), ("198.41.0.4:40010", false), ("127.0.0.1:40009", false)]
    {
        assert_eq!(permitted(&reloaded, peer), expected, "{peer}");
        assert!(!permitted(&rules, peer), "{peer}");
    }
    for neighbour in ["198.41.0.5:22", "[2606:4700::5]:22", "[64:ff9b::198.41.0.5]:3478"] {
        assert!(permitted(&rules, neighbour), "{neighbour}");
    }
    // No services are reachable by default on the server's public addresses and on addresses that embed them.
    assert!(!permitted(&ours(&[]), "198.41.0.4:22") && !permitted(&ours(&[]), "198.41.0.9:22"));
    assert!(!permitted(&ours(&[]), "[64:ff9b::198.41.0.4]:22") && permitted(&ours(&[]), "198.41.0.4:60000"));
}

#[test]
fn a_rule_for_one_of_the_servers_addresses_opens_it_except_listeners() {
    for rule in ["198.41.0.4", "198.41.0.4/32", "198.41.0.4:22", "198.41.0.4:20-30"] {
        let rules = ours(&[rule]);
        for ip in ["198.41.0.4", "64:ff9b::198.41.0.4"] {
            assert!(rules.permits_endpoint(SocketAddr::new(ip.parse().unwrap(), 22)), "{rule} {ip}");
            assert!(!rules.permits_endpoint(SocketAddr::new(ip.parse().unwrap(), 3478)), "{rule} {ip}");
        }
        assert!(!permitted(&rules, "198.41.0.9:22") && !permitted(&rules, "[2606:4700::4]:22"), "{rule}");
    }
    assert!(!permitted(&ours(&["198.41.0.4:20-30"]), "198.41.0.4:31"));
    assert!(
        !permitted(&ours(&["198.41.0.4/31"]), "198.41.0.4:22"),
        "a prefix does not open the server's services"
    );
    let named =
        ours(&["198.41.0.4:3478", "198.41.0.4:50000", "198.41.0.9:50000", "127.0.0.1:3478", "[::1]:3478"]);
    for listener in
        ["198.41.0.4:3478", "198.41.0.4:50000", "198.41.0.9:50000", "127.0.0.1:3478", "[::1]:3478"]
    {
        assert!(!permitted(&named, listener), "{listener}");
    }
    // There is no listener on port 50000 of loopback.
    assert!(permitted(&ours(&["127.0.0.1"]), "127.0.0.1:50000"));
    // A rule within loopback is meant for this machine; a wider one is not.
    assert!(permitted(&ours(&["127.0.0.0/8"]), "127.0.0.1:22") && permitted(&ours(&["::1"]), "[::1]:22"));
    assert!(permitted(&ours(&["127.0.0.0/30"]), "127.0.0.1:22"));
    assert!(
        !permitted(&ours(&["126.0.0.0/7"]), "127.0.0.1:22") && !permitted(&ours(&["::/127"]), "[::1]:22")
    );
    let denied = PeerRules { deny: vec![cidr("198.41.0.4")], ..ours(&["198.41.0.4:22"]) };
    assert!(!permitted(&denied, "198.41.0.4:22"));
}

#[test]
fn the_unspecified_address_is_never_a_peer_in_any_notation() {
    let everything = ours(&[
        "0.0.0.0/0",
        "::/0",
        "::/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2002::/16",
        "2001::/32",
        "::ffff:0:0:0/96",
        "2a00::5efe:0:0/96",
    ]);
    for ip in [
        "0.0.0.0",
        "::",
        "::ffff:0.0.0.0",
        "::ffff:0:0.0.0.0",
        "64:ff9b::",
        "64:ff9b:1::",
        "2002::1",
        "2001:0:808:808::ffff:ffff",
        "2a00::5efe:0:0",
    ] {
        for port in [80, 60_000] {
            assert!(!everything.permits_endpoint(SocketAddr::new(ip.parse().unwrap(), port)), "{ip}");
        }
        assert!(!everything.permits(ip.parse().unwrap()), "{ip}");
    }
    assert!(permitted(&everything, "[64:ff9b:1:1::8.8.8.8]:80"));
}

#[test]
fn prefix_errors_suggest_a_correction() {
    for (text, expected) in [
        ("10.0.0.1/8", "10.0.0.1/8 has host bits set: write 10.0.0.0/8"),
        ("2001:db8::1/32", "2001:db8::1/32 has host bits set: write 2001:db8::/32"),
        ("10.0.0.0/33", "\"10.0.0.0/33\" has prefix length \"33\": expected 0 to 32"),
        ("::/129", "\"::/129\" has prefix length \"129\": expected 0 to 128"),
        ("10.0.0.0/", "\"10.0.0.0/\" has prefix length \"\": expected 0 to 32"),
    ] {
        assert_eq!(text.parse::<Cidr>().unwrap_err(), expected);
    }
    assert!("10.0.0/8".parse::<Cidr>().unwrap_err().contains("expected for example 10.0.0.0/8"));
}

#[test]
fn a_single_address_is_a_full_length_prefix() {
    assert_eq!(cidr("192.0.2.1"), Cidr { base: "192.0.2.1".parse().unwrap(), bits: 32 });
    assert_eq!(cidr("::1").bits, 128);
}

#[test]
fn a_mapped_prefix_is_the_ipv4_prefix() {
    assert_eq!(cidr("::ffff:10.0.0.0/104"), cidr("10.0.0.0/8"));
}

#[test]
fn the_zero_prefix_contains_its_whole_family() {
    assert!(cidr("0.0.0.0/0").contains("203.0.113.9".parse().unwrap()));
    assert!(cidr("0.0.0.0/0").contains("::ffff:203.0.113.9".parse().unwrap()));
    assert!(!cidr("0.0.0.0/0").contains("2001:db8::1".parse().unwrap()));
    assert!(cidr("::/0").contains("2001:db8::1".parse().unwrap()));
}

#[test]
fn deny_wins_over_allow_and_allow_over_the_built_in_refusal() {
    let rules = PeerRules {
        allow: allow(&["10.0.0.0/8"]),
        deny: vec![cidr("10.1.0.0/16"), cidr("8.8.8.8")],
        ..PeerRules::default()
    };
    for (peer, permitted) in [
        ("10.0.0.1", true),
        ("10.1.0.1", false),
        ("8.8.8.8", false),
        ("8.8.4.4", true),
        ("192.168.0.1", false),
        ("64:ff9b::10.0.0.1", true),
        ("64:ff9b::10.1.0.1", false),
        ("2002:0a00:0001::", false),
        ("2002:0a01:0001::", false),
        ("64:ff9b::8.8.8.8", false),
        ("::ffff:10.1.0.1", false),
    ] {
        assert_eq!(rules.permits(peer.parse().unwrap()), permitted, "{peer}");
    }
}

#[test]
fn allow_only_refuses_unlisted_peers_in_every_notation() {
    let rules = PeerRules {
        allow: allow(&["8.8.0.0/16", "10.0.0.0/8", "2606:4700::/32"]),
        deny: vec![cidr("8.8.4.4")],
        allow_only: true,
        ..PeerRules::default()
    };
    for (peer, permitted) in [
        ("8.8.8.8", true),
        ("8.8.4.4", false),
        ("10.1.2.3", true),
        ("9.9.9.9", false),
        ("192.168.0.1", false),
        ("2606:4700::1", true),
        ("2a00::1", false),
        ("64:ff9b::8.8.8.8", true),
        ("64:ff9b::8.8.4.4", false),
        ("64:ff9b::9.9.9.9", false),
        ("2002:0808:0808::1", false),
        ("2002:0909:0909::1", false),
        ("::ffff:8.8.8.8", false),
    ] {
        assert_eq!(rules.permits(peer.parse().unwrap()), permitted, "{peer}");
    }
    let by = |peer: &str| rules.denial(peer.parse().unwrap());
    assert_eq!(by("9.9.9.9:1"), PeerDenial::NotAllowed);
    assert_eq!(by("8.8.4.4:1"), PeerDenial::Rule(cidr("8.8.4.4")));
    let absent = PeerRules { allow_only: true, ..PeerRules::default() };
    assert!(!absent.permits("8.8.8.8".parse().unwrap()), "an empty list allows no peer");
}

#[test]
fn a_denial_distinguishes_rules_from_defaults() {
    let rules = PeerRules { deny: vec![cidr("8.8.0.0/16")], ..ours(&["10.0.0.2:22", "10.0.0.4/31"]) };
    for (peer, by) in [
        ("8.8.8.8:9", PeerDenial::Rule(cidr("8.8.0.0/16"))),
        ("[64:ff9b::8.8.8.8]:9", PeerDenial::Rule(cidr("8.8.0.0/16"))),
        ("10.0.0.1:50000", PeerDenial::Special),
        ("10.0.0.2:23", PeerDenial::Special),
        ("[::ffff:10.0.0.1]:9", PeerDenial::Special),
        ("[2002:0a00:0001::]:9", PeerDenial::Special),
        ("198.41.0.4:3478", PeerDenial::Own),
        ("198.41.0.9:22", PeerDenial::Own),
        ("[64:ff9b::198.41.0.4]:22", PeerDenial::Own),
    ] {
        let peer: SocketAddr = peer.parse().unwrap();
        assert!(!rules.permits_endpoint(peer), "{peer}");
        assert_eq!(rules.denial(peer), by, "{peer}");
    }
}

#[test]
fn a_wide_ipv6_allow_rule_does_not_open_embedded_private_ranges() {
    let rules = PeerRules { allow: allow(&["2000::/3"]), ..PeerRules::default() };
    assert!(rules.permits("2001:db8::1".parse().unwrap()));
    assert!(!rules.permits("2002:0a00:0001::".parse().unwrap()));
    let rules = PeerRules { allow: allow(&["2002:a00::/24"]), ..PeerRules::default() };
    assert!(rules.permits("2002:0a00:0001::".parse().unwrap()));
}

/// The list and the match patterns agree at the ends of each range and next to them.
#[test]
fn listed_special_ranges_match_the_refused_ones() {
    let ranges: Vec<IpRange> = SPECIAL.iter().map(|text| text.parse().unwrap()).collect();
    let is_listed = |ip: IpAddr| {
        let one = IpRange::new(ip, ip).unwrap();
        difference(&[one], &ranges).is_empty()
    };
    let is_special = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => is_special_v4(ip),
        IpAddr::V6(ip) => is_special_v6(ip),
    };
    let ends = ranges.iter().flat_map(IpRange::prefixes).flat_map(|prefix| match prefix.base {
        IpAddr::V4(base) => {
            let (first, last) = (base.to_bits(), base.to_bits() | !mask_v4(prefix.bits));
            let beside = [first, last, first.wrapping_sub(1), last.wrapping_add(1)];
            beside.map(|bits| IpAddr::from(Ipv4Addr::from_bits(bits)))
        }
        IpAddr::V6(base) => {
            let (first, last) = (base.to_bits(), base.to_bits() | !mask_v6(prefix.bits));
            let beside = [first, last, first.wrapping_sub(1), last.wrapping_add(1)];
            beside.map(|bits| IpAddr::from(Ipv6Addr::from_bits(bits)))
        }
    });
    for ip in ends {
        assert_eq!(is_listed(ip), is_special(ip), "{ip}");
    }
    // Tries every first octet and every first 16 bits of IPv6, in case a range is missing from the list.
    for octet in 0..=255 {
        let ip = IpAddr::from([octet, 0, 0, 9]);
        assert_eq!(is_listed(ip), is_special(ip), "{ip}");
    }
    for first in 0..=u16::MAX {
        let ip = IpAddr::from([first, 0xdb8, 0, 0, 0, 0, 0, 9]);
        assert_eq!(is_listed(ip), is_special(ip), "{ip}");
    }
}

#[test]
fn a_rule_for_other_machines_opens_no_service_on_this_one() {
    let mut rules = ours(&["198.41.0.4"]);
    assert!(permitted(&rules, "198.41.0.4:22"));
    rules.allow = vec![AllowRule::of_others(cidr("198.41.0.4")), AllowRule::of_others(cidr("10.0.0.9"))];
    assert!(!permitted(&rules, "198.41.0.4:22") && permitted(&rules, "198.41.0.4:50001"));
    assert!(permitted(&rules, "10.0.0.9:22"));
}
