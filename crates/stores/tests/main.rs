//! The stores against real servers, started by each test: one suite for all databases, coturn's own programs,
//! and servers that are slow, gone, or back.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests may panic")]

mod coturn;
mod fleet;
mod outages;
mod questions;
mod races;
mod refused;
mod support;
