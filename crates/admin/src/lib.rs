//! The admin interface: an HTTP API over a Unix socket and TCP, the page that it shows to browsers, and the commands that speak to it.
//!
//! ```text
//!  listen ─▶ connections: few, short, one request each ─▶ access: Host, Origin, token, role, audit line ─▶ routes ─▶ api::Program
//!    Unix socket, loopback, TLS                                                                                 │
//!  commands ─▶ client ─▶ (one of these)                    relay::sessions: workers, asked slice by slice ◀─────┤
//!      └─────▶ accounts, where no program runs                   accounts: users, secrets, realms of a store ◀─────┘
//!  other nodes of a fleet ─▶ questions ─▶ (access, as any request)
//!  a new process ─▶ predecessor ─▶ questions
//! ```
//!
//! Everything runs on the control thread of the program; no worker waits for it.
#![forbid(unsafe_code)]

mod access;
mod accounts;
mod applications;
mod changes;
pub mod client;
pub mod commands;
mod connections;
mod hosts;
mod issue;
mod key_rates;
mod listen;
mod live;
mod occupant;
mod plain_text;
mod predecessor;
mod problem;
mod program;
mod questions;
mod refusal_log;
mod routes;
mod table;
mod threads;
mod tls;
pub mod top;
mod ways;
mod web;

pub use accounts::{Accounts, Store};
pub use applications::Applications;
pub use listen::{Interface, Lent, ListenError, Serving, check};
pub use problem::Problem;
pub use program::{Owner, ServerView};
pub use tls::TlsError;
