//! Framework of all load runs: threads that start and end together, a reporter, and the result.
//!
//! Each generator passes a function that runs one thread's share of the traffic.

mod heartbeat;
mod shared;
mod tally;

use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use turnpike_measure::{LATE_P99_US, LoadReport, OfferedRate, per_second};

pub(crate) use heartbeat::Heartbeat;
pub(crate) use shared::{RunShared, RunTimes};
pub(crate) use tally::{RunTallies, RunTally, ThreadResult};
pub(crate) use turnpike_client::ErrorCounts;

use crate::{
    LoadError,
    options::{ResultLimits, RunOptions},
    profile::ProfileOptions,
    progress::{CountKind, ProgressInterval, RunPhase},
};

#[derive(Clone, Debug, PartialEq)]
pub struct RunOutcome {
    pub report: LoadReport,
    /// Exceeded limits (`--max-loss`, `--max-p99`), one sentence each.
    pub exceeded: Vec<String>,
    pub interrupted: bool,
}

#[derive(Clone, Debug, Default)]
pub struct StopHandle(Arc<AtomicBool>);

impl StopHandle {
    /// Stops the run within half a second. The run still waits for the last replies, deletes its allocations
    /// and returns a report.
    pub fn stop(&self) {
        self.0.store(true, Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.0.load(Relaxed)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RunFrame {
    pub(crate) clients: usize,
    pub(crate) threads: usize,
    pub(crate) warmup: Duration,
    pub(crate) duration: Duration,
    pub(crate) kind: CountKind,
}

impl RunFrame {
    /// Defaults to one thread per core, but no more threads than `clients`.
    pub(crate) fn new(run: &RunOptions, clients: usize, kind: CountKind) -> Self {
        let cores = || thread::available_parallelism().map_or(1, usize::from);
        let threads = run.threads.unwrap_or_else(cores).min(clients);
        Self { clients, threads, warmup: run.warmup, duration: run.duration, kind }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct RequestedLoad {
    pub(crate) size: usize,
    pub(crate) rate: OfferedRate,
    pub(crate) datapath: String,
    pub(crate) limits: ResultLimits,
}

impl RequestedLoad {
    #[expect(clippy::cast_possible_truncation, reason = "positive, and small")]
    pub(crate) fn with_profile(self, shaped: Option<&ProfileOptions>, clients: usize) -> Self {
        let Some(ProfileOptions { profile, .. }) = shaped else { return self };
        let rate = OfferedRate::Pps(profile.packets_per_second() * clients as f64);
        Self { size: profile.mean_size().round() as usize, rate, ..self }
    }
}

pub(crate) struct RunResults {
    pub(crate) tallies: RunTallies,
    pub(crate) finished: Vec<ThreadResult>,
    pub(crate) measured: Duration,
    pub(crate) interrupted: bool,
}

pub(crate) fn run<C: Sync>(
    config: &C,
    frame: RunFrame,
    stop: &StopHandle,
    body: impl Fn(&RunShared<'_, C>, usize) -> Result<ThreadResult, LoadError> + Sync,
    mut progress: impl FnMut(&ProgressInterval),
) -> Result<RunResults, LoadError> {
    let shared = RunShared::new(config, frame);
    let mut tallies = RunTallies::default();
    let finished = thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for number in 0..frame.threads {
            let (sender, shared, body) = (sender.clone(), &shared, &body);
            let work = move || {
                // Errors are ignored: with coarser timers, sending is only less even, which `late_us` shows.
                let _ = turnpike_net::rlimit::exact_timers();
                let result = body(shared, number).map_err(|error| shared.fail(error)).ok();
                let _ = sender.send(result);
            };
            let spawned = thread::Builder::new().name(format!("load-{number}")).spawn_scoped(scope, work);
            if let Err(source) = spawned {
                shared.fail(LoadError::System { what: "cannot start a thread", source });
            }
        }
        drop(sender);
        watch(&shared, stop, &receiver, &mut tallies, &mut progress)
    });
    let (measured, interrupted) = shared.measured();
    shared.take_failure().map_or(Ok(RunResults { tallies, finished, measured, interrupted }), Err)
}

pub(crate) fn check(
    numbers: &[(&str, usize, RangeInclusive<usize>)],
    threads: Option<usize>,
    duration: Duration,
) -> Result<(), LoadError> {
    for (flag, value, range) in numbers.iter().chain(&[("--threads", threads.unwrap_or(1), 1..=1024)]) {
        if !range.contains(value) {
            let (from, to) = (range.start(), range.end());
            return Err(LoadError::Config(format!("{flag} is {value}, but must be {from} to {to}")));
        }
    }
    if duration.is_zero() {
        return Err(LoadError::Config("--duration is 0, but must be above 0".to_owned()));
    }
    Ok(())
}

pub(crate) fn check_files(clients: usize) -> Result<(), LoadError> {
    /// Number of open files besides the clients' sockets: standard streams, epoll instances, and files of the caller.
    const OTHERS: usize = 128;
    let needed = (clients + OTHERS) as u64;
    let limit = turnpike_net::rlimit::raise_open_files(needed);
    if limit < needed {
        return Err(LoadError::OpenFiles { clients, needed, limit });
    }
    Ok(())
}

fn watch<C>(
    shared: &RunShared<'_, C>,
    stop: &StopHandle,
    threads: &mpsc::Receiver<Option<ThreadResult>>,
    total: &mut RunTallies,
    progress: &mut impl FnMut(&ProgressInterval),
) -> Vec<ThreadResult> {
    const INTERVAL: Duration = Duration::from_secs(1);
    const LOOK: Duration = Duration::from_millis(100);
    let begin = Instant::now();
    let (mut finished, mut last) = (Vec::new(), begin);
    let (mut losses, mut stopped) = (Losses::default(), false);
    loop {
        if !stopped && stop.is_stopped() {
            stopped = true;
            shared.interrupt();
        }
        let rest = (last + INTERVAL).saturating_duration_since(Instant::now());
        match threads.recv_timeout(rest.min(LOOK)) {
            Ok(done) => finished.extend(done),
            Err(mpsc::RecvTimeoutError::Timeout) if last.elapsed() < INTERVAL => {}
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let now = Instant::now();
                let mut interval = RunTallies::default();
                collect(shared, &mut interval);
                let newly = losses.note(&interval);
                progress(&ProgressInterval {
                    lost: newly,
                    outstanding: losses.outstanding(),
                    ..summary(shared, &mut interval, now - begin, now - last)
                });
                total.warmup.merge(&mut interval.warmup);
                total.measured.merge(&mut interval.measured);
                last = now;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    collect(shared, total);
    finished
}

fn collect<C>(shared: &RunShared<'_, C>, into: &mut RunTallies) {
    for slot in &shared.slots {
        RunTallies::collect(slot, into);
    }
}

#[derive(Default)]
struct Losses {
    unanswered: u64,
    lost: u64,
}

impl Losses {
    fn note(&mut self, interval: &RunTallies) -> u64 {
        let RunTallies { warmup, measured, under_way } = interval;
        self.unanswered = (self.unanswered + warmup.sent + measured.sent)
            .saturating_sub(warmup.received + measured.received);
        let lost = self.unanswered.saturating_sub(*under_way);
        let newly = lost.saturating_sub(self.lost);
        self.lost = self.lost.max(lost);
        newly
    }

    fn outstanding(&self) -> u64 {
        self.unanswered.saturating_sub(self.lost)
    }
}

fn summary<C>(
    shared: &RunShared<'_, C>,
    interval: &mut RunTallies,
    elapsed: Duration,
    length: Duration,
) -> ProgressInterval {
    let mut both = RunTally::default();
    both.merge(&mut interval.warmup);
    both.merge(&mut interval.measured);
    let phase = match shared.schedule() {
        None => RunPhase::Setup { ready: shared.ready_clients.load(Relaxed), clients: shared.frame.clients },
        Some(schedule) if shared.clock.ns() < schedule.measure => RunPhase::Warmup,
        Some(_) => RunPhase::Measuring,
    };
    ProgressInterval {
        phase,
        elapsed,
        length,
        sent: both.sent,
        received: both.received,
        lost: 0,
        outstanding: 0,
        kind: shared.frame.kind,
        p50_us: both.rtt.quantile(0.50),
        p99_us: both.rtt.quantile(0.99),
    }
}

pub(crate) fn report(frame: &RunFrame, asked: &RequestedLoad, found: RunResults) -> LoadReport {
    let tally = found.tallies.measured;
    let mut errors = BTreeMap::new();
    let mut extra: BTreeMap<String, f64> = BTreeMap::new();
    let (mut jitter_sum, mut jitter_count) = (0.0, 0);
    let mut cpu = Some(Duration::ZERO);
    for thread in found.finished {
        for (name, count) in thread.errors {
            *errors.entry(name.to_owned()).or_default() += count;
        }
        for (name, value) in thread.extra {
            let most = extra.entry(name.to_owned()).or_default();
            *most = most.max(value);
        }
        for (name, value) in thread.sums {
            *extra.entry(name.to_owned()).or_default() += value;
        }
        jitter_sum += thread.jitter.0;
        jitter_count += thread.jitter.1;
        cpu = cpu.zip(thread.cpu).map(|(sum, own)| sum + own);
    }
    if let Some(cpu) = cpu {
        extra.insert("generator_cpu_s".to_owned(), cpu.as_secs_f64());
    }
    let mut notes = Vec::new();
    if found.interrupted {
        notes.push(format!(
            "interrupted after {:.1} s of {} s; the figures cover the time until then",
            found.measured.as_secs_f64(),
            frame.duration.as_secs_f64()
        ));
    }
    let lost = match frame.kind {
        CountKind::OneWay => 0,
        CountKind::Answered | CountKind::Bytes => tally.sent.saturating_sub(tally.received),
    };
    LoadReport {
        sent: tally.sent,
        received: tally.received,
        lost,
        duplicated: tally.duplicated,
        reordered: tally.reordered,
        send_pps: per_second(tally.sent, found.measured),
        recv_pps: per_second(tally.received, found.measured),
        recv_bps: per_second(tally.received_bytes * 8, found.measured),
        rtt_us: tally.rtt.percentiles(),
        jitter_us: if jitter_count == 0 { 0.0 } else { jitter_sum / jitter_count as f64 },
        late_us: tally.late.lateness(),
        clients: frame.clients as u64,
        size: asked.size as u64,
        rate: asked.rate,
        duration_s: found.measured.as_secs_f64(),
        datapath: asked.datapath.clone(),
        transport: None,
        relay: None,
        profile: None,
        errors,
        notes,
        extra,
    }
}

pub(crate) fn conclude(mut report: LoadReport, asked: &RequestedLoad, interrupted: bool) -> RunOutcome {
    if report.late_us.p99 > LATE_P99_US {
        report.notes.insert(
            0,
            format!(
                "the generator fell behind: 1 % of its packets were sent {} us or more after they were due, and their round-trip \
                 times include the delay; use fewer clients, a lower rate, longer bursts or more cores",
                report.late_us.p99
            ),
        );
    }
    RunOutcome { exceeded: exceeded(asked, &report), report, interrupted }
}

fn exceeded(asked: &RequestedLoad, report: &LoadReport) -> Vec<String> {
    let mut exceeded = Vec::new();
    if let Some(limit) = asked.limits.max_loss
        && report.loss_percent() > limit
    {
        exceeded.push(format!("loss is {:.3} %, above the limit of {limit} %", report.loss_percent()));
    }
    if let Some(limit) = asked.limits.max_p99 {
        if report.received == 0 {
            exceeded.push(format!("no replies arrived, so p99 is not within the limit of {limit} us"));
        } else if report.rtt_us.p99 > limit {
            exceeded.push(format!("p99 is {} us, above the limit of {limit} us", report.rtt_us.p99));
        }
    }
    exceeded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(sent: u64, received: u64, under_way: u64) -> RunTallies {
        let mut tallies = RunTallies::default();
        (tallies.measured.sent, tallies.measured.received, tallies.under_way) = (sent, received, under_way);
        tallies
    }

    #[test]
    fn packets_in_flight_are_not_lost() {
        let mut losses = Losses::default();
        assert_eq!(losses.note(&interval(100, 90, 10)), 0);
        assert_eq!(losses.note(&interval(100, 100, 10)), 0);
        assert_eq!(losses.note(&interval(100, 107, 0)), 3);
        assert_eq!(losses.note(&interval(100, 100, 0)), 0);
    }

    #[test]
    fn a_late_reply_is_not_counted_as_lost_twice() {
        let mut losses = Losses::default();
        assert_eq!(losses.note(&interval(10, 8, 0)), 2);
        assert_eq!(losses.note(&interval(10, 12, 0)), 0);
        assert_eq!(losses.note(&interval(10, 7, 1)), 0);
        assert_eq!(losses.note(&interval(10, 9, 0)), 2);
    }
}
