//! Relay addresses that work, but hardly for whom the server is meant.

use std::net::IpAddr;

use turnpike_relay::RelayAddress;

/// Sentences for the log, about addresses that were named or detected.
pub fn relay_doubts(addresses: &[RelayAddress]) -> Vec<String> {
    let mut doubts = Vec::new();
    let private = addresses.iter().find(|address| address.external.is_none() && is_private(address.bind));
    if let Some(RelayAddress { bind, .. }) = private {
        doubts.push(format!(
            "relay address {bind} is private: behind a NAT, name the public one with --relay-ip {bind}=PUBLIC or --relay-ip auto=PUBLIC"
        ));
    }
    if !addresses.is_empty() && addresses.iter().all(|address| address.bind.is_ipv6()) {
        doubts.push(
            "all relay addresses are IPv6: browsers and most other clients name no family, which means IPv4, and get error 440; add an IPv4 \
             address with --relay-ip"
                .to_owned(),
        );
    }
    doubts
}

fn is_private(address: IpAddr) -> bool {
    match address {
        // RFC 6598, behind a carrier's NAT.
        IpAddr::V4(v4) => v4.is_private() || v4.octets()[0] == 100 && v4.octets()[1] & 0xC0 == 64,
        IpAddr::V6(v6) => v6.is_unique_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_and_ipv6_alone_are_warned_about() {
        let address = |text: &str| {
            let (bind, external) = text.split_once('=').map_or((text, None), |(bind, to)| (bind, Some(to)));
            let ip = |text: &str| text.parse().unwrap();
            RelayAddress { bind: ip(bind), external: external.map(ip) }
        };
        for (named, words) in [
            (&["203.0.113.5"][..], &[][..]),
            (&["127.0.0.1"], &[]),
            (&["10.0.0.5=203.0.113.5"], &[]),
            (&["203.0.113.5", "10.0.0.5"], &["10.0.0.5 is private"]),
            (&["100.64.0.1"], &["is private"]),
            (&["2001:db8::1"], &["error 440"]),
            (&["fd00::1"], &["fd00::1 is private", "error 440"]),
            (&["2001:db8::1", "203.0.113.5"], &[]),
            (&[], &[]),
        ] {
            let addresses: Vec<_> = named.iter().map(|text| address(text)).collect();
            let doubts = relay_doubts(&addresses);
            assert_eq!(doubts.len(), words.len(), "{named:?}: {doubts:?}");
            assert!(doubts.iter().zip(words).all(|(doubt, word)| doubt.contains(word)), "{doubts:?}");
        }
    }
}
