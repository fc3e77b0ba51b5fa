//! A connection: its two sockets and the flow in each direction.

use turnpike_copy::CopyDirection;
use turnpike_net::TcpSocket;

use super::{
    side::StreamSide,
    talk::{JoinedConnection, Talk},
};
use crate::{Address, circles::Link, rate::Pace, state::ConnectionSlot, targets::Seat};

pub(super) struct Connection {
    pub(super) rule: usize,
    /// Set if the connection leads to another rule of this process. Declared before the target's socket, so
    /// that it is dropped before that socket's port becomes free.
    pub(super) link: Option<Box<Link>>,
    pub(super) client: TcpSocket,
    pub(super) target: Option<TcpSocket>,
    /// Direction from client to target.
    pub(super) up: CopyDirection,
    /// Direction from target to client.
    pub(super) down: CopyDirection,
    pub(super) client_address: Address,
    pub(super) target_address: Option<Address>,
    /// Seat at a target; see [`super::engine::LocalRule::sit`].
    pub(super) seat: Option<Seat>,
    /// Index of the [`super::attempt::Opening`], until connected.
    pub(super) opening: Option<u32>,
    /// Start of the connection and time of the last byte, in milliseconds.
    pub(super) began: u64,
    pub(super) active: u64,
    /// True if the client's socket is also watched for writability.
    pub(super) client_writable: bool,
    /// True if the client must not send a PROXY header and its first bytes have not been checked yet.
    pub(super) unvouched: bool,
    pub(super) keepalive_due: bool,
    pub(super) place: ConnectionSlot,
    pub(super) pace: Option<Box<Pace>>,
    pub(super) talk: Talk,
    pub(super) across: Option<Box<JoinedConnection>>,
}

impl Connection {
    /// True if a flow has passed on its end of stream.
    pub(super) fn half_done(&self) -> bool {
        self.up.is_done() || self.down.is_done()
    }

    pub(super) fn flow(&mut self, side: StreamSide) -> &mut CopyDirection {
        match side {
            StreamSide::Client => &mut self.up,
            StreamSide::Target => &mut self.down,
        }
    }
}
