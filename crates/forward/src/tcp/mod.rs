//! TCP connections of one worker.
//!
//! ```text
//! listener ─ accept4 ─▶ limits, lists ─▶ [PROXY header] ─▶ connect, address by address ─▶ two flows ─▶ log
//!                                        opening.rs                                       established.rs, net::copy; sockmap.rs
//! ```

mod engine;
mod established;
mod health;
mod opening;
mod pacing;
mod sockmap;
mod stream_check;

pub(crate) use engine::{Engine, Tick};
