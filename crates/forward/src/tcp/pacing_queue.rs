//! Flows that wait for a rate, in the order in which they began to.

use std::collections::VecDeque;

use super::side::Side;

/// The queue of one worker.
#[derive(Default)]
pub(super) struct Pacing {
    pub(super) queue: VecDeque<(u64, usize, Side)>,
    /// The last ticket; 0 is none.
    pub(super) tickets: u64,
    /// When the queue was last looked at, and when it is next.
    pub(super) last: u64,
    pub(super) due: u64,
}

impl Pacing {
    pub(super) fn due(&self) -> Option<u64> {
        (!self.queue.is_empty()).then_some(self.due)
    }
}
