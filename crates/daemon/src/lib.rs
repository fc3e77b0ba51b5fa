//! What `serve` and `forward` share as services: one control loop, signals, reload, drain, upgrade, logs, metrics.
//!
//! ```text
//!                   signals ─▶ Request ─▶ control (one tokio thread) ─▶ Service: TURN server or forwarder
//!                                            │                              │ workers: a thread each
//!      admin interface ─▶ AdminView: Control, snapshots                     ▼
//!                               log lines ◀── log_queue ◀── SessionLog, ConnectionLog
//!                           fleet: beats, looks, news ◀──▶ a store that other servers use too
//! ```
//!
//! Whatever may wait (files, HTTP, signals, the terminal) happens on the control thread; a worker never waits for it.
#![forbid(unsafe_code)]

mod admin;
mod carried_metrics;
mod certificate_expiry;
mod certificate_watch;
mod certificates;
mod changes;
mod check;
mod connection_file;
mod connection_log;
mod control;
mod credentials;
mod denial;
mod error;
mod exposition;
mod fleet;
mod forward;
mod forward_estate;
mod forward_metrics;
mod kernel_path;
mod log_limit;
mod log_queue;
pub mod logging;
mod machine;
mod own_addresses;
mod passed;
mod pid_file;
mod plan;
mod process;
mod public_address;
mod refusals;
mod rlimit;
mod sandbox;
mod serve;
mod serve_estate;
mod serve_metrics;
mod service_manager;
mod session_log;
mod session_totals;
mod signals;
mod store;
mod upgrade;

pub use check::{check_start, waited_for};
pub use error::DaemonError;
pub use forward::forward;
pub use plan::random_password;
pub use public_address::{AddressSource, PublicAddress, PublicAddressError};
pub use serve::serve;
pub use signals::wait_for_stop;
pub use store::{Store, open_store, realm_of_another};
pub use upgrade::{AskError, Which, ask as upgrade};
