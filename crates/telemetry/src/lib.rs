//! Metrics and logs for an OpenTelemetry collector (OTLP over HTTP, in Protocol Buffers).
//!
//! ```text
//!  any thread ── log record ──▶ bounded queue ──▶ exporter: a thread, one request at a time ──▶ {endpoint}/v1/logs
//!  page of /metrics ── every interval ──────────────────▶ │ ─────────────────────────────────▶ {endpoint}/v1/metrics
//! ```
//!
//! A slow or absent collector delays nothing: records that the queue cannot hold are counted as lost, and metrics are cumulative, so the
//! next request makes up for a lost one.
#![forbid(unsafe_code)]

mod export;
mod exporter;
mod logs;
mod message;
mod metrics;
pub mod page;
mod state;

pub use exporter::{Exporter, exported, hand_over, queue};
pub use logs::{RecordLayer, Records};
pub use state::{Exported, MetricsPage, Options};
