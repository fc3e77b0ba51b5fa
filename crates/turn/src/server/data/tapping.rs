//! Begins and ends the capture of an allocation's datagrams, and passes them on.

use std::net::SocketAddr;

use crate::server::{
    AllocationId, AllocationSlot, Effect, Family, Policy, Server, Way,
    data::{
        forwarding::ForwardingEntry,
        tap::{Tap, TapRefusal, TappedDatagram},
    },
};

impl<P: Policy> Server<P> {
    /// Captures the datagrams of the allocation in this slot, until [`Server::untap`] or until it ends or moves to another worker.
    pub fn tap(&mut self, slot: u32, id: AllocationId, tap: Box<dyn Tap>) -> Result<(), TapRefusal> {
        let allocation = self.tapped(slot, id).ok_or(TapRefusal::Gone)?;
        let entry = self.data.forwarding.get(allocation).ok_or(TapRefusal::Gone)?;
        if entry.relays_tcp {
            return Err(TapRefusal::RelaysTcp);
        }
        let limits = entry.limits.get_or_insert_default();
        if limits.tap.is_some() {
            return Err(TapRefusal::Tapped);
        }
        limits.tap = Some(tap);
        self.data.effects.push_back(Effect::Limited { allocation });
        Ok(())
    }

    pub fn untap(&mut self, slot: u32, id: AllocationId) {
        let Some(allocation) = self.tapped(slot, id) else { return };
        let Some(entry) = self.data.forwarding.get(allocation) else { return };
        if let Some(limits) = &mut entry.limits {
            limits.tap = None;
            if !limits.is_needed() {
                entry.limits = None;
            }
            self.data.effects.push_back(Effect::Limited { allocation });
        }
    }

    /// The allocation in this slot, if it has this ID and its sockets are open.
    fn tapped(&mut self, slot: u32, id: AllocationId) -> Option<AllocationSlot> {
        let state = self.states.get(slot)?;
        let is_it = state.id == id && state.pending.is_none();
        let (allocation, _) = self.data.forwarding.at(slot).filter(|_| is_it)?;
        Some(allocation)
    }
}

impl ForwardingEntry {
    #[cold]
    #[inline(never)]
    pub(crate) fn report(&mut self, way: Way, peer: SocketAddr, header: &[u8], payload: &[u8]) {
        let relay = self.relays[Family::of(peer.ip()) as usize];
        let tap = self.limits.as_mut().and_then(|limits| limits.tap.as_mut());
        if let (Some(tap), Some(relay)) = (tap, relay) {
            let (client, relayed) = (&self.client, relay.address);
            tap.relayed(&TappedDatagram { way, client, relayed, peer, header, payload });
        }
    }
}
