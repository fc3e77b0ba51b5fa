//! A client's connection: socket, TLS, partially received message and outgoing queue.

use std::net::SocketAddr;

use turnpike_net::TcpSocket;
use turnpike_turn::server::{Client, Source, Transport};
use turnpike_wire::frame::{Framer, MAX_MESSAGE_LEN};

use super::{
    CloseReason, HandshakeFailure,
    channel::{Channel, is_nothing},
    outbox::Outbox,
};
use crate::link::{ClientLinkKind, LinkSlot};

pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionStage {
    Proxied,
    /// Not known until the first byte, which shows whether the client uses TLS.
    Unknown,
    Handshake,
    Open,
}

pub(super) struct Connection {
    pub(super) socket: TcpSocket,
    pub(super) channel: Channel,
    pub(super) generation: u32,
    pub(super) stage: ConnectionStage,
    /// The listener number is final after the first byte, and a proxied client's address after the header.
    pub(super) client: Client,
    pub(super) proxied: bool,
    /// True if a newer connection has the same 5-tuple.
    pub(super) superseded: bool,
    pub(super) framer: Framer,
    pub(super) outbox: Outbox,
    pub(super) first: u32,
    pub(super) last: u32,
    pub(super) touched: bool,
    pub(super) watches_readable: bool,
    pub(super) watches_writable: bool,
    /// True if the socket is not read, because the next message has to wait ([`super::pause`]).
    pub(super) paused: bool,
    pub(super) deadline_ms: u64,
    /// TLS bytes since the last plaintext, or since the start of the handshake.
    pub(super) barren: usize,
    pub(super) ended: bool,
    pub(super) spoke: bool,
    pub(super) allocated: bool,
    /// True if the client has had an allocation; only such clients may send long messages.
    pub(super) trusted: bool,
    /// Entry number in the list of connections without an allocation, or in the list of waiting connections.
    pub(super) place: Option<u64>,
    /// True if the connection is not polled, because its address has too many recent connections without an
    /// allocation.
    pub(super) waiting: bool,
    pub(super) failure: Option<HandshakeFailure>,
    pub(super) closing: Option<CloseReason>,
    pub(super) listener: usize,
}

/// Maximum length of a message from a client without an allocation, which can only be a request.
const MAX_REQUEST_LEN: usize = turnpike_turn::server::MAX_REQUEST_LEN;

pub(super) const PORTION: usize = 32 << 10;
/// Bytes per read from a client without an allocation: more than a request, and enough for a ClientHello.
const FIRST_PORTION: usize = 4 << 10;

impl Connection {
    /// Maximum bytes of one read. It also limits how long all other clients wait, because everything that was
    /// read is handled, even if it consists of the shortest possible messages.
    pub(super) fn portion(&self) -> usize {
        if self.allocated { PORTION } else { FIRST_PORTION }
    }

    pub(super) fn limit(&self) -> usize {
        if self.trusted { MAX_MESSAGE_LEN } else { MAX_REQUEST_LEN }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.client.address
    }

    pub(super) fn transport(&self) -> Transport {
        match self.channel {
            Channel::Plain => Transport::Tcp,
            Channel::Tls(_) => Transport::Tls,
        }
    }

    pub(super) fn source(&self, slot: usize) -> Source {
        let place = LinkSlot { slot, generation: self.generation };
        Source { client: self.client, link: ClientLinkKind::Stream(place).link() }
    }

    /// Returns true if the client has closed or reset the connection, even if there is unread data.
    pub(super) fn has_ended(&self) -> bool {
        match self.socket.peek(&mut [0]) {
            Ok(len) => len == 0,
            Err(error) => !is_nothing(&error),
        }
    }

    pub(super) fn overdue(&self) -> CloseReason {
        match self.stage {
            ConnectionStage::Proxied => CloseReason::ProxyHeader,
            _ if self.spoke => CloseReason::Idle,
            _ => CloseReason::NoMessage,
        }
    }
}
