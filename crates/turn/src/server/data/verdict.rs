//! Verdicts on datagrams, and the identifiers shared with the runtime.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use turnpike_wire::indication::MAX_HEADER_LEN;

use crate::server::{DropReason, Family};

/// The runtime assigns the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ListenerId(pub u16);

/// The listener implies the transport; both addresses are canonical.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Client {
    pub listener: ListenerId,
    pub address: SocketAddr,
    pub local: SocketAddr,
}

/// The runtime's handle for reaching a client, opaque to the state machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Link(pub u64);

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
pub struct AllocationSlot {
    /// Slot numbers are dense and reused, so the runtime may index arrays by them.
    pub index: u32,
    pub generation: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RelayId {
    pub allocation: AllocationSlot,
    pub family: Family,
}

/// The runtime assigns the numbers; see [`crate::server::DataPlane::claimant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SharedPort(pub u16);

/// Bytes before a payload, stored inline.
#[derive(Clone, Copy)]
pub struct Header {
    bytes: [u8; MAX_HEADER_LEN],
    len: u8,
}

impl Header {
    /// Takes the first `len` bytes; panics if `len` exceeds [`MAX_HEADER_LEN`].
    #[inline]
    #[must_use]
    pub fn new(bytes: [u8; MAX_HEADER_LEN], len: usize) -> Self {
        assert!(len <= MAX_HEADER_LEN);
        #[expect(clippy::cast_possible_truncation, reason = "checked above")]
        Self { bytes, len: len as u8 }
    }

    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

pub enum Verdict<'a> {
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
        /// Number of zero bytes after the payload, 0 to 3.
        padding: u8,
    },
    Reply {
        /// Use this listener and local address, which may differ from those of the request (RFC 5780).
        client: Client,
        link: Link,
        /// Complete STUN message, in the server's own buffer.
        bytes: &'a [u8],
    },
    /// Only for streams: stop reading, and pass the same message again at `until_ms`. A caller that cannot
    /// wait calls [`crate::server::Server::not_waited`].
    Wait {
        /// Time in [`crate::time::Now::ms`].
        until_ms: u64,
        /// Reason for the drop if the caller cannot wait.
        otherwise: DropReason,
    },
    /// Send nothing; the reason has been counted. `None` if an effect continues the request.
    Drop(Option<DropReason>),
}
