//! Tests with real sockets, one module per behaviour in a single program, which links faster.
#![forbid(unsafe_code)]
#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a panic is how a test fails")]

mod channel;
mod inbox;
