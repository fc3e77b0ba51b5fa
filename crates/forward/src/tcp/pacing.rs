//! Bandwidth limits of connections. A flow without tokens stops reading, so that TCP slows the sender down,
//! and waits in a queue. At short intervals, each waiting flow gets an equal share of the new tokens.

use super::{
    connection::Connection,
    engine::Engine,
    side::{StreamSide, Tick},
};

/// Milliseconds between runs of the queue.
const STEP_MS: u64 = 10;
/// Maximum bytes granted at once to a flow that is not waiting, which is more than it can move in one turn.
const MOST: u64 = 4 << 20;

impl Connection {
    /// Sets the number of bytes that the flow from `side` may move now. `share` is set if the flow's turn in
    /// the queue has come.
    #[cold]
    pub(super) fn grant(&mut self, side: StreamSide, share: Option<u64>, now: u64) {
        let Some(pace) = &self.pace else { return };
        let granted = match share {
            Some(share) => pace.take(side.way(), share, now),
            None if pace.must_queue(side.way()) => 0,
            None => pace.take(side.way(), MOST, now),
        };
        self.flow(side).budget = Some(granted);
    }

    #[cold]
    pub(super) fn settle(&mut self, side: StreamSide) {
        let unused = self.flow(side).budget.replace(0).unwrap_or(0);
        if let Some(pace) = &self.pace {
            pace.give_back(side.way(), unused);
        }
    }
}

impl Engine {
    /// Queues a flow that has data but no tokens.
    pub(super) fn wait_for_tokens(&mut self, key: usize, side: StreamSide, now: u64) {
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

    /// Gives waiting flows their shares in order. Flows for which no tokens are left stay at the front.
    pub(super) fn pace(&mut self, tick: Tick<'_>) {
        if self.pacing.due().is_none_or(|due| tick.now < due) {
            return;
        }
        let elapsed = tick.now.saturating_sub(self.pacing.last);
        let mut left = Vec::new();
        for _ in 0..self.pacing.queue.len() {
            let Some((ticket, key, side)) = self.pacing.queue.pop_front() else { break };
            let pace = self.connections.get_mut(key).and_then(|connection| connection.pace.as_mut());
            // The connection may have ended and its slot been reused.
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
