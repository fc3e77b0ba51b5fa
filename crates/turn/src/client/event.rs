//! What a client reports: requests that succeeded or failed, and what a datagram was.

use std::net::{IpAddr, SocketAddr};

use turnpike_wire::{channel_data::ChannelNumber, escape::name};

/// Characters of a reason phrase or a domain in a message: RFC 8489 allows a reason 127 (section 14.8).
const REASON: usize = 127;

/// A request that this client makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// STUN Binding: which address does the server see?
    Binding,
    /// Allocate.
    Allocate,
    /// Refresh of the allocation.
    Refresh,
    /// Refresh with LIFETIME 0.
    Delete,
    /// CreatePermission, or its refresh.
    Permit(IpAddr),
    /// ChannelBind, or its refresh.
    Bind(ChannelNumber, SocketAddr),
    /// Connect: a TCP connection from the relayed address to this peer (RFC 6062 section 4.3).
    Connect(SocketAddr),
    /// ConnectionBind, on a connection of its own (RFC 6062 section 4.3).
    BindConnection(ConnectionId),
    /// Refresh with a MOBILITY-TICKET, from another address than before (RFC 8016 section 3.2).
    Migrate,
}

/// CONNECTION-ID: which of an allocation's TCP connections (RFC 6062 section 6.2.1).
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

/// An allocation as the server granted it. All addresses canonical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Relayed transport address.
    pub relayed: SocketAddr,
    /// The second one of a dual-stack allocation.
    pub additional: Option<SocketAddr>,
    /// The client's address as the server sees it.
    pub mapped: Option<SocketAddr>,
    /// Seconds until it expires unless refreshed; the client refreshes it by itself.
    pub lifetime: u32,
    /// RESERVATION-TOKEN for the next higher port.
    pub reservation: Option<[u8; 8]>,
    /// ADDRESS-ERROR-CODE: why a dual-stack request got one family only (440 or 508).
    pub additional_refused: Option<u16>,
}

/// Something that happened to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Binding answered.
    Mapped(SocketAddr),
    /// Allocate granted.
    Allocated(Allocation),
    /// The allocation lives on for this many seconds.
    Refreshed { lifetime: u32 },
    /// The allocation is gone because this client deleted it.
    Deleted,
    /// A permission is installed or was refreshed.
    Permitted(IpAddr),
    /// A channel is bound or was refreshed.
    Bound(ChannelNumber, SocketAddr),
    /// Connect succeeded: [`super::Client::data_connection`] says how to use it.
    Connected { peer: SocketAddr, connection: ConnectionId },
    /// A permitted peer has connected to the relayed address; the server waits 30 s for the ConnectionBind (RFC 6062
    /// section 5.2).
    ConnectionAttempt { peer: SocketAddr, connection: ConnectionId },
    /// The allocation, its permissions and its channels now belong to the new address; it lives on for this many seconds.
    Migrated { lifetime: u32 },
    /// The peer cannot be reached: a Data indication that carries ICMP (RFC 8656 section 11.6).
    Icmp { peer: SocketAddr, icmp_type: u8, code: u8 },
    /// A request failed. After a failed Allocate or Refresh there is no allocation.
    Failed { request: Request, failure: Failure },
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The server refused it.
    #[error("the server answered {code} {}", name(reason).cut(REASON))]
    Refused { code: u16, reason: String },
    /// The server refused the credentials (401 in answer to a signed request).
    #[error("the server refused user {username:?} in realm {realm:?} (401)")]
    Credentials {
        /// The user of [`super::Config`].
        username: String,
        realm: String,
    },
    /// The server asks for credentials, and none are configured.
    #[error("the server asks for credentials for realm {realm:?}")]
    CredentialsNeeded { realm: String },
    /// The server asks to try another one (300, RFC 8489 section 10).
    #[error("the server says to try {server}{}", domain.as_ref().map(|domain| format!(" ({})", name(domain).cut(REASON))).unwrap_or_default())]
    TryAlternate {
        /// ALTERNATE-SERVER, canonical.
        server: SocketAddr,
        /// ALTERNATE-DOMAIN: the name that its certificate must have.
        domain: Option<String>,
    },
    /// The server offers no password algorithm that this client knows.
    #[error("the server offers no password algorithm that is known here")]
    PasswordAlgorithms,
    /// No answer that could be verified. Unsigned errors to signed requests are no proof of anything (RFC 8489
    /// section 9.2.5), but the last one is worth telling.
    #[error("no answer after {transmissions} transmissions{}", match unverified {
        Some((code, reason)) => format!("; an unsigned one said {code} {}", name(reason).cut(REASON)),
        None => String::new(),
    })]
    Timeout {
        transmissions: u32,
        /// Code and reason of the last error response that could not be verified.
        unverified: Option<(u16, String)>,
    },
    /// A success response lacks what it must have.
    #[error("the server's response lacks {0}")]
    Incomplete(&'static str),
    /// The request cannot be written with this configuration.
    #[error("the request cannot be written: {0}")]
    Unwritable(String),
}

/// What a datagram from the server was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming<'a> {
    /// Application data.
    Data {
        /// Who sent it.
        peer: SocketAddr,
        /// The channel it came through; `None` for a Data indication.
        channel: Option<ChannelNumber>,
        /// A part of the datagram that was fed in.
        payload: &'a [u8],
    },
    /// A response or an indication about state; see [`super::Client::poll_event`].
    Control,
    /// Nothing of use.
    Ignored(Ignored),
}

/// Why a datagram was ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ignored {
    /// Neither STUN nor ChannelData, or malformed.
    Malformed,
    /// ChannelData on a channel that is not bound.
    UnknownChannel,
    /// A Data indication from a peer without permission (RFC 8656 section 11.4).
    NoPermission,
    /// A response to nothing that is under way: late, retransmitted, or not for us.
    UnknownTransaction,
    /// A response without a valid MESSAGE-INTEGRITY to a signed request.
    Unverified,
    /// A challenge whose nonce says that algorithms are offered, but which offers none: somebody removed them
    /// (RFC 8489 section 9.2.1).
    BidDown,
    /// A request, or an indication that is not for clients.
    Unexpected,
}

/// Why a request cannot be made now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// There is an allocation already, or one is being made.
    #[error("there is an allocation already")]
    AllocationExists,
    /// There is no allocation.
    #[error("there is no allocation")]
    NoAllocation,
    /// The server gave no MOBILITY-TICKET, or none was asked for.
    #[error("the server gave no mobility ticket")]
    NoTicket,
    /// More requests under way, permissions or channels than a client may have.
    #[error("a client has at most {limit} {what}")]
    TooMany { what: &'static str, limit: usize },
}
