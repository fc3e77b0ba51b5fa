//! TCP connections of one worker.
//!
//! ```text
//! listener ─ accept4 ─▶ limits, lists ─▶ [PROXY header] ─▶ connect, address by address ─▶ two flows ─▶ log
//!                                        opening.rs                                       established.rs, net::copy; across.rs
//! ```

mod across;
mod engine;
mod established;
mod health;
mod opening;
mod pacing;
mod stream_check;

pub(crate) use engine::{Engine, Tick};
