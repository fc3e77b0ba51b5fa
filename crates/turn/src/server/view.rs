//! Allocations as an administrator sees them: named for as long as they live, and looked at one slot at a time. Looking changes nothing, and
//! no packet pays for it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    AllocationId, Client, Policy, RelayTransport, Server, SessionId, Transport, data::forwarding::Entry,
    session::Session,
};
use crate::time::Now;

/// One allocation, with its relay sockets.
pub struct SessionView<'s> {
    allocation: AllocationId,
    entry: &'s Entry,
    session: &'s Session,
    transport: Transport,
    now_ms: u64,
}

impl<P: Policy> Server<P> {
    /// Every allocation is in one of these slots, counted from 0, and stays in it until it ends or moves to another worker.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.data.forwarding.indices().end
    }

    /// The allocation in a slot. `None` if the slot is free, or its relay sockets are being opened.
    #[must_use]
    pub fn view(&mut self, now: Now, slot: u32) -> Option<SessionView<'_>> {
        let (_, entry) = self.data.forwarding.at(slot)?;
        let listener = entry.client.listener;
        let transport = self.config.listener(listener).transport;
        let (allocation, entry, session) = self.allocation(slot)?;
        session.pending.is_none().then_some(SessionView {
            allocation,
            entry,
            session,
            transport,
            now_ms: now.ms,
        })
    }
}

impl<'s> SessionView<'s> {
    /// What this worker calls it.
    #[must_use]
    pub fn allocation(&self) -> AllocationId {
        self.allocation
    }

    /// What everybody else calls it.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.session.id
    }

    /// Where its user is known.
    #[must_use]
    pub fn realm(&self) -> &'s Arc<str> {
        &self.session.realm
    }

    /// The username that authenticated it.
    #[must_use]
    pub fn username(&self) -> &'s str {
        &self.session.username
    }

    /// Whom quotas count: the same name, but for credentials that hold for a time and for tokens.
    #[must_use]
    pub fn identity(&self) -> &'s str {
        self.session.identity()
    }

    /// Its client's 5-tuple.
    #[must_use]
    pub fn client(&self) -> Client {
        self.entry.client
    }

    /// Between the client and the server.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Between the server and peers.
    #[must_use]
    pub fn relay_transport(&self) -> RelayTransport {
        if self.entry.relays_tcp { RelayTransport::Tcp } else { RelayTransport::Udp }
    }

    /// Whether it follows its client to another address (RFC 8016).
    #[must_use]
    pub fn is_mobile(&self) -> bool {
        self.session.mobility.is_some()
    }

    /// Whether its client has gone, and may come back.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.entry.away
    }

    /// For how many milliseconds it exists.
    #[must_use]
    pub fn age_ms(&self) -> u64 {
        self.now_ms.wrapping_sub(self.session.opened_ms)
    }

    /// Its relayed transport addresses, IPv4 first, and for how many milliseconds more unless they are renewed.
    pub fn relayed(&self) -> impl Iterator<Item = (SocketAddr, u64)> + use<'s> {
        let now_ms = self.now_ms;
        let relays = self.entry.relays.iter().flatten();
        relays.map(move |relay| (relay.address, relay.expires_ms.saturating_sub(now_ms)))
    }

    /// Peers that may send to it, and for how many milliseconds more.
    pub fn permissions(&self) -> impl Iterator<Item = (IpAddr, u64)> + use<'s> {
        let now_ms = self.now_ms;
        self.entry.permissions.iter().map(move |(ip, until)| (ip, until.saturating_sub(now_ms)))
    }

    /// Channels with their peers as the client names them, and for how many milliseconds more.
    pub fn channels(&self) -> impl Iterator<Item = (u16, SocketAddr, u64)> + use<'s> {
        let now_ms = self.now_ms;
        let channels = self.entry.channels.iter();
        channels.map(move |it| (it.number.get(), it.name(), it.expires_ms.saturating_sub(now_ms)))
    }

    /// Connections to peers (RFC 6062).
    #[must_use]
    pub fn connections(&self) -> usize {
        self.session.tcp.as_ref().map_or(0, |tcp| tcp.connections())
    }

    /// Payload datagrams and bytes to peers.
    #[must_use]
    pub fn to_peer(&self) -> (u64, u64) {
        self.entry.to_peer
    }

    /// Payload datagrams and bytes to the client.
    #[must_use]
    pub fn to_client(&self) -> (u64, u64) {
        self.entry.to_client
    }
}
