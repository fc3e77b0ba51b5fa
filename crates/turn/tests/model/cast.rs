//! Participants of a scenario: 5-tuples of clients, peers, users, and the rules that a reload may apply.

use super::prelude::*;
use turnpike_turn::server::{
    ListenerId, ListenerProfile, OwnEndpoints, PeerRules, Realm, ServerLimits, StoreFailure, Transport,
};

use crate::common::{address, config};

pub(super) const TENANT: &str = "tenant.example";
pub(super) const REALMS: [&str; 2] = [REALM, TENANT];

/// One credential expires during a scenario, one has already expired, and one user is unknown.
pub(super) const USERS: [&str; 5] = ["alice", "bob", "timed", "old", "nobody"];

pub(super) const START_MS: u64 = 1_000_000;
pub(super) const START_UNIX: u64 = 1_800_000_000;

pub(super) const TIMED_UNTIL: u64 = START_UNIX + 300;

pub(super) fn until(user: &str) -> Option<u64> {
    (user == "timed").then_some(TIMED_UNTIL)
}

/// Offset of a worker's clock, in whole seconds because timers count whole seconds.
pub(super) fn skew(worker: usize) -> u64 {
    7_000 * worker as u64
}

const LISTENERS: [Transport; 4] = [Transport::Udp, Transport::Tcp, Transport::Tls, Transport::Dtls];

pub(super) fn transport(listener: ListenerId) -> Transport {
    LISTENERS[usize::from(listener.0)]
}

/// Client behind one of the server's relayed transport addresses, over UDP.
pub(super) const LOOP: usize = 8;

/// 5-tuples of clients: some share an address, and some are streams.
pub(super) const CLIENTS: usize = 11;

pub(super) fn client(number: usize) -> Client {
    let (at, listener) = [
        ("192.0.2.7:40000", 0),
        ("192.0.2.7:40001", 0),
        ("198.18.0.1:40002", 0),
        ("192.0.2.7:41003", 1),
        ("192.0.2.7:41004", 1),
        ("192.0.2.8:42005", 3),
        ("[2001:db8:7::1]:40006", 0),
        ("198.18.0.1:41007", 2),
        ("203.0.113.99:55555", 0),
        ("192.0.2.7:42009", 3),
        ("192.0.2.7:41010", 1),
    ][number];
    let at = address(at);
    let local = if at.is_ipv4() { "192.0.2.1:3478" } else { "[2001:db8::2]:3478" };
    Client { listener: ListenerId(listener), address: at, local: address(local) }
}

pub(super) fn number_of(client: &Client) -> usize {
    (0..CLIENTS).find(|number| self::client(*number) == *client).expect("one of the cast")
}

/// Two ports of one host, both families, and a client at its external address. The last three are a client at
/// its bound address, which is always refused, an IPv4-mapped address, and port 0.
pub(super) const PEERS: usize = 12;

pub(super) fn peer(number: usize) -> SocketAddr {
    address(
        [
            "198.41.0.4:7000",
            "198.41.0.4:7001",
            "198.41.0.5:7000",
            "192.5.5.241:9000",
            "[2606:4700::1]:7000",
            "[2606:4700::2]:7000",
            "198.41.0.6:50100",
            "198.41.0.7:7000",
            "192.5.5.242:9000",
            "10.0.0.1:50101",
            "[::ffff:198.41.0.4]:7000",
            "198.41.0.9:0",
        ][number],
    )
}

fn told_and_bound() -> [IpAddr; 2] {
    [peer(6), peer(9)].map(|peer| peer.ip())
}

pub(super) const SENDING_PEERS: usize = 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rules {
    denied: Vec<IpAddr>,
    /// Denied only to users of [`TENANT`].
    tenant_denied: Vec<IpAddr>,
    tenant: bool,
    nat: bool,
    pub(super) mobility: bool,
    pub(super) tcp: bool,
    pub(super) v6: bool,
    pub(super) max_permissions: usize,
    pub(super) max_channels: usize,
    pub(super) max_connections: usize,
    pub(super) max_total_connections: usize,
    pub(super) max_user_connections: usize,
    pub(super) store_drops: bool,
    /// A channel keeps the permission for its peer alive.
    pub(super) channels_permit: bool,
    pub(super) end_with_credential: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            denied: Vec::new(),
            tenant_denied: Vec::new(),
            tenant: true,
            nat: true,
            mobility: true,
            tcp: true,
            v6: true,
            max_permissions: 4,
            max_channels: 3,
            max_connections: 3,
            max_total_connections: 5,
            max_user_connections: 4,
            store_drops: false,
            channels_permit: true,
            end_with_credential: false,
        }
    }
}

pub(super) const VARIANTS: u8 = 6;

impl Rules {
    pub(super) fn variant(number: u8) -> Self {
        let usual = Self::default();
        match number % VARIANTS {
            0 => usual,
            1 => {
                let [denied, tenant_denied] =
                    [[2, 3], [4, 6]].map(|two| two.map(|which| peer(which).ip()).to_vec());
                Self { denied, tenant_denied, ..usual }
            }
            2 => Self { tenant: false, nat: false, ..usual },
            3 => Self {
                max_permissions: 2,
                max_channels: 1,
                max_connections: 1,
                v6: false,
                store_drops: true,
                channels_permit: false,
                ..usual
            },
            4 => Self {
                denied: vec![peer(0).ip(), peer(4).ip()],
                mobility: false,
                end_with_credential: true,
                ..usual
            },
            _ => Self { tcp: false, max_total_connections: 1, max_user_connections: 1, ..usual },
        }
    }

    pub(super) fn refuses(&self, ip: IpAddr) -> bool {
        self.denied.contains(&ip) || [peer(9).ip(), peer(10).ip()].contains(&ip)
    }

    pub(super) fn refuses_in(&self, realm: &str, ip: IpAddr) -> bool {
        self.refuses(ip) || (realm == TENANT && self.tenant_denied.contains(&ip))
    }

    pub(super) fn refused_by(&self, realm: &str, ip: IpAddr) -> usize {
        let denied = |list: &[IpAddr]| list.contains(&ip.to_canonical());
        if denied(&self.denied) || (realm == TENANT && denied(&self.tenant_denied)) { 0 } else { 2 }
    }

    /// Address at which a peer is reachable.
    pub(super) fn reached(&self, peer: SocketAddr) -> SocketAddr {
        let [told, bound] = told_and_bound();
        if self.nat && peer.ip() == told { SocketAddr::new(bound, peer.port()) } else { peer }
    }

    /// Address by which clients know a source address.
    pub(super) fn told(&self, peer: SocketAddr) -> SocketAddr {
        let [told, bound] = told_and_bound();
        if self.nat && peer.ip() == bound { SocketAddr::new(told, peer.port()) } else { peer }
    }

    pub(super) fn denying(&self, ip: IpAddr) -> Self {
        Self { denied: [&self.denied[..], &[ip]].concat(), ..self.clone() }
    }

    pub(super) fn realms(&self) -> &'static [&'static str] {
        if self.tenant { &REALMS } else { &REALMS[..1] }
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        let [told, bound] = told_and_bound();
        let relays = self.nat.then_some((bound, Some(told)));
        let own = OwnEndpoints::new([], relays, [], 49_152..=65_535);
        let denying = |denied: &[IpAddr]| {
            let deny = denied.iter().map(|ip| ip.to_string().parse().expect("an address is a prefix"));
            PeerRules { deny: deny.collect(), own: own.clone(), ..PeerRules::default() }
        };
        let of_tenant = denying(&[&self.denied[..], &self.tenant_denied].concat());
        let tenant = Realm { name: TENANT.to_owned(), allow_sha256: true, username_anonymity: true };
        let profile = |transport| ListenerProfile { transport, ..ListenerProfile::default() };
        Arc::new(ServerConfig {
            peers: denying(&self.denied),
            realm_peers: HashMap::from([(TENANT.into(), of_tenant)]),
            store_failure: if self.store_drops { StoreFailure::Drop } else { StoreFailure::Answer },
            tenants: if self.tenant { vec![tenant] } else { Vec::new() },
            mobility: self.mobility,
            channels_permit: self.channels_permit,
            limits: ServerLimits {
                end_with_credential: self.end_with_credential,
                permissions: self.max_permissions,
                channels: self.max_channels,
                peer_connections_per_allocation: self.max_connections,
                peer_connections: self.max_total_connections,
                peer_connections_per_user: self.max_user_connections,
                ..ServerLimits::default()
            },
            tcp_relay: self.tcp,
            relay_v6: self.v6,
            listeners: LISTENERS.map(profile).to_vec(),
            ..config()
        })
    }
}
