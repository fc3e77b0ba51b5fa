//! Administrators' read-only access to the sessions, one slot at a time.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    AllocationId, Client, Policy, RelayTransport, Server, SessionId, Transport, data::forwarding::Entry,
    session::Session,
};
use crate::time::Now;

pub struct SessionView<'s> {
    allocation: AllocationId,
    entry: &'s Entry,
    session: &'s Session,
    transport: Transport,
    now_ms: u64,
}

impl<P: Policy> Server<P> {
    /// Number of slots. An allocation keeps its slot until it ends or moves to another worker.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.data.forwarding.indices().end
    }

    /// Allocation in a slot; `None` if the slot is free or its relay sockets are still opening.
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
    /// ID on this worker.
    #[must_use]
    pub fn allocation(&self) -> AllocationId {
        self.allocation
    }

    #[must_use]
    pub fn id(&self) -> SessionId {
        self.session.id
    }

    #[must_use]
    pub fn realm(&self) -> &'s Arc<str> {
        &self.session.realm
    }

    #[must_use]
    pub fn username(&self) -> &'s str {
        &self.session.username
    }

    /// Differs from the username for time-limited credentials and tokens.
    #[must_use]
    pub fn identity(&self) -> &'s str {
        self.session.identity()
    }

    #[must_use]
    pub fn client(&self) -> Client {
        self.entry.client
    }

    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    #[must_use]
    pub fn relay_transport(&self) -> RelayTransport {
        if self.entry.relays_tcp { RelayTransport::Tcp } else { RelayTransport::Udp }
    }

    #[must_use]
    pub fn is_mobile(&self) -> bool {
        self.session.mobility.is_some()
    }

    #[must_use]
    pub fn is_away(&self) -> bool {
        self.entry.away
    }

    #[must_use]
    pub fn age_ms(&self) -> u64 {
        self.now_ms.wrapping_sub(self.session.opened_ms)
    }

    /// IPv4 first, with milliseconds until expiry.
    pub fn relayed(&self) -> impl Iterator<Item = (SocketAddr, u64)> + use<'s> {
        let now_ms = self.now_ms;
        let relays = self.entry.relays.iter().flatten();
        relays.map(move |relay| (relay.address, relay.expires_ms.saturating_sub(now_ms)))
    }

    /// Peers with milliseconds until expiry.
    pub fn permissions(&self) -> impl Iterator<Item = (IpAddr, u64)> + use<'s> {
        let now_ms = self.now_ms;
        self.entry.permissions.iter().map(move |(ip, until)| (ip, until.saturating_sub(now_ms)))
    }

    /// The client's name for the peer, and milliseconds until expiry.
    pub fn channels(&self) -> impl Iterator<Item = (u16, SocketAddr, u64)> + use<'s> {
        let now_ms = self.now_ms;
        let channels = self.entry.channels.iter();
        channels.map(move |it| (it.number.get(), it.name(), it.expires_ms.saturating_sub(now_ms)))
    }

    #[must_use]
    pub fn connections(&self) -> usize {
        self.session.tcp.as_ref().map_or(0, |tcp| tcp.connections())
    }

    /// Payload datagrams and bytes.
    #[must_use]
    pub fn to_peer(&self) -> (u64, u64) {
        self.entry.to_peer
    }

    /// Payload datagrams and bytes.
    #[must_use]
    pub fn to_client(&self) -> (u64, u64) {
        self.entry.to_client
    }
}
