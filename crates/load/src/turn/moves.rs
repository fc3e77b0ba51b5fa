//! Schedule and state of client moves, and the bursts held back during them.

use std::{mem, sync::Mutex};

use turnpike_measure::{Latency, LoadReport};
use turnpike_turn::client::Failure;

use super::TurnLoadConfig;
use crate::{clock::nanos, run::RunTimes};

/// Maximum number of bursts held back per thread. Additional bursts are sent immediately, and are lost if the server does not know the
/// client's new address yet.
const MOST_HELD: usize = 4096;

pub(super) struct ClientMoves {
    plan: Option<MovePlan>,
    next_ns: u64,
    pub(super) clients: Vec<MoveState>,
    pub(super) under_way: usize,
    held: Vec<(usize, u64)>,
    releasing: bool,
    found: MoveFigures,
}

struct MovePlan {
    begin_ns: u64,
    end_ns: u64,
    interval_ns: u64,
    first: usize,
    of: usize,
    turn: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MoveState {
    Settled,
    Moving(u64),
    Stranded,
}

#[derive(Default)]
pub(super) struct MoveFigures {
    done: u64,
    failed: u64,
    took: Latency,
    why: Option<String>,
}

impl ClientMoves {
    pub(super) fn new(config: &TurnLoadConfig, count: usize, first: usize) -> Self {
        let plan = config.migrate.map(|interval| MovePlan {
            begin_ns: 0,
            end_ns: 0,
            interval_ns: nanos(interval),
            first,
            of: config.clients,
            turn: 0,
        });
        Self { plan, ..Self::without(count) }
    }

    fn without(count: usize) -> Self {
        Self {
            plan: None,
            next_ns: u64::MAX,
            clients: vec![MoveState::Settled; count],
            under_way: 0,
            held: Vec::new(),
            releasing: false,
            found: MoveFigures::default(),
        }
    }

    pub(super) fn plan(&mut self, schedule: RunTimes) {
        let Some(plan) = &mut self.plan else { return };
        (plan.begin_ns, plan.end_ns) = (schedule.measure, schedule.end);
        self.next_ns = plan.next(self.clients.len());
    }

    #[inline]
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.next_ns
    }

    pub(super) fn any_under_way(&self) -> bool {
        self.under_way > 0 || !self.held.is_empty()
    }

    #[inline]
    pub(super) fn is_moving(&self, index: usize) -> bool {
        matches!(self.clients[index], MoveState::Moving(_))
    }

    /// Holds back a burst of a client that cannot send. Returns false if the client can send.
    #[inline]
    pub(super) fn hold(&mut self, index: usize, due_ns: u64) -> bool {
        let held = self.is_moving(index) && self.held.len() < MOST_HELD;
        if held {
            self.held.push((index, due_ns));
        }
        held
    }

    #[inline]
    pub(super) fn is_releasing(&self) -> bool {
        self.releasing
    }

    /// Returns the next held burst that can be sent: its client and due time.
    pub(super) fn release(&mut self) -> Option<(usize, u64)> {
        let clients = &self.clients;
        let ready = self.held.iter().position(|(index, _)| !matches!(clients[*index], MoveState::Moving(_)));
        self.releasing = ready.is_some();
        ready.map(|position| self.held.remove(position))
    }

    pub(super) fn end(&mut self) {
        for index in 0..self.clients.len() {
            if self.is_moving(index) {
                self.failed(index, || "no response before the end of the run".to_owned());
            }
        }
    }

    pub(super) fn next(&mut self, now_ns: u64) -> Option<usize> {
        let count = self.clients.len();
        let plan = self.plan.as_mut().filter(|_| now_ns >= self.next_ns)?;
        let index = usize::try_from(plan.turn % count as u64).unwrap_or_default();
        plan.turn += 1;
        self.next_ns = plan.next(count);
        Some(index)
    }

    pub(super) fn done(&mut self, index: usize, now_ns: u64) {
        if let MoveState::Moving(began) = self.settle(index, MoveState::Settled) {
            self.found.done += 1;
            self.found.took.record(now_ns.saturating_sub(began) / 1_000);
        }
    }

    pub(super) fn refused(&mut self, index: usize, failure: &Failure) {
        match failure {
            // The allocation may still exist (RFC 8016 section 3.2.1), so the client tries again at its next move.
            Failure::Timeout { .. } => self.failed(index, || failure.to_string()),
            _ => self.stranded(index, || failure.to_string()),
        }
    }

    pub(super) fn finish(&mut self, all: &Mutex<MoveFigures>) {
        let found = mem::take(&mut self.found);
        if let Ok(mut all) = all.lock() {
            all.done += found.done;
            all.failed += found.failed;
            all.took.merge(&found.took);
            all.why = all.why.take().or(found.why);
        }
    }

    pub(super) fn failed(&mut self, index: usize, why: impl FnOnce() -> String) {
        self.settle(index, MoveState::Settled);
        self.found.failed += 1;
        self.found.why.get_or_insert_with(why);
    }

    pub(super) fn stranded(&mut self, index: usize, why: impl FnOnce() -> String) {
        self.failed(index, why);
        self.clients[index] = MoveState::Stranded;
    }

    fn settle(&mut self, index: usize, state: MoveState) -> MoveState {
        let was = mem::replace(&mut self.clients[index], state);
        if let MoveState::Moving(_) = was {
            self.under_way -= 1;
            self.releasing |= !self.held.is_empty();
        }
        was
    }
}

impl MovePlan {
    /// Time of the next move among this thread's `count` clients. The moves of all clients in the run are spread evenly over the interval.
    fn next(&self, count: usize) -> u64 {
        let (round, index) = (self.turn / count as u64, self.turn % count as u64);
        let place = u128::from(self.interval_ns) * (2 * (self.first as u128 + u128::from(index)) + 1);
        let offset = u64::try_from(place / (2 * self.of as u128)).unwrap_or(self.interval_ns);
        let due = self.begin_ns.saturating_add(self.interval_ns.saturating_mul(round)) + offset;
        if due < self.end_ns { due } else { u64::MAX }
    }
}

impl MoveFigures {
    pub(super) fn put(&self, report: &mut LoadReport) {
        let ms = |us: u64| us as f64 / 1_000.0;
        report.add_figures([
            ("migrations_done", self.done as f64),
            ("migrations_failed", self.failed as f64),
            ("migration_ms_p50", ms(self.took.quantile(0.50))),
            ("migration_ms_p99", ms(self.took.quantile(0.99))),
            ("migration_ms_max", ms(self.took.max())),
        ]);
        if let Some(why) = &self.why {
            report.notes.push(format!(
                "{} of {} moves to another socket failed; the first failure: {why}",
                self.failed,
                self.done + self.failed
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_wait_for_their_own_client_and_are_released_in_order() {
        let mut moves = ClientMoves::without(2);
        assert!(!moves.hold(0, 1), "the client is not moving");
        for index in 0..2 {
            moves.clients[index] = MoveState::Moving(5);
            moves.under_way += 1;
        }
        assert!([(0, 10), (1, 11), (0, 12)].into_iter().all(|(index, due)| moves.hold(index, due)));
        assert!(!moves.is_releasing());
        moves.done(0, 20);
        assert!(moves.is_releasing() && moves.any_under_way());
        assert_eq!([moves.release(), moves.release(), moves.release()], [Some((0, 10)), Some((0, 12)), None]);
        assert!(!moves.is_releasing());
        moves.end();
        assert_eq!([moves.release(), moves.release()], [Some((1, 11)), None]);
        assert!(!moves.any_under_way());
        assert_eq!((moves.found.done, moves.found.failed), (1, 1));
        for due in 0..=MOST_HELD as u64 {
            moves.clients[1] = MoveState::Moving(5);
            assert_eq!(moves.hold(1, due), due < MOST_HELD as u64);
        }
    }

    fn dues(count: usize, first: usize, of: usize) -> Vec<u64> {
        let mut plan = MovePlan { begin_ns: 1_000, end_ns: 1_250, interval_ns: 100, first, of, turn: 0 };
        let mut dues = Vec::new();
        while plan.next(count) < u64::MAX {
            dues.push(plan.next(count));
            plan.turn += 1;
        }
        dues
    }

    #[test]
    fn moves_are_spread_over_the_interval_across_threads() {
        let all = dues(5, 0, 5);
        assert_eq!(all, [10, 30, 50, 70, 90, 110, 130, 150, 170, 190, 210, 230].map(|ns| 1_000 + ns));
        let mut both = [dues(3, 0, 5), dues(2, 3, 5)].concat();
        both.sort_unstable();
        assert_eq!(both, all);
        assert_eq!(dues(1, 0, 1), [1_050, 1_150]);
    }
}
