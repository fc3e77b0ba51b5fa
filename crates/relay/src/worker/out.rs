//! What becomes of a verdict: a datagram of a UDP socket, a piece of a stream, a DTLS record, or an errand for the worker. Separate
//! from the worker, because it is borrowed while what was received still is.

use turnpike_net::{Buffer, Route, Rx, SocketId, Tx};
use turnpike_turn::server::{
    AllocationId, Client, ConnectRequest, ConnectionId, Family, MoveRequest, OpenRequest, RelayId, Verdict,
};

use crate::{dtls::Associations, stream::Streams};

/// What a verdict asks for beyond sending something.
pub(super) enum Errand {
    Open(OpenRequest),
    Connect(ConnectRequest),
    /// The client's stream becomes the data connection of this one; the reply is queued.
    Bind(ConnectionId),
    HandOver(u16),
    Forward(u16),
    Move(MoveRequest),
}

impl Errand {
    /// Whether the request goes elsewhere, or something may have come behind it.
    pub(super) fn wants_bytes(&self) -> bool {
        matches!(self, Self::Bind(_) | Self::HandOver(_) | Self::Forward(_) | Self::Move(_))
    }
}

/// What a verdict needs to become a datagram.
pub(super) struct Out {
    pub(super) tx: Tx,
    /// Socket and, for a wildcard listener, whether the source address must be named; by listener.
    pub(super) listeners: Vec<(SocketId, bool)>,
    /// Relay sockets by allocation index, IPv4 and IPv6.
    pub(super) relays: Vec<[Option<SocketId>; 2]>,
    pub(super) ttl_expired: u64,
    pub(super) streams: Streams,
    pub(super) dtls: Associations,
}

impl Out {
    /// Queues what a verdict says; what is more than that is handed back.
    #[inline]
    pub(super) fn carry_out(&mut self, rx: &Rx, buffer: &Buffer<'_>, verdict: Verdict<'_>) -> Option<Errand> {
        match verdict {
            Verdict::ToPeer { relay, peer, payload, dont_fragment } => {
                let (Some(socket), Some(ttl)) = (self.relay_socket(relay), self.next_ttl(buffer)) else {
                    return None;
                };
                let route = Route { socket, to: Some(peer), from: None, tos: buffer.tos, ttl, dont_fragment };
                self.tx.push(&route, &[], rx.span(payload), 0);
                None
            }
            Verdict::ToClient { client, header, payload, padding } if !self.is_plain(&client) => {
                if self.streams.has(&client) {
                    self.streams.relay(&client, header.as_slice(), rx.span(payload));
                } else {
                    let ttl = self.next_ttl(buffer)?;
                    let message = [header.as_slice(), payload];
                    self.dtls.relay(&client, message, padding, (buffer.tos, ttl), &mut self.tx);
                }
                None
            }
            Verdict::ToClient { client, header, payload, padding } => {
                let ttl = self.next_ttl(buffer)?;
                let route = Route { tos: buffer.tos, ttl, ..self.route_to(client) };
                self.tx.push(&route, header.as_slice(), rx.span(payload), padding);
                None
            }
            verdict => self.answer(verdict),
        }
    }

    /// The same for verdicts on requests, which relay nothing.
    pub(super) fn answer(&mut self, verdict: Verdict<'_>) -> Option<Errand> {
        match verdict {
            Verdict::Reply { client, bytes } => {
                self.reply_to(client, bytes);
                None
            }
            Verdict::Bind { connection, client, bytes } => {
                self.reply_to(client, bytes);
                Some(Errand::Bind(connection))
            }
            Verdict::Open(request) => Some(Errand::Open(request)),
            Verdict::Connect(request) => Some(Errand::Connect(request)),
            Verdict::HandOver { worker } => Some(Errand::HandOver(worker)),
            Verdict::Forward { worker } => Some(Errand::Forward(worker)),
            Verdict::Move(request) => Some(Errand::Move(request)),
            Verdict::ToPeer { .. } | Verdict::ToClient { .. } | Verdict::Drop(_) => None,
        }
    }

    /// Queues a verdict that can be nothing but a reply.
    pub(super) fn reply(&mut self, verdict: Verdict<'_>) {
        if let Verdict::Reply { client, bytes } = verdict {
            self.reply_to(client, bytes);
        }
    }

    pub(super) fn set_relay(&mut self, allocation: AllocationId, family: Family, socket: SocketId) {
        let index = allocation.index as usize;
        if self.relays.len() <= index {
            self.relays.resize(index + 1, [None; 2]);
        }
        self.relays[index][side(family)] = Some(socket);
    }

    pub(super) fn reply_to(&mut self, client: Client, bytes: &[u8]) {
        if self.is_plain(&client) {
            self.tx.push_bytes(&self.route_to(client), bytes);
        } else if self.streams.has(&client) {
            self.streams.reply(&client, bytes);
        } else {
            self.dtls.reply(&client, bytes, &mut self.tx);
        }
    }

    /// Whether this client sends plain UDP: the numbers of its listeners are the first ([`Layout`]).
    #[inline]
    pub(super) fn is_plain(&self, client: &Client) -> bool {
        usize::from(client.listener.0) < self.listeners.len()
    }

    #[inline]
    pub(super) fn route_to(&self, client: Client) -> Route {
        let (socket, wildcard) = self.listeners[usize::from(client.listener.0)];
        Route {
            socket,
            to: Some(client.address),
            from: wildcard.then_some(client.local.ip()),
            tos: 0,
            ttl: 0,
            dont_fragment: false,
        }
    }

    #[inline]
    pub(super) fn relay_socket(&self, relay: RelayId) -> Option<SocketId> {
        self.relays.get(relay.allocation.index as usize).and_then(|pair| pair[side(relay.family)])
    }

    /// One less than what came in (RFC 8656 section 15.1); 0, the socket's default, where that is not known. A relay
    /// that is led to send to itself ends by this.
    #[inline]
    pub(super) fn next_ttl(&mut self, buffer: &Buffer<'_>) -> Option<u8> {
        if buffer.ttl == 1 {
            self.ttl_expired += 1;
            return None;
        }
        Some(buffer.ttl.saturating_sub(1))
    }
}

pub(super) fn side(family: Family) -> usize {
    match family {
        Family::V4 => 0,
        Family::V6 => 1,
    }
}
