//! Sockets that user space has drained, with the time up to which everything they received has been sent.
//! After that time, the kernel may relay their flows again.
//!
//! Two events show, without extra calls, that a socket was empty: a wait that does not report the socket
//! (empty when the wait began), and a receive call that returned less than requested (empty when it ended).
//! The time is reported once everything received by then has been sent. If neither event occurs, the next
//! wait is cut short for a check, except after bulk traffic: its flow stays in user space anyway, and its
//! next burst ends the wait.

use std::time::Duration;

use crate::{flows::Flows, layout::CALM_NS};

/// Time in nanoseconds for which an overloaded socket may stay non-empty before its flows yield, that is,
/// before the BPF program drops their packets until the socket is drained.
const PATIENCE_NS: u64 = 50_000_000;
/// Backlog above which a socket counts as overloaded even if it loses no datagrams, in bytes of kernel
/// memory: about 2,700 single datagrams.
const BACKLOG: usize = 2 << 20;
/// Maximum time in nanoseconds for which flows yield.
const GIVE_WAY_NS: u64 = 250_000_000;
/// Minimum time in nanoseconds before flows yield again if yielding did not help.
const REST_NS: u64 = 2_500_000_000;

pub(crate) trait Board {
    fn drained(&self, slot: u32, at_ns: u64);
    fn behind(&self, slot: u32, is_behind: bool);
}

impl Board for Flows {
    fn drained(&self, slot: u32, at_ns: u64) {
        Self::drained(self, slot, at_ns);
    }

    fn behind(&self, slot: u32, is_behind: bool) {
        Self::behind(self, slot, is_behind);
    }
}

/// Sockets of one worker, indexed by the worker's socket IDs, which are small. All times are
/// [`crate::now_ns`].
pub(crate) struct DrainedSockets {
    gap_ns: u64,
    places: Vec<Option<WatchedSocket>>,
    /// Sockets through which datagrams may be in flight.
    watched: Vec<u32>,
    /// Sockets emptied by a receive call whose datagrams have not all been sent yet.
    received: Vec<u32>,
    /// Start and end of the wait that began this tick.
    before_ns: u64,
    after_ns: u64,
    /// Number of sockets touched in this tick, and how many of them have bulk traffic.
    fresh: usize,
    bulky: usize,
    /// Time at which a check may find that the next watched socket has been empty for long enough.
    look_ns: Option<u64>,
    lost: u64,
    /// Number of waits so far.
    wait: u64,
}

#[derive(Clone, Copy)]
struct WatchedSocket {
    slot: u32,
    is_watched: bool,
    is_bulk: bool,
    /// Number of the last wait that reported the socket.
    ready: u64,
    /// Everything received by this time has been sent; `None` while unknown.
    touched_ns: Option<u64>,
    /// Last time at which the socket was known to be empty or keeping up, and its losses by then.
    since_ns: u64,
    lost: u64,
    is_behind: bool,
}

impl DrainedSockets {
    pub(crate) fn new(gap_ns: u64) -> Self {
        Self {
            gap_ns,
            places: Vec::new(),
            watched: Vec::new(),
            received: Vec::new(),
            before_ns: 0,
            after_ns: 0,
            fresh: 0,
            bulky: 0,
            look_ns: None,
            lost: 0,
            wait: 0,
        }
    }

    pub(crate) fn slot(&mut self, socket: u32, number: impl FnOnce() -> Option<u32>) -> Option<u32> {
        let at = socket as usize;
        if self.places.len() <= at {
            self.places.resize(at + 1, None);
        }
        let place = &mut self.places[at];
        if place.is_none() {
            let new = |slot| WatchedSocket {
                slot,
                is_watched: false,
                is_bulk: false,
                ready: 0,
                touched_ns: None,
                since_ns: 0,
                lost: 0,
                is_behind: false,
            };
            *place = number().map(new);
        }
        place.map(|place| place.slot)
    }

    pub(crate) fn is_needed(&self, socket: u32) -> bool {
        matches!(self.places.get(socket as usize), Some(Some(_)))
    }

    pub(crate) fn forget(&mut self, socket: u32) -> Option<u32> {
        let place = self.places.get_mut(socket as usize).and_then(Option::take)?;
        if place.is_watched {
            self.watched.retain(|watched| *watched != socket);
            self.received.retain(|received| *received != socket);
        }
        Some(place.slot)
    }

    /// Notes that datagrams may be in flight through this socket.
    pub(crate) fn touch(&mut self, socket: u32) {
        let Some(Some(place)) = self.places.get_mut(socket as usize) else { return };
        (place.ready, place.touched_ns, place.is_bulk) = (self.wait, None, false);
        self.fresh += 1;
        if !place.is_watched {
            place.is_watched = true;
            (place.since_ns, place.lost) = (self.after_ns.max(place.since_ns), self.lost);
            self.watched.push(socket);
        }
    }

    pub(crate) fn bulk(&mut self, socket: u32) {
        if let Some(Some(place)) = self.places.get_mut(socket as usize)
            && place.is_watched
            && !std::mem::replace(&mut place.is_bulk, true)
        {
            self.bulky += 1;
        }
    }

    /// Marks a socket emptied by a receive call, whose datagrams are still to be sent.
    pub(crate) fn received(&mut self, socket: u32) {
        if matches!(self.places.get(socket as usize), Some(Some(place)) if place.is_watched) {
            self.received.push(socket);
        }
    }

    /// Reports the emptied sockets once everything received has been sent.
    pub(crate) fn flushed(&mut self, board: &impl Board) {
        for socket in self.received.drain(..) {
            if let Some(Some(place)) = self.places.get_mut(socket as usize) {
                place.tell(self.after_ns, self.after_ns, self.lost, board);
            }
        }
    }

    /// Called before a wait; returns its maximum duration.
    pub(crate) fn before_wait(&mut self, now_ns: u64) -> Option<Duration> {
        self.before_ns = now_ns;
        let (fresh, bulky) = (std::mem::take(&mut self.fresh), std::mem::take(&mut self.bulky));
        if fresh > 0 {
            let due = now_ns + if fresh > bulky { self.gap_ns } else { CALM_NS };
            self.look_ns = Some(self.look_ns.map_or(due, |look| look.min(due)));
        }
        let look_ns = self.look_ns.filter(|_| !self.watched.is_empty())?;
        Some(Duration::from_nanos(look_ns.saturating_sub(now_ns)))
    }

    /// Called after a wait, with the sockets that it reported. `are_all` is true if no other socket is ready,
    /// `lost` counts the datagrams that sockets have lost so far, and `backlog` returns the kernel memory of
    /// a socket's queue.
    pub(crate) fn after_wait(
        &mut self,
        now_ns: u64,
        ready: impl Iterator<Item = u32>,
        are_all: bool,
        (lost, backlog): (u64, impl Fn(u32) -> usize),
        board: &impl Board,
    ) {
        self.wait += 1;
        (self.after_ns, self.lost) = (now_ns, lost);
        ready.for_each(|socket| self.touch(socket));
        let (wait, before_ns, gap_ns) = (self.wait, self.before_ns, self.gap_ns);
        let (places, mut look_ns) = (&mut self.places, None::<u64>);
        self.watched.retain(|socket| {
            let Some(Some(place)) = places.get_mut(*socket as usize) else { return false };
            if place.ready == wait || !are_all {
                place.wait_on(now_ns, lost, || backlog(*socket), board);
                return true;
            }
            // The socket was not reported, so everything queued in it before the wait has been received and
            // sent.
            place.tell(before_ns, now_ns, lost, board);
            let touched_ns = *place.touched_ns.get_or_insert(before_ns);
            place.is_watched = before_ns < touched_ns + gap_ns;
            if place.is_watched {
                let due = touched_ns + if place.is_bulk { CALM_NS } else { gap_ns };
                look_ns = Some(look_ns.map_or(due, |look| look.min(due)));
            }
            place.is_watched
        });
        self.look_ns = look_ns;
    }
}

impl WatchedSocket {
    fn tell(&mut self, at_ns: u64, now_ns: u64, lost: u64, board: &impl Board) {
        board.drained(self.slot, at_ns);
        (self.since_ns, self.lost, self.is_behind) = (now_ns, lost, false);
    }

    /// Handles a socket that may be non-empty. Under overload, flows that wait for an empty socket would keep
    /// it full and never return to the kernel, and all of them would keep losing datagrams.
    fn wait_on(&mut self, now_ns: u64, lost: u64, backlog: impl FnOnce() -> usize, board: &impl Board) {
        let waited = now_ns.saturating_sub(self.since_ns);
        if !self.is_behind && waited > PATIENCE_NS {
            if lost > self.lost || backlog() > BACKLOG {
                board.behind(self.slot, true);
                self.is_behind = true;
            } else {
                self.since_ns = now_ns;
            }
        } else if self.is_behind && waited > PATIENCE_NS + GIVE_WAY_NS {
            board.behind(self.slot, false);
            (self.since_ns, self.lost, self.is_behind) = (now_ns + REST_NS, lost, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const GAP: u64 = 50_000;
    const SOCKET: u32 = 3;
    const SLOT: u32 = 7;

    #[derive(Default)]
    struct Told(RefCell<Vec<(u32, Result<u64, bool>)>>);

    impl Board for Told {
        fn drained(&self, slot: u32, at_ns: u64) {
            self.0.borrow_mut().push((slot, Ok(at_ns)));
        }

        fn behind(&self, slot: u32, is_behind: bool) {
            self.0.borrow_mut().push((slot, Err(is_behind)));
        }
    }

    struct Bench {
        emptied: DrainedSockets,
        told: Told,
        lost: u64,
        backlog: usize,
    }

    impl Bench {
        fn new() -> Self {
            let mut emptied = DrainedSockets::new(GAP);
            assert_eq!(emptied.slot(SOCKET, || Some(SLOT)), Some(SLOT));
            Self { emptied, told: Told::default(), lost: 0, backlog: 0 }
        }

        fn wait(&mut self, before: u64, after: u64, ready: &[u32]) -> Option<Duration> {
            self.wait_with(before, after, ready, true)
        }

        fn wait_with(&mut self, before: u64, after: u64, ready: &[u32], are_all: bool) -> Option<Duration> {
            let at_most = self.emptied.before_wait(before);
            let load = (self.lost, |_| self.backlog);
            self.emptied.after_wait(after, ready.iter().copied(), are_all, load, &self.told);
            at_most
        }

        fn told(&self) -> Vec<Result<u64, bool>> {
            let told = self.told.0.take();
            assert!(told.iter().all(|(slot, _)| *slot == SLOT));
            told.into_iter().map(|(_, what)| what).collect()
        }
    }

    #[test]
    fn a_socket_not_reported_by_a_wait_was_empty_when_it_began() {
        let mut bench = Bench::new();
        assert_eq!(bench.wait(1_000_000, 2_000_000, &[3, 9]), None);
        assert!(bench.told().is_empty());
        // Datagrams may be in flight until the gap has passed, so a check at that time is useful.
        assert_eq!(bench.wait(2_020_000, 2_030_000, &[9]), Some(Duration::from_nanos(GAP)));
        assert_eq!(bench.told(), [Ok(2_020_000)]);
        assert_eq!(bench.wait(2_040_000, 2_070_000, &[]), Some(Duration::from_micros(30)));
        assert_eq!(bench.told(), [Ok(2_040_000)]);
        assert_eq!(bench.wait(2_070_000, 2_071_000, &[]), Some(Duration::ZERO));
        assert_eq!(bench.told(), [Ok(2_070_000)]);
        assert_eq!(bench.wait(2_080_000, 9_000_000, &[]), None);
        assert!(bench.told().is_empty());
    }

    #[test]
    fn flows_settle_between_requests_and_responses() {
        let mut bench = Bench::new();
        let mut settled = 0;
        for round in 1..=10 {
            // The program sees a datagram 15 us before the worker wakes up; the response follows 60 us later
            // on another socket.
            let seen = round * 120_000;
            bench.wait(seen - 25_000, seen + 15_000, &[3]);
            bench.told();
            let at_most = bench.wait(seen + 35_000, seen + 75_000, &[9]).expect("a check is due");
            assert!(at_most >= Duration::from_micros(40), "the response comes earlier");
            // The next wait begins after the check was due, so it only polls, and finds the socket empty.
            assert_eq!(bench.wait(seen + 95_000, seen + 95_000, &[]), Some(Duration::ZERO));
            settled += bench.told().iter().filter(|told| told.is_ok_and(|at| at - GAP >= seen)).count();
        }
        assert_eq!(settled, 10);
    }

    #[test]
    fn a_short_receive_call_is_reported_once_everything_is_sent() {
        let mut bench = Bench::new();
        bench.wait(1_000_000, 2_000_000, &[3]);
        bench.emptied.received(SOCKET);
        assert!(bench.told().is_empty());
        bench.emptied.flushed(&bench.told);
        assert_eq!(bench.told(), [Ok(2_000_000)]);
        bench.emptied.flushed(&bench.told);
        assert!(bench.told().is_empty());
    }

    #[test]
    fn bulk_traffic_does_not_end_waits_early() {
        let mut bench = Bench::new();
        bench.wait(1_000_000, 2_000_000, &[3]);
        bench.emptied.bulk(SOCKET);
        bench.emptied.bulk(SOCKET);
        let calm = Some(Duration::from_nanos(CALM_NS));
        assert_eq!(bench.wait(2_020_000, 2_120_000, &[9]), calm);
        // The check is due once the flow has calmed down; any wait that ends earlier reports the socket too.
        assert_eq!(bench.told(), [Ok(2_020_000)]);
        assert_eq!(bench.wait(2_140_000, 2_200_000, &[9]), Some(Duration::from_micros(4880)));
        assert_eq!(bench.told(), [Ok(2_140_000)]);
        assert_eq!(bench.wait(2_220_000, 9_000_000, &[3]), None);
        bench.emptied.bulk(SOCKET);
        assert_eq!(bench.wait(9_000_000, 9_100_000, &[3]), calm);
        // After a single datagram, the check is due soon, even if another socket has bulk traffic.
        assert_eq!(bench.wait(9_120_000, 9_170_000, &[]), Some(Duration::from_nanos(GAP)));
        let mut beside = Bench::new();
        assert_eq!(beside.emptied.slot(5, || Some(8)), Some(8));
        beside.wait(1_000_000, 2_000_000, &[3, 5]);
        beside.emptied.bulk(5);
        assert_eq!(beside.emptied.before_wait(2_020_000), Some(Duration::from_nanos(GAP)));
    }

    #[test]
    fn a_wait_that_may_omit_ready_sockets_proves_nothing() {
        let mut bench = Bench::new();
        bench.wait_with(1_000_000, 2_000_000, &[3], false);
        bench.wait_with(2_100_000, 2_200_000, &[9], false);
        bench.wait_with(2_300_000, 2_400_000, &[9], false);
        assert!(bench.told().is_empty());
        bench.wait(2_500_000, 2_600_000, &[9]);
        assert_eq!(bench.told(), [Ok(2_500_000)]);
    }

    #[test]
    fn flows_of_an_overloaded_socket_yield_for_a_moment() {
        let mut bench = Bench::new();
        let mut changes = Vec::new();
        // Overloaded for four seconds: ready every millisecond, with losses.
        for ms in 1..4000_u64 {
            bench.lost += 1;
            bench.wait(ms * 1_000_000, ms * 1_000_000, &[3]);
            changes.extend(bench.told().into_iter().map(|told| (ms, told)));
        }
        assert_eq!(&changes[..2], [(52, Err(true)), (302, Err(false))]);
        assert_eq!(changes.len(), 4, "{changes:?}");
        let held_back: u64 = changes.chunks(2).map(|pair| pair[1].0 - pair[0].0).sum();
        assert!(held_back <= 4000 / 10 + 250, "{changes:?}");
        bench.wait(4_000_000_000, 4_000_100_000, &[9]);
        assert_eq!(bench.told(), [Ok(4_000_000_000)]);
    }

    #[test]
    fn a_long_backlog_makes_flows_yield_before_any_loss() {
        let mut bench = Bench::new();
        let mut changes = Vec::new();
        for ms in 1..200_u64 {
            bench.backlog = usize::try_from(ms).expect("small") * (BACKLOG / 80);
            bench.wait(ms * 1_000_000, ms * 1_000_000, &[3]);
            changes.extend(bench.told().into_iter().map(|told| (ms, told)));
        }
        assert_eq!(changes, [(103, Err(true))]);
        bench.wait(201_000_000, 201_100_000, &[9]);
        assert_eq!(bench.told(), [Ok(201_000_000)]);
    }

    #[test]
    fn a_busy_socket_without_losses_does_not_make_flows_yield() {
        let mut bench = Bench::new();
        bench.backlog = BACKLOG;
        for ms in 1..1000_u64 {
            bench.wait_with(ms * 1_000_000, ms * 1_000_000, &[3], ms % 2 == 0);
        }
        assert!(bench.told().is_empty());
    }

    #[test]
    fn a_closed_socket_is_forgotten() {
        let mut bench = Bench::new();
        bench.wait(1_000_000, 2_000_000, &[3]);
        bench.emptied.received(SOCKET);
        assert_eq!(bench.emptied.forget(SOCKET), Some(SLOT));
        assert_eq!(bench.emptied.forget(SOCKET), None);
        bench.emptied.flushed(&bench.told);
        bench.wait(3_000_000, 4_000_000, &[3]);
        assert!(bench.told().is_empty());
    }
}
