//! Operator commands: requests to the admin interface of a running program, shown as tables or JSON.
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
