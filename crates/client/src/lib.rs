//! Transports between a client and a STUN or TURN server: server names, sockets and certificates. The crate
//! does not interpret messages.
//!
//! ```text
//! ServerUri ─▶ addresses      turn:HOST, turns:HOST?transport=udp …; SRV and NAPTR records
//! Datagrams                   plain UDP: many sockets, batches in and out
//! ServerLinks                 TCP, TLS, DTLS: many connections, whole messages in and out, nothing blocks
//! Security, Verifier          trust for TLS and DTLS
//! http::HttpConnection        a connection for requests to an application
//! ```
#![forbid(unsafe_code)]

pub mod certificates;
mod datagrams;
pub mod discovery;
mod dns;
pub mod dtls;
#[cfg(feature = "http")]
pub mod http;
pub mod links;
mod login;
mod security;
pub mod sockets;
mod transport;
pub mod uri;

use std::collections::BTreeMap;

pub use certificates::{CertificateJudge, ShownCertificate, Verifier, explain};
pub use datagrams::Datagrams;
pub use dns::NameServers;
pub use links::{Broken, Framing, ServerLinks};
pub use login::Login;
pub use security::{Security, TlsOptions};
pub use transport::{ClientTransport, UnknownName};
pub use uri::ServerUri;

pub type ErrorCounts = BTreeMap<&'static str, u64>;

/// Error message about an invalid setting; names the flag to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidSetting(pub String);
