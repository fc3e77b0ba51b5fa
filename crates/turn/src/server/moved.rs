//! An allocation as data, on its way to another worker. Plain and serialisable, so that the way may lead out of the process as well. Times
//! are counted from the moment at which it was packed: no two clocks have to agree.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use turnpike_wire::channel_data::{ChannelNumber, ChannelRange};

use super::{
    AllocationId, Client, Effect, Family, Gate, Link, Server, Source,
    connections::TcpRelay,
    forwarding::{Entry, Relay},
    mobility::Mobility,
    secret::Secret,
    session::Session,
    third_party::Grant,
    view::SessionId,
};
use crate::time::Now;

/// An allocation between two workers: whoever holds it owns it, quota included. To be given to [`super::Server::import`], or
/// back by [`super::Server::take_back`].
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
    relays_tcp: bool,
    /// IPv4 and IPv6, and for how many milliseconds more.
    relays: [Option<(SocketAddr, u64)>; 2],
    permissions: Vec<(IpAddr, u64)>,
    channels: Vec<(u16, SocketAddr, u64)>,
    to_peer: (u64, u64),
    to_client: (u64, u64),
    realm: Box<str>,
    username: Box<str>,
    identity: Option<Box<str>>,
    grant: Option<Box<Grant>>,
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

    /// As [`super::Server::count_across`], for what was not yet known when the allocation was packed. Its own worker has counted it in
    /// total.
    pub fn count_across(&mut self, to_peer: (u64, u64), to_client: (u64, u64)) {
        let Record { to_peer: peer, to_client: client, .. } = &mut *self.0;
        for (sum, more) in [(peer, to_peer), (client, to_client)] {
            *sum = (sum.0 + more.0, sum.1 + more.1);
        }
    }

    pub(super) fn new(now: Now, from: AllocationId, to: Source, entry: &Entry, session: &Session) -> Self {
        let left = |ms: u64| ms.saturating_sub(now.ms);
        Self(Box::new(Record {
            from,
            id: session.id,
            to: (to.client, to.link),
            client: entry.client,
            link: entry.link,
            away: entry.away,
            relays_tcp: entry.relays_tcp,
            relays: entry.relays.map(|relay| relay.map(|relay| (relay.address, left(relay.expires_ms)))),
            permissions: entry.permissions.iter().map(|(ip, ms)| (ip, left(ms))).collect(),
            channels: entry
                .channels
                .iter()
                .map(|it| (it.number.get(), it.peer, left(it.expires_ms)))
                .collect(),
            to_peer: entry.to_peer,
            to_client: entry.to_client,
            realm: (&*session.realm).into(),
            username: session.username.clone(),
            identity: session.identity.clone(),
            grant: session.grant.clone(),
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
    pub(super) fn unpack(self, now: Now, padded: bool, arrived: bool) -> (Entry, Session) {
        let record = *self.0;
        let (client, link) = if arrived { record.to } else { (record.client, record.link) };
        let mut entry = Entry::new(client, link, padded, record.relays_tcp);
        entry.away = record.away && !arrived;
        let until = |left_ms: u64| now.ms.saturating_add(left_ms);
        entry.relays = record
            .relays
            .map(|relay| relay.map(|(address, left)| Relay { address, expires_ms: until(left) }));
        for (ip, left) in record.permissions {
            entry.permit(ip, until(left));
        }
        for (number, peer, left) in record.channels {
            let Some(number) = number_of(number) else { continue };
            entry.bind(number, peer, until(left));
        }
        (entry.to_peer, entry.to_client) = (record.to_peer, record.to_client);
        let session = Session {
            id: record.id,
            realm: record.realm.into(),
            username: record.username,
            identity: record.identity,
            grant: record.grant,
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

impl<G: Gate> Server<G> {
    /// An allocation as data, for [`Server::restore`] of another process. It remains here, and is to be closed once it is there.
    pub fn snapshot(&mut self, now: Now, allocation: AllocationId) -> Option<Moved> {
        self.forwarding.get(allocation)?;
        let (_, entry, session) = self.allocation(allocation.index)?;
        let here = Source { client: entry.client, link: entry.link };
        session.pending.is_none().then(|| Moved::new(now, allocation, here, entry, session))
    }

    /// Takes in an allocation that another process had. Its client is where it was; `link` is the way to it here.
    ///
    /// # Errors
    /// Gives it back if its 5-tuple has an allocation, its realm is not configured, or no quota has room for it.
    pub fn restore(&mut self, now: Now, mut moved: Moved, link: Link) -> Result<AllocationId, Moved> {
        let is_taken = moved.was().is_some_and(|was| self.forwarding.find(&was.client).is_some());
        let Record { realm, username, identity, .. } = &*moved.0;
        let is_strange = is_taken || !self.realms.has(realm);
        if is_strange || self.gate.acquire(realm, identity.as_ref().unwrap_or(username)).is_err() {
            return Err(moved);
        }
        moved.0.link = link;
        let allocation = self.own(now, moved, false);
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
            self.effects.push_back(opened);
        }
        self.tell_bindings(allocation);
        Ok(allocation)
    }
}

fn number_of(number: u16) -> Option<ChannelNumber> {
    ChannelNumber::within(ChannelRange::Rfc5766, number)
}
