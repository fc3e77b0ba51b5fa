//! Log output: filter and format. Written to stderr, because stdout is for results.

use std::{
    env,
    ffi::OsString,
    fmt::{Debug, Display},
    io::{self, IsTerminal, Write},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer, Registry,
    field::RecordFields,
    filter::{FilterExt, Targets, filter_fn},
    fmt::{
        self, FmtContext, FormatEvent, FormatFields,
        format::{Format, Full, Writer},
    },
    layer::SubscriberExt,
    registry::LookupSpan,
    reload,
    util::SubscriberInitExt,
};
use turnpike_config::LogFormat;
use turnpike_wire::escape;

use crate::log_filter::log_filter;
use turnpike_telemetry::RecordLayer;

/// Crates that log every message, or every new state that a message causes. Packets from the Internet must
/// not fill a disk, regardless of the filter.
const SILENCED: [&str; 3] = ["dimpl", "aya", "aya_obj"];

/// Target of the audit log, which the filter does not affect.
const AUDIT: &str = "turnpike::audit";

static IN_FORCE: OnceLock<CurrentFilter> = OnceLock::new();

struct CurrentFilter {
    level: Mutex<String>,
    handle: reload::Handle<Targets, Registry>,
}

/// Installs the process-wide subscriber; later calls have no effect.
pub fn init(level: &str, format: LogFormat) {
    let Ok(filter) = log_filter(level) else {
        // The configuration check rejects invalid filters, so this is a safeguard: a server without a log
        // would be worse.
        return init("info", format);
    };
    let (filter, handle) = reload::Layer::new(filter);
    let colours = are_coloured(io::stderr().is_terminal(), env::var_os("NO_COLOR"));
    let layer = fmt::layer().with_ansi(colours);
    let layer: Box<dyn Layer<Registry> + Send + Sync> = match format {
        LogFormat::Text => layer.fmt_fields(Fields).with_writer(lines).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).with_writer(|| JsonLines(lines())).boxed(),
        LogFormat::Journald => {
            let layer = layer.with_ansi(false).fmt_fields(Fields).event_format(Journal::default());
            layer.with_writer(lines).boxed()
        }
    };
    let quiet = filter_fn(|metadata| !is_silenced(metadata.target()));
    let audit = filter_fn(|metadata| metadata.target() == AUDIT);
    let layer = layer.and_then(RecordLayer).with_filter(filter.or(audit).and(quiet));
    if tracing_subscriber::registry().with(layer).try_init().is_ok() {
        let _ = IN_FORCE.set(CurrentFilter { level: Mutex::new(level.to_owned()), handle });
    }
}

#[must_use]
pub fn level() -> String {
    let level = IN_FORCE.get().map(|now| now.level.lock().unwrap_or_else(PoisonError::into_inner).clone());
    level.unwrap_or_default()
}

/// Changes the filter at run time. If there is an error, the old filter stays in place.
pub fn set_level(level: &str) -> Result<(), String> {
    let filter = log_filter(level)?;
    let Some(now) = IN_FORCE.get() else { return Ok(()) };
    let mut in_force = now.level.lock().unwrap_or_else(PoisonError::into_inner);
    now.handle.reload(filter).map_err(|error| error.to_string())?;
    level.clone_into(&mut in_force);
    Ok(())
}

/// Lines for the journal (sd-daemon(3)): priority first, and without time and process, which the journal
/// adds.
struct Journal(Format<Full, ()>);

impl Default for Journal {
    fn default() -> Self {
        Self(fmt::format().without_time().with_level(false))
    }
}

impl<S, N> FormatEvent<S, N> for Journal
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let priority = match *event.metadata().level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            Level::DEBUG | Level::TRACE => 7,
        };
        write!(writer, "<{priority}>")?;
        self.0.format_event(context, writer, event)
    }
}

/// Formats fields as text, with strings in quotes. Characters that would end or reorder the line are
/// escaped.
struct Fields;

impl<'w> FormatFields<'w> for Fields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> std::fmt::Result {
        let mut line = FieldsOfLine { writer, is_first: true, result: Ok(()) };
        fields.record(&mut line);
        line.result
    }
}

struct FieldsOfLine<'w> {
    writer: Writer<'w>,
    is_first: bool,
    result: std::fmt::Result,
}

impl FieldsOfLine<'_> {
    fn write(&mut self, field: &Field, value: impl Display) {
        // Skips fields that `tracing-log` adds to lines from the `log` crate.
        if field.name().starts_with("log.") {
            return;
        }
        let space = if std::mem::replace(&mut self.is_first, false) { "" } else { " " };
        let writer = &mut self.writer;
        let written = match (field.name(), writer.has_ansi_escapes()) {
            ("message", _) => write!(writer, "{space}{value}"),
            (name, false) => write!(writer, "{space}{name}={value}"),
            (name, true) => write!(writer, "{space}\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m{value}"),
        };
        self.result = self.result.and(written);
    }
}

impl Visit for FieldsOfLine<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.write(field, escape::line(value)),
            _ => self.write(field, format_args!("{:#}", escape::name(value))),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.write(field, escape::line(&format!("{value:?}")));
    }
}

/// Lines that could not be written, for example to a full disk.
static UNWRITTEN: AtomicU64 = AtomicU64::new(0);

pub(crate) fn unwritten() -> u64 {
    UNWRITTEN.load(Ordering::Relaxed)
}

fn lines() -> Lines<io::Stderr> {
    Lines { to: io::stderr(), unwritten: &UNWRITTEN }
}

struct Lines<W> {
    to: W,
    unwritten: &'static AtomicU64,
}

impl<W: Write> Write for Lines<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.to.write_all(line).is_err() {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Writes JSON lines that are safe for a terminal.
struct JsonLines<W>(W);

impl<W: Write> Write for JsonLines<W> {
    /// Receives whole lines: the subscriber writes each line in one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match str::from_utf8(line) {
            Ok(text) => self.0.write_all(escape::json(text).as_bytes())?,
            Err(_) => self.0.write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Colours are used only on a terminal, unless NO_COLOR is set and not empty (no-color.org).
fn are_coloured(terminal: bool, no_color: Option<OsString>) -> bool {
    terminal && no_color.is_none_or(|value| value.is_empty())
}

/// Seconds rounded down to the millisecond, for log lines.
#[must_use]
pub fn seconds(time: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "2^53 ms are 285,000 years")]
    let milliseconds = time.as_millis() as f64;
    milliseconds / 1000.0
}

fn is_silenced(target: &str) -> bool {
    target.split("::").next().is_some_and(|krate| SILENCED.contains(&krate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn per_packet_loggers_are_silent_in_all_their_modules() {
        assert!(is_silenced("dimpl"));
        assert!(is_silenced("dimpl::dtls12::engine"));
        assert!(!is_silenced("turnpike_relay"));
        assert!(!is_silenced("dimplomatic"));
    }

    #[test]
    fn log_has_colours_on_terminals_unless_no_color_is_set() {
        for (terminal, no_color, coloured) in [
            (true, None, true),
            (true, Some(""), true),
            (true, Some("1"), false),
            (true, Some("0"), false),
            (false, None, false),
            (false, Some(""), false),
        ] {
            assert_eq!(
                are_coloured(terminal, no_color.map(OsString::from)),
                coloured,
                "{terminal} {no_color:?}"
            );
        }
    }

    #[test]
    fn lines_lost_to_a_full_disk_are_counted() {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let full = || Lines {
            to: std::fs::OpenOptions::new().write(true).open("/dev/full").expect("null(4)"),
            unwritten: &COUNT,
        };
        for line in ["one\n", "two\n"] {
            full().write_all(line.as_bytes()).expect("counted without an error");
        }
        JsonLines(full()).write_all(b"{}\n").expect("the same");
        assert_eq!(COUNT.load(Ordering::Relaxed), 3);
        let mut disk = Vec::new();
        Lines { to: &mut disk, unwritten: &COUNT }.write_all(b"four\n").expect("room");
        assert_eq!((&disk[..], COUNT.load(Ordering::Relaxed)), (&b"four\n"[..], 3));
    }

    #[test]
    fn seconds_are_rounded_down_to_the_millisecond() {
        assert_eq!(seconds(Duration::from_micros(61_999_499)).to_string(), "61.999");
        assert_eq!(seconds(Duration::from_millis(15)).to_string(), "0.015");
    }
}
