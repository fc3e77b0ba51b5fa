//! Orders the certificates of `tls.acme` from a certificate authority (RFC 8555) and renews them. Each name has its own
//! certificate, in a file that the server reloads like any other certificate file; a failed order changes nothing.
//!
//! ```text
//! Schedule ── due? ──▶ order ── challenge ──▶ TlsContext, port 80 or hook
//!    ▲                   │
//!    └── lifetime ◀── file in the state directory ──▶ certificate watch of the server
//! ```
#![forbid(unsafe_code)]

mod certificate_id;
mod challenge;
mod error;
mod files;
mod hook;
mod http;
mod http_challenge;
mod order;
mod proof;
mod schedule;
mod shared;
mod status;
mod task;
mod wanted;

pub use shared::{Later, SecretText, SharedOrders};
pub use status::{AcmeStatus, NameStatus};
pub use task::Acme;
pub use wanted::Wanted;
