//! Sends a verdict as a UDP datagram, stream data or a DTLS record. Separate from the worker, because the
//! received bytes stay borrowed while they are sent.

use turnpike_net::{Route, Rx, SocketId, Tx};
use turnpike_turn::server::{Client, Family, Link, RelayId, Verdict, relayed_ttl};

use crate::{dtls::Associations, link::ClientLinkKind, stream::Streams};
pub(super) struct Out {
    pub(super) tx: Tx,
    /// Sockets by UDP listener number, and true for those on a wildcard address, which need a source address
    /// per datagram.
    pub(super) listeners: Vec<Option<(SocketId, bool)>>,
    /// Relay sockets for IPv4 and IPv6 by allocation index; several allocations may share one.
    pub(super) relays: Vec<[Option<SocketId>; 2]>,
    pub(super) ttl_expired: u64,
    pub(super) streams: Streams,
    pub(super) dtls: Associations,
}

impl Out {
    /// Queues the packet of a verdict; `marks` are the TOS and TTL of the datagram. Returns true if effects
    /// may follow, which is never the case for relayed data.
    #[inline]
    pub(super) fn carry_out(&mut self, rx: &Rx, (tos, ttl): (u8, u8), verdict: Verdict<'_>) -> bool {
        match verdict {
            Verdict::ToPeer { relay, peer, payload, dont_fragment } => {
                if let Some(socket) = self.relay_socket(relay)
                    && let Some(ttl) = self.next_ttl(ttl)
                {
                    let route = Route { socket, to: Some(peer), from: None, tos, ttl, dont_fragment };
                    self.tx.push(&route, &[], rx.span(payload), 0);
                }
                false
            }
            Verdict::ToClient { client, link, header, payload, padding } => {
                let header = header.as_slice();
                match ClientLinkKind::of(link) {
                    ClientLinkKind::Datagrams => {
                        if let Some(ttl) = self.next_ttl(ttl)
                            && let Some(route) = self.route_to(&client)
                        {
                            let route = Route { tos, ttl, ..route };
                            self.tx.push(&route, header, rx.span(payload), padding);
                        }
                    }
                    ClientLinkKind::Stream(place) => {
                        self.streams.relay(place, header, rx.span(payload), padding);
                    }
                    ClientLinkKind::Dtls(place) => {
                        if let Some(ttl) = self.next_ttl(ttl) {
                            let marks = (tos, ttl);
                            self.dtls.relay(place, [header, payload], padding, marks, &mut self.tx);
                        }
                    }
                }
                false
            }
            Verdict::Reply { client, link, bytes } => {
                self.reply_to(&client, link, bytes);
                true
            }
            Verdict::Wait { .. } => false,
            Verdict::Drop(_) => true,
        }
    }

    pub(super) fn reply(&mut self, verdict: Verdict<'_>) {
        if let Verdict::Reply { client, link, bytes } = verdict {
            self.reply_to(&client, link, bytes);
        }
    }

    pub(super) fn set_relay(&mut self, relay: RelayId, socket: SocketId) {
        let index = relay.allocation.index as usize;
        if self.relays.len() <= index {
            self.relays.resize(index + 1, [None; 2]);
        }
        self.relays[index][side(relay.family)] = Some(socket);
    }

    pub(super) fn reply_to(&mut self, client: &Client, link: Link, bytes: &[u8]) {
        match ClientLinkKind::of(link) {
            ClientLinkKind::Datagrams => {
                if let Some(route) = self.route_to(client) {
                    self.tx.push_bytes(&route, bytes);
                }
            }
            ClientLinkKind::Stream(place) => self.streams.reply(place, bytes),
            ClientLinkKind::Dtls(place) => self.dtls.reply(place, bytes, &mut self.tx),
        }
    }

    #[inline]
    fn route_to(&self, client: &Client) -> Option<Route> {
        let (socket, wildcard) = (*self.listeners.get(usize::from(client.listener.0))?)?;
        Some(Route {
            socket,
            to: Some(client.address),
            from: wildcard.then_some(client.local.ip()),
            tos: 0,
            ttl: 0,
            dont_fragment: false,
        })
    }

    #[inline]
    pub(super) fn relay_socket(&self, relay: RelayId) -> Option<SocketId> {
        self.relays.get(relay.allocation.index as usize).and_then(|pair| pair[side(relay.family)])
    }

    /// TTL for the relayed datagram. If the TTL expires here, counts that and returns `None`.
    #[inline]
    fn next_ttl(&mut self, received: u8) -> Option<u8> {
        let ttl = relayed_ttl(received);
        self.ttl_expired += u64::from(ttl.is_none());
        ttl
    }
}

pub(super) fn side(family: Family) -> usize {
    match family {
        Family::V4 => 0,
        Family::V6 => 1,
    }
}
