//! The admin interface: an HTTP API over a Unix socket and TCP, the web page, and credentials for
//! applications.
//!
//! ```text
//!  listen ─▶ connections: few, short, one request each ─▶ access: Host, Origin, token, role, audit line ─▶ routes ─▶ api::Program
//!    Unix socket, loopback, TLS                                                                                 │
//!                                                          relay::allocations: workers, queried slice by slice ◀───┤
//!                                                               accounts: users, secrets, realms of a store ◀─────┘
//!  other nodes of a fleet ─▶ peer_requests ─▶ (access, like any request)
//!  a new process ─▶ predecessor ─▶ peer_requests
//! ```
//!
//! Everything runs on the control thread of the program; no worker waits for it.
#![forbid(unsafe_code)]

mod access;
mod accounts;
mod application_access;
mod applications;
mod changes;
mod client_uris;
mod connections;
mod credential_issuer;
mod hosts;
mod http_listener;
mod key_rates;
mod listen;
mod live;
mod occupant;
mod pcapng;
mod peer_requests;
mod plain_text;
mod predecessor;
mod problem;
mod program;
mod refusal_log;
mod request_body;
mod response_headers;
mod routes;
mod threads;
mod tls;
mod via;
mod web;

pub use accounts::{AccountStore, Accounts};
pub use applications::Applications;
pub use connections::{CREDENTIALS_DESCRIPTORS, DESCRIPTORS};
pub use listen::{AdminInterface, LentSocket, ListenError, Serving, candidates, check};
pub use problem::Problem;
pub use program::{AllocationQualities, Owner, ServerView};
pub use routes::{ApiDocument, with_own_metrics};
pub use tls::TlsError;
