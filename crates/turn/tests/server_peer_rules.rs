//! Peer rules: every special range, in every embedding form, for every request and packet.

use crate::common::{turn::*, *};
use turnpike_turn::server::PeerDenial;

/// First and last address of each refused range, and the public addresses next to it.
const V4: &[(&str, &str, Option<&str>, Option<&str>)] = &[
    ("0.0.0.0", "0.255.255.255", None, Some("1.0.0.0")),
    ("10.0.0.0", "10.255.255.255", Some("9.255.255.255"), Some("11.0.0.0")),
    ("100.64.0.0", "100.127.255.255", Some("100.63.255.255"), Some("100.128.0.0")),
    ("127.0.0.0", "127.255.255.255", Some("126.255.255.255"), Some("128.0.0.0")),
    ("169.254.0.0", "169.254.255.255", Some("169.253.255.255"), Some("169.255.0.0")),
    ("172.16.0.0", "172.31.255.255", Some("172.15.255.255"), Some("172.32.0.0")),
    ("192.0.0.0", "192.0.0.255", Some("191.255.255.255"), Some("192.0.1.0")),
    ("192.0.2.0", "192.0.2.255", Some("192.0.1.255"), Some("192.0.3.0")),
    ("192.88.99.0", "192.88.99.255", Some("192.88.98.255"), Some("192.88.100.0")),
    ("192.168.0.0", "192.168.255.255", Some("192.167.255.255"), Some("192.169.0.0")),
    ("198.18.0.0", "198.19.255.255", Some("198.17.255.255"), Some("198.20.0.0")),
    ("198.51.100.0", "198.51.100.255", Some("198.51.99.255"), Some("198.51.101.0")),
    ("203.0.113.0", "203.0.113.255", Some("203.0.112.255"), Some("203.0.114.0")),
    ("224.0.0.0", "239.255.255.255", Some("223.255.255.255"), None),
    ("240.0.0.0", "255.255.255.255", None, None),
];

const V6: &[(&str, &str, Option<&str>, Option<&str>)] = &[
    ("::", "::1", None, None),
    ("64:ff9b:1::", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff", None, Some("64:ff9b:2::")),
    ("100::", "100::ffff:ffff:ffff:ffff", None, None),
    ("100:0:0:1::", "100::1:ffff:ffff:ffff:ffff", None, Some("100:0:0:2::")),
    ("2001::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff", Some("2000:ffff::"), Some("2001:200::")),
    ("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", Some("2001:db7::"), Some("2001:db9::")),
    ("2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some("2001:ffff::"), Some("2003::")),
    ("3fff::", "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff", Some("3ffe::"), Some("3fff:1000::")),
    ("5f00::", "5f00:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some("5eff::"), Some("5f01::")),
    ("fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some("fbff::"), Some("fe00::")),
    ("fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some("fe7f::"), None),
    ("fec0::", "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
    ("ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
];

/// All IPv6 forms that lead to an IPv4 address.
fn forms(ip: &str) -> Vec<IpAddr> {
    let ip: std::net::Ipv4Addr = ip.parse().expect("an address in the table");
    let [a, b, c, d] = ip.octets();
    let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
    [
        format!("::{ip}"),
        format!("::ffff:0:{ip}"),
        format!("64:ff9b::{ip}"),
        format!("2002:{high:x}:{low:x}::1"),
        format!("2001:0:{high:x}:{low:x}:0:0:{:x}:{:x}", !0x0808_u16, !0x0808_u16),
        format!("2001:0:808:808:0:0:{:x}:{:x}", !high, !low),
        format!("2a00::5efe:{high:x}:{low:x}"),
        format!("2a00::200:5efe:{high:x}:{low:x}"),
    ]
    .map(|text| text.parse().expect("a form of an address"))
    .into()
}

fn is_by_tunnel(form: IpAddr) -> bool {
    matches!(form, IpAddr::V6(ip) if matches!(ip.segments(), [0x2002, ..] | [0x2001, 0, ..]))
}

fn world(config: ServerConfig) -> (World, Credentials) {
    let mut world = World::with(ServerConfig {
        limits: ServerLimits { permissions: 100_000, channels: 4096, ..ServerLimits::default() },
        ..config
    });
    let alice = world.credentials("alice", Scheme::Md5);
    let also = AdditionalAddressFamily::new(AddressFamily::IPV6);
    world.ask(&Ask::allocate().with(&also).signed(&alice)).success();
    (world, alice)
}

#[track_caller]
fn check(world: &mut World, alice: &Credentials, ip: IpAddr, permitted: bool) {
    static CHANNEL: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(0);
    let peer = SocketAddr::new(ip, 7000).to_string();
    let refused = if permitted { None } else { Some(403) };
    // Stays below the allocation's refusal rate.
    world.now.ms += 100;
    // Send is tested first, while there is no permission yet.
    let reason = if permitted { DropReason::NoPermission } else { DropReason::PeerRefused };
    assert_eq!(world.feed(&Ask::send(&peer, b"x")), Outcome::Drop(reason), "Send to {peer}");
    let channel = 0x4000 + CHANNEL.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 0x1000;
    assert_eq!(world.ask(&Ask::bind(channel, &peer).signed(alice)).code(), refused, "ChannelBind to {peer}");
    assert_eq!(world.ask(&Ask::permit(&peer).signed(alice)).code(), refused, "CreatePermission for {peer}");
    if permitted {
        assert!(world.feed(&Ask::send(&peer, b"x")).goes_to_peer(), "Send to {peer}");
    }
}

#[test]
fn special_ipv4_ranges_are_refused_in_every_form() {
    let (mut world, alice) = world(config());
    for (first, last, before, after) in V4 {
        for refused in [first, last] {
            check(&mut world, &alice, refused.parse().unwrap(), false);
            check(&mut world, &alice, format!("::ffff:{refused}").parse().unwrap(), false);
            for form in forms(refused) {
                check(&mut world, &alice, form, false);
            }
        }
        for neighbour in [before, after].into_iter().flatten() {
            check(&mut world, &alice, neighbour.parse().unwrap(), true);
        }
    }
    for form in forms("8.8.8.8") {
        let (mut world, alice) = self::world(config());
        check(&mut world, &alice, form, !is_by_tunnel(form));
    }
}

#[test]
fn special_ipv6_ranges_are_refused() {
    let (mut world, alice) = world(config());
    for (first, last, before, after) in V6 {
        for refused in [first, last] {
            check(&mut world, &alice, refused.parse().unwrap(), false);
        }
        for neighbour in [before, after].into_iter().flatten() {
            check(&mut world, &alice, neighbour.parse().unwrap(), true);
        }
    }
}

#[test]
fn an_allow_rule_opens_a_range_and_its_embedded_forms() {
    for form in forms("10.1.2.3").into_iter().chain(["10.1.2.3".parse().unwrap()]) {
        let mut opened = config();
        opened.peers.allow = vec!["10.1.0.0/16".parse().unwrap()];
        let (mut world, alice) = world(opened);
        check(&mut world, &alice, form, !is_by_tunnel(form));
        check(&mut world, &alice, "10.2.0.0".parse().unwrap(), false);
        for form in forms("10.2.0.0") {
            check(&mut world, &alice, form, false);
        }
    }
}

#[test]
fn a_deny_rule_closes_a_range_and_its_embedded_forms() {
    let mut closed = config();
    closed.peers.deny = vec!["8.8.0.0/16".parse().unwrap(), "2a01::/16".parse().unwrap()];
    closed.peers.allow = vec!["8.8.8.0/24".parse().unwrap(), "::/0".parse().unwrap()];
    let (mut world, alice) = world(closed);
    for form in forms("8.8.8.8").into_iter().chain(["8.8.8.8".parse().unwrap(), "2a01::1".parse().unwrap()]) {
        check(&mut world, &alice, form, false);
    }
    check(&mut world, &alice, "8.9.0.0".parse().unwrap(), true);
}

#[test]
fn a_refused_peer_is_logged_and_counted_by_reason() {
    let rules = PeerRules { deny: vec!["8.8.0.0/16".parse().unwrap()], ..PeerRules::default() };
    let deny = PeerDenial::Rule(rules.deny[0]);
    let mut world = World::with(ServerConfig { peers: rules, ..config() });
    let (alice, _) = world.allocated();
    world.effects();
    for (ask, wanted, why) in [
        (Ask::permit("8.8.8.8:9"), "8.8.8.8:0", deny),
        (Ask::bind(0x4000, "8.8.8.8:9"), "8.8.8.8:9", deny),
        (Ask::permit("10.0.0.1:9"), "10.0.0.1:0", PeerDenial::Special),
    ] {
        assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(403));
        let effects = world.effects();
        let [Effect::PeerRefused { username, peer, by, suppressed: 0, .. }] = &effects[..] else {
            panic!("{effects:?}")
        };
        assert_eq!((&**username, *peer, *by), ("alice", address(wanted), why));
    }
    assert_eq!(world.server.stats().peer_refusals, [2, 0, 1, 0]);
    let again = Ask::permit("10.0.0.1:9").signed(&alice).bytes();
    (0..500).for_each(|_| drop(world.feed(&again)));
    assert!(world.effects().len() < 20, "bounded");
    assert_eq!(world.server.stats().peer_refusals, [2, 0, 501, 0]);
}

/// RFC 8656 section 21.4: a tunnel may send relayed packets back to this server.
#[test]
fn tunnel_addresses_are_refused_for_clients_and_peers() {
    let tunnels = ["2002:808:808::1", "2001:0:808:808::f7f7:f7f7"];
    for ip in tunnels {
        let mut world = World::new();
        let peer = format!("[{ip}]:7000");
        let ticket = {
            let alice = world.credentials("alice", Scheme::Md5);
            let ask = Ask::allocate().raw(0x0017, &[2, 0, 0, 0]).raw(TICKET, &[]).signed(&alice);
            let ticket = world.ask(&ask).success().ticket().expect("a requested ticket");
            for ask in [Ask::permit(&peer), Ask::bind(0x4000, &peer)] {
                assert_eq!(world.ask(&ask.signed(&alice)).code(), Some(403), "{peer}");
            }
            assert_eq!(world.feed(&Ask::send(&peer, b"x")), Outcome::Drop(DropReason::PeerRefused));
            ticket
        };
        world.client.address = address(&format!("[{ip}]:40000"));
        let alice = world.credentials("alice", Scheme::Md5);
        for ask in [Ask::allocate(), Ask::bind(0x4000, PEER), Ask::present(&ticket)] {
            let reply = world.ask(&ask.signed(&alice));
            assert!(reply.is_signed(&alice));
            assert_eq!(reply.code(), Some(403), "{ip}");
        }
        assert_eq!(world.server.allocations(), 1, "the allocation stays at its first address");
        world.ask(&Ask::new(BINDING)).success();
    }
}
