//! What a client is told at start.

use crate::Family;

/// Settings of a client; share one behind an `Arc` between many clients.
#[derive(Clone)]
pub struct Config {
    /// USERNAME, at most 508 bytes. Empty for a server that wants no credentials.
    pub username: String,
    /// Long-term password.
    pub password: String,
    /// SOFTWARE in requests; `None` (the default) sends none.
    pub software: Option<String>,
    /// LIFETIME to ask for, in seconds; `None` (the default) leaves it to the server.
    pub lifetime: Option<u32>,
    /// REQUESTED-ADDRESS-FAMILY; `None` (the default) means IPv4 (RFC 8656 section 7.1).
    pub family: Option<Family>,
    /// ADDITIONAL-ADDRESS-FAMILY = IPv6: a dual-stack allocation. Excludes `family`, `even_port` with
    /// reservation, and `reservation`.
    pub dual_stack: bool,
    /// DONT-FRAGMENT in Allocate (asks whether the server can) and in Send indications.
    pub dont_fragment: bool,
    /// What is relayed: datagrams, or TCP connections (RFC 6062; `dont_fragment`, `even_port` and `reservation` do not go
    /// with it, and the control connection must be TCP or TLS). Default UDP.
    pub relayed: Relayed,
    /// Asks for a MOBILITY-TICKET, with which [`super::Client::migrate`] takes the allocation along to another address
    /// (RFC 8016). Default false.
    pub mobility: bool,
    /// Third-party authorisation (RFC 7635), in place of `password`; `username` is then the key's id.
    pub access_token: Option<AccessToken>,
    /// EVEN-PORT; `Some(true)` also reserves the next higher port.
    pub even_port: Option<bool>,
    /// RESERVATION-TOKEN of an earlier allocation with `even_port: Some(true)`.
    pub reservation: Option<[u8; 8]>,
    /// Whether PASSWORD-ALGORITHMS is honoured (RFC 8489). False makes an RFC 5389 client: MD5 and HMAC-SHA1 only.
    /// Default true.
    pub password_algorithms: bool,
    /// Whether requests carry FINGERPRINT. Default false.
    pub fingerprint: bool,
    /// Retransmission: [`Timing::default`] over UDP and DTLS, [`Timing::RELIABLE`] over TCP and TLS.
    pub timing: Timing,
}

/// What an allocation relays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Relayed {
    /// Datagrams (RFC 8656).
    #[default]
    Udp,
    /// TCP connections (RFC 6062).
    Tcp,
}

/// What an authorisation server handed out (RFC 7635 section 4).
#[derive(Clone)]
pub struct AccessToken {
    /// The token, opaque: what ACCESS-TOKEN holds.
    pub token: Vec<u8>,
    /// The session key that signs requests.
    pub mac_key: Vec<u8>,
}

/// When requests are sent again (RFC 8489 section 6.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// RTO in milliseconds, doubled after each transmission. Default 500.
    pub rto_ms: u64,
    /// Rc: transmissions in all. Default 7.
    pub transmissions: u32,
    /// Rm: RTOs to wait after the last one. Default 16.
    pub last_wait: u64,
}

impl Timing {
    /// One transmission, and Ti = 39.5 s for the answer (RFC 8489 section 6.2.2).
    pub const RELIABLE: Self = Self { rto_ms: 39_500, transmissions: 1, last_wait: 1 };
}

impl Default for Timing {
    fn default() -> Self {
        Self { rto_ms: 500, transmissions: 7, last_wait: 16 }
    }
}

impl Config {
    /// Default settings for this user.
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

/// Without the password and the access token.
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
