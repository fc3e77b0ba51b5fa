//! Effects: everything the runtime must do or know besides sending a datagram, in order. One queue holds them
//! all, drained after each call ([`super::Server::poll_effect`]). The control plane changes the [forwarding
//! table](super::forwarding) only through effects too; the table sees each one first.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use strum::IntoStaticStr;
use turnpike_wire::channel_data::ChannelNumber;

use super::{
    AllocationId, BadRequest, Client, ConnectRequest, ConnectionId, CredentialQuery, DropReason, Family,
    Link, MoveRequest, PeerDenial, PendingMove, RelayId, SessionId, SharedPort, Source, Transport,
    request::Method,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    pub allocation: AllocationId,
    pub first: OpenRelay,
    /// Second socket of a dual-stack allocation (ADDITIONAL-ADDRESS-FAMILY). Try it even if the first failed:
    /// one is enough.
    pub second: Option<OpenRelay>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenRelay {
    pub family: Family,
    pub transport: RelayTransport,
    pub port: PortRequest,
}

/// Transport between the server and peers (REQUESTED-TRANSPORT).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum RelayTransport {
    Udp,
    /// RFC 6062: the relay socket listens, and connections to peers originate from its address.
    Tcp,
}

/// Port of a relay socket (RFC 8656 section 7.2 steps 6 to 8, 18.5, 18.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortRequest {
    /// Any port of the range; it may be shared with other allocations: [`OpenResult::Shared`].
    Any,
    /// Any port of the range, not shared: a mobile allocation takes its relay sockets along to another worker
    /// (RFC 8016).
    Own,
    /// EVEN-PORT with R = 0.
    Even,
    /// Even port, with the next higher one reserved for 30 s under this token (EVEN-PORT with R = 1).
    EvenAndReserveNext([u8; 8]),
    /// Port that any worker reserved under this token (RESERVATION-TOKEN).
    Reserved([u8; 8]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenResult {
    Opened {
        /// Address for XOR-RELAYED-ADDRESS: the external one if a mapping is configured.
        relayed: SocketAddr,
    },
    /// Bound to a relay socket that other allocations of this worker may share; only for [`PortRequest::Any`]
    /// over UDP.
    Shared { relayed: SocketAddr, port: SharedPort },
    /// 440: no relay address of this family is configured.
    UnsupportedFamily,
    /// 508: no free port, unknown or expired reservation, or no file descriptors left.
    NoCapacity,
    /// 508: the machine currently lacks the relay addresses of this family.
    AddressAbsent,
    /// 508: other programs hold the ports.
    PortsHeld,
}

impl OpenResult {
    #[must_use]
    pub fn relayed(&self) -> Option<SocketAddr> {
        match self {
            Self::Opened { relayed } | Self::Shared { relayed, .. } => Some(*relayed),
            Self::UnsupportedFamily | Self::NoCapacity | Self::AddressAbsent | Self::PortsHeld => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Effect {
    /// Open relay sockets, then call [`super::Server::opened`], which returns the reply.
    Open(OpenRequest),
    /// Connect to a peer (RFC 6062), then call [`super::Server::connected`], which returns the reply.
    Connect(ConnectRequest),
    /// The success reply has been sent: the client's stream is now the data connection of `connection` (RFC
    /// 6062 section 5.4). Bytes after the request are its first data.
    Bind {
        connection: ConnectionId,
        source: Source,
    },
    /// The client's stream belongs to another worker: pass it the stream, the request and the bytes behind
    /// it, for [`super::Server::from_handed_over`].
    HandOver {
        worker: u16,
        source: Source,
        request: Box<[u8]>,
    },
    /// The client repeats a refused request over a stream: read nothing more from it until `until_ms`, not
    /// even the bytes already received behind the request.
    Slow {
        client: Client,
        until_ms: u64,
    },
    /// Another worker must answer this request, while the client stays here: pass it on, for
    /// [`super::Server::from_elsewhere`].
    Forward {
        worker: u16,
        via: u16,
        /// The client's 5-tuple already has an allocation or a pending move.
        occupied: bool,
        source: Source,
        request: Box<[u8]>,
    },
    /// The client of a forwarded request does not move here: return the request, for
    /// [`super::Server::declined`].
    Decline {
        via: u16,
        source: Source,
        request: Box<[u8]>,
    },
    /// A pending move is cancelled: the client's connection has closed, or the allocation has ended or moves
    /// elsewhere. Notify the other worker through [`super::Server::move_over`].
    MoveOver {
        worker: u16,
        pending_move: PendingMove,
    },
    /// A forwarded request deleted its client's allocation or one family of it. Notify the client's worker,
    /// which answers retransmissions, through [`super::Server::remember_deletions`].
    Deleted {
        via: u16,
        deletion: (u64, u64),
    },
    /// A client of this worker owns an allocation of another one: call [`super::Server::export`] there and
    /// [`super::Server::import`] here, then feed `datagram` again. Drop the client's other datagrams until
    /// then.
    Fetch {
        request: MoveRequest,
        datagram: Box<[u8]>,
    },
    /// Call [`super::Server::export`] and let the other worker, where the client waits, import the result.
    Move(MoveRequest),
    /// A forwarded request has been answered: have its worker call [`super::Server::expect`] if there is a
    /// pending move, then send the reply.
    Answer {
        via: u16,
        source: Source,
        /// Pending move of the client's allocation to that worker.
        pending_move: Option<PendingMove>,
        reply: Box<[u8]>,
    },
    /// Query the credential store and report through [`super::Server::credentials`] within 10 s; a request
    /// waits for it.
    LookUp(CredentialQuery),
    Opened {
        allocation: AllocationId,
        /// Stays the same when the allocation moves.
        session: SessionId,
        client: Client,
        link: Link,
        expires_ms: u64,
        realm: Arc<str>,
        username: Box<str>,
        /// Relayed transport address, and the second of a dual-stack allocation.
        relayed: (SocketAddr, Option<SocketAddr>),
    },
    Renewed {
        allocation: AllocationId,
        family: Option<Family>,
        expires_ms: u64,
    },
    /// A permission was installed or refreshed. It ends with its session or with the relayed address of its
    /// family, without another effect.
    Permitted {
        allocation: AllocationId,
        peer: IpAddr,
        expires_ms: u64,
        renewed: bool,
    },
    /// A permission expired, or a reload made the peer rules refuse its peer.
    PermissionEnded {
        allocation: AllocationId,
        peer: IpAddr,
    },
    /// A channel was bound or refreshed. It ends like a permission.
    Bound {
        allocation: AllocationId,
        number: ChannelNumber,
        /// Address that the client used.
        peer: SocketAddr,
        /// Address to send to. It differs from `peer` if the peer is a relayed transport address of this
        /// server behind a NAT.
        at: SocketAddr,
        expires_ms: u64,
        renewed: bool,
    },
    /// First datagram in either direction on a channel since it was bound or its session moved here. Emitted
    /// once, and only after [`super::Server::tell_first_use`]. It comes with the verdict on that datagram and
    /// may stay queued until the next drain.
    Used {
        allocation: AllocationId,
        number: ChannelNumber,
    },
    /// A channel expired, a reload made the peer rules refuse its peer, or the peer is now reached at another
    /// address ([`Effect::Bound`] follows).
    Unbound {
        allocation: AllocationId,
        number: ChannelNumber,
        peer: SocketAddr,
    },
    /// The allocation is gone: close all its relay sockets and connections.
    Closed {
        allocation: AllocationId,
        /// Same ID as in [`Effect::Opened`].
        session: SessionId,
        client: Client,
        realm: Arc<str>,
        username: Box<str>,
        identity: Option<Box<str>>,
        /// All relayed transport addresses it has had, IPv4 first; none if it ended before its sockets
        /// opened.
        relayed: [Option<SocketAddr>; 2],
        transport: Transport,
        relay_transport: RelayTransport,
        reason: ClosedReason,
        /// The client had already disconnected, so another client may have its 5-tuple by now.
        away: bool,
        lived_ms: u64,
        to_peer: (u64, u64),
        to_client: (u64, u64),
    },
    /// Close the connection to this peer and, if bound, the one to the client; abort it if it is still
    /// connecting.
    ConnectionClosed {
        allocation: AllocationId,
        connection: ConnectionId,
    },
    /// Stop connecting to this peer, and call [`super::Server::connected`] with
    /// [`super::ConnectError::TimedOut`].
    ConnectTimedOut {
        allocation: AllocationId,
        connection: ConnectionId,
    },
    /// The client of a mobile allocation has a new address (RFC 8016).
    Moved {
        allocation: AllocationId,
        /// Old 5-tuple; a stream still open there has no allocation now. `None` if the client had
        /// disconnected, since another client may have the 5-tuple by now.
        was: Option<Client>,
        client: Client,
        link: Link,
        /// The new link is a stream, where ChannelData is padded (RFC 8656 section 12.5).
        padded: bool,
        /// ID of the allocation on the worker it came from.
        from: Option<AllocationId>,
    },
    /// A session left for another worker or process with everything it holds: [`super::Server::export`].
    Exported {
        allocation: AllocationId,
    },
    /// A session that was to leave stays here after all: [`super::Server::take_back`].
    Returned {
        allocation: AllocationId,
    },
    /// The client of a mobile allocation disconnected; the allocation waits for its return.
    Away {
        allocation: AllocationId,
    },
    /// Close this relay socket: one family of a dual-stack allocation was deleted or expired, and the other
    /// lives on.
    RelayClosed {
        relay: RelayId,
    },
    /// A credential was refused; for the log. At most one per request, and rate-limited: `suppressed` counts
    /// those left out.
    Refused {
        client: Client,
        /// USERNAME as sent, at most 508 bytes, or `(userhash)`.
        username: Box<str>,
        why: CredentialRefusal,
        suppressed: u64,
    },
    /// A request named a peer that the rules refuse (403); for the log. Rate-limited like
    /// [`Effect::Refused`].
    PeerRefused {
        client: Client,
        realm: Arc<str>,
        username: Box<str>,
        /// Port 0 if the request contained none.
        peer: SocketAddr,
        others: usize,
        by: PeerDenial,
        suppressed: u64,
    },
    /// A request was answered with any other error. Rate-limited like [`Effect::Refused`].
    RequestRefused {
        client: Client,
        /// Empty if unknown.
        realm: Arc<str>,
        username: Box<str>,
        /// The client authenticated as `username`. Otherwise its UDP source address may be forged.
        proved: bool,
        method: Method,
        /// Error code of the response; 0 if there was no response ([`RequestRefusal::Unanswered`]).
        code: u16,
        why: RequestRefusal,
        suppressed: u64,
    },
}

/// Reason of a refusal, for error codes with more than one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestRefusal {
    Code,
    /// 400: malformed attribute.
    BadRequest(BadRequest),
    /// 420: first unknown attribute.
    UnknownAttribute(u16),
    /// 443: the allocation has no relayed address of this peer's family; port 0 if the request contained
    /// none.
    PeerFamily(SocketAddr),
    AllocationExists,
    UserQuota,
    PrefixQuota,
    TotalQuota,
    Banned,
    Draining,
    /// The client's address is one of this server's relayed transport addresses.
    Loop,
    Tunnel,
    Permissions,
    Channels,
    /// Another client with the same relay socket already uses this peer.
    SharedPeer,
    Connections,
    NoRelay,
    AddressAbsent,
    PortsHeld,
    /// The credential store did not answer, so the client is not authenticated.
    Store,
    /// A limit on requests is reached. The server stays silent, so that the client retransmits.
    Unanswered(DropReason),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClosedReason {
    Deleted,
    Expired,
    Shutdown,
    Administrator,
    Disconnected,
    MaxAge,
    Banned,
    /// The time-limited credential that made it expired ([`super::ServerLimits::end_with_credential`]).
    Credential,
    AddressGone,
}

/// Error in an ACCESS-TOKEN (RFC 7635).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenProblem {
    /// No key of this name (USERNAME) is configured for the realm.
    UnknownKey,
    /// The length fields are inconsistent.
    Malformed,
    /// Encrypted with another key, issued for another server name, or altered.
    NotAuthentic,
    /// Issued in the future: the clocks differ.
    Future {
        /// Seconds.
        ahead: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CredentialRefusal {
    NoSuchUser,
    Expired {
        /// Seconds.
        ago: u64,
    },
    /// Time-limited credential whose expiry is implausibly far in the future.
    TooFarAhead {
        /// Seconds.
        ahead: u64,
    },
    WrongKey,
    /// Unusable ACCESS-TOKEN. An expired one is [`Self::Expired`].
    Token(TokenProblem),
    WrongRealm,
    /// 441: the allocation belongs to another user.
    WrongUser,
}
