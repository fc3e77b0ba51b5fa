//! The performance lab: starts programs, reads the system, and says what can be believed of it.
//!
//! It links none of the servers, so that any relay or forwarder can be measured. One half starts programs and reads
//! counters; it is reached through [`run`], or [`main`]:
//!
//! ```text
//! topology    namespaces joined by veth pairs, gone whatever happens
//! experiment  files: subjects, helpers, workload, sweep
//! probe       counters of namespaces, CPUs and processes, read at the source
//! run         fresh processes a round, readiness, the window in which is measured, failures
//! profile     flame graphs, hot symbols, syscalls
//! ```
//!
//! The other half starts nothing and reads no clock: how an experiment is ordered, judged, recorded and reported.
//!
//! ```text
//! order::plan(seed, runs, rounds)            which subject runs when; runs = the subjects, and the baseline again (A/A)
//!   └─ for each slot: run the subject        progress::RunProgress tells round k of n, time left, the running estimate
//!        └─ record::Round                    metric::derive() adds the per-packet figures,
//!             └─ invalid_rounds::VoidLimits::check()   a late generator or stolen CPU voids it
//! record::Record::save(dir) ◀───┘            after every round, so that Ctrl-C loses nothing
//! verdict::judge(record, subject, metric)    faster, slower, no difference shown, or cannot tell
//! report::save(dir, record)                  report.html;  report::row() for docs/dev/performance-log.md
//! report::compare(records)                   runs of different days, and whether they are comparable
//! thresholds::hold(record)                   bars: met, missed, or not decidable; suite is a table of experiments with theirs
//!
//! search::Search::next() ─▶ Trial ─▶ observe()   find-max, for several loss goals at once
//! ```
//!
//! **Ratios.** A paired ratio is always candidate over baseline of the same round, in logarithms until shown; the
//! baseline is the experiment's first subject. Whether above 1 is good is a property of the `metric`.
//!
//! **A/A.** Give `order::plan` one run more than there are subjects, and let the last one be the baseline again. Its
//! rounds go into `Record::aa`, under the baseline's name. Six rounds make whole blocks for two subjects and this one.
//!
//! **How sure.** Simulated with 8 % noise a run and a drift of 20 % (`truth.rs`): of 1,000 experiments of 96 rounds
//! with equal subjects 974 show no difference and 23 claim one; 5 % slower is found in 88 % of the experiments with 96
//! rounds and in 97 % with 128. With 2 % noise the same takes a sixteenth of the rounds.
//!
//! **Seeds.** One seed, printed and recorded, fixes the order of the runs and the bootstrap.
#![forbid(unsafe_code)]

mod adhoc;
mod advice;
mod builds;
mod builtin_experiments;
mod certificate;
mod cli;
mod commands;
mod console;
mod environment;
mod error;
mod exit_excerpt;
mod experiment;
pub mod invalid_rounds;
mod metric;
pub mod order;
mod probe;
mod profile;
mod program;
mod progress;
pub mod record;
mod report;
mod request;
mod run;
mod search;
mod stats;
mod stop;
mod suite;
mod thresholds;
mod tools;
mod topology;
#[cfg(test)]
mod truth;
mod verdict;

pub use cli::LabArgs;
pub use commands::{main, run};
pub use error::LabError;
pub use record::Record;
