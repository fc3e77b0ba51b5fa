//! Measuring instruments: latency histograms, rates, sequence tracking, jitter, kernel counters, the report of a generator run, and
//! formatting of quantities.
//!
//! Each thread has its own instruments, and the reporter merges them. There are no locks, and calls made for every datagram do not
//! allocate.
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
pub use rate::{OfferedRate, per_second};
pub use report::{
    Direction, LATE_P99_US, Lateness, Leg, LoadReport, Percentiles, ProfileReport, StreamReport,
};
pub use sequence::{ArrivalOrder, Sequence};
