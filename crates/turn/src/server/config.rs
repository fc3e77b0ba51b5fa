//! What a server is told at start.

use std::{collections::HashSet, fmt, net::IpAddr};

use turnpike_wire::channel_data::ChannelRange;

use super::{
    Alternate, DiscoveryLimits, GrantedAllocates, NatDiscovery, PeerRules, RealmId, ThirdParty, realm::Realm,
};

/// Settings of the state machine. [`ServerConfig::default`] holds the documented defaults.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// REALM, at most 127 characters; where there are [`Self::tenants`], that of the first realm.
    pub realm: String,
    /// Realms beside the first, at most 65,534, in any order. Default none.
    pub tenants: Vec<Realm>,
    /// SOFTWARE in responses that are signed; `None` sends none. Default `turnpike`.
    pub software: Option<String>,
    /// Whether Allocate and the rest need long-term credentials. Default true; false is for closed networks and tests.
    pub authenticate: bool,
    /// Key of the nonce HMAC, shared by all workers of a server.
    pub nonce_key: NonceKey,
    /// What the server has granted, shared by all its workers. A new configuration's is not looked at: it outlives reloads.
    pub granted: GrantedAllocates,
    /// Seconds for which a nonce is accepted. Default 3600.
    pub nonce_lifetime: u32,
    /// Seconds, default of LIFETIME. Default 600.
    pub default_lifetime: u32,
    /// Seconds, the most that LIFETIME gives. Default 3600.
    pub max_lifetime: u32,
    /// Seconds that a permission lives. Default 300 (RFC 8656 section 9).
    pub permission_lifetime: u32,
    /// Seconds that a channel binding lives. Default 600 (RFC 8656 section 12).
    pub channel_lifetime: u32,
    /// Permissions per allocation. Default 64.
    pub max_permissions: usize,
    /// Channels per allocation. Default 64.
    pub max_channels: usize,
    /// Families that have a relay address, IPv4 first.
    pub relay_v4: bool,
    /// See `relay_v4`.
    pub relay_v6: bool,
    /// Which peers may be relayed to.
    pub peers: PeerRules,
    /// Which channel numbers clients may bind. Default [`ChannelRange::Rfc5766`], because deployed clients (coturn's uclient)
    /// draw from all of it; [`ChannelRange::Rfc8656`] refuses 0x5000 and above with 400 (RFC 8656 section 12.2).
    pub channels: ChannelRange,
    /// Whether MD5 keys with HMAC-SHA1 (RFC 5389 clients) are accepted beside SHA-256. Default true.
    pub allow_md5: bool,
    /// Whether SHA-256 keys are offered and accepted. Default true; false where a user is stored as an MD5 key alone, because
    /// clients of RFC 8489 take the strongest algorithm that they are offered.
    pub allow_sha256: bool,
    /// Whether clients are told that they may hide their name in USERHASH (RFC 8489 section 9.2). Default true; false where
    /// users exist only in the requests that name them (time-limited credentials), because no hash leads to those.
    pub username_anonymity: bool,
    /// What the runtime's listeners are, by [`super::ListenerId`]; one that is missing here is
    /// [`ListenerProfile::default`]. The runtime gives one socket several numbers where its clients differ: one for each
    /// tenant that a TLS server name selects, for instance.
    pub listeners: Vec<ListenerProfile>,
    /// Whether clients on streams may have TCP relayed (RFC 6062). Default true; false refuses with 442.
    pub tcp_relay: bool,
    /// Connections to peers per allocation that relays TCP, those included that are being made. Default 32.
    pub max_connections: usize,
    /// The same of one worker in total, at most [`ServerConfig::MOST_CONNECTIONS`]. Default 4096.
    pub max_total_connections: usize,
    /// The same of one user of one worker, whom quotas count. Default 1024, a quarter of the total.
    pub max_user_connections: usize,
    /// Whether clients may take their allocations along to another address (RFC 8016). Default true: only who asks for a
    /// ticket gets one, and it is good for nothing without the credentials that made the allocation. Where nobody
    /// authenticates, there are none: whoever reads a ticket on its way takes the allocation. False refuses with 405.
    pub mobility: bool,
    /// Tokens in place of passwords (RFC 7635). Default none.
    pub third_party: ThirdParty,
    /// Servers that clients are sent to, in turn; see [`super::AlternateWhen`]. Default none.
    pub alternates: Vec<Alternate>,
    /// Where NAT behaviour can be discovered (RFC 5780), one entry a family. Default nowhere.
    pub nat_discovery: Vec<NatDiscovery>,
    /// How often.
    pub discovery_limits: DiscoveryLimits,
}

/// One kind of client-facing listener.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerProfile {
    /// How its clients reach the server.
    pub transport: Transport,
    /// The realms that it serves; the first is the one that challenges name, and requests may name any of them. Empty, which
    /// is the default, means all, [`ServerConfig::realm`] first.
    pub realms: Vec<RealmId>,
}

/// Of a listener that [`ServerConfig::listeners`] does not have.
static DEFAULT_PROFILE: ListenerProfile = ListenerProfile { transport: Transport::Udp, realms: Vec::new() };

/// The transport between a client and the server (RFC 8656 section 3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Datagrams.
    #[default]
    Udp,
    /// A stream; the end of the connection is the end of the allocation.
    Tcp,
    /// TLS over TCP.
    Tls,
    /// Datagrams over UDP, encrypted.
    Dtls,
}

impl Transport {
    /// Whether messages arrive in a byte stream (RFC 8489 section 6.2.2, RFC 8656 section 12.5: ChannelData is padded).
    #[must_use]
    pub fn is_stream(self) -> bool {
        matches!(self, Self::Tcp | Self::Tls)
    }
}

/// A key that is never printed: whoever has it makes nonces that the server believes.
#[derive(Clone, Copy)]
pub struct NonceKey(pub [u8; 32]);

impl fmt::Debug for NonceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NonceKey(..)")
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            realm: "turnpike".to_owned(),
            tenants: Vec::new(),
            software: Some("turnpike".to_owned()),
            authenticate: true,
            nonce_key: NonceKey([0; 32]),
            granted: GrantedAllocates::default(),
            nonce_lifetime: 3600,
            default_lifetime: 600,
            max_lifetime: 3600,
            permission_lifetime: 300,
            channel_lifetime: 600,
            max_permissions: 64,
            max_channels: 64,
            relay_v4: true,
            relay_v6: true,
            peers: PeerRules::default(),
            channels: ChannelRange::Rfc5766,
            allow_md5: true,
            allow_sha256: true,
            username_anonymity: true,
            listeners: Vec::new(),
            tcp_relay: true,
            max_connections: 32,
            max_total_connections: 4096,
            max_user_connections: 1024,
            mobility: true,
            third_party: ThirdParty::default(),
            alternates: Vec::new(),
            nat_discovery: Vec::new(),
            discovery_limits: DiscoveryLimits::default(),
        }
    }
}

/// What a configuration must not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// REALM has at most 127 characters (RFC 8489 section 14.9).
    #[error("realm must have 1 to 127 characters and no control characters; this has {0} characters")]
    Realm(usize),
    /// So has SOFTWARE (RFC 8489 section 14.14).
    #[error("software must have at most 127 characters; this has {0}")]
    Software(usize),
    /// Lifetimes of allocations.
    #[error("default_lifetime must be 1 to max_lifetime ({max} s); it is {default} s")]
    Lifetime {
        /// `default_lifetime`, in seconds.
        default: u32,
        /// `max_lifetime`, in seconds.
        max: u32,
    },
    /// There are no more channel numbers than 0x4000 to 0x4FFF.
    #[error("max_channels must be at most 4096; it is {0}")]
    Channels(usize),
    /// Nothing could be allocated.
    #[error("relay_v4 and relay_v6 are both false: no relayed transport address can be allocated")]
    NoFamily,
    /// Nobody could authenticate.
    #[error("allow_md5 and allow_sha256 are both false: no key would be accepted")]
    NoAlgorithm,
    /// CONNECTION-IDs would run short.
    #[error("max_total_connections must be at most {most}; it is {0}", most = ServerConfig::MOST_CONNECTIONS)]
    Connections(usize),
    /// Every nonce would be stale on arrival.
    #[error("nonce_lifetime must be at least 1 s")]
    NonceLifetime,
    /// THIRD-PARTY-AUTHORIZATION stands in every challenge.
    #[error("the server name of third-party authorization must have 1 to 255 bytes; it has {0}")]
    ServerName(usize),
    /// A token counts in one realm, and its key is found by its name.
    #[error("token key {0:?} must name a realm that is configured, and be the only one of that name there")]
    TokenKey(String),
    /// Nothing in a token says for which realm it was made (RFC 7635 section 4.1.1): it would count in both.
    #[error(
        "token key {0:?} is that of another realm too: its tokens would count in both; make one key for each realm"
    )]
    TokenKeyShared(String),
    /// RFC 8489 section 14.16.
    #[error("the domain of an alternate server must have 1 to 255 ASCII characters; {0:?} has not")]
    AlternateDomain(String),
    /// RFC 5780 section 6.
    #[error("NAT discovery needs two different addresses of one family and two different ports")]
    NatDiscovery,
    /// REALM alone tells realms apart.
    #[error("realm {0:?} stands there twice")]
    RealmTwice(String),
    /// [`RealmId`] has 16 bits.
    #[error("there must be at most 65534 realms beside the first; there are {0}")]
    Realms(usize),
    /// A listener that serves a realm that is not configured.
    #[error("a listener serves realm number {0}, which is not configured")]
    NoSuchRealm(u16),
}

impl ServerConfig {
    /// The most that `max_total_connections` may be: one of 64 CONNECTION-IDs of a worker.
    pub const MOST_CONNECTIONS: usize = 65_536;

    /// What this listener is.
    #[must_use]
    pub fn listener(&self, id: super::ListenerId) -> &ListenerProfile {
        self.listeners.get(usize::from(id.0)).unwrap_or(&DEFAULT_PROFILE)
    }

    /// Whether a [`super::Server`] can work with it.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut names = HashSet::new();
        for name in std::iter::once(&self.realm).chain(self.tenants.iter().map(|realm| &realm.name)) {
            let length = name.chars().count();
            if length == 0 || length > 127 || name.chars().any(char::is_control) {
                return Err(ConfigError::Realm(length));
            }
            if !names.insert(name) {
                return Err(ConfigError::RealmTwice(name.clone()));
            }
        }
        if self.tenants.len() > 65_534 {
            return Err(ConfigError::Realms(self.tenants.len()));
        }
        let ThirdParty { server_name, keys, .. } = &self.third_party;
        if !keys.is_empty() && !(1..=255).contains(&server_name.len()) {
            return Err(ConfigError::ServerName(server_name.len()));
        }
        let mut kids = HashSet::new();
        for key in keys {
            if !names.contains(&key.realm) || !kids.insert((&key.kid, &key.realm)) {
                return Err(ConfigError::TokenKey(key.kid.clone()));
            }
            if keys.iter().any(|other| other.key == key.key && other.realm != key.realm) {
                return Err(ConfigError::TokenKeyShared(key.kid.clone()));
            }
        }
        for domain in self.alternates.iter().filter_map(|alternate| alternate.domain.as_ref()) {
            if !(1..=255).contains(&domain.len()) || !domain.is_ascii() {
                return Err(ConfigError::AlternateDomain(domain.clone()));
            }
        }
        for NatDiscovery { addresses: [a, b], external, ports: [p, q], .. } in &self.nat_discovery {
            let of_family = |ip: &IpAddr| ip.is_ipv4() == a.is_ipv4();
            if a == b || p == q || !of_family(b) || !external.iter().flatten().all(of_family) {
                return Err(ConfigError::NatDiscovery);
            }
        }
        let mut served = self.listeners.iter().flat_map(|listener| &listener.realms);
        if let Some(id) = served.find(|id| usize::from(id.0) > self.tenants.len()) {
            return Err(ConfigError::NoSuchRealm(id.0));
        }
        let software = self.software.as_deref().unwrap_or_default().chars().count();
        if software > 127 {
            return Err(ConfigError::Software(software));
        }
        if self.default_lifetime == 0 || self.default_lifetime > self.max_lifetime {
            return Err(ConfigError::Lifetime { default: self.default_lifetime, max: self.max_lifetime });
        }
        if self.max_channels > 4096 {
            return Err(ConfigError::Channels(self.max_channels));
        }
        if !self.relay_v4 && !self.relay_v6 {
            return Err(ConfigError::NoFamily);
        }
        if !self.allow_md5 && !self.allow_sha256 {
            return Err(ConfigError::NoAlgorithm);
        }
        if self.max_total_connections > Self::MOST_CONNECTIONS {
            return Err(ConfigError::Connections(self.max_total_connections));
        }
        if self.nonce_lifetime == 0 {
            return Err(ConfigError::NonceLifetime);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_never_holds_the_nonce_key() {
        let config = ServerConfig { nonce_key: NonceKey([213; 32]), ..ServerConfig::default() };
        assert!(!format!("{config:?}").contains("213"));
    }
}
