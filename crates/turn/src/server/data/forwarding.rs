//! The forwarding table: the state needed for each packet, stored as plain data.
//!
//! ```text
//!  client 5-tuple, channel or permission ──▶ relayed address, peer        ChannelData, Send indications
//!  relayed address, peer ──▶ client 5-tuple, channel                      datagrams and ICMP errors from peers
//! ```
//!
//! A relayed address belongs to one allocation, or several share it and the peer's address selects one
//! (`claims`).
//!
//! Entries are in dense slots with generations, found by 5-tuple through a seeded hash table of slot numbers.
//! The control plane installs them, changes them only through effects ([`Forwarding::apply`]), and reads back
//! expiries and counters.

mod channels;
mod claims;
mod permissions;

use std::{
    hash::{BuildHasher as _, Hasher as _},
    net::{IpAddr, SocketAddr},
    ops::Range,
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use smallvec::SmallVec;
use turnpike_wire::channel_data::ChannelNumber;

use crate::server::{
    AllocationSlot, Client, Effect, Family, Link, ListenerId, RelayId, SharedPort,
    data::{bandwidth::Limited, timers::Timers},
};
pub(crate) use channels::{BindError, Channel, Channels};
use claims::Claims;
pub(crate) use permissions::Permissions;

/// Up to this length, a linear scan is faster than a binary search.
const FEW: usize = 8;

/// TTL to send with. `None` if the datagram must be dropped (RFC 8656 section 15.1); otherwise it could loop
/// between relays forever. 0 means unknown and selects the socket's default (section 15.2).
#[inline]
#[must_use]
pub const fn relayed_ttl(received: u8) -> Option<u8> {
    if received == 1 { None } else { Some(received.saturating_sub(1)) }
}

pub(crate) struct ForwardingEntry {
    pub(crate) client: Client,
    /// The runtime's handle for the link to the client.
    pub(crate) link: Link,
    /// Mask for the padding of ChannelData: 3 for a client on a stream, otherwise 0 (RFC 8656 section 12.5).
    pub(crate) padding: u8,
    pub(crate) relays_tcp: bool,
    /// The client connection closed; another client may already use the 5-tuple.
    pub(crate) away: bool,
    pub(crate) relays: [Option<Relay>; 2],
    pub(crate) shared: [Option<SharedPort>; 2],
    pub(crate) channels: Channels,
    pub(crate) permissions: Permissions,
    pub(crate) to_peer: (u64, u64),
    pub(crate) to_client: (u64, u64),
    /// Present if there are bandwidth limits.
    pub(crate) limits: Option<Box<Limited>>,
}

#[derive(Clone, Copy)]
pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    pub(crate) expires_ms: u64,
}

pub(crate) enum Binding {
    Permission(IpAddr, u64),
    Channel(Channel),
}

impl Binding {
    pub(crate) fn expires_ms(&self) -> u64 {
        let (Self::Permission(_, expires_ms) | Self::Channel(Channel { expires_ms, .. })) = self;
        *expires_ms
    }

    pub(crate) fn named(&self) -> IpAddr {
        let (Self::Permission(ip, _) | Self::Channel(Channel { named: ip, .. })) = self;
        *ip
    }
}

impl ForwardingEntry {
    pub(crate) fn new(client: Client, link: Link, padded: bool, relays_tcp: bool) -> Self {
        Self {
            client,
            link,
            padding: padding_mask(padded),
            relays_tcp,
            away: false,
            relays: [None; 2],
            shared: [None; 2],
            channels: Channels::default(),
            permissions: Permissions::default(),
            to_peer: (0, 0),
            to_client: (0, 0),
            limits: None,
        }
    }

    pub(crate) fn is_by_stream(&self) -> bool {
        self.padding != 0
    }

    #[inline]
    pub(crate) fn has(&self, family: Family) -> bool {
        self.relays[family as usize].is_some()
    }

    pub(crate) fn permit(&mut self, ip: IpAddr, expires_ms: u64) {
        self.permissions.insert(ip, expires_ms);
        self.channels.permit(ip, expires_ms);
    }

    /// Peers whose permission ends before one of their channels, with the latest expiry of any such channel.
    pub(crate) fn outlasted_permissions(&self) -> SmallVec<[(IpAddr, u64); 4]> {
        let channels = self.channels.iter();
        let longer = channels.filter(|channel| channel.permitted_until_ms < channel.expires_ms);
        let mut peers: SmallVec<_> =
            longer.map(|channel| (channel.named, self.channels.until(channel.named))).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// Binds a channel to a peer with the client-visible address `name`, reachable at `peer`.
    pub(crate) fn bind(
        &mut self,
        number: ChannelNumber,
        name: SocketAddr,
        peer: SocketAddr,
        expires_ms: u64,
    ) {
        let named = name.ip();
        let permitted_until_ms = self.permissions.until(named).unwrap_or_default();
        self.channels.bind(Channel { peer, named, expires_ms, permitted_until_ms, number, used: false });
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.shared.iter().any(Option::is_some)
    }

    /// Shared relay socket on which this allocation must own the peer.
    fn shares(&self, peer: IpAddr) -> Option<SharedPort> {
        self.shared[Family::of(peer) as usize]
    }

    /// Shared relay socket on which the peer must be released, because no permission or channel for it
    /// remains.
    fn gives_up(&self, peer: IpAddr) -> Option<SharedPort> {
        let is_held = || {
            self.permissions.until(peer).is_some()
                || self.channels.iter().any(|channel| channel.named == peer)
        };
        self.shares(peer).filter(|_| !is_held())
    }

    pub(crate) fn expired_relay(&self, now_ms: u64) -> Option<Family> {
        let is_over = |family: &Family| {
            let relay = &self.relays[*family as usize];
            relay.is_some_and(|relay| relay.expires_ms <= now_ms)
        };
        [Family::V4, Family::V6].into_iter().find(is_over)
    }

    fn peers(&self, family: Family) -> impl Iterator<Item = IpAddr> + '_ {
        let peers = self.bindings().map(|binding| binding.named());
        peers.filter(move |ip| Family::of(*ip) == family)
    }

    pub(crate) fn bindings(&self) -> impl Iterator<Item = Binding> + '_ {
        let permissions = self.permissions.iter().map(|(ip, expires_ms)| Binding::Permission(ip, expires_ms));
        permissions.chain(self.channels.iter().copied().map(Binding::Channel))
    }

    fn next_deadline(&self) -> Option<u64> {
        let relays = self.relays.iter().flatten().map(|relay| relay.expires_ms);
        relays.chain(self.bindings().map(|binding| binding.expires_ms())).min()
    }
}

const fn padding_mask(padded: bool) -> u8 {
    if padded { 3 } else { 0 }
}

pub(crate) struct Forwarding {
    slots: Vec<ForwardingSlot>,
    free: Vec<u32>,
    /// Excludes entries whose client is away.
    by_client: HashTable<u32>,
    len: usize,
    by_listener: Vec<u32>,
    hasher: RandomState,
    /// Most recent lookup; the next datagram often has the same client.
    last: Option<(Client, u32)>,
    claims: Claims,
    timers: Timers,
}

struct ForwardingSlot {
    generation: u32,
    entry: Option<Box<ForwardingEntry>>,
}

impl Forwarding {
    pub(crate) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            by_client: HashTable::new(),
            len: 0,
            by_listener: Vec::new(),
            hasher: RandomState::default(),
            last: None,
            claims: Claims::default(),
            timers: Timers::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn by_listener(&self) -> &[u32] {
        &self.by_listener
    }

    fn listener(&mut self, ListenerId(number): ListenerId) -> &mut u32 {
        let index = usize::from(number);
        if self.by_listener.len() <= index {
            self.by_listener.resize(index + 1, 0);
        }
        &mut self.by_listener[index]
    }

    #[inline(always)]
    pub(crate) fn find(&mut self, client: &Client) -> Option<u32> {
        match &self.last {
            Some((last, index)) if last == client => Some(*index),
            _ => self.search(client),
        }
    }

    fn search(&mut self, client: &Client) -> Option<u32> {
        let slots = &self.slots;
        let index = *self.by_client.find(hash(&self.hasher, client), |index| is_of(slots, *index, client))?;
        self.last = Some((*client, index));
        Some(index)
    }

    #[inline]
    pub(crate) fn at(&mut self, index: u32) -> Option<(AllocationSlot, &mut ForwardingEntry)> {
        let slot = self.slots.get_mut(index as usize)?;
        let entry = slot.entry.as_deref_mut()?;
        Some((AllocationSlot { index, generation: slot.generation }, entry))
    }

    #[inline]
    pub(crate) fn get(&mut self, id: AllocationSlot) -> Option<&mut ForwardingEntry> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        slot.entry.as_deref_mut()
    }

    #[inline]
    pub(crate) fn claimant(&mut self, port: SharedPort, peer: IpAddr) -> Option<u32> {
        self.claims.find(port, peer)
    }

    /// Slot of another allocation that owns this peer on the shared relay socket of `index`.
    pub(crate) fn rival(&mut self, index: u32, peer: IpAddr) -> Option<u32> {
        let port = self.at(index)?.1.shares(peer)?;
        self.claims.find(port, peer).filter(|other| *other != index)
    }

    /// The 5-tuple must be free.
    pub(crate) fn install(&mut self, now_ms: u64, entry: ForwardingEntry) -> AllocationSlot {
        let (client, away) = (entry.client, entry.away);
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(ForwardingSlot { generation: 0, entry: None });
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        for family in [Family::V4, Family::V6] {
            if let Some(port) = entry.shared[family as usize] {
                entry.peers(family).for_each(|peer| self.claims.take(port, peer, index));
            }
        }
        let slot = &mut self.slots[index as usize];
        slot.entry = Some(Box::new(entry));
        let generation = slot.generation;
        self.len += 1;
        *self.listener(client.listener) += 1;
        if !away {
            self.enter(index, &client);
        }
        self.arm(now_ms, index);
        AllocationSlot { index, generation }
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<(AllocationSlot, Box<ForwardingEntry>)> {
        self.detach(index);
        self.timers.cancel(index);
        let slot = self.slots.get_mut(index as usize)?;
        let entry = slot.entry.take()?;
        self.len -= 1;
        let id = AllocationSlot { index, generation: slot.generation };
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        *self.listener(entry.client.listener) -= 1;
        for family in [Family::V4, Family::V6] {
            release(&mut self.claims, &entry, index, family);
        }
        Some((id, entry))
    }

    pub(crate) fn indices(&self) -> Range<u32> {
        0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    /// The only way to change an entry after [`Forwarding::install`].
    pub(crate) fn apply(&mut self, now_ms: u64, effect: &Effect) {
        match effect {
            Effect::Opened { allocation, expires_ms, relayed, .. } => {
                let Some(entry) = self.get(*allocation) else { return };
                for address in [Some(relayed.0), relayed.1].into_iter().flatten() {
                    let relay = Relay { address, expires_ms: *expires_ms };
                    entry.relays[Family::of(address.ip()) as usize] = Some(relay);
                }
                self.arm(now_ms, allocation.index);
            }
            Effect::Renewed { allocation, family, expires_ms } => {
                let Some(entry) = self.get(*allocation) else { return };
                for (relay, of) in entry.relays.iter_mut().zip([Family::V4, Family::V6]) {
                    if family.is_none_or(|family| family == of)
                        && let Some(relay) = relay
                    {
                        relay.expires_ms = *expires_ms;
                    }
                }
                self.arm(now_ms, allocation.index);
            }
            Effect::Permitted { allocation, peer, expires_ms, .. } => {
                let Some(entry) = self.get(*allocation) else { return };
                entry.permit(*peer, *expires_ms);
                if let Some(port) = entry.shares(*peer) {
                    self.claims.take(port, *peer, allocation.index);
                }
                self.timers.set_if_earlier(now_ms, allocation.index, *expires_ms);
            }
            Effect::Bound { allocation, number, peer, at, expires_ms, .. } => {
                let Some(entry) = self.get(*allocation) else { return };
                entry.bind(*number, *peer, *at, *expires_ms);
                if let Some(port) = entry.shares(peer.ip()) {
                    self.claims.take(port, peer.ip(), allocation.index);
                }
                self.timers.set_if_earlier(now_ms, allocation.index, *expires_ms);
            }
            Effect::PermissionEnded { allocation, peer } => {
                let Some(entry) = self.get(*allocation) else { return };
                entry.permissions.retain(|ip| ip != *peer);
                if let Some(port) = entry.gives_up(*peer) {
                    self.claims.release(port, *peer, allocation.index);
                }
            }
            Effect::Unbound { allocation, number, peer } => {
                let Some(entry) = self.get(*allocation) else { return };
                entry.channels.retain(|channel| channel.number != *number);
                if let Some(port) = entry.gives_up(peer.ip()) {
                    self.claims.release(port, peer.ip(), allocation.index);
                }
            }
            // RFC 8656 section 8.1: permissions and channels end with the relayed address of their family.
            Effect::RelayClosed { relay: RelayId { allocation, family } } => {
                let slot = self.slots.get_mut(allocation.index as usize);
                let slot = slot.filter(|slot| slot.generation == allocation.generation);
                let Some(entry) = slot.and_then(|slot| slot.entry.as_deref_mut()) else { return };
                release(&mut self.claims, entry, allocation.index, *family);
                (entry.relays[*family as usize], entry.shared[*family as usize]) = (None, None);
                entry.permissions.retain(|ip| Family::of(ip) != *family);
                entry.channels.retain(|channel| Family::of(channel.peer.ip()) != *family);
            }
            Effect::Away { allocation } => {
                if let Some(entry) = self.get(*allocation) {
                    entry.away = true;
                    self.detach(allocation.index);
                }
            }
            Effect::Moved { allocation, client, link, padded, .. } => {
                self.rekey(*allocation, *client, *link, *padded);
            }
            Effect::Closed { allocation, .. } | Effect::Exported { allocation } => {
                self.remove(allocation.index);
            }
            _ => {}
        }
    }

    pub(crate) fn due(&mut self, now_ms: u64) -> Option<u32> {
        self.timers.pop(now_ms)
    }

    pub(crate) fn next_due(&self) -> Option<u64> {
        self.timers.next()
    }

    pub(crate) fn arm(&mut self, now_ms: u64, index: u32) {
        let deadline = self.at(index).and_then(|(_, entry)| entry.next_deadline());
        if let Some(deadline) = deadline {
            self.timers.set(now_ms, index, deadline);
        }
    }

    fn rekey(&mut self, id: AllocationSlot, client: Client, link: Link, padded: bool) {
        let Some(was) = self.get(id).map(|entry| entry.client.listener) else { return };
        *self.listener(was) -= 1;
        *self.listener(client.listener) += 1;
        self.detach(id.index);
        if let Some(entry) = self.get(id) {
            (entry.client, entry.link, entry.padding, entry.away) =
                (client, link, padding_mask(padded), false);
        }
        self.enter(id.index, &client);
    }

    fn detach(&mut self, index: u32) {
        let slot = self.slots.get(index as usize);
        let Some(entry) = slot.and_then(|slot| slot.entry.as_deref()) else { return };
        // Compare by slot: another entry may have the 5-tuple of a detached entry.
        let hash = hash(&self.hasher, &entry.client);
        if let Ok(entry) = self.by_client.find_entry(hash, |found| *found == index) {
            entry.remove();
        }
        if self.last.is_some_and(|(_, last)| last == index) {
            self.last = None;
        }
    }

    fn enter(&mut self, index: u32, client: &Client) {
        let (slots, hasher) = (&self.slots, &self.hasher);
        self.by_client.insert_unique(hash(hasher, client), index, |index| {
            slots[*index as usize].entry.as_ref().map_or(0, |other| hash(hasher, &other.client))
        });
    }
}

/// Releases an allocation's peers of one family on its shared relay socket.
fn release(claims: &mut Claims, entry: &ForwardingEntry, index: u32, family: Family) {
    let Some(port) = entry.shared[family as usize] else { return };
    entry.peers(family).for_each(|peer| claims.release(port, peer, index));
}

#[inline]
fn is_of(slots: &[ForwardingSlot], index: u32, client: &Client) -> bool {
    slots[index as usize].entry.as_ref().is_some_and(|entry| entry.client == *client)
}

/// Hashes in three writes; the derived implementation makes ten.
#[inline]
fn hash(seeded: &RandomState, client: &Client) -> u64 {
    let bits = |ip| match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    let (address, local) = (client.address, client.local);
    let mut hasher = seeded.build_hasher();
    hasher.write_u128(bits(address.ip()));
    hasher.write_u128(bits(local.ip()));
    hasher.write_u64(
        u64::from(address.port()) << 32 | u64::from(local.port()) << 16 | u64::from(client.listener.0),
    );
    hasher.finish()
}

#[cfg(test)]
mod tests;
