//! One connection of a client: socket, TLS if there is any, what has arrived of a message and what waits to be sent.

use std::net::SocketAddr;

use turnpike_net::TcpSocket;
use turnpike_turn::server::{Client, Source, Transport};
use turnpike_wire::frame::{Framer, MAX_MESSAGE_LEN};

use super::{
    CloseReason, HandshakeFailure,
    channel::{Channel, is_nothing},
    outbox::Outbox,
};
use crate::link::{Place, Way};

/// No piece of this tick.
pub(super) const NONE: u32 = u32::MAX;

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// A PROXY header must come first.
    Proxied,
    /// The first byte decides what it is.
    Unknown,
    /// TLS shakes hands.
    Handshake,
    /// Messages pass.
    Open,
}

pub(super) struct Connection {
    pub(super) socket: TcpSocket,
    pub(super) channel: Channel,
    /// Tells it from those that had its slot before.
    pub(super) generation: u32,
    pub(super) stage: Stage,
    /// Its listener is not known before the first byte, nor its address behind a proxy before the header.
    pub(super) client: Client,
    /// Its addresses are those of a PROXY header.
    pub(super) proxied: bool,
    /// A newer connection has its 5-tuple.
    pub(super) superseded: bool,
    pub(super) framer: Framer,
    pub(super) outbox: Outbox,
    /// Pieces of this tick, first and last.
    pub(super) first: u32,
    pub(super) last: u32,
    /// Whether it is on the list of those that the end of the tick looks at.
    pub(super) touched: bool,
    /// Whether the poller tells of readability.
    pub(super) watches_readable: bool,
    /// Whether the poller tells of writability.
    pub(super) watches_writable: bool,
    /// What was read may not pass now, and nothing more is read ([`super::pause`]).
    pub(super) paused: bool,
    /// When it is closed unless something happens before; milliseconds.
    pub(super) deadline_ms: u64,
    /// Bytes that TLS was fed without an end of the handshake, or a byte of plaintext.
    pub(super) barren: usize,
    /// The client has said by TLS that nothing more will come.
    pub(super) ended: bool,
    /// Whether a complete message has ever come.
    pub(super) spoke: bool,
    pub(super) allocated: bool,
    /// Whether it has ever had an allocation: only credentials open the way for long messages.
    pub(super) trusted: bool,
    /// Its number among the connections without an allocation, or among those that wait to be one of them.
    pub(super) place: Option<u64>,
    /// Not watched: its address has too many young connections without an allocation.
    pub(super) waiting: bool,
    /// Why its TLS handshake failed, if it has.
    pub(super) failure: Option<HandshakeFailure>,
    /// The end of the tick closes it.
    pub(super) closing: Option<CloseReason>,
    /// Which of the worker's stream listeners accepted it.
    pub(super) listener: usize,
}

/// Longest message of a client without an allocation: what a request may have.
const MAX_REQUEST_LEN: usize = turnpike_turn::server::MAX_REQUEST_LEN;

/// Bytes of one read.
pub(super) const PORTION: usize = 32 << 10;
/// The same while there is no allocation: more than a request, and enough for a ClientHello.
const FIRST_PORTION: usize = 4 << 10;

impl Connection {
    /// Bytes that one read may bring. A read cannot be put back: so many, in messages as short as they may be, are the longest that
    /// all others wait.
    pub(super) fn portion(&self) -> usize {
        if self.allocated { PORTION } else { FIRST_PORTION }
    }

    pub(super) fn limit(&self) -> usize {
        if self.trusted { MAX_MESSAGE_LEN } else { MAX_REQUEST_LEN }
    }

    /// The address that limits count, known to be the client's.
    pub(super) fn address(&self) -> SocketAddr {
        self.client.address
    }

    /// As far as it has come.
    pub(super) fn transport(&self) -> Transport {
        match self.channel {
            Channel::Plain => Transport::Tcp,
            Channel::Tls(_) => Transport::Tls,
        }
    }

    /// The client of the connection in this slot, as the state machine knows it.
    pub(super) fn source(&self, slot: usize) -> Source {
        let place = Place { slot, generation: self.generation };
        Source { client: self.client, link: Way::Stream(place).link() }
    }

    /// Whether the client has closed or reset it, whatever was read of it.
    pub(super) fn has_ended(&self) -> bool {
        match self.socket.peek(&mut [0]) {
            Ok(len) => len == 0,
            Err(error) => !is_nothing(&error),
        }
    }

    /// Why it is closed when its time is over.
    pub(super) fn overdue(&self) -> CloseReason {
        match self.stage {
            Stage::Proxied => CloseReason::ProxyHeader,
            _ if self.spoke => CloseReason::Idle,
            _ => CloseReason::NoMessage,
        }
    }
}
