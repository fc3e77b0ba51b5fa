//! Queue of sessions whose target has not responded yet, ordered by the time of their next check.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::TargetSlot;

/// Sessions without a response that could use another target; each is listed once.
#[derive(Default)]
pub(super) struct Unanswered(pub(super) BinaryHeap<Reverse<NextCheck>>);

pub(super) struct NextCheck {
    pub(super) due: u64,
    pub(super) at: u32,
    /// Start of the session, by which a reused slot is recognized.
    pub(super) opened: u64,
    /// Time at which the session got its current target.
    pub(super) since: u64,
    pub(super) wait: u64,
    pub(super) tried: Vec<TargetSlot>,
    /// True if the session tests whether any target of the rule responds.
    pub(super) explores: bool,
}

impl Ord for NextCheck {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.at).cmp(&(other.due, other.at))
    }
}

impl PartialOrd for NextCheck {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for NextCheck {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for NextCheck {}

impl Unanswered {
    pub(super) fn due(&self) -> Option<u64> {
        self.0.peek().map(|Reverse(look)| look.due)
    }

    pub(super) fn pop(&mut self, now: u64) -> Option<NextCheck> {
        if self.due()? > now {
            return None;
        }
        self.0.pop().map(|Reverse(look)| look)
    }
}
