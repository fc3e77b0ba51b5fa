//! The settings of `turnpike serve`; [`Settings::default`] holds the documented defaults.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
};

use turnpike_net::Datapath;
use turnpike_relay::RelayAddress;
use turnpike_turn::server::{AllowRule, Cidr};

use crate::{
    AlternateSettings, DiscoverySettings, OauthSettings, Origin, RealmSettings, Secret, StoreSettings,
    Stored, alternate_keys::ALTERNATE_KEYS, key, keys::KEYS, realm_keys::REALM_KEYS, tables,
};

/// Effective settings; [`Settings::default`] holds the documented defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// UDP listeners, and TCP ones if `tcp`.
    pub listen: Vec<SocketAddr>,
    /// Whether `listen` is for TCP too.
    pub tcp: bool,
    /// Proxies whose connections begin with a PROXY header.
    pub proxy_protocol_from: Vec<Cidr>,
    /// Listeners for TLS.
    pub tls_listen: Vec<SocketAddr>,
    /// Whether these refuse clients without TLS.
    pub tls_only: bool,
    /// The default certificate chain, PEM.
    pub tls_cert: Option<PathBuf>,
    /// Its key, PEM.
    pub tls_key: Option<PathBuf>,
    /// More certificates, chosen by server name.
    pub tls_certificates: Vec<CertificateFiles>,
    /// Listeners for DTLS.
    pub dtls_listen: Vec<SocketAddr>,
    /// REALM.
    pub realm: String,
    /// SOFTWARE, empty for none.
    pub software: String,
    /// Threads; `None` is one per core.
    pub workers: Option<usize>,
    /// Step of the ladder; `None` is the highest that works.
    pub datapath: Option<Datapath>,
    /// Microseconds that a worker looks for more before it sleeps.
    pub busy_poll_us: u32,
    /// Relay addresses; empty means to detect them.
    pub relay_addresses: Vec<RelayAddress>,
    /// Ports of relayed transport addresses.
    pub ports: RangeInclusive<u16>,
    /// Bytes.
    pub listener_buffer: usize,
    /// Bytes.
    pub relay_buffer: usize,
    /// Whether relaying needs credentials.
    pub auth_required: bool,
    /// Static users.
    pub users: Vec<User>,
    /// Secrets of time-limited credentials; any of them will do.
    pub secrets: Vec<Secret>,
    /// Tokens in place of passwords.
    pub oauth: OauthSettings,
    /// Realms beside [`Self::realm`].
    pub realms: Vec<RealmSettings>,
    /// A database with more of all this.
    pub store: StoreSettings,
    /// What it says.
    pub stored: Stored,
    /// Seconds.
    pub nonce_lifetime: u32,
    /// Whether MD5 keys are accepted.
    pub allow_md5: bool,
    /// Whether channel numbers above 0x4FFF are accepted.
    pub rfc5766_channels: bool,
    /// Whether TCP is relayed (RFC 6062).
    pub relay_tcp: bool,
    /// Whether allocations follow their clients (RFC 8016).
    pub mobility: bool,
    /// Allocations in total.
    pub max_allocations: usize,
    /// Allocations of one user.
    pub max_allocations_per_user: usize,
    /// Permissions per allocation.
    pub max_permissions: usize,
    /// Channels per allocation.
    pub max_channels: usize,
    /// Connections to peers, in total.
    pub max_peer_connections: usize,
    /// Connections to peers of one allocation.
    pub max_peer_connections_per_allocation: usize,
    /// Connections to peers of one user, in total.
    pub max_peer_connections_per_user: usize,
    /// Connections without an allocation, in total.
    pub max_idle_connections: usize,
    /// Connections without an allocation, per address.
    pub max_idle_connections_per_address: usize,
    /// DTLS handshakes under way, in total.
    pub max_half_open: usize,
    /// DTLS handshakes under way, per network.
    pub max_half_open_per_network: usize,
    /// Seconds until the first message of a connection.
    pub first_message_timeout: u32,
    /// Seconds of silence of a connection without an allocation.
    pub idle_timeout: u32,
    /// Bytes that wait for a client over TCP or TLS.
    pub stream_queue: usize,
    /// Seconds.
    pub default_lifetime: u32,
    /// Seconds.
    pub max_lifetime: u32,
    /// Peers allowed though special, or on this machine.
    pub allow: Vec<AllowRule>,
    /// Peers refused though public.
    pub deny: Vec<Cidr>,
    /// Servers that clients are sent to.
    pub alternates: Vec<AlternateSettings>,
    /// Where clients may find out about their NAT.
    pub discovery: DiscoverySettings,
    /// Where metrics and health are served.
    pub admin: AdminListen,
    /// Names under which they are, beside addresses and `localhost`; in lower case.
    pub admin_hosts: Vec<String>,
    /// Filter of log lines.
    pub log_level: String,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Seconds that sessions get to end after SIGTERM.
    pub shutdown_deadline: u32,
    /// Who set what; keys that are missing have their default.
    pub origins: BTreeMap<&'static str, Origin>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: vec![
                SocketAddr::from((Ipv4Addr::UNSPECIFIED, 3478)),
                SocketAddr::from((Ipv6Addr::UNSPECIFIED, 3478)),
            ],
            tcp: true,
            proxy_protocol_from: Vec::new(),
            tls_listen: Vec::new(),
            tls_only: false,
            tls_cert: None,
            tls_key: None,
            tls_certificates: Vec::new(),
            dtls_listen: Vec::new(),
            realm: "turnpike".to_owned(),
            software: "turnpike".to_owned(),
            workers: None,
            datapath: None,
            busy_poll_us: 0,
            relay_addresses: Vec::new(),
            ports: 49_152..=65_535,
            listener_buffer: 4 << 20,
            relay_buffer: 512 << 10,
            auth_required: true,
            users: Vec::new(),
            secrets: Vec::new(),
            oauth: OauthSettings::default(),
            realms: Vec::new(),
            store: StoreSettings::default(),
            stored: Stored::default(),
            nonce_lifetime: 3600,
            allow_md5: true,
            rfc5766_channels: true,
            relay_tcp: true,
            mobility: true,
            max_allocations: 16_384,
            max_allocations_per_user: 1024,
            max_permissions: 64,
            max_channels: 64,
            max_peer_connections: 4096,
            max_peer_connections_per_allocation: 32,
            max_peer_connections_per_user: 1024,
            max_idle_connections: 4096,
            max_idle_connections_per_address: 512,
            max_half_open: 1024,
            max_half_open_per_network: 256,
            first_message_timeout: 10,
            idle_timeout: 60,
            stream_queue: 256 << 10,
            default_lifetime: 600,
            max_lifetime: 3600,
            allow: Vec::new(),
            deny: Vec::new(),
            alternates: Vec::new(),
            discovery: DiscoverySettings::default(),
            admin: AdminListen::On(SocketAddr::from((Ipv4Addr::LOCALHOST, 9641))),
            admin_hosts: Vec::new(),
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            shutdown_deadline: 30,
            origins: BTreeMap::new(),
        }
    }
}

pub(crate) type Differ = fn(&Settings, &Settings) -> bool;

/// Secret keys, and whether they differ between two settings: their shown values are all alike.
pub(crate) static SECRET_KEYS: &[(&str, Differ)] = &[
    ("auth.users", |old, new| old.users != new.users),
    ("auth.secrets", |old, new| old.secrets != new.secrets),
    ("oauth.key", |old, new| old.oauth.keys != new.oauth.keys),
    ("store.url", |old, new| old.store.url != new.store.url),
];

impl Settings {
    /// Where the value of a key such as `admin.listen` comes from.
    #[must_use]
    pub fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    /// Whether somebody asked for the value of this key.
    #[must_use]
    pub fn is_explicit(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// The settings as a TOML file with each value's origin, secrets masked.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let realms = self.realms.iter().map(|realm| (realm, &realm.place));
        let alternates = self.alternates.iter().map(|alternate| (alternate, &alternate.place));
        key::table_as_toml(KEYS, self, &self.origins)
            + &tables::as_toml("realm", REALM_KEYS, realms)
            + &tables::as_toml("alternate", ALTERNATE_KEYS, alternates)
    }

    /// Keys whose value differs in `new` but which a running server cannot change.
    #[must_use]
    pub fn unchangeable(&self, new: &Self) -> Vec<&'static str> {
        key::unchangeable(KEYS, self, new)
    }

    /// Keys whose value differs in `new` and that a running server takes over.
    #[must_use]
    pub fn changed(&self, new: &Self) -> Vec<&'static str> {
        let secret = SECRET_KEYS.iter().filter(|(_, differs)| differs(self, new)).map(|(path, _)| *path);
        secret.chain(key::changed(KEYS, self, new)).collect()
    }
}

/// A certificate chain and its key, PEM both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The server's own certificate first, intermediate ones behind.
    pub cert: PathBuf,
    /// Not encrypted.
    pub key: PathBuf,
}

/// A static user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// USERNAME.
    pub name: String,
    /// How it authenticates.
    pub secret: UserSecret,
}

/// What is stored of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserSecret {
    /// The password.
    Password(Secret),
    /// Keys made from it, which are good for one realm.
    Keys(Vec<StoredKey>),
}

impl UserSecret {
    /// Whether this is no more than an MD5 key, of no use where those are not accepted.
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
    /// Tells the algorithm by the length: 32 or 64 hex digits.
    #[must_use]
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

/// Where the admin HTTP listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminListen {
    /// Nowhere.
    Off,
    /// Here.
    On(SocketAddr),
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}
