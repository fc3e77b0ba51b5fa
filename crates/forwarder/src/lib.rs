//! The port forwarder as a service of [`turnpike_process`]: rules, connection log, metrics.
//!
//! ```text
//!   control loop (turnpike_process) ─▶ PortForwarder (service.rs) ─▶ workers: a thread each
//!   admin interface (turnpike_admin) ─▶ AdminView: Control, snapshots      │
//!                     log lines ◀── log_queue ◀── ConnectionLog ◀──────────┘
//! ```
#![forbid(unsafe_code)]

mod admin;
mod changes;
mod connection_file;
mod connection_log;
mod denial;
mod error;
mod handover;
mod metrics;
mod needs;
mod service;

pub use error::ForwarderError;
pub use service::forward;
