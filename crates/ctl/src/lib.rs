//! Operator commands: sessions, users, secrets, realms, keys, fleet, reload, drain, health checks and `top`.
//! They send requests to the admin interface of a running program and show the answers as tables or JSON.
//!
//! ```text
//!  commands, top ─▶ client ─▶ admin interface of a program
//!      └──────────▶ accounts of a store, without a running program
//! ```
#![forbid(unsafe_code)]

pub mod client;
pub mod commands;
mod table;
pub mod top;
