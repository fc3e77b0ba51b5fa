//! Filters of log lines, as `log.level` and `--log` have them.

use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// Checks that this is a level, or `target=level` directives separated by commas.
///
/// # Errors
/// The directive that is wrong.
pub fn check_filter(filter: &str) -> Result<(), String> {
    log_filter(filter).map(drop)
}

/// The filter itself.
///
/// # Errors
/// As [`check_filter`].
pub(crate) fn log_filter(filter: &str) -> Result<EnvFilter, String> {
    // A lone word that is no level is a target to `EnvFilter`, with all its lines: `inof` would silence everything else.
    // And no word at all is the level "error".
    for directive in filter.split(',').map(str::trim) {
        let is_level = !directive.is_empty() && directive.parse::<LevelFilter>().is_ok();
        if !is_level && !directive.contains(['=', '[']) {
            return Err(format!("{directive:?} is no level"));
        }
    }
    // `EnvFilter` panics at some directives with others, and no target of ours has any.
    if let Some(strange) = filter.chars().find(|character| !character.is_ascii()) {
        return Err(format!("{strange:?} stands in no target and in no level"));
    }
    // Values of fields are no patterns: the tables of a pattern of 600 letters can be larger than all memory.
    EnvFilter::builder().with_regex(false).parse(filter).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_levels_or_directives() {
        for good in ["info", "off", "debug,turnpike_relay=trace", "turnpike::auth=off"] {
            assert!(check_filter(good).is_ok(), "{good}");
        }
        // As a pattern it would need gigabytes.
        assert!(check_filter(&format!("info,a[b{{c=.*a{}}}]=debug", ".".repeat(60))).is_ok());
        for bad in
            ["loud=very", "a=b=c", "inof", "", "info,", "info,turnpike_relay", " \u{7dd}=", "\u{e9}=info"]
        {
            assert!(check_filter(bad).is_err(), "{bad}");
        }
    }
}
