//! Log records for the exporter: a bounded queue that no thread waits for.

use std::{
    fmt::Debug,
    sync::{OnceLock, atomic::Ordering},
};

use tokio::sync::mpsc;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{Layer, layer::Context};

use crate::{
    message::{AnyValue, KeyValue, LogRecord, LogsRequest, Resource, ResourceLogs, Scope, ScopeLogs, Value},
    state::{COUNTS, unix_ns},
};

/// Maximum number of waiting records.
const BACKLOG: usize = 8192;

static QUEUE: OnceLock<mpsc::Sender<Record>> = OnceLock::new();

/// Queued records.
pub type Records = mpsc::Receiver<Record>;

/// Record with the module that logged it.
pub struct Record {
    target: String,
    record: LogRecord,
}

pub(crate) fn is_on() -> bool {
    QUEUE.get().is_some()
}

/// Begins to queue records. Only the first caller gets them.
pub(crate) fn turn_on() -> Records {
    let (sender, receiver) = mpsc::channel(BACKLOG);
    let _ = QUEUE.set(sender);
    receiver
}

/// Queues the lines of the log as records.
pub struct RecordLayer;

impl<S: Subscriber> Layer<S> for RecordLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(queue) = QUEUE.get() else { return };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let now = unix_ns();
        let level = *event.metadata().level();
        let record = LogRecord {
            time_unix_nano: now,
            observed_time_unix_nano: now,
            severity_number: severity(level),
            severity_text: level.as_str().to_owned(),
            body: Some(AnyValue { value: Some(Value::String(fields.message)) }),
            attributes: fields.attributes,
        };
        let target = fields.target.unwrap_or_else(|| event.metadata().target().to_owned());
        if queue.try_send(Record { target, record }).is_err() {
            COUNTS.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn severity(level: Level) -> i32 {
    match level {
        Level::TRACE => 1,
        Level::DEBUG => 5,
        Level::INFO => 9,
        Level::WARN => 13,
        Level::ERROR => 17,
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    /// Module of a line from the `log` crate.
    target: Option<String>,
    attributes: Vec<KeyValue>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            ("log.target", Value::String(text)) => self.target = Some(text),
            (name, _) if name.starts_with("log.") => {}
            (name, value) => self.attributes.push(KeyValue::new(name, value)),
        }
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, Value::String(value.to_owned()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, Value::Int(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        let text = || Value::String(value.to_string());
        self.add(field, i64::try_from(value).map_or_else(|_| text(), Value::Int));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, Value::Double(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, Value::Bool(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, Value::String(format!("{value:?}")));
    }
}

/// Records by the module that logged them.
pub(crate) fn request(records: &[Record], resource: &Resource) -> LogsRequest {
    let mut scope_logs: Vec<ScopeLogs> = Vec::new();
    for Record { target, record } in records {
        let is_it = |logs: &ScopeLogs| logs.scope.as_ref().is_some_and(|scope| scope.name == *target);
        let at = scope_logs.iter().position(is_it).unwrap_or_else(|| {
            scope_logs.push(ScopeLogs { scope: Some(Scope::new(target)), log_records: Vec::new() });
            scope_logs.len() - 1
        });
        scope_logs[at].log_records.push(record.clone());
    }
    LogsRequest { resource_logs: vec![ResourceLogs { resource: Some(resource.clone()), scope_logs }] }
}
