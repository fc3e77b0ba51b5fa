//! Numbers of places in an array map: given out, and taken back.

use std::collections::BTreeSet;

/// The free ones.
#[derive(Debug)]
pub(crate) struct Slots {
    returned: BTreeSet<u32>,
    next: u32,
    most: u32,
}

impl Slots {
    pub(crate) fn new(most: u32) -> Self {
        Self { returned: BTreeSet::new(), next: 0, most }
    }

    pub(crate) fn take(&mut self) -> Option<u32> {
        self.returned.pop_last().or_else(|| {
            (self.next < self.most).then(|| {
                self.next += 1;
                self.next - 1
            })
        })
    }

    /// Another process has given this one out: it is somebody's.
    pub(crate) fn claim(&mut self, slot: u32) {
        while self.next <= slot {
            self.returned.insert(self.next);
            self.next += 1;
        }
        self.returned.remove(&slot);
    }

    pub(crate) fn give_back(&mut self, slot: u32) {
        self.returned.insert(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_somebodys_only_once() {
        let mut slots = Slots::new(2);
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(0), Some(1), None]);
        slots.give_back(0);
        assert_eq!([slots.take(), slots.take()], [Some(0), None]);
    }

    #[test]
    fn what_another_process_gave_out_is_not_given_again() {
        let mut slots = Slots::new(5);
        for slot in [3, 1, 3] {
            slots.claim(slot);
        }
        assert_eq!([(); 4].map(|()| slots.take()), [Some(2), Some(0), Some(4), None]);
        slots.give_back(3);
        assert_eq!([slots.take(), slots.take()], [Some(3), None]);
    }
}
