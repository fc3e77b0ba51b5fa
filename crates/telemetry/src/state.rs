//! Options and counters of the exporter.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use turnpike_wire::secret::Secret;

/// Time limit of the last requests of a program that stops.
pub(crate) const LAST: Duration = Duration::from_secs(3);

/// Counters of the exporter.
#[derive(Debug, Default)]
pub(crate) struct ExportCounts {
    /// Successful and failed requests with metrics, and with logs.
    pub(crate) requests: [[AtomicU64; 2]; 2],
    /// Log records that did not reach the collector.
    pub(crate) lost: AtomicU64,
}

pub(crate) static COUNTS: ExportCounts =
    ExportCounts { requests: [const { [const { AtomicU64::new(0) }; 2] }; 2], lost: AtomicU64::new(0) };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Metrics,
    Logs,
}

/// Collector.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Base URL; `None` exports nothing.
    pub endpoint: Option<String>,
    /// Additional header fields of requests.
    pub headers: Vec<(String, Secret)>,
    /// Time between exports of metrics.
    pub interval: Duration,
}

/// Renders `/metrics`.
pub type MetricsPage = Arc<dyn Fn() -> String + Send + Sync>;

/// Values of [`ExportCounts`]; `None` if nothing is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Indexed like `ExportCounts::requests`.
    pub requests: [[u64; 2]; 2],
    pub lost: u64,
}

/// Set when a new process, whose metrics include those of this one, has taken over.
pub(crate) static HANDED_OVER: AtomicBool = AtomicBool::new(false);

pub(crate) fn unix_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or_default()
}
