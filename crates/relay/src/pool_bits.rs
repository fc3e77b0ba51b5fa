//! State of the ports of one relay address, shared by all workers: taken, open, or in quarantine.
//!
//! A port enters quarantine when its allocation ends, because peers of the previous client may still send to
//! it. It becomes free after the quarantine, or earlier (oldest first) if the pool has no other port.

use std::{collections::VecDeque, ops::RangeInclusive};

use turnpike_turn::server::RelayTransport;

use crate::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};

/// Quarantine in milliseconds. After a call ends, peers that use consent checks (RFC 7675) stop sending
/// within this time.
pub(crate) const QUARANTINE_MS: u64 = 10_000;

pub(crate) struct PoolBits {
    /// Ports that are not available: open, about to be opened, or in quarantine.
    taken: Bits,
    /// Ports on which we have a socket, by transport. A taken port may belong to another program, and a port
    /// that relays UDP stays free for TCP.
    open: [Bits; 2],
    /// Ports in quarantine, oldest first.
    quarantine: Mutex<VecDeque<Quarantined>>,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quarantined {
    pub(crate) port: u16,
    pub(crate) until_ms: u64,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drawn {
    pub(crate) port: u16,
    pub(crate) until_ms: Option<u64>,
}

impl Default for PoolBits {
    fn default() -> Self {
        let quarantine = Mutex::new(VecDeque::new());
        Self { taken: Bits::new(), open: [Bits::new(), Bits::new()], quarantine }
    }
}

impl PoolBits {
    pub(crate) fn is_taken(&self, port: u16) -> bool {
        self.taken.has(port)
    }

    pub(crate) fn take(&self, port: u16) -> bool {
        // Loading first avoids a write, which would invalidate the cache line for the other workers.
        !self.taken.has(port) && self.taken.set(port)
    }

    pub(crate) fn not_taken(&self, range: RangeInclusive<u16>) -> impl Iterator<Item = u16> {
        self.taken.clear_in(range)
    }

    pub(crate) fn give_back(&self, Drawn { port, until_ms }: Drawn) {
        let Some(until_ms) = until_ms else { return self.free(port) };
        self.open.iter().for_each(|bits| bits.clear(port));
        self.with_quarantine(|queue| {
            let place = queue.partition_point(|held| held.until_ms < until_ms);
            queue.insert(place, Quarantined { port, until_ms });
        });
    }

    pub(crate) fn opened(&self, port: u16, transport: RelayTransport) {
        self.open[transport as usize].set(port);
    }

    pub(crate) fn is_open(&self, port: u16, transport: RelayTransport) -> bool {
        self.open[transport as usize].has(port)
    }

    pub(crate) fn has_open(&self, range: &RangeInclusive<u16>) -> bool {
        self.open.iter().any(|bits| range.clone().any(|port| bits.has(port)))
    }

    /// Returns a port to the pool. Clears `taken` last, so that a bit set by the next owner is never cleared.
    pub(crate) fn free(&self, port: u16) {
        for bits in self.open.iter().chain([&self.taken]) {
            bits.clear(port);
        }
    }

    pub(crate) fn quarantine(&self, Quarantined { port, until_ms }: Quarantined) {
        self.open.iter().for_each(|bits| bits.clear(port));
        self.with_quarantine(|queue| queue.push_back(Quarantined { port, until_ms }));
    }

    /// Quarantines a port that another process closed, unless it is taken here.
    pub(crate) fn adopt_quarantined(&self, quarantined: Quarantined) {
        if self.take(quarantined.port) {
            self.quarantine(quarantined);
        }
    }

    pub(crate) fn end_quarantine(&self, now_ms: u64) {
        self.with_quarantine(|queue| {
            while let Some(first) = queue.pop_front_if(|first| first.until_ms <= now_ms) {
                self.free(first.port);
            }
        });
    }

    pub(crate) fn take_quarantined(&self, suits: impl Fn(u16) -> bool) -> Option<Drawn> {
        self.with_quarantine(|queue| {
            let found = queue.iter().position(|held| suits(held.port))?;
            queue.remove(found).map(|held| Drawn { port: held.port, until_ms: Some(held.until_ms) })
        })
    }

    /// Takes an even port and the next one, at least one of which is in quarantine; the other may be free.
    pub(crate) fn take_quarantined_pair(&self, suits: impl Fn(u16) -> bool) -> Option<[Drawn; 2]> {
        self.with_quarantine(|queue| {
            let held = Bits::new();
            queue.iter().for_each(|entry| _ = held.set(entry.port));
            let is_available = |port: u16| suits(port) && (held.has(port) || !self.is_taken(port));
            let even = |entry: &Quarantined| entry.port & !1;
            let first = queue.iter().map(even).find(|even| is_available(*even) && is_available(even + 1))?;
            let pair = [first, first + 1];
            // If this fails, another worker has taken the free port; the quarantined port has not been
            // removed from the queue yet.
            let is_taken = pair.iter().all(|port| held.has(*port) || self.take(*port));
            let until_ms = |port| queue.iter().find(|entry| entry.port == port).map(|entry| entry.until_ms);
            let drawn = pair.map(|port| Drawn { port, until_ms: until_ms(port) });
            is_taken.then(|| queue.retain(|entry| !pair.contains(&entry.port)))?;
            Some(drawn)
        })
    }

    /// Ports in quarantine, oldest first.
    pub(crate) fn quarantined(&self) -> Vec<Quarantined> {
        self.with_quarantine(|queue| queue.iter().copied().collect())
    }

    fn with_quarantine<T>(&self, work: impl FnOnce(&mut VecDeque<Quarantined>) -> T) -> T {
        work(&mut self.quarantine.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }
}

pub(crate) struct Bits(Vec<AtomicU64>);

impl Bits {
    pub(crate) fn new() -> Self {
        Self((0..1 << 10).map(|_| AtomicU64::new(0)).collect())
    }

    fn slot(&self, port: u16) -> (&AtomicU64, u64) {
        (&self.0[usize::from(port / 64)], 1 << (port % 64))
    }

    pub(crate) fn has(&self, port: u16) -> bool {
        let (word, bit) = self.slot(port);
        word.load(Ordering::Relaxed) & bit != 0
    }

    /// Ports in the range whose bits are not set, in order. Skipping a word of taken ports costs one load.
    fn clear_in(&self, range: RangeInclusive<u16>) -> impl Iterator<Item = u16> {
        let (first, last) = (*range.start(), *range.end());
        (first / 64..=last / 64).flat_map(move |place| {
            let mut clear = !self.0[usize::from(place)].load(Ordering::Relaxed);
            if place == first / 64 {
                clear &= u64::MAX << (first % 64);
            }
            if place == last / 64 {
                clear &= u64::MAX >> (63 - last % 64);
            }
            (0..64).filter(move |bit| clear & (1 << bit) != 0).map(move |bit| place * 64 + bit)
        })
    }

    /// Returns false if the bit was already set. Acquire pairs with the release in `clear`, so that the next
    /// owner sees everything written before the bit was cleared (see [`PoolBits::free`]).
    pub(crate) fn set(&self, port: u16) -> bool {
        let (word, bit) = self.slot(port);
        word.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    fn clear(&self, port: u16) {
        let (word, bit) = self.slot(port);
        word.fetch_and(!bit, Ordering::Release);
    }
}
