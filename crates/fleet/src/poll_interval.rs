//! How often nodes speak to the store, so that many of them ask it no more than it can answer, and never all at once.

/// Between two looks at all nodes.
const SHORTEST_MS: u64 = 1000;
const LONGEST_MS: u64 = 5000;
/// A look reads all records, so that the number of nodes counts twice: 200 of them read 200 records 200 times a second.
const LOOKS_A_SECOND: u64 = 200;

/// Between two looks at all nodes, in milliseconds.
#[must_use]
pub fn look_period_ms(nodes: usize) -> u64 {
    (nodes as u64 * 1000 / LOOKS_A_SECOND).clamp(SHORTEST_MS, LONGEST_MS)
}

/// Between two exchanges about quotas, in milliseconds.
#[must_use]
pub fn exchange_period_ms(nodes: usize) -> u64 {
    look_period_ms(nodes) / 10
}

/// How long to wait before each try to reach a store that is away: a random part of a time that doubles, so that those who lost it in the
/// same moment come back one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    tried: u32,
}

impl Backoff {
    const FIRST_MS: u64 = 500;
    const LONGEST_MS: u64 = 5000;

    /// In milliseconds; `dice` is any number.
    pub fn next_ms(&mut self, dice: u64) -> u64 {
        let most = (Self::FIRST_MS << self.tried.min(10)).min(Self::LONGEST_MS);
        self.tried = self.tried.saturating_add(1);
        // Never none at all: a store that refuses at once must not be asked in a loop.
        most / 10 + dice % (most - most / 10)
    }

    /// It has answered.
    pub fn reset(&mut self) {
        self.tried = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_fleets_speak_less_often() {
        assert_eq!([1, 200, 400, 1000, 4000].map(look_period_ms), [1000, 1000, 2000, 5000, 5000]);
        assert_eq!([1, 1000].map(exchange_period_ms), [100, 500]);
    }

    #[test]
    fn pauses_grow_are_bounded_and_are_not_the_same_for_two() {
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
