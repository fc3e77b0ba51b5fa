//! Sessions without an answer, in the order in which they are looked at.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::Slot;

/// Sessions that may have another target and have no answer yet, by the time of the next look. Each is here once.
#[derive(Default)]
pub(super) struct Unanswered(pub(super) BinaryHeap<Reverse<Look>>);

/// The next look at one session.
pub(super) struct Look {
    pub(super) due: u64,
    pub(super) at: u32,
    /// When the session began: its slot may have another one by now.
    pub(super) opened: u64,
    /// When it got its present target.
    pub(super) since: u64,
    pub(super) wait: u64,
    /// Targets that did not answer it.
    pub(super) tried: Vec<Slot>,
    /// It finds out whether any target of the rule answers.
    pub(super) explores: bool,
}

impl Ord for Look {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.at).cmp(&(other.due, other.at))
    }
}

impl PartialOrd for Look {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Look {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Look {}

impl Unanswered {
    pub(super) fn due(&self) -> Option<u64> {
        self.0.peek().map(|Reverse(look)| look.due)
    }

    pub(super) fn pop(&mut self, now: u64) -> Option<Look> {
        if self.due()? > now {
            return None;
        }
        self.0.pop().map(|Reverse(look)| look)
    }
}
