//! Warnings about relay addresses that are valid but of little use.

use turnpike_turn::server::RelayAddress;
use turnpike_wire::address::is_private;

use crate::Settings;

/// Warnings for the log about configured or detected addresses.
pub fn relay_doubts(settings: &Settings, addresses: &[RelayAddress]) -> Vec<String> {
    let mut doubts: Vec<String> =
        addresses.iter().filter_map(|address| unreachable(settings, address)).take(1).collect();
    if !addresses.is_empty() && addresses.iter().all(|address| address.bind.is_ipv6()) {
        doubts.push(
            "all relay addresses are IPv6: browsers and most other clients request no family, which means that they want IPv4, and get error 440; \
             add an IPv4 address with --relay-ip"
                .to_owned(),
        );
    }
    doubts
}

/// Reason why peers elsewhere cannot reach this address.
fn unreachable(settings: &Settings, address: &RelayAddress) -> Option<String> {
    let RelayAddress { bind, external } = *address;
    match external {
        // If the server listens only on loopback, its clients and their peers are on this machine.
        None if bind.is_loopback() => (!listens_on_loopback_alone(settings)).then(|| {
            format!(
                "relay address {bind} is loopback: it reaches only peers on this machine, and only those in peers.allow; set another address \
                 with --relay-ip, or leave the option out to have it detected"
            )
        }),
        Some(external) if bind.is_loopback() && !external.is_loopback() => Some(format!(
            "relay address {bind}={external}: packets from a loopback address never leave this machine; write --relay-ip auto={external}"
        )),
        None if is_private(bind) => Some(format!(
            "relay address {bind} is private: behind a NAT, give the public one with --relay-ip {bind}=PUBLIC or --relay-ip auto=PUBLIC"
        )),
        Some(external) if is_private(external) && !external.is_loopback() => Some(format!(
            "relay address {bind}={external}: {external} is private, so peers on the Internet cannot reach it; write the public address"
        )),
        _ => None,
    }
}

fn listens_on_loopback_alone(settings: &Settings) -> bool {
    let mut listeners = settings.listen.iter().chain(&settings.tls.listen).chain(&settings.dtls.listen);
    listeners.all(|at| at.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubts(listen: &str, named: &[&str]) -> Vec<String> {
        let address = |text: &str| {
            let (bind, external) = text.split_once('=').map_or((text, None), |(bind, to)| (bind, Some(to)));
            let ip = |text: &str| text.parse().unwrap();
            RelayAddress { bind: ip(bind), external: external.map(ip) }
        };
        let settings = Settings { listen: vec![listen.parse().unwrap()], ..Settings::default() };
        relay_doubts(&settings, &named.iter().map(|text| address(text)).collect::<Vec<_>>())
    }

    #[test]
    fn unreachable_and_ipv6_only_relay_addresses_are_warnings() {
        for (named, words) in [
            (&["203.0.113.5"][..], &[][..]),
            (&["127.0.0.1"], &["127.0.0.1 is loopback"]),
            (&["::1", "203.0.113.5"], &["::1 is loopback"]),
            (&["127.0.0.1=203.0.113.5"], &["write --relay-ip auto=203.0.113.5"]),
            (&["10.0.0.5=203.0.113.5"], &[]),
            (&["10.0.0.5=192.168.1.5"], &["192.168.1.5 is private, so peers on the Internet"]),
            (&["203.0.113.5", "10.0.0.5"], &["10.0.0.5 is private"]),
            (&["100.64.0.1"], &["is private"]),
            (&["192.0.0.2"], &["is private"]),
            (&["169.254.3.3"], &["is private"]),
            (&["2001:db8::1"], &["error 440"]),
            (&["fd00::1"], &["fd00::1 is private", "error 440"]),
            (&["2001:db8::1", "203.0.113.5"], &[]),
            (&[], &[]),
        ] {
            let doubts = doubts("0.0.0.0:3478", named);
            assert_eq!(doubts.len(), words.len(), "{named:?}: {doubts:?}");
            assert!(doubts.iter().zip(words).all(|(doubt, word)| doubt.contains(word)), "{doubts:?}");
        }
    }

    #[test]
    fn loopback_server_may_relay_on_loopback() {
        assert_eq!(doubts("127.0.0.1:3478", &["127.0.0.1"]), [] as [&str; 0]);
    }
}
