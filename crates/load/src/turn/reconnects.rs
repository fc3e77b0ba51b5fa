//! State of clients that reconnect (`--reconnect`): time of the last packet received, and timeout.

use std::{mem, sync::Mutex, time::Duration};

use turnpike_measure::{Latency, LoadReport};

use super::TurnLoadConfig;
use crate::{clock::nanos, run::RunTimes};

const SPREAD: Duration = Duration::from_secs(1);

pub(super) struct Reconnects {
    clients: Vec<ReconnectingClient>,
    patience_ns: u64,
    /// Schedule of the run; times without packets count only within its measured time.
    measured: Option<RunTimes>,
    looked_ns: u64,
    /// End of this thread's last stall. A lack of packets before it proves nothing, because the thread was not reading.
    awake_ns: u64,
    found: ReconnectFigures,
}

#[derive(Clone, Copy)]
struct ReconnectingClient {
    /// Timeout; different for each client, so that they do not all reconnect at the same time.
    patience_ns: u64,
    heard_ns: u64,
    asked_ns: u64,
    /// Time of the last packet before the client gave up its last allocation.
    lost_ns: u64,
    longest_ns: u64,
    away: bool,
    has_lost: bool,
}

#[derive(Default)]
pub(super) struct ReconnectFigures {
    lost: u64,
    lost_ns: Option<(u64, u64)>,
    done: u64,
    failed: u64,
    /// Time from a client's last payload to its next allocation.
    times: Latency,
    /// Payloads lost by clients that never reconnected.
    lost_of_others: u64,
    pauses: Latency,
    silent: u64,
    why: Option<String>,
}

impl Reconnects {
    pub(super) fn new(config: &TurnLoadConfig, count: usize, first: usize) -> Self {
        let client = |number: usize, patience_ns: u64| {
            let spread_ns = nanos(config.spread.unwrap_or(SPREAD)).min(patience_ns);
            let share = u128::from(spread_ns) * (first + number) as u128 / config.clients as u128;
            let patience_ns = patience_ns + u64::try_from(share).unwrap_or_default();
            ReconnectingClient {
                patience_ns,
                heard_ns: 0,
                asked_ns: 0,
                lost_ns: 0,
                longest_ns: 0,
                away: false,
                has_lost: false,
            }
        };
        let patience = config.reconnect.map(nanos);
        let clients = patience.map(|patience| (0..count).map(|number| client(number, patience)).collect());
        Self {
            clients: clients.unwrap_or_default(),
            patience_ns: patience.unwrap_or(u64::MAX),
            measured: None,
            looked_ns: u64::MAX,
            awake_ns: 0,
            found: ReconnectFigures::default(),
        }
    }

    pub(super) fn plan(&mut self, schedule: RunTimes) {
        self.measured = Some(schedule);
    }

    #[inline]
    pub(super) fn is_away(&self, index: usize) -> bool {
        self.clients.get(index).is_some_and(|client| client.away)
    }

    #[inline]
    pub(super) fn heard(&mut self, index: usize, now_ns: u64) {
        let Some(client) = self.clients.get_mut(index) else { return };
        if self.measured.is_some_and(|measured| now_ns >= measured.measure) {
            let since = client.since(self.measured);
            client.longest_ns = client.longest_ns.max(now_ns.saturating_sub(since));
        }
        client.heard_ns = now_ns;
    }

    pub(super) fn answered(&mut self, index: usize, now_ns: u64) {
        if let Some(client) = self.clients.get_mut(index) {
            client.asked_ns = now_ns;
        }
    }

    /// Must be called before each check of the timeouts. If the last call was long ago, packets that arrived in the meantime have not been
    /// read yet.
    pub(super) fn look(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(mem::replace(&mut self.looked_ns, now_ns)) > self.patience_ns / 2 {
            self.awake_ns = now_ns;
        }
    }

    /// Returns the next client, starting with `from`, that has received nothing for longer than its timeout; `None` outside the measured
    /// time.
    pub(super) fn next_due(&self, from: usize, now_ns: u64) -> Option<usize> {
        let measured = self.measured.filter(|measured| (measured.start..measured.end).contains(&now_ns))?;
        let is_due = |client: &ReconnectingClient| {
            let since = client.heard_ns.max(client.asked_ns).max(self.awake_ns).max(measured.start);
            let patience_ns = if client.away { self.patience_ns } else { client.patience_ns };
            now_ns.saturating_sub(since) > patience_ns
        };
        let found = self.clients.get(from..)?.iter().position(is_due)?;
        Some(from + found)
    }

    pub(super) fn leave(&mut self, index: usize, now_ns: u64) {
        let start = self.measured.map_or(0, |measured| measured.start);
        let client = &mut self.clients[index];
        client.asked_ns = now_ns;
        client.has_lost = true;
        if mem::replace(&mut client.away, true) {
            return self.failed(|| "no answer".to_owned());
        }
        client.lost_ns = client.heard_ns.max(start);
        self.found.lost += 1;
        self.found.lost_ns = hull(self.found.lost_ns, Some((now_ns, now_ns)));
    }

    pub(super) fn has_reconnected(&mut self, index: usize, now_ns: u64) {
        let client = &mut self.clients[index];
        client.away = false;
        self.found.done += 1;
        self.found.times.record(now_ns.saturating_sub(client.lost_ns) / 1_000);
    }

    pub(super) fn lost(&mut self, index: usize, count: u64) {
        if self.clients.get(index).is_some_and(|client| !client.has_lost) {
            self.found.lost_of_others += count;
        }
    }

    pub(super) fn failed(&mut self, why: impl FnOnce() -> String) {
        self.found.failed += 1;
        self.found.why.get_or_insert_with(why);
    }

    pub(super) fn finish(&mut self, all: &Mutex<ReconnectFigures>) {
        let mut found = mem::take(&mut self.found);
        for client in &self.clients {
            let end = self.measured.map_or(0, |measured| measured.end);
            let silence = end.saturating_sub(client.since(self.measured));
            found.pauses.record(client.longest_ns.max(silence) / 1_000);
            found.silent += u64::from(client.away || silence > client.patience_ns);
        }
        if let Ok(mut all) = all.lock() {
            all.lost += found.lost;
            all.lost_ns = hull(all.lost_ns, found.lost_ns);
            all.lost_of_others += found.lost_of_others;
            all.times.merge(&found.times);
            all.done += found.done;
            all.failed += found.failed;
            all.silent += found.silent;
            all.pauses.merge(&found.pauses);
            all.why = all.why.take().or(found.why);
        }
    }
}

fn hull(one: Option<(u64, u64)>, other: Option<(u64, u64)>) -> Option<(u64, u64)> {
    let (Some((one_from, one_to)), Some((from, to))) = (one, other) else { return one.or(other) };
    Some((one_from.min(from), one_to.max(to)))
}

impl ReconnectingClient {
    fn since(&self, measured: Option<RunTimes>) -> u64 {
        self.heard_ns.max(measured.map_or(0, |measured| measured.measure))
    }
}

impl ReconnectFigures {
    pub(super) fn put(&self, report: &mut LoadReport) {
        let ms = |us: u64| us as f64 / 1_000.0;
        let lost_within_us = self.lost_ns.map_or(0, |(first, last)| (last - first) / 1_000);
        report.add_figures([
            ("allocations_lost", self.lost as f64),
            // Previous name of `allocations_lost`, for programs that read the old JSON.
            ("sessions_lost", self.lost as f64),
            ("lost_within_ms", ms(lost_within_us)),
            ("lost_of_others", self.lost_of_others as f64),
            ("returns_done", self.done as f64),
            ("returns_failed", self.failed as f64),
            ("clients_silent", self.silent as f64),
            ("reconnect_ms_p50", ms(self.times.quantile(0.50))),
            ("reconnect_ms_p90", ms(self.times.quantile(0.90))),
            ("reconnect_ms_p99", ms(self.times.quantile(0.99))),
            ("reconnect_ms_max", ms(self.times.max())),
            ("pause_ms_p50", ms(self.pauses.quantile(0.50))),
            ("pause_ms_p99", ms(self.pauses.quantile(0.99))),
            ("pause_ms_max", ms(self.pauses.max())),
        ]);
        if let Some(why) = &self.why {
            report.notes.push(format!("failed reconnects: {}; the first failure: {why}", self.failed));
        }
        if self.silent > 0 {
            report
                .notes
                .push(format!("clients that received nothing at the end of the run: {}", self.silent));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::options::parse;

    const SECOND: u64 = 1_000_000_000;

    fn reconnects(clients: usize) -> Reconnects {
        let config = parse(&format!("127.0.0.1 --clients {clients} --reconnect 1")).unwrap();
        let mut reconnects = Reconnects::new(&config, clients, 0);
        reconnects.plan(RunTimes { start: SECOND, measure: 2 * SECOND, end: 60 * SECOND });
        reconnects
    }

    #[test]
    fn silent_clients_are_due_one_after_the_other() {
        let mut reconnects = reconnects(4);
        (0..4).for_each(|index| reconnects.heard(index, 10 * SECOND));
        let due = |reconnects: &Reconnects, now: u64| {
            let mut found = Vec::new();
            while let Some(index) = reconnects.next_due(found.last().map_or(0, |last| last + 1), now) {
                found.push(index);
            }
            found
        };
        assert_eq!(due(&reconnects, 11 * SECOND), [0; 0]);
        assert_eq!(due(&reconnects, 11 * SECOND + 1), [0]);
        assert_eq!(due(&reconnects, 11 * SECOND + SECOND / 2 + 1), [0, 1, 2]);
        reconnects.answered(1, 11 * SECOND);
        assert_eq!(due(&reconnects, 12 * SECOND), [0, 2, 3]);
        assert_eq!(due(&reconnects, 60 * SECOND), [0; 0], "the run is over");
    }

    #[test]
    fn reconnects_are_spread_as_configured() {
        let patience = Duration::from_secs(3);
        let spread = |asked: Option<Duration>, patience: Duration| {
            let config = TurnLoadConfig {
                reconnect: Some(patience),
                spread: asked,
                ..parse("127.0.0.1 --clients 4").unwrap()
            };
            let reconnects = Reconnects::new(&config, 4, 0);
            reconnects.clients.iter().map(|client| client.patience_ns - nanos(patience)).collect::<Vec<_>>()
        };
        assert_eq!(spread(Some(Duration::ZERO), patience), [0; 4]);
        assert_eq!(
            spread(Some(Duration::from_millis(200)), patience),
            [0, 50, 100, 150].map(|ms| ms * 1_000_000)
        );
        assert_eq!(spread(None, patience), [0, 250, 500, 750].map(|ms| ms * 1_000_000));
        let half = Duration::from_millis(500);
        assert_eq!(spread(None, half), [0, 125, 250, 375].map(|ms| ms * 1_000_000));
    }

    #[test]
    fn first_and_last_drop_cover_all_threads() {
        let (mut one, mut other) = (reconnects(2), reconnects(2));
        one.leave(0, 12 * SECOND);
        one.leave(0, 20 * SECOND);
        other.leave(1, 11 * SECOND);
        other.leave(0, 13 * SECOND);
        let all = Mutex::new(ReconnectFigures::default());
        one.finish(&all);
        other.finish(&all);
        reconnects(2).finish(&all);
        assert_eq!(
            all.into_inner().expect("the lock is not poisoned").lost_ns,
            Some((11 * SECOND, 13 * SECOND))
        );
    }

    #[test]
    fn the_longest_silence_includes_clients_that_stay_silent() {
        let mut reconnects = reconnects(2);
        for seconds in [0, 1, 3, 10, 11] {
            reconnects.heard(0, seconds * SECOND);
        }
        reconnects.heard(1, 5 * SECOND);
        (12..60).for_each(|seconds| reconnects.heard(0, seconds * SECOND));
        assert_eq!(
            reconnects.clients.iter().map(|client| client.longest_ns).collect::<Vec<_>>(),
            [7, 3].map(|s| s * SECOND)
        );
        let all = Mutex::new(ReconnectFigures::default());
        reconnects.finish(&all);
        let found = all.into_inner().expect("the lock is not poisoned");
        assert_eq!((found.silent, found.pauses.max() / 100_000), (1, 550));
    }

    #[test]
    fn a_stalled_thread_does_not_count_as_silence() {
        let mut reconnects = reconnects(1);
        reconnects.look(9 * SECOND);
        reconnects.heard(0, 10 * SECOND);
        reconnects.look(10 * SECOND);
        assert_eq!(reconnects.awake_ns, 10 * SECOND, "there was no check for a second");
        for tenths in 101..=200 {
            reconnects.look(tenths * SECOND / 10);
        }
        assert_eq!((reconnects.awake_ns, reconnects.next_due(0, 20 * SECOND)), (10 * SECOND, Some(0)));
        reconnects.look(40 * SECOND);
        assert_eq!(reconnects.next_due(0, 41 * SECOND), None);
        assert_eq!(reconnects.next_due(0, 41 * SECOND + 1), Some(0));
    }

    #[test]
    fn a_loss_is_counted_once_with_the_time_to_the_next_allocation() {
        let mut reconnects = reconnects(2);
        (0..2).for_each(|index| reconnects.heard(index, 10 * SECOND));
        reconnects.leave(0, 12 * SECOND);
        reconnects.leave(0, 13 * SECOND);
        reconnects.has_reconnected(0, 14 * SECOND);
        (0..2).for_each(|index| reconnects.lost(index, 7));
        let ReconnectFigures { lost, failed, done, times, lost_of_others, .. } = &reconnects.found;
        assert_eq!((*lost, *failed, *done, *lost_of_others), (1, 1, 1, 7));
        assert_eq!(times.max() / 100_000, 40);
    }
}
