//! Fuzz target: arbitrary text as a turnserver.conf.

use std::net::IpAddr;

use turnpike_config::{Secret, Settings, UserSecret, settings_of};
use turnpike_testkit::fuzz;
use turnpike_turn::{
    ip_range::{IpRange, difference},
    server::{Cidr, PeerRules},
};

use super::{tests::text_of, *};

const CONF: &str = include_str!("tests/all.conf");

#[test]
fn turnserver_conf() {
    fuzz::target("turnserver_conf", seeds, |bytes| {
        let Ok(text) = str::from_utf8(bytes) else { return };
        let imported = text_of(text);
        notes_are_bounded(&imported.notes, text);
        comments_say_nothing(&imported, text);
        match settings_of(&imported.toml) {
            Ok(settings) => {
                peers_are_refused_as_in_coturn(&settings, text);
                no_note_has_a_secret(&settings, &imported.notes, text);
            }
            Err(mistakes) => mistakes.0.iter().for_each(|mistake| {
                let is_it = |note: &Note| note.option == mistake.key && note.text.contains(&mistake.problem);
                assert!(imported.notes.iter().any(is_it), "{mistake}\n{}", imported.toml);
            }),
        }
    });
}

fn notes_are_bounded(notes: &[Note], text: &str) {
    let lines = text.lines().count();
    assert!(notes.iter().all(|note| note.line <= lines));
    let told: usize = notes.iter().map(|note| note.to_string().len()).sum();
    assert!(told <= 8192 + 600 * text.len(), "{told} bytes for {}", text.len());
}

fn comments_say_nothing(imported: &Imported, text: &str) {
    let more = text_of(&format!("\n  # realm=elsewhere\n{text}"));
    let settings = |toml: &str| {
        let (head, rest) = toml.split_once('\n').expect("a line with the source");
        assert!(head.starts_with("# "));
        rest.split("\n# Options without a translation").next().map(str::to_owned)
    };
    assert_eq!(settings(&more.toml), settings(&imported.toml));
    let later = |note: &Note| Note { line: if note.line > 0 { note.line + 2 } else { 0 }, ..note.clone() };
    assert_eq!(more.notes, imported.notes.iter().map(later).collect::<Vec<_>>());
}

/// Checks that a denied peer is refused unless it is also allowed, and that an allowed one is permitted.
fn peers_are_refused_as_in_coturn(settings: &Settings, text: &str) {
    let ranges = |wanted: &str| -> Vec<IpRange> {
        let named = options_of(text).filter(|(option, _)| *option == wanted);
        named.filter_map(|(_, value)| value.parse().ok()).collect()
    };
    let (allowed, denied) = (ranges("allowed-peer-ip"), ranges("denied-peer-ip"));
    let allow = settings.allow.iter().flat_map(|peer| peer.rules(&[])).collect();
    let rules = PeerRules { allow, deny: settings.deny.clone(), ..PeerRules::default() };
    let is_in = |ranges: &[IpRange], ip: IpAddr| {
        let one = IpRange::new(ip, ip).expect("one address");
        difference(&[one], ranges).is_empty()
    };
    let nothing_but_loopback = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified();
    // The first address of each prefix of each range, and the address before it.
    let firsts = allowed.iter().chain(&denied).flat_map(IpRange::prefixes).map(|prefix| base(&prefix));
    for ip in firsts.flat_map(|ip| [Some(ip), before(ip)]).flatten() {
        let is_mapped = matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some());
        if is_in(&allowed, ip) && !nothing_but_loopback(ip) && !is_mapped {
            assert!(settings.deny.iter().all(|prefix| !prefix.contains(ip)), "{ip} is denied");
            // The server's own addresses are permitted only on relay ports. For an IPv6 address, the IPv4
            // address embedded in it matters too.
            assert!(ip.is_ipv6() || rules.permits(ip), "{ip} is refused");
        } else if is_in(&denied, ip) && !ip.is_loopback() {
            assert!(!rules.permits(ip), "{ip} is allowed");
        }
    }
}

fn options_of(text: &str) -> impl Iterator<Item = (&str, &str)> {
    super::settings(text).map(|(_, option, value)| (option, without_comment(value).0))
}

fn base(prefix: &Cidr) -> IpAddr {
    let text = prefix.to_string();
    let (base, _) = text.split_once('/').expect("a prefix");
    base.parse().expect("an address")
}

fn before(ip: IpAddr) -> Option<IpAddr> {
    match ip {
        IpAddr::V4(ip) => ip.to_bits().checked_sub(1).map(|bits| IpAddr::V4(bits.into())),
        IpAddr::V6(ip) => ip.to_bits().checked_sub(1).map(|bits| IpAddr::V6(bits.into())),
    }
}

/// Notes are printed, so none may contain a secret.
fn no_note_has_a_secret(settings: &Settings, notes: &[Note], text: &str) {
    let passwords = settings.auth.users.iter().filter_map(|user| match &user.secret {
        UserSecret::Password(password) => Some(password),
        UserSecret::Keys(_) => None,
    });
    for secret in passwords.chain(&settings.auth.secrets).map(Secret::reveal) {
        // A secret that also occurs elsewhere in the text may be quoted from there, and short secrets are
        // part of many words.
        if secret.len() >= 8 && text.matches(secret).count() == 1 {
            assert!(notes.iter().all(|note| !note.to_string().contains(secret)), "{secret}");
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> =
        CONF.lines().filter(|line| !line.starts_with('#')).map(Into::into).collect();
    seeds.push(CONF.into());
    seeds.extend(
        [
            "lt-cred-mech\nuser=alice:0x0123456789abcdef0123456789abcdef\nuser=bob:correct horse\nrealm=example.org\n",
            "listening-ip=10.0.0.5\nlistening-ip=10.0.0.6\nrelay-ip=10.0.0.5\nexternal-ip=203.0.113.5/10.0.0.5\nrfc5780\n",
            "denied-peer-ip=10.0.0.0-10.255.255.255\nallowed-peer-ip=10.1.2.3\nallowed-peer-ip=2001:db8::-2001:db8::ffff\n",
            "denied-peer-ip=0.0.0.0-255.255.255.255\ndenied-peer-ip=::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff\nallow-loopback-peers\n",
            "use-auth-secret\nstatic-auth-secret=a long secret\nalternate-server=192.0.2.1\ntls-alternate-server=[2001:db8::1]:5349\n",
            "cert=/c.pem\npkey=/k.pem\ndtls\nno-tls\nprometheus\nprometheus-address=any\nmin-port=100\nmax-port=99\n",
            "redis-userdb=\"ip=127.0.0.1 dbname=0 password=turn port=6379\"\nmax-bps=0\nbps-capacity=18446744073709551615\n",
            "denied-peer-ip=::ffff:0.0.0.0-::ffff:255.255.255.255 # mapped\nallowed-peer-ip=127.0.0.1\nallowed-peer-ip=10.0.0.1\nlistening-ip=10.0.0.1\n",
            "userdb=/nowhere # c\nrealm=\"a\" # c\nexternal-ip=203.0.113.5 # c\nno-udp # c\nmultiplex-peer=off\nuser-quota=12# c\n",
            "relm\u{1}=x\nrealm=\"a\\\"b\nuser=:\nstale-nonce=0\nlog-min-level=warn\nfingerprint=maybe\n",
        ]
        .map(|text| text.as_bytes().to_vec()),
    );
    seeds
}
