//! Clients with media by network, and the number of troubled ones.

use std::{collections::HashMap, fmt, net::IpAddr};

use turnpike_turn::server::ClientNetworks;
use turnpike_wire::address::canonical_ip;

/// Autonomous system; the /24 or /48 if that is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum NetworkKey {
    System(u32),
    Prefix(IpAddr),
}

impl NetworkKey {
    pub(super) fn of(client: IpAddr, networks: &dyn ClientNetworks) -> Self {
        networks.network(client).asn.map_or_else(|| Self::Prefix(prefix(client)), Self::System)
    }
}

fn prefix(client: IpAddr) -> IpAddr {
    match canonical_ip(client) {
        IpAddr::V4(ip) => {
            let [a, b, c, _] = ip.octets();
            [a, b, c, 0].into()
        }
        IpAddr::V6(ip) => {
            let [a, b, c, ..] = ip.segments();
            [a, b, c, 0, 0, 0, 0, 0].into()
        }
    }
}

impl fmt::Display for NetworkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System(asn) => write!(f, "AS{asn}"),
            Self::Prefix(ip) => write!(f, "{ip}/{}", if ip.is_ipv4() { 24 } else { 48 }),
        }
    }
}

/// Networks of clients that have media. Bounded by the number of allocations.
#[derive(Debug, Default)]
pub(super) struct Networks(HashMap<NetworkKey, Network>);

#[derive(Debug, Default)]
struct Network {
    clients: HashMap<IpAddr, Client>,
    /// Clients with at least one troubled allocation.
    troubled: usize,
}

/// Allocations of a client.
#[derive(Debug, Default)]
struct Client {
    allocations: usize,
    troubled: usize,
}

impl Networks {
    pub(super) fn join(&mut self, key: NetworkKey, client: IpAddr) {
        self.0.entry(key).or_default().clients.entry(client).or_default().allocations += 1;
    }

    /// Begins or ends the trouble of one allocation of a client.
    pub(super) fn set_troubled(&mut self, key: NetworkKey, client: IpAddr, is_troubled: bool) {
        let Some(network) = self.0.get_mut(&key) else { return };
        let Some(client) = network.clients.get_mut(&client) else { return };
        if is_troubled {
            client.troubled += 1;
            network.troubled += usize::from(client.troubled == 1);
        } else {
            client.troubled -= 1;
            network.troubled -= usize::from(client.troubled == 0);
        }
    }

    /// Removes an allocation without trouble.
    pub(super) fn leave(&mut self, key: NetworkKey, client: IpAddr) {
        let Some(network) = self.0.get_mut(&key) else { return };
        let Some(left) = network.clients.get_mut(&client) else { return };
        left.allocations -= 1;
        if left.allocations == 0 {
            network.clients.remove(&client);
        }
        if network.clients.is_empty() {
            self.0.remove(&key);
        }
    }

    /// Numbers of other clients in the network: troubled ones, and all.
    pub(super) fn others(&self, key: NetworkKey, client: IpAddr) -> (usize, usize) {
        let Some(network) = self.0.get(&key) else { return (0, 0) };
        let is_troubled = network.clients.get(&client).is_some_and(|client| client.troubled > 0);
        (network.troubled - usize::from(is_troubled), network.clients.len().saturating_sub(1))
    }
}
