//! Verdict on a datagram, and the identifiers of sockets, clients and relays shared with the runtime. Other
//! work for the runtime is an [`crate::server::Effect`].

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use turnpike_wire::indication::MAX_HEADER_LEN;

use crate::server::{DropReason, Family};

/// Client-facing socket of this worker, numbered by the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ListenerId(pub u16);

/// Client's 5-tuple as seen by this worker. The transport is the listener's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Client {
    pub listener: ListenerId,
    /// Client's address, canonical.
    pub address: SocketAddr,
    /// Local address that the client uses, canonical.
    pub local: SocketAddr,
}

/// The runtime's handle for reaching a client, such as a connection. The state machine stores it with the
/// allocation and returns it in every verdict for the client without interpreting it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Link(pub u64);

/// Origin of a client's datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    pub client: Client,
    pub link: Link,
}

impl From<Client> for Source {
    fn from(client: Client) -> Self {
        Self { client, link: Link::default() }
    }
}

/// Allocation of this worker: a slot index with a generation, so that stale IDs find nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AllocationId {
    /// Dense and reused; the runtime may index arrays by it.
    pub index: u32,
    /// Incremented when the index is reused.
    pub generation: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RelayId {
    pub allocation: AllocationId,
    pub family: Family,
}

/// Relay socket shared by several allocations of this worker, numbered by the runtime; see
/// [`crate::server::DataPlane::claimant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SharedPort(pub u16);

/// Bytes before a payload, stored inline.
#[derive(Clone, Copy)]
pub struct Header {
    bytes: [u8; MAX_HEADER_LEN],
    len: u8,
}

impl Header {
    /// Takes the first `len` bytes.
    ///
    /// # Panics If `len` exceeds [`MAX_HEADER_LEN`].
    #[must_use]
    pub fn new(bytes: [u8; MAX_HEADER_LEN], len: usize) -> Self {
        assert!(len <= MAX_HEADER_LEN);
        #[expect(clippy::cast_possible_truncation, reason = "checked above")]
        Self { bytes, len: len as u8 }
    }

    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// Action for one datagram.
pub enum Verdict<'a> {
    /// Send `payload` to `peer` from the relayed transport address `relay`.
    ToPeer {
        relay: RelayId,
        peer: SocketAddr,
        /// Part of the datagram passed in.
        payload: &'a [u8],
        /// The client asked for DF.
        dont_fragment: bool,
    },
    /// Send `header ++ payload ++ padding zero bytes` to `client`.
    ToClient {
        client: Client,
        link: Link,
        header: Header,
        /// Part of the datagram passed in.
        payload: &'a [u8],
        /// Number of zero bytes after the payload, 0 to 3, for an attribute or for ChannelData on a stream
        /// (RFC 8656 section 12.5).
        padding: u8,
    },
    /// Send these bytes to `client`.
    Reply {
        /// Use this listener and local address, which may differ from those of the request (RFC 5780).
        client: Client,
        link: Link,
        /// Complete STUN message, in the server's own buffer.
        bytes: &'a [u8],
    },
    /// For streams only: the client is above a bandwidth limit, or the fleet has not decided yet. Read
    /// nothing more from the stream and feed the message again at `until_ms`. A caller that cannot wait calls
    /// [`crate::server::Server::not_waited`].
    Wait {
        /// In [`crate::time::Now::ms`].
        until_ms: u64,
        /// Reason for the drop if the caller cannot wait.
        otherwise: DropReason,
    },
    /// Send nothing; the reason has been counted. `None` if an effect continues the request.
    Drop(Option<DropReason>),
}
