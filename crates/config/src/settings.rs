//! Settings of `turnpike serve`, and the table of their keys.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

use turnpike_net::Datapath;
use turnpike_turn::server::{AllocationLimits, AllowRule, Cidr, ConnectionLimits, ServerLimits};

use crate::{
    AdminSettings, AlternateSettings, CredentialsSettings, DiscoverySettings, FleetSettings, OauthSettings,
    Origin, RealmSettings, RelayPlace, SandboxSettings, Secret, StoreSettings, Stored, admin_keys,
    alternate_keys::ALTERNATE_KEYS,
    check, credentials_keys, discovery_keys, fleet_keys,
    key::{self, Change, kind, number, number_or_none, seconds, settings},
    keys,
    limit_keys::{RATE, SESSION_LENGTH},
    oauth_keys,
    realm_keys::REALM_KEYS,
    relay_keys, sandbox_keys, store_keys, tables,
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DatapathChoice {
    /// The best I/O path in user space.
    #[default]
    Auto,
    Step(Datapath),
    /// eBPF in the kernel relays single datagrams; otherwise as `Auto`.
    Kernel,
    /// `Kernel`, with XDP in the network drivers.
    Xdp,
    /// `Kernel`, with generic XDP for drivers without support; for tests.
    XdpGeneric,
}

settings! {
    /// Effective settings; [`Settings::default`] holds the documented defaults.
    Settings by KEYS {
        /// Listeners for UDP if `udp`, and for TCP if `tcp`.
        listen: Vec<SocketAddr> = vec![
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, 3478)),
            SocketAddr::from((Ipv6Addr::UNSPECIFIED, 3478)),
        ], reload "server.listen" keys::ADDRESSES;
        udp: bool = true, reload "server.udp" kind::SWITCH;
        tcp: bool = true, reload "server.tcp" kind::SWITCH;
        /// Proxies whose connections start with a PROXY header.
        proxy_protocol_from: Vec<Cidr> = Vec::new(), reload "server.proxy_protocol_from" keys::CIDRS;
        realm: String = "turnpike".to_owned(), reload "server.realm" keys::REALM;
        software: String = "turnpike".to_owned(), reload "server.software" keys::SOFTWARE;
        workers: Option<usize> = None, start "server.workers" kind::WORKERS;
        datapath: DatapathChoice = DatapathChoice::Auto, start "server.datapath" keys::DATAPATH;
        /// Microseconds of polling before a worker sleeps.
        busy_poll_us: u32 = 0, start "server.busy_poll_us" number!(u32, "microseconds", 0..=1000);
        /// Microseconds that a worker may delay a datagram to handle more per wake-up.
        coalesce_us: u32 = 0, start "server.coalesce_us" number!(u32, "microseconds", 0..=1000);
        tls_listen: Vec<SocketAddr> = Vec::new(),
            reload "tls.listen" keys::ADDRESSES => keys::SECURE_ADDRESSES;
        tls_only: bool = false, reload "tls.only" kind::SWITCH;
        tls_cert: Option<PathBuf> = None,
            reload "tls.cert" kind::FILE => "the path of a PEM file with the certificate chain, \"\" for none";
        tls_key: Option<PathBuf> = None,
            reload "tls.key" kind::FILE => "the path of a PEM file with the private key, \"\" for none";
        tls_certificates: Vec<CertificateFiles> = Vec::new(), reload "tls.certificates" keys::CERTIFICATES;
        dtls_listen: Vec<SocketAddr> = Vec::new(),
            reload "dtls.listen" keys::ADDRESSES => keys::SECURE_ADDRESSES;
        relay_addresses: Vec<RelayPlace> = Vec::new(), reload "relay.addresses" relay_keys::ADDRESSES;
        /// Rotates clients through the relay addresses of a family.
        addresses_in_turn: bool = false, reload "relay.addresses_in_turn" kind::SWITCH;
        ports: RangeInclusive<u16> = 49_152..=65_535, reload "relay.ports" keys::PORTS;
        /// Relay sockets that a worker's allocations share, per relay address.
        shared_ports: usize = 0, start "relay.shared_ports" number!(usize, "a number", 0..=1024);
        /// Bytes.
        listener_buffer: usize = 4 << 20,
            start "relay.listener_buffer" number!(usize, "bytes", 4096..=1_073_741_824);
        /// Bytes.
        relay_buffer: usize = 512 << 10, start "relay.buffer" number!(usize, "bytes", 4096..=1_073_741_824);
        /// Accepts channel numbers above 0x4FFF.
        rfc5766_channels: bool = true, reload "relay.rfc5766_channels" kind::SWITCH;
        /// A live channel keeps the permission of its peer.
        channels_permit: bool = true, reload "relay.channels_permit" kind::SWITCH;
        relay_tcp: bool = true, reload "relay.tcp" kind::SWITCH;
        mobility: bool = true, reload "relay.mobility" kind::SWITCH;
        auth_required: bool = true, reload "auth.required" kind::SWITCH;
        users: Vec<User> = Vec::new(), reload "auth.users" keys::USERS;
        secrets: Vec<Secret> = Vec::new(), reload "auth.secrets" keys::SECRETS;
        /// Seconds.
        nonce_lifetime: u32 = 3600, reload "auth.nonce_lifetime" number!(u32, "seconds", 60..=86_400);
        allow_md5: bool = true, reload "auth.allow_md5" kind::SWITCH;
        oauth: OauthSettings = OauthSettings::default(),
            reload "oauth.server_name" .server_name oauth_keys::SERVER_NAME,
            reload "oauth.skew" .skew number!(u32, "seconds", 0..=300),
            reload "oauth.key" .keys oauth_keys::KEYS;
        store: StoreSettings = StoreSettings::default(),
            reload "store.url" .url store_keys::URL,
            start "store.state" .state store_keys::STATE,
            reload "store.connections" .connections number!(usize, "a number of connections", 1..=256),
            reload "store.deadline" .deadline number!(u32, "seconds", 1..=8),
            reload "store.unavailable" .unavailable store_keys::UNAVAILABLE,
            reload "store.refresh" .refresh number!(u32, "seconds", 1..=3600),
            reload "store.cache_users" .cache_users number!(usize, "a number of users", 1..=10_000_000),
            reload "store.cache_lifetime" .cache_lifetime number!(u32, "seconds", 1..=86_400),
            reload "store.cache_negative" .cache_negative number!(u32, "seconds", 1..=3600),
            reload "store.cache_stale" .cache_stale number!(u32, "seconds", 0..=31_536_000),
            reload "store.sha256" .sha256 kind::SWITCH;
        stored: Stored = Stored::default();
        allocation_limits: AllocationLimits = AllocationLimits::default(),
            reload "limits.allocations" .allocations number!(usize, "a number", 1..=1_000_000),
            reload "limits.allocations_per_user" .allocations_per_user number!(usize, "a number", 1..=1_000_000),
            reload "limits.allocations_per_prefix" .allocations_per_prefix
                number_or_none!(usize, "a number", 1..=1_000_000);
        /// Leading bits of IPv4 addresses that count as one client.
        prefix_v4: u8 = 32, reload "limits.prefix_v4" number!(u8, "bits", 0..=32);
        /// Leading bits of IPv6 addresses that count as one client.
        prefix_v6: u8 = 64, reload "limits.prefix_v6" number!(u8, "bits", 0..=128);
        /// Error responses per second over UDP to one address prefix.
        refusals_per_prefix: Option<u32> = None,
            reload "limits.refusals_per_prefix" number_or_none!(u32, "a number a second", 1..=1_000_000);
        /// Bits per second of all allocations, in each direction.
        rate: Option<u64> = None, reload "limits.bits_per_second" RATE;
        /// Bits per second of each realm.
        rate_per_realm: Option<u64> = None, reload "limits.bits_per_second_per_realm" RATE;
        /// Bits per second of each user.
        rate_per_user: Option<u64> = None, reload "limits.bits_per_second_per_user" RATE;
        /// Bits per second of each allocation.
        rate_per_allocation: Option<u64> = None, reload "limits.bits_per_second_per_allocation" RATE;
        /// Burst size as milliseconds of these rates.
        burst_ms: u32 = 250, reload "limits.burst" number!(u32, "milliseconds", 10..=10_000);
        limits: ServerLimits = ServerLimits::default(),
            reload "limits.permissions" .permissions number!(usize, "a number per allocation", 1..=65_535),
            reload "limits.channels" .channels
                number!(usize, "", 1..=4096)
                => "a number per allocation, 1 to 4096 (RFC 8656 has the numbers 0x4000 to 0x4FFF)",
            reload "limits.peer_connections" .peer_connections number!(usize, "a number", 1..=1_000_000),
            reload "limits.peer_connections_per_allocation" .peer_connections_per_allocation
                number!(usize, "a number", 1..=65_536),
            reload "limits.peer_connections_per_user" .peer_connections_per_user
                number!(usize, "a number", 1..=1_000_000),
            reload "limits.default_lifetime" .default_lifetime number!(u32, "seconds", 60..=86_400),
            reload "limits.max_lifetime" .max_lifetime number!(u32, "seconds", 60..=86_400),
            reload "limits.end_with_credential" .end_with_credential kind::SWITCH;
        connection_limits: ConnectionLimits = ConnectionLimits::default(),
            reload "limits.idle_connections" .idle_connections number!(usize, "a number", 1..=1_000_000),
            reload "limits.idle_connections_per_address" .idle_connections_per_address
                number!(usize, "a number", 1..=1_000_000),
            reload "limits.half_open" .half_open number!(usize, "a number of DTLS handshakes", 1..=1_000_000),
            reload "limits.half_open_per_network" .half_open_per_network
                number!(usize, "a number of DTLS handshakes", 1..=1_000_000),
            reload "limits.first_message" .first_message seconds!(1..=3600),
            reload "limits.idle" .idle seconds!(1..=86_400),
            reload "limits.stream_queue" .stream_queue number!(usize, "bytes", 65_540..=1_073_741_824);
        /// Entries in the kernel flow table, each for one direction.
        kernel_flows: u32 = 65_536, start "limits.kernel_flows" number!(u32, "a number", 2..=4_194_304);
        session_length: Option<u32> = None, reload "limits.session_length" SESSION_LENGTH;
        /// Allowed peers that are otherwise refused: special or local addresses.
        allow: Vec<AllowRule> = Vec::new(), reload "peers.allow" keys::ALLOW_RULES;
        deny: Vec<Cidr> = Vec::new(), reload "peers.deny" keys::CIDRS;
        /// Refuses all peers that are not in `allow`.
        allow_only: bool = false, reload "peers.allow_only" kind::SWITCH;
        discovery: DiscoverySettings = DiscoverySettings::default(),
            start "nat_discovery.addresses" .addresses keys::EXTERNAL_ADDRESSES
                => "[], or two addresses of this machine for each family, \"IP\" or \"IP=EXTERNAL\", unicast",
            start "nat_discovery.ports" .ports discovery_keys::PORTS,
            reload "nat_discovery.requests_per_source" .per_source
                number!(u32, "requests a second", 1..=1_000_000),
            reload "nat_discovery.requests" .total number!(u32, "requests a second", 1..=1_000_000);
        fleet: FleetSettings = FleetSettings::default(),
            start "fleet.url" .url fleet_keys::URL,
            start "fleet.secret" .secret fleet_keys::SECRET,
            start "fleet.name" .name fleet_keys::NAME,
            start "fleet.node" .node fleet_keys::NAME_OR_NONE => "a name of 1 to 64 letters, digits, points, hyphens and underscores, \"\" for the machine's name",
            start "fleet.zone" .zone fleet_keys::NAME_OR_NONE,
            start "fleet.addresses" .addresses fleet_keys::ADDRESSES,
            start "fleet.balancer_ports" .balancer_ports fleet_keys::PORTS,
            start "fleet.domain" .domain fleet_keys::DOMAIN,
            reload "fleet.redirect" .redirect fleet_keys::REDIRECT,
            reload "fleet.allocations" .allocations number!(u32, "a number of allocations, 0 for no limit", 0..=1_000_000_000),
            reload "fleet.bits_per_second" .bits_per_second
                number!(u64, "bits a second, 0 if that is not known", 0..=1_000_000_000_000_000),
            reload "fleet.key_rotation" .key_rotation number!(u32, "seconds", 3600..=2_592_000),
            start "fleet.coturn_status" .coturn_status kind::SWITCH;
        admin: AdminSettings = AdminSettings::on_port(9641),
            start "admin.listen" .listen admin_keys::LISTEN,
            reload "admin.hosts" .hosts kind::HOSTS,
            reload "admin.loopback" .loopback admin_keys::ACCESS,
            reload "admin.tokens" .tokens admin_keys::TOKENS,
            reload "admin.read_tokens" .read_tokens admin_keys::TOKENS,
            start "admin.tls_cert" .tls_cert kind::FILE,
            start "admin.tls_key" .tls_key kind::FILE,
            start "admin.client_ca" .client_ca kind::FILE,
            start "admin.read_client_ca" .read_client_ca kind::FILE;
        credentials: CredentialsSettings = CredentialsSettings::default(),
            start "credentials.listen" .listen keys::ADDRESSES
                => "a list of \"ADDR:PORT\" such as [\"0.0.0.0:8443\"], [] for none",
            start "credentials.tls_cert" .tls_cert kind::FILE,
            start "credentials.tls_key" .tls_key kind::FILE,
            reload "credentials.hosts" .hosts kind::HOSTS,
            reload "credentials.origins" .origins credentials_keys::ORIGINS,
            reload "credentials.names" .names credentials_keys::NAMES,
            reload "credentials.uris" .uris credentials_keys::URIS,
            reload "credentials.ttl" .ttl number!(u32, "seconds", 1..=31_536_000),
            reload "credentials.max_ttl" .max_ttl number!(u32, "seconds", 1..=31_536_000),
            reload "credentials.rate" .rate number!(u32, "requests a second", 1..=1_000_000);
        log_level: String = "info".to_owned(), reload "log.level" kind::LOG_LEVEL;
        log_format: LogFormat = LogFormat::Text, start "log.format" kind::LOG_FORMAT;
        sandbox: SandboxSettings = SandboxSettings::default(),
            start "sandbox.mode" .mode sandbox_keys::MODE,
            start "sandbox.read" .read sandbox_keys::DIRECTORIES,
            start "sandbox.write" .write sandbox_keys::DIRECTORIES;
        /// Seconds that sessions may continue after SIGTERM.
        shutdown_deadline: u32 = 30, reload "shutdown.deadline" number!(u32, "seconds", 0..=86_400);
        /// Seconds that sessions of the old process may continue after an upgrade.
        upgrade_deadline: u32 = 3600,
            reload "shutdown.upgrade_deadline" number!(u32, "seconds", 0..=604_800);
        realms: Vec<RealmSettings> = Vec::new();
        alternates: Vec<AlternateSettings> = Vec::new();
        origins: BTreeMap<&'static str, Origin> = BTreeMap::new();
    }
}

impl Settings {
    pub fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    pub fn is_explicit(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    pub fn to_toml(&self) -> String {
        let realms = self.realms.iter().map(|realm| (realm, &realm.place));
        let alternates = self.alternates.iter().map(|alternate| (alternate, &alternate.place));
        key::table_as_toml(KEYS, self, &self.origins, &check::capped_defaults(self))
            + &tables::as_toml("realm", REALM_KEYS, realms)
            + &tables::as_toml("alternate", ALTERNATE_KEYS, alternates)
    }

    pub fn unchangeable(&self, new: &Self) -> Vec<&'static str> {
        key::unchangeable(KEYS, self, new)
    }

    /// Copies from `started` the settings that need a restart.
    pub fn keep_unchangeable(&mut self, started: &Self) {
        for spec in KEYS.iter().filter(|spec| !spec.reload) {
            (spec.keep)(started, self);
            match started.origins.get(spec.path) {
                Some(origin) => _ = self.origins.insert(spec.path, origin.clone()),
                None => _ = self.origins.remove(spec.path),
            }
        }
    }

    pub fn changed(&self, new: &Self) -> Vec<Change> {
        key::changes(KEYS, self, new)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The server certificate first, then intermediate ones.
    pub cert: PathBuf,
    /// Not encrypted.
    pub key: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub secret: UserSecret,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserSecret {
    Password(Secret),
    /// Keys derived from the password, valid for one realm.
    Keys(Vec<StoredKey>),
}

impl UserSecret {
    pub(crate) fn is_md5_only(&self) -> bool {
        match self {
            Self::Password(_) => false,
            Self::Keys(keys) => keys.iter().all(|key| matches!(key, StoredKey::Md5(_))),
        }
    }
}

/// A long-term key in hex digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredKey {
    /// 16 bytes.
    Md5(Secret),
    /// 32 bytes.
    Sha256(Secret),
}

impl StoredKey {
    /// Detects the algorithm by the length: 32 or 64 hex digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        match text.len() {
            32 => Some(Self::Md5(Secret::new(text))),
            64 => Some(Self::Sha256(Secret::new(text))),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
    /// For systemd's journal: with priority, without time.
    Journald,
}
