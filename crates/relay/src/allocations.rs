//! Allocations of all workers for the admin interface. A query reads one slice of a worker's allocations through
//! its inbox, so packets never wait long; callers repeat the query until they have all allocations.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::Arc,
    time::{Duration, Instant},
};

use turnpike_turn::{
    server::{
        AllocationId, AllocationView, Cidr, ClosedReason, QualityReport, RelayTransport, Server, Tap,
        TapRefusal, Transport, UsageReport,
    },
    time::Now,
};

use crate::{
    Relay,
    policy::WorkerPolicy,
    worker::{Command, Probe, QualityQuery},
};

pub const SLICE: u32 = 1024;
/// Maximum number of allocations returned per query; lower than [`SLICE`], because copying an allocation costs as
/// much as checking several slots.
pub const SLICE_ALLOCATIONS: usize = 128;

/// Criteria that allocations must meet; `None` matches everything.
#[derive(Clone, Debug, Default)]
pub struct AllocationFilter {
    /// Username, or the id of a time-limited username.
    pub user: Option<String>,
    pub realm: Option<String>,
    pub client: Option<AddressFilter>,
    /// Transport between client and server.
    pub transport: Option<Transport>,
    pub relayed: Option<AddressFilter>,
    pub id: Option<AllocationId>,
}

impl AllocationFilter {
    fn admits(&self, view: &AllocationView<'_>) -> bool {
        fn is<T>(wanted: Option<&T>, test: impl FnOnce(&T) -> bool) -> bool {
            wanted.is_none_or(test)
        }
        is(self.id.as_ref(), |id| *id == view.id())
            && is(self.user.as_ref(), |user| is_user(user, view.username(), view.identity()))
            && is(self.realm.as_ref(), |realm| **view.realm() == **realm)
            && is(self.transport.as_ref(), |transport| *transport == view.transport())
            && is(self.client.as_ref(), |client| client.admits(view.client().address))
            && is(self.relayed.as_ref(), |wanted| view.relayed().any(|(address, _)| wanted.admits(address)))
    }
}

/// Returns true if an allocation with this username and identity belongs to `user`. A time-limited username
/// has the identity `:id`.
fn is_user(user: &str, username: &str, identity: &str) -> bool {
    user == username || user == identity || Some(user) == identity.strip_prefix(':')
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressFilter {
    Exactly(SocketAddr),
    Within(Cidr),
}

impl AddressFilter {
    fn admits(&self, address: SocketAddr) -> bool {
        match self {
            Self::Exactly(wanted) => *wanted == address,
            Self::Within(prefix) => prefix.contains(address.ip()),
        }
    }
}

impl FromStr for AddressFilter {
    type Err = String;

    /// Accepts `192.0.2.7:4000`, `[2001:db8::7]:4000`, `192.0.2.7`, `2001:db8::/32`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(address) => Ok(Self::Exactly(address)),
            Err(_) => text.parse().map(Self::Within),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct AllocationSnapshot {
    pub id: AllocationId,
    pub worker: usize,
    pub slot: u32,
    pub realm: Arc<str>,
    pub username: Box<str>,
    /// Name under which quotas count the user, if it differs from the username.
    pub identity: Option<Box<str>>,
    pub client: SocketAddr,
    /// Our address that the client sends to.
    pub server: SocketAddr,
    pub transport: Transport,
    /// Transport between server and peers.
    pub relay_transport: RelayTransport,
    /// Relayed transport addresses, IPv4 first, with the milliseconds until each expires.
    pub relayed: Vec<(SocketAddr, u64)>,
    /// True if the allocation follows its client to another address (RFC 8016).
    pub is_mobile: bool,
    /// True if the mobile client has left its address and may return.
    pub is_away: bool,
    pub age_ms: u64,
    /// Payload datagrams and bytes to peers.
    pub to_peer: (u64, u64),
    /// Payload datagrams and bytes to the client.
    pub to_client: (u64, u64),
    /// Peer addresses with the milliseconds until each permission expires; filled in only if
    /// [`Look::details`] is set.
    pub permissions: Vec<(IpAddr, u64)>,
    /// Channel numbers and peers with the milliseconds until each expires; filled in only if
    /// [`Look::details`] is set.
    pub channels: Vec<(u16, SocketAddr, u64)>,
    pub connections: usize,
}

impl AllocationSnapshot {
    fn of(view: &AllocationView<'_>, worker: usize, details: bool) -> Self {
        let identity = view.identity();
        let client = view.client();
        Self {
            id: view.id(),
            worker,
            slot: view.allocation().index,
            realm: Arc::clone(view.realm()),
            username: view.username().into(),
            identity: (identity != view.username()).then(|| identity.into()),
            client: client.address,
            server: client.local,
            transport: view.transport(),
            relay_transport: view.relay_transport(),
            relayed: view.relayed().collect(),
            is_mobile: view.is_mobile(),
            is_away: view.is_away(),
            age_ms: view.age_ms(),
            to_peer: view.to_peer(),
            to_client: view.to_client(),
            permissions: if details { view.permissions().collect() } else { Vec::new() },
            channels: if details { view.channels().collect() } else { Vec::new() },
            connections: view.connections(),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Look {
    /// First slot to visit: 0 in the first query, then [`Looked::next`].
    pub from: u32,
    /// Maximum number of allocations to return, at most [`SLICE_ALLOCATIONS`].
    pub most: usize,
    pub filter: Arc<AllocationFilter>,
    pub details: bool,
}

#[derive(Clone, Debug)]
pub struct Looked {
    /// Ordered by slot.
    pub allocations: Vec<AllocationSnapshot>,
    /// First slot of the next query; `None` after the last allocation.
    pub next: Option<u32>,
    pub waited: Duration,
    pub took: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationTraffic {
    pub id: AllocationId,
    pub slot: u32,
    pub to_peer: (u64, u64),
    pub to_client: (u64, u64),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenerTraffic {
    pub allocations: u64,
    pub to_peer: (u64, u64),
    pub to_client: (u64, u64),
}

/// A listener that is open or still has allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerState {
    /// TCP if the listener accepts both TCP and TLS.
    pub transport: Transport,
    /// Bound address with its actual port.
    pub address: SocketAddr,
    /// True if a reload removed the listener, which no longer accepts new clients.
    pub closing: bool,
    pub traffic: ListenerTraffic,
}

impl ListenerTraffic {
    fn of(view: &AllocationView<'_>) -> Self {
        Self { allocations: 1, to_peer: view.to_peer(), to_client: view.to_client() }
    }

    pub fn merge(&mut self, other: &Self) {
        let Self { allocations, to_peer, to_client } = other;
        self.allocations += allocations;
        for (sum, more) in [(&mut self.to_peer, to_peer), (&mut self.to_client, to_client)] {
            sum.0 += more.0;
            sum.1 += more.1;
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct WorkerTally {
    /// Indexed by listener number.
    pub listeners: Vec<ListenerTraffic>,
    /// First slot of the next slice; `None` after the last allocation.
    pub next: Option<u32>,
}

impl WorkerTally {
    pub fn merge(&mut self, other: &Self) {
        let len = self.listeners.len().max(other.listeners.len());
        self.listeners.resize(len, ListenerTraffic::default());
        self.listeners.iter_mut().zip(&other.listeners).for_each(|(sum, more)| sum.merge(more));
    }
}

impl Relay {
    #[must_use]
    pub fn workers(&self) -> usize {
        self.senders().count()
    }

    /// Queries one worker. `answer` is called on the worker's thread and must not block; it is dropped if the
    /// worker does not exist or has ended.
    pub fn look(&self, worker: usize, look: Look, answer: impl FnOnce(Looked) + Send + 'static) {
        let asked = Instant::now();
        self.question(worker, move |server, now| {
            let begun = Instant::now();
            let (allocations, next) = slice(server, now, worker, &look);
            answer(Looked { allocations, next, waited: begun - asked, took: begun.elapsed() });
        });
    }

    /// Adds up a slice of a worker's allocations. Call it with slot 0 first, then with [`WorkerTally::next`].
    /// `answer` behaves as in [`Relay::look`].
    pub fn tally(&self, worker: usize, from: u32, answer: impl FnOnce(WorkerTally) + Send + 'static) {
        let numbers = self.in_force().layout.entries().count();
        self.question(worker, move |server, now| answer(tally(server, now, from, numbers)));
    }

    /// Listeners with the sums of all workers: UDP, then streams, then DTLS.
    #[must_use]
    pub fn listening(&self, sums: &WorkerTally) -> Vec<ListenerState> {
        let in_force = self.in_force();
        let mut listeners = Vec::new();
        for (kind, transports) in [
            (Transport::Udp, &[Transport::Udp][..]),
            (Transport::Tcp, &[Transport::Tcp, Transport::Tls]),
            (Transport::Dtls, &[Transport::Dtls]),
        ] {
            for placed in in_force.layout.placed(kind) {
                let mut traffic = ListenerTraffic::default();
                let numbers = |transport: &Transport| in_force.layout.numbers(*transport, placed.place);
                transports
                    .iter()
                    .flat_map(numbers)
                    .filter_map(|number| sums.listeners.get(usize::from(number.0)))
                    .for_each(|sum| traffic.merge(sum));
                if placed.open || traffic.allocations > 0 {
                    let transport = if placed.secure { Transport::Tls } else { kind };
                    let bound = in_force.places.bound_to(kind, placed.place);
                    let address = bound.unwrap_or(placed.address);
                    listeners.push(ListenerState { transport, address, closing: !placed.open, traffic });
                }
            }
        }
        listeners
    }

    /// Payload of each allocation in a slice, and the first slot of the next slice. `answer` behaves as in
    /// [`Relay::look`].
    pub fn traffic(
        &self,
        worker: usize,
        from: u32,
        answer: impl FnOnce(Vec<AllocationTraffic>, Option<u32>) + Send + 'static,
    ) {
        self.question(worker, move |server, now| {
            let (allocations, next) = traffic(server, now, from);
            answer(allocations, next);
        });
    }

    /// Reports the usage of each allocation in a slice since its previous report to `each`, which runs on the
    /// worker's thread and must not block. `answer` receives the first slot of the next slice; it behaves as in
    /// [`Relay::look`].
    pub fn report_usage(
        &self,
        worker: usize,
        from: u32,
        mut each: impl FnMut(&UsageReport<'_>) + Send + 'static,
        answer: impl FnOnce(Option<u32>) + Send + 'static,
    ) {
        self.question(worker, move |server, now| {
            let end = server.slots();
            let last = end.min(from.saturating_add(SLICE));
            (from..last).for_each(|slot| server.report_usage(now, slot).iter().for_each(&mut each));
            answer((last < end).then_some(last));
        });
    }

    /// Reports the quality of the measured allocations in a slice; `each` and `answer` behave as in [`Relay::report_usage`].
    pub fn report_quality(
        &self,
        worker: usize,
        from: u32,
        each: impl FnMut(&QualityReport) + Send + 'static,
        answer: impl FnOnce(Option<u32>) + Send + 'static,
    ) {
        if let Some(sender) = self.senders().nth(worker) {
            let slots = from..from.saturating_add(SLICE);
            let query = QualityQuery { slots, each: Box::new(each), answer: Box::new(answer) };
            sender.tell(Command::ReportQuality(query));
        }
    }

    /// Makes a worker publish its counters, so that [`Relay::snapshots`] is up to date. `answer` receives the
    /// time for which the command waited; a datagram would wait just as long.
    pub fn probe(&self, worker: usize, answer: impl FnOnce(Duration) + Send + 'static) {
        if let Some(sender) = self.senders().nth(worker) {
            let probe = Probe { asked: Instant::now(), answer: Box::new(answer) };
            sender.tell(Command::Publish(probe));
        }
    }

    /// Ends the allocation in this slot of a worker if its id matches. `answer` receives true if the id
    /// matched; it behaves as in [`Relay::look`].
    pub fn end(
        &self,
        (worker, slot): (usize, u32),
        id: AllocationId,
        reason: ClosedReason,
        answer: impl FnOnce(bool) + Send + 'static,
    ) {
        self.question(worker, move |server, now| {
            let view = server.view(now, slot).filter(|view| view.id() == id);
            let allocation = view.map(|view| view.allocation());
            answer(allocation.is_some_and(|it| server.close_one(now, it, reason)));
        });
    }

    /// Passes the datagrams that the allocation in this slot relays to `tap`, on the worker's thread, until [`Relay::untap`] or until the
    /// allocation ends or moves to another worker; then `tap` is dropped. `answer` behaves as in [`Relay::look`].
    pub fn tap(
        &self,
        (worker, slot): (usize, u32),
        id: AllocationId,
        tap: Box<dyn Tap>,
        answer: impl FnOnce(Result<(), TapRefusal>) + Send + 'static,
    ) {
        self.question(worker, move |server, _| answer(server.tap(slot, id, tap)));
    }

    pub fn untap(&self, (worker, slot): (usize, u32), id: AllocationId) {
        self.question(worker, move |server, _| server.untap(slot, id));
    }

    fn question(
        &self,
        worker: usize,
        question: impl FnOnce(&mut Server<WorkerPolicy>, Now) + Send + 'static,
    ) {
        if let Some(sender) = self.senders().nth(worker) {
            sender.tell(Command::Answer(Box::new(question)));
        }
    }
}

fn slice(
    server: &mut Server<WorkerPolicy>,
    now: Now,
    worker: usize,
    look: &Look,
) -> (Vec<AllocationSnapshot>, Option<u32>) {
    let most = look.most.min(SLICE_ALLOCATIONS);
    let end = server.slots();
    let last = end.min(look.from.saturating_add(SLICE));
    let mut allocations = Vec::with_capacity(most);
    let mut slot = look.from;
    while slot < last && allocations.len() < most {
        let view = server.view(now, slot).filter(|view| look.filter.admits(view));
        allocations.extend(view.map(|view| AllocationSnapshot::of(&view, worker, look.details)));
        slot += 1;
    }
    (allocations, (slot < end).then_some(slot))
}

fn tally(server: &mut Server<WorkerPolicy>, now: Now, from: u32, numbers: usize) -> WorkerTally {
    let mut listeners = vec![ListenerTraffic::default(); numbers];
    let next = walk(server, now, from, |_, view| {
        if let Some(sum) = listeners.get_mut(usize::from(view.client().listener.0)) {
            sum.merge(&ListenerTraffic::of(view));
        }
    });
    WorkerTally { listeners, next }
}

fn traffic(server: &mut Server<WorkerPolicy>, now: Now, from: u32) -> (Vec<AllocationTraffic>, Option<u32>) {
    let mut allocations = Vec::new();
    let next = walk(server, now, from, |slot, view| {
        allocations.push(AllocationTraffic {
            id: view.id(),
            slot,
            to_peer: view.to_peer(),
            to_client: view.to_client(),
        });
    });
    (allocations, next)
}

fn walk(
    server: &mut Server<WorkerPolicy>,
    now: Now,
    from: u32,
    mut show: impl FnMut(u32, &AllocationView<'_>),
) -> Option<u32> {
    let end = server.slots();
    let last = end.min(from.saturating_add(SLICE));
    for slot in from..last {
        if let Some(view) = server.view(now, slot) {
            show(slot, &view);
        }
    }
    (last < end).then_some(last)
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, sync::RwLock};

    use turnpike_testkit::stun;
    use turnpike_turn::{
        random::Seed,
        server::{AllocationLimits, Client, Effect, ListenerId, OpenResult, ServerConfig},
    };

    use super::*;
    use crate::{Config, CredentialStore, policy::SharedStore, ports::Ports, quotas::Quotas};

    const NOW: Now = Now { ms: 1000, unix: 1_700_000_000 };

    #[test]
    fn time_limited_user_is_found_by_id() {
        for user in ["alice", ":alice", "1800000000:alice"] {
            assert!(is_user(user, "1800000000:alice", ":alice"), "{user}");
        }
        assert!(is_user("alice", "alice", "alice"));
        for user in ["lice", "1800000000", "", "bob"] {
            assert!(!is_user(user, "1800000000:alice", ":alice"), "{user}");
        }
    }

    fn server(allocations: u32) -> Server<WorkerPolicy> {
        let server = ServerConfig { authenticate: false, ..ServerConfig::default() };
        let config = Config {
            server,
            limits: AllocationLimits {
                allocations: 10_000,
                allocations_per_user: 10_000,
                ..AllocationLimits::default()
            },
            ..Config::default()
        };
        let store: SharedStore = Arc::new(RwLock::new(Arc::new(()) as Arc<dyn CredentialStore>));
        let quotas = Arc::new(Quotas::new(&config));
        let gate = WorkerPolicy::new(store, quotas, Arc::new(Ports::new(&config)), None);
        let mut server = Server::new(Arc::new(config.server), gate, Seed([1; 32]));
        for number in 0..allocations {
            let address = SocketAddr::from((Ipv4Addr::from_bits(0x0A00_0000 + number), 4000));
            let client = Client { listener: ListenerId(0), address, local: ([192, 0, 2, 1], 3478).into() };
            server.from_client(NOW, &client.into(), &stun::message(0x0003, 1, &[(0x0019, &[17, 0, 0, 0])]));
            let relayed = SocketAddr::new(address.ip(), 50_000);
            while let Some(effect) = server.poll_effect() {
                if let Effect::Open(request) = effect {
                    server.opened(NOW, request.allocation, OpenResult::Opened { relayed }, None);
                }
            }
        }
        assert_eq!(server.allocations(), allocations as usize);
        server
    }

    #[test]
    fn slice_is_bounded_by_allocations_and_by_slots() {
        let mut server = server(2 * SLICE + 100);
        let mut look = Look { from: 0, most: usize::MAX, filter: Arc::default(), details: false };
        let (found, next) = slice(&mut server, NOW, 3, &look);
        assert_eq!((found.len(), next), (SLICE_ALLOCATIONS, u32::try_from(SLICE_ALLOCATIONS).ok()));
        assert!(found.iter().enumerate().all(|(slot, it)| (it.worker, it.slot as usize) == (3, slot)));
        let last = SocketAddr::from(([10, 0, 8, 99], 4000));
        look.filter = Arc::new(AllocationFilter {
            client: Some(AddressFilter::Exactly(last)),
            ..AllocationFilter::default()
        });
        for (from, count, next) in [(0, 0, Some(SLICE)), (SLICE, 0, Some(2 * SLICE)), (2 * SLICE, 1, None)] {
            look.from = from;
            let (found, then) = slice(&mut server, NOW, 0, &look);
            assert_eq!((found.len(), then), (count, next), "{from}");
            assert!(found.iter().all(|it| it.client == last));
        }
    }

    /// The admin interface's pages may end in the middle of a slice.
    #[test]
    fn slice_ending_at_the_last_allocation_is_the_last() {
        let mut server = server(10);
        let look = |from, most| Look { from, most, filter: Arc::default(), details: false };
        for (asked, count, next) in [
            (look(0, 4), 4, Some(4)),
            (look(4, 6), 6, None),
            (look(10, 1), 0, None),
            (look(4, 0), 0, Some(4)),
        ] {
            let (found, then) = slice(&mut server, NOW, 0, &asked);
            assert_eq!((found.len(), then), (count, next), "{asked:?}");
        }
    }

    #[test]
    fn traffic_of_allocations_is_returned_in_slices() {
        let mut server = server(SLICE + 10);
        let (first, next) = traffic(&mut server, NOW, 0);
        assert_eq!((first.len(), next), (SLICE as usize, Some(SLICE)));
        let (rest, next) = traffic(&mut server, NOW, SLICE);
        assert_eq!((rest.len(), next), (10, None));
        let mut ids: Vec<String> =
            first.iter().chain(&rest).map(|snapshot| snapshot.id.to_string()).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), SLICE as usize + 10);
        assert_eq!((rest[0].slot, rest[0].to_peer), (SLICE, (0, 0)));
        assert_eq!(traffic(&mut server, NOW, 5000), (Vec::new(), None));
    }

    #[test]
    fn slices_add_up_to_the_total() {
        let mut server = server(2 * SLICE + 100);
        let (mut allocations, mut sum) = (Vec::new(), WorkerTally::default());
        let mut from = Some(0);
        while let Some(slot) = from {
            let slice = tally(&mut server, NOW, slot, 2);
            assert_eq!(slice.listeners[1], ListenerTraffic::default(), "all clients use the first listener");
            allocations.push(slice.listeners[0].allocations);
            sum.merge(&slice);
            from = slice.next;
        }
        assert_eq!(allocations, [u64::from(SLICE), u64::from(SLICE), 100]);
        assert_eq!(
            sum.listeners.iter().map(|it| it.allocations).collect::<Vec<_>>(),
            [2 * u64::from(SLICE) + 100, 0]
        );
        assert_eq!(tally(&mut server, NOW, u32::MAX, 2).next, None);
        assert!(
            tally(&mut server, NOW, 0, 0).listeners.is_empty(),
            "a reload may have just added the listener"
        );
    }

    #[test]
    fn address_filter_matches_port_or_prefix() {
        let admits = |filter: &str, address: &str| {
            filter.parse::<AddressFilter>().unwrap().admits(address.parse().unwrap())
        };
        for (filter, address, admitted) in [
            ("192.0.2.7:4000", "192.0.2.7:4000", true),
            ("192.0.2.7:4000", "192.0.2.7:4001", false),
            ("192.0.2.7", "192.0.2.7:4001", true),
            ("192.0.2.0/24", "192.0.2.99:1", true),
            ("192.0.2.0/24", "192.0.3.99:1", false),
            ("[2001:db8::7]:80", "[2001:db8::7]:80", true),
            ("2001:db8::/32", "[2001:db8::7]:80", true),
            ("2001:db8::/32", "192.0.2.7:80", false),
        ] {
            assert_eq!(admits(filter, address), admitted, "{filter} {address}");
        }
        for bad in ["", "alice", "192.0.2.7/24", "192.0.2.7:99999", "192.0.2"] {
            assert!(bad.parse::<AddressFilter>().is_err(), "{bad}");
        }
    }
}
