//! The commands of operators: sessions, users, secrets, realms, keys, fleet, reload, drain, health checks and `top`. They ask a running program
//! over its admin interface, and show the answers as tables or JSON.
//!
//! ```text
//!  commands, top ─▶ client ─▶ admin interface of a program
//!      └──────────▶ accounts of a store, where no program runs
//! ```
#![forbid(unsafe_code)]

pub mod client;
pub mod commands;
mod table;
pub mod top;
