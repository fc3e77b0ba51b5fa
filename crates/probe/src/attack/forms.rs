//! Forbidden peer addresses, in every notation that has bypassed the rules of some server.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) name: String,
    pub(super) ip: IpAddr,
    /// True for an address of the server itself, some of whose ports may be legitimate peers.
    pub(super) is_own: bool,
}

const SPECIAL: &[(&str, &str)] = &[
    ("unspecified", "0.0.0.0"),
    ("loopback", "127.0.0.1"),
    ("the end of loopback", "127.255.255.254"),
    ("this network", "0.1.2.3"),
    ("link-local (cloud metadata)", "169.254.169.254"),
    ("private", "10.0.0.1"),
    ("shared (carrier NAT)", "100.64.0.1"),
    ("multicast", "224.0.0.1"),
    ("reserved", "240.0.0.1"),
    ("broadcast", "255.255.255.255"),
    ("unspecified", "::"),
    ("loopback", "::1"),
    ("link-local, in any scope of the server", "fe80::1"),
    ("unique local (private)", "fc00::1"),
    ("unique local (cloud metadata)", "fd00:ec2::254"),
    ("multicast", "ff02::1"),
];

const EMBEDDED: &[(&str, Ipv4Addr)] = &[
    ("loopback", Ipv4Addr::LOCALHOST),
    ("unspecified", Ipv4Addr::UNSPECIFIED),
    ("cloud metadata", Ipv4Addr::new(169, 254, 169, 254)),
];

pub(super) fn special() -> impl Iterator<Item = Form> {
    let plain = SPECIAL.iter().filter_map(|(name, ip)| Some(form(name, ip.parse().ok()?)));
    plain.chain(EMBEDDED.iter().flat_map(|(name, ip)| spellings(name, *ip)))
}

/// `public` contains the server's external addresses as seen by peers.
pub(super) fn all(is_v6: bool, server: IpAddr, public: &[IpAddr]) -> impl Iterator<Item = Form> {
    let public = public.iter().map(|ip| ("the server's public address", *ip));
    let own = [("the server's own address", server)].into_iter().chain(public).flat_map(|(name, ip)| {
        let embedded = match ip {
            IpAddr::V4(ip) => spellings(name, ip).collect(),
            IpAddr::V6(_) => Vec::new(),
        };
        [form(name, ip)].into_iter().chain(embedded).map(|form| Form { is_own: true, ..form })
    });
    let is_mapped = |ip: IpAddr| matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some());
    special().chain(own).filter(move |form| form.ip.is_ipv6() == is_v6 || !is_v6 && is_mapped(form.ip))
}

fn spellings(name: &str, ip: Ipv4Addr) -> impl Iterator<Item = Form> {
    let [a, b, c, d] = ip.octets().map(u16::from);
    let (high, low) = (a << 8 | b, c << 8 | d);
    [
        ("IPv4-mapped", Ipv6Addr::new(0, 0, 0, 0, 0, 0xFFFF, high, low)),
        ("IPv4-compatible", Ipv6Addr::new(0, 0, 0, 0, 0, 0, high, low)),
        ("SIIT", Ipv6Addr::new(0, 0, 0, 0, 0xFFFF, 0, high, low)),
        ("NAT64", Ipv6Addr::new(0x64, 0xFF9B, 0, 0, 0, 0, high, low)),
        ("local-use NAT64", Ipv6Addr::new(0x64, 0xFF9B, 1, 0, 0, 0, high, low)),
        ("6to4", Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1)),
        ("Teredo, as the client", Ipv6Addr::new(0x2001, 0, 0x4136, 0xE378, 0x8000, 0x63BF, !high, !low)),
        ("Teredo, as the server", Ipv6Addr::new(0x2001, 0, high, low, 0x8000, 0x63BF, 0x3FFF, 0xFDD2)),
        ("ISATAP", Ipv6Addr::new(0x2606, 0x4700, 0, 1, 0, 0x5EFE, high, low)),
    ]
    .map(|(spelling, ip)| form(&format!("{name} as {spelling}"), ip.into()))
    .into_iter()
}

fn form(name: &str, ip: IpAddr) -> Form {
    Form { name: name.to_owned(), ip, is_own: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notations_match_the_standards() {
        let found: Vec<String> =
            spellings("x", Ipv4Addr::new(192, 0, 2, 33)).map(|form| form.ip.to_string()).collect();
        // See RFC 4291, RFC 6052 section 2.4, RFC 8215, RFC 3056, RFC 4380 section 4 and RFC 5214.
        for expected in [
            "::ffff:192.0.2.33",
            "::c000:221",
            "::ffff:0:c000:221",
            "64:ff9b::c000:221",
            "64:ff9b:1::c000:221",
            "2002:c000:221::1",
            "2001:0:4136:e378:8000:63bf:3fff:fdde",
            "2001:0:c000:221:8000:63bf:3fff:fdd2",
            "2606:4700:0:1:0:5efe:c000:221",
        ] {
            assert!(found.iter().any(|ip| ip == expected), "no {expected} in {found:?}");
        }
    }

    #[test]
    fn ipv4_allocations_try_mapped_addresses_too() {
        let server = IpAddr::from([192, 0, 2, 1]);
        let v4: Vec<Form> = all(false, server, &[[192, 0, 2, 2].into()]).collect();
        assert!(v4.iter().any(|form| form.ip == server && form.is_own));
        assert!(v4.iter().any(|form| form.name == "the server's public address as IPv4-mapped"));
        assert!(v4.iter().all(|form| form.ip.is_ipv4() || form.name.ends_with("IPv4-mapped")));
        let v6: Vec<Form> = all(true, server, &[]).collect();
        assert!(v6.iter().all(|form| form.ip.is_ipv6()) && v6.len() > 40, "{}", v6.len());
    }
}
