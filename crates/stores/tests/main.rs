//! Tests of the stores against real servers, which each test starts.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests may panic")]

mod coturn;
mod fleet;
mod http;
mod outages;
mod questions;
mod races;
mod refused;
mod support;
mod usage;
