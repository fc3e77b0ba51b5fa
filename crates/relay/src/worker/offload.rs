//! Keeps the flows of the program in the kernel (`turnpike_offload`) from the effects of the state machine, brings back what they have
//! counted, and tells the program when a socket has been emptied, so that nothing overtakes what went through user space.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use turnpike_net::{SocketId, poll::Event};
use turnpike_offload::{Counted, Flows, Installed, Kind, NewFlow, State, now_ns};
use turnpike_turn::server::{AllocationId, Client, Effect, Family, Gate, Link, RelayId, Server};
use turnpike_wire::channel_data::{ChannelNumber, ChannelRange};

use super::{emptied::Emptied, side};
use crate::link::Way;

/// Each session's counters are read once in ten of these, in milliseconds.
const SWEEP_MS: u64 = 100;
const SWEEPS: usize = 10;

/// What went across, by direction.
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

    /// As the state machine counts.
    pub(super) fn pairs(&self) -> [(u64, u64); 2] {
        [self.to_peer, self.to_client].map(|counted| (counted.datagrams, counted.bytes))
    }
}

/// One worker's part of the kernel path.
pub(super) struct Offload {
    flows: Flows,
    /// [`now_ns`] when the state machine's clock began.
    base_ns: u64,
    /// By the index of their allocation.
    sessions: Vec<Option<Box<Session>>>,
    /// How many of them there are.
    open: usize,
    relays: Vec<[Option<RelaySocket>; 2]>,
    emptied: Emptied,
    across: Across,
    swept_ms: u64,
    sweep: usize,
    /// Of channels that may be used.
    range: ChannelRange,
}

#[derive(Clone, Copy)]
struct RelaySocket {
    id: SocketId,
    bound: SocketAddr,
}

/// What has been told of an allocation, and which flows came of it.
struct Session {
    allocation: AllocationId,
    /// Only one that is reached by plain UDP.
    client: Option<Client>,
    /// The client as such, and what its flows to peers share.
    own: Option<(Installed, State)>,
    permissions: Vec<(IpAddr, u64)>,
    channels: Vec<Channel>,
    /// Counted when the state machine had no entry for it any more.
    late: Across,
}

struct Channel {
    number: ChannelNumber,
    peer: SocketAddr,
    expires_ms: u64,
    to_peer: Option<Installed>,
    to_client: Option<(Installed, State)>,
}

impl Offload {
    pub(super) fn new(flows: Flows, base_ns: u64, range: ChannelRange) -> Self {
        let emptied = Emptied::new(flows.gap_ns());
        Self {
            flows,
            base_ns,
            sessions: Vec::new(),
            open: 0,
            relays: Vec::new(),
            emptied,
            across: Across::default(),
            swept_ms: 0,
            sweep: 0,
            range,
        }
    }

    /// What went across so far, of sessions of this worker.
    pub(super) fn across(&self) -> Across {
        self.across
    }

    /// A relay socket for datagrams has been opened, or has come from another worker.
    pub(super) fn relay_opened(&mut self, relay: RelayId, id: SocketId, bound: SocketAddr) {
        let index = relay.allocation.index as usize;
        if self.relays.len() <= index {
            self.relays.resize(index + 1, [None; 2]);
        }
        self.relays[index][side(relay.family)] = Some(RelaySocket { id, bound });
    }

    /// A relay socket is about to be closed, or to leave; its flows are gone.
    pub(super) fn relay_closed(&mut self, relay: RelayId) {
        let pair = self.relays.get_mut(relay.allocation.index as usize);
        if let Some(RelaySocket { id, .. }) = pair.and_then(|pair| pair[side(relay.family)].take())
            && let Some(number) = self.emptied.forget(id)
        {
            self.flows.give_back_socket(number);
        }
    }

    /// The first to hear of each effect, so that what has ended has ended in the kernel before anybody is answered. Adds to the totals
    /// of a session that ends.
    pub(super) fn hear<G: Gate>(
        &mut self,
        effect: &mut Effect,
        server: &mut Server<G>,
        listeners: &[Option<(SocketId, bool)>],
    ) {
        match effect {
            Effect::Opened { allocation, client, link, .. } => {
                self.open(*allocation, client, *link);
            }
            Effect::Permitted { allocation, peer, expires_ms, .. } => {
                let peer = *peer;
                let Some(session) = self.session(*allocation) else { return };
                session.permissions.retain(|(ip, _)| *ip != peer);
                session.permissions.push((peer, *expires_ms));
                self.renew(*allocation, listeners, |channel| channel.peer.ip() == peer);
            }
            Effect::Bound { allocation, number, peer, expires_ms, .. } => {
                let number = *number;
                let Some(session) = self.session(*allocation) else { return };
                match session.channels.iter_mut().find(|channel| channel.number == number) {
                    Some(channel) => channel.expires_ms = *expires_ms,
                    None => session.channels.push(Channel {
                        number,
                        peer: *peer,
                        expires_ms: *expires_ms,
                        to_peer: None,
                        to_client: None,
                    }),
                }
                self.renew(*allocation, listeners, |channel| channel.number == number);
            }
            Effect::PermissionEnded { allocation, peer } => {
                let peer = *peer;
                self.with(*allocation, server, |session, flows| {
                    session.permissions.retain(|(ip, _)| *ip != peer);
                    let channels = session.channels.iter_mut().filter(|channel| channel.peer.ip() == peer);
                    channels.fold(Across::default(), |sum, channel| sum.and(channel.refuse_peer(flows)))
                });
            }
            Effect::Unbound { allocation, number, .. } => {
                let number = *number;
                self.with(*allocation, server, |session, flows| {
                    session.unbind(flows, |channel| channel.number == number)
                });
            }
            Effect::RelayClosed { relay } => {
                let family = relay.family;
                self.with(relay.allocation, server, |session, flows| {
                    session.permissions.retain(|(ip, _)| family_of(*ip) != family);
                    session.unbind(flows, |channel| family_of(channel.peer.ip()) == family)
                });
            }
            Effect::Away { allocation } => {
                self.with(*allocation, server, |session, flows| {
                    session.client = None;
                    session.clear(flows)
                });
            }
            Effect::Moved { allocation, client, link, .. } => {
                if self.session(*allocation).is_none() {
                    self.open(*allocation, client, *link);
                }
                let datagrams = by_datagrams(client, *link);
                self.with(*allocation, server, |session, flows| {
                    session.client = datagrams;
                    session.clear(flows)
                });
                self.renew(*allocation, listeners, |_| true);
            }
            Effect::Closed { allocation, to_peer, to_client, .. } => {
                let [peer, client] = self.release(*allocation, server).pairs();
                (to_peer.0, to_peer.1) = (to_peer.0 + peer.0, to_peer.1 + peer.1);
                (to_client.0, to_client.1) = (to_client.0 + client.0, to_client.1 + client.1);
            }
            _ => {}
        }
    }

    /// The relay sockets of an allocation are here now, behind what was told of it.
    pub(super) fn attached(&mut self, allocation: AllocationId, listeners: &[Option<(SocketId, bool)>]) {
        self.renew(allocation, listeners, |_| true);
    }

    /// Removes all flows of a session that has ended or left; counts in total what they have counted since the last time, and says
    /// what is still to be added to what the session itself has.
    pub(super) fn release<G: Gate>(&mut self, allocation: AllocationId, server: &mut Server<G>) -> Across {
        let slot = self.sessions.get_mut(allocation.index as usize);
        let is_it = |session: &mut Box<Session>| session.allocation == allocation;
        let Some(mut session) = slot.and_then(|slot| slot.take_if(is_it)) else { return Across::default() };
        self.open -= 1;
        let counted = session.clear(&mut self.flows);
        self.across.add(&counted);
        let [to_peer, to_client] = counted.pairs();
        server.count_across(allocation, to_peer, to_client);
        counted.and(session.late)
    }

    /// Channels outside of this range end for ChannelData.
    pub(super) fn restrict<G: Gate>(&mut self, range: ChannelRange, server: &mut Server<G>) {
        self.range = range;
        let is_out = |channel: &Channel| ChannelNumber::within(range, channel.number.get()).is_none();
        for index in 0..self.sessions.len() {
            let Some(allocation) = self.sessions[index].as_ref().map(|session| session.allocation) else {
                continue;
            };
            self.with(allocation, server, |session, flows| {
                for channel in session.channels.iter_mut().filter(|channel| is_out(channel)) {
                    if let Some(flow) = channel.to_peer.take() {
                        flows.remove(flow);
                    }
                }
                Across::default()
            });
        }
    }

    /// Before the worker waits for events: how long at most.
    pub(super) fn before_wait(&mut self) -> Option<Duration> {
        self.emptied.before_wait(now_ns())
    }

    /// What the worker was told, and how much its sockets have lost so far. `are_all` says that there is nothing else ready.
    pub(super) fn after_wait(&mut self, events: &[Event], are_all: bool, lost: u64) {
        self.emptied.after_wait(now_ns(), events, are_all, lost, &self.flows);
    }

    /// A receive call has emptied this socket; what it brought is still to be sent.
    pub(super) fn received(&mut self, socket: SocketId) {
        self.emptied.received(socket);
    }

    /// All that was received has been sent.
    pub(super) fn flushed(&mut self) {
        self.emptied.flushed(&self.flows);
    }

    /// Reads the counters of some sessions. True if there was something.
    pub(super) fn sweep<G: Gate>(&mut self, now_ms: u64, server: &mut Server<G>) -> bool {
        if now_ms < self.swept_ms + SWEEP_MS {
            return false;
        }
        self.swept_ms = now_ms;
        self.sweep = (self.sweep + 1) % SWEEPS;
        let mut any = false;
        for index in (self.sweep..self.sessions.len()).step_by(SWEEPS) {
            let Some(session) = &mut self.sessions[index] else { continue };
            let (allocation, counted) = (session.allocation, session.counted(&self.flows));
            if !counted.is_zero() {
                self.across.add(&counted);
                let [to_peer, to_client] = counted.pairs();
                server.count_across(allocation, to_peer, to_client);
                any = true;
            }
        }
        any
    }

    /// When the next counters are due, in milliseconds.
    pub(super) fn due(&self) -> Option<u64> {
        (self.open > 0).then_some(self.swept_ms + SWEEP_MS)
    }

    fn open(&mut self, allocation: AllocationId, client: &Client, link: Link) {
        let index = allocation.index as usize;
        if self.sessions.len() <= index {
            self.sessions.resize_with(index + 1, || None);
        }
        // Only a session that ended has left its slot.
        self.open += 1;
        self.sessions[index] = Some(Box::new(Session {
            allocation,
            client: by_datagrams(client, link),
            own: None,
            permissions: Vec::new(),
            channels: Vec::new(),
            late: Across::default(),
        }));
    }

    fn session(&mut self, allocation: AllocationId) -> Option<&mut Session> {
        let session = self.sessions.get_mut(allocation.index as usize)?.as_deref_mut()?;
        (session.allocation == allocation).then_some(session)
    }

    /// Changes a session, and books what the flows counted that ended by that.
    fn with<G: Gate>(
        &mut self,
        allocation: AllocationId,
        server: &mut Server<G>,
        change: impl FnOnce(&mut Session, &mut Flows) -> Across,
    ) {
        let Some(Some(session)) = self.sessions.get_mut(allocation.index as usize) else { return };
        if session.allocation != allocation {
            return;
        }
        let counted = change(session, &mut self.flows);
        self.across.add(&counted);
        let [to_peer, to_client] = counted.pairs();
        // Where it has ended already, its totals stand in an effect that is still to come.
        if !server.count_across(allocation, to_peer, to_client) {
            session.late.add(&counted);
        }
    }

    /// Installs the flows of these channels, or lets them live as long as they may by now.
    fn renew(
        &mut self,
        allocation: AllocationId,
        listeners: &[Option<(SocketId, bool)>],
        which: impl Fn(&Channel) -> bool,
    ) {
        let index = allocation.index as usize;
        let Some(Some(session)) = self.sessions.get_mut(index) else { return };
        let Some(client) = session.client.filter(|_| session.allocation == allocation) else { return };
        if session.channels.is_empty() || is_link_local(client.address) {
            return;
        }
        let (flows, emptied) = (&mut self.flows, &mut self.emptied);
        let Some((listener, _)) = listeners.get(usize::from(client.listener.0)).copied().flatten() else {
            return;
        };
        let Some(from_clients) = emptied.slot(listener, || flows.socket()) else { return };
        if session.own.is_none() {
            let Ok(state) = flows.state() else { return };
            let own = NewFlow {
                kind: Kind::Client,
                remote: client.address,
                local: client.local,
                channel: None,
                from: client.local,
                to: client.address,
                state: &state,
                socket: from_clients,
                expires_ns: u64::MAX,
            };
            let Ok(installed) = flows.install(&own) else {
                flows.give_back_state(state);
                return;
            };
            session.own = Some((installed, state));
        }
        let Some((_, own)) = &session.own else { return };
        let permissions = &session.permissions;
        for channel in session.channels.iter_mut().filter(|channel| which(channel)) {
            let relays = self.relays.get(index).copied().unwrap_or_default();
            let Some(relay) = relays[side(family_of(channel.peer.ip()))] else { continue };
            if is_link_local(channel.peer) {
                continue;
            }
            let ns = |ms: u64| self.base_ns.saturating_add(ms.saturating_mul(1_000_000));
            let expires_ns = ns(channel.expires_ms);
            match &mut channel.to_peer {
                Some(flow) => _ = flows.extend(flow, expires_ns),
                // Since a reload, the state machine drops it.
                None if ChannelNumber::within(self.range, channel.number.get()).is_none() => {}
                None => {
                    flows.hold_up(own);
                    emptied.touch(listener);
                    let flow = NewFlow {
                        kind: Kind::ToPeer,
                        remote: client.address,
                        local: client.local,
                        channel: Some(channel.number),
                        from: relay.bound,
                        to: channel.peer,
                        state: own,
                        socket: from_clients,
                        expires_ns,
                    };
                    channel.to_peer = flows.install(&flow).ok();
                }
            }
            // RFC 8656 section 9: a channel does not stand in for the permission.
            let permitted = permissions.iter().find(|(ip, _)| *ip == channel.peer.ip());
            let Some((_, permitted_ms)) = permitted else { continue };
            let expires_ns = ns(channel.expires_ms.min(*permitted_ms));
            if let Some((flow, _)) = &mut channel.to_client {
                let _ = flows.extend(flow, expires_ns);
                continue;
            }
            let Some(from_peers) = emptied.slot(relay.id, || flows.socket()) else { continue };
            let Ok(state) = flows.state() else { continue };
            emptied.touch(relay.id);
            let flow = NewFlow {
                kind: Kind::ToClient,
                remote: channel.peer,
                local: relay.bound,
                channel: Some(channel.number),
                from: client.local,
                to: client.address,
                state: &state,
                socket: from_peers,
                expires_ns,
            };
            match flows.install(&flow) {
                Ok(flow) => channel.to_client = Some((flow, state)),
                Err(_) => _ = flows.give_back_state(state),
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

impl Session {
    /// What was counted since the last time.
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

    /// Removes these channels.
    fn unbind(&mut self, flows: &mut Flows, which: impl Fn(&Channel) -> bool) -> Across {
        let mut sum = Across::default();
        self.channels.retain_mut(|channel| {
            let ends = which(channel);
            if ends {
                sum.add(&channel.clear(flows));
            }
            !ends
        });
        if self.channels.is_empty() {
            sum.add(&self.clear(flows));
        }
        sum
    }

    /// Removes all flows. Channels and permissions are remembered.
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
    fn clear(&mut self, flows: &mut Flows) -> Across {
        if let Some(flow) = self.to_peer.take() {
            flows.remove(flow);
        }
        self.refuse_peer(flows)
    }

    /// The peer has no permission any more.
    fn refuse_peer(&mut self, flows: &mut Flows) -> Across {
        let Some((flow, state)) = self.to_client.take() else { return Across::default() };
        flows.remove(flow);
        Across { to_client: flows.give_back_state(state), ..Across::default() }
    }
}

/// The client, if it is reached by plain UDP.
fn by_datagrams(client: &Client, link: Link) -> Option<Client> {
    (Way::of(link) == Way::Datagrams).then_some(*client)
}

fn family_of(ip: IpAddr) -> Family {
    if ip.is_ipv4() { Family::V4 } else { Family::V6 }
}

/// Such an address needs an interface beside it, which no key has.
fn is_link_local(address: SocketAddr) -> bool {
    matches!(address.ip(), IpAddr::V6(ip) if ip.is_unicast_link_local())
}

#[cfg(test)]
mod tests;
