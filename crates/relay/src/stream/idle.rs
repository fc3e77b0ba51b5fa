//! Connections without an allocation, in the order in which they came: only these have deadlines, and the oldest gives way when
//! there are too many. A list of their own, because thousands with an allocation may stand beside them.

use std::collections::BTreeMap;

#[derive(Default)]
pub(super) struct Idle {
    /// Slots by number.
    members: BTreeMap<u64, usize>,
    next: u64,
}

impl Idle {
    /// One more; the number to leave with.
    pub(super) fn enter(&mut self, slot: usize) -> u64 {
        let number = self.next;
        self.next += 1;
        self.members.insert(number, slot);
        number
    }

    pub(super) fn leave(&mut self, number: u64) {
        self.members.remove(&number);
    }

    pub(super) fn oldest(&self) -> Option<usize> {
        self.members.first_key_value().map(|(_, slot)| *slot)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = usize> {
        self.members.values().copied()
    }
}
