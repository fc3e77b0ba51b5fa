//! Effects: everything the runtime must do or know besides sending a datagram. One queue holds all of them in
//! order and is drained after each call ([`super::Server::poll_effect`]). The control plane also changes the
//! [forwarding table](super::forwarding) only through effects; each effect is applied to the table before it
//! is queued. Times are [`crate::time::Now::ms`].

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use strum::{IntoStaticStr, VariantArray};
use turnpike_wire::channel_data::ChannelNumber;

use super::{
    AllocationId, AllocationSlot, AllocationUsage, BadRequest, Client, ConnectRequest, ConnectionId,
    CredentialQuery, DropReason, Family, Link, MoveRequest, PeerDenial, PendingMove, RelayId, SharedPort,
    Source, Transport, request::Method,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    pub allocation: AllocationSlot,
    pub first: OpenRelay,
    /// Second socket, to be opened even if the first one failed.
    pub second: Option<OpenRelay>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenRelay {
    pub family: Family,
    pub transport: RelayTransport,
    pub port: PortRequest,
}

/// REQUESTED-TRANSPORT.
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
    /// Any port in the range; it may be shared with other allocations: [`OpenResult::Shared`].
    Any,
    /// Not shared: a mobile allocation takes its sockets with it to another worker (RFC 8016).
    Own,
    /// EVEN-PORT with R = 0.
    Even,
    /// Even port; the next higher one is reserved for 30 s under this token (EVEN-PORT with R = 1).
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
    /// Only for [`PortRequest::Any`] over UDP.
    Shared { relayed: SocketAddr, port: SharedPort },
    /// Error 440: no relay address of this family is configured.
    UnsupportedFamily,
    /// Error 508: no free port, unknown or expired reservation, or no file descriptors left.
    NoCapacity,
    /// Error 508: the machine currently lacks the relay addresses of this family.
    AddressAbsent,
    /// Error 508: other programs use the ports.
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
    /// The client's stream is now the data connection (RFC 6062 section 5.4). Bytes after the request are its
    /// first data.
    Bind {
        connection: ConnectionId,
        source: Source,
    },
    /// Pass the stream to `worker`, with the request and the bytes after it, for
    /// [`super::Server::from_handed_over`].
    HandOver {
        worker: u16,
        source: Source,
        request: Box<[u8]>,
    },
    /// Read nothing more from this stream until `until_ms`, not even bytes already received.
    Slow {
        client: Client,
        until_ms: u64,
    },
    /// Pass the request to another worker, for [`super::Server::from_elsewhere`]; the client stays here.
    Forward {
        worker: u16,
        via: u16,
        /// The client's 5-tuple already has an allocation or a pending move.
        occupied: bool,
        source: Source,
        request: Box<[u8]>,
    },
    /// Return the request to the worker that forwarded it, for [`super::Server::declined`]: the client is not
    /// moving here.
    Decline {
        via: u16,
        source: Source,
        request: Box<[u8]>,
    },
    /// Call [`super::Server::move_over`] on the other worker, to cancel this pending move.
    MoveOver {
        worker: u16,
        pending_move: PendingMove,
    },
    /// Call [`super::Server::remember_deletions`] on the client's worker, which responds to retransmissions.
    Deleted {
        via: u16,
        deletion: (u64, u64),
    },
    /// Call [`super::Server::export`] on the owner and [`super::Server::import`] here, then feed `datagram`
    /// again. Drop the client's other datagrams until then.
    Fetch {
        request: MoveRequest,
        datagram: Box<[u8]>,
    },
    /// Call [`super::Server::export`] and let the other worker, where the client waits, import the result.
    Move(MoveRequest),
    /// Let the client's worker call [`super::Server::expect`] for the pending move, then send the reply.
    Answer {
        via: u16,
        source: Source,
        /// Pending move of the client's allocation to that worker.
        pending_move: Option<PendingMove>,
        reply: Box<[u8]>,
    },
    /// Report through [`super::Server::credentials`] within 10 s.
    LookUp(CredentialQuery),
    Opened {
        allocation: AllocationSlot,
        /// Stays the same when the allocation moves.
        id: AllocationId,
        client: Client,
        link: Link,
        expires_ms: u64,
        realm: Arc<str>,
        username: Box<str>,
        /// Relayed transport address, and the second of a dual-stack allocation.
        relayed: (SocketAddr, Option<SocketAddr>),
    },
    Renewed {
        allocation: AllocationSlot,
        family: Option<Family>,
        expires_ms: u64,
    },
    /// A permission ends with its allocation or the relayed address of its family, without another effect.
    Permitted {
        allocation: AllocationSlot,
        peer: IpAddr,
        expires_ms: u64,
        renewed: bool,
    },
    /// The permission expired, or new peer rules refuse it.
    PermissionEnded {
        allocation: AllocationSlot,
        peer: IpAddr,
    },
    /// Like a permission, a channel may end without another effect.
    Bound {
        allocation: AllocationSlot,
        number: ChannelNumber,
        /// Address that the client used.
        peer: SocketAddr,
        /// Differs from `peer` for relayed transport addresses of this server behind a NAT.
        at: SocketAddr,
        expires_ms: u64,
        renewed: bool,
    },
    /// First datagram on a channel since it was bound or its allocation moved here. Emitted only after
    /// [`super::Server::tell_first_use`].
    Used {
        allocation: AllocationSlot,
        number: ChannelNumber,
    },
    /// The channel expired, new peer rules refuse it, or its peer moved ([`Effect::Bound`] follows).
    Unbound {
        allocation: AllocationSlot,
        number: ChannelNumber,
        peer: SocketAddr,
    },
    /// Close all relay sockets and connections of the allocation.
    Closed {
        allocation: AllocationSlot,
        id: AllocationId,
        client: Client,
        realm: Arc<str>,
        username: Box<str>,
        identity: Option<Box<str>>,
        /// All relayed addresses that the allocation has had, IPv4 first; none if it ended before its sockets
        /// opened.
        relayed: [Option<SocketAddr>; 2],
        transport: Transport,
        relay_transport: RelayTransport,
        reason: ClosedReason,
        /// Another client may already use the 5-tuple.
        away: bool,
        lived_ms: u64,
        /// Datagrams and their payload bytes, as in `to_client`.
        to_peer: (u64, u64),
        to_client: (u64, u64),
        /// See [`super::UsageReport::of_ended`].
        reported: Option<Box<AllocationUsage>>,
    },
    /// Close both halves of this connection, to the peer and to the client, or abort the attempt.
    ConnectionClosed {
        allocation: AllocationSlot,
        connection: ConnectionId,
    },
    /// Stop connecting, and call [`super::Server::connected`] with [`super::ConnectError::TimedOut`].
    ConnectTimedOut {
        allocation: AllocationSlot,
        connection: ConnectionId,
    },
    Moved {
        allocation: AllocationSlot,
        /// Previous 5-tuple; if it is a stream that is still open, the stream no longer has an allocation.
        /// `None` if the client had disconnected.
        was: Option<Client>,
        client: Client,
        link: Link,
        /// True for a stream (RFC 8656 section 12.5).
        padded: bool,
        /// ID of the allocation on the worker it came from.
        from: Option<AllocationSlot>,
    },
    /// The allocation has left this worker; see [`super::Server::export`].
    Exported {
        allocation: AllocationSlot,
    },
    /// The allocation stays on this worker after all; see [`super::Server::take_back`].
    Returned {
        allocation: AllocationSlot,
    },
    /// The client of a mobile allocation disconnected; the allocation waits for it to return.
    Away {
        allocation: AllocationSlot,
    },
    /// A volume quota, a capture or a measurement began or ceased to apply to the allocation, and with it
    /// [`super::Server::is_limited`] may have changed.
    Limited {
        allocation: AllocationSlot,
    },
    /// Close this relay socket; the other family of the allocation continues.
    RelayClosed {
        relay: RelayId,
    },
    /// For the log. Like the next two variants, it is rate-limited: `suppressed` is the number of refusals
    /// omitted since the previous entry.
    Refused {
        client: Client,
        /// USERNAME as sent, at most 508 bytes, or `(userhash)`.
        username: Box<str>,
        why: CredentialRefusal,
        suppressed: u64,
    },
    PeerRefused {
        client: Client,
        realm: Arc<str>,
        username: Box<str>,
        /// The port is 0 if the request contained none.
        peer: SocketAddr,
        /// Number of other peers in the request; they get no permission either.
        others: usize,
        by: PeerDenial,
        suppressed: u64,
    },
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

impl Effect {
    /// The client that loses an allocation and the client that gains one, if they are still connected to this
    /// server.
    #[must_use]
    pub fn clients(&self) -> [Option<&Client>; 2] {
        match self {
            Self::Opened { client, .. } => [None, Some(client)],
            // Another client may now have the address of a client that has moved away.
            Self::Closed { client, reason, away: false, .. } if *reason != ClosedReason::Disconnected => {
                [Some(client), None]
            }
            // A client that moved from another worker has already lost its allocation there.
            Self::Moved { was, client, from, .. } => [was.as_ref().filter(|_| from.is_none()), Some(client)],
            _ => [None, None],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestRefusal {
    /// The error code alone identifies the reason.
    Code,
    BadRequest(BadRequest),
    UnknownAttribute(u16),
    /// Error 443, with the peer's address; its port is 0 if the request contained none.
    PeerFamily(SocketAddr),
    AllocationExists,
    UserQuota,
    PrefixQuota,
    TotalQuota,
    /// See [`super::VolumeLimits`].
    VolumeQuota,
    Banned,
    /// Rules on countries and autonomous systems ([`super::ClientRules`]).
    ClientNetwork,
    Draining,
    /// The client's address is one of this server's relayed transport addresses.
    Loop,
    /// The client's address is a 6to4 or Teredo address.
    Tunnel,
    /// Any request but Binding, with [`super::ServerConfig::stun_only`].
    StunOnly,
    Permissions,
    Channels,
    /// Another client with the same relay socket already uses this peer.
    SharedPeer,
    Connections,
    NoRelay,
    AddressAbsent,
    PortsHeld,
    /// The credential store did not respond, so the client is not authenticated.
    Store,
    /// The server sends no response, so that the client retransmits.
    Unanswered(DropReason),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum ClosedReason {
    Deleted,
    Expired,
    Shutdown,
    Administrator,
    Disconnected,
    MaxAge,
    Banned,
    /// See [`super::ServerLimits::end_with_credential`].
    Credential,
    AddressGone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenProblem {
    /// No key of this name (USERNAME) is configured for the realm.
    UnknownKey,
    /// The length fields are inconsistent.
    Malformed,
    /// Encrypted with another key, issued for another server name, or altered.
    NotAuthentic,
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
    /// The credential's expiry is implausibly far in the future.
    TooFarAhead {
        /// Seconds.
        ahead: u64,
    },
    WrongKey,
    /// Unusable ACCESS-TOKEN. For an expired token, see [`Self::Expired`].
    Token(TokenProblem),
    WrongRealm,
    /// Error 441: the allocation belongs to another user.
    WrongUser,
}
