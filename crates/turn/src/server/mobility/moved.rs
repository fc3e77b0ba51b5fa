//! Serialized allocations in transit to another worker or process. Times are relative, so clocks need not
//! agree.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use turnpike_wire::channel_data::{ChannelNumber, ChannelRange};

use crate::{
    server::{
        AllocationSlot, AllocationUsage, Client, Effect, Family, Link, OwnEndpoints, PendingMove, Policy,
        Server, SharedPort, Source, UserRef,
        allocation_state::AllocationId,
        allocation_state::AllocationState,
        auth::{claim::TokenGrant, masked::Masked},
        data::{
            bandwidth::Limited,
            forwarding::{ForwardingEntry, Relay},
        },
        mobility::Mobility,
        request::connections::TcpRelay,
    },
    time::Now,
};

/// An allocation in transit. It must be passed to [`crate::server::Server::import`] or
/// [`crate::server::Server::take_back`].
#[derive(Debug)]
#[must_use = "dropping this leaks the allocation: import it or take it back"]
pub struct Moved(Box<MovedRecord>);

/// Version tag; readers reject versions that they do not know.
#[derive(Serialize, Deserialize)]
enum Versioned<R> {
    #[serde(rename = "1")]
    V1(R),
}

#[derive(Debug, Serialize, Deserialize)]
struct MovedRecord {
    from: AllocationSlot,
    id: AllocationId,
    to: (Client, Link),
    client: Client,
    link: Link,
    away: bool,
    /// New 5-tuple from which no data has come yet, and its worker; only used between processes.
    #[serde(default)]
    arriving: Option<(Client, Link, u16)>,
    relays_tcp: bool,
    /// IPv4 and IPv6, with milliseconds until expiry.
    relays: [Option<(SocketAddr, u64)>; 2],
    #[serde(default)]
    shared: [Option<SharedPort>; 2],
    /// Permitted peers with milliseconds until expiry.
    permissions: Vec<(IpAddr, u64)>,
    channels: Vec<(u16, SocketAddr, u64)>,
    to_peer: (u64, u64),
    to_client: (u64, u64),
    /// Part of the totals that was already reported; the sender records it.
    #[serde(default)]
    reported: Option<Box<AllocationUsage>>,
    /// Tokens left in the allocation's own bandwidth buckets, one for each direction.
    #[serde(default)]
    allowance: Option<[i64; 2]>,
    realm: Box<str>,
    username: Box<str>,
    identity: Option<Box<str>>,
    prefix: IpAddr,
    grant: Option<Box<TokenGrant>>,
    #[serde(default)]
    until_unix: Option<u64>,
    age_ms: u64,
    transaction: [u8; 12],
    granted: u32,
    reservation: Option<Masked<[u8; 8]>>,
    address_error: Option<(Family, u16)>,
    former: Option<SocketAddr>,
    tcp: Option<Box<TcpRelay>>,
    mobility: Option<Box<Mobility>>,
}

impl MovedRecord {
    fn check(&self) -> Result<(), &'static str> {
        if !self.channels.iter().all(|(number, ..)| number_of(*number).is_some()) {
            return Err("a channel number is out of range");
        }
        let [v4, v6] = self.relays.map(|relay| relay.map(|(address, _)| Family::of(address.ip())));
        match (v4, v6) {
            (None, None) => Err("there is no relayed transport address"),
            (None | Some(Family::V4), None | Some(Family::V6)) => Ok(()),
            _ => Err("a relayed transport address has the wrong family"),
        }
    }
}

impl Serialize for Moved {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Versioned::V1(&self.0).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Moved {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Versioned::V1(record) = Versioned::<Box<MovedRecord>>::deserialize(deserializer)?;
        record.check().map_err(serde::de::Error::custom)?;
        Ok(Self(record))
    }
}

impl Moved {
    /// ID of the allocation on the worker that exported it, to which its relay sockets belong.
    #[must_use]
    pub fn from(&self) -> AllocationSlot {
        self.0.from
    }

    /// Previous 5-tuple; if it is a stream that is still open, the stream no longer has an allocation. `None`
    /// if the client had disconnected.
    #[must_use]
    pub fn was(&self) -> Option<Source> {
        (!self.0.away).then_some(Source { client: self.0.client, link: self.0.link })
    }

    #[must_use]
    pub fn client(&self) -> Client {
        self.0.to.0
    }

    #[must_use]
    pub fn to(&self) -> Source {
        let (client, link) = self.0.to;
        Source { client, link }
    }

    #[must_use]
    pub fn owner(&self) -> UserRef<'_> {
        let MovedRecord { realm, username, identity, .. } = &*self.0;
        UserRef::new(realm, identity.as_ref().unwrap_or(username))
    }

    #[must_use]
    pub fn shared(&self, family: Family) -> Option<SharedPort> {
        self.0.shared[family as usize]
    }

    /// Cancels a pending move unless `by` accepts its link, because other links cannot be passed on.
    pub fn keep_arrival(&mut self, by: impl Fn(Link) -> bool) {
        self.0.arriving = self.0.arriving.filter(|(_, link, _)| by(*link));
    }

    /// Adds traffic that was not yet known when the allocation was packed; the exporting worker has counted
    /// it in its totals.
    pub fn count_across(&mut self, to_peer: (u64, u64), to_client: (u64, u64)) {
        let MovedRecord { to_peer: peer, to_client: client, .. } = &mut *self.0;
        for (sum, more) in [(peer, to_peer), (client, to_client)] {
            *sum = (sum.0 + more.0, sum.1 + more.1);
        }
    }

    pub(crate) fn new(
        now: Now,
        from: AllocationSlot,
        to: Source,
        entry: &ForwardingEntry,
        state: &AllocationState,
    ) -> Self {
        let left = |ms: u64| ms.saturating_sub(now.ms);
        Self(Box::new(MovedRecord {
            from,
            id: state.id,
            to: (to.client, to.link),
            client: entry.client,
            link: entry.link,
            away: entry.away,
            arriving: None,
            relays_tcp: entry.relays_tcp,
            relays: entry.relays.map(|relay| relay.map(|relay| (relay.address, left(relay.expires_ms)))),
            shared: entry.shared,
            permissions: entry.permissions.iter().map(|(ip, ms)| (ip, left(ms))).collect(),
            channels: entry
                .channels
                .iter()
                .map(|it| (it.number.get(), it.name(), left(it.expires_ms)))
                .collect(),
            to_peer: entry.to_peer,
            to_client: entry.to_client,
            reported: state.reported.clone(),
            allowance: entry.limits.as_ref().and_then(|limits| limits.allowance(now.ms)),
            realm: (&*state.realm).into(),
            username: state.username.clone(),
            identity: state.identity.clone(),
            prefix: state.prefix,
            grant: state.grant.clone(),
            until_unix: state.until_unix,
            age_ms: now.ms.wrapping_sub(state.opened_ms),
            transaction: state.transaction,
            granted: state.granted,
            reservation: state.reservation,
            address_error: state.address_error,
            former: state.former.as_deref().copied(),
            tcp: state.tcp.as_ref().map(|tcp| Box::new(tcp.shifted(left))),
            mobility: state.mobility.as_ref().map(|mobility| Box::new(mobility.packed(now))),
        }))
    }

    /// `own` translates the addresses of peers.
    pub(crate) fn unpack(
        self,
        now: Now,
        own: &OwnEndpoints,
        padded: bool,
        arrived: bool,
    ) -> (ForwardingEntry, AllocationState) {
        let record = *self.0;
        let (client, link) = if arrived { record.to } else { (record.client, record.link) };
        let mut entry = ForwardingEntry::new(client, link, padded, record.relays_tcp);
        entry.away = record.away && !arrived;
        let until = |left_ms: u64| now.ms.saturating_add(left_ms);
        entry.relays = record
            .relays
            .map(|relay| relay.map(|(address, left)| Relay { address, expires_ms: until(left) }));
        entry.shared = record.shared;
        for (ip, left) in record.permissions {
            entry.permit(ip, until(left));
        }
        for (number, peer, left) in record.channels {
            let Some(number) = number_of(number) else { continue };
            entry.bind(number, peer, own.internal(peer), until(left));
        }
        (entry.to_peer, entry.to_client) = (record.to_peer, record.to_client);
        entry.limits = record.allowance.map(|tokens| Limited::carried(tokens, now.ms));
        let state = AllocationState {
            id: record.id,
            realm: record.realm.into(),
            username: record.username,
            identity: record.identity,
            prefix: record.prefix,
            grant: record.grant,
            until_unix: record.until_unix,
            opened_ms: now.ms.wrapping_sub(record.age_ms),
            transaction: record.transaction,
            granted: record.granted,
            reservation: record.reservation,
            address_error: record.address_error,
            reported: record.reported,
            former: record.former.map(Box::new),
            pending: None,
            tcp: record.tcp.map(|tcp| Box::new(tcp.shifted(until))),
            mobility: record.mobility.map(|mobility| Box::new(mobility.packed(now))),
        };
        (entry, state)
    }
}

impl<P: Policy> Server<P> {
    /// Allocations that relay UDP and whose client is away or has a link that `by` accepts.
    pub fn portable(&mut self, by: impl Fn(Link) -> bool) -> Vec<AllocationSlot> {
        let indices = self.data.forwarding.indices();
        let suits = |index| {
            let (id, entry, state) = self.allocation(index)?;
            let is_free = state.pending.is_none() && !entry.relays_tcp;
            (is_free && (entry.away || by(entry.link))).then_some(id)
        };
        indices.filter_map(suits).collect()
    }

    /// The allocation stays here until [`Server::surrender`].
    pub fn snapshot(&mut self, now: Now, allocation: AllocationSlot) -> Option<Moved> {
        self.data.forwarding.get(allocation)?;
        let (_, entry, state) = self.allocation(allocation.index)?;
        let here = Source { client: entry.client, link: entry.link };
        if state.pending.is_some() {
            return None;
        }
        let mut moved = Moved::new(now, allocation, here, entry, state);
        let arriving = state.mobility.as_ref().and_then(|mobility| mobility.arriving);
        moved.0.arriving = arriving.map(|(Source { client, link }, worker)| (client, link, worker));
        Some(moved)
    }

    /// No effect reports the end; the caller closes the sockets.
    pub fn surrender(&mut self, now: Now, allocation: AllocationSlot) {
        if self.data.forwarding.get(allocation).is_none() {
            return;
        }
        let Some(state) = self.states.remove(allocation.index) else { return };
        self.data.emit(now, Effect::Exported { allocation });
        self.connection_timers.cancel(allocation.index);
        self.connections.forget(&state);
        self.forget_arrival(&state);
        if let Some(mobility) = &state.mobility {
            self.owners.remove(mobility.key.0);
        }
        self.policy.release(state.user(), state.prefix);
    }

    /// Pending moves, for [`Server::expect`] in another process.
    #[must_use]
    pub fn expected(&self) -> Vec<PendingMove> {
        self.pending_moves.expected()
    }

    /// Recently deleted allocations, for [`Server::remember_deletions`] in another process with the same key.
    #[must_use]
    pub fn deletions(&self, now: Now) -> Vec<(u64, u64)> {
        self.tombstones.all(now.ms)
    }

    /// Adds deletions from another process or worker.
    pub fn remember_deletions(&mut self, now: Now, deletions: &[(u64, u64)]) {
        self.tombstones.import(now.ms, deletions);
    }

    /// Drops lookups of clients whose link `by` accepts. Another process serves them, and they retransmit.
    pub fn forget_lookups(&mut self, by: impl Fn(Link) -> bool) {
        self.lookups.forget(|source| by(source.link));
    }

    /// Takes over an allocation from another process, with the client's link in this process. Returns it if
    /// its 5-tuple is taken, its realm is not configured, or a quota is reached.
    pub fn restore(&mut self, now: Now, mut moved: Moved, link: Link) -> Result<AllocationSlot, Moved> {
        let is_taken = moved.was().is_some_and(|was| self.data.forwarding.find(&was.client).is_some());
        let user = moved.owner();
        let is_strange = is_taken || !self.realms.has(user.realm);
        if is_strange || self.policy.acquire(user, moved.0.prefix).is_err() {
            return Err(moved);
        }
        moved.0.link = link;
        let arriving = moved.0.arriving.take();
        let allocation = self.own(now, moved, false);
        if let Some((client, link, worker)) = arriving {
            self.arrives(allocation, Source { client, link }, worker);
        }
        let Some((_, entry, state)) = self.allocation(allocation.index) else { return Ok(allocation) };
        let mut relays = entry.relays.iter().flatten();
        if let Some(first) = relays.next() {
            let opened = Effect::Opened {
                allocation,
                id: state.id,
                client: entry.client,
                link,
                expires_ms: first.expires_ms,
                realm: Arc::clone(&state.realm),
                username: state.username.clone(),
                relayed: (first.address, relays.next().map(|second| second.address)),
            };
            self.data.effects.push_back(opened);
        }
        self.tell_bindings(allocation);
        Ok(allocation)
    }

    fn arrives(&mut self, allocation: AllocationSlot, source: Source, worker: u16) {
        let Some(state) = self.states.get(allocation.index) else { return };
        let Some(mobility) = &mut state.mobility else { return };
        mobility.arriving = Some((source, worker));
        self.pending_moves.expect_own(source.client, mobility.key.0, self.worker_id.number());
    }
}

fn number_of(number: u16) -> Option<ChannelNumber> {
    ChannelNumber::within(ChannelRange::Rfc5766, number)
}
