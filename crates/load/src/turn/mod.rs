//! `load turn`: a generator for TURN servers.
//!
//! ```text
//! client sockets ──▶ server ──▶ reflector      client → relay → reflector, and back the same way
//!        ◀──────────────┴───────────┘          (sequence number and due time travel in the payload)
//! ```
//!
//! Each client is a socket of its own, so that its 5-tuple is; each thread drives its share of them and alternates
//! between sending and receiving. Latency counts from the moment a datagram was *due*, so that a generator or a server
//! that stalls cannot hide it (no coordinated omission).

mod allocate;
mod config;
mod engine;
mod invalid;
mod packet;
mod shared;
mod tally;

use std::{
    collections::BTreeMap,
    sync::{atomic::Ordering::Relaxed, mpsc},
    thread,
    time::{Duration, Instant},
};

use turnpike_measure::{Report, per_second};

pub use config::{Config, Mode, UnknownName, Via};
use {
    shared::Shared,
    tally::{Finished, Tallies},
};

use crate::{
    LoadError,
    progress::{Interval, Phase},
};

/// Above this lateness (p99, microseconds) the outcome says that the generator could not keep its pace.
const LATE_US: u64 = 2_000;

/// What a run found.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The figures, to be written as JSON or shown.
    pub report: Report,
    /// Each asked-for limit that was exceeded, as a sentence.
    exceeded: Vec<String>,
}

impl Outcome {
    /// The asked-for limits (`--max-loss`, `--max-p99`) that were exceeded, one sentence each; empty when all was well.
    #[must_use]
    pub fn limits_exceeded(&self) -> &[String] {
        &self.exceeded
    }
}

/// Runs a load. `progress` is called about once a second, from the calling thread.
///
/// # Errors
/// When the settings are impossible, or the clients cannot be set up. What goes wrong afterwards is counted in
/// [`Report::errors`].
pub fn run(config: &Config, mut progress: impl FnMut(&Interval)) -> Result<Outcome, LoadError> {
    config.validate()?;
    check_files(config)?;
    let threads = config.threads();
    let shared = Shared::new(config, threads);
    let mut total = Tallies::default();
    let finished = thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for number in 0..threads {
            let (sender, shared) = (sender.clone(), &shared);
            let body = move || {
                let result = run_thread(shared, number);
                // The receiver lives as long as the scope.
                let _ = sender.send(result);
            };
            let spawned = thread::Builder::new().name(format!("load-{number}")).spawn_scoped(scope, body);
            if let Err(source) = spawned {
                shared.fail(LoadError::System { what: "cannot start a thread", source });
            }
        }
        drop(sender);
        watch(&shared, &receiver, &mut total, &mut progress)
    });
    if let Some(failure) = shared.take_failure() {
        return Err(failure);
    }
    Ok(conclude(config, total, finished))
}

fn run_thread(shared: &Shared<'_>, number: usize) -> Option<Finished> {
    // Coarser waits still keep the pace, only less evenly; `late_us` shows it.
    let _ = turnpike_net::limits::exact_timers();
    let result = match shared.config.mode {
        Mode::Packet => packet::run(shared, number),
        Mode::Allocate => allocate::run(shared, number),
        Mode::Invalid => invalid::run(shared, number),
    };
    result.map_err(|error| shared.fail(error)).ok()
}

/// Reports each second until all threads have ended.
fn watch(
    shared: &Shared<'_>,
    threads: &mpsc::Receiver<Option<Finished>>,
    total: &mut Tallies,
    progress: &mut impl FnMut(&Interval),
) -> Vec<Finished> {
    const INTERVAL: Duration = Duration::from_secs(1);
    let begin = Instant::now();
    let (mut finished, mut last) = (Vec::new(), begin);
    loop {
        match threads.recv_timeout((last + INTERVAL).saturating_duration_since(Instant::now())) {
            Ok(done) => finished.extend(done),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let now = Instant::now();
                let mut interval = Tallies::default();
                collect(shared, &mut interval);
                progress(&summary(shared, &mut interval, now - begin, now - last));
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

fn collect(shared: &Shared<'_>, into: &mut Tallies) {
    for slot in &shared.slots {
        Tallies::collect(slot, into);
    }
}

fn summary(shared: &Shared<'_>, interval: &mut Tallies, elapsed: Duration, length: Duration) -> Interval {
    let mut both = tally::Tally::default();
    both.merge(&mut interval.warmup);
    both.merge(&mut interval.measured);
    let phase = match shared.schedule() {
        None => Phase::Setup { ready: shared.ready_clients.load(Relaxed), clients: shared.config.clients },
        Some(schedule) if shared.clock.ns() < schedule.measure => Phase::Warmup,
        Some(_) => Phase::Measuring,
    };
    Interval {
        phase,
        elapsed,
        length,
        sent: both.sent,
        received: both.received,
        replies_expected: shared.config.mode != Mode::Invalid,
        p50_us: both.rtt.quantile(0.50),
        p99_us: both.rtt.quantile(0.99),
    }
}

fn check_files(config: &Config) -> Result<(), LoadError> {
    /// Standard streams, epoll instances, and what the caller has open.
    const OTHERS: usize = 128;
    let needed = (config.clients + OTHERS) as u64;
    let limit = turnpike_net::limits::raise_open_files(needed)
        .map_err(LoadError::system("cannot read the limit of open files"))?;
    if limit < needed {
        return Err(LoadError::OpenFiles { clients: config.clients, needed, limit });
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "figures of a report")]
fn conclude(config: &Config, total: Tallies, finished: Vec<Finished>) -> Outcome {
    let tally = total.measured;
    let mut errors = BTreeMap::new();
    let mut extra: BTreeMap<String, f64> = BTreeMap::new();
    let (mut jitter_sum, mut jitter_count) = (0.0, 0);
    let mut cpu = Some(Duration::ZERO);
    for thread in finished {
        for (name, count) in thread.errors {
            *errors.entry(name.to_owned()).or_default() += count;
        }
        for (name, value) in thread.extra {
            let most = extra.entry(name.to_owned()).or_default();
            *most = most.max(value);
        }
        jitter_sum += thread.jitter.0;
        jitter_count += thread.jitter.1;
        cpu = cpu.zip(thread.cpu).map(|(sum, own)| sum + own);
    }
    if let Some(cpu) = cpu {
        extra.insert("generator_cpu_s".to_owned(), cpu.as_secs_f64());
    }
    if config.mode == Mode::Invalid {
        extra.insert("sent_bytes".to_owned(), tally.sent_bytes as f64);
        extra.insert("reply_bytes".to_owned(), tally.received_bytes as f64);
        let ratio =
            if tally.sent_bytes == 0 { 0.0 } else { tally.received_bytes as f64 / tally.sent_bytes as f64 };
        extra.insert("amplification".to_owned(), ratio);
    }
    let lost = match config.mode {
        // Most of what this mode sends deserves no reply.
        Mode::Invalid => 0,
        Mode::Packet | Mode::Allocate => tally.sent.saturating_sub(tally.received),
    };
    let mut report = Report {
        sent: tally.sent,
        received: tally.received,
        lost,
        duplicated: tally.duplicated,
        reordered: tally.reordered,
        send_pps: per_second(tally.sent, config.duration),
        recv_pps: per_second(tally.received, config.duration),
        recv_bps: per_second(tally.received_bytes * 8, config.duration),
        rtt_us: tally.rtt.percentiles(),
        jitter_us: if jitter_count == 0 { 0.0 } else { jitter_sum / jitter_count as f64 },
        late_us: tally.late.lateness(),
        clients: config.clients as u64,
        size: config.size as u64,
        rate: config.rate,
        duration_s: config.duration.as_secs_f64(),
        datapath: config.datapath.to_string(),
        errors,
        notes: Vec::new(),
        extra,
    };
    report.notes = notes(&report);
    Outcome { exceeded: exceeded(config, &report), report }
}

fn notes(report: &Report) -> Vec<String> {
    let mut notes = Vec::new();
    if report.late_us.p99 > LATE_US {
        notes.push(format!(
            "the generator was late: 1 % of what it sent left {} us or more after it was due, which the round \
             trips contain; use fewer clients, a lower rate, longer bursts or more cores",
            report.late_us.p99
        ));
    }
    if report.sent > 0 && report.received == 0 && !report.extra.contains_key("amplification") {
        notes.push(
            "nothing came back: is the reflector running at the peer's address, and can the server reach it?"
                .to_owned(),
        );
    }
    notes
}

fn exceeded(config: &Config, report: &Report) -> Vec<String> {
    let mut exceeded = Vec::new();
    if let Some(limit) = config.max_loss
        && report.loss_percent() > limit
    {
        exceeded.push(format!("loss is {:.3} %, above the limit of {limit} %", report.loss_percent()));
    }
    if let Some(limit) = config.max_p99 {
        if report.received == 0 {
            exceeded.push(format!("nothing came back, so that p99 is not below the limit of {limit} us"));
        } else if report.rtt_us.p99 > limit {
            exceeded.push(format!("p99 is {} us, above the limit of {limit} us", report.rtt_us.p99));
        }
    }
    exceeded
}
