//! Intervals of requests to the store, chosen so that many nodes neither overload it nor synchronize.

/// Shortest and longest interval at which a node reads the records of all nodes, in milliseconds.
const SHORTEST_MS: u64 = 1000;
const LONGEST_MS: u64 = 5000;
/// Reads per second by the whole fleet. A read returns all records, so at a fixed interval per node the cost
/// would grow with the square of the number of nodes. With this limit, 200 nodes read 200 records 200 times
/// per second.
const LOOKS_A_SECOND: u64 = 200;

/// Interval in milliseconds at which a node reads the records of all nodes.
#[must_use]
pub fn look_period_ms(nodes: usize) -> u64 {
    (nodes as u64 * 1000 / LOOKS_A_SECOND).clamp(SHORTEST_MS, LONGEST_MS)
}

/// Interval of quota exchanges in milliseconds.
#[must_use]
pub fn exchange_period_ms(nodes: usize) -> u64 {
    look_period_ms(nodes) / 10
}

/// Delay before reconnecting, doubled after each failure and randomized, so that nodes do not all reconnect
/// at the same time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    tried: u32,
}

impl Backoff {
    const FIRST_MS: u64 = 500;
    const LONGEST_MS: u64 = 5000;

    /// Next delay in milliseconds; `dice` is a random number.
    pub fn next_ms(&mut self, dice: u64) -> u64 {
        let most = (Self::FIRST_MS << self.tried.min(10)).min(Self::LONGEST_MS);
        self.tried = self.tried.saturating_add(1);
        // The delay is never zero, so that a store that refuses immediately is not retried in a busy loop.
        most / 10 + dice % (most - most / 10)
    }

    pub fn reset(&mut self) {
        self.tried = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_fleets_poll_less_often() {
        assert_eq!([1, 200, 400, 1000, 4000].map(look_period_ms), [1000, 1000, 2000, 5000, 5000]);
        assert_eq!([1, 1000].map(exchange_period_ms), [100, 500]);
    }

    #[test]
    fn backoff_grows_and_is_bounded_and_random() {
        let mut pauses = Backoff::default();
        let all: Vec<u64> = (0..20).map(|_| pauses.next_ms(u64::MAX / 2)).collect();
        assert!(all.iter().all(|pause| (50..5000).contains(pause)), "{all:?}");
        pauses.reset();
        let firsts = (0..1000).map(|dice| Backoff::default().next_ms(dice * 7919));
        let mut tenths = [0; 10];
        firsts.for_each(|pause| tenths[usize::try_from(pause / 50).unwrap()] += 1);
        assert!(tenths[0] == 0 && tenths[1..].iter().all(|count| (60..200).contains(count)), "{tenths:?}");
    }
}
