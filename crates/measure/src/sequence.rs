//! Arrival tracking for one flow: detects duplicates and reordering from sequence numbers.

/// Number of tracked sequence numbers: the highest one and those before it.
const WINDOW: u64 = 1024;
const WORDS: usize = (WINDOW / 64) as usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalOrder {
    InOrder,
    Reordered,
    Duplicate,
    /// The number is at least 1,024 below the highest one, so it is not known whether it was seen before.
    TooOld,
}

/// Sliding bitmap, as in IPsec's anti-replay window (RFC 4303 appendix A).
#[derive(Clone, Debug)]
pub struct Sequence {
    /// One more than the highest number seen.
    next: u64,
    /// Bit `n % WINDOW` is set if `n`, one of the last WINDOW numbers, was seen.
    seen: [u64; WORDS],
}

impl Sequence {
    pub const fn new() -> Self {
        Self { next: 0, seen: [0; WORDS] }
    }

    #[inline]
    pub fn note(&mut self, number: u64) -> ArrivalOrder {
        if number >= self.next {
            self.advance(number);
            return ArrivalOrder::InOrder;
        }
        if self.next - number > WINDOW {
            return ArrivalOrder::TooOld;
        }
        let (word, bit) = place(number);
        if self.seen[word] & bit != 0 {
            return ArrivalOrder::Duplicate;
        }
        self.seen[word] |= bit;
        ArrivalOrder::Reordered
    }

    pub const fn next(&self) -> u64 {
        self.next
    }

    #[inline]
    fn advance(&mut self, number: u64) {
        let skipped = number - self.next;
        if skipped >= WINDOW {
            self.seen = [0; WORDS];
        } else {
            for missing in self.next..number {
                let (word, bit) = place(missing);
                self.seen[word] &= !bit;
            }
        }
        let (word, bit) = place(number);
        self.seen[word] |= bit;
        self.next = number.saturating_add(1);
    }
}

impl Default for Sequence {
    fn default() -> Self {
        Self::new()
    }
}

#[inline]
const fn place(number: u64) -> (usize, u64) {
    let slot = number % WINDOW;
    ((slot / 64) as usize, 1 << (slot % 64))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn in_order_reordered_and_duplicate_numbers_are_distinguished() {
        let mut sequence = Sequence::new();
        assert_eq!(sequence.note(0), ArrivalOrder::InOrder);
        assert_eq!(sequence.note(1), ArrivalOrder::InOrder);
        assert_eq!(sequence.note(4), ArrivalOrder::InOrder);
        assert_eq!(sequence.note(2), ArrivalOrder::Reordered);
        assert_eq!(sequence.note(2), ArrivalOrder::Duplicate);
        assert_eq!(sequence.note(4), ArrivalOrder::Duplicate);
        assert_eq!(sequence.note(3), ArrivalOrder::Reordered);
        assert_eq!(sequence.next(), 5);
    }

    #[test]
    fn a_number_below_the_window_is_too_old() {
        let mut sequence = Sequence::new();
        sequence.note(0);
        sequence.note(WINDOW);
        assert_eq!(sequence.note(0), ArrivalOrder::TooOld);
        assert_eq!(sequence.note(1), ArrivalOrder::Reordered);
    }

    #[test]
    fn a_jump_beyond_the_window_clears_it() {
        let mut sequence = Sequence::new();
        for number in 0..WINDOW {
            sequence.note(number);
        }
        sequence.note(10 * WINDOW);
        assert_eq!(sequence.note(10 * WINDOW - 1), ArrivalOrder::Reordered);
        assert_eq!(sequence.note(u64::MAX - 1), ArrivalOrder::InOrder);
    }

    proptest! {
        #[test]
        fn the_window_agrees_with_a_set_of_all_numbers(numbers in prop::collection::vec(0_u64..3_000, 1..400)) {
            let mut sequence = Sequence::new();
            let mut all = HashSet::new();
            let mut next = 0;
            for number in numbers {
                let fresh = all.insert(number);
                let expected = if number >= next {
                    ArrivalOrder::InOrder
                } else if next - number > WINDOW {
                    ArrivalOrder::TooOld
                } else if fresh {
                    ArrivalOrder::Reordered
                } else {
                    ArrivalOrder::Duplicate
                };
                next = next.max(number + 1);
                prop_assert_eq!(sequence.note(number), expected);
            }
        }
    }
}
