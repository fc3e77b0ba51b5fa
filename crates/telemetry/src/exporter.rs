//! Starts and ends the exporter of a process.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use tokio::sync::oneshot;

use crate::{
    export::Export,
    logs::{self, Records},
    message::{KeyValue, Resource},
    state::{COUNTS, Exported, HANDED_OVER, MetricsPage, Options, unix_ns},
};

/// Counters since the start.
#[must_use]
pub fn exported() -> Option<Exported> {
    let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let requests = COUNTS.requests.each_ref().map(|signal| signal.each_ref().map(get));
    logs::is_on().then(|| Exported { requests, lost: get(&COUNTS.lost) })
}

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

    /// Sends the last metrics and log records. Blocks for a few seconds at most.
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
