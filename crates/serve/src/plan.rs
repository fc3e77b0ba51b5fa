//! Builds the relay's configuration from settings, and fills in missing values from the machine.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
    thread,
};

use turnpike_config::{DatapathChoice, Settings, limit_keys, realms, relay_doubts, relay_keys};
use turnpike_net::Datapath;
use turnpike_relay::{Config, DtlsConfig, DtlsContext, Hook, Layout, RelayAddress, StreamConfig, TlsContext};
use turnpike_turn::server::{DiscoveryLimits, ListenerId, ListenerProfile, NatDiscovery, ServerConfig};
use turnpike_wire::channel_data::ChannelRange;

use crate::{
    fleet::NodeKeys,
    machine::{self, Machine},
    needs::is_only_local,
    store::{self, Merged},
};

/// Number of pipes in one worker's `turnpike_copy::Mover`.
const PIPES: usize = 256;

#[derive(Clone, Debug)]
pub(crate) struct RelayPlan {
    pub(crate) config: Config,
    pub(crate) layout: Layout,
    pub(crate) datapath_reason: String,
    /// Log lines about detected and skipped values.
    pub(crate) notes: Vec<String>,
}

impl RelayPlan {
    /// Fills in missing values from the machine. `before` has the listener numbers from before a reload.
    pub(crate) fn new(
        merged: &Merged,
        keys: NodeKeys,
        tls: Option<Arc<TlsContext>>,
        dtls: Option<Arc<DtlsContext>>,
        before: Option<&Layout>,
        machine: &Machine,
    ) -> Self {
        let settings = &merged.settings;
        let mut notes = Vec::new();
        let (relay, doubts) = relay_addresses(settings, &machine.detected(), machine.had_route());
        if before.is_none() {
            notes.extend(doubts);
        }
        notes.extend(self_alternates(settings));
        let (datapath, datapath_reason) = match settings.datapath {
            DatapathChoice::Step(step) => (step, "as configured".to_owned()),
            _ => Datapath::best(),
        };
        let kernel = match settings.datapath {
            DatapathChoice::Auto => (!is_only_local(settings)).then_some(Hook::Best),
            DatapathChoice::Kernel => Some(Hook::Best),
            DatapathChoice::Xdp => Some(Hook::Xdp),
            DatapathChoice::XdpGeneric => Some(Hook::XdpGeneric),
            DatapathChoice::Step(_) => None,
        };
        if before.is_none() {
            notes.extend(kernel_path_caveats(settings.datapath).map(str::to_owned));
        }
        let mut listen = listeners(settings, &mut notes);
        let streams = stream_config(settings, &listen, tls);
        if !settings.udp {
            listen.clear();
        }
        let dtls = dtls_config(settings, dtls);
        listen.extend(discovery_listeners(settings, &listen));
        let mut layout = before.cloned().unwrap_or_default();
        layout.follow(&listen, &dtls.listen, &streams);
        let named = [&listen, &streams.listen, &streams.tls_listen, &dtls.listen].into_iter().flatten();
        let named = named.map(SocketAddr::ip).chain(relay.iter().map(|relay| relay.bind));
        let absent = machine.absent(named, &relay);
        let is_absent = |relay: &&RelayAddress| absent.contains(&relay.bind);
        notes.extend(relay.iter().filter(is_absent).map(machine::absent));
        let mut server = server_config(merged, &layout, &relay, keys);
        server.nat_discovery.retain(|of| {
            let lacking = of.addresses.iter().find(|ip| absent.contains(ip));
            notes.extend(lacking.map(|ip| {
                format!("nat_discovery.addresses: this machine does not have the address {ip}; NAT discovery starts once it does")
            }));
            lacking.is_none()
        });
        let config = Config {
            dtls,
            workers: workers(settings),
            datapath,
            kernel,
            kernel_leases: settings.datapath == DatapathChoice::Auto,
            kernel_flows: settings.kernel_flows,
            busy_poll: std::time::Duration::from_micros(settings.busy_poll_us.into()),
            coalesce: std::time::Duration::from_micros(settings.coalesce_us.into()),
            server,
            listen,
            streams,
            relay,
            relay_in_turn: settings.relay.addresses_in_turn,
            passed: Arc::default(),
            ports: settings.relay.ports.clone(),
            shared_ports: settings.relay.shared_ports,
            absent,
            addresses: machine.all(),
            listeners_beside: Vec::new(),
            listener_buffer: settings.relay.listener_buffer,
            relay_buffer: settings.relay.buffer,
            limits: settings.allocation_limits.clone(),
            realm_limits: realms::limits(settings),
            half_closed: Config::HALF_CLOSED,
        };
        Self { config, layout, datapath_reason, notes }
    }

    pub(crate) fn listens(&self, transport: turnpike_net::SocketProtocol, address: SocketAddr) -> bool {
        let config = &self.config;
        let (one, other) = match transport {
            turnpike_net::SocketProtocol::Udp => (&config.listen, &config.dtls.listen),
            turnpike_net::SocketProtocol::Tcp => (&config.streams.listen, &config.streams.tls_listen),
        };
        one.contains(&address) || other.contains(&address)
    }

    /// Maximum number of allocations: limited by relay ports unless ports are shared.
    pub(crate) fn most_allocations(&self) -> usize {
        let config = &self.config;
        if config.shared_ports > 0 {
            config.limits.allocations
        } else {
            config.limits.allocations.min(self.relay_ports())
        }
    }

    fn relay_ports(&self) -> usize {
        let config = &self.config;
        let of_realms =
            config.realm_limits.iter().filter_map(|limits| Some(limits.relay_ports.as_ref()?.len()));
        (config.ports.len() + of_realms.sum::<usize>()) * config.relay.len()
    }

    /// Estimated maximum number of file descriptors: up to two relay sockets and one connection per
    /// allocation, one for each reserved port and for each connection without an allocation, two per peer
    /// connection, and a reserve.
    pub(crate) fn open_files(&self) -> u64 {
        let config = &self.config;
        let listeners = config.streams.listen.len() + config.streams.tls_listen.len();
        let streams = if listeners == 0 {
            0
        } else {
            self.most_allocations() + config.streams.most_idle(config.workers)
        };
        // Each peer connection needs two descriptors, and so does each pipe for bulk transfer.
        let peers = if listeners == 0 || !config.server.tcp_relay {
            0
        } else {
            2 * (config.server.limits.peer_connections + config.workers * PIPES)
        };
        let handed_on = match config.streams.most_handed_on(config.workers) {
            0 => 0,
            most => 2 * (most + config.workers * PIPES),
        };
        let sockets = (config.listen.len() + config.dtls.listen.len() + listeners) * config.workers
            + (2 * config.limits.allocations).min(self.relay_ports())
            + config.max_reservations()
            + streams
            // When the limit is reached, evicted and new connections coexist until the end of the tick.
            + listeners * config.workers * StreamConfig::ACCEPTS
            + peers
            + handed_on;
        sockets as u64 + 64 + 8 * self.config.workers as u64
    }
}

/// Warnings about firewalls and other features that packets bypass when the kernel relays them.
fn kernel_path_caveats(datapath: DatapathChoice) -> impl Iterator<Item = &'static str> {
    use DatapathChoice::{Auto, Step, Xdp};
    let firewall = "packets relayed by the kernel bypass this machine's firewall (netfilter) and IPsec policies: \
                    only the peer rules limit which peers clients can reach";
    let vlan = "XDP cannot see a VLAN tag that the network card has stripped: if VLANs share a card, disable stripping \
                (ethtool -K INTERFACE rxvlan off)";
    let is_used = !matches!(datapath, Auto | Step(_));
    [(is_used, firewall), (datapath == Xdp, vlan)]
        .into_iter()
        .filter_map(|(holds, note)| holds.then_some(note))
}

fn stream_config(settings: &Settings, listen: &[SocketAddr], tls: Option<Arc<TlsContext>>) -> StreamConfig {
    StreamConfig {
        listen: if settings.tcp { listen.to_vec() } else { Vec::new() },
        tls_listen: settings.tls.listen.clone(),
        tls_only: settings.tls.only,
        tls,
        server_names: realms::server_names(settings).map(str::to_owned).collect(),
        proxies: settings.proxy_protocol_from.clone(),
        clients: settings.clients.clone(),
        hand_on: settings.hand_on.clone(),
        limits: settings.connection_limits.clone(),
    }
}

fn dtls_config(settings: &Settings, context: Option<Arc<DtlsContext>>) -> DtlsConfig {
    DtlsConfig {
        listen: if context.is_some() { settings.dtls.listen.clone() } else { Vec::new() },
        context,
        clients: settings.clients.clone(),
        limits: settings.connection_limits.clone(),
    }
}

/// Settings of the TURN state machine; a reload rebuilds them with the same keys.
pub(crate) fn server_config(
    merged: &Merged,
    layout: &Layout,
    relay: &[RelayAddress],
    NodeKeys { own, keys, node }: NodeKeys,
) -> ServerConfig {
    let settings = &merged.settings;
    let realms = realms::all(settings);
    // The relay adds this machine's own endpoints.
    let (peers, realm_peers) = merged.peers();
    let profiles = layout.entries().map(|entry| ListenerProfile {
        transport: entry.transport,
        realms: realms::served_at(&realms, entry.address, entry.server_name),
        ..ListenerProfile::default()
    });
    ServerConfig {
        realm: realms[0].name.to_owned(),
        tenants: realms[1..].iter().map(|realm| realm.for_server(settings.auth.allow_md5)).collect(),
        listeners: profiles.collect(),
        third_party: realms::third_party(settings),
        alternates: settings.alternates.iter().map(|named| named.alternate.clone()).collect(),
        nat_discovery: settings.discovery.families().filter_map(|of| nat_discovery(settings, &of)).collect(),
        discovery_limits: DiscoveryLimits {
            per_source: settings.discovery.requests_per_source,
            total: (settings.discovery.requests / u32::try_from(workers(settings)).unwrap_or(1)).max(1),
        },
        software: (!settings.software.is_empty()).then(|| settings.software.clone()),
        authenticate: settings.auth.required,
        authenticate_binding: settings.auth.binding,
        stun_only: settings.stun_only,
        clients: settings.clients.clone(),
        own_key: own,
        nonce_keys: keys,
        node,
        nonce_lifetime: settings.auth.nonce_lifetime,
        limits: settings.limits.clone(),
        max_allocation_duration: limit_keys::max_allocation_duration(settings),
        permission_lifetime: settings.permission_lifetime,
        channel_lifetime: settings.channel_lifetime,
        channels_permit: settings.relay.channels_permit,
        bandwidth: limit_keys::bandwidth(settings),
        quality: settings.quality,
        prefixes: limit_keys::prefixes(settings),
        refusals: limit_keys::refusals(settings, workers(settings)),
        relay_v4: relay.iter().any(|address| address.bind.is_ipv4()),
        relay_v6: relay.iter().any(|address| address.bind.is_ipv6()),
        peers,
        realm_peers,
        origins: merged.origins(),
        store_failure: store::failure(&settings.store),
        allow_md5: settings.auth.allow_md5,
        allow_sha256: realms[0].allows_sha256(settings.auth.allow_md5),
        channels: if settings.relay.rfc5766_channels { ChannelRange::Rfc5766 } else { ChannelRange::Rfc8656 },
        username_anonymity: realms[0].has_anonymity(),
        tcp_relay: settings.relay.tcp,
        mobility: settings.relay.mobility,
        ..ServerConfig::default()
    }
}

pub(crate) fn workers(settings: &Settings) -> usize {
    settings.workers.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from))
}

/// NAT discovery settings from the two addresses of a family; the relay fills in the listener IDs.
fn nat_discovery(settings: &Settings, addresses: &[RelayAddress]) -> Option<NatDiscovery> {
    let [first, second] = addresses else { return None };
    Some(NatDiscovery {
        addresses: [first.bind, second.bind],
        external: [first.external, second.external],
        ports: settings.discovery.ports,
        listeners: [[ListenerId(0); 2]; 2],
    })
}

/// Additional listeners that NAT discovery needs. A wildcard listener serves its port on every address.
fn discovery_listeners(settings: &Settings, listen: &[SocketAddr]) -> Vec<SocketAddr> {
    let discovery = &settings.discovery;
    let wanted = discovery
        .addresses
        .iter()
        .flat_map(|address| discovery.ports.map(|port| SocketAddr::new(address.bind, port)));
    let serves = |bound: &SocketAddr, wanted: &SocketAddr| {
        let everywhere = bound.ip().is_unspecified() && bound.is_ipv4() == wanted.is_ipv4();
        bound.port() == wanted.port() && (bound.ip() == wanted.ip() || everywhere)
    };
    wanted.filter(|wanted| !listen.iter().any(|bound| serves(bound, wanted))).collect()
}

pub(crate) fn has_no_users(settings: &Settings) -> bool {
    let asks = settings.auth.required && (settings.auth.binding || !settings.stun_only);
    asks && !realms::has_anybody(settings) && settings.realms.is_empty()
}

/// The default includes IPv6, which is skipped on machines without it; configured addresses must work.
fn listeners(settings: &Settings, notes: &mut Vec<String>) -> Vec<SocketAddr> {
    if settings.is_explicit("server.listen") {
        return settings.listen.clone();
    }
    let (usable, unusable): (Vec<_>, Vec<_>) =
        settings.listen.iter().copied().partition(|address| address.is_ipv4() || has_ipv6().is_ok());
    for address in unusable {
        notes.push(format!("not listening on {address}: this machine has no IPv6"));
    }
    usable
}

/// Alternates on addresses of this machine where a wildcard listener has the same port. The configuration
/// check rejects the obvious cases.
pub(crate) fn self_alternates(settings: &Settings) -> impl Iterator<Item = String> + '_ {
    let everywhere = |at: &SocketAddr| {
        let mut listeners = settings.listen.iter().chain(&settings.tls.listen).chain(&settings.dtls.listen);
        listeners.any(|listener| {
            listener.ip().is_unspecified()
                && listener.is_ipv4() == at.is_ipv4()
                && listener.port() == at.port()
        })
    };
    let alternates = settings.alternates.iter().map(|named| named.alternate.address);
    alternates
        .filter(move |at| everywhere(at) && UdpSocket::bind((at.ip(), 0)).is_ok())
        .map(|at| format!("[[alternate]] {at} is this server itself: clients would be redirected in a loop"))
}

fn has_ipv6() -> io::Result<()> {
    UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).map(drop)
}

fn relay_addresses(
    settings: &Settings,
    found: &[IpAddr],
    had_route: bool,
) -> (Vec<RelayAddress>, Vec<String>) {
    let places = &settings.relay.addresses;
    let (mut addresses, missing) = relay_keys::resolve(places, found);
    let missing = missing.iter().map(|place| {
        format!(
            "relay.addresses: {place}: this machine has no address of that family, so the family is not relayed until it has one; \
             write LOCAL instead of auto"
        )
    });
    let mut doubts: Vec<String> = missing.collect();
    if addresses.is_empty() {
        let mut lone = |bind| addresses.push(RelayAddress { bind, external: None });
        lone(Ipv4Addr::LOCALHOST.into());
        if UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            lone(Ipv6Addr::LOCALHOST.into());
        }
        doubts.push(
            "this machine has only loopback addresses to relay on: relaying there until it has another address; set relay addresses with --relay-ip, \
             and allow peers on this machine with --allow-peer"
                .to_owned(),
        );
    } else if relay_keys::is_detected(places) {
        if !had_route {
            let found = found.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
            doubts.push(format!(
                "this machine has no default route: relaying on {found} until it has one; set relay addresses with --relay-ip"
            ));
        }
        doubts.extend(relay_doubts(settings, &addresses));
    }
    (addresses, doubts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnpike_config::{
        AlternateSettings, AuthSettings, ConfiguredUser, DiscoverySettings, RealmSettings, RelayPlace,
        RelaySettings, Secret, StoredKey, UserSecret,
    };
    use turnpike_turn::server::{ConnectionLimits, NonceKey, RealmId, Transport};

    fn alone() -> NodeKeys {
        NodeKeys::alone(NonceKey([7; 32]))
    }

    #[test]
    fn a_credential_is_generated_only_if_there_are_no_users() {
        assert!(has_no_users(&Settings::default()));
        assert!(!has_no_users(&Settings { stun_only: true, ..Settings::default() }));
        let open = Settings {
            auth: AuthSettings { required: false, ..AuthSettings::default() },
            ..Settings::default()
        };
        let with_secret = Settings {
            auth: AuthSettings { secrets: vec![Secret::new("s")], ..AuthSettings::default() },
            ..Settings::default()
        };
        let mut with_store = Settings::default();
        with_store.stored.in_use = true;
        for settings in [open, with_secret, with_store] {
            assert!(!has_no_users(&settings));
        }
    }

    #[test]
    fn an_alternate_on_this_machine_is_detected() {
        let to = |address: &str| {
            let mut named = AlternateSettings::default();
            named.alternate.address = address.parse().expect("an address");
            let settings = Settings { alternates: vec![named], ..Settings::default() };
            self_alternates(&settings).next()
        };
        assert!(to("127.0.0.9:3478").expect("an address of this machine").contains("127.0.0.9:3478"));
        assert_eq!(to("127.0.0.9:3479"), None, "another port");
        assert_eq!(to("192.0.2.1:3478"), None, "another machine");
    }

    #[test]
    fn open_files_depend_on_the_number_of_relay_ports() {
        let needed = |ports, shared_ports| {
            let at = |bind| RelayPlace::At(RelayAddress { bind, external: None });
            let settings = Settings {
                relay: RelaySettings {
                    ports,
                    shared_ports,
                    tcp: false,
                    addresses: vec![at(Ipv4Addr::LOCALHOST.into())],
                    ..RelaySettings::default()
                },
                connection_limits: ConnectionLimits { idle_connections: 100, ..ConnectionLimits::default() },
                workers: Some(1),
                ..Settings::default()
            };
            let plan = RelayPlan::new(&Merged::of(&settings), alone(), None, None, None, &Machine::find(&[]));
            (plan.most_allocations(), plan.open_files())
        };
        let (allocations, files) = needed(50_000..=50_099, 0);
        assert_eq!(allocations, 100);
        assert!((300..2_000).contains(&files), "{files}");
        assert_eq!(needed(49_152..=65_535, 0).0, 16_384);
        assert_eq!(needed(50_000..=50_099, 4).0, 16_384);
    }

    #[test]
    fn detection_always_finds_an_address() {
        for found in [&[][..], &["192.0.2.5".parse().expect("an address")]] {
            assert!(!relay_addresses(&Settings::default(), found, true).0.is_empty());
        }
    }

    #[test]
    fn sha256_is_not_offered_if_a_user_has_only_an_md5_key() {
        let keys = |digits: &[usize]| {
            let keys = digits.iter().filter_map(|n| StoredKey::from_hex(&"a".repeat(*n))).collect();
            ConfiguredUser { name: "stored".to_owned(), secret: UserSecret::Keys(keys) }
        };
        for (users, allow_md5, offered) in [
            (vec![], true, true),
            (vec![keys(&[32, 64])], true, true),
            (vec![keys(&[32, 64]), keys(&[32])], true, false),
            (vec![keys(&[32])], false, true),
        ] {
            let settings = Settings {
                auth: AuthSettings { users, allow_md5, ..AuthSettings::default() },
                ..Settings::default()
            };
            let server = server_config(&Merged::of(&settings), &Layout::default(), &[], alone());
            assert_eq!(server.allow_sha256, offered, "{:?}", settings.auth.users);
        }
    }

    #[test]
    fn nat_discovery_adds_only_missing_listeners() {
        let address = |ip: &str| RelayAddress { bind: ip.parse().expect("an address"), external: None };
        let settings = Settings {
            discovery: DiscoverySettings {
                addresses: vec![address("127.0.0.1"), address("127.0.0.2")],
                requests: 100,
                ..DiscoverySettings::default()
            },
            workers: Some(3),
            ..Settings::default()
        };
        let listen =
            ["0.0.0.0:3478", "[::]:3479", "127.0.0.2:3479"].map(|at| at.parse().expect("an address"));
        let more: Vec<String> =
            discovery_listeners(&settings, &listen).iter().map(ToString::to_string).collect();
        assert_eq!(more, ["127.0.0.1:3479"]);
        let layout = Layout::new(&listen, &[], &StreamConfig::default());
        let server = server_config(&Merged::of(&settings), &layout, &[], alone());
        assert_eq!(server.nat_discovery.len(), 1);
        assert_eq!(server.discovery_limits, DiscoveryLimits { per_source: 10, total: 33 });
        assert!(discovery_listeners(&Settings::default(), &listen).is_empty());
    }

    #[test]
    fn a_dtls_listener_serves_the_realms_of_its_address() {
        let [udp, dtls] = ["10.0.0.1:3478", "10.0.0.1:5349"].map(|at| at.parse().expect("an address"));
        let tenant =
            RealmSettings { name: "tenant".to_owned(), listen: vec![dtls], ..RealmSettings::default() };
        let settings = Settings {
            auth: AuthSettings { secrets: vec![Secret::new("s")], ..AuthSettings::default() },
            realms: vec![tenant],
            ..Settings::default()
        };
        let layout = Layout::new(&[udp], &[dtls], &StreamConfig::default());
        let profiles = server_config(&Merged::of(&settings), &layout, &[], alone()).listeners;
        assert_eq!((profiles[0].transport, &profiles[0].realms[..]), (Transport::Udp, &[RealmId(0)][..]));
        assert_eq!((profiles[1].transport, &profiles[1].realms[..]), (Transport::Dtls, &[RealmId(1)][..]));
    }

    #[test]
    fn relayed_families_are_those_of_the_relay_addresses() {
        let relay = [RelayAddress { bind: Ipv6Addr::LOCALHOST.into(), external: None }];
        let config = server_config(&Merged::of(&Settings::default()), &Layout::default(), &relay, alone());
        assert!(!config.relay_v4 && config.relay_v6);
        assert!(config.username_anonymity);
        let timed = Settings {
            auth: AuthSettings { secrets: vec![Secret::new("s")], ..AuthSettings::default() },
            ..Settings::default()
        };
        assert!(!server_config(&Merged::of(&timed), &Layout::default(), &relay, alone()).username_anonymity);
        assert_eq!((config.realm.as_str(), config.software.as_deref()), ("turnpike", Some("turnpike")));
    }
}
