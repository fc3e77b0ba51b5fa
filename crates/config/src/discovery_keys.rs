//! `[nat_discovery]`: addresses and rate limits of NAT behavior discovery (RFC 5780).

use turnpike_convert::toml_text::list;
use turnpike_turn::server::RelayAddress;

use crate::key::ValueKind;

#[derive(Clone, Debug, PartialEq)]
pub struct DiscoverySettings {
    /// Two addresses of one family, or two of each family. Empty if discovery is off.
    pub addresses: Vec<RelayAddress>,
    /// Ports on each address.
    pub ports: [u16; 2],
    /// Requests per second from one address prefix.
    pub requests_per_source: u32,
    /// Requests per second in total.
    pub requests: u32,
}

impl Default for DiscoverySettings {
    fn default() -> Self {
        Self { addresses: Vec::new(), ports: [3478, 3479], requests_per_source: 10, requests: 1000 }
    }
}

impl DiscoverySettings {
    /// Addresses of each configured family, IPv4 first.
    pub fn families(&self) -> impl Iterator<Item = Vec<RelayAddress>> + '_ {
        [true, false].into_iter().filter_map(|v4| {
            let of: Vec<_> =
                self.addresses.iter().copied().filter(|address| address.bind.is_ipv4() == v4).collect();
            (!of.is_empty()).then_some(of)
        })
    }
}

pub(super) const PORTS: ValueKind<[u16; 2]> = ValueKind::list(
    "two different ports, 1 to 65535, such as [3478, 3479]",
    |reader, node| match reader.list(node, |reader, node| reader.integer(node, &(1..=u16::MAX)))?[..] {
        [first, second] if first != second => Some([first, second]),
        _ => reader.refuse(node, None),
    },
    |ports| list(ports.iter().map(ToString::to_string)),
);
