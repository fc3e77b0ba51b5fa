//! Log lines: what passes, how they look. They go to stderr, because stdout belongs to results.

use std::io::{self, IsTerminal};

use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    filter::{FilterExt, LevelFilter, filter_fn},
    fmt,
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use crate::config::LogFormat;

/// These crates log per message, or what a message has made them keep, and a stranger's packets must not fill a disk, whatever the
/// filter says.
const SILENCED: [&str; 4] = ["stun_types", "turn_types", "stun_proto", "dimpl"];

/// Whether this is a filter that [`init`] takes: a level, or `target=level` directives separated by commas.
///
/// # Errors
/// Which directive is wrong.
pub fn check_filter(filter: &str) -> Result<(), String> {
    // A lone word that is no level is a target to `EnvFilter`, with all its lines: `inof` would silence everything else.
    // And no word at all is the level "error".
    for directive in filter.split(',').map(str::trim) {
        let is_level = !directive.is_empty() && directive.parse::<LevelFilter>().is_ok();
        if !is_level && !directive.contains(['=', '[']) {
            return Err(format!("{directive:?} is no level"));
        }
    }
    EnvFilter::builder().parse(filter).map(drop).map_err(|error| error.to_string())
}

/// Installs the process-wide subscriber; later calls change nothing.
pub fn init(filter: &str, format: LogFormat) {
    let Ok(filter) = EnvFilter::builder().parse(filter) else {
        // Only a caller who skipped `check_filter` gets here; a server without log lines would be worse.
        return init("info", format);
    };
    let layer = fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    let layer: Box<dyn Layer<Registry> + Send + Sync> = match format {
        LogFormat::Text => layer.boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    let quiet = filter_fn(|metadata| !is_silenced(metadata.target()));
    let _ = tracing_subscriber::registry().with(layer.with_filter(filter.and(quiet))).try_init();
}

fn is_silenced(target: &str) -> bool {
    let krate = target.split("::").next().unwrap_or(target);
    SILENCED.contains(&krate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn per_packet_loggers_are_silent_in_all_their_modules() {
        assert!(is_silenced("stun_types"));
        assert!(is_silenced("stun_types::message"));
        assert!(is_silenced("turn_types::attribute"));
        assert!(!is_silenced("turnpike_relay"));
        assert!(!is_silenced("stun_types_of_ours"));
    }

    #[test]
    fn filters_are_levels_or_directives() {
        for good in ["info", "off", "debug,turnpike_relay=trace", "turnpike::auth=off"] {
            assert!(check_filter(good).is_ok(), "{good}");
        }
        for bad in ["loud=very", "a=b=c", "inof", "", "info,", "info,turnpike_relay"] {
            assert!(check_filter(bad).is_err(), "{bad}");
        }
    }
}
