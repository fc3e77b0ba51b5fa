//! Slots of an array map: allocated, released, and reused after a rest. A program that has read a flow may
//! still write to the flow's slots for a moment after the flow is removed.

use std::collections::{BTreeSet, VecDeque};

/// Time until a released slot is reused, in nanoseconds. It is long because a virtual CPU may stall in the
/// middle of a program.
pub(crate) const REST_NS: u64 = 100_000_000;

#[derive(Debug)]
pub(crate) struct Slots {
    returned: BTreeSet<u32>,
    /// Release times and slots, oldest first.
    resting: VecDeque<(u64, u32)>,
    rest: u64,
    next: u32,
    most: u32,
}

impl Slots {
    /// Creates `most` slots; released ones rest for `rest`, measured on the same clock as `now`.
    pub(crate) fn new(most: u32, rest: u64) -> Self {
        Self { returned: BTreeSet::new(), resting: VecDeque::new(), rest, next: 0, most }
    }

    pub(crate) fn take_rested(&mut self, now: u64) -> Option<u32> {
        let rest = self.rest;
        let is_over = |(since, _): &mut (u64, u32)| since.saturating_add(rest) <= now;
        while let Some((_, slot)) = self.resting.pop_front_if(is_over) {
            self.returned.insert(slot);
        }
        self.returned.pop_last().or_else(|| {
            (self.next < self.most).then(|| {
                self.next += 1;
                self.next - 1
            })
        })
    }

    /// Allocates a slot that has rested, or else the one resting longest.
    pub(crate) fn take(&mut self, now: u64) -> Option<u32> {
        self.take_rested(now).or_else(|| self.resting.pop_front().map(|(_, slot)| slot))
    }

    pub(crate) fn claim(&mut self, slot: u32) {
        while self.next <= slot {
            self.returned.insert(self.next);
            self.next += 1;
        }
        self.returned.remove(&slot);
        self.resting.retain(|(_, resting)| *resting != slot);
    }

    pub(crate) fn give_back(&mut self, now: u64, slot: u32) {
        self.resting.push_back((now, slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: u64 = 1000;

    #[test]
    fn each_slot_has_one_owner_at_a_time() {
        let mut slots = Slots::new(2, REST);
        assert_eq!([slots.take(0), slots.take(0), slots.take(0)], [Some(0), Some(1), None]);
        slots.give_back(5, 0);
        assert_eq!([slots.take(5 + REST), slots.take(5 + REST)], [Some(0), None]);
    }

    #[test]
    fn a_slot_rests_unless_no_other_is_free() {
        let mut slots = Slots::new(3, REST);
        assert_eq!([slots.take(0), slots.take(0)], [Some(0), Some(1)]);
        slots.give_back(10, 1);
        slots.give_back(20, 0);
        assert_eq!(slots.take(9 + REST), Some(2), "a fresh slot before one that rests");
        assert_eq!(slots.take_rested(9 + REST), None);
        assert_eq!(slots.take(10 + REST), Some(1), "the slot has rested");
        assert_eq!(slots.take_rested(10 + REST), None);
        assert_eq!(slots.take(10 + REST), Some(0), "no other slot is free");
        assert_eq!(slots.take(10 + REST), None);
    }

    #[test]
    fn claimed_slots_are_not_allocated_again() {
        let mut slots = Slots::new(5, REST);
        for slot in [3, 1, 3] {
            slots.claim(slot);
        }
        assert_eq!([(); 4].map(|()| slots.take(0)), [Some(2), Some(0), Some(4), None]);
        slots.give_back(0, 3);
        slots.give_back(0, 1);
        slots.claim(3);
        assert_eq!([slots.take(REST), slots.take(REST)], [Some(1), None]);
    }
}
