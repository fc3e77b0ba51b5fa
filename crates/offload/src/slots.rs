//! Numbers of places in an array map: given out, taken back, and given out again after a rest. A program that has read a flow may write to
//! the flow's places for some moments after the flow is gone.

use std::collections::{BTreeSet, VecDeque};

/// How long places in the tables rest before they are another's: a CPU of a virtual machine may stand still in the midst of a program.
pub(crate) const REST_NS: u64 = 100_000_000;

/// The free ones.
#[derive(Debug)]
pub(crate) struct Slots {
    returned: BTreeSet<u32>,
    /// Since when, the longest first.
    resting: VecDeque<(u64, u32)>,
    rest: u64,
    next: u32,
    most: u32,
}

impl Slots {
    /// So many, each of which rests so long, by whatever clock `now` is told of below.
    pub(crate) fn new(most: u32, rest: u64) -> Self {
        Self { returned: BTreeSet::new(), resting: VecDeque::new(), rest, next: 0, most }
    }

    /// One that nobody writes to any more.
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

    /// The same; where there is none, the one that has rested for longest.
    pub(crate) fn take(&mut self, now: u64) -> Option<u32> {
        self.take_rested(now).or_else(|| self.resting.pop_front().map(|(_, slot)| slot))
    }

    /// Another process has given this one out: it is somebody's.
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
    fn each_number_is_somebodys_only_once() {
        let mut slots = Slots::new(2, REST);
        assert_eq!([slots.take(0), slots.take(0), slots.take(0)], [Some(0), Some(1), None]);
        slots.give_back(5, 0);
        assert_eq!([slots.take(5 + REST), slots.take(5 + REST)], [Some(0), None]);
    }

    #[test]
    fn a_place_rests_unless_there_is_no_other() {
        let mut slots = Slots::new(3, REST);
        assert_eq!([slots.take(0), slots.take(0)], [Some(0), Some(1)]);
        slots.give_back(10, 1);
        slots.give_back(20, 0);
        assert_eq!(slots.take(9 + REST), Some(2), "a fresh one before one that rests");
        assert_eq!(slots.take_rested(9 + REST), None);
        assert_eq!(slots.take(10 + REST), Some(1), "it has rested");
        assert_eq!(slots.take_rested(10 + REST), None);
        assert_eq!(slots.take(10 + REST), Some(0), "there is no other");
        assert_eq!(slots.take(10 + REST), None);
    }

    #[test]
    fn what_another_process_gave_out_is_not_given_again() {
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
