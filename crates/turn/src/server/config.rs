//! What a server is told at start.

use super::PeerRules;

/// Settings of the state machine. [`ServerConfig::default`] holds the documented defaults.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// REALM, at most 127 characters.
    pub realm: String,
    /// SOFTWARE in responses; `None` sends none. Default `turnpike`.
    pub software: Option<String>,
    /// Whether Allocate and the rest need long-term credentials. Default true; false is for closed networks and tests.
    pub authenticate: bool,
    /// Key of the nonce HMAC, shared by all workers of a server.
    pub nonce_key: [u8; 32],
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
    /// Whether MD5 keys with HMAC-SHA1 (RFC 5389 clients) are accepted beside SHA-256. Default true.
    pub allow_md5: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            realm: "turnpike".to_owned(),
            software: Some("turnpike".to_owned()),
            authenticate: true,
            nonce_key: [0; 32],
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
            allow_md5: true,
        }
    }
}
