//! Sessions of an engine: dense slots, a seeded hash table that maps clients to slots, and lists per rule
//! ordered by last activity.

use std::{
    hash::{BuildHasher as _, Hasher as _},
    net::{IpAddr, SocketAddr},
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use slab::Slab;
use turnpike_net::{Route, SocketId};

use super::{ChosenTarget, kernel_flows::SessionFlows};
use crate::{bridge::Stream, circles::Link, rate::Pace};

const NONE: u32 = u32::MAX;
/// Maximum targets tried per session.
pub(super) const ATTEMPTS: u8 = 4;

/// Key of a UDP session. A client that uses two of our addresses has two sessions; responses in each come
/// from the address that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) listener: u32,
    pub(super) client: SocketAddr,
    /// Destination address, if the listener has several addresses.
    pub(super) local: Option<IpAddr>,
}

impl Key {
    /// Incomplete key for datagrams that have not been read yet.
    pub(super) fn of_listener(listener: u32) -> Self {
        Self { listener, client: SocketAddr::from(([0; 4], 0)), local: None }
    }
}

/// A client and the rule it has reached.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    pub(super) rule: u32,
    pub(super) client: SocketAddr,
    /// Offset, in the rule's range, of the port that the client used.
    pub(super) port: u16,
    /// Number of rules of this process through which the client has come.
    pub(super) hops: u8,
}

/// Bytes received from the target by the last check, and the time at which they last increased.
pub(super) struct Heard {
    pub(super) bytes: u64,
    pub(super) at: u64,
}

pub(super) struct Session {
    pub(super) rule: u32,
    pub(super) client: SocketAddr,
    /// Offset, in the rule's range, of the port that the client used.
    pub(super) port: u16,
    pub(super) inward: Inward,
    pub(super) outward: Outward,
    /// Current target; `None` after the final connection attempt has failed, or if the rule lost the target in
    /// an upgrade.
    pub(super) choice: Option<ChosenTarget>,
    /// Address of the last target tried.
    pub(super) tried: SocketAddr,
    pub(super) attempts: u8,
    pub(super) answered: bool,
    pub(super) to_target: u64,
    pub(super) to_client: u64,
    pub(super) opened: u64,
    pub(super) pace: Option<Box<Pace>>,
    pub(super) across: Option<Box<SessionFlows>>,
    pub(super) stage: SessionStage,
    pub(super) hops: u8,
    /// Set if the session leads to another rule of this process.
    pub(super) link: Option<Box<Link>>,
    /// Tracks when the target last sent data; used once the target has been removed.
    pub(super) heard: Heard,
    /// Time at which the session moved to the end of its list.
    stamp: u64,
    before: u32,
    after: u32,
}

/// Client side.
pub(super) enum Inward {
    Datagrams { key: Key, reply: Route },
    Stream(Box<Stream>),
}

impl Inward {
    /// Socket of a single UDP client, connected to it; `None` if it shares the listener's.
    pub(super) fn own_socket(&self) -> Option<SocketId> {
        match self {
            Self::Datagrams { reply, .. } => reply.to.is_none().then_some(reply.socket),
            Self::Stream(_) => None,
        }
    }
}

/// Target side.
pub(super) enum Outward {
    Datagrams(SocketId),
    /// A socket whose datagrams each need a destination or a header.
    Addressed(Box<Addressed>),
    Stream(Box<Stream>),
}

/// Route to a target that expects PROXY headers ([`crate::Rule::send_proxy`]), or may respond from any port
/// ([`crate::Rule::any_port`]).
pub(super) struct Addressed {
    pub(super) route: Route,
    pub(super) header: Vec<u8>,
}

impl Outward {
    pub(super) fn socket(&self) -> Option<SocketId> {
        match self {
            Self::Datagrams(socket) => Some(*socket),
            Self::Addressed(addressed) => Some(addressed.route.socket),
            Self::Stream(_) => None,
        }
    }
}

/// Applies a session's bandwidth limits to the datagrams of one wake-up in one direction.
pub(super) struct Gate<'a> {
    pace: Option<&'a Pace>,
    way: usize,
    now: u64,
    /// Number of datagrams beyond the limit, and their bytes.
    pub(super) limited: u64,
    pub(super) bytes: u64,
}

impl<'a> Gate<'a> {
    pub(super) fn new(pace: Option<&'a Pace>, way: usize, now: u64) -> Self {
        Self { pace, way, now, limited: 0, bytes: 0 }
    }

    #[inline]
    pub(super) fn admits(&mut self, datagram: &[u8]) -> bool {
        let Some(pace) = self.pace else { return true };
        let admitted = pace.admits(self.way, datagram.len(), self.now);
        if !admitted {
            self.limited += 1;
            self.bytes += datagram.len() as u64;
        }
        admitted
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionStage {
    /// The TCP target has not accepted the connection yet.
    Connecting,
    Active,
    /// The TCP client has sent FIN; responses may still arrive.
    Closing,
}

/// Sessions ordered by their last activity.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
    /// Milliseconds without activity before a session expires.
    pub(super) patience: u64,
}

impl List {
    pub(super) fn new(patience: u64) -> Self {
        Self { head: NONE, tail: NONE, patience }
    }

    pub(super) fn head(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Lists {
    pub(super) connecting: List,
    pub(super) active: List,
    pub(super) closing: List,
}

impl Lists {
    pub(super) fn all(&self) -> [&List; 3] {
        [&self.connecting, &self.active, &self.closing]
    }

    fn of(&mut self, stage: SessionStage) -> &mut List {
        match stage {
            SessionStage::Connecting => &mut self.connecting,
            SessionStage::Active => &mut self.active,
            SessionStage::Closing => &mut self.closing,
        }
    }
}

/// New session, not in a list yet.
impl Session {
    pub(super) fn new(
        Arrival { rule, client, port, hops }: Arrival,
        inward: Inward,
        (outward, link): Reached,
        choice: ChosenTarget,
        now: u64,
    ) -> Self {
        let connecting = matches!(&outward, Outward::Stream(stream) if stream.connecting);
        Self {
            rule,
            client,
            port,
            inward,
            outward,
            choice: Some(choice),
            tried: choice.address,
            attempts: 1,
            answered: false,
            to_target: 0,
            to_client: 0,
            opened: now,
            pace: None,
            across: None,
            stage: if connecting { SessionStage::Connecting } else { SessionStage::Active },
            hops,
            link,
            heard: Heard { bytes: 0, at: now },
            stamp: now,
            before: NONE,
            after: NONE,
        }
    }
}

#[derive(Default)]
pub(super) struct SessionTable {
    slots: Slab<Session>,
    by_client: HashTable<u32>,
    hasher: RandomState,
}

impl SessionTable {
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Upper bound on slot numbers.
    pub(super) fn capacity(&self) -> usize {
        self.slots.capacity()
    }

    #[inline]
    pub(super) fn find(&self, key: &Key) -> Option<u32> {
        self.by_client.find(hash(&self.hasher, key), |at| is_of(&self.slots, *at, key)).copied()
    }

    #[inline]
    pub(super) fn get(&self, at: u32) -> Option<&Session> {
        self.slots.get(at as usize)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: u32) -> Option<&mut Session> {
        self.slots.get_mut(at as usize)
    }

    /// Slot that the next [`SessionTable::insert`] will use.
    pub(super) fn next(&self) -> u32 {
        number(self.slots.vacant_key())
    }

    pub(super) fn insert(&mut self, session: Session, lists: &mut Lists) -> u32 {
        let stage = session.stage;
        let key = if let Inward::Datagrams { key, .. } = &session.inward { Some(*key) } else { None };
        let at = number(self.slots.insert(session));
        if let Some(key) = key {
            let (slots, hasher) = (&self.slots, &self.hasher);
            self.by_client.insert_unique(hash(hasher, &key), at, |other| {
                match &slots[*other as usize].inward {
                    Inward::Datagrams { key, .. } => hash(hasher, key),
                    Inward::Stream(_) => 0,
                }
            });
        }
        self.append(at, lists.of(stage));
        at
    }

    pub(super) fn remove(&mut self, at: u32, lists: &mut Lists) -> Option<Session> {
        let session = self.slots.get(at as usize)?;
        let stage = session.stage;
        if let Inward::Datagrams { key, .. } = session.inward {
            let slots = &self.slots;
            let found =
                self.by_client.find_entry(hash(&self.hasher, &key), |other| is_of(slots, *other, &key));
            if let Ok(entry) = found {
                entry.remove();
            }
        }
        self.unlink(at, lists.of(stage));
        self.slots.try_remove(at as usize)
    }

    /// Records activity, unless the session is still connecting.
    #[inline]
    pub(super) fn touch(&mut self, at: u32, now: u64, lists: &mut Lists) {
        let session = &mut self.slots[at as usize];
        if session.stage == SessionStage::Connecting {
            return;
        }
        let list = lists.of(session.stage);
        session.stamp = now;
        if list.tail != at {
            self.unlink(at, list);
            self.append(at, list);
        }
    }

    /// Moves a session to the end of its list or of another one.
    pub(super) fn enter(&mut self, at: u32, stage: SessionStage, now: u64, lists: &mut Lists) {
        let old = self.slots[at as usize].stage;
        self.unlink(at, lists.of(old));
        let session = &mut self.slots[at as usize];
        session.stage = stage;
        session.stamp = now;
        self.append(at, lists.of(stage));
    }

    pub(super) fn longest_idle<'a>(&self, lists: impl Iterator<Item = &'a Lists>) -> Option<u32> {
        let heads = lists.flat_map(|lists| lists.all().map(List::head)).flatten();
        heads.min_by_key(|at| self.slots[*at as usize].stamp)
    }

    pub(super) fn due(&self, list: &List) -> Option<u64> {
        Some(self.get(list.head()?)?.stamp.saturating_add(list.patience))
    }

    pub(super) fn stamp(&self, at: u32) -> u64 {
        self.get(at).map_or(0, |session| session.stamp)
    }

    pub(super) fn of_rule(&self, rule: u32) -> Vec<u32> {
        self.slots.iter().filter(|(_, session)| session.rule == rule).map(|(at, _)| number(at)).collect()
    }

    fn append(&mut self, at: u32, list: &mut List) {
        let session = &mut self.slots[at as usize];
        session.before = list.tail;
        session.after = NONE;
        match list.tail {
            NONE => list.head = at,
            tail => self.slots[tail as usize].after = at,
        }
        list.tail = at;
    }

    fn unlink(&mut self, at: u32, list: &mut List) {
        let Session { before, after, .. } = self.slots[at as usize];
        match before {
            NONE => list.head = after,
            before => self.slots[before as usize].after = after,
        }
        match after {
            NONE => list.tail = before,
            after => self.slots[after as usize].before = before,
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "each session has a descriptor, and there are fewer than 2^31"
)]
fn number(slot: usize) -> u32 {
    slot as u32
}

#[inline]
fn is_of(slots: &Slab<Session>, at: u32, key: &Key) -> bool {
    matches!(&slots[at as usize].inward, Inward::Datagrams { key: other, .. } if other == key)
}

/// Makes three writes to the hasher; the derived implementation would make one per field.
#[inline]
fn hash(seeded: &RandomState, key: &Key) -> u64 {
    let bits = |ip| match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    let mut hasher = seeded.build_hasher();
    hasher.write_u128(bits(key.client.ip()));
    hasher.write_u128(key.local.map_or(0, bits));
    hasher.write_u64(u64::from(key.client.port()) << 32 | u64::from(key.listener));
    hasher.finish()
}

/// Target side, and its link if it leads to a rule of this process.
pub(super) type Reached = (Outward, Option<Box<Link>>);

/// Target side that uses this socket; `any_port` is set if the socket is not connected.
pub(super) fn addressed(socket: SocketId, any_port: Option<SocketAddr>, header: Vec<u8>) -> Outward {
    if any_port.is_none() && header.is_empty() {
        return Outward::Datagrams(socket);
    }
    Outward::Addressed(Box::new(Addressed { route: Route { to: any_port, ..connected(socket) }, header }))
}

#[inline]
pub(super) fn connected(socket: SocketId) -> Route {
    Route { socket, to: None, from: None, tos: 0, ttl: 0, dont_fragment: false }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "the tests use small numbers")]
mod tests {
    use super::*;

    fn session(port: u16, now: u64) -> Session {
        let client = SocketAddr::from(([192, 0, 2, 1], port));
        let key = Key { listener: 0, client, local: None };
        let reply =
            Route { socket: SocketId(0), to: Some(client), from: None, tos: 0, ttl: 0, dont_fragment: false };
        let choice = ChosenTarget { target: crate::TargetSlot::default(), address: client };
        let outward = (Outward::Datagrams(SocketId(1)), None);
        let arrival = Arrival { rule: 0, client, port, hops: 0 };
        Session::new(arrival, Inward::Datagrams { key, reply }, outward, choice, now)
    }

    /// Any order of insertions, activity and removals keeps the list sorted by last activity.
    #[test]
    fn list_head_is_always_the_longest_idle_session() {
        let mut lists = Lists { connecting: List::new(10), active: List::new(1000), closing: List::new(5) };
        let mut table = SessionTable::default();
        let mut alive: Vec<(u32, u64)> = Vec::new();
        let mut seed = 7_u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize % below
        };
        for now in 0..20_000_u64 {
            match random(4) {
                0 if alive.len() < 100 => {
                    alive.push((table.insert(session((now % 60_000) as u16, now), &mut lists), now));
                }
                1 if !alive.is_empty() => {
                    let (at, _) = alive.swap_remove(random(alive.len()));
                    assert!(table.remove(at, &mut lists).is_some());
                }
                _ if !alive.is_empty() => {
                    let which = random(alive.len());
                    table.touch(alive[which].0, now, &mut lists);
                    alive[which].1 = now;
                }
                _ => {}
            }
            let oldest = alive.iter().min_by_key(|(_, stamp)| *stamp).copied();
            assert_eq!(table.longest_idle([&lists].into_iter()), oldest.map(|(at, _)| at));
            assert_eq!(table.due(&lists.active), oldest.map(|(_, stamp)| stamp + 1000));
            assert_eq!(table.len(), alive.len());
        }
        for (at, _) in alive {
            let port = table.get(at).unwrap().port;
            let Inward::Datagrams { key, .. } = table.get(at).unwrap().inward else { unreachable!() };
            assert_eq!((key.client.port(), table.find(&key)), (port, Some(at)));
        }
    }
}
