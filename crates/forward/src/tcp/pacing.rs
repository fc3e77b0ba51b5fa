//! Connections whose rule limits bytes a second. A flow without tokens stops reading, so that TCP slows its sender down, and
//! waits in a queue; a few times a second each gets the same share of what has come in since.

use super::{
    connection::Connection,
    engine::Engine,
    side::{Side, Tick},
};

/// Between two looks at the queue, in milliseconds.
const STEP_MS: u64 = 10;
/// Taken at once by a flow that does not wait: more than one turn moves.
const MOST: u64 = 4 << 20;

impl Connection {
    /// Sets what the flow from `side` may move now: `share` for one whose turn in the queue it is.
    #[cold]
    pub(super) fn grant(&mut self, side: Side, share: Option<u64>, now: u64) {
        let Some(pace) = &self.pace else { return };
        let granted = match share {
            Some(share) => pace.take(side.way(), share, now),
            None if pace.must_queue(side.way()) => 0,
            None => pace.take(side.way(), MOST, now),
        };
        self.flow(side).budget = Some(granted);
    }

    /// Gives back what the flow did not use.
    #[cold]
    pub(super) fn settle(&mut self, side: Side) {
        let unused = self.flow(side).budget.replace(0).unwrap_or(0);
        if let Some(pace) = &self.pace {
            pace.give_back(side.way(), unused);
        }
    }
}

impl Engine {
    /// The flow has something to read and may not: it gets in line.
    pub(super) fn wait_for_tokens(&mut self, key: usize, side: Side, now: u64) {
        let connection = &mut self.connections[key];
        let Some(pace) = &mut connection.pace else { return };
        if pace.is_waiting(side.way()) {
            return;
        }
        self.rules[connection.rule].counters.pauses += 1;
        let pacing = &mut self.pacing;
        if pacing.queue.is_empty() {
            pacing.last = now;
            pacing.due = now + STEP_MS;
        }
        pacing.tickets += 1;
        pace.queue(side.way(), pacing.tickets);
        pacing.queue.push_back((pacing.tickets, key, side));
    }

    /// Gives those that wait their shares, the first in line first. Those for whom nothing is left stay in front.
    pub(super) fn pace(&mut self, tick: Tick<'_>) {
        if self.pacing.due().is_none_or(|due| tick.now < due) {
            return;
        }
        let elapsed = tick.now.saturating_sub(self.pacing.last);
        let mut left = Vec::new();
        for _ in 0..self.pacing.queue.len() {
            let Some((ticket, key, side)) = self.pacing.queue.pop_front() else { break };
            let pace = self.connections.get_mut(key).and_then(|connection| connection.pace.as_mut());
            // Ended meanwhile, its place may have been taken.
            let Some(pace) = pace.filter(|pace| pace.holds(side.way(), ticket)) else { continue };
            if !pace.has_some(side.way(), tick.now) {
                left.push((ticket, key, side));
                continue;
            }
            let share = pace.share(side.way(), elapsed);
            pace.leave_queue(side.way());
            self.resume_with(key, side, Some(share), tick);
        }
        left.into_iter().rev().for_each(|one| self.pacing.queue.push_front(one));
        self.pacing.last = tick.now;
        self.pacing.due = tick.now + STEP_MS;
    }
}
