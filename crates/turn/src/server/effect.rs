//! What the runtime shall do or know beyond sending a datagram, in the order in which it came about. There is one queue of these, to be
//! drained after each call ([`super::Server::poll_effect`]), and nothing else leads from the control plane to the outside: not to the
//! [forwarding table](super::forwarding) either, which is the first to see each.

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

/// Relay sockets to open for a new allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    /// The allocation that waits for them.
    pub allocation: AllocationId,
    /// The first, always present.
    pub first: OpenRelay,
    /// The second of a dual-stack allocation (ADDITIONAL-ADDRESS-FAMILY). To be tried even if the first failed: one of
    /// them is enough.
    pub second: Option<OpenRelay>,
}

/// One relay socket to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenRelay {
    /// Family of the relayed transport address.
    pub family: Family,
    /// What it relays.
    pub transport: RelayTransport,
    /// Which port.
    pub port: PortRequest,
}

/// The transport between the server and peers (REQUESTED-TRANSPORT).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum RelayTransport {
    /// Datagrams.
    Udp,
    /// Connections (RFC 6062): the relay socket listens, and connections to peers come from its address.
    Tcp,
}

/// Which port a relay socket shall have (RFC 8656 section 7.2 steps 6 to 8, 18.5, 18.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortRequest {
    /// Any of the range, and others may have it too: [`OpenResult::Shared`].
    Any,
    /// Any of the range, for this allocation alone: one that may move to another worker takes its relay sockets along (RFC 8016).
    Own,
    /// An even one (EVEN-PORT with R = 0).
    Even,
    /// An even one, and the next higher one held for 30 s under this token (EVEN-PORT with R = 1).
    EvenAndReserveNext([u8; 8]),
    /// The one held under this token, by whichever worker (RESERVATION-TOKEN).
    Reserved([u8; 8]),
}

/// How an [`OpenRelay`] went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenResult {
    /// Bound; this is the address to tell the client (external, where a mapping is configured).
    Opened {
        /// Relayed transport address for XOR-RELAYED-ADDRESS.
        relayed: SocketAddr,
    },
    /// The same, on a relay socket that this worker's other allocations may have as well; for [`PortRequest::Any`] of datagrams alone.
    Shared {
        /// Relayed transport address for XOR-RELAYED-ADDRESS.
        relayed: SocketAddr,
        /// Which socket.
        port: SharedPort,
    },
    /// No relay address of this family is configured: 440.
    UnsupportedFamily,
    /// No free port, unknown or expired reservation, no file descriptors: 508.
    NoCapacity,
    /// The machine lacks the relay addresses of this family at the moment: 508.
    AddressAbsent,
    /// Other programs have the ports: 508.
    PortsHeld,
}

impl OpenResult {
    /// The relayed transport address, if there is one.
    #[must_use]
    pub fn relayed(&self) -> Option<SocketAddr> {
        match self {
            Self::Opened { relayed } | Self::Shared { relayed, .. } => Some(*relayed),
            Self::UnsupportedFamily | Self::NoCapacity | Self::AddressAbsent | Self::PortsHeld => None,
        }
    }
}

/// Something to do, or to know.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Effect {
    /// Open relay sockets and call [`super::Server::opened`], which has the reply.
    Open(OpenRequest),
    /// Connect to a peer (RFC 6062) and call [`super::Server::connected`], which has the reply.
    Connect(ConnectRequest),
    /// The reply has been given; from now on the client's stream is the data connection of `connection` (RFC 6062 section 5.4). What
    /// came behind the request is the first of its data, and no message.
    Bind {
        connection: ConnectionId,
        /// The client, whose 5-tuple is no control connection any more.
        source: Source,
    },
    /// A client's stream is another worker's business: give it the stream, the request and what came behind, for
    /// [`super::Server::from_handed_over`].
    HandOver {
        /// Its number.
        worker: u16,
        source: Source,
        /// What it asked.
        request: Box<[u8]>,
    },
    /// The client repeats a refused request over a stream: read nothing more of the stream before that time, nor the bytes behind the request.
    Slow { client: Client, until_ms: u64 },
    /// Another worker answers a request, while the client remains where it is: give it the request, for
    /// [`super::Server::from_elsewhere`].
    Forward {
        /// Its number.
        worker: u16,
        /// That of the client's worker.
        via: u16,
        /// Another allocation has the client's 5-tuple, or arrives at it.
        occupied: bool,
        source: Source,
        request: Box<[u8]>,
    },
    /// The client of a forwarded request does not arrive here: give the request back, for [`super::Server::declined`].
    Decline {
        /// The number of the client's worker.
        via: u16,
        source: Source,
        request: Box<[u8]>,
    },
    /// A client does not arrive any more: its connection to its worker is closed, or the owner's allocation has ended or arrives elsewhere. Tell the
    /// other one of the two workers, by [`super::Server::move_over`].
    MoveOver {
        /// Its number.
        worker: u16,
        pending_move: PendingMove,
    },
    /// A forwarded request has deleted its client's allocation, or a part of it: tell the client's worker, which answers the request when it comes again,
    /// by [`super::Server::remember_deletions`].
    Deleted {
        /// Its number.
        via: u16,
        deletion: (u64, u64),
    },
    /// The allocation of a client that is here is another worker's: have [`super::Server::export`] called there and
    /// [`super::Server::import`] here, and then feed the datagram again. What else comes until then is dropped.
    Fetch {
        /// Which, whence and whither.
        request: MoveRequest,
        datagram: Box<[u8]>,
    },
    /// Call [`super::Server::export`], and have the other worker import it: its client waits there.
    Move(MoveRequest),
    /// What another worker forwarded is answered: have it call [`super::Server::expect`], if there is a pending move, and then send the reply.
    Answer {
        /// Its number.
        via: u16,
        source: Source,
        /// Whose allocation is on its way there.
        pending_move: Option<PendingMove>,
        /// A whole STUN message.
        reply: Box<[u8]>,
    },
    /// Ask the credential store, and answer by [`super::Server::credentials`] within 10 s: a request waits for it.
    LookUp(CredentialQuery),
    /// A session began.
    Opened {
        allocation: AllocationId,
        /// The same, wherever it moves.
        session: SessionId,
        client: Client,
        /// The way to it.
        link: Link,
        /// When it expires unless it is renewed, in [`crate::time::Now::ms`].
        expires_ms: u64,
        /// The realm of that user.
        realm: Arc<str>,
        /// The username that authenticated it.
        username: Box<str>,
        /// Relayed transport addresses, the second of a dual-stack allocation.
        relayed: (SocketAddr, Option<SocketAddr>),
    },
    /// A session lives until then, or one family of it does.
    Renewed {
        allocation: AllocationId,
        /// `None` for all of it.
        family: Option<Family>,
        /// In [`crate::time::Now::ms`].
        expires_ms: u64,
    },
    /// A permission is installed, or lives longer. It ends with its session, and with the relayed address of its family.
    Permitted {
        allocation: AllocationId,
        peer: IpAddr,
        /// In [`crate::time::Now::ms`].
        expires_ms: u64,
        /// Whether there was one.
        renewed: bool,
    },
    /// A permission has expired, or the peer rules refuse its peer by now.
    PermissionEnded { allocation: AllocationId, peer: IpAddr },
    /// A channel is bound, or lives longer. It ends as a permission does.
    Bound {
        allocation: AllocationId,
        number: ChannelNumber,
        /// As the client names it.
        peer: SocketAddr,
        /// Where it is reached: another address where the peer is a relayed transport address of ours, behind a NAT.
        at: SocketAddr,
        /// In [`crate::time::Now::ms`].
        expires_ms: u64,
        /// Whether it was.
        renewed: bool,
    },
    /// The first datagram on a channel since it was bound, or since the session came here, either way; once, and only if
    /// [`super::Server::tell_first_use`] was called. It comes with the verdict on that datagram, and may wait there until other effects
    /// are drained.
    Used { allocation: AllocationId, number: ChannelNumber },
    /// A channel has expired, the peer rules refuse its peer by now, or the peer is reached elsewhere ([`Effect::Bound`] follows).
    Unbound { allocation: AllocationId, number: ChannelNumber, peer: SocketAddr },
    /// Close all relay sockets of this allocation, and all connections; it is gone.
    Closed {
        allocation: AllocationId,
        /// The same, wherever it has been.
        session: SessionId,
        client: Client,
        /// The realm of that user.
        realm: Arc<str>,
        /// The username that authenticated it.
        username: Box<str>,
        /// Whom quotas count, where that is another name.
        identity: Option<Box<str>>,
        /// The relayed transport addresses that it had, IPv4 first; none if it ended before there were any.
        relayed: [Option<SocketAddr>; 2],
        /// Between the client and the server, where the client was last.
        transport: Transport,
        /// Between the server and peers.
        relay_transport: RelayTransport,
        reason: ClosedReason,
        /// Whether the client had gone before, so that its 5-tuple may be somebody else's by now.
        away: bool,
        /// How long it lived, in milliseconds.
        lived_ms: u64,
        /// Payload datagrams and bytes to peers.
        to_peer: (u64, u64),
        /// Payload datagrams and bytes to the client.
        to_client: (u64, u64),
    },
    /// Close the connection to this peer and, if it is bound, that to the client; give up one that is being made.
    ConnectionClosed { allocation: AllocationId, connection: ConnectionId },
    /// Give up connecting to this peer, and call [`super::Server::connected`] with [`super::ConnectError::TimedOut`].
    ConnectTimedOut { allocation: AllocationId, connection: ConnectionId },
    /// The client of a mobile allocation is somewhere else (RFC 8016).
    Moved {
        allocation: AllocationId,
        /// Its old 5-tuple. A stream that is still open has no allocation any more. `None` where the client had gone from there,
        /// so that it may be somebody else's by now.
        was: Option<Client>,
        /// Its new 5-tuple.
        client: Client,
        /// The way to it.
        link: Link,
        /// Whether that is a stream, on which ChannelData is padded (RFC 8656 section 12.5).
        padded: bool,
        /// What the allocation was called by the worker that it came from.
        from: Option<AllocationId>,
    },
    /// A session goes on elsewhere, with all that it has: [`super::Server::export`].
    Exported {
        /// What it was called here.
        allocation: AllocationId,
    },
    /// A session that was to go on elsewhere goes on here: [`super::Server::take_back`].
    Returned {
        /// What it is called from now on.
        allocation: AllocationId,
    },
    /// The client of a mobile allocation has closed its connection, and the allocation waits for it.
    Away { allocation: AllocationId },
    /// Close this relay socket: one family of a dual-stack allocation was deleted or has expired, the other lives on.
    RelayClosed { relay: RelayId },
    /// A credential was refused; for a log line. At most one effect per request, and the state machine bounds their
    /// rate: `suppressed` counts those since the last one that were only counted.
    Refused {
        client: Client,
        /// USERNAME as it was sent, or `(userhash)`; at most 508 bytes.
        username: Box<str>,
        why: CredentialRefusal,
        /// How many more were refused without an effect.
        suppressed: u64,
    },
    /// A request named a peer that may not be relayed to (403); for a log line. Their rate is bounded as that of
    /// [`Effect::Refused`] is.
    PeerRefused {
        client: Client,
        /// The realm of that user.
        realm: Arc<str>,
        /// The username that authenticated the request.
        username: Box<str>,
        /// The peer; port 0 where the request had none.
        peer: SocketAddr,
        /// Peers that the same request names. They get no permission either.
        others: usize,
        by: PeerDenial,
        /// How many more were refused without an effect.
        suppressed: u64,
    },
    /// A request was answered with an error, for another reason than those above. The rate of these is bounded as that of
    /// [`Effect::Refused`] is.
    RequestRefused {
        client: Client,
        /// The realm of that user; empty if it is unknown.
        realm: Arc<str>,
        /// The username that authenticated the request, or was to; empty if there is none.
        username: Box<str>,
        /// The client has proved that it is that user. If not, its address over UDP may be forged.
        proved: bool,
        method: Method,
        /// The error code of the answer; 0 for a request that got none ([`RequestRefusal::Unanswered`]).
        code: u16,
        why: RequestRefusal,
        /// How many more were refused without an effect.
        suppressed: u64,
    },
}

/// Why a request was refused, where its error code stands for several reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestRefusal {
    /// The one reason of the code.
    Code,
    /// 400: an attribute is at fault.
    BadRequest(BadRequest),
    /// 420: this attribute is unknown, or the first of several.
    UnknownAttribute(u16),
    /// 443: the allocation has no relayed address of this peer's family; port 0 where the request had none.
    PeerFamily(SocketAddr),
    /// 437: the 5-tuple has an allocation, and must have none.
    AllocationExists,
    /// The user has as many allocations as each may have.
    UserQuota,
    /// The client's address prefix has as many allocations as each may have.
    PrefixQuota,
    /// There are as many allocations as there may be, in the realm or in total.
    TotalQuota,
    /// The user, or the client's address, is banned.
    Banned,
    /// The server takes no new allocations.
    Draining,
    /// The client is behind one of our own relayed transport addresses.
    Loop,
    /// The client's address is one of 6to4 or Teredo.
    Tunnel,
    /// The allocation has as many permissions as it may have.
    Permissions,
    /// The allocation has as many channels as it may have.
    Channels,
    /// The peer is another client's on the relay socket that both have.
    SharedPeer,
    /// There are as many connections to peers as there may be.
    Connections,
    /// No port, or no descriptor, was left for the relayed transport address.
    NoRelay,
    /// The machine lacks the relay addresses of this family at the moment.
    AddressAbsent,
    /// Other programs have the ports of relayed transport addresses.
    PortsHeld,
    /// The credential store did not answer: nobody has proved who the client is.
    Store,
    /// A bound on requests is reached. There is no answer, so that the client repeats the request.
    Unanswered(DropReason),
}

/// Why an allocation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClosedReason {
    /// Refresh with LIFETIME 0.
    Deleted,
    /// Not refreshed in time.
    Expired,
    /// The server stops.
    Shutdown,
    /// An administrator ended it.
    Administrator,
    /// The client's connection was closed, and it is not mobile.
    Disconnected,
    /// It was as old as it may become.
    MaxAge,
    /// Its user or its client's address was banned.
    Banned,
    /// The time-limited credential that made it expired ([`super::ServerConfig::end_with_credential`]).
    Credential,
    /// The machine has lost its relay address.
    AddressGone,
}

/// What is wrong with an ACCESS-TOKEN (RFC 7635).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenProblem {
    /// USERNAME names no key that is configured for the realm.
    UnknownKey,
    /// No token by its lengths.
    Malformed,
    /// Made with another key or for another server name, or altered.
    NotAuthentic,
    /// Made in the future: clocks differ.
    Future {
        /// Seconds.
        ahead: u64,
    },
}

/// Why a credential was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CredentialRefusal {
    /// No such user.
    NoSuchUser,
    /// A time-limited credential that expired so many seconds ago.
    Expired {
        /// Seconds.
        ago: u64,
    },
    /// A time-limited credential that would expire so many seconds from now, which is too far ahead to be meant.
    TooFarAhead {
        /// Seconds.
        ahead: u64,
    },
    /// Wrong password or secret.
    WrongKey,
    /// An ACCESS-TOKEN that is worth nothing; one whose time is over is [`Self::Expired`].
    Token(TokenProblem),
    /// The request names another realm.
    WrongRealm,
    /// Another user than the one who made the allocation (441).
    WrongUser,
}
