//! Metrics and logs for an OpenTelemetry collector (OTLP over HTTP, in Protocol Buffers).
//!
//! ```text
//!  any thread ── log record ──▶ bounded queue ──▶ exporter: a thread, one request at a time ──▶ {endpoint}/v1/logs
//!  page of /metrics ── every interval ──────────────────▶ │ ─────────────────────────────────▶ {endpoint}/v1/metrics
//! ```
//!
//! A slow or absent collector delays nothing: records that the queue cannot hold are counted as lost, and metrics are cumulative, so the
//! next request makes up for a lost one.

mod export;
mod logs;
mod message;
mod metrics;

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use tokio::sync::oneshot;
use turnpike_config::TelemetrySettings;

use crate::exposition::MetricsPage;
use export::Export;
pub(crate) use logs::{RecordLayer, Records};
use message::{KeyValue, Resource};

/// Time limit of the last requests of a program that stops.
const LAST: Duration = Duration::from_secs(3);

/// Counters of the exporter.
#[derive(Debug, Default)]
pub(crate) struct ExportCounts {
    /// Successful and failed requests with metrics, and with logs.
    requests: [[AtomicU64; 2]; 2],
    /// Log records that did not reach the collector.
    lost: AtomicU64,
}

static COUNTS: ExportCounts =
    ExportCounts { requests: [const { [const { AtomicU64::new(0) }; 2] }; 2], lost: AtomicU64::new(0) };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Signal {
    Metrics,
    Logs,
}

/// Values of [`ExportCounts`]; `None` if nothing is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Indexed like `ExportCounts::requests`.
    pub requests: [[u64; 2]; 2],
    pub lost: u64,
}

/// Counters since the start.
#[must_use]
pub(crate) fn exported() -> Option<Exported> {
    let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let requests = COUNTS.requests.each_ref().map(|signal| signal.each_ref().map(get));
    logs::is_on().then(|| Exported { requests, lost: get(&COUNTS.lost) })
}

/// Set when a new process, whose metrics include those of this one, has taken over.
static HANDED_OVER: AtomicBool = AtomicBool::new(false);

/// Exports only log records from now on.
pub(crate) fn hand_over() {
    HANDED_OVER.store(true, Ordering::Relaxed);
}

/// Begins to queue log records, if they are exported.
pub(crate) fn queue(settings: &TelemetrySettings) -> Option<Records> {
    settings.endpoint.is_some().then(logs::turn_on)
}

/// Exporter of this process.
pub(crate) struct Exporter {
    stop: oneshot::Sender<()>,
    thread: thread::JoinHandle<()>,
}

impl Exporter {
    /// Starts to export the queued records and the metrics. `service` is the subcommand, such as `serve`.
    pub(crate) fn start(
        settings: &TelemetrySettings,
        service: &str,
        page: MetricsPage,
        records: Records,
    ) -> Option<Self> {
        let endpoint = settings.endpoint.clone()?;
        let (stop, stopped) = oneshot::channel();
        let export = Export::new(&endpoint, settings, resource(service), page, records);
        let thread = thread::Builder::new().name("otlp".to_owned()).spawn(move || export.run(stopped));
        match thread {
            Ok(thread) => Some(Self { stop, thread }),
            Err(error) => {
                tracing::error!("nothing is exported to {endpoint}: {error}");
                None
            }
        }
    }

    /// Sends the last metrics and log records. Blocks for at most [`LAST`].
    pub(crate) fn finish(self) {
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

/// Attributes of this process (OpenTelemetry's semantic conventions).
fn resource(service: &str) -> Resource {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    // The service manager's ID stays the same across upgrades.
    let instance = std::env::var("INVOCATION_ID")
        .unwrap_or_else(|_| format!("{host}-{}-{}", std::process::id(), unix_ns()));
    let attributes = [
        ("service.name", format!("turnpike-{service}")),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", instance),
        ("host.name", host),
    ];
    Resource { attributes: attributes.into_iter().map(|(key, value)| KeyValue::text(key, value)).collect() }
}

fn unix_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or_default()
}
