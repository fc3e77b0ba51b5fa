//! Specification of the server with sets and deadlines: linear lists and compared times. It shares only the
//! server's public types: no table, timer, hash or parser.
//!
//! One model covers all workers. It learns the server's random values (tickets, tokens, CONNECTION-IDs,
//! allocation IDs) when they first appear. An expiry may happen within a window: not before its deadline, and
//! no later than the first clock check in the whole second after it.

use super::prelude::*;
use turnpike_turn::{
    server::{AllocationId, OpenRelay, stats::ERROR_CODES},
    wire::channel_data::ChannelNumber,
};

use super::{
    cast::{self, Rules},
    message::{Answer, Datagram, Request, Said},
    step::Setup,
};

/// Link of clients over plain UDP, who are identified by their 5-tuple alone.
pub(super) const DATAGRAMS: Link = Link(0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    Direct,
    HandedOver,
    Forwarded { via: u16, occupied: bool },
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expected {
    ToPeer {
        relay: RelayId,
        peer: SocketAddr,
        payload: Vec<u8>,
        dont_fragment: bool,
    },
    ToClient {
        to: Source,
        framing: Framing,
        payload: Vec<u8>,
    },
    Icmp {
        to: Source,
        peer: SocketAddr,
        value: [u8; 8],
    },
    Reply {
        to: Source,
        answer: Answer,
    },
    /// Reply for the worker that forwarded the request, with the client that this worker should expect.
    Answered {
        via: u16,
        source: Source,
        answer: Answer,
        pending_move: Option<PendingMove>,
    },
    Drop(DropReason),
    Goes(Goes),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Channel { number: u16, padded: bool },
    Data(SocketAddr),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Goes {
    Open { number: usize, first: Wish, second: Option<Family> },
    Connect { number: usize, family: Family, peer: SocketAddr },
    HandOver { worker: u16 },
    Forward { worker: u16, via: u16, occupied: bool },
    Decline { via: u16 },
    Fetch { owner: u16, number: usize },
    LookUp { user: &'static str, realm: &'static str },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) family: Family,
    pub(super) transport: RelayTransport,
    pub(super) port: Port,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Port {
    Any,
    Even,
    Pair,
    Reserved([u8; 8]),
}

/// Client that a worker should expect, and to which another worker's allocation will move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PendingMove {
    pub(super) client: Client,
    pub(super) number: usize,
    pub(super) owner: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Good,
    NoSuchUser,
    Expired,
    WrongKey,
    Later,
    Unavailable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nonce {
    pub(super) network: IpAddr,
    pub(super) realm: &'static str,
    pub(super) unix: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) number: usize,
    pub(super) counter: u32,
}

pub(super) struct Model {
    /// Common clock; the workers' clocks have offsets.
    pub(super) ms: u64,
    pub(super) unix: u64,
    pub(super) workers: Vec<Desk>,
    /// Append-only: an allocation's number is its index.
    pub(super) allocations: Vec<Allocation>,
    pub(super) nonces: HashMap<String, Nonce>,
    pub(super) tickets: HashMap<Vec<u8>, Ticket>,
    /// Time of the newest nonce used with each transaction, for requests that are granted only once.
    granted: HashMap<(Once, [u8; 12]), u64>,
    /// True if the store responds immediately.
    pub(super) prompt: bool,
    pub(super) limits: Setup,
    /// Effects expected from the current call, in order; expiries may come in between.
    pub(super) told: VecDeque<Effect>,
    /// Effects of things already expired; they come first, in any order.
    pub(super) over: Vec<Effect>,
    /// Allocations that must move to another worker immediately, since their old client is gone.
    pub(super) moving: VecDeque<usize>,
    announced: Option<PendingMove>,
    pub(super) notices: VecDeque<Notice>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Notice {
    MoveOver { to: usize, pending_move: PendingMove },
    Deleted { to: usize, client: Client, transaction: [u8; 12], user: &'static str },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Once {
    Allocate,
    Move,
}

pub(super) struct Desk {
    pub(super) rules: Rules,
    pub(super) draining: bool,
    pub(super) stats: Stats,
    pub(super) expected: Vec<Expectation>,
    /// Deletions whose retransmissions get the same response, with their expiry.
    deleted: HashMap<(Client, [u8; 12], &'static str), u64>,
    pub(super) waiting: Vec<Waiting>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Expectation {
    pub(super) client: Client,
    pub(super) number: usize,
    pub(super) owner: usize,
    pub(super) asked: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) source: Source,
    pub(super) delivery: Delivery,
    pub(super) request: Request,
    pub(super) asked: u64,
    pub(super) until: u64,
    pub(super) lookup: Option<LookupId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    At(usize, AllocationSlot),
    /// The allocation is in transit between two workers, with its former ID. Its times are relative.
    Travels(AllocationSlot),
    Gone,
}

#[derive(Clone, Debug)]
pub(super) struct Allocation {
    pub(super) place: Place,
    pub(super) name: AllocationId,
    pub(super) client: Client,
    pub(super) link: Link,
    pub(super) away: bool,
    pub(super) realm: &'static str,
    pub(super) user: &'static str,
    pub(super) prefix: IpAddr,
    pub(super) transport: RelayTransport,
    pub(super) transaction: [u8; 12],
    pub(super) granted: u32,
    pub(super) reservation: Option<[u8; 8]>,
    pub(super) address_error: Option<(Family, u16)>,
    pub(super) pending: Option<Pending>,
    pub(super) relays: [Option<(SocketAddr, u64)>; 2],
    pub(super) former: [Option<SocketAddr>; 2],
    pub(super) permissions: BTreeMap<IpAddr, u64>,
    pub(super) channels: BTreeMap<u16, (SocketAddr, u64)>,
    pub(super) connections: Vec<Connection>,
    pub(super) mobility: Option<Mobility>,
    pub(super) to_peer: (u64, u64),
    pub(super) to_client: (u64, u64),
    pub(super) opened: u64,
    /// Time at which the allocation arrived on its worker: anything that had expired by then may end a second
    /// later.
    pub(super) since: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) said: Said,
    pub(super) mobile: bool,
    /// Nonce time recorded for this Allocate, and the time recorded before it.
    pub(super) recorded: (u64, Option<u64>),
    pub(super) asked: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Connection {
    pub(super) id: u32,
    pub(super) peer: SocketAddr,
    pub(super) stage: Stage,
    pub(super) transaction: Option<[u8; 12]>,
}

#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// Deadline; `None` once the runtime has been asked to cancel.
    Connecting(Option<u64>, Said),
    Waiting(u64),
    Bound,
}

#[derive(Clone, Debug)]
pub(super) struct Mobility {
    pub(super) counter: u32,
    pub(super) owner: usize,
    /// Previous ticket, valid until the client has evidently received the response. After a move that was not
    /// caused by data, also contains the number of datagrams sent before it.
    pub(super) spent: Option<(u32, Option<u64>)>,
    pub(super) arriving: Option<(Source, usize)>,
    pub(super) last: Option<LastArrival>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LastArrival {
    pub(super) client: Client,
    pub(super) transaction: [u8; 12],
    pub(super) at: u64,
    pub(super) granted: u32,
}

impl Allocation {
    pub(super) fn is_at(&self, worker: usize) -> bool {
        matches!(self.place, Place::At(at, _) if at == worker)
    }

    pub(super) fn id(&self) -> AllocationSlot {
        match self.place {
            Place::At(_, id) | Place::Travels(id) => id,
            Place::Gone => AllocationSlot { index: u32::MAX, generation: u32::MAX },
        }
    }

    pub(super) fn has(&self, family: Family) -> bool {
        self.relays[family as usize].is_some()
    }

    pub(super) fn permits(&self, ip: IpAddr, now: u64) -> bool {
        self.permissions.get(&ip).is_some_and(|until| *until > now)
    }

    pub(super) fn channel_to(&self, peer: SocketAddr, now: u64) -> Option<u16> {
        let found = self.channels.iter().find(|(_, (to, until))| *to == peer && *until > now);
        found.map(|(number, _)| *number)
    }

    pub(super) fn peer_of(&self, number: u16, now: u64) -> Option<SocketAddr> {
        self.channels.get(&number).filter(|(_, until)| *until > now).map(|(peer, _)| *peer)
    }

    fn deadlines(&self) -> impl Iterator<Item = u64> + '_ {
        let relays = self.relays.iter().flatten().map(|(_, until)| *until);
        let permissions = self.permissions.values().copied();
        let channels = self.channels.values().map(|(_, until)| *until);
        let connections = self.connections.iter().filter_map(|connection| match connection.stage {
            Stage::Connecting(until, _) => until,
            Stage::Waiting(until) => Some(until),
            Stage::Bound => None,
        });
        relays.chain(permissions).chain(channels).chain(connections)
    }

    pub(super) fn pack(&mut self, now: u64) {
        self.each_deadline(|until| until.saturating_sub(now));
        self.opened = now - self.opened;
        if let Some(mobility) = &mut self.mobility {
            mobility.arriving = None;
            if let Some(last) = &mut mobility.last {
                last.at = now - last.at;
            }
        }
    }

    pub(super) fn unpack(&mut self, now: u64) {
        self.each_deadline(|left| now + left);
        self.opened = now - self.opened;
        self.since = now;
        if let Some(last) = self.mobility.as_mut().and_then(|mobility| mobility.last.as_mut()) {
            last.at = now - last.at;
        }
    }

    fn each_deadline(&mut self, change: impl Fn(u64) -> u64) {
        for (_, until) in self.relays.iter_mut().flatten() {
            *until = change(*until);
        }
        for until in self.permissions.values_mut() {
            *until = change(*until);
        }
        for (_, until) in self.channels.values_mut() {
            *until = change(*until);
        }
        for connection in &mut self.connections {
            match &mut connection.stage {
                Stage::Connecting(Some(until), _) | Stage::Waiting(until) => *until = change(*until),
                Stage::Connecting(None, _) | Stage::Bound => {}
            }
        }
    }
}

impl Model {
    pub(super) fn new(limits: Setup) -> Self {
        let desk = || Desk {
            rules: Rules::default(),
            draining: false,
            stats: Stats::default(),
            expected: Vec::new(),
            deleted: HashMap::new(),
            waiting: Vec::new(),
        };
        Self {
            ms: cast::START_MS,
            unix: cast::START_UNIX,
            workers: (0..limits.workers).map(|_| desk()).collect(),
            allocations: Vec::new(),
            nonces: HashMap::new(),
            tickets: HashMap::new(),
            granted: HashMap::new(),
            prompt: true,
            limits,
            told: VecDeque::new(),
            over: Vec::new(),
            moving: VecDeque::new(),
            announced: None,
            notices: VecDeque::new(),
        }
    }

    pub(super) fn home(&self, at: usize, client: &Client) -> Option<usize> {
        self.allocations.iter().position(|it| it.is_at(at) && !it.away && it.client == *client)
    }

    pub(super) fn named(&self, at: usize, id: AllocationSlot) -> Option<usize> {
        self.allocations.iter().position(|it| it.place == Place::At(at, id))
    }

    pub(super) fn owns(&self, at: usize, number: usize) -> bool {
        self.allocations[number].is_at(at)
    }

    pub(super) fn of(&self, at: usize) -> impl Iterator<Item = (usize, &Allocation)> {
        self.allocations.iter().enumerate().filter(move |(_, it)| it.is_at(at))
    }

    /// Allocations that quotas count for this user, including those in transit.
    pub(super) fn held(&self, realm: &str, user: &str) -> usize {
        let is_its = |it: &&Allocation| it.place != Place::Gone && (it.realm, it.user) == (realm, user);
        self.allocations.iter().filter(is_its).count()
    }

    pub(super) fn held_by_all(&self) -> usize {
        self.allocations.iter().filter(|it| it.place != Place::Gone).count()
    }

    pub(super) fn held_at(&self, prefix: IpAddr) -> usize {
        self.allocations.iter().filter(|it| it.place != Place::Gone && it.prefix == prefix).count()
    }

    pub(super) fn fits(&self, number: usize, taken: &[usize], rules: &Rules, limits: &Setup) -> bool {
        let it = &self.allocations[number];
        let alike = |is_alike: &dyn Fn(&Allocation) -> bool| {
            taken.iter().filter(|number| is_alike(&self.allocations[**number])).count()
        };
        let of_user = alike(&|other| (other.realm, other.user) == (it.realm, it.user));
        let of_prefix = alike(&|other| other.prefix == it.prefix);
        rules.realms().contains(&it.realm)
            && of_user < limits.per_user
            && (limits.per_prefix == 0 || of_prefix < limits.per_prefix)
            && taken.len() < limits.total
    }

    pub(super) fn is_stream(client: &Client) -> bool {
        cast::transport(client.listener).is_stream()
    }

    pub(super) fn deadlines(&self, at: usize) -> impl Iterator<Item = u64> {
        self.of(at).flat_map(|(_, it)| it.deadlines())
    }

    /// Latest time at which a worker must check the clock next.
    pub(super) fn next_deadline(&self, at: usize) -> Option<u64> {
        let looked_at =
            |it: &Allocation| it.deadlines().min().map(|until| whole_second(until.max(it.since + 1)));
        let allocations = self.of(at).filter_map(|(_, it)| looked_at(it));
        allocations.chain(self.workers[at].waiting.iter().map(|it| it.until)).min()
    }

    pub(super) fn expected(&mut self, at: usize, client: &Client) -> Option<&mut Expectation> {
        self.workers[at].expected.iter_mut().find(|it| it.client == *client)
    }

    pub(super) fn stats(&mut self, at: usize) -> &mut Stats {
        &mut self.workers[at].stats
    }

    pub(super) fn dropped(&mut self, at: usize, reason: DropReason) -> Expected {
        self.stats(at).drops[reason as usize] += 1;
        Expected::Drop(reason)
    }

    pub(super) fn error(&mut self, at: usize, code: u16) {
        let index = ERROR_CODES.iter().position(|(known, _)| *known == code).expect("a code the server uses");
        self.stats(at).errors[index] += 1;
    }

    pub(super) fn connection_event(&mut self, at: usize, event: ConnectionEvent) {
        self.stats(at).connection_events[event as usize] += 1;
    }

    pub(super) fn mobility_event(&mut self, at: usize, event: MobilityEvent) {
        self.stats(at).mobility[event as usize] += 1;
    }

    pub(super) fn clock(at: usize, ms: u64) -> u64 {
        ms + cast::skew(at)
    }

    pub(super) fn from_client(&mut self, at: usize, source: Source, datagram: &Datagram) -> Expected {
        match datagram {
            Datagram::Request(request) => self.request(at, source, Delivery::Direct, request),
            Datagram::Send { peer, data, dont_fragment } => {
                let Some(number) = self.home(at, &source.client) else {
                    return self.stranger(at, source, datagram);
                };
                let now = self.ms;
                let refused = self.workers[at].rules.refuses(peer.ip());
                let it = &self.allocations[number];
                let family = family_of(peer.ip());
                if it.transport == RelayTransport::Tcp {
                    return self.dropped(at, DropReason::TcpAllocation);
                }
                if !it.has(family) {
                    return self.dropped(at, DropReason::PeerFamily);
                }
                if peer.port() == 0 || refused {
                    return self.dropped(at, DropReason::PeerRefused);
                }
                if !it.permits(peer.ip(), now) {
                    return self.dropped(at, DropReason::NoPermission);
                }
                let is_v4 = source.client.address.is_ipv4() && peer.is_ipv4();
                let dont_fragment = *dont_fragment && (is_v4 || Self::is_stream(&source.client));
                self.passes_to_peer(at, number, *peer, data, dont_fragment)
            }
            Datagram::ChannelData { number: channel, data } => {
                if !(0x4000..=0x4FFF).contains(channel) {
                    return self.dropped(at, DropReason::ChannelNumber);
                }
                let Some(number) = self.home(at, &source.client) else {
                    return self.stranger(at, source, datagram);
                };
                match self.allocations[number].peer_of(*channel, self.ms) {
                    Some(peer) => self.passes_to_peer(at, number, peer, data, false),
                    None => self.dropped(at, DropReason::UnboundChannel),
                }
            }
            Datagram::Noise => self.dropped(at, DropReason::NotStun),
            Datagram::Keepalive => self.dropped(at, DropReason::Keepalive),
        }
    }

    fn passes_to_peer(
        &mut self,
        at: usize,
        number: usize,
        peer: SocketAddr,
        data: &[u8],
        dont_fragment: bool,
    ) -> Expected {
        let it = &mut self.allocations[number];
        let relay = RelayId { allocation: it.id(), family: family_of(peer.ip()) };
        add(&mut it.to_peer, data.len());
        let peer = self.workers[at].rules.reached(peer);
        let stats = self.stats(at);
        stats.to_peer_datagrams += 1;
        stats.to_peer_bytes += data.len() as u64;
        Expected::ToPeer { relay, peer, payload: data.to_vec(), dont_fragment }
    }

    pub(super) fn known_as(&self, at: usize, relay: RelayId, peer: SocketAddr) -> SocketAddr {
        let told = self.workers[at].rules.told(peer);
        let it = self.named(at, relay.allocation).map(|number| &self.allocations[number]);
        if it.is_some_and(|it| it.permits(told.ip(), self.ms)) { told } else { peer }
    }

    /// Handles a datagram from the peer that the client knows by this address.
    pub(super) fn from_peer(
        &mut self,
        at: usize,
        relay: RelayId,
        peer: SocketAddr,
        payload: &[u8],
    ) -> Expected {
        let Some(number) = self.named(at, relay.allocation) else {
            return self.dropped(at, DropReason::StaleRelay);
        };
        let (peer, now) = (self.known_as(at, relay, peer), self.ms);
        let it = &mut self.allocations[number];
        if it.away {
            return self.dropped(at, DropReason::ClientAway);
        }
        if !it.permits(peer.ip(), now) {
            return self.dropped(at, DropReason::NoPermission);
        }
        let padded = Self::is_stream(&it.client);
        let (framing, header) = match it.channel_to(peer, now) {
            Some(number) => (Framing::Channel { number, padded }, 4),
            None => (Framing::Data(peer), if peer.is_ipv4() { 36 } else { 48 }),
        };
        let whole = match framing {
            Framing::Channel { padded: false, .. } => payload.len(),
            _ => payload.len().next_multiple_of(4),
        };
        if header + whole > 65_507 {
            return self.dropped(at, DropReason::Oversized);
        }
        add(&mut it.to_client, payload.len());
        let to = Source { client: it.client, link: it.link };
        let stats = self.stats(at);
        stats.to_client_datagrams += 1;
        stats.to_client_bytes += payload.len() as u64;
        Expected::ToClient { to, framing, payload: payload.to_vec() }
    }

    pub(super) fn from_icmp(
        &mut self,
        at: usize,
        relay: RelayId,
        peer: SocketAddr,
        (kind, code, info): (u8, u8, u32),
    ) -> Expected {
        let (passes, has_mtu) = match relay.family {
            Family::V4 => ([3, 11].contains(&kind), (kind, code) == (3, 4)),
            Family::V6 => ([1, 2, 3].contains(&kind), kind == 2),
        };
        if !passes {
            return self.dropped(at, DropReason::IcmpType);
        }
        let Some(number) = self.named(at, relay.allocation) else {
            return self.dropped(at, DropReason::StaleRelay);
        };
        let peer = self.known_as(at, relay, peer);
        let it = &self.allocations[number];
        if !it.permits(peer.ip(), self.ms) {
            return self.dropped(at, DropReason::NoPermission);
        }
        if it.away {
            return self.dropped(at, DropReason::ClientAway);
        }
        let to = Source { client: it.client, link: it.link };
        self.stats(at).icmp_relayed += 1;
        let [a, b, c, d] = if has_mtu { info } else { 0 }.to_be_bytes();
        Expected::Icmp { to, peer, value: [0, 0, kind, code, a, b, c, d] }
    }

    fn stranger(&mut self, at: usize, source: Source, datagram: &Datagram) -> Expected {
        let Some(expected) = self.expected(at, &source.client) else {
            return self.dropped(at, DropReason::NoAllocation);
        };
        let Expectation { owner, number, .. } = *expected;
        if owner == at {
            self.settle(at, number, source, true);
            return self.from_client(at, source, datagram);
        }
        if std::mem::replace(&mut expected.asked, true) {
            return self.dropped(at, DropReason::Moving);
        }
        let owner = u16::try_from(owner).expect("few enough workers");
        Expected::Goes(Goes::Fetch { owner, number })
    }

    fn closed(&self, number: usize, reason: ClosedReason) -> Effect {
        let it = &self.allocations[number];
        let relayed = [0, 1].map(|side| it.relays[side].map(|(address, _)| address).or(it.former[side]));
        Effect::Closed {
            allocation: it.id(),
            id: it.name,
            client: it.client,
            realm: Arc::from(it.realm),
            username: it.user.into(),
            identity: None,
            relayed,
            transport: cast::transport(it.client.listener),
            relay_transport: it.transport,
            reason,
            away: it.away,
            lived_ms: self.ms - it.opened,
            to_peer: it.to_peer,
            to_client: it.to_client,
            reported: None,
        }
    }

    pub(super) fn close(&mut self, at: usize, number: usize, reason: ClosedReason) {
        let effect = self.closed(number, reason);
        self.told.push_back(effect);
        self.forget(at, number);
        if let Some((source, worker)) = self.arriving_at(number) {
            self.arrives_no_more(at, worker, source.client, number);
        }
        let it = &mut self.allocations[number];
        it.place = Place::Gone;
        it.connections.clear();
        let was_open = it.pending.take().is_none();
        let index = match reason {
            ClosedReason::Deleted => 0,
            ClosedReason::Expired => 1,
            ClosedReason::Shutdown => 2,
            ClosedReason::Administrator => 3,
            ClosedReason::Disconnected => 4,
            ClosedReason::MaxAge => 5,
            ClosedReason::Banned => 6,
            ClosedReason::Credential => 7,
            ClosedReason::AddressGone => 8,
        };
        self.stats(at).allocations_closed[index] += u64::from(was_open);
    }

    pub(super) fn forget(&mut self, at: usize, number: usize) {
        self.workers[at].expected.retain(|it| it.owner != at || it.number != number);
    }

    /// Ends one of two relayed transport addresses, with everything of its family.
    pub(super) fn close_relay(&mut self, at: usize, number: usize, family: Family) {
        let it = &mut self.allocations[number];
        let relay = RelayId { allocation: it.id(), family };
        it.former[family as usize] = it.relays[family as usize].take().map(|(address, _)| address);
        it.permissions.retain(|ip, _| family_of(*ip) != family);
        it.channels.retain(|_, (peer, _)| family_of(peer.ip()) != family);
        self.told.push_back(Effect::RelayClosed { relay });
        self.close_connections(at, number, |peer| family_of(peer.ip()) == family);
    }

    fn close_connections(&mut self, at: usize, number: usize, to: impl Fn(SocketAddr) -> bool) {
        let it = &mut self.allocations[number];
        let allocation = it.id();
        let (over, left) = std::mem::take(&mut it.connections).into_iter().partition(|it| to(it.peer));
        it.connections = left;
        let over: Vec<Connection> = over;
        for connection in over {
            self.connection_event(at, ConnectionEvent::Ended);
            self.tell_connection_closed(allocation, connection.id);
        }
    }

    pub(super) fn tell_connection_closed(&mut self, allocation: AllocationSlot, id: u32) {
        let connection = turnpike_turn::server::ConnectionId(id);
        self.told.push_back(Effect::ConnectionClosed { allocation, connection });
    }

    /// Moves the effects of expired bindings to `over`, before anything replaces the bindings.
    pub(super) fn sweep(&mut self, number: usize) {
        let now = self.ms;
        let it = &mut self.allocations[number];
        let allocation = it.id();
        let ended = it.permissions.extract_if(.., |_, until| *until <= now);
        self.over.extend(ended.map(|(peer, _)| Effect::PermissionEnded { allocation, peer }));
        let unbound = it.channels.extract_if(.., |_, (_, until)| *until <= now);
        self.over.extend(unbound.map(|(number, (peer, _))| Effect::Unbound {
            allocation,
            number: number_of(number),
            peer,
        }));
    }

    /// Returns true if a worker may emit this effect merely because time has passed, and applies it.
    pub(super) fn may_expire(&mut self, at: usize, effect: &Effect) -> bool {
        let now = self.ms;
        match effect {
            Effect::PermissionEnded { allocation, peer } => {
                let Some(number) = self.named(at, *allocation) else { return false };
                let permissions = &mut self.allocations[number].permissions;
                let over = permissions.get(peer).is_some_and(|until| *until <= now);
                if over {
                    permissions.remove(peer);
                }
                over
            }
            Effect::Unbound { allocation, number: channel, peer } => {
                let Some(number) = self.named(at, *allocation) else { return false };
                let channels = &mut self.allocations[number].channels;
                let bound = channels.get(&channel.get());
                let over = bound.is_some_and(|(to, until)| to == peer && *until <= now);
                if over {
                    channels.remove(&channel.get());
                }
                over
            }
            Effect::RelayClosed { relay } => {
                let Some(number) = self.named(at, relay.allocation) else { return false };
                let it = &self.allocations[number];
                let until = it.relays[relay.family as usize].map(|(_, until)| until);
                let over = until.is_some_and(|until| until <= now) && it.relays.iter().flatten().count() == 2;
                over && self.happens(effect, |model| model.close_relay(at, number, relay.family))
            }
            Effect::Closed {
                allocation, reason: ClosedReason::Expired | ClosedReason::Credential, ..
            } => {
                let Some(number) = self.named(at, *allocation) else { return false };
                let it = &self.allocations[number];
                let mut relays = it.relays.iter().flatten();
                let over = relays.clone().count() == 1 && relays.all(|(_, until)| *until <= now);
                let reason = match self.credential_left(at, it.user) {
                    Some(0) => ClosedReason::Credential,
                    _ => ClosedReason::Expired,
                };
                over && self.happens(effect, |model| model.close(at, number, reason))
            }
            Effect::ConnectionClosed { allocation, connection } => {
                let Some(number) = self.named(at, *allocation) else { return false };
                let connections = &mut self.allocations[number].connections;
                let over = |it: &Connection| {
                    it.id == connection.0 && matches!(it.stage, Stage::Waiting(until) if until <= now)
                };
                let Some(place) = connections.iter().position(over) else { return false };
                connections.remove(place);
                self.connection_event(at, ConnectionEvent::Unbound);
                true
            }
            Effect::ConnectTimedOut { allocation, connection } => {
                let Some(number) = self.named(at, *allocation) else { return false };
                let mut connections = self.allocations[number].connections.iter_mut();
                let stage = connections.find(|it| it.id == connection.0).map(|it| &mut it.stage);
                match stage {
                    Some(Stage::Connecting(until @ Some(_), _))
                        if until.is_some_and(|until| until <= now) =>
                    {
                        *until = None;
                        true
                    }
                    _ => false,
                }
            }
            _ => false,
        }
    }

    pub(super) fn learn_id(&mut self, at: usize, effect: &Effect) {
        let (Effect::Opened { allocation, id, .. } | Effect::Closed { allocation, id, .. }) = effect else {
            return;
        };
        if let Some(Effect::Opened { id: expected, .. } | Effect::Closed { id: expected, .. }) =
            self.told.front_mut()
            && *expected == nameless()
        {
            assert!(self.allocations.iter().all(|it| it.name != *id), "an allocation ID was reused");
            *expected = *id;
            if let Some(number) = self.named(at, *allocation) {
                self.allocations[number].name = *id;
            }
        }
    }

    /// Applies a change and checks that its first effect is this one; the others come next.
    fn happens(&mut self, effect: &Effect, change: impl FnOnce(&mut Self)) -> bool {
        let later = std::mem::take(&mut self.told);
        change(self);
        let first = self.told.pop_front();
        self.told.extend(later);
        first.as_ref() == Some(effect)
    }

    pub(super) fn timeout(&mut self, at: usize) {
        let now = self.ms;
        let waiting = &mut self.workers[at].waiting;
        let before = waiting.len();
        waiting.retain(|it| it.until > now);
        let over = before - waiting.len();
        self.stats(at).drops[DropReason::LookupOver as usize] += over as u64;
    }

    /// Deadlines that should have expired in a clock check but did not.
    pub(super) fn overdue(&self, at: usize) -> Vec<(usize, u64)> {
        let all = self
            .of(at)
            .flat_map(|(number, it)| it.deadlines().map(move |until| (number, until.max(it.since + 1))));
        all.filter(|(_, until)| whole_second(*until) <= self.ms).collect()
    }

    pub(super) fn reconfigure(&mut self, at: usize, rules: Rules) {
        let before = self.workers[at].rules.clone();
        self.workers[at].rules = rules;
        let numbers: Vec<usize> = self.in_slots(at);
        for number in &numbers {
            self.end_refused(at, *number);
            self.lead_channels(at, *number, &before);
            self.permit_by_channels(at, *number, true);
        }
        for number in numbers {
            if !self.workers[at].rules.realms().contains(&self.allocations[number].realm) {
                self.close(at, number, ClosedReason::Administrator);
            } else if self.allocations[number].pending.is_none() {
                self.shorten(at, number);
            }
        }
    }

    /// Extends permissions to their channels' expiry, if `channels_permit`. A reload emits effects for this.
    pub(super) fn permit_by_channels(&mut self, at: usize, number: usize, is_told: bool) {
        if !self.workers[at].rules.channels_permit {
            return;
        }
        let now = self.ms;
        let it = &mut self.allocations[number];
        let mut bound: BTreeMap<IpAddr, u64> = BTreeMap::new();
        for (peer, until) in it.channels.values() {
            let last = bound.entry(peer.ip()).or_default();
            *last = (*last).max(*until);
        }
        for (peer, until) in bound {
            if it.permissions.get(&peer).is_none_or(|permitted| *permitted < until) {
                let (allocation, renewed) = (it.id(), it.permits(peer, now));
                it.permissions.insert(peer, until);
                let expires_ms = Self::clock(at, until);
                if is_told {
                    self.told.push_back(Effect::Permitted { allocation, peer, expires_ms, renewed });
                }
            }
        }
    }

    /// Ends an allocation no later than its credential, if the worker's rules say so.
    pub(super) fn shorten(&mut self, at: usize, number: usize) {
        let Some(left) = self.credential_left(at, self.allocations[number].user) else { return };
        let latest = self.ms + left * 1000;
        let it = &mut self.allocations[number];
        let allocation = it.id();
        for family in [Family::V4, Family::V6] {
            if let Some((_, until)) = &mut it.relays[family as usize]
                && *until > latest
            {
                *until = latest;
                let (family, expires_ms) = (Some(family), Self::clock(at, latest));
                self.told.push_back(Effect::Renewed { allocation, family, expires_ms });
            }
        }
    }

    /// Ends all bindings that the rules refuse to an allocation's realm.
    pub(super) fn end_refused(&mut self, at: usize, number: usize) {
        let rules = self.workers[at].rules.clone();
        let it = &mut self.allocations[number];
        let (allocation, realm) = (it.id(), it.realm);
        let refuses = |ip: IpAddr| rules.refuses_in(realm, ip);
        let refused: Vec<IpAddr> = it.permissions.keys().copied().filter(|ip| refuses(*ip)).collect();
        let unbound: Vec<(u16, SocketAddr)> = it
            .channels
            .iter()
            .filter(|(_, (peer, _))| refuses(peer.ip()))
            .map(|(number, (peer, _))| (*number, *peer))
            .collect();
        for peer in refused {
            it.permissions.remove(&peer);
            self.told.push_back(Effect::PermissionEnded { allocation, peer });
        }
        for (channel, peer) in unbound {
            it.channels.remove(&channel);
            self.told.push_back(Effect::Unbound { allocation, number: number_of(channel), peer });
        }
        self.close_connections(at, number, |peer| refuses(peer.ip()));
    }

    fn lead_channels(&mut self, at: usize, number: usize, before: &Rules) {
        let it = &self.allocations[number];
        let allocation = it.id();
        for (channel, (peer, until)) in &it.channels {
            let (number, peer, at_peer) = (number_of(*channel), *peer, self.workers[at].rules.reached(*peer));
            if before.reached(peer) != at_peer {
                let expires_ms = Self::clock(at, *until);
                self.told.push_back(Effect::Unbound { allocation, number, peer });
                self.told.push_back(Effect::Bound {
                    allocation,
                    number,
                    peer,
                    at: at_peer,
                    expires_ms,
                    renewed: false,
                });
            }
        }
    }

    pub(super) fn in_slots(&self, at: usize) -> Vec<usize> {
        let mut numbers: Vec<usize> = self.of(at).map(|(number, _)| number).collect();
        numbers.sort_by_key(|number| self.allocations[*number].id().index);
        numbers
    }

    /// Expects effects for the bindings that come with an allocation.
    pub(super) fn tell_bindings(&mut self, at: usize, number: usize) {
        let it = &self.allocations[number];
        let allocation = it.id();
        let clock = |until: &u64| Self::clock(at, *until);
        let permitted = it.permissions.iter().map(|(peer, until)| Effect::Permitted {
            allocation,
            peer: *peer,
            expires_ms: clock(until),
            renewed: false,
        });
        let bound = it.channels.iter().map(|(number, (peer, until))| Effect::Bound {
            allocation,
            number: number_of(*number),
            peer: *peer,
            at: self.workers[at].rules.reached(*peer),
            expires_ms: clock(until),
            renewed: false,
        });
        self.told.extend(permitted.chain(bound));
    }

    /// Expects effects for an allocation taken over from another process.
    pub(super) fn tell_restored(&mut self, at: usize, number: usize) {
        let it = &self.allocations[number];
        let mut relays = it.relays.iter().flatten();
        let (first, until) = *relays.next().expect("a relayed address");
        self.told.push_back(Effect::Opened {
            allocation: it.id(),
            id: it.name,
            client: it.client,
            link: it.link,
            expires_ms: Self::clock(at, until),
            realm: Arc::from(it.realm),
            username: it.user.into(),
            relayed: (first, relays.next().map(|(second, _)| *second)),
        });
        self.tell_bindings(at, number);
    }

    /// Expects the return of a relay socket whose allocation has ended in the meantime.
    pub(super) fn tell_unused(&mut self, relay: RelayId) {
        self.told.push_back(Effect::RelayClosed { relay });
    }

    pub(super) fn deleted(&mut self, at: usize, client: Client, transaction: [u8; 12], user: &'static str) {
        let until = self.ms + 40_000;
        self.workers[at].deleted.insert((client, transaction, user), until);
    }

    pub(super) fn was_deleted(
        &self,
        at: usize,
        client: Client,
        transaction: [u8; 12],
        user: &'static str,
    ) -> bool {
        self.workers[at].deleted.get(&(client, transaction, user)).is_some_and(|until| *until > self.ms)
    }

    /// Records a request by its nonce. `None` if it may be a replay; otherwise the time of the previous
    /// nonce.
    pub(super) fn record(&mut self, request: (Once, [u8; 12]), issued: u64) -> Option<Option<u64>> {
        let before = self.granted.get(&request).copied();
        if before.is_some_and(|before| before >= issued) {
            return None;
        }
        self.granted.insert(request, issued);
        Some(before)
    }

    pub(super) fn withdraw(&mut self, transaction: [u8; 12], (recorded, before): (u64, Option<u64>)) {
        let request = (Once::Allocate, transaction);
        if self.granted.get(&request) == Some(&recorded) {
            match before {
                Some(before) => self.granted.insert(request, before),
                None => self.granted.remove(&request),
            };
        }
    }

    pub(super) fn announce(&mut self, pending_move: PendingMove) {
        self.announced = Some(pending_move);
    }

    pub(super) fn take_announced(&mut self) -> Option<PendingMove> {
        self.announced.take()
    }

    /// Allocations keep their state; other state is kept only if it is passed on. Clients retransmit requests
    /// that were waiting.
    pub(super) fn restarted(&mut self, remembers: bool) {
        for (at, desk) in self.workers.iter_mut().enumerate() {
            desk.stats = Stats::default();
            desk.draining = false;
            desk.waiting.clear();
            if !remembers {
                desk.deleted.clear();
            }
            let allocations = &self.allocations;
            // A worker's own pending moves are part of its allocations.
            desk.expected.retain_mut(|it| {
                it.asked = false;
                let arrives =
                    || allocations[it.number].mobility.as_ref().is_some_and(|it| it.arriving.is_some());
                if it.owner == at { arrives() } else { remembers }
            });
        }
        if !remembers {
            self.granted.clear();
        }
    }

    /// The clock keeps running. A pending move survives only over UDP.
    pub(super) fn passed_on(&mut self, number: usize, remembers: bool, link: Link) {
        let now = self.ms;
        let it = &mut self.allocations[number];
        let arriving = it.mobility.as_ref().and_then(|mobility| mobility.arriving);
        it.pack(now);
        it.unpack(now);
        it.link = link;
        if let Some(mobility) = &mut it.mobility {
            mobility.arriving = arriving.filter(|(source, _)| remembers && source.link == DATAGRAMS);
        }
    }

    pub(super) fn connections(&self, holder: Option<(&str, &str)>) -> usize {
        let is_its = |it: &&Allocation| holder.is_none_or(|holder| (it.realm, it.user) == holder);
        let all = (0..self.workers.len()).flat_map(|at| self.of(at)).map(|(_, it)| it);
        all.filter(is_its).map(|it| it.connections.len()).sum()
    }

    pub(super) fn connections_at(&self, at: usize) -> usize {
        self.of(at).map(|(_, it)| it.connections.len()).sum()
    }

    pub(super) fn connection(&self, at: usize, id: u32) -> Option<(usize, usize)> {
        self.of(at).find_map(|(number, it)| Some((number, it.connections.iter().position(|it| it.id == id)?)))
    }

    pub(super) fn refuse_connection(&mut self, at: usize, reason: ConnectionRefusal) {
        self.stats(at).connection_refusals[reason as usize] += 1;
    }
}

pub(super) fn nameless() -> AllocationId {
    "0".repeat(32).parse().expect("32 digits")
}

/// First whole second at or after a deadline, the latest time at which the deadline is checked.
pub(super) fn whole_second(ms: u64) -> u64 {
    ms.div_ceil(1000) * 1000
}

pub(super) fn family_of(ip: IpAddr) -> Family {
    if ip.is_ipv4() { Family::V4 } else { Family::V6 }
}

pub(super) fn number_of(channel: u16) -> ChannelNumber {
    ChannelNumber::new(channel).expect("a channel number of RFC 8656")
}

fn add((datagrams, bytes): &mut (u64, u64), payload: usize) {
    *datagrams += 1;
    *bytes += payload as u64;
}

/// Checks a requested socket, apart from random values.
pub(super) fn is_wish(wish: &Wish, asked: &OpenRelay, any: PortRequest) -> bool {
    let port = match (wish.port, asked.port) {
        (Port::Any, port) => port == any,
        (Port::Even, PortRequest::Even) => true,
        // The token must encode the family, which a later request does not name.
        (Port::Pair, PortRequest::EvenAndReserveNext(token)) => token[7] & 1 == wish.family as u8,
        (Port::Reserved(token), PortRequest::Reserved(asked)) => token == asked,
        _ => false,
    };
    port && (wish.family, wish.transport) == (asked.family, asked.transport)
}
