//! Which ports of a relay address are taken, and which are open: one bit each, for all workers.

use std::ops::RangeInclusive;

use turnpike_turn::server::RelayTransport;

use crate::sync::atomic::{AtomicU64, Ordering};

pub(crate) struct PoolBits {
    /// Not to be drawn.
    taken: Bits,
    /// What a socket of ours has, by transport. Not the same: a port that is taken may turn out to be another program's, and one that
    /// relays UDP leaves its namesake of TCP to whoever wants it.
    open: [Bits; 2],
}

impl Default for PoolBits {
    fn default() -> Self {
        Self { taken: Bits::new(), open: [Bits::new(), Bits::new()] }
    }
}

impl PoolBits {
    pub(crate) fn is_taken(&self, port: u16) -> bool {
        self.taken.has(port)
    }

    /// False if somebody has it. Whoever gets it sees that nothing is open there.
    pub(crate) fn take(&self, port: u16) -> bool {
        self.taken.set(port)
    }

    /// A socket of ours has it from now on.
    pub(crate) fn opened(&self, port: u16, transport: RelayTransport) {
        self.open[transport as usize].set(port);
    }

    pub(crate) fn is_open(&self, port: u16, transport: RelayTransport) -> bool {
        self.open[transport as usize].has(port)
    }

    /// Whether a socket of ours has any of these.
    pub(crate) fn has_open(&self, range: &RangeInclusive<u16>) -> bool {
        self.open.iter().any(|bits| range.clone().any(|port| bits.has(port)))
    }

    /// Whose turn it is next, by `taken`, comes last: what the next one opens must not be cleared after it.
    pub(crate) fn free(&self, port: u16) {
        for bits in self.open.iter().chain([&self.taken]) {
            bits.clear(port);
        }
    }
}

/// One bit a port.
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

    /// False if it was set before. Acquire, and release below: what was cleared before it is seen to be clear
    /// by whoever sets it next (see [`PoolBits::free`]).
    pub(crate) fn set(&self, port: u16) -> bool {
        let (word, bit) = self.slot(port);
        word.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    fn clear(&self, port: u16) {
        let (word, bit) = self.slot(port);
        word.fetch_and(!bit, Ordering::Release);
    }
}
