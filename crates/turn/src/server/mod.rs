//! A TURN server as a state machine: feed a datagram with [`Server::from_client`] or [`Server::from_peer`], carry out
//! the [`Verdict`], drain [`Server::poll_effect`], and call [`Server::handle_timeout`] when [`Server::poll_timeout`]
//! says so. One server per worker; nothing in it is shared.
//!
//! What it remembers is bounded: allocations by the gate's quotas, permissions and channels by the configuration,
//! deletions by number and time, effects by being drained. A datagram that does not authenticate leaves nothing.

mod allocate;
mod allocation;
mod alternate;
mod answer;
mod arrivals;
mod attribute;
mod auth;
mod bindings;
pub mod config;
mod connection_table;
mod connections;
pub mod drop_reason;
pub mod gate;
mod granted;
mod learned;
mod mobility;
mod nat_discovery;
mod nonce;
pub mod own_endpoints;
pub mod peer_rules;
mod realm;
mod refresh;
mod refusals;
pub mod request;
mod response;
mod seat;
pub mod stats;
mod table;
mod third_party;
mod ticket;
mod timers;
mod tombstones;
pub mod verdict;

pub use alternate::{Alternate, AlternateWhen};
pub use config::{ListenerProfile, NonceKey, ServerConfig, Transport};
pub use connections::{ConnectError, ConnectRequest, ConnectionId, PeerConnection};
pub use drop_reason::DropReason;
pub use gate::{Gate, Lookup, QuotaRefusal, User};
pub use granted::GrantedAllocates;
pub use mobility::{Arrival, MoveRequest, Moved};
pub use nat_discovery::{DiscoveryLimits, MAX_PADDING, MIN_RESPONSE_PORT, NatDiscovery};
pub use own_endpoints::OwnEndpoints;
pub use peer_rules::{AllowRule, Cidr, PeerDenial, PeerRules};
pub use realm::{Realm, RealmId};
pub use seat::Seat;
pub use stats::{ConnectionRefusal, Stats};
pub use third_party::{IssuerKey, ThirdParty};
pub use verdict::{
    AllocationId, Client, ClosedReason, CredentialRefusal, Effect, Family, Header, ListenerId, OpenRelay,
    OpenRequest, OpenResult, PortWish, RelayId, RelayTransport, TokenProblem, Verdict,
};

use std::{collections::VecDeque, net::SocketAddr, sync::Arc};

use turnpike_wire::{
    channel_data::{ChannelData, ChannelDataError},
    demux::{self, Kind},
    indication::{self, Indication, IndicationError, MAX_HEADER_LEN},
};

use crate::time::Now;
use answer::Answer;
use arrivals::Moves;
use connection_table::Connections;
use mobility::Came;
use nat_discovery::DiscoveryRate;
use realm::Realms;
use refusals::Refusals;
use response::Response;
use table::Table;
use timers::Timers;
use tombstones::Tombstones;

/// The most that a UDP datagram over IPv4 holds, in bytes.
const MAX_DATAGRAM_LEN: usize = 65_507;

/// The state of one worker.
pub struct Server<G> {
    config: Arc<ServerConfig>,
    /// Made from the configuration.
    realms: Realms,
    gate: G,
    table: Table,
    timers: Timers,
    tombstones: Tombstones,
    refusals: Refusals,
    peer_refusals: Refusals,
    discovery_rate: DiscoveryRate,
    /// Of those who ask for nothing, and are told nevertheless.
    hint_rate: DiscoveryRate,
    granted: GrantedAllocates,
    effects: VecDeque<Effect>,
    stats: Stats,
    /// The message that [`Verdict::Reply`] lends out.
    reply: Vec<u8>,
    draining: bool,
    /// Whose turn it is among the alternate servers.
    alternate_turn: usize,
    /// Transaction ID of the next Data indication. They answer to nothing, so they need to differ, not to be random.
    indication: u64,
    salt: [u8; 4],
    seat: Seat,
    connections: Connections,
    moves: Moves,
    /// How the request came that is being answered.
    came: Came,
    /// What the answer to a request of [`Came::From`] has to tell that worker.
    announced: Option<Arrival>,
}

impl<G: Gate> Server<G> {
    /// An empty server with one worker. See [`ServerConfig::check`] for what the configuration must hold.
    #[must_use]
    pub fn new(config: Arc<ServerConfig>, gate: G) -> Self {
        Self::of_many(config, gate, Seat::ONLY)
    }

    /// One worker of an empty server. The configuration is the same for all of them, and so is what a [`ListenerId`]
    /// stands for.
    #[must_use]
    pub fn of_many(config: Arc<ServerConfig>, gate: G, seat: Seat) -> Self {
        Self {
            realms: Realms::new(&config),
            gate,
            table: Table::new(),
            timers: Timers::new(),
            tombstones: Tombstones::new(),
            refusals: Refusals::default(),
            peer_refusals: Refusals::default(),
            discovery_rate: DiscoveryRate::default(),
            hint_rate: DiscoveryRate::default(),
            granted: config.granted.ready(),
            effects: VecDeque::new(),
            stats: Stats::default(),
            reply: Vec::with_capacity(512),
            draining: false,
            alternate_turn: 0,
            indication: 0,
            salt: rand::random(),
            seat,
            connections: Connections::new(),
            moves: Moves::new(),
            came: Came::Directly,
            announced: None,
            config,
        }
    }

    /// Feeds a datagram that a client sent. Addresses in `client` are canonical ([`turnpike_wire::address::canonical`]).
    #[inline]
    pub fn from_client<'a>(&'a mut self, now: Now, client: Client, datagram: &'a [u8]) -> Verdict<'a> {
        match demux::classify(datagram) {
            Kind::ChannelData => self.channel_data(now, &client, datagram),
            Kind::Stun if indication::is(Indication::Send, datagram) => self.send(now, &client, datagram),
            Kind::Stun => self.request(now, &client, datagram),
            Kind::Other => self.dropped(DropReason::NotStun),
        }
    }

    /// Feeds a datagram that a peer sent to a relayed transport address. `peer` is canonical.
    ///
    /// ChannelData comes without padding, which RFC 8656 section 12.5 asks for over streams only; there the runtime adds
    /// it.
    #[inline]
    pub fn from_peer<'a>(
        &'a mut self,
        now: Now,
        relay: RelayId,
        peer: SocketAddr,
        datagram: &'a [u8],
    ) -> Verdict<'a> {
        let Some(allocation) = self.table.get(relay.allocation) else {
            return self.dropped(DropReason::StaleRelay);
        };
        if allocation.away {
            return self.dropped(DropReason::ClientAway);
        }
        let Ok(length) = u16::try_from(datagram.len()) else {
            return self.dropped(DropReason::Oversized);
        };
        let mut bytes = [0; MAX_HEADER_LEN];
        let (header_len, padding) = if let Some(channel) = allocation.channels.by_peer(peer, now.ms) {
            // RFC 8656 section 9: a channel does not stand in for the permission, which may expire before it.
            if channel.permitted_until_ms <= now.ms {
                return self.dropped(DropReason::NoPermission);
            }
            bytes[..ChannelData::HEADER_LEN].copy_from_slice(&ChannelData::header(channel.number, length));
            (ChannelData::HEADER_LEN, 0)
        } else {
            // RFC 8656 section 9: "If no match is found, relaying is not permitted and the server silently discards the
            // UDP datagram."
            if !allocation.permissions.allow(peer.ip(), now.ms) {
                return self.dropped(DropReason::NoPermission);
            }
            let transaction = next_transaction(&mut self.indication, self.salt);
            let header_len =
                indication::write_header(Indication::Data, transaction, peer, length, &mut bytes);
            (header_len, indication::padding(datagram.len()))
        };
        if header_len + datagram.len() + padding > MAX_DATAGRAM_LEN {
            return self.dropped(DropReason::Oversized);
        }
        allocation.to_client.0 += 1;
        allocation.to_client.1 += u64::from(length);
        self.stats.to_client_datagrams += 1;
        self.stats.to_client_bytes += u64::from(length);
        #[expect(clippy::cast_possible_truncation, reason = "0 to 3")]
        Verdict::ToClient {
            client: allocation.client,
            header: Header::new(bytes, header_len),
            payload: datagram,
            padding: padding as u8,
        }
    }

    /// Feeds an ICMP error about a datagram that a relay socket sent (RFC 8656 section 11.5). `icmp_type` and `code` are
    /// those of the relay's family; `info` is the MTU of the next hop where the error names one.
    pub fn from_icmp(
        &mut self,
        now: Now,
        relay: RelayId,
        peer: SocketAddr,
        icmp_type: u8,
        code: u8,
        info: u32,
    ) -> Verdict<'_> {
        // "the server verifies that the type is either 3 or 11 for an ICMPv4 packet or either 1, 2, or 3 for an ICMPv6
        // packet".
        let passed_on = match relay.family {
            Family::V4 => matches!(icmp_type, 3 | 11),
            Family::V6 => matches!(icmp_type, 1..=3),
        };
        if !passed_on {
            return self.dropped(DropReason::IcmpType);
        }
        let Some(allocation) = self.table.get(relay.allocation) else {
            return self.dropped(DropReason::StaleRelay);
        };
        // "the server extracts the destination IP address from the encapsulated IP header. The server then compares this
        // address with the IP address associated with each permission [...]. If no match is found, relaying is not
        // permitted and the server silently discards the ICMP packet."
        if !allocation.permissions.allow(peer.ip(), now.ms) {
            return self.dropped(DropReason::NoPermission);
        }
        // Section 18.13 draws 7 bits of type and 9 of code; both are taken to be the 8 that ICMP has, as turn_types does.
        // Error Data is the MTU for ICMPv6 type 2 and ICMPv4 type 3 code 4, else it "MUST be set to zero".
        let data = match (relay.family, icmp_type, code) {
            (Family::V4, 3, 4) | (Family::V6, 2, _) => info,
            _ => 0,
        };
        if allocation.away {
            return self.dropped(DropReason::ClientAway);
        }
        let client = allocation.client;
        self.stats.icmp_relayed += 1;
        let transaction = next_transaction(&mut self.indication, self.salt);
        let mut response = Response::data_indication(&mut self.reply, transaction);
        response.xor_address(attribute::XOR_PEER_ADDRESS, peer);
        let [d0, d1, d2, d3] = data.to_be_bytes();
        response.attribute(attribute::ICMP, &[0, 0, icmp_type, code, d0, d1, d2, d3]);
        response.finish(false);
        Verdict::Reply { client, bytes: &self.reply }
    }

    /// Says how an [`OpenRequest`] went; the verdict is the reply to the client. A relay socket reported as
    /// [`OpenResult::Opened`] stays open until an effect closes it; of any other the runtime has nothing left. If only one of
    /// two opened, whichever, the allocation lives with that one (RFC 8656 section 7.2 step 9).
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
        if self.table.get(allocation).is_none() {
            for result in [Some(first), second].into_iter().flatten() {
                if let OpenResult::Opened { relayed } = result {
                    let relay = RelayId { allocation, family: Family::of(relayed.ip()) };
                    self.effects.push_back(Effect::RelayClosed { relay });
                }
            }
        }
        match self.finish_allocate(now, allocation, first, second) {
            Some(client) => Verdict::Reply { client, bytes: &self.reply },
            None => self.dropped(DropReason::StaleRelay),
        }
    }

    /// The next thing to do, if any.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        let effect = self.effects.pop_front();
        // Thousands of allocations may end at once, which is no reason to keep room for as many.
        if effect.is_none() && self.effects.capacity() > auth::MAX_QUEUED {
            self.effects.shrink_to(auth::MAX_QUEUED);
        }
        effect
    }

    /// When [`Server::handle_timeout`] wants to be called, in [`Now::ms`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.timers.next()
    }

    /// Expires what is due.
    pub fn handle_timeout(&mut self, now: Now) {
        while let Some(index) = self.timers.pop(now.ms) {
            self.expire(now, index);
        }
    }

    /// From now on, Allocate is answered with 508, or with 300 where there is another server to go to, and what exists lives on
    /// (graceful stop).
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Replaces configuration for what happens from now on (reload). Allocations live on, but not their permissions and
    /// channels to peers that the new rules refuse, nor those of a realm that is no more: nobody could refresh them, and a
    /// user of the same name in another realm is somebody else. A realm with another name is another realm.
    pub fn reconfigure(&mut self, now: Now, config: Arc<ServerConfig>) {
        for index in self.table.indices() {
            if let Some((_, allocation)) = self.table.at(index) {
                let peers = &config.peers;
                allocation.retain_peers(|ip| peers.permits(ip), |peer| peers.permits_endpoint(peer));
            }
            self.close_connections(index, |peer| !config.peers.permits_endpoint(peer));
        }
        self.realms = Realms::new(&config);
        self.config = config;
        for index in self.table.indices() {
            if self.table.at(index).is_some_and(|(_, allocation)| !self.realms.has(&allocation.realm)) {
                self.close(now, index, ClosedReason::Administrator);
            }
        }
    }

    /// Whether the realm of this allocation is configured. One that comes from a worker which has not yet been reconfigured
    /// may have none.
    pub fn has_realm_of(&mut self, allocation: AllocationId) -> bool {
        self.table.get(allocation).is_some_and(|found| self.realms.has(&found.realm))
    }

    /// Realm and user, as quotas count them, of an allocation: whom a reserved port belongs to.
    pub fn owner(&mut self, allocation: AllocationId) -> Option<(&str, &str)> {
        self.table.get(allocation).map(|found| (&*found.realm, found.identity()))
    }

    /// Ends every allocation with this reason.
    pub fn close_all(&mut self, now: Now, reason: ClosedReason) {
        for index in self.table.indices() {
            self.close(now, index, reason);
        }
    }

    /// Ends one allocation with this reason. False if there is no such allocation.
    pub fn close_one(&mut self, now: Now, allocation: AllocationId, reason: ClosedReason) -> bool {
        let exists = self.table.get(allocation).is_some();
        if exists {
            self.close(now, allocation.index, reason);
        }
        exists
    }

    /// Allocations that exist, those included whose relay sockets are being opened.
    #[must_use]
    pub fn allocations(&self) -> usize {
        self.table.len()
    }

    /// All counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The gate, for whoever feeds it.
    pub fn gate_mut(&mut self) -> &mut G {
        &mut self.gate
    }

    /// RFC 8656 section 12.6.
    #[inline]
    fn channel_data<'a>(&'a mut self, now: Now, client: &Client, datagram: &'a [u8]) -> Verdict<'a> {
        let message = match ChannelData::parse_within(self.config.channels, datagram) {
            Ok(message) => message,
            Err(ChannelDataError::Truncated) => return self.dropped(DropReason::Truncated),
            Err(ChannelDataError::Number(_)) => return self.dropped(DropReason::ChannelNumber),
        };
        let Some((id, allocation)) = self.table.find(client).and_then(|index| self.table.at(index)) else {
            return self.stranger(now, client, datagram);
        };
        // "If the ChannelData message is received on a channel that is not bound to any peer, then the message is silently
        // discarded."
        let Some(channel) = allocation.channels.by_number(message.number(), now.ms) else {
            return self.dropped(DropReason::UnboundChannel);
        };
        let peer = channel.peer;
        let payload = message.payload();
        allocation.to_peer.0 += 1;
        allocation.to_peer.1 += payload.len() as u64;
        self.stats.to_peer_datagrams += 1;
        self.stats.to_peer_bytes += payload.len() as u64;
        let relay = RelayId { allocation: id, family: Family::of(peer.ip()) };
        Verdict::ToPeer { relay, peer, payload, dont_fragment: false }
    }

    /// RFC 8656 section 11.2.
    #[inline]
    fn send<'a>(&'a mut self, now: Now, client: &Client, datagram: &'a [u8]) -> Verdict<'a> {
        let view = match indication::parse(Indication::Send, datagram) {
            Ok(view) => view,
            Err(error) => {
                return self.dropped(match error {
                    // "The Send indication MUST contain both an XOR-PEER-ADDRESS attribute and a DATA attribute".
                    IndicationError::Missing => DropReason::MissingAttribute,
                    IndicationError::UnknownAttribute(_) => DropReason::UnknownAttribute,
                    IndicationError::Fingerprint => DropReason::Fingerprint,
                    _ => DropReason::Malformed,
                });
            }
        };
        let Some((id, allocation)) = self.table.find(client).and_then(|index| self.table.at(index)) else {
            return self.stranger(now, client, datagram);
        };
        let family = Family::of(view.peer.ip());
        // RFC 6062 has connections for TCP, and no datagrams.
        if allocation.tcp.is_some() {
            return self.dropped(DropReason::TcpAllocation);
        }
        if !allocation.has(family) {
            return self.dropped(DropReason::PeerFamily);
        }
        // "The server MAY impose restrictions on the IP address and port values allowed in the XOR-PEER-ADDRESS attribute;
        // if a value is not allowed, the server silently discards the Send indication."
        if view.peer.port() == 0 || !self.config.peers.permits_endpoint(view.peer) {
            return self.dropped(DropReason::PeerRefused);
        }
        // "The server also checks that there is a permission installed for the IP address contained in the
        // XOR-PEER-ADDRESS attribute. If no such permission exists, the message is discarded."
        if !allocation.permissions.allow(view.peer.ip(), now.ms) {
            return self.dropped(DropReason::NoPermission);
        }
        allocation.to_peer.0 += 1;
        allocation.to_peer.1 += view.data.len() as u64;
        self.stats.to_peer_datagrams += 1;
        self.stats.to_peer_bytes += view.data.len() as u64;
        Verdict::ToPeer {
            relay: RelayId { allocation: id, family },
            peer: view.peer,
            payload: view.data,
            dont_fragment: view.dont_fragment,
        }
    }

    /// Sets the timer of an allocation after a deadline of it has changed.
    fn rearm(&mut self, now: Now, index: u32) {
        if let Some((_, allocation)) = self.table.at(index)
            && let Some(expires_ms) = allocation.expires_ms()
        {
            self.timers.set(now.ms, index, expires_ms);
        }
    }

    fn expire(&mut self, now: Now, index: u32) {
        self.expire_connections(now, index);
        let Some((id, allocation)) = self.table.at(index) else { return };
        let expired = |family| {
            let relay: &Option<allocation::Relay> = &allocation.relays[family as usize];
            relay.is_some_and(|relay| relay.expires_ms <= now.ms)
        };
        // Of two that expire together the second is seen when the timer fires again, which it does at once.
        if let Some(family) = [Family::V4, Family::V6].into_iter().find(|family| expired(*family)) {
            if allocation.relays.iter().flatten().count() == 1 {
                self.close(now, index, ClosedReason::Expired);
                return;
            }
            allocation.forget(family);
            self.effects.push_back(Effect::RelayClosed { relay: RelayId { allocation: id, family } });
            self.close_connections(index, |peer| Family::of(peer.ip()) == family);
        }
        self.rearm(now, index);
    }

    fn close(&mut self, now: Now, index: u32, reason: ClosedReason) {
        let Some((id, allocation)) = self.table.remove(index) else { return };
        self.timers.cancel(index);
        self.connections.forget(&allocation);
        self.moves.forget(&allocation, self.seat.number());
        self.bury(now, id, *allocation, reason);
    }

    /// Settles the accounts of an allocation that is in no table any more.
    fn bury(&mut self, now: Now, id: AllocationId, allocation: allocation::Allocation, reason: ClosedReason) {
        self.gate.release(&allocation.realm, allocation.identity());
        // One that was still waiting for its sockets never counted as opened.
        if allocation.pending.is_none() {
            self.stats.closed(reason);
        }
        self.effects.push_back(Effect::Closed {
            allocation: id,
            client: allocation.client,
            relayed: allocation.relayed(),
            transport: self.config.listener(allocation.client.listener).transport,
            relay_transport: if allocation.tcp.is_some() { RelayTransport::Tcp } else { RelayTransport::Udp },
            realm: allocation.realm,
            username: allocation.username,
            identity: allocation.identity,
            reason,
            away: allocation.away,
            lived_ms: now.ms.saturating_sub(allocation.opened_ms),
            to_peer: allocation.to_peer,
            to_client: allocation.to_client,
        });
    }

    #[inline]
    fn dropped<'a>(&mut self, reason: DropReason) -> Verdict<'a> {
        self.stats.drop(reason);
        Verdict::Drop(reason)
    }
}

#[inline]
fn next_transaction(counter: &mut u64, salt: [u8; 4]) -> [u8; 12] {
    *counter = counter.wrapping_add(1);
    let mut transaction = [0; 12];
    transaction[..4].copy_from_slice(&salt);
    transaction[4..].copy_from_slice(&counter.to_be_bytes());
    transaction
}
