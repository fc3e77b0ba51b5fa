//! How clients reach a STUN or TURN server: its name, the transports between, and its certificate. What clients say and hear is
//! for others to know.
//!
//! ```text
//! ServerUri ─▶ addresses      turn:HOST, turns:HOST?transport=udp …
//! Datagrams                   plain UDP: many sockets, batches in and out
//! Links                       TCP, TLS, DTLS: many connections, whole messages in and out, nothing blocks
//! Security, Verifier          whom TLS and DTLS trust
//! ```
#![forbid(unsafe_code)]

pub mod certificates;
mod datagrams;
pub mod dtls;
pub mod links;
mod login;
mod security;
pub mod sockets;
mod transport;
pub mod uri;

use std::collections::BTreeMap;

pub use certificates::{CertificateJudge, ShownCertificate, Verifier, explain};
pub use datagrams::Datagrams;
pub use links::{Broken, Framing, Links};
pub use login::Login;
pub use security::{Security, TlsOptions};
pub use transport::{Transport, UnknownName};
pub use uri::ServerUri;

/// What goes wrong on the way, by name, and how often.
pub type Errors = BTreeMap<&'static str, u64>;

/// An impossible setting, as a sentence that names the flag to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidSetting(pub String);
