//! Limits, listeners, certificates and workers of a TURN server.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Traffic, transport};

/// All numeric limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Limits)]
pub struct LimitList {
    /// One for each configuration key.
    pub limits: Vec<LimitInfo>,
}

/// A limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Limit)]
pub struct LimitInfo {
    /// Its key, such as `limits.allocations`.
    pub key: String,
    /// The limit; null for none. Times are in seconds (`limits.burst` in milliseconds), rates in bits per second (refusals in refusals per
    /// second), buffers in bytes.
    pub most: Option<u64>,
    /// Amount in use, if it is a single number.
    pub used: Option<u64>,
}

/// Listeners and relay addresses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Listeners {
    /// For clients.
    pub listeners: Vec<Listener>,
    /// For peers.
    pub relays: Vec<RelayRange>,
}

/// A listener for clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Listener {
    /// `tcp` accepts TLS too if there is a certificate.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Address and port.
    pub address: String,
    /// A reload has removed it: it accepts no new clients, and is listed as long as it has allocations.
    pub closing: bool,
    /// Current allocations of clients that connected here.
    pub allocations: u64,
    /// Traffic of these allocations to peers.
    pub to_peer: Traffic,
    /// Traffic of these allocations to clients.
    pub to_client: Traffic,
}

/// An address with ports for relayed transport addresses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RelayRange {
    /// The address of this machine.
    pub address: String,
    /// The external address that clients see, if it differs.
    pub external: Option<String>,
    /// The lowest port.
    #[schema(maximum = 65535)]
    pub first_port: u16,
    /// The highest port.
    #[schema(maximum = 65535)]
    pub last_port: u16,
    /// True if this machine has the address. Allocations are granted only on such addresses.
    pub up: bool,
    /// Time of the last change to `up` (RFC 3339).
    pub since: String,
}

/// Certificates of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Certificates)]
pub struct CertificateList {
    /// The default certificate first.
    pub certificates: Vec<CertificateInfo>,
    /// Certificates that the server orders itself (`tls.acme`), by name.
    #[serde(default)]
    pub orders: Vec<CertificateOrder>,
}

/// Orders for one certificate, placed with a certificate authority.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CertificateOrder {
    /// The name or address in `tls.acme`.
    pub name: String,
    /// Time of the next order (RFC 3339).
    pub next: String,
    /// Failed orders since the last success.
    pub failures: u32,
    /// Reason for the last failure; null after a success.
    pub error: Option<String>,
}

/// A certificate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Certificate)]
pub struct CertificateInfo {
    /// Its file, as in the configuration.
    pub file: String,
    /// Its DNS names.
    pub names: Vec<String>,
    /// The end of its validity (RFC 3339).
    pub not_after: String,
    /// Seconds until then; negative afterwards.
    pub expires_in_s: i64,
    /// Its renewal is overdue: it expires within 14 days and is in the last sixth of its validity period.
    #[serde(default)]
    pub ends_soon: bool,
    /// True if DTLS can use it too.
    pub dtls: bool,
}

/// All workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Workers)]
pub struct WorkerList {
    /// Workers by number.
    pub workers: Vec<Worker>,
}

/// A worker: one thread. Counts are since startup and at most 100 ms old.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Worker {
    /// Its number, from 0.
    pub number: u64,
    /// Its current allocations.
    pub allocations: u64,
    /// Recent CPU use as a share of a core, 0 to 1.
    pub load: Option<f64>,
    /// Recent share of time in which it was ready to run but another thread had its core.
    pub waiting: Option<f64>,
    /// Event loop latency in microseconds: the time that a datagram would currently wait; null if the
    /// worker did not answer.
    pub event_loop_us: Option<u64>,
    /// Wake-ups.
    pub wakeups: u64,
    /// Receive calls.
    pub receive_calls: u64,
    /// Datagrams received; divided by the receive calls, this is the mean batch size.
    pub received: u64,
    /// Send calls.
    pub send_calls: u64,
    /// Datagrams sent.
    pub sent: u64,
    /// Traffic relayed to peers.
    pub to_peer: Traffic,
    /// Traffic relayed to clients.
    pub to_client: Traffic,
    /// Datagrams that the kernel dropped because the worker was too slow.
    pub kernel_drops: u64,
    /// Datagrams that the server dropped; `/metrics` has the reasons.
    pub dropped: u64,
}
