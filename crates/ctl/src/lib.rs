//! Operator commands: requests to the admin interface of a running program, shown as tables or JSON, and the setup of a server.
//!
//! ```text
//!  commands, top ─▶ client ─▶ admin interface of a program
//!      └──────────▶ accounts of a store, without a running program
//!  setup ─▶ configuration file ─▶ systemd, probe
//! ```
#![forbid(unsafe_code)]

pub mod client;
pub mod commands;
pub mod setup;
mod table;
pub mod top;
