//! Starts and ends the exporter of a process.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use tokio::sync::oneshot;
use turnpike_wire::secret::Secret;

use crate::{
    export::Export,
    logs::{self, Records},
    message::{KeyValue, Resource},
};

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

/// Counters since the start.
#[must_use]
pub fn exported() -> Option<Exported> {
    let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let requests = COUNTS.requests.each_ref().map(|signal| signal.each_ref().map(get));
    logs::is_on().then(|| Exported { requests, lost: get(&COUNTS.lost) })
}

/// Set when a new process, whose metrics include those of this one, has taken over.
pub(crate) static HANDED_OVER: AtomicBool = AtomicBool::new(false);

/// Exports only log records from now on.
pub fn hand_over() {
    HANDED_OVER.store(true, Ordering::Relaxed);
}

/// Begins to queue log records, if they are exported.
pub fn queue(options: &Options) -> Option<Records> {
    options.endpoint.is_some().then(logs::turn_on)
}

/// Exporter of this process.
pub struct Exporter {
    stop: oneshot::Sender<()>,
    thread: thread::JoinHandle<()>,
}

impl Exporter {
    /// Starts to export the queued records and the metrics. `service` is the subcommand, such as `serve`.
    pub fn start(options: &Options, service: &str, page: MetricsPage, records: Records) -> Option<Self> {
        let endpoint = options.endpoint.clone()?;
        let (stop, stopped) = oneshot::channel();
        let export = Export::new(&endpoint, options, resource(service), page, records);
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
    pub fn finish(self) {
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

pub(crate) fn unix_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or_default()
}
