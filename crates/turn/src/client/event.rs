//! Client events: results of requests and received datagrams.

use std::net::{IpAddr, SocketAddr};

use turnpike_wire::{channel_data::ChannelNumber, escape::name};

/// Maximum length of a reason phrase or domain in a message, in characters; RFC 8489 section 14.8 allows 127.
const REASON: usize = 127;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Binding,
    Allocate,
    Refresh,
    /// A Refresh with LIFETIME 0.
    Delete,
    Permit(IpAddr),
    Bind(ChannelNumber, SocketAddr),
    /// Connect: a TCP connection from the relayed address to this peer (RFC 6062 section 4.3).
    Connect(SocketAddr),
    BindConnection(ConnectionId),
    /// Refresh with a MOBILITY-TICKET from a new address (RFC 8016 section 3.2).
    Migrate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub u32);

impl std::fmt::Display for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Binding => f.write_str("Binding"),
            Self::Allocate => f.write_str("Allocate"),
            Self::Refresh => f.write_str("Refresh"),
            Self::Delete => f.write_str("Refresh with lifetime 0"),
            Self::Permit(peer) => write!(f, "CreatePermission for {peer}"),
            Self::Bind(number, peer) => write!(f, "ChannelBind of {:#06x} to {peer}", number.get()),
            Self::Connect(peer) => write!(f, "Connect to {peer}"),
            Self::BindConnection(ConnectionId(id)) => write!(f, "ConnectionBind of {id:#010x}"),
            Self::Migrate => f.write_str("Refresh with a mobility ticket"),
        }
    }
}

/// Addresses are canonical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    pub relayed: SocketAddr,
    /// Second address of a dual-stack allocation.
    pub additional: Option<SocketAddr>,
    /// Client's address as seen by the server.
    pub mapped: Option<SocketAddr>,
    /// Seconds until expiry; the client refreshes it automatically.
    pub lifetime: u32,
    pub reservation: Option<[u8; 8]>,
    /// ADDRESS-ERROR-CODE of a dual-stack request that got only one family (440 or 508).
    pub additional_refused: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    Mapped(SocketAddr),
    Allocated(Allocation),
    /// Lifetime in seconds.
    Refreshed {
        lifetime: u32,
    },
    Deleted,
    Permitted(IpAddr),
    Bound(ChannelNumber, SocketAddr),
    /// Connect succeeded; continue with [`super::Client::data_connection`].
    Connected {
        peer: SocketAddr,
        connection: ConnectionId,
    },
    /// The server waits 30 s for the ConnectionBind (RFC 6062 section 5.2).
    ConnectionAttempt {
        peer: SocketAddr,
        connection: ConnectionId,
    },
    /// Lifetime in seconds.
    Migrated {
        lifetime: u32,
    },
    /// The peer is unreachable: a Data indication with ICMP (RFC 8656 section 11.6).
    Icmp {
        peer: SocketAddr,
        icmp_type: u8,
        code: u8,
    },
    /// The request failed. After a failed Allocate or Refresh, the client has no allocation.
    Failed {
        request: Request,
        failure: Failure,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    #[error("the server answered {code} {}", name(reason).cut(REASON))]
    Refused { code: u16, reason: String },
    #[error("the server refused user {username:?} in realm {realm:?} (401)")]
    Credentials { username: String, realm: String },
    #[error("the server requires credentials for realm {realm:?}")]
    CredentialsNeeded { realm: String },
    /// Error 300 (RFC 8489 section 10): use another server.
    #[error("the server redirects to {server}{}", domain.as_ref().map(|domain| format!(" ({})", name(domain).cut(REASON))).unwrap_or_default())]
    TryAlternate {
        server: SocketAddr,
        /// ALTERNATE-DOMAIN: the name that the server's certificate must have.
        domain: Option<String>,
    },
    #[error("the server offers no supported password algorithm")]
    PasswordAlgorithms,
    /// Unsigned errors prove nothing (RFC 8489 section 9.2.5), but the last one is reported.
    #[error("no answer after {transmissions} transmissions{}", match unverified {
        Some((code, reason)) => format!("; the last unsigned response was {code} {}", name(reason).cut(REASON)),
        None => String::new(),
    })]
    Timeout {
        transmissions: u32,
        /// Code and reason of the last unverified error response.
        unverified: Option<(u16, String)>,
    },
    #[error("the server's response lacks {0}")]
    Incomplete(&'static str),
    #[error("cannot encode the request: {0}")]
    Unwritable(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming<'a> {
    Data {
        peer: SocketAddr,
        /// `None` for a Data indication.
        channel: Option<ChannelNumber>,
        /// Part of the datagram passed in.
        payload: &'a [u8],
    },
    /// A response, or an indication without data; see [`super::Client::poll_event`].
    Control,
    Ignored(Ignored),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ignored {
    Malformed,
    UnknownChannel,
    /// Data indication from a peer without a permission (RFC 8656 section 11.4).
    NoPermission,
    /// No request with this transaction ID is pending: the response is late, retransmitted, or for another
    /// client.
    UnknownTransaction,
    Unverified,
    /// An attacker removed the password algorithms that the nonce announces (RFC 8489 section 9.2.1).
    BidDown,
    Unexpected,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    #[error("the client already has an allocation")]
    AllocationExists,
    #[error("the client has no allocation")]
    NoAllocation,
    #[error("the server issued no mobility ticket")]
    NoTicket,
    #[error("limit of {limit} {what} reached")]
    TooMany { what: &'static str, limit: usize },
}
