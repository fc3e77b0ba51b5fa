//! TCP connections of one worker.
//!
//! ```text
//! listener ─ accept4 ─▶ limits, lists ─▶ [PROXY header] ─▶ connect, address by address ─▶ two flows ─▶ log
//!                                        opening.rs                                       established.rs, copy; sockmap.rs
//! ```

mod attempt;
mod check;
mod connection;
mod engine;
mod established;
mod health;
mod opening;
mod pacing;
mod pacing_queue;
mod side;
mod sockmap;
mod stream_check;
mod talk;

pub(crate) use engine::Engine;
pub(crate) use side::Tick;
