//! TCP connections of one worker.
//!
//! ```text
//! listener ─ accept4 ─▶ limits, lists ─▶ [PROXY header] ─▶ connect, address by address ─▶ two flows ─▶ log
//!                                        opening.rs                                       established.rs, mover.rs
//! ```

mod engine;
mod established;
mod health;
mod mover;
mod opening;

pub(crate) use engine::{Engine, Tick};
