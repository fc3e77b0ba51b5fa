//! Log filters, as in `log.level` and `--log`.

use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// Accepts a level, or `target=level` directives separated by commas.
pub fn check_filter(filter: &str) -> Result<(), String> {
    log_filter(filter).map(drop)
}

pub(crate) fn log_filter(filter: &str) -> Result<EnvFilter, String> {
    // `EnvFilter` interprets a single word that is not a level as a target: `inof` would silence
    // everything else. An empty filter means the level "error".
    for directive in filter.split(',').map(str::trim) {
        let is_level = !directive.is_empty() && directive.parse::<LevelFilter>().is_ok();
        if !is_level && !directive.contains(['=', '[']) {
            return Err(format!("{directive:?} is not a level"));
        }
    }
    // `EnvFilter` panics on some non-ASCII directives, and none of our targets has any.
    if let Some(strange) = filter.chars().find(|character| !character.is_ascii()) {
        return Err(format!("{strange:?} is not allowed in a target or level"));
    }
    // Field values are not treated as regular expressions: an expression of 600 letters could use up all
    // memory.
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
        // Compiled as a regular expression, this filter would need gigabytes of memory.
        assert!(check_filter(&format!("info,a[b{{c=.*a{}}}]=debug", ".".repeat(60))).is_ok());
        for bad in
            ["loud=very", "a=b=c", "inof", "", "info,", "info,turnpike_relay", " \u{7dd}=", "\u{e9}=info"]
        {
            assert!(check_filter(bad).is_err(), "{bad}");
        }
    }
}
