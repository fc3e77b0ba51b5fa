//! Maintains the eBPF program's flows (`turnpike_offload`) from the effects of the state machine, and reads
//! their counters. Reports drained sockets to the program, so that datagrams relayed by the program never
//! overtake datagrams in user space.

mod quality;

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use turnpike_net::{Buffer, Event, Received, Rx, SocketId, Sockets};
use turnpike_offload::{
    Counted, FlowState, Flows, Installed, Kind, NewFlow, WorkerClock, WorkerSockets, layout::FlowKey,
};
use turnpike_turn::server::{AllocationSlot, Client, Effect, Family, Link, Policy, RelayId, Server};
use turnpike_wire::{
    channel_data::{ChannelNumber, ChannelRange},
    demux,
};

use super::out::side;
use crate::link::ClientLinkKind;

/// Maximum allocations activated or deactivated between two ticks.
const WALK: usize = 256;
/// Maximum channels whose flows are installed between two ticks. Installing each takes several system calls,
/// during which datagrams wait.
const BEGIN: usize = 32;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Across {
    pub(crate) to_peer: Counted,
    pub(crate) to_client: Counted,
}

impl Across {
    fn is_zero(&self) -> bool {
        self.to_peer.is_zero() && self.to_client.is_zero()
    }

    fn add(&mut self, more: &Self) {
        for (sum, more) in [(&mut self.to_peer, more.to_peer), (&mut self.to_client, more.to_client)] {
            sum.datagrams += more.datagrams;
            sum.bytes += more.bytes;
        }
    }

    pub(super) fn pairs(&self) -> [(u64, u64); 2] {
        [self.to_peer, self.to_client].map(|counted| (counted.datagrams, counted.bytes))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FlowSide {
    Clients,
    Peers,
}

pub(super) struct Offload {
    flows: Flows,
    clock: WorkerClock,
    allocations: Vec<Option<Box<OffloadedAllocation>>>,
    open: usize,
    relays: Vec<[Option<RelaySocket>; 2]>,
    pub(super) sockets: WorkerSockets,
    across: Across,
    /// Channels in use whose flows are not installed yet.
    begun: VecDeque<(AllocationSlot, ChannelNumber)>,
    range: ChannelRange,
    /// Channels kept out of the kernel: see [`Offload::is_limited`].
    limited: u64,
    is_active: bool,
    walk: Option<usize>,
}

/// Last counter values read from an allocation's flows, for another process. That process finds the flows
/// themselves by the allocation's addresses.
#[derive(Serialize, Deserialize)]
pub(super) struct PassedFlows {
    own: Counted,
    to_client: Vec<(u16, Counted)>,
}

#[derive(Clone, Copy)]
struct RelaySocket {
    id: SocketId,
    bound: SocketAddr,
}

struct OffloadedAllocation {
    allocation: AllocationSlot,
    client: Option<Client>,
    /// True if only user space may relay its datagrams, so it has no flows: see [`Offload::is_limited`].
    limited: bool,
    /// The client's flow and the state shared by its flows to peers.
    own: Option<(Installed, FlowState)>,
    permissions: Vec<(IpAddr, u64)>,
    channels: Vec<Channel>,
    /// Traffic read after the state machine had dropped the allocation.
    late: Across,
    is_measured: bool,
}

struct Channel {
    number: ChannelNumber,
    peer: SocketAddr,
    /// Peer address that the client specified and to which its permission applies.
    named: IpAddr,
    expires_ms: u64,
    /// True once a datagram has used the channel. Unused channels have no flows, so that a channel bind costs
    /// no system call.
    used: bool,
    to_peer: Option<Installed>,
    to_client: Option<(Installed, FlowState)>,
}

impl Offload {
    /// `is_active` is false until the program is attached.
    pub(super) fn new(flows: Flows, clock: WorkerClock, range: ChannelRange, is_active: bool) -> Self {
        let sockets = WorkerSockets::new(&flows, 0);
        Self {
            flows,
            clock,
            allocations: Vec::new(),
            open: 0,
            relays: Vec::new(),
            sockets,
            across: Across::default(),
            begun: VecDeque::new(),
            range,
            limited: 0,
            is_active,
            walk: None,
        }
    }

    /// Starts or stops relaying in the kernel; [`Offload::walk`] then updates the allocations.
    pub(super) fn set_active(&mut self, is_active: bool, sockets: &Sockets) {
        self.is_active = is_active;
        self.walk = Some(0);
        if !is_active {
            self.sockets.end(sockets);
        }
    }

    pub(super) fn walk<P: Policy>(
        &mut self,
        server: &mut Server<P>,
        listeners: &[Option<(SocketId, bool)>],
    ) -> bool {
        let Some(start) = self.walk else { return true };
        let end = (start + WALK).min(self.allocations.len());
        for index in start..end {
            let Some(allocation) = self.allocations[index].as_ref().map(|offloaded| offloaded.allocation)
            else {
                continue;
            };
            if self.is_active {
                self.renew(allocation, server, listeners, |_| true);
            } else {
                self.with(allocation, server, |offloaded, flows| offloaded.clear(flows));
            }
        }
        self.walk = (end < self.allocations.len()).then_some(end);
        self.walk.is_none()
    }

    pub(super) fn across(&self) -> Across {
        self.across
    }

    pub(super) fn limited(&self) -> u64 {
        self.limited
    }

    pub(super) fn relay_opened(&mut self, relay: RelayId, id: SocketId, bound: SocketAddr) {
        let index = relay.allocation.index as usize;
        if self.relays.len() <= index {
            self.relays.resize(index + 1, [None; 2]);
        }
        self.relays[index][side(relay.family)] = Some(RelaySocket { id, bound });
    }

    /// Removes an allocation's relay socket, whose flows are already gone. `closes` is false if other
    /// allocations still share the socket.
    pub(super) fn relay_closed(&mut self, relay: RelayId, closes: bool) {
        let pair = self.relays.get_mut(relay.allocation.index as usize);
        let socket = pair.and_then(|pair| pair[side(relay.family)].take());
        if let Some(RelaySocket { id, .. }) = socket.filter(|_| closes) {
            self.socket_closed(id);
        }
    }

    pub(super) fn socket_closed(&mut self, id: SocketId) {
        self.sockets.forget(id, &self.flows);
    }

    /// Must be called before any other handling of an effect, so that ended flows have left the kernel before
    /// a reply is sent. Adds the kernel's counts to the totals of an ended allocation.
    pub(super) fn hear<P: Policy>(
        &mut self,
        effect: &mut Effect,
        server: &mut Server<P>,
        listeners: &[Option<(SocketId, bool)>],
    ) {
        match effect {
            Effect::Opened { allocation, client, link, .. } => {
                self.open(*allocation, client, *link, self.is_limited(*allocation, server));
            }
            Effect::Permitted { allocation, peer, expires_ms, .. } => {
                let peer = *peer;
                let Some(offloaded) = self.offloaded(*allocation) else { return };
                offloaded.permissions.retain(|(ip, _)| *ip != peer);
                offloaded.permissions.push((peer, *expires_ms));
                self.renew(*allocation, server, listeners, |channel| channel.named == peer);
            }
            Effect::Bound { allocation, number, peer, at, expires_ms, .. } => {
                let (number, expires_ms) = (*number, *expires_ms);
                let Some(offloaded) = self.offloaded(*allocation) else { return };
                match offloaded.channels.iter_mut().find(|channel| channel.number == number) {
                    Some(channel) => channel.expires_ms = expires_ms,
                    None => {
                        offloaded.channels.push(Channel::new(number, *at, peer.ip(), expires_ms));
                        let limited = offloaded.limited;
                        self.limited += u64::from(limited);
                    }
                }
                self.renew(*allocation, server, listeners, |channel| channel.number == number);
            }
            Effect::Used { allocation, number } => {
                let Some(offloaded) = self.offloaded(*allocation) else { return };
                let channel = offloaded.channels.iter_mut().find(|channel| channel.number == *number);
                let Some(channel) = channel else { return };
                channel.used = true;
                // The flows are installed later, because the datagram that uses the channel must be sent
                // first.
                self.begun.push_back((*allocation, *number));
            }
            Effect::PermissionEnded { allocation, peer } => {
                self.with(*allocation, server, |offloaded, flows| offloaded.refuse(flows, *peer));
            }
            Effect::Unbound { allocation, number, .. } => {
                self.with(*allocation, server, |offloaded, flows| {
                    offloaded.unbind(flows, |channel| channel.number == *number)
                });
            }
            Effect::RelayClosed { relay } => {
                self.with(relay.allocation, server, |offloaded, flows| offloaded.lose(flows, relay.family));
            }
            Effect::Away { allocation } => {
                self.with(*allocation, server, |offloaded, flows| offloaded.follow(flows, None));
            }
            Effect::Moved { allocation, client, link, .. } => {
                if self.offloaded(*allocation).is_none() {
                    self.open(*allocation, client, *link, self.is_limited(*allocation, server));
                }
                let client = by_datagrams(client, *link);
                self.with(*allocation, server, |offloaded, flows| offloaded.follow(flows, client));
                self.renew(*allocation, server, listeners, |_| true);
            }
            // The client is unreachable until its move completes.
            Effect::Returned { allocation } => {
                let Some((client, link)) = server.reached(*allocation) else { return };
                self.open(*allocation, &client, link, self.is_limited(*allocation, server));
            }
            Effect::Limited { allocation } => self.follow_limit(*allocation, server, listeners),
            Effect::Closed { allocation, to_peer, to_client, .. } => {
                let [peer, client] = self.release(*allocation, server).pairs();
                (to_peer.0, to_peer.1) = (to_peer.0 + peer.0, to_peer.1 + peer.1);
                (to_client.0, to_client.1) = (to_client.0 + client.0, to_client.1 + client.1);
            }
            _ => {}
        }
    }

    pub(super) fn attached<P: Policy>(
        &mut self,
        allocation: AllocationSlot,
        server: &mut Server<P>,
        listeners: &[Option<(SocketId, bool)>],
    ) {
        self.renew(allocation, server, listeners, |_| true);
    }

    /// Removes all flows of an allocation that has ended or moved to another worker. Adds their new counts to
    /// the worker's total, and returns the counts still missing from the allocation's own total.
    pub(super) fn release<P: Policy>(
        &mut self,
        allocation: AllocationSlot,
        server: &mut Server<P>,
    ) -> Across {
        let slot = self.allocations.get_mut(allocation.index as usize);
        let is_it = |offloaded: &mut Box<OffloadedAllocation>| offloaded.allocation == allocation;
        let Some(mut offloaded) = slot.and_then(|slot| slot.take_if(is_it)) else { return Across::default() };
        self.open -= 1;
        let counted = offloaded.clear(&mut self.flows);
        self.across.add(&counted);
        let [to_peer, to_client] = counted.pairs();
        server.count_across(allocation, to_peer, to_client);
        counted.and(offloaded.late)
    }

    /// Exports the last counter values of an allocation's flows for another process, after adding the current
    /// counts here.
    pub(super) fn export<P: Policy>(
        &mut self,
        allocation: AllocationSlot,
        server: &mut Server<P>,
    ) -> Option<PassedFlows> {
        self.with(allocation, server, |offloaded, flows| offloaded.counted(flows));
        let offloaded = self.offloaded(allocation)?;
        let (_, own) = offloaded.own.as_ref()?;
        let to_client = offloaded.channels.iter().filter_map(|channel| {
            let (_, state) = channel.to_client.as_ref()?;
            Some((channel.number.get(), state.seen()))
        });
        Some(PassedFlows { own: own.seen(), to_client: to_client.collect() })
    }

    pub(super) fn adopt<P: Policy>(
        &mut self,
        allocation: AllocationSlot,
        passed: &PassedFlows,
        server: &mut Server<P>,
        listeners: &[Option<(SocketId, bool)>],
    ) {
        self.adopt_flows(allocation, passed, listeners);
        self.measure(allocation, server);
    }

    fn adopt_flows(
        &mut self,
        allocation: AllocationSlot,
        passed: &PassedFlows,
        listeners: &[Option<(SocketId, bool)>],
    ) {
        let index = allocation.index as usize;
        let Some(Some(offloaded)) = self.allocations.get_mut(index) else { return };
        let Some(client) = offloaded.client.filter(|_| offloaded.allocation == allocation) else { return };
        let listener = listeners.get(usize::from(client.listener.0)).copied().flatten();
        let Some((listener, _)) = listener else { return };
        let (flows, sockets) = (&mut self.flows, &mut self.sockets);
        let key = |channel| FlowKey::new(client.address, client.local, channel);
        let Some(own) = flows.adopt(&key(None), client.address) else { return };
        sockets.adopt(listener, || flows.adopt_socket(&own));
        let state = flows.adopt_state(&own, passed.own);
        offloaded.own = Some((own, state));
        let relays = self.relays.get(index).copied().unwrap_or_default();
        for channel in &mut offloaded.channels {
            // The current configuration may map the peer to a different address.
            channel.to_peer = flows.adopt(&key(Some(channel.number)), channel.peer);
            channel.used = channel.to_peer.is_some();
            let seen = passed.to_client.iter().find(|(number, _)| *number == channel.number.get());
            let relay = relays[side(family_of(channel.peer.ip()))];
            let Some((relay, (_, seen))) = relay.zip(seen) else { continue };
            let key = FlowKey::new(channel.peer, relay.bound, None);
            let Some(flow) = flows.adopt(&key, client.address) else { continue };
            sockets.adopt(relay.id, || flows.adopt_socket(&flow));
            let state = flows.adopt_state(&flow, *seen);
            channel.to_client = Some((flow, state));
            channel.used = true;
        }
    }

    /// Forgets all flows, which another process has taken over. Totals are kept.
    pub(super) fn leave(&mut self) {
        self.is_active = false;
        self.walk = None;
        self.allocations.clear();
        self.open = 0;
        self.relays.clear();
        self.begun.clear();
        self.sockets.leave(&self.flows);
    }

    /// After a reload: removes the ChannelData flows of channels outside the range, and applies added or
    /// removed bandwidth limits.
    pub(super) fn restrict<P: Policy>(
        &mut self,
        range: ChannelRange,
        server: &mut Server<P>,
        listeners: &[Option<(SocketId, bool)>],
    ) {
        self.range = range;
        let is_out = |channel: &Channel| ChannelNumber::within(range, channel.number.get()).is_none();
        for index in 0..self.allocations.len() {
            let Some(allocation) = self.allocations[index].as_ref().map(|offloaded| offloaded.allocation)
            else {
                continue;
            };
            self.with(allocation, server, |offloaded, flows| {
                for channel in offloaded.channels.iter_mut().filter(|channel| is_out(channel)) {
                    if let Some(flow) = channel.to_peer.take() {
                        flows.remove(flow);
                    }
                }
                Across::default()
            });
            self.follow_limit(allocation, server, listeners);
        }
    }

    /// Applies an added or removed limit: only the server itself relays the datagrams of limited allocations.
    fn follow_limit<P: Policy>(
        &mut self,
        allocation: AllocationSlot,
        server: &mut Server<P>,
        listeners: &[Option<(SocketId, bool)>],
    ) {
        let limited = self.is_limited(allocation, server);
        let mut was_limited = false;
        self.with(allocation, server, |offloaded, flows| {
            was_limited = std::mem::replace(&mut offloaded.limited, limited);
            if limited { offloaded.clear(flows) } else { Across::default() }
        });
        if was_limited && !limited {
            self.renew(allocation, server, listeners, |_| true);
        }
    }

    pub(super) fn before_wait(&mut self) -> Option<Duration> {
        self.sockets.before_wait()
    }

    /// Handles the events that a wait returned; `lost` is the sockets' drop count so far. `are_all` is true
    /// if nothing else is ready.
    pub(super) fn after_wait(&mut self, events: &[Event], are_all: bool, lost: u64, sockets: &Sockets) {
        // Tokens of datagram sockets are their socket ids.
        let ready = events.iter().filter_map(|event| u32::try_from(event.token).ok()).map(SocketId);
        self.sockets.after_wait(ready, are_all, lost, sockets, &self.flows);
    }

    pub(super) fn received(
        &mut self,
        (socket, side): (SocketId, FlowSide),
        received: Received,
        is_empty: bool,
        rx: &Rx,
    ) {
        let goes_across = |buffer: &Buffer<'_>| {
            side == FlowSide::Peers || demux::classify(buffer.bytes) == demux::Kind::ChannelData
        };
        let is_active = self.is_active && self.flows.can_cross();
        self.sockets.received(socket, received, is_empty, rx, is_active.then_some(goes_across));
    }

    /// Installs pending flows after everything received has been sent.
    pub(super) fn flushed<P: Policy>(
        &mut self,
        server: &mut Server<P>,
        (sockets, listeners): (&Sockets, &[Option<(SocketId, bool)>]),
    ) {
        self.sockets.flushed(sockets, &self.flows);
        let mut left = BEGIN;
        while left > 0
            && let Some((allocation, begun)) = self.begun.pop_front()
        {
            // Allocations that have ended do not count towards the batch.
            left -= usize::from(self.offloaded(allocation).is_some());
            self.renew(allocation, server, listeners, |channel| channel.number == begun);
        }
    }

    pub(super) fn sweep<P: Policy>(
        &mut self,
        now_ms: u64,
        server: &mut Server<P>,
        (sockets, listeners): (&Sockets, &[Option<(SocketId, bool)>]),
    ) -> bool {
        let Some(some) = self.sockets.begin_sweep(now_ms, self.allocations.len()) else { return false };
        let mut any = false;
        for index in some {
            let Some(offloaded) = &mut self.allocations[index] else { continue };
            let (allocation, counted) = (offloaded.allocation, offloaded.counted(&self.flows));
            if let Some((listener, _)) = offloaded.listener(listeners) {
                self.sockets.went_across(listener, counted.to_peer.datagrams);
            }
            for relay in self.relays.get(index).into_iter().flatten().flatten() {
                self.sockets.went_across(relay.id, counted.to_client.datagrams);
            }
            if !counted.is_zero() {
                self.across.add(&counted);
                let [to_peer, to_client] = counted.pairs();
                server.count_across(allocation, to_peer, to_client);
                if let Some(mut meter) = server.kernel_meter(allocation) {
                    meter.add_counted();
                }
                any = true;
            }
        }
        self.sockets.end_sweep(now_ms, sockets);
        any
    }

    pub(super) fn due(&self) -> Option<u64> {
        let sweep = (self.open > 0).then(|| self.sockets.sweep_due());
        let at_once = (self.walk.is_some() || !self.begun.is_empty()).then_some(0);
        [sweep, at_once].into_iter().flatten().min()
    }

    fn open(&mut self, allocation: AllocationSlot, client: &Client, link: Link, limited: bool) {
        let index = allocation.index as usize;
        if self.allocations.len() <= index {
            self.allocations.resize_with(index + 1, || None);
        }
        // Ended allocations have already left their slots.
        self.open += 1;
        self.allocations[index] = Some(Box::new(OffloadedAllocation {
            allocation,
            client: by_datagrams(client, link),
            limited,
            own: None,
            permissions: Vec::new(),
            channels: Vec::new(),
            late: Across::default(),
            is_measured: false,
        }));
    }

    fn offloaded(&mut self, allocation: AllocationSlot) -> Option<&mut OffloadedAllocation> {
        let offloaded = self.allocations.get_mut(allocation.index as usize)?.as_deref_mut()?;
        (offloaded.allocation == allocation).then_some(offloaded)
    }

    /// Changes an allocation, and counts the traffic of flows that the change removes.
    fn with<P: Policy>(
        &mut self,
        allocation: AllocationSlot,
        server: &mut Server<P>,
        change: impl FnOnce(&mut OffloadedAllocation, &mut Flows) -> Across,
    ) {
        let Some(Some(offloaded)) = self.allocations.get_mut(allocation.index as usize) else { return };
        if offloaded.allocation != allocation {
            return;
        }
        let counted = change(offloaded, &mut self.flows);
        offloaded.measure(&self.flows, self.clock, server);
        self.across.add(&counted);
        let [to_peer, to_client] = counted.pairs();
        // If the allocation has ended, its totals are in an effect that is still queued.
        if !server.count_across(allocation, to_peer, to_client) {
            offloaded.late.add(&counted);
        }
    }

    /// Installs the flows of the selected channels in use, or extends their expiry.
    fn renew<P: Policy>(
        &mut self,
        allocation: AllocationSlot,
        server: &mut Server<P>,
        listeners: &[Option<(SocketId, bool)>],
        which: impl Fn(&Channel) -> bool,
    ) {
        if self.is_active {
            self.install(allocation, listeners, which);
            self.measure(allocation, server);
        }
    }

    fn install(
        &mut self,
        allocation: AllocationSlot,
        listeners: &[Option<(SocketId, bool)>],
        which: impl Fn(&Channel) -> bool,
    ) {
        let index = allocation.index as usize;
        let Some(Some(offloaded)) = self.allocations.get_mut(index) else { return };
        let is_it = offloaded.allocation == allocation && !offloaded.limited;
        let Some(client) = offloaded.client.filter(|_| is_it) else { return };
        let which = |channel: &Channel| channel.used && which(channel);
        if !offloaded.channels.iter().any(which) || is_link_local(client.address) {
            return;
        }
        let Some((listener, _)) = offloaded.listener(listeners) else { return };
        let (flows, sockets) = (&mut self.flows, &mut self.sockets);
        let Some(socket) = sockets.slot(listener, flows) else { return };
        let mut installer = Installer { flows, sockets, client, listener, socket };
        if offloaded.own.is_none() {
            offloaded.own = installer.install_own();
        }
        let Some((_, own)) = &offloaded.own else { return };
        let relays = self.relays.get(index).copied().unwrap_or_default();
        for channel in offloaded.channels.iter_mut().filter(|channel| which(channel)) {
            let Some(relay) = relays[side(family_of(channel.peer.ip()))] else { continue };
            if is_link_local(channel.peer) {
                continue;
            }
            let expires_ns = self.clock.ns(channel.expires_ms);
            match &mut channel.to_peer {
                Some(flow) => _ = installer.flows.extend(flow, expires_ns),
                // A reload has excluded the channel number, so the state machine drops its datagrams.
                None if ChannelNumber::within(self.range, channel.number.get()).is_none() => {}
                None => channel.to_peer = installer.install_to_peer(channel, relay, own, expires_ns),
            }
            // A channel binding does not replace the permission (RFC 8656 section 9).
            let permitted = offloaded.permissions.iter().find(|(ip, _)| *ip == channel.named);
            let Some((_, permitted_ms)) = permitted else { continue };
            let expires_ns = self.clock.ns(channel.expires_ms.min(*permitted_ms));
            match &mut channel.to_client {
                Some((flow, _)) => _ = installer.flows.extend(flow, expires_ns),
                None => channel.to_client = installer.install_to_client(channel, relay, expires_ns),
            }
        }
    }
}

/// Installs the flows of one client. If the table is full, its methods count that and return `None`.
struct Installer<'o> {
    flows: &'o mut Flows,
    sockets: &'o mut WorkerSockets,
    client: Client,
    /// Socket that receives the client's datagrams.
    listener: SocketId,
    socket: u32,
}

impl Installer<'_> {
    fn install_own(&mut self) -> Option<(Installed, FlowState)> {
        let Client { address, local, .. } = self.client;
        let state = self.flows.state().ok()?;
        let flow = NewFlow {
            kind: Kind::Client,
            remote: address,
            local,
            channel: None,
            from: local,
            to: address,
            state: &state,
            socket: self.socket,
            expires_ns: u64::MAX,
        };
        let installed = self.flows.install(&flow).ok();
        self.with_state(installed, state)
    }

    fn install_to_peer(
        &mut self,
        channel: &Channel,
        relay: RelaySocket,
        own: &FlowState,
        expires_ns: u64,
    ) -> Option<Installed> {
        self.flows.hold_up(own);
        self.sockets.touch(self.listener);
        let flow = NewFlow {
            kind: Kind::ToPeer,
            remote: self.client.address,
            local: self.client.local,
            channel: Some(channel.number),
            from: relay.bound,
            to: channel.peer,
            state: own,
            socket: self.socket,
            expires_ns,
        };
        self.flows.install(&flow).ok()
    }

    fn install_to_client(
        &mut self,
        channel: &Channel,
        relay: RelaySocket,
        expires_ns: u64,
    ) -> Option<(Installed, FlowState)> {
        let socket = self.sockets.slot(relay.id, self.flows)?;
        let state = self.flows.state().ok()?;
        self.sockets.touch(relay.id);
        let flow = NewFlow {
            kind: Kind::ToClient,
            remote: channel.peer,
            local: relay.bound,
            channel: Some(channel.number),
            from: self.client.local,
            to: self.client.address,
            state: &state,
            socket,
            expires_ns,
        };
        let installed = self.flows.install(&flow).ok();
        self.with_state(installed, state)
    }

    fn with_state(
        &mut self,
        installed: Option<Installed>,
        state: FlowState,
    ) -> Option<(Installed, FlowState)> {
        match installed {
            Some(flow) => Some((flow, state)),
            None => {
                self.flows.give_back_state(state);
                None
            }
        }
    }
}

impl Across {
    fn and(mut self, more: Self) -> Self {
        self.add(&more);
        self
    }
}

impl OffloadedAllocation {
    fn listener(&self, listeners: &[Option<(SocketId, bool)>]) -> Option<(SocketId, bool)> {
        listeners.get(usize::from(self.client?.listener.0)).copied().flatten()
    }

    fn counted(&mut self, flows: &Flows) -> Across {
        let mut sum = Across::default();
        if let Some((_, state)) = &mut self.own {
            sum.to_peer = flows.counted(state);
        }
        for (_, state) in self.channels.iter_mut().filter_map(|channel| channel.to_client.as_mut()) {
            sum.add(&Across { to_client: flows.counted(state), ..Across::default() });
        }
        sum
    }

    fn follow(&mut self, flows: &mut Flows, client: Option<Client>) -> Across {
        self.client = client;
        self.clear(flows)
    }

    fn refuse(&mut self, flows: &mut Flows, peer: IpAddr) -> Across {
        self.permissions.retain(|(ip, _)| *ip != peer);
        let channels = self.channels.iter_mut().filter(|channel| channel.named == peer);
        channels.fold(Across::default(), |sum, channel| sum.and(channel.refuse_peer(flows)))
    }

    fn lose(&mut self, flows: &mut Flows, family: Family) -> Across {
        self.permissions.retain(|(ip, _)| family_of(*ip) != family);
        self.unbind(flows, |channel| family_of(channel.peer.ip()) == family)
    }

    fn unbind(&mut self, flows: &mut Flows, which: impl Fn(&Channel) -> bool) -> Across {
        let mut sum = Across::default();
        self.channels.retain_mut(|channel| {
            let ends = which(channel);
            if ends {
                sum.add(&channel.clear(flows));
            }
            !ends
        });
        if self.channels.iter().all(|channel| !channel.used) {
            sum.add(&self.clear(flows));
        }
        sum
    }

    fn clear(&mut self, flows: &mut Flows) -> Across {
        let mut sum = Across::default();
        for channel in &mut self.channels {
            sum.add(&channel.clear(flows));
        }
        if let Some((installed, state)) = self.own.take() {
            flows.remove(installed);
            sum.add(&Across { to_peer: flows.give_back_state(state), ..Across::default() });
        }
        sum
    }
}

impl Channel {
    fn new(number: ChannelNumber, peer: SocketAddr, named: IpAddr, expires_ms: u64) -> Self {
        Self { number, peer, named, expires_ms, used: false, to_peer: None, to_client: None }
    }

    fn clear(&mut self, flows: &mut Flows) -> Across {
        if let Some(flow) = self.to_peer.take() {
            flows.remove(flow);
        }
        self.refuse_peer(flows)
    }

    fn refuse_peer(&mut self, flows: &mut Flows) -> Across {
        let Some((flow, state)) = self.to_client.take() else { return Across::default() };
        flows.remove(flow);
        Across { to_client: flows.give_back_state(state), ..Across::default() }
    }
}

fn by_datagrams(client: &Client, link: Link) -> Option<Client> {
    (ClientLinkKind::of(link) == ClientLinkKind::Datagrams).then_some(*client)
}

fn family_of(ip: IpAddr) -> Family {
    if ip.is_ipv4() { Family::V4 } else { Family::V6 }
}

/// Link-local addresses need an interface, which flow keys do not contain.
fn is_link_local(address: SocketAddr) -> bool {
    matches!(address.ip(), IpAddr::V6(ip) if ip.is_unicast_link_local())
}

#[cfg(test)]
mod tests;
