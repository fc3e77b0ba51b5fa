//! turnpike's instruments: latency histograms, rates, sequence bookkeeping, jitter, what the kernel counts, the result
//! that every generator writes, and figures with units.
//!
//! Everything here is owned by one thread and merged by whoever reports; nothing locks, and nothing that is called
//! per datagram allocates.
#![forbid(unsafe_code)]

mod jitter;
pub mod kernel;
mod latency;
mod rate;
mod report;
mod sequence;
pub mod units;

pub use jitter::Jitter;
pub use latency::Latency;
pub use rate::{Rate, per_second};
pub use report::{Direction, LATE_P99_US, Lateness, Leg, Percentiles, ProfileReport, Report, StreamReport};
pub use sequence::{ArrivalOrder, Sequence};
