//! What the state machine answers: verdicts on datagrams and effects on the world.

use std::{net::SocketAddr, sync::Arc};

use turnpike_wire::indication::MAX_HEADER_LEN;

use super::{ConnectRequest, ConnectionId, DropReason, MoveRequest, PeerDenial, Transport};

/// A client-facing socket of this worker, numbered by the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(pub u16);

/// The client's half of a 5-tuple as this worker sees it: which listener, which client address, which of our
/// addresses it used. The transport is the listener's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Client {
    /// The socket it came in on.
    pub listener: ListenerId,
    /// The client's address, canonical.
    pub address: SocketAddr,
    /// Our address that it was sent to, canonical.
    pub local: SocketAddr,
}

/// An allocation of this worker: a slab index with a generation, so that a stale one finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllocationId {
    /// Dense, reused: the runtime may index arrays by it.
    pub index: u32,
    /// Differs each time the index is reused.
    pub generation: u32,
}

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// One relayed transport address: an allocation has one, or one of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RelayId {
    /// Whose.
    pub allocation: AllocationId,
    /// Which.
    pub family: Family,
}

/// Bytes that stand before a payload, held inline.
#[derive(Clone, Copy)]
pub struct Header {
    bytes: [u8; MAX_HEADER_LEN],
    len: u8,
}

impl Header {
    /// Takes the first `len` of `bytes`.
    ///
    /// # Panics
    /// When `len` exceeds [`MAX_HEADER_LEN`].
    #[must_use]
    pub fn new(bytes: [u8; MAX_HEADER_LEN], len: usize) -> Self {
        assert!(len <= MAX_HEADER_LEN);
        #[expect(clippy::cast_possible_truncation, reason = "checked above")]
        Self { bytes, len: len as u8 }
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// What is to be done about one datagram.
pub enum Verdict<'a> {
    /// Send `payload` to `peer` from the relayed transport address `relay`.
    ToPeer {
        /// The relay socket to send from.
        relay: RelayId,
        /// The peer.
        peer: SocketAddr,
        /// A part of the datagram that was fed in.
        payload: &'a [u8],
        /// Whether the client asked for DF.
        dont_fragment: bool,
    },
    /// Send `header ++ payload ++ padding zero bytes` to `client`.
    ToClient {
        /// The client.
        client: Client,
        /// ChannelData or Data indication header.
        header: Header,
        /// A part of the datagram that was fed in.
        payload: &'a [u8],
        /// Zero bytes after the payload, 0 to 3.
        padding: u8,
    },
    /// Send these bytes to `client`.
    Reply {
        /// The client. Its listener and our address may be others than those that its request came in on (RFC 5780): what
        /// counts is what stands here.
        client: Client,
        /// A whole STUN message, in the server's own buffer.
        bytes: &'a [u8],
    },
    /// Open relay sockets and call [`super::Server::opened`], which has the reply.
    Open(OpenRequest),
    /// Connect to a peer (RFC 6062) and call [`super::Server::connected`], which has the reply.
    Connect(ConnectRequest),
    /// Send these bytes to `client`; from then on its connection is the data connection of `connection` (RFC 6062 section
    /// 5.4). What the client sent after the request is the first of its data, and no message.
    Bind {
        /// The connection to the peer.
        connection: ConnectionId,
        /// The client, whose 5-tuple is no control connection any more.
        client: Client,
        /// A whole STUN message, in the server's own buffer.
        bytes: &'a [u8],
    },
    /// The client's stream is this worker's business: give it the connection and the request, for
    /// [`super::Server::from_handed_over`].
    HandOver {
        /// Its number.
        worker: u16,
    },
    /// The request is this worker's business, while the client remains here: give it the request, for
    /// [`super::Server::from_elsewhere`].
    Forward {
        /// Its number.
        worker: u16,
    },
    /// The allocation of this client is another worker's and must come here: have [`super::Server::export`] called there
    /// and [`super::Server::import`] here. Then the datagram may be fed again; what else comes until then is dropped.
    Move(MoveRequest),
    /// Nothing to send; the reason has been counted.
    Drop(DropReason),
}

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
    pub port: PortWish,
}

/// The transport between the server and peers (REQUESTED-TRANSPORT).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RelayTransport {
    /// Datagrams.
    Udp,
    /// Connections (RFC 6062): the relay socket listens, and connections to peers come from its address.
    Tcp,
}

/// Which port a relay socket shall have (RFC 8656 section 7.2 steps 6 to 8, 18.5, 18.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortWish {
    /// Any of the range.
    Any,
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
    /// No relay address of this family is configured: 440.
    UnsupportedFamily,
    /// No free port, unknown or expired reservation, no file descriptors: 508.
    NoCapacity,
}

/// Something to do that is no answer to a datagram. Drain [`super::Server::poll_effect`] after each call.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Effect {
    /// A session began; for its log line.
    Opened {
        /// Which.
        allocation: AllocationId,
        /// Whose.
        client: Client,
        /// The realm of that user.
        realm: Arc<str>,
        /// The username that authenticated it.
        username: Box<str>,
        /// Relayed transport addresses, the second of a dual-stack allocation.
        relayed: (SocketAddr, Option<SocketAddr>),
    },
    /// Close all relay sockets of this allocation, and all connections; it is gone.
    Closed {
        /// Which.
        allocation: AllocationId,
        /// Whose.
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
        /// Why.
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
    ConnectionClosed {
        /// Whose.
        allocation: AllocationId,
        /// Which.
        connection: ConnectionId,
    },
    /// Give up connecting to this peer, and call [`super::Server::connected`] with [`super::ConnectError::TimedOut`].
    ConnectTimedOut {
        /// Whose.
        allocation: AllocationId,
        /// Which.
        connection: ConnectionId,
    },
    /// The client of a mobile allocation is somewhere else (RFC 8016).
    Moved {
        /// Which.
        allocation: AllocationId,
        /// Its old 5-tuple. A stream that is still open has no allocation any more. `None` where the client had gone from there,
        /// so that it may be somebody else's by now.
        was: Option<Client>,
        /// Its new 5-tuple.
        client: Client,
        /// What the allocation was called by the worker that it came from.
        from: Option<AllocationId>,
    },
    /// Call [`super::Server::export`], and have the other worker import it: its client waits there.
    Move(MoveRequest),
    /// Close this relay socket: one family of a dual-stack allocation was deleted or has expired, the other lives on.
    RelayClosed {
        /// Which.
        relay: RelayId,
    },
    /// A credential was refused; for a log line. At most one effect per request, and the state machine bounds their
    /// rate: `suppressed` counts those since the last one that were only counted.
    Refused {
        /// Who tried.
        client: Client,
        /// The username, cut to 64 characters and free of control characters.
        username: Box<str>,
        /// Why.
        why: CredentialRefusal,
        /// How many more were refused without an effect.
        suppressed: u64,
    },
    /// A request named a peer that may not be relayed to (403); for a log line. Their rate is bounded as that of
    /// [`Effect::Refused`] is.
    PeerRefused {
        /// Who asked.
        client: Client,
        /// The realm of that user.
        realm: Arc<str>,
        /// The username that authenticated the request.
        username: Box<str>,
        /// The peer; port 0 where the request had none.
        peer: SocketAddr,
        /// By what.
        by: PeerDenial,
        /// How many more were refused without an effect.
        suppressed: u64,
    },
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
    /// Wrong password or secret.
    WrongKey,
    /// An ACCESS-TOKEN that is worth nothing; one whose time is over is [`Self::Expired`].
    Token(TokenProblem),
    /// The request names another realm.
    WrongRealm,
    /// Another user than the one who made the allocation (441).
    WrongUser,
}
