//! Performance lab: runs programs under load, reads the kernel's counters, and judges the results.
//!
//! The lab is not linked with any server, so that it can measure any relay or forwarder. One half, reached
//! through [`run`] or [`main`], starts programs and reads counters:
//!
//! ```text
//! topology    namespaces joined by veth pairs, removed even if the lab is killed
//! experiment  files: subjects, helpers, workload, sweep
//! probe       counters of namespaces, CPUs and processes, read from the kernel
//! run         fresh processes per round, readiness, measurement window, failures
//! profile     flame graphs, hot symbols, syscalls
//! ```
//!
//! The other half makes no measurements; it orders, judges, records and reports experiments:
//!
//! ```text
//! order::plan(seed, runs, rounds)            which subject runs when; runs = the subjects, and the baseline again (A/A)
//!   └─ for each slot: run the subject        progress::RunProgress shows round k of n, time left, the running estimate
//!        └─ record::Round                    metric::derive() adds the per-packet figures,
//!             └─ invalid_rounds::VoidLimits::check()   voids it if the generator fell behind or CPU time was stolen
//! record::RunRecord::save(dir) ◀───┘            after every round, so that Ctrl-C loses nothing
//! verdict::judge(record, subject, metric)    faster, slower, no difference shown, or cannot tell
//! report::save(dir, record)                  report.html
//! report::compare(records)                   runs from different days, and whether they are comparable
//! thresholds::hold(record)                   thresholds: met, missed, or undecided; a suite is a table of experiments
//!
//! search::Search::next() ─▶ Trial ─▶ observe()   find-max, for several loss goals at the same time
//! ```
//!
//! **Ratios.** A paired ratio is always candidate over baseline in the same round, kept as a logarithm until it is shown. The baseline is
//! the experiment's first subject. The `metric` decides whether a ratio above 1 is good.
//!
//! **A/A.** `order::plan` plans one run more per round than there are subjects; the additional one is the baseline again. Its results go
//! into `RunRecord::aa` under the baseline's name. With two subjects, six rounds form complete blocks.
//!
//! **Reliability.** In simulations with 8 % noise per run and a drift of 20 % (`truth.rs`), of 1,000 experiments with 96 rounds and equal
//! subjects, 974 show no difference and 23 claim one. A 5 % slowdown is found in 88 % of the cases with 96 rounds and in 97 % with 128.
//! With 2 % noise, a sixteenth of the rounds gives the same results.
//!
//! **Seeds.** One recorded seed determines the order of the runs and the bootstrap.
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
pub use record::RunRecord;
