//! An allocation as data, on its way to another worker. Plain and serialisable, so that the way may lead out of the process as well. Times
//! are counted from the moment at which it was packed: no two clocks have to agree.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use turnpike_wire::channel_data::{ChannelNumber, ChannelRange};

use crate::{
    server::{
        AllocationId, Client, Effect, Family, Link, OwnEndpoints, PendingMove, Policy, Server, SharedPort,
        Source, UserRef,
        auth::{claim::Grant, secret::Secret},
        data::{
            bandwidth::Limited,
            forwarding::{Entry, Relay},
        },
        mobility::Mobility,
        request::connections::TcpRelay,
        session::Session,
        session::SessionId,
    },
    time::Now,
};

/// An allocation between two workers: whoever holds it owns it, quota included. To be given to [`crate::server::Server::import`], or
/// back by [`crate::server::Server::take_back`].
#[derive(Debug)]
#[must_use = "an allocation that is dropped is never released"]
pub struct Moved(Box<Record>);

/// The versions in which it is written. What reads it refuses those that it does not know.
#[derive(Serialize, Deserialize)]
enum Versioned<R> {
    #[serde(rename = "1")]
    V1(R),
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    from: AllocationId,
    id: SessionId,
    to: (Client, Link),
    client: Client,
    link: Link,
    away: bool,
    /// To another process alone: a new 5-tuple from which no data has come so far, and its worker.
    #[serde(default)]
    arriving: Option<(Client, Link, u16)>,
    relays_tcp: bool,
    /// IPv4 and IPv6, and for how many milliseconds more.
    relays: [Option<(SocketAddr, u64)>; 2],
    /// Those of them that other allocations have too.
    #[serde(default)]
    shared: [Option<SharedPort>; 2],
    /// Peers as the client names them.
    permissions: Vec<(IpAddr, u64)>,
    channels: Vec<(u16, SocketAddr, u64)>,
    to_peer: (u64, u64),
    to_client: (u64, u64),
    /// What it may relay at once of a limit of its own, each way.
    #[serde(default)]
    allowance: Option<[i64; 2]>,
    realm: Box<str>,
    username: Box<str>,
    identity: Option<Box<str>>,
    prefix: IpAddr,
    grant: Option<Box<Grant>>,
    #[serde(default)]
    until_unix: Option<u64>,
    age_ms: u64,
    transaction: [u8; 12],
    granted: u32,
    reservation: Option<Secret<[u8; 8]>>,
    address_error: Option<(Family, u16)>,
    former: Option<SocketAddr>,
    tcp: Option<Box<TcpRelay>>,
    mobility: Option<Box<Mobility>>,
}

impl Record {
    /// What the table takes for granted.
    fn check(&self) -> Result<(), &'static str> {
        if !self.channels.iter().all(|(number, ..)| number_of(*number).is_some()) {
            return Err("a channel number is out of range");
        }
        let [v4, v6] = self.relays.map(|relay| relay.map(|(address, _)| Family::of(address.ip())));
        match (v4, v6) {
            (None, None) => Err("there is no relayed transport address"),
            (None | Some(Family::V4), None | Some(Family::V6)) => Ok(()),
            _ => Err("a relayed transport address is of the other family"),
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
        let Versioned::V1(record) = Versioned::<Box<Record>>::deserialize(deserializer)?;
        record.check().map_err(serde::de::Error::custom)?;
        Ok(Self(record))
    }
}

impl Moved {
    /// What it was called by the worker that gave it away: its relay sockets go with it.
    #[must_use]
    pub fn from(&self) -> AllocationId {
        self.0.from
    }

    /// The client's old 5-tuple, where a stream that is still open has no allocation any more. `None` where the client had gone
    /// from there, so that it may be somebody else's by now.
    #[must_use]
    pub fn was(&self) -> Option<Source> {
        (!self.0.away).then_some(Source { client: self.0.client, link: self.0.link })
    }

    /// The client's new 5-tuple.
    #[must_use]
    pub fn client(&self) -> Client {
        self.0.to.0
    }

    /// The same, and the way to it.
    #[must_use]
    pub fn to(&self) -> Source {
        let (client, link) = self.0.to;
        Source { client, link }
    }

    /// Its user.
    #[must_use]
    pub fn owner(&self) -> UserRef<'_> {
        let Record { realm, username, identity, .. } = &*self.0;
        UserRef::new(realm, identity.as_ref().unwrap_or(username))
    }

    /// The relay socket of this family, where it is shared with other allocations.
    #[must_use]
    pub fn shared(&self, family: Family) -> Option<SharedPort> {
        self.0.shared[family as usize]
    }

    /// Whoever arrives by a link of which `by` does not say so arrives no more: that way stays behind.
    pub fn keep_arrival(&mut self, by: impl Fn(Link) -> bool) {
        self.0.arriving = self.0.arriving.filter(|(_, link, _)| by(*link));
    }

    /// As [`crate::server::Server::count_across`], for what was not yet known when the allocation was packed. Its own worker has counted it in
    /// total.
    pub fn count_across(&mut self, to_peer: (u64, u64), to_client: (u64, u64)) {
        let Record { to_peer: peer, to_client: client, .. } = &mut *self.0;
        for (sum, more) in [(peer, to_peer), (client, to_client)] {
            *sum = (sum.0 + more.0, sum.1 + more.1);
        }
    }

    pub(crate) fn new(now: Now, from: AllocationId, to: Source, entry: &Entry, session: &Session) -> Self {
        let left = |ms: u64| ms.saturating_sub(now.ms);
        Self(Box::new(Record {
            from,
            id: session.id,
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
            allowance: entry.limits.as_ref().and_then(|limits| limits.allowance(now.ms)),
            realm: (&*session.realm).into(),
            username: session.username.clone(),
            identity: session.identity.clone(),
            prefix: session.prefix,
            grant: session.grant.clone(),
            until_unix: session.until_unix,
            age_ms: now.ms.wrapping_sub(session.opened_ms),
            transaction: session.transaction,
            granted: session.granted,
            reservation: session.reservation,
            address_error: session.address_error,
            former: session.former.as_deref().copied(),
            tcp: session.tcp.as_ref().map(|tcp| Box::new(tcp.shifted(left))),
            mobility: session.mobility.as_ref().map(|mobility| Box::new(mobility.packed(now))),
        }))
    }

    /// What the two planes of this worker keep of it from now on, at the client's new 5-tuple or at the old one.
    /// Where peers are reached is asked of what is ours here.
    pub(crate) fn unpack(
        self,
        now: Now,
        own: &OwnEndpoints,
        padded: bool,
        arrived: bool,
    ) -> (Entry, Session) {
        let record = *self.0;
        let (client, link) = if arrived { record.to } else { (record.client, record.link) };
        let mut entry = Entry::new(client, link, padded, record.relays_tcp);
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
        let session = Session {
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
            former: record.former.map(Box::new),
            pending: None,
            tcp: record.tcp.map(|tcp| Box::new(tcp.shifted(until))),
            mobility: record.mobility.map(|mobility| Box::new(mobility.packed(now))),
        };
        (entry, session)
    }
}

impl<P: Policy> Server<P> {
    /// Allocations that another process can take: their clients need nothing that is here, being reached by a link of which `by` says
    /// so, or having gone; and what they relay are datagrams.
    pub fn portable(&mut self, by: impl Fn(Link) -> bool) -> Vec<AllocationId> {
        let indices = self.data.forwarding.indices();
        let suits = |index| {
            let (id, entry, session) = self.allocation(index)?;
            let is_free = session.pending.is_none() && !entry.relays_tcp;
            (is_free && (entry.away || by(entry.link))).then_some(id)
        };
        indices.filter_map(suits).collect()
    }

    /// An allocation as data, for [`Server::restore`] of another process. It remains here; once it is there, [`Server::surrender`] it.
    pub fn snapshot(&mut self, now: Now, allocation: AllocationId) -> Option<Moved> {
        self.data.forwarding.get(allocation)?;
        let (_, entry, session) = self.allocation(allocation.index)?;
        let here = Source { client: entry.client, link: entry.link };
        if session.pending.is_some() {
            return None;
        }
        let mut moved = Moved::new(now, allocation, here, entry, session);
        let arriving = session.mobility.as_ref().and_then(|mobility| mobility.arriving);
        moved.0.arriving = arriving.map(|(Source { client, link }, worker)| (client, link, worker));
        Some(moved)
    }

    /// Forgets an allocation that goes on in another process. Nothing is said of an end, and its sockets are the caller's to close.
    pub fn surrender(&mut self, now: Now, allocation: AllocationId) {
        if self.data.forwarding.get(allocation).is_none() {
            return;
        }
        let Some(session) = self.sessions.remove(allocation.index) else { return };
        self.data.emit(now, Effect::Exported { allocation });
        self.connection_timers.cancel(allocation.index);
        self.connections.forget(&session);
        self.forget_arrival(&session);
        if let Some(mobility) = &session.mobility {
            self.owners.remove(mobility.key.0);
        }
        self.policy.release(session.user(), session.prefix);
    }

    /// Clients that are expected here with allocations of other workers; for [`Server::expect`] of another process.
    #[must_use]
    pub fn expected(&self) -> Vec<PendingMove> {
        self.pending_moves.expected()
    }

    /// Deletions of the last seconds, for [`Server::remember_deletions`] of another process with the same key of nonces.
    #[must_use]
    pub fn deletions(&self, now: Now) -> Vec<(u64, u64)> {
        self.tombstones.all(now.ms)
    }

    /// Answers these deletions of another process or worker again if their clients repeat them.
    pub fn remember_deletions(&mut self, now: Now, deletions: &[(u64, u64)]) {
        self.tombstones.import(now.ms, deletions);
    }

    /// Forgets requests that wait for credentials, of clients that are reached by a link of which `by` says so: another process
    /// serves them from now on, and they ask again.
    pub fn forget_lookups(&mut self, by: impl Fn(Link) -> bool) {
        self.lookups.forget(|source| by(source.link));
    }

    /// Takes in an allocation that another process had. Its client is where it was; `link` is the way to it here. A shared relay socket
    /// has its number still.
    ///
    /// # Errors
    /// Gives it back if its 5-tuple has an allocation, its realm is not configured, or no quota has room for it.
    pub fn restore(&mut self, now: Now, mut moved: Moved, link: Link) -> Result<AllocationId, Moved> {
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
        let Some((_, entry, session)) = self.allocation(allocation.index) else { return Ok(allocation) };
        let mut relays = entry.relays.iter().flatten();
        if let Some(first) = relays.next() {
            let opened = Effect::Opened {
                allocation,
                session: session.id,
                client: entry.client,
                link,
                expires_ms: first.expires_ms,
                realm: Arc::clone(&session.realm),
                username: session.username.clone(),
                relayed: (first.address, relays.next().map(|second| second.address)),
            };
            self.data.effects.push_back(opened);
        }
        self.tell_bindings(allocation);
        Ok(allocation)
    }

    /// As it did in the process that it comes from.
    fn arrives(&mut self, allocation: AllocationId, source: Source, worker: u16) {
        let Some(session) = self.sessions.get(allocation.index) else { return };
        let Some(mobility) = &mut session.mobility else { return };
        mobility.arriving = Some((source, worker));
        self.pending_moves.expect_own(source.client, mobility.key.0, self.worker_id.number());
    }
}

fn number_of(number: u16) -> Option<ChannelNumber> {
    ChannelNumber::within(ChannelRange::Rfc5766, number)
}
