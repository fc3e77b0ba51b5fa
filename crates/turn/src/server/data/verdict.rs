//! What becomes of a datagram, and the names by which the runtime and the state machine speak of sockets, clients and relays. What is to
//! be done beyond sending something is an [`crate::server::Effect`].

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use turnpike_wire::indication::MAX_HEADER_LEN;

use crate::server::{DropReason, Family};

/// A client-facing socket of this worker, numbered by the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ListenerId(pub u16);

/// The client's half of a 5-tuple as this worker sees it: which listener, which client address, which of our
/// addresses it used. The transport is the listener's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Client {
    /// The socket it came in on.
    pub listener: ListenerId,
    /// The client's address, canonical.
    pub address: SocketAddr,
    /// Our address that it was sent to, canonical.
    pub local: SocketAddr,
}

/// The runtime's own name for the way to a client: a connection of its, say. It means nothing here; it comes with what a client sends, is
/// kept with the allocation, and stands in every verdict that goes to the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Link(pub u64);

/// Where a datagram came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The 5-tuple, which tells clients apart.
    pub client: Client,
    /// The way back.
    pub link: Link,
}

impl From<Client> for Source {
    /// Of a client to which the 5-tuple is way enough.
    fn from(client: Client) -> Self {
        Self { client, link: Link::default() }
    }
}

/// An allocation of this worker: a slab index with a generation, so that a stale one finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AllocationId {
    /// Dense, reused: the runtime may index arrays by it.
    pub index: u32,
    /// Differs each time the index is reused.
    pub generation: u32,
}

/// One relayed transport address: an allocation has one, or one of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RelayId {
    /// Whose.
    pub allocation: AllocationId,
    /// Which.
    pub family: Family,
}

/// A relay socket that several allocations of this worker share, numbered by the runtime: [`crate::server::DataPlane::claimant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SharedPort(pub u16);

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
        /// The way to it.
        link: Link,
        /// ChannelData or Data indication header.
        header: Header,
        /// A part of the datagram that was fed in.
        payload: &'a [u8],
        /// Zero bytes after the payload, 0 to 3: what an attribute needs, and ChannelData on a stream (RFC 8656 section 12.5).
        padding: u8,
    },
    /// Send these bytes to `client`.
    Reply {
        /// The client. Its listener and our address may be others than those that its request came in on (RFC 5780): what
        /// counts is what stands here.
        client: Client,
        /// The way to it.
        link: Link,
        /// A whole STUN message, in the server's own buffer.
        bytes: &'a [u8],
    },
    /// From a client's stream, and beyond a limit of bits per second, or undecided by the fleet: feed it again then, and read nothing from the
    /// stream until that is done. Never of datagrams. A caller that cannot wait calls [`crate::server::Server::not_waited`].
    Wait {
        /// When, in [`crate::time::Now::ms`].
        until_ms: u64,
        /// Why it is dropped if it cannot wait.
        otherwise: DropReason,
    },
    /// Nothing to send; the reason has been counted. `None` where an effect goes on with it.
    Drop(Option<DropReason>),
}
