//! Sends requests to the collector.

use std::{io, sync::atomic::Ordering, time::Duration};

use http_body_util::Full;
use hyper::{
    Request, Uri,
    body::Bytes,
    header::{CONTENT_TYPE, HOST, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT},
};
use prost::Message as _;
use rand::Rng as _;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until, timeout},
};
use tracing::{Dispatch, dispatcher, subscriber::NoSubscriber};
use turnpike_client::http::{HttpConnection, host_field};
use turnpike_wire::secret::Secret;

use crate::{
    logs::{self, Record, Records},
    message::{ExportResponse, Resource},
    metrics::{self, Times},
    state::{COUNTS, HANDED_OVER, LAST, MetricsPage, Options, Signal, unix_ns},
};

/// Maximum number of records per request.
const BATCH: usize = 512;
/// Time for which records are collected.
const COLLECT: Duration = Duration::from_secs(1);
/// Timeout of a request, from the name lookup to the end of the response.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pauses after failures.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const LONGEST_RESPONSE: usize = 64 << 10;

pub(crate) struct Export {
    endpoint: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    interval: Duration,
    resource: Resource,
    page: MetricsPage,
    records: Records,
    /// Records of the current request.
    batch: Vec<Record>,
    start: u64,
    /// This program's log; the exporter's own thread has none, so that a request causes no record.
    log: Dispatch,
    connection: Option<HttpConnection>,
    is_failing: bool,
}

/// Result of a request.
enum Outcome {
    /// Number of data points or records that the collector rejected.
    Taken(u64),
    /// Later requests may succeed, after a pause that the collector may have asked for.
    Later(String, Option<Duration>),
    Refused(String),
}

impl Export {
    pub(crate) fn new(
        endpoint: &str,
        options: &Options,
        resource: Resource,
        page: MetricsPage,
        records: Records,
    ) -> Self {
        let header = |header: &(String, Secret)| {
            let name = header.0.parse().ok()?;
            let mut value = HeaderValue::from_str(header.1.reveal()).ok()?;
            value.set_sensitive(true);
            Some((name, value))
        };
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            headers: options.headers.iter().filter_map(header).collect(),
            interval: options.interval,
            resource,
            page,
            records,
            batch: Vec::new(),
            start: unix_ns(),
            log: dispatcher::get_default(Clone::clone),
            connection: None,
            is_failing: false,
        }
    }

    /// Exports until `stopped`, and then once more.
    pub(crate) fn run(mut self, stopped: oneshot::Receiver<()>) {
        let _silent = tracing::subscriber::set_default(NoSubscriber::default());
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return self.tell(|| tracing::error!("nothing is exported: {error}")),
        };
        runtime.block_on(async {
            tokio::select! {
                () = self.export() => {}
                _ = stopped => {}
            }
            let _ = timeout(LAST, self.finish()).await;
        });
        // A name lookup may take half a minute.
        runtime.shutdown_background();
    }

    fn tell(&self, log: impl FnOnce()) {
        dispatcher::with_default(&self.log, log);
    }

    async fn export(&mut self) {
        let mut metrics_due = Instant::now() + self.interval;
        loop {
            tokio::select! {
                () = sleep_until(metrics_due) => {
                    metrics_due += self.interval;
                    self.send_metrics().await;
                }
                // The queue never closes.
                _ = self.records.recv_many(&mut self.batch, BATCH) => self.send_records(&mut metrics_due).await,
            }
        }
    }

    /// Sends records until the collector has taken or refused them. Metrics stay on time.
    async fn send_records(&mut self, metrics_due: &mut Instant) {
        tokio::time::sleep(COLLECT).await;
        self.fill(BATCH);
        let body = self.body();
        let mut pause = FIRST_PAUSE;
        loop {
            let wished = match self.send(Signal::Logs, body.clone()).await {
                Outcome::Taken(rejected) => return self.end_batch(rejected),
                Outcome::Refused(_) => return self.end_batch(self.batch.len() as u64),
                Outcome::Later(_, wished) => wished.unwrap_or_default(),
            };
            let jitter = rand::rng().random_range(0.5..1.0);
            let until = Instant::now() + pause.mul_f64(jitter).max(wished.min(LONGEST_PAUSE));
            pause = (pause * 2).min(LONGEST_PAUSE);
            while *metrics_due < until {
                sleep_until(*metrics_due).await;
                *metrics_due += self.interval;
                self.send_metrics().await;
            }
            sleep_until(until).await;
        }
    }

    /// Adds queued records to the batch.
    fn fill(&mut self, most: usize) {
        while self.batch.len() < most
            && let Ok(record) = self.records.try_recv()
        {
            self.batch.push(record);
        }
    }

    fn body(&self) -> Bytes {
        logs::request(&self.batch, &self.resource).encode_to_vec().into()
    }

    fn end_batch(&mut self, lost: u64) {
        COUNTS.lost.fetch_add(lost, Ordering::Relaxed);
        self.batch.clear();
    }

    async fn send_metrics(&mut self) {
        if HANDED_OVER.load(Ordering::Relaxed) {
            return;
        }
        let times = Times { start: self.start, now: unix_ns() };
        let request = metrics::request(&(self.page)(), &self.resource, times);
        self.send(Signal::Metrics, request.encode_to_vec().into()).await;
    }

    /// Sends the last records and metrics, once each.
    async fn finish(&mut self) {
        self.fill(usize::MAX);
        if !self.batch.is_empty() {
            self.send(Signal::Logs, self.body()).await;
        }
        self.send_metrics().await;
    }

    /// Sends a request and counts it. Failures are logged when they begin and end.
    async fn send(&mut self, signal: Signal, body: Bytes) -> Outcome {
        let path = match signal {
            Signal::Metrics => "/v1/metrics",
            Signal::Logs => "/v1/logs",
        };
        let url = format!("{}{path}", self.endpoint);
        let outcome = match timeout(PATIENCE, self.exchange(&url, body)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => Outcome::Later(error.to_string(), None),
            Err(_) => Outcome::Later(format!("no response within {} s", PATIENCE.as_secs()), None),
        };
        let why = match &outcome {
            Outcome::Taken(_) => None,
            Outcome::Later(why, _) | Outcome::Refused(why) => Some(why),
        };
        COUNTS.requests[signal as usize][usize::from(why.is_some())].fetch_add(1, Ordering::Relaxed);
        if why.is_some() {
            self.connection = None;
        }
        match why {
            Some(why) if !self.is_failing => self.tell(|| tracing::warn!("cannot export to {url}: {why}")),
            None if self.is_failing => self.tell(|| tracing::info!("exporting to {url} again")),
            _ => {}
        }
        self.is_failing = why.is_some();
        outcome
    }

    async fn exchange(&mut self, url: &str, body: Bytes) -> io::Result<Outcome> {
        let uri: Uri = url.parse().map_err(io::Error::other)?;
        let mut connection = match self.connection.take().filter(|open| !open.is_closed()) {
            Some(connection) => connection,
            None => HttpConnection::open(&uri, |_| Ok(())).await?,
        };
        let mut request = Request::post(uri.path_and_query().map_or("/", |path| path.as_str()))
            .header(HOST, HeaderValue::from_str(host_field(&uri)).map_err(io::Error::other)?)
            .header(USER_AGENT, concat!("turnpike/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, "application/x-protobuf")
            .body(Full::new(body))
            .map_err(io::Error::other)?;
        request.headers_mut().extend(self.headers.iter().cloned());
        let response = connection.send(request, LONGEST_RESPONSE).await?;
        let status = response.status();
        if response.body().is_some() {
            self.connection = Some(connection);
        }
        if status.is_success() {
            let response = response.into_body().and_then(|body| ExportResponse::decode(body).ok());
            let rejected = response.and_then(|response| response.partial_success).map_or(0, |it| it.rejected);
            return Ok(Outcome::Taken(u64::try_from(rejected).unwrap_or_default()));
        }
        let why = format!("response {status}");
        // The codes that a client must retry (OTLP specification).
        Ok(match status.as_u16() {
            429 | 502..=504 => {
                let wished = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
                let wished = wished.and_then(|value| value.parse().ok()).map(Duration::from_secs);
                Outcome::Later(why, wished)
            }
            _ => Outcome::Refused(why),
        })
    }
}
