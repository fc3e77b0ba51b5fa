//! The stores against real servers, which each test starts for itself: the same suite for all of them, coturn's own programs writing
//! into each, and what becomes of a server that is slow, gone, or back.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests may panic")]

mod coturn;
mod fleet;
mod outages;
mod questions;
mod races;
mod refused;
mod support;
