//! `[nat_discovery]`: where and how often clients may find out about their NAT (RFC 5780).

use turnpike_relay::RelayAddress;

use super::{
    Settings,
    key::{KeySpec, scalar, show::list},
    keys::{relay_address, show_relay_addresses},
};

/// Settings of NAT discovery.
#[derive(Clone, Debug, PartialEq)]
pub struct DiscoverySettings {
    /// Two of a family, or two of each; empty for none of it.
    pub addresses: Vec<RelayAddress>,
    /// Ports on each of them.
    pub ports: [u16; 2],
    /// Requests a second of one network.
    pub per_source: u32,
    /// Requests a second of all.
    pub total: u32,
}

impl Default for DiscoverySettings {
    fn default() -> Self {
        Self { addresses: Vec::new(), ports: [3478, 3479], per_source: 10, total: 1000 }
    }
}

impl DiscoverySettings {
    /// The addresses of each family that has any, IPv4 first.
    pub fn families(&self) -> impl Iterator<Item = Vec<RelayAddress>> + '_ {
        [true, false].into_iter().filter_map(|v4| {
            let of: Vec<_> =
                self.addresses.iter().copied().filter(|address| address.bind.is_ipv4() == v4).collect();
            (!of.is_empty()).then_some(of)
        })
    }
}

pub(super) const ADDRESSES: KeySpec<Settings> = KeySpec {
    path: "nat_discovery.addresses",
    expected: "[], or two addresses of this machine for each family, \"IP\" or \"IP=EXTERNAL\", unicast",
    list: true,
    secret: false,
    reload: false,
    apply: |reader, node, settings| {
        settings.discovery.addresses =
            reader.list(node, |reader, node| reader.parsed(node, relay_address))?;
        Some(())
    },
    show: |settings| show_relay_addresses(&settings.discovery.addresses),
};

pub(super) const PORTS: KeySpec<Settings> = KeySpec {
    path: "nat_discovery.ports",
    expected: "two different ports, 1 to 65535, such as [3478, 3479]",
    list: true,
    secret: false,
    reload: false,
    apply: |reader, node, settings| {
        let ports = reader.list(node, |reader, node| reader.integer(node, &(1..=u16::MAX)))?;
        match ports[..] {
            [first, second] if first != second => settings.discovery.ports = [first, second],
            _ => return reader.refuse(node, None),
        }
        Some(())
    },
    show: |settings| list(settings.discovery.ports.iter().map(ToString::to_string)),
};

pub(super) const PER_SOURCE: KeySpec<Settings> = scalar!(
    "nat_discovery.requests_per_source",
    reload: true,
    RATE,
    |reader, node, settings| {
        settings.discovery.per_source = reader.integer(node, &(1..=1_000_000))?;
        Some(())
    },
    |settings| settings.discovery.per_source.to_string(),
);

pub(super) const TOTAL: KeySpec<Settings> = scalar!(
    "nat_discovery.requests",
    reload: true,
    RATE,
    |reader, node, settings| {
        settings.discovery.total = reader.integer(node, &(1..=1_000_000))?;
        Some(())
    },
    |settings| settings.discovery.total.to_string(),
);

const RATE: &str = "requests a second, 1 to 1000000";
