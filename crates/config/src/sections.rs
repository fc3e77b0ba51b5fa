//! Sections of the configuration that need no code other than their keys.

use std::{net::SocketAddr, ops::RangeInclusive, path::PathBuf};

use crate::{CertificateName, RelayPlace, Secret};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct TlsSettings {
    pub listen: Vec<SocketAddr>,
    pub only: bool,
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
    /// Decrypts all keys of this section that are encrypted.
    pub key_password: Option<Secret>,
    /// CA certificates; TLS clients must present a certificate issued by one of them.
    pub client_ca: Option<PathBuf>,
    pub certificates: Vec<CertificateFiles>,
    /// Names whose certificates the server orders.
    pub acme: Vec<CertificateName>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DtlsSettings {
    pub listen: Vec<SocketAddr>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RelaySettings {
    pub addresses: Vec<RelayPlace>,
    /// Rotates clients through the relay addresses of a family.
    pub addresses_in_turn: bool,
    pub ports: RangeInclusive<u16>,
    /// Number of relay sockets, on each relay address, that a worker's allocations share.
    pub shared_ports: usize,
    /// Size of a listener's receive and send buffers in bytes.
    pub listener_buffer: usize,
    /// Size of a relay socket's receive and send buffers in bytes.
    pub buffer: usize,
    /// Accepts channel numbers above 0x4FFF.
    pub rfc5766_channels: bool,
    /// A bound channel keeps the permission for its peer alive.
    pub channels_permit: bool,
    pub tcp: bool,
    pub mobility: bool,
}

impl Default for RelaySettings {
    fn default() -> Self {
        Self {
            addresses: Vec::new(),
            addresses_in_turn: false,
            ports: 49_152..=65_535,
            shared_ports: 0,
            listener_buffer: 4 << 20,
            buffer: 512 << 10,
            rfc5766_channels: true,
            channels_permit: true,
            tcp: true,
            mobility: true,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct AuthSettings {
    pub required: bool,
    /// Binding requests need credentials too.
    pub binding: bool,
    pub users: Vec<ConfiguredUser>,
    pub secrets: Vec<Secret>,
    /// Lifetime of a nonce in seconds.
    pub nonce_lifetime: u32,
    pub allow_md5: bool,
}

impl Default for AuthSettings {
    fn default() -> Self {
        Self {
            required: true,
            binding: false,
            users: Vec::new(),
            secrets: Vec::new(),
            nonce_lifetime: 3600,
            allow_md5: true,
        }
    }
}

/// Bits per second in each direction; `None` for no limit.
#[derive(Clone, Debug, PartialEq)]
pub struct RateSettings {
    pub bits_per_second: Option<u64>,
    pub bits_per_second_per_realm: Option<u64>,
    pub bits_per_second_per_user: Option<u64>,
    pub bits_per_second_per_allocation: Option<u64>,
    /// Burst size, as milliseconds of traffic at these rates.
    pub burst: u32,
}

impl Default for RateSettings {
    fn default() -> Self {
        Self {
            bits_per_second: None,
            bits_per_second_per_realm: None,
            bits_per_second_per_user: None,
            bits_per_second_per_allocation: None,
            burst: 250,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct LogSettings {
    pub level: String,
    pub format: LogFormat,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Text }
    }
}

/// Seconds that allocations and connections may continue in a process that is shutting down.
#[derive(Clone, Debug, PartialEq)]
pub struct ShutdownSettings {
    /// Time limit after SIGTERM.
    pub deadline: u32,
    /// Time limit after an upgrade.
    pub upgrade_deadline: u32,
}

impl Default for ShutdownSettings {
    fn default() -> Self {
        Self { deadline: 30, upgrade_deadline: 3600 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// Certificate chain: the server certificate first, then intermediate ones.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfiguredUser {
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

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GeoipSettings {
    /// MaxMind DB files.
    pub files: Vec<PathBuf>,
}
