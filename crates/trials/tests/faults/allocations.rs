//! Allocation latency before, during and right after a fault. Turns during which the machine was busy are repeated; a row without valid
//! turns is void.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::{Row, Server, or_thorough};
use turnpike_trials::Load;

/// Maximum p99 in milliseconds without a fault; a two-core machine under load measures a third of this.
const MOST_WITHOUT: f64 = 10.0;
/// Maximum ratio of the p99 during a fault to the p99 without one.
const MOST_UNDER: f64 = 2.0;

/// Allocates and deletes for `seconds`; returns the 99th percentile of the latency in milliseconds. Every request must succeed.
pub(super) fn allocation_p99(server: &Server, user: &str, seconds: &str) -> f64 {
    let run = Load::as_user(server.address, user)
        .with_words(&[
            "--mode",
            "allocate",
            "--clients",
            "4",
            "--rate",
            // The rate is high enough that the few requests that wait for one query do not determine the 99th percentile.
            or_thorough("100", "400"),
            "--warmup",
            "0.2",
            "--duration",
            seconds,
        ])
        .run();
    let result = run.result();
    assert_eq!((run.code, &result["lost"]), (Some(0), &0.into()), "{}", run.output());
    result["rtt_us"]["p99"].as_f64().expect("a number") / 1_000.0
}

pub(super) struct Turns {
    /// Turns before the first fault, and after full recovery from a fault.
    without: Vec<Turn>,
    under: Vec<Turn>,
    /// Turns that began when a fault ended, before recovery was complete.
    right_after: Vec<Turn>,
    /// Longest time from the end of a fault to full recovery.
    settled: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    p99: f64,
    machine: Duration,
}

impl Turn {
    /// True if the figure reflects the server rather than the machine: the p99 is meaningless if the machine stalled for much longer than
    /// an allocation takes.
    fn counts(&self) -> bool {
        self.machine <= Duration::from_millis(10)
    }
}

/// Measures without the fault, during it and right after it. `settle` waits for full recovery.
pub(super) fn allocations_under(
    server: &mut Server,
    user: &str,
    settle: impl Fn(&Server),
    mut fault: impl FnMut(&mut Server, bool),
) -> Turns {
    let watched = Watched::default();
    thread::scope(|scope| {
        // Stops the watcher even if an assertion fails; otherwise the scope would never end.
        let _end = Over(&watched);
        scope.spawn(|| watched.watch());
        let turn = |server: &Server| {
            watched.longest.store(0, Ordering::Relaxed);
            let p99 = allocation_p99(server, user, or_thorough("0.5", "2"));
            let machine = Duration::from_micros(watched.longest.load(Ordering::Relaxed));
            Turn { p99, machine }
        };
        // Repeats a turn if the machine was busy; a quick run accepts it.
        let good_turn = |server: &Server| {
            let mut tries = (0..or_thorough(1, 5)).map(|_| turn(server));
            let first = tries.next().expect("at least one turn");
            if first.counts() { first } else { tries.find(Turn::counts).unwrap_or(first) }
        };
        let (mut without, mut under, mut right_after) = (Vec::new(), Vec::new(), Vec::new());
        let mut settled = Duration::ZERO;
        for _ in 0..or_thorough(1, 5) {
            without.push(good_turn(server));
            fault(server, true);
            under.push(good_turn(server));
            fault(server, false);
            right_after.push(turn(server));
            let ended = Instant::now();
            settle(server);
            settled = settled.max(ended.elapsed());
        }
        Turns { without, under, right_after, settled }
    })
}

/// Measures the delay with which a sleeping thread wakes up, as a sign of a busy machine.
#[derive(Default)]
struct Watched {
    over: AtomicBool,
    /// Microseconds.
    longest: AtomicU64,
}

impl Watched {
    fn watch(&self) {
        const SLEEP: Duration = Duration::from_millis(2);
        while !self.over.load(Ordering::Relaxed) {
            let begun = Instant::now();
            thread::sleep(SLEEP);
            let late = begun.elapsed().saturating_sub(SLEEP).as_micros();
            self.longest.fetch_max(u64::try_from(late).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}

struct Over<'a>(&'a Watched);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

impl Turns {
    pub(super) fn tell(&self, row: &mut Row, who: &str, when: &str) {
        let all = [&self.without, &self.under, &self.right_after];
        let [without, under, right_after] = all.map(|turns| median(turns));
        for (name, turns) in ["without", "under it", "right after"].iter().zip(all) {
            println!("  {name}: {turns:?}");
        }
        let machine = all.into_iter().flatten().map(|turn| turn.machine).max().unwrap_or_default();
        row.note(format!(
            "{who}: allocation p99 {without:.2} ms without the fault ({:.2} before the first fault), {under:.2} ms during it, \
             {right_after:.2} ms right after it; settled {:.1} s later; an idle thread was delayed by up to {} ms",
            self.without[0].p99,
            self.settled.as_secs_f64(),
            machine.as_millis(),
        ));
        let [without_count, under_count, after_count] =
            all.map(|turns| turns.iter().filter(|turn| turn.counts()).count() * 2 > turns.len());
        if !(without_count && under_count) {
            row.void(format!(
                "allocation p99 {when}: in most measurements, the machine delayed a thread that only sleeps"
            ));
        } else if without > MOST_WITHOUT {
            row.void(format!("allocation p99 without the fault: {without:.2} ms, above {MOST_WITHOUT}"));
        }
        row.limit(&format!("ratio of allocation p99 {when}"), under / without, MOST_UNDER);
        // The turns right after the fault cannot be repeated, and the first request of a user may have to wait for a query.
        if after_count {
            row.limit("allocation p99 right after the fault, ms", right_after, MOST_WITHOUT);
        }
    }
}

fn median(turns: &[Turn]) -> f64 {
    let good = turns.iter().filter(|turn| turn.counts());
    let mut figures: Vec<f64> = good.map(|turn| turn.p99).collect();
    if figures.is_empty() {
        figures = turns.iter().map(|turn| turn.p99).collect();
    }
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
