//! Log lines: what passes, how they look. They go to stderr, because stdout belongs to results.

use std::{
    env,
    ffi::OsString,
    io::{self, IsTerminal},
    sync::OnceLock,
    time::Duration,
};

use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    filter::{FilterExt, filter_fn},
    fmt,
    layer::SubscriberExt,
    reload,
    util::SubscriberInitExt,
};
use turnpike_config::LogFormat;

/// These crates log per message, or what a message has made them keep, and a stranger's packets must not fill a disk, whatever the
/// filter says.
const SILENCED: [&str; 3] = ["dimpl", "aya", "aya_obj"];

/// The filter of the process-wide subscriber.
static IN_FORCE: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Installs the process-wide subscriber; later calls change nothing.
pub fn init(level: &str, format: LogFormat) {
    let Ok(filter) = EnvFilter::builder().parse(level) else {
        // The configuration has been checked for this; a server without log lines would be worse.
        return init("info", format);
    };
    let (filter, handle) = reload::Layer::new(filter);
    let colours = are_coloured(io::stderr().is_terminal(), env::var_os("NO_COLOR"));
    let layer = fmt::layer().with_writer(io::stderr).with_ansi(colours);
    let layer: Box<dyn Layer<Registry> + Send + Sync> = match format {
        LogFormat::Text => layer.boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    let quiet = filter_fn(|metadata| !is_silenced(metadata.target()));
    if tracing_subscriber::registry().with(layer.with_filter(filter.and(quiet))).try_init().is_ok() {
        let _ = IN_FORCE.set(handle);
    }
}

/// From now on this passes.
///
/// # Errors
/// What is wrong with it; nothing has changed then.
pub fn set_level(level: &str) -> Result<(), String> {
    let filter = EnvFilter::builder().parse(level).map_err(|error| error.to_string())?;
    let Some(handle) = IN_FORCE.get() else { return Ok(()) };
    handle.reload(filter).map_err(|error| error.to_string())
}

/// Colours are for a terminal, and for those who have not set NO_COLOR, to whatever but nothing (no-color.org).
fn are_coloured(terminal: bool, no_color: Option<OsString>) -> bool {
    terminal && no_color.is_none_or(|value| value.is_empty())
}

/// As log lines have it: a number of seconds, to the millisecond.
pub(crate) fn seconds(time: Duration) -> f64 {
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
    fn colours_are_for_terminals_without_no_color() {
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
    fn seconds_are_told_to_the_millisecond() {
        assert_eq!(seconds(Duration::from_micros(61_999_499)).to_string(), "61.999");
        assert_eq!(seconds(Duration::from_millis(15)).to_string(), "0.015");
    }
}
