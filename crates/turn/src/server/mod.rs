//! A TURN server as a state machine, in two planes:
//!
//! ```text
//!  packets    from_client, from_peer, from_icmp ──▶ forwarding table ──▶ Verdict
//!                                                        ▲
//!  requests   from_client, opened, connected, … ──▶ one queue of effects ──▶ poll_effect: the runtime, logs, tables elsewhere
//! ```
//!
//! Feed it, carry out the [`Verdict`], drain [`Server::poll_effect`] before the next call, and call [`Server::handle_timeout`] when
//! [`Server::poll_timeout`] says so. One server per worker; nothing in it is shared.
//!
//! What it remembers is bounded: allocations by the policy's quotas, permissions and channels by the configuration, requests that wait for
//! credentials and deletions by number and time, effects by being drained. A datagram that does not authenticate leaves nothing.

mod auth;
pub mod config;
mod data;
pub mod effect;
mod limits;
mod mobility;
mod policy;
mod relay_address;
mod request;
mod session;
pub mod stats;
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
    rates,
    time::Now,
};
use auth::{lookups::Lookups, realm::Realms};
pub use auth::{
    lookups::{Asked, CredentialQuery, Credentials, LookupId},
    realm::{Realm, RealmId, canonical_origin},
    replay::ReplayGuard,
    third_party::{IssuerKey, ThirdParty},
};
pub use config::{ListenerProfile, NonceKey, NonceKeys, ServerConfig, StoreFailure, Transport};
pub use data::{
    DataPlane,
    bandwidth::{Bandwidth, HeldUp, Level, Pools, Rates, Way},
    data_path::IcmpError,
    drop_reason::DropReason,
    forwarding::relayed_ttl,
    verdict::{AllocationId, Client, Header, Link, ListenerId, RelayId, SharedPort, Source, Verdict},
};
use data::{
    bandwidth::Leases,
    forwarding::{Binding, Channel, Entry},
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
    AllocateAttempt, Destination, Lookup, Policy, QuotaRefusal, Quotas, Redirects, Restrictions, User,
    UserRef, Users,
    alternate::{Alternate, AlternateWhen, Occasion},
    amplification::RefusalLimit,
    own_endpoints::OwnEndpoints,
    peer_rules::{AllowRule, Cidr, PeerDenial, PeerRules, SPECIAL},
    prefix::PrefixLengths,
    session_limit::MaxSessionDuration,
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
pub use session::{NoSessionId, SessionId};
use session::{Session, Sessions};
pub use stats::{ConnectionRefusal, Stats};
pub use view::SessionView;

/// The state of one worker.
pub struct Server<P> {
    /// The part that packets need.
    pub data: DataPlane,
    config: Arc<ServerConfig>,
    /// Made from the configuration.
    realms: Realms,
    policy: P,
    sessions: Sessions,
    tombstones: Tombstones,
    refusals: RefusalLog,
    peer_refusals: RefusalLog,
    request_refusals: RefusalLog,
    /// Refusals of clients that have not proved who they are.
    stranger_refusals: RefusalLog,
    /// Answers to 5-tuples that repeat a refused request.
    repeated_refusals: rates::Rates,
    discovery_rate: DiscoveryRate,
    /// Of those who ask for nothing, and are told nevertheless.
    hint_rate: DiscoveryRate,
    short_request_rate: rates::Rates,
    amplification: AmplificationGuard,
    pools: Pools,
    leases: Leases,
    replays: ReplayGuard,
    owners: MobileOwners,
    /// The message that [`Verdict::Reply`] lends out.
    reply: Vec<u8>,
    draining: bool,
    /// Whose turn it is among the alternate servers.
    alternate_turn: usize,
    random: Random,
    worker_id: WorkerId,
    connections: Connections,
    /// When connections that nobody has bound, or made, are looked at; by allocation.
    connection_timers: Timers,
    pending_moves: PendingMoves,
    lookups: Lookups,
}

impl<P: Policy> Server<P> {
    /// An empty server with one worker. See [`ServerConfig::check`] for what the configuration must hold.
    #[must_use]
    pub fn new(config: Arc<ServerConfig>, policy: P, seed: Seed) -> Self {
        Self::for_worker(config, policy, WorkerId::ONLY, seed)
    }

    /// One worker of an empty server. The configuration is the same for all of them, and so is what a [`ListenerId`]
    /// stands for; the seed is not.
    #[must_use]
    pub fn for_worker(config: Arc<ServerConfig>, policy: P, worker_id: WorkerId, seed: Seed) -> Self {
        let (mut random, worker_id) = (Random::new(seed), worker_id.on(config.node));
        Self {
            data: DataPlane::new(Arc::clone(&config), random.bytes()),
            realms: Realms::new(&config),
            policy,
            sessions: Sessions::default(),
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

    /// Feeds a datagram that a client sent. Addresses are canonical ([`turnpike_wire::address::canonical`]).
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

    /// From now on, [`Effect::Used`] says which channels are used: for a table elsewhere that has no place for others.
    pub fn tell_first_use(&mut self) {
        self.data.tells_use = true;
    }

    /// Says how an [`OpenRequest`] went; the verdict is the reply to the client. A relay socket reported as
    /// [`OpenResult::Opened`] or [`OpenResult::Shared`] is the allocation's until an effect closes it; of any other the runtime has
    /// nothing left. If only one of two opened, whichever, the allocation lives with that one (RFC 8656 section 7.2 step 9).
    ///
    /// Must be called once for each request. If the allocation is gone by then ([`Server::close_all`]), what was opened is
    /// given back by [`Effect::RelayClosed`].
    pub fn opened(
        &mut self,
        now: Now,
        allocation: AllocationId,
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

    /// Whether [`Server::poll_effect`] has something.
    #[must_use]
    pub fn has_effects(&self) -> bool {
        !self.data.effects.is_empty()
    }

    /// The next thing to do, if any.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        let effect = self.data.effects.pop_front();
        // Thousands of allocations may end at once, which is no reason to keep room for as many.
        if effect.is_none() && self.data.effects.capacity() > data::MAX_QUEUED {
            self.data.effects.shrink_to(data::MAX_QUEUED);
        }
        effect
    }

    /// When [`Server::handle_timeout`] wants to be called, in [`Now::ms`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let due = [self.data.forwarding.next_due(), self.connection_timers.next(), self.lookups.next_due()];
        due.into_iter().flatten().min()
    }

    /// Expires what is due.
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

    /// While it drains, Allocate is answered with 508, or with 300 where there is another server to go to, and what exists lives on
    /// (graceful stop).
    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Replaces configuration for what happens from now on (reload). Allocations live on, but not their permissions and
    /// channels to peers that the new rules refuse, nor those of a realm that is no more: nobody could refresh them, and a
    /// user of the same name in another realm is somebody else. A realm with another name is another realm. New limits of bits per
    /// second and of age hold for what there is, new quotas for what comes.
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
            let Some(session) = self.sessions.get(index) else { continue };
            let (has_realm, is_open) = (self.realms.has(&session.realm), session.pending.is_none());
            if !has_realm {
                self.close(now, index, ClosedReason::Administrator);
            } else if is_open {
                self.shorten(now, index);
                self.limit(now, index);
            }
        }
    }

    /// Ends what an allocation may no more have. One that comes from another worker may have been on its way while this one was
    /// reconfigured.
    fn conform(&mut self, now: Now, index: u32) {
        self.end_refused(now, index);
        self.shorten(now, index);
    }

    /// Ends permissions, channels and connections to peers that the rules of its realm refuse.
    fn end_refused(&mut self, now: Now, index: u32) {
        let Some(session) = self.sessions.get(index) else { return };
        let config = Arc::clone(&self.config);
        let peers = config.peers_in(&session.realm);
        self.end_bindings(now, index, |binding| match binding {
            Binding::Permission(ip, _) => !peers.permits(*ip),
            Binding::Channel(channel) => !peers.permits_endpoint(channel.name()),
        });
        self.close_connections(index, |peer| !peers.permits_endpoint(peer));
    }

    /// Whether a client of this listener has an allocation.
    #[must_use]
    pub fn serves(&mut self, listener: ListenerId) -> bool {
        self.data.forwarding.indices().any(|index| {
            let found = self.data.forwarding.at(index);
            found.is_some_and(|(_, entry)| entry.client.listener == listener && !entry.away)
        })
    }

    /// Whether the realm of this allocation is configured. One that comes from a worker which has not yet been reconfigured
    /// may have none.
    pub fn has_realm_of(&mut self, allocation: AllocationId) -> bool {
        let Some(session) = self.session(allocation) else { return false };
        let realm = Arc::clone(&session.realm);
        self.realms.has(&realm)
    }

    /// Whether a realm of this name is configured.
    #[must_use]
    pub fn has_realm(&self, name: &str) -> bool {
        self.realms.has(name)
    }

    /// The user of an allocation.
    pub fn owner(&mut self, allocation: AllocationId) -> Option<UserRef<'_>> {
        self.session(allocation).map(Session::user)
    }

    /// Realm and username of the allocation on this 5-tuple.
    pub fn user_at(&mut self, client: &Client) -> Option<(Arc<str>, Box<str>)> {
        let index = self.data.forwarding.find(client)?;
        let session = self.sessions.get(index)?;
        Some((Arc::clone(&session.realm), (&*session.username).into()))
    }

    /// The way to the client of an allocation.
    pub fn link(&mut self, allocation: AllocationId) -> Option<Link> {
        self.data.forwarding.get(allocation).map(|entry| entry.link)
    }

    /// The client of an allocation and the way to it. `None` if there is no such allocation, or its client is away.
    pub fn reached(&mut self, allocation: AllocationId) -> Option<(Client, Link)> {
        let entry = self.data.forwarding.get(allocation).filter(|entry| !entry.away)?;
        Some((entry.client, entry.link))
    }

    /// Ends every allocation with this reason.
    pub fn close_all(&mut self, now: Now, reason: ClosedReason) {
        for index in self.data.forwarding.indices() {
            self.close(now, index, reason);
        }
    }

    /// Ends one allocation with this reason. False if there is no such allocation.
    pub fn close_one(&mut self, now: Now, allocation: AllocationId, reason: ClosedReason) -> bool {
        let exists = self.data.forwarding.get(allocation).is_some();
        if exists {
            self.close(now, allocation.index, reason);
        }
        exists
    }

    /// All relayed transport addresses, by the allocation and the family.
    pub fn relays(&mut self) -> Vec<RelayId> {
        let mut relays = Vec::new();
        for index in self.data.forwarding.indices() {
            let Some((allocation, entry)) = self.data.forwarding.at(index) else { continue };
            let families = [Family::V4, Family::V6].into_iter().filter(|family| entry.has(*family));
            relays.extend(families.map(|family| RelayId { allocation, family }));
        }
        relays
    }

    /// Ends one relayed transport address; with the last of an allocation that ends, for this reason.
    pub fn end_relay(&mut self, now: Now, relay: RelayId, reason: ClosedReason) {
        match self.data.forwarding.get(relay.allocation) {
            Some(entry) if !entry.has(relay.family) => {}
            Some(entry) if entry.relays.iter().flatten().count() > 1 => self.close_relay(now, relay),
            Some(_) => self.close(now, relay.allocation.index, reason),
            None => {}
        }
    }

    /// Allocations that exist, those included whose relay sockets are being opened.
    #[must_use]
    pub fn allocations(&self) -> usize {
        self.data.forwarding.len()
    }

    /// The same by listener, in the order of their numbers; those without any at the end may be missing.
    #[must_use]
    pub fn allocations_by_listener(&self) -> &[u32] {
        self.data.forwarding.by_listener()
    }

    /// All counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.data.stats
    }

    /// Counts datagrams (and bytes of their payload) that were relayed without coming here, by a table that is kept from the effects.
    /// False if the allocation has ended: then they are counted in total, but its totals have been told.
    pub fn count_across(
        &mut self,
        allocation: AllocationId,
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

    /// The policy that it was made with.
    pub fn policy_mut(&mut self) -> &mut P {
        &mut self.policy
    }

    /// What both planes know of an allocation.
    fn allocation(&mut self, index: u32) -> Option<(AllocationId, &mut Entry, &mut Session)> {
        let (id, entry) = self.data.forwarding.at(index)?;
        Some((id, entry, self.sessions.get(index)?))
    }

    fn session(&mut self, id: AllocationId) -> Option<&Session> {
        self.data.forwarding.get(id)?;
        self.sessions.get(id.index).map(|session| &*session)
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

    /// Ends permissions and channels whose time is over.
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

    /// Has channels lead to where their peers are reached, if those are relayed transport addresses of ours and a NAT stands in front of
    /// us since, or no more.
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

    /// Says which permissions and channels came with an allocation.
    fn tell_bindings(&mut self, allocation: AllocationId) {
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

    /// Ends one family of a dual-stack allocation.
    fn close_relay(&mut self, now: Now, relay: RelayId) {
        let index = relay.allocation.index;
        if let Some((_, entry, session)) = self.allocation(index) {
            session.former = entry.relays[relay.family as usize].map(|relay| Box::new(relay.address));
        }
        self.data.emit(now, Effect::RelayClosed { relay });
        self.close_connections(index, |peer| Family::of(peer.ip()) == relay.family);
    }

    /// Ends an allocation, and settles its accounts.
    fn close(&mut self, now: Now, index: u32, reason: ClosedReason) {
        let Some(session) = self.sessions.remove(index) else { return };
        let Some((id, entry)) = self.data.forwarding.at(index) else { return };
        let closed = Effect::Closed {
            allocation: id,
            session: session.id,
            client: entry.client,
            relayed: session.relayed(entry),
            transport: self.config.listener(entry.client.listener).transport,
            relay_transport: if entry.relays_tcp { RelayTransport::Tcp } else { RelayTransport::Udp },
            realm: Arc::clone(&session.realm),
            username: session.username.clone(),
            identity: session.identity.clone(),
            reason,
            away: entry.away,
            lived_ms: now.ms.wrapping_sub(session.opened_ms),
            to_peer: entry.to_peer,
            to_client: entry.to_client,
        };
        self.data.emit(now, closed);
        self.connection_timers.cancel(index);
        self.connections.forget(&session);
        self.forget_arrival(&session);
        if let Some(mobility) = &session.mobility {
            self.owners.remove(mobility.key.0);
            if let Some((source, worker)) = mobility.arriving {
                self.arrives_no_more(worker, source.client, mobility.key.0);
            }
        }
        self.policy.release(session.user(), session.prefix);
        // One that was still waiting for its sockets never counted as opened.
        if session.pending.is_none() {
            self.data.stats.closed(reason);
        }
    }

    /// No client arrives any more at an allocation that is gone.
    fn forget_arrival(&mut self, session: &Session) {
        if let Some(mobility) = &session.mobility {
            let arriving = mobility.arriving.as_ref().map(|(source, _)| &source.client);
            self.pending_moves.forget(mobility.key.0, arriving);
        }
    }
}
