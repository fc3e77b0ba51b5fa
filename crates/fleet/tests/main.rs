//! The rules as a whole: many nodes, many clients, and a store, all simulated.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests may panic")]

mod chance;
mod clocks;
mod partitions;
mod quotas;
mod recovery;
mod spreading;
