//! Flows waiting because of a bandwidth limit, in order of arrival.

use std::collections::VecDeque;

use super::side::StreamSide;

#[derive(Default)]
pub(super) struct Pacing {
    pub(super) queue: VecDeque<(u64, usize, StreamSide)>,
    /// Number of the last ticket; 0 means that none was issued.
    pub(super) tickets: u64,
    pub(super) last: u64,
    pub(super) due: u64,
}

impl Pacing {
    pub(super) fn due(&self) -> Option<u64> {
        (!self.queue.is_empty()).then_some(self.due)
    }
}
