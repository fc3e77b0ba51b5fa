//! A TURN server as a state machine, in two planes:
//!
//! ```text
//!  packets    from_client, from_peer, from_icmp ──▶ forwarding table ──▶ Verdict
//!                                                        ▲
//!  requests   from_client, opened, connected, … ──▶ one queue of effects ──▶ poll_effect: the runtime, logs, kernel tables
//! ```
//!
//! Feed it a packet, carry out the [`Verdict`], drain [`Server::poll_effect`] before the next call, and call
//! [`Server::handle_timeout`] when [`Server::poll_timeout`] is due. Each worker has its own server; they
//! share only the tables and counters passed in through the configuration.
//!
//! Memory is bounded: allocations by the policy's quotas, permissions and channels by the configuration,
//! pending lookups and tombstones by number and time, effects by draining. An unauthenticated datagram leaves
//! no state behind.

mod allocation_state;
mod auth;
pub mod config;
mod data;
pub mod effect;
mod limits;
mod mobility;
mod policy;
mod relay_address;
mod request;
pub mod stats;
mod usage;
mod view;

use std::sync::Arc;

use smallvec::SmallVec;
use turnpike_wire::{
    demux::{self, Kind},
    indication::{self, Indication},
};

pub use crate::family::Family;
use crate::{
    random::{Random, Seed},
    time::Now,
};
pub use allocation_state::{AllocationId, InvalidAllocationId};
use allocation_state::{AllocationState, AllocationStates};
use auth::{lookups::Lookups, realm::Realms};
pub use auth::{
    lookups::{CredentialQuery, LookupId, LookupResult, OwnedUser},
    realm::{Realm, RealmId, canonical_origin},
    replay::ReplayGuard,
    third_party::{IssuerKey, ThirdParty},
};
pub use config::{ListenerProfile, NonceKey, NonceKeys, ServerConfig, StoreFailure, Transport};
pub use data::{
    DataPlane,
    bandwidth::{Bandwidth, HeldUp, Pools, RateLevel, Rates, Way},
    data_path::IcmpError,
    drop_reason::DropReason,
    forwarding::relayed_ttl,
    quality::{
        KERNEL_STREAMS, KernelMeter, KernelStream, KernelStreams, KnownStream, Measured, MeasuredFlow,
        MeasuredLeg, QualityLevel, QualityReport,
    },
    tap::{Tap, TapRefusal, TappedDatagram},
    verdict::{AllocationSlot, Client, Header, Link, ListenerId, RelayId, SharedPort, Source, Verdict},
};
use data::{
    bandwidth::Leases,
    forwarding::{Binding, Channel, ForwardingEntry},
    timers::Timers,
};
pub use effect::{
    ClosedReason, CredentialRefusal, Effect, OpenRelay, OpenRequest, OpenResult, PortRequest, RelayTransport,
    RequestRefusal, TokenProblem,
};
pub use limits::{AllocationLimits, ConnectionLimits, RealmLimits, ServerLimits};
pub use mobility::{
    handoff::{MoveRequest, PendingMove},
    moved::Moved,
    owners::MobileOwners,
    worker_id::WorkerId,
};
use mobility::{pending_moves::PendingMoves, tombstones::Tombstones};
use policy::amplification::AmplificationGuard;
pub use policy::{
    AllocateAttempt, CredentialCheck, Destination, Policy, QuotaRefusal, Quotas, Redirects, Restrictions,
    User, UserRef, Users, VolumeLimits,
    alternate::{Alternate, AlternateWhen, Occasion},
    amplification::RefusalLimit,
    client_rules::{ClientNetwork, ClientNetworks, ClientRule, ClientRules, Country},
    duration_limit::MaxAllocationDuration,
    own_endpoints::OwnEndpoints,
    peer_rules::{AllowRule, Cidr, PeerDenial, PeerRules, SPECIAL},
    prefix::PrefixLengths,
};
pub use relay_address::RelayAddress;
use request::{
    Delivery, connection_table::Connections, dispatch::Disposition, nat_discovery::DiscoveryRate,
    refusal_log::RefusalLog,
};
pub use request::{
    MAX_REQUEST_LEN, Method,
    bad_request::{BadRequest, Fault},
    connection_table::{ConnectionCounts, ConnectionId},
    connections::{ConnectError, ConnectRequest, PeerConnection},
    nat_discovery::{DiscoveryLimits, MAX_PADDING, MIN_RESPONSE_PORT, NatDiscovery},
};
pub use stats::{ConnectionRefusal, Stats};
pub use usage::{AllocationUsage, UsageReport};
pub use view::AllocationView;

pub struct Server<P> {
    pub data: DataPlane,
    config: Arc<ServerConfig>,
    realms: Realms,
    policy: P,
    states: AllocationStates,
    tombstones: Tombstones,
    refusals: RefusalLog,
    peer_refusals: RefusalLog,
    request_refusals: RefusalLog,
    /// Rate-limits log entries about unauthenticated clients.
    stranger_refusals: RefusalLog,
    repeated_refusals: turnpike_rates::Rates,
    discovery_rate: DiscoveryRate,
    /// Limits how often responses to plain Binding requests contain OTHER-ADDRESS.
    hint_rate: DiscoveryRate,
    short_request_rate: turnpike_rates::Rates,
    amplification: AmplificationGuard,
    pools: Pools,
    leases: Leases,
    replays: ReplayGuard,
    owners: MobileOwners,
    /// Buffer that [`Verdict::Reply`] borrows from.
    reply: Vec<u8>,
    draining: bool,
    /// Round-robin position among the alternate servers.
    alternate_turn: usize,
    random: Random,
    worker_id: WorkerId,
    connections: Connections,
    /// Deadlines of peer connections that are unbound or still being established, by allocation.
    connection_timers: Timers,
    pending_moves: PendingMoves,
    lookups: Lookups,
}

impl<P: Policy> Server<P> {
    #[must_use]
    pub fn new(config: Arc<ServerConfig>, policy: P, seed: Seed) -> Self {
        Self::for_worker(config, policy, WorkerId::ONLY, seed)
    }

    /// All workers share `config`, but each needs its own seed.
    #[must_use]
    pub fn for_worker(config: Arc<ServerConfig>, policy: P, worker_id: WorkerId, seed: Seed) -> Self {
        let (mut random, worker_id) = (Random::new(seed), worker_id.on(config.node));
        Self {
            data: DataPlane::new(Arc::clone(&config), random.bytes()),
            realms: Realms::new(&config),
            policy,
            states: AllocationStates::default(),
            tombstones: Tombstones::new(&config.own_key.0),
            refusals: RefusalLog::default(),
            peer_refusals: RefusalLog::default(),
            request_refusals: RefusalLog::default(),
            stranger_refusals: RefusalLog::default(),
            repeated_refusals: request::repeated_refusals::repeated_refusals(),
            discovery_rate: DiscoveryRate::default(),
            hint_rate: DiscoveryRate::default(),
            short_request_rate: auth::short_request_rate(),
            amplification: AmplificationGuard::default(),
            pools: config.pools.clone(),
            leases: Leases::default(),
            replays: config.replays.ready(&config.own_key.0),
            owners: config.owners.clone(),
            reply: Vec::with_capacity(512),
            draining: false,
            alternate_turn: 0,
            random,
            worker_id,
            connections: Connections::new(worker_id, config.connection_counts.clone()),
            connection_timers: Timers::new(),
            pending_moves: PendingMoves::new(),
            lookups: Lookups::default(),
            config,
        }
    }

    /// Addresses must be canonical ([`turnpike_wire::address::canonical`]).
    #[inline]
    pub fn from_client<'a>(&'a mut self, now: Now, source: &Source, datagram: &'a [u8]) -> Verdict<'a> {
        let kind = demux::classify(datagram);
        match kind {
            Kind::Other => return self.data.dropped(DropReason::NotStun),
            Kind::Stun if !indication::is(Indication::Send, datagram) => {
                return self.request(now, source, Delivery::Direct, datagram);
            }
            Kind::Stun | Kind::ChannelData => {}
        }
        match self.data.forwarding.find(&source.client) {
            Some(index) => self.data.relay_from_client(now, index, kind, datagram),
            None => self.unknown_client(now, source, kind, datagram),
        }
    }

    /// Enables [`Effect::Used`], for offload tables that have room for only some of the channels.
    pub fn tell_first_use(&mut self) {
        self.data.tells_use = true;
    }

    /// Reports the result of an [`OpenRequest`], exactly once; the verdict is the reply to the client. An
    /// opened socket belongs to the allocation until an effect closes it. One of two sockets is enough (RFC
    /// 8656 section 7.2 step 9). If the allocation has ended in the meantime ([`Server::close_all`]),
    /// [`Effect::RelayClosed`] returns the sockets.
    pub fn opened(
        &mut self,
        now: Now,
        allocation: AllocationSlot,
        first: OpenResult,
        second: Option<OpenResult>,
    ) -> Verdict<'_> {
        if self.data.forwarding.get(allocation).is_none() {
            for relayed in [Some(first), second].into_iter().flatten().filter_map(|result| result.relayed()) {
                let relay = RelayId { allocation, family: Family::of(relayed.ip()) };
                self.data.effects.push_back(Effect::RelayClosed { relay });
            }
        }
        match self.finish_allocate(now, allocation, first, second) {
            Some(Source { client, link }) => Verdict::Reply { client, link, bytes: &self.reply },
            None => self.data.dropped(DropReason::StaleRelay),
        }
    }

    #[must_use]
    pub fn has_effects(&self) -> bool {
        !self.data.effects.is_empty()
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        let effect = self.data.effects.pop_front();
        // If many allocations expire at once, thousands of effects can be queued; release that memory
        // afterwards.
        if effect.is_none() && self.data.effects.capacity() > data::MAX_QUEUED {
            self.data.effects.shrink_to(data::MAX_QUEUED);
        }
        effect
    }

    /// Time of the next [`Server::handle_timeout`], in [`Now::ms`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let due = [self.data.forwarding.next_due(), self.connection_timers.next(), self.lookups.next_due()];
        due.into_iter().flatten().min()
    }

    pub fn handle_timeout(&mut self, now: Now) {
        while let Some(index) = self.connection_timers.pop(now.ms) {
            self.expire_connections(now, index);
        }
        while let Some(index) = self.data.forwarding.due(now.ms) {
            self.expire(now, index);
        }
        while self.lookups.expire(now.ms) {
            self.data.stats.drop(DropReason::LookupOver);
        }
    }

    /// While draining, new Allocates get 508, or 300 if an alternate server is available.
    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Allocations survive, except those of removed realms and refused clients. Ends permissions and channels to peers that the
    /// new rules refuse. New bandwidth and duration limits apply to existing allocations; new quotas apply
    /// only to new allocations.
    pub fn reconfigure(&mut self, now: Now, config: Arc<ServerConfig>) {
        self.realms = Realms::new(&config);
        self.worker_id = self.worker_id.on(config.node);
        self.config = Arc::clone(&config);
        self.data.reconfigure(Arc::clone(&config));
        for index in self.data.forwarding.indices() {
            self.end_refused(now, index);
            self.end_contested(now, index);
            self.lead_channels(now, index, &config.peers.own);
            self.permit_by_channels(now, index);
        }
        for index in self.data.forwarding.indices() {
            let Some((_, entry)) = self.data.forwarding.at(index) else { continue };
            let is_admitted = entry.away || config.clients.admits(entry.client.address.ip());
            let Some(state) = self.states.get(index) else { continue };
            let (has_realm, is_open) = (self.realms.has(&state.realm), state.pending.is_none());
            if !(has_realm && is_admitted) {
                self.close(now, index, ClosedReason::Administrator);
            } else if is_open {
                self.shorten(now, index);
                self.apply_rates(now, index);
            }
        }
    }

    /// Applies peer rules and maximum duration, which a reload may have changed while the allocation was in
    /// transit. Its rates were applied when it was adopted.
    fn conform(&mut self, now: Now, index: u32) {
        self.end_refused(now, index);
        self.shorten(now, index);
    }

    fn end_refused(&mut self, now: Now, index: u32) {
        let Some(state) = self.states.get(index) else { return };
        let config = Arc::clone(&self.config);
        let peers = config.peers_in(&state.realm);
        self.end_bindings(now, index, |binding| match binding {
            Binding::Permission(ip, _) => !peers.permits(*ip),
            Binding::Channel(channel) => !peers.permits_endpoint(channel.name()),
        });
        self.close_connections(index, |peer| !peers.permits_endpoint(peer));
    }

    #[must_use]
    pub fn serves(&mut self, listener: ListenerId) -> bool {
        self.data.forwarding.indices().any(|index| {
            let found = self.data.forwarding.at(index);
            found.is_some_and(|(_, entry)| entry.client.listener == listener && !entry.away)
        })
    }

    /// Returns false if the allocation came from a worker that has not reloaded yet.
    pub fn has_realm_of(&mut self, allocation: AllocationSlot) -> bool {
        let Some(state) = self.state(allocation) else { return false };
        let realm = Arc::clone(&state.realm);
        self.realms.has(&realm)
    }

    #[must_use]
    pub fn has_realm(&self, name: &str) -> bool {
        self.realms.has(name)
    }

    pub fn owner(&mut self, allocation: AllocationSlot) -> Option<UserRef<'_>> {
        self.state(allocation).map(AllocationState::user)
    }

    pub fn user_at(&mut self, client: &Client) -> Option<(Arc<str>, Box<str>)> {
        let index = self.data.forwarding.find(client)?;
        let state = self.states.get(index)?;
        Some((Arc::clone(&state.realm), (&*state.username).into()))
    }

    pub fn link(&mut self, allocation: AllocationSlot) -> Option<Link> {
        self.data.forwarding.get(allocation).map(|entry| entry.link)
    }

    /// `None` if the allocation has ended or its client is away.
    pub fn reached(&mut self, allocation: AllocationSlot) -> Option<(Client, Link)> {
        let entry = self.data.forwarding.get(allocation).filter(|entry| !entry.away)?;
        Some((entry.client, entry.link))
    }

    pub fn close_all(&mut self, now: Now, reason: ClosedReason) {
        for index in self.data.forwarding.indices() {
            self.close(now, index, reason);
        }
    }

    pub fn close_one(&mut self, now: Now, allocation: AllocationSlot, reason: ClosedReason) -> bool {
        let exists = self.data.forwarding.get(allocation).is_some();
        if exists {
            self.close(now, allocation.index, reason);
        }
        exists
    }

    pub fn relays(&mut self) -> Vec<RelayId> {
        let mut relays = Vec::new();
        for index in self.data.forwarding.indices() {
            let Some((allocation, entry)) = self.data.forwarding.at(index) else { continue };
            let families = [Family::V4, Family::V6].into_iter().filter(|family| entry.has(*family));
            relays.extend(families.map(|family| RelayId { allocation, family }));
        }
        relays
    }

    /// Ends one relayed address. The allocation ends with its last one.
    pub fn end_relay(&mut self, now: Now, relay: RelayId, reason: ClosedReason) {
        match self.data.forwarding.get(relay.allocation) {
            Some(entry) if !entry.has(relay.family) => {}
            Some(entry) if entry.relays.iter().flatten().count() > 1 => self.close_relay(now, relay),
            Some(_) => self.close(now, relay.allocation.index, reason),
            None => {}
        }
    }

    #[must_use]
    pub fn allocations(&self) -> usize {
        self.data.forwarding.len()
    }

    /// Number of allocations by listener number; trailing zeros may be missing.
    #[must_use]
    pub fn allocations_by_listener(&self) -> &[u32] {
        self.data.forwarding.by_listener()
    }

    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.data.stats
    }

    /// Adds offloaded traffic. Returns false if the allocation has ended; the totals still include the
    /// traffic.
    pub fn count_across(
        &mut self,
        allocation: AllocationSlot,
        to_peer: (u64, u64),
        to_client: (u64, u64),
    ) -> bool {
        self.data.stats.to_peer_datagrams += to_peer.0;
        self.data.stats.to_peer_bytes += to_peer.1;
        self.data.stats.to_client_datagrams += to_client.0;
        self.data.stats.to_client_bytes += to_client.1;
        let Some(entry) = self.data.forwarding.get(allocation) else { return false };
        for (sum, more) in [(&mut entry.to_peer, to_peer), (&mut entry.to_client, to_client)] {
            *sum = (sum.0 + more.0, sum.1 + more.1);
        }
        true
    }

    pub fn policy_mut(&mut self) -> &mut P {
        &mut self.policy
    }

    fn allocation(
        &mut self,
        index: u32,
    ) -> Option<(AllocationSlot, &mut ForwardingEntry, &mut AllocationState)> {
        let (id, entry) = self.data.forwarding.at(index)?;
        Some((id, entry, self.states.get(index)?))
    }

    fn state(&mut self, id: AllocationSlot) -> Option<&AllocationState> {
        self.data.forwarding.get(id)?;
        self.states.get(id.index).map(|state| &*state)
    }

    fn is_stream(&self, client: &Client) -> bool {
        self.config.listener(client.listener).transport.is_stream()
    }

    fn expire(&mut self, now: Now, index: u32) {
        while let Some((id, entry)) = self.data.forwarding.at(index)
            && let Some(family) = entry.expired_relay(now.ms)
        {
            if entry.relays.iter().flatten().count() == 1 {
                let reason = self.why_over(now, index);
                self.close(now, index, reason);
                return;
            }
            self.close_relay(now, RelayId { allocation: id, family });
        }
        self.sweep(now, index);
        self.data.forwarding.arm(now.ms, index);
    }

    fn sweep(&mut self, now: Now, index: u32) {
        self.end_bindings(now, index, |binding| binding.expires_ms() <= now.ms);
    }

    fn end_bindings(&mut self, now: Now, index: u32, is_over: impl Fn(&Binding) -> bool) {
        let Some((allocation, entry)) = self.data.forwarding.at(index) else { return };
        let over: SmallVec<[Binding; 4]> = entry.bindings().filter(is_over).collect();
        for binding in over {
            self.data.emit(
                now,
                match binding {
                    Binding::Permission(peer, _) => Effect::PermissionEnded { allocation, peer },
                    Binding::Channel(channel) => {
                        Effect::Unbound { allocation, number: channel.number, peer: channel.name() }
                    }
                },
            );
        }
    }

    /// Updates the addresses behind channels after a NAT mapping was added or removed.
    fn lead_channels(&mut self, now: Now, index: u32, own: &OwnEndpoints) {
        let Some((allocation, entry)) = self.data.forwarding.at(index) else { return };
        let is_elsewhere = |channel: &&Channel| own.internal(channel.name()) != channel.peer;
        let elsewhere: SmallVec<[Channel; 4]> = entry.channels.iter().filter(is_elsewhere).copied().collect();
        for channel in elsewhere {
            let (peer, Channel { number, expires_ms, .. }) = (channel.name(), channel);
            self.data.emit(now, Effect::Unbound { allocation, number, peer });
            let at = own.internal(peer);
            self.data.emit(now, Effect::Bound { allocation, number, peer, at, expires_ms, renewed: false });
        }
    }

    fn tell_bindings(&mut self, allocation: AllocationSlot) {
        let Some(entry) = self.data.forwarding.get(allocation) else { return };
        self.data.effects.extend(entry.bindings().map(|binding| match binding {
            Binding::Permission(peer, expires_ms) => {
                Effect::Permitted { allocation, peer, expires_ms, renewed: false }
            }
            Binding::Channel(channel) => {
                let Channel { number, peer: at, expires_ms, .. } = channel;
                Effect::Bound { allocation, number, peer: channel.name(), at, expires_ms, renewed: false }
            }
        }));
    }

    fn close_relay(&mut self, now: Now, relay: RelayId) {
        let index = relay.allocation.index;
        if let Some((_, entry, state)) = self.allocation(index) {
            state.former = entry.relays[relay.family as usize].map(|relay| Box::new(relay.address));
        }
        self.data.emit(now, Effect::RelayClosed { relay });
        self.close_connections(index, |peer| Family::of(peer.ip()) == relay.family);
    }

    fn close(&mut self, now: Now, index: u32, reason: ClosedReason) {
        let Some(state) = self.states.remove(index) else { return };
        let Some((id, entry)) = self.data.forwarding.at(index) else { return };
        let closed = Effect::Closed {
            allocation: id,
            id: state.id,
            client: entry.client,
            relayed: state.relayed(entry),
            transport: self.config.listener(entry.client.listener).transport,
            relay_transport: if entry.relays_tcp { RelayTransport::Tcp } else { RelayTransport::Udp },
            realm: Arc::clone(&state.realm),
            username: state.username.clone(),
            identity: state.identity.clone(),
            reason,
            away: entry.away,
            lived_ms: now.ms.wrapping_sub(state.opened_ms),
            to_peer: entry.to_peer,
            to_client: entry.to_client,
            reported: state.reported.clone(),
        };
        self.data.emit(now, closed);
        self.connection_timers.cancel(index);
        self.connections.forget(&state);
        self.forget_arrival(&state);
        if let Some(mobility) = &state.mobility {
            self.owners.remove(mobility.key.0);
            if let Some((source, worker)) = mobility.arriving {
                self.arrives_no_more(worker, source.client, mobility.key.0);
            }
        }
        self.policy.release(state.user(), state.prefix);
        // An allocation still waiting for its sockets was never counted as opened.
        if state.pending.is_none() {
            self.data.stats.closed(reason);
        }
    }

    fn forget_arrival(&mut self, state: &AllocationState) {
        if let Some(mobility) = &state.mobility {
            let arriving = mobility.arriving.as_ref().map(|(source, _)| &source.client);
            self.pending_moves.forget(mobility.key.0, arriving);
        }
    }
}
