//! Running a relay: configuration, credential stores, session log, metrics, admin HTTP and the control thread.
//!
//! ```text
//! flags, environment, file ─▶ config::Sources::load ─▶ Settings ─▶ plan ─▶ relay::Config ─▶ workers
//!                                                                             │ SessionLog, snapshots
//!           signals, reload, /metrics, /healthz, log lines ◀── serve (control thread)
//! ```
//!
//! Whatever may wait (files, HTTP, signals, the terminal) happens on the control thread; a worker never waits for it.
#![forbid(unsafe_code)]

pub mod access_tokens;
pub mod admin;
mod changes;
pub mod config;
mod control;
pub mod credentials;
mod exposition;
pub mod forward;
mod in_force;
mod limits;
mod log_limit;
mod log_queue;
pub mod logging;
pub mod metrics;
mod own_addresses;
pub mod plan;
pub mod process;
mod realms;
pub mod rest;
pub mod secret;
pub mod serve;
pub mod session_log;
mod signals;
pub mod stop;

pub use config::{ConfigErrors, Flags, Settings, Sources, known_variables};
pub use secret::Secret;
