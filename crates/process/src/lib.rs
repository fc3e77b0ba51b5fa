//! Common parts of turnpike's services: control loop, signals, reload, drain, upgrade, sandbox, logs and metrics. A program
//! implements [`Service`], and [`run`] does the rest. Nothing here is specific to TURN or forwarding.
//!
//! ```text
//!   signals, `turnpike upgrade` ─▶ Request ─▶ control loop (one tokio thread) ─▶ Service ─▶ workers: a thread each
//!   admin interface ─▶ Control ──────▲              │
//!                                                   ├─▶ service manager: ready, reloading, status, watchdog
//!                                                   └─▶ upgrade: HandoverState ─▶ new process
//! ```
//!
//! All blocking work (files, HTTP, signals, the terminal) happens on the control thread; workers never wait for it.
#![forbid(unsafe_code)]

mod carried_metrics;
pub mod changes;
mod control;
mod error;
pub mod exposition;
pub mod init;
pub mod kernel_path;
mod log_filter;
pub mod log_limit;
pub mod log_queue;
pub mod logging;
pub mod passed;
mod pid_file;
mod request;
pub mod rlimit;
pub mod sandbox;
mod service;
mod service_manager;
mod signals;
pub mod upgrade;
mod usage;

pub use carried_metrics::CarriedMetrics;
pub use control::{log_refused, log_warnings, need_restart, run, warn};
pub use error::ProcessError;
pub use exposition::MetricsPage;
pub use log_filter::check_filter;
pub use pid_file::PidFile;
pub use request::{Control, ControlStatus, Stop};
pub use service::Service;
pub use signals::wait_for_stop;
