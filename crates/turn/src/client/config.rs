use crate::Family;

/// Settings of a client; many clients can share them through an `Arc`.
#[derive(Clone)]
pub struct Config {
    /// USERNAME, at most 508 bytes; empty for a server without authentication.
    pub username: String,
    pub password: String,
    pub software: Option<String>,
    /// LIFETIME to request, in seconds. Default: the server's choice.
    pub lifetime: Option<u32>,
    /// REQUESTED-ADDRESS-FAMILY. The default, `None`, means IPv4 (RFC 8656 section 7.1).
    pub family: Option<Family>,
    /// ADDITIONAL-ADDRESS-FAMILY. Cannot be combined with `family`, `reservation`, or an `even_port` that
    /// reserves the next port.
    pub dual_stack: bool,
    /// DONT-FRAGMENT in Allocate requests, to ask for support, and in Send indications.
    pub dont_fragment: bool,
    /// TCP (RFC 6062) needs a stream to the server, and cannot be combined with `dont_fragment`, `even_port`
    /// or `reservation`.
    pub relayed: Relayed,
    /// MOBILITY-TICKET (RFC 8016), which [`super::Client::migrate`] needs.
    pub mobility: bool,
    /// Third-party authorization (RFC 7635), which replaces `password`; `username` is then the key ID.
    pub access_token: Option<AccessToken>,
    /// EVEN-PORT; `Some(true)` also reserves the next higher port.
    pub even_port: Option<bool>,
    pub reservation: Option<[u8; 8]>,
    /// If false, the client behaves as in RFC 5389: only MD5 and HMAC-SHA1. Default true.
    pub password_algorithms: bool,
    pub fingerprint: bool,
    /// Use [`Timing::default`] over UDP and DTLS, and [`Timing::RELIABLE`] over TCP and TLS.
    pub timing: Timing,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Relayed {
    #[default]
    Udp,
    Tcp,
}

#[derive(Clone)]
pub struct AccessToken {
    pub token: Vec<u8>,
    pub mac_key: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// RTO in milliseconds, doubled after each transmission. Default 500.
    pub rto_ms: u64,
    /// Rc: total number of transmissions. Default 7.
    pub transmissions: u32,
    /// Rm: number of RTOs to wait after the last transmission. Default 16.
    pub last_wait: u64,
}

impl Timing {
    /// A single transmission, then a wait of Ti = 39.5 s for the response (RFC 8489 section 6.2.2).
    pub const RELIABLE: Self = Self { rto_ms: 39_500, transmissions: 1, last_wait: 1 };
}

impl Default for Timing {
    fn default() -> Self {
        Self { rto_ms: 500, transmissions: 7, last_wait: 16 }
    }
}

impl Config {
    #[must_use]
    pub fn new(username: impl Into<String>, password: impl Into<String>) -> Self {
        Self { username: username.into(), password: password.into(), ..Self::default() }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            username: String::new(),
            password: String::new(),
            software: None,
            lifetime: None,
            family: None,
            dual_stack: false,
            dont_fragment: false,
            relayed: Relayed::Udp,
            mobility: false,
            access_token: None,
            even_port: None,
            reservation: None,
            password_algorithms: true,
            fingerprint: false,
            timing: Timing::default(),
        }
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("username", &self.username)
            .field("lifetime", &self.lifetime)
            .field("family", &self.family)
            .field("dual_stack", &self.dual_stack)
            .field("relayed", &self.relayed)
            .field("mobility", &self.mobility)
            .field("timing", &self.timing)
            .finish_non_exhaustive()
    }
}
