//! Settings of `turnpike serve`, and the table of their keys.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
};

use turnpike_net::Datapath;
use turnpike_rules::HandOnRule;
use turnpike_turn::server::{
    AllocationLimits, Cidr, ClientRules, ConnectionLimits, QualityLevel, ServerLimits,
};

use crate::{
    AcmeSettings, AdminSettings, AllowedPeer, AlternateSettings, AuthSettings, CredentialsSettings,
    DiscoverySettings, DtlsSettings, EventSettings, FleetSettings, GeoipSettings, LogSettings, OauthSettings,
    Origin, RateSettings, RealmSettings, RelaySettings, SandboxSettings, ShutdownSettings, StoreSettings,
    Stored, TelemetrySettings, TlsSettings, UsageSettings, acme_keys, admin_keys,
    alternate_keys::ALTERNATE_KEYS,
    check, credentials_keys, discovery_keys, event_keys, fleet_keys, hand_on_keys,
    key::{self, KeyChange, kind, number, number_or_none, seconds, settings},
    keys,
    limit_keys::{MAX_ALLOCATION_DURATION, RATE},
    oauth_keys,
    realm_keys::REALM_KEYS,
    relay_keys, sandbox_keys, store_keys, tables, telemetry_keys, usage_keys,
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DatapathChoice {
    /// The best path on this machine. If possible, the kernel relays flows, but only those with a lease.
    #[default]
    Auto,
    Step(Datapath),
    /// eBPF in the kernel relays single datagrams; otherwise like `Auto`.
    Kernel,
    /// `Kernel`, with XDP in the network drivers.
    Xdp,
    /// `Kernel`, with generic XDP for drivers without support; for tests.
    XdpGeneric,
}

settings! {
    /// Effective settings; [`Settings::default`] has the documented defaults.
    Settings by KEYS {
        /// Listener addresses: for UDP if `udp` is true, and for TCP if `tcp` is true.
        listen: Vec<SocketAddr> = vec![
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, 3478)),
            SocketAddr::from((Ipv6Addr::UNSPECIFIED, 3478)),
        ], reload "server.listen" keys::ADDRESSES;
        udp: bool = true, reload "server.udp" kind::SWITCH;
        tcp: bool = true, reload "server.tcp" kind::SWITCH;
        /// Answers Binding requests and refuses all others.
        stun_only: bool = false, reload "server.stun_only" kind::SWITCH;
        /// Proxies whose connections start with a PROXY header.
        proxy_protocol_from: Vec<Cidr> = Vec::new(), reload "server.proxy_protocol_from" keys::CIDRS;
        /// Rules for handing connections on to a web server.
        hand_on: Vec<HandOnRule> = Vec::new(), reload "server.hand_on" hand_on_keys::RULES;
        realm: String = "turnpike".to_owned(), reload "server.realm" keys::REALM;
        software: String = "turnpike".to_owned(), reload "server.software" keys::SOFTWARE;
        workers: Option<usize> = None, start "server.workers" kind::WORKERS;
        datapath: DatapathChoice = DatapathChoice::Auto, start "server.datapath" keys::DATAPATH;
        /// Microseconds of polling before a worker sleeps.
        busy_poll_us: u32 = 0, start "server.busy_poll_us" number!(u32, "microseconds", 0..=1000);
        /// Microseconds by which a worker may delay a datagram to handle more of them per wake-up.
        coalesce_us: u32 = 0, start "server.coalesce_us" number!(u32, "microseconds", 0..=1000);
        quality: QualityLevel = QualityLevel::Off, reload "server.quality" keys::QUALITY;
        tls: TlsSettings = TlsSettings::default(),
            reload "tls.listen" .listen keys::ADDRESSES => keys::SECURE_ADDRESSES,
            reload "tls.only" .only kind::SWITCH,
            reload "tls.cert" .cert kind::FILE => "the path of a PEM file with the certificate chain, or \"\" for none",
            reload "tls.key" .key kind::FILE => "the path of a PEM file with the private key, or \"\" for none",
            reload "tls.key_password" .key_password keys::KEY_PASSWORD,
            reload "tls.client_ca" .client_ca kind::FILE,
            reload "tls.certificates" .certificates keys::CERTIFICATES,
            reload "tls.acme" .acme acme_keys::NAMES;
        acme: AcmeSettings = AcmeSettings::default(),
            reload "acme.directory" .directory acme_keys::DIRECTORY,
            reload "acme.contact" .contact acme_keys::CONTACT,
            reload "acme.challenge" .challenge acme_keys::CHALLENGE,
            reload "acme.http_listen" .http_listen keys::ADDRESSES,
            start "acme.hook" .hook acme_keys::HOOK,
            start "acme.authority" .authority kind::FILE,
            reload "acme.eab_key_id" .eab_key_id acme_keys::EAB_KEY_ID,
            reload "acme.eab_key" .eab_key acme_keys::EAB_KEY,
            reload "acme.profile" .profile acme_keys::PROFILE;
        dtls: DtlsSettings = DtlsSettings::default(),
            reload "dtls.listen" .listen keys::ADDRESSES => keys::SECURE_ADDRESSES;
        relay: RelaySettings = RelaySettings::default(),
            reload "relay.addresses" .addresses relay_keys::ADDRESSES,
            reload "relay.addresses_in_turn" .addresses_in_turn kind::SWITCH,
            reload "relay.ports" .ports keys::PORTS,
            start "relay.shared_ports" .shared_ports number!(usize, "a number", 0..=1024),
            start "relay.listener_buffer" .listener_buffer number!(usize, "bytes", 4096..=1_073_741_824),
            start "relay.buffer" .buffer number!(usize, "bytes", 4096..=1_073_741_824),
            reload "relay.rfc5766_channels" .rfc5766_channels kind::SWITCH,
            reload "relay.channels_permit" .channels_permit kind::SWITCH,
            reload "relay.tcp" .tcp kind::SWITCH,
            reload "relay.mobility" .mobility kind::SWITCH;
        auth: AuthSettings = AuthSettings::default(),
            reload "auth.required" .required kind::SWITCH,
            reload "auth.binding" .binding kind::SWITCH,
            reload "auth.users" .users keys::USERS,
            reload "auth.secrets" .secrets keys::SECRETS,
            reload "auth.nonce_lifetime" .nonce_lifetime number!(u32, "seconds", 60..=86_400),
            reload "auth.allow_md5" .allow_md5 kind::SWITCH;
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
        /// Prefix length that identifies a client with an IPv4 address.
        prefix_v4: u8 = 32, reload "limits.prefix_v4" number!(u8, "bits", 0..=32);
        /// Prefix length that identifies a client with an IPv6 address.
        prefix_v6: u8 = 64, reload "limits.prefix_v6" number!(u8, "bits", 0..=128);
        /// Error responses per second over UDP to one address prefix.
        refusals_per_prefix: Option<u32> = None,
            reload "limits.refusals_per_prefix" number_or_none!(u32, "a number a second", 1..=1_000_000);
        rates: RateSettings = RateSettings::default(),
            reload "limits.bits_per_second" .bits_per_second RATE,
            reload "limits.bits_per_second_per_realm" .bits_per_second_per_realm RATE,
            reload "limits.bits_per_second_per_user" .bits_per_second_per_user RATE,
            reload "limits.bits_per_second_per_allocation" .bits_per_second_per_allocation RATE,
            reload "limits.burst" .burst number!(u32, "milliseconds", 10..=10_000);
        limits: ServerLimits = ServerLimits::default(),
            reload "limits.permissions" .permissions number!(usize, "a number per allocation", 1..=65_535),
            reload "limits.channels" .channels
                number!(usize, "", 1..=4096)
                => "a number per allocation, 1 to 4096 (RFC 8656 allows 0x4000 to 0x4FFF)",
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
            reload "limits.stream_queue" .stream_queue number!(usize, "bytes", 65_540..=1_073_741_824),
            reload "limits.handed_on" .handed_on number!(usize, "a number of connections", 1..=1_000_000),
            reload "limits.handed_on_per_address" .handed_on_per_address
                number!(usize, "a number of connections", 1..=1_000_000);
        /// Entries in the kernel flow table, each for one direction.
        kernel_flows: u32 = 65_536, start "limits.kernel_flows" number!(u32, "a number", 2..=4_194_304);
        max_allocation_duration: Option<u32> = None, reload "limits.max_allocation_duration" MAX_ALLOCATION_DURATION;
        // Channels and permissions with shorter lifetimes than in RFC 8656 would expire between a client's refreshes.
        channel_lifetime: u32 = 600, reload "limits.channel_lifetime" number!(u32, "seconds", 600..=86_400);
        permission_lifetime: u32 = 300, reload "limits.permission_lifetime" number!(u32, "seconds", 300..=86_400);
        clients: ClientRules = ClientRules::default(),
            reload "clients.allow" .allow keys::CLIENT_RULES,
            reload "clients.deny" .deny keys::CLIENT_RULES;
        /// Databases of the countries and autonomous systems of clients.
        geoip: GeoipSettings = GeoipSettings::default(),
            reload "geoip.files" .files keys::FILES;
        /// Peers that are allowed even though they would be refused by default, such as special and
        /// local addresses.
        allow: Vec<AllowedPeer> = Vec::new(), reload "peers.allow" keys::ALLOWED_PEERS;
        deny: Vec<Cidr> = Vec::new(), reload "peers.deny" keys::CIDRS;
        /// Refuses all peers that are not in `allow`.
        allow_only: bool = false, reload "peers.allow_only" kind::SWITCH;
        discovery: DiscoverySettings = DiscoverySettings::default(),
            start "nat_discovery.addresses" .addresses keys::EXTERNAL_ADDRESSES
                => "[], or two addresses of this machine for each family, \"IP\" or \"IP=EXTERNAL\", unicast",
            start "nat_discovery.ports" .ports discovery_keys::PORTS,
            reload "nat_discovery.requests_per_source" .requests_per_source
                number!(u32, "requests a second", 1..=1_000_000),
            reload "nat_discovery.requests" .requests number!(u32, "requests a second", 1..=1_000_000);
        fleet: FleetSettings = FleetSettings::default(),
            start "fleet.url" .url fleet_keys::URL,
            start "fleet.secret" .secret fleet_keys::SECRET,
            start "fleet.name" .name fleet_keys::NAME,
            start "fleet.node" .node fleet_keys::NAME_OR_NONE => "a name of 1 to 64 letters, digits, dots, hyphens and underscores, or \"\" for the machine's name",
            start "fleet.zone" .zone fleet_keys::NAME_OR_NONE,
            start "fleet.addresses" .addresses fleet_keys::ADDRESSES,
            start "fleet.balancer_ports" .balancer_ports fleet_keys::PORTS,
            start "fleet.domain" .domain fleet_keys::DOMAIN,
            reload "fleet.redirect" .redirect fleet_keys::REDIRECT,
            reload "fleet.allocations" .allocations number!(u32, "a number of allocations, or 0 for no limit", 0..=1_000_000_000),
            reload "fleet.bits_per_second" .bits_per_second
                number!(u64, "bits a second, or 0 if unknown", 0..=1_000_000_000_000_000),
            reload "fleet.key_rotation" .key_rotation number!(u32, "seconds", 3600..=2_592_000),
            start "fleet.coturn_status" .coturn_status kind::SWITCH;
        admin: AdminSettings = AdminSettings::on_port(9641),
            start "admin.listen" .listen admin_keys::LISTEN,
            reload "admin.hosts" .hosts kind::HOSTS,
            reload "admin.loopback" .loopback admin_keys::ACCESS,
            reload "admin.tokens" .tokens admin_keys::TOKENS,
            reload "admin.read_tokens" .read_tokens admin_keys::TOKENS,
            reload "admin.capture_tokens" .capture_tokens admin_keys::TOKENS,
            start "admin.tls_cert" .tls_cert kind::FILE,
            start "admin.tls_key" .tls_key kind::FILE,
            start "admin.client_ca" .client_ca kind::FILE,
            start "admin.read_client_ca" .read_client_ca kind::FILE;
        credentials: CredentialsSettings = CredentialsSettings::default(),
            start "credentials.listen" .listen keys::ADDRESSES
                => "a list of \"ADDR:PORT\", such as [\"0.0.0.0:8443\"], or [] for none",
            start "credentials.tls_cert" .tls_cert kind::FILE,
            start "credentials.tls_key" .tls_key kind::FILE,
            reload "credentials.hosts" .hosts kind::HOSTS,
            reload "credentials.origins" .origins credentials_keys::ORIGINS,
            reload "credentials.names" .names credentials_keys::NAMES,
            reload "credentials.uris" .uris credentials_keys::URIS,
            reload "credentials.ttl" .ttl number!(u32, "seconds", 1..=31_536_000),
            reload "credentials.max_ttl" .max_ttl number!(u32, "seconds", 1..=31_536_000),
            reload "credentials.rate" .rate number!(u32, "requests a second", 1..=1_000_000);
        events: EventSettings = EventSettings::default(),
            reload "events.webhook" .webhooks event_keys::WEBHOOKS,
            reload "events.spool" .spool number!(u64, "bytes", 1_048_576..=1_099_511_627_776),
            reload "events.allow_private" .allow_private kind::SWITCH;
        usage: UsageSettings = UsageSettings::default(),
            start "usage.days" .days number!(u32, "days", 0..=3660),
            start "usage.hour_days" .hour_days number!(u32, "days", 1..=366),
            reload "usage.quota" .quotas usage_keys::QUOTAS;
        log: LogSettings = LogSettings::default(),
            reload "log.level" .level kind::LOG_LEVEL,
            start "log.format" .format kind::LOG_FORMAT;
        telemetry: TelemetrySettings = TelemetrySettings::default(),
            start "telemetry.endpoint" .endpoint telemetry_keys::ENDPOINT,
            start "telemetry.headers" .headers telemetry_keys::HEADERS,
            start "telemetry.interval" .interval number!(u32, "seconds", 1..=3600);
        sandbox: SandboxSettings = SandboxSettings::default(),
            start "sandbox.mode" .mode sandbox_keys::MODE,
            start "sandbox.read" .read sandbox_keys::DIRECTORIES,
            start "sandbox.write" .write sandbox_keys::DIRECTORIES;
        shutdown: ShutdownSettings = ShutdownSettings::default(),
            reload "shutdown.deadline" .deadline number!(u32, "seconds", 0..=86_400),
            reload "shutdown.upgrade_deadline" .upgrade_deadline number!(u32, "seconds", 0..=604_800);
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

    pub fn changed(&self, new: &Self) -> Vec<KeyChange> {
        key::changes(KEYS, self, new)
    }
}
