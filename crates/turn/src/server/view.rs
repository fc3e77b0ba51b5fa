//! Administrators' read-only access to the allocations, one slot at a time.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    AllocationId, AllocationSlot, Client, Policy, RelayTransport, Server, Transport,
    allocation_state::AllocationState, data::forwarding::ForwardingEntry,
};
use crate::time::Now;

pub struct AllocationView<'s> {
    allocation: AllocationSlot,
    entry: &'s ForwardingEntry,
    state: &'s AllocationState,
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
    pub fn view(&mut self, now: Now, slot: u32) -> Option<AllocationView<'_>> {
        let (_, entry) = self.data.forwarding.at(slot)?;
        let listener = entry.client.listener;
        let transport = self.config.listener(listener).transport;
        let (allocation, entry, state) = self.allocation(slot)?;
        state.pending.is_none().then_some(AllocationView {
            allocation,
            entry,
            state,
            transport,
            now_ms: now.ms,
        })
    }
}

impl<'s> AllocationView<'s> {
    /// ID on this worker.
    #[must_use]
    pub fn allocation(&self) -> AllocationSlot {
        self.allocation
    }

    #[must_use]
    pub fn id(&self) -> AllocationId {
        self.state.id
    }

    #[must_use]
    pub fn realm(&self) -> &'s Arc<str> {
        &self.state.realm
    }

    #[must_use]
    pub fn username(&self) -> &'s str {
        &self.state.username
    }

    /// Name that quotas use. Differs from the username for time-limited credentials and tokens.
    #[must_use]
    pub fn identity(&self) -> &'s str {
        self.state.identity()
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
        self.state.mobility.is_some()
    }

    #[must_use]
    pub fn is_away(&self) -> bool {
        self.entry.away
    }

    #[must_use]
    pub fn age_ms(&self) -> u64 {
        self.now_ms.wrapping_sub(self.state.opened_ms)
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

    /// Channel number, address by which the client knows the peer, and milliseconds until expiry.
    pub fn channels(&self) -> impl Iterator<Item = (u16, SocketAddr, u64)> + use<'s> {
        let now_ms = self.now_ms;
        let channels = self.entry.channels.iter();
        channels.map(move |it| (it.number.get(), it.name(), it.expires_ms.saturating_sub(now_ms)))
    }

    #[must_use]
    pub fn connections(&self) -> usize {
        self.state.tcp.as_ref().map_or(0, |tcp| tcp.connections())
    }

    /// Numbers of datagrams and of payload bytes.
    #[must_use]
    pub fn to_peer(&self) -> (u64, u64) {
        self.entry.to_peer
    }

    /// Numbers of datagrams and of payload bytes.
    #[must_use]
    pub fn to_client(&self) -> (u64, u64) {
        self.entry.to_client
    }
}
