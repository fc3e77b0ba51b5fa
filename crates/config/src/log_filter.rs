//! What a filter of log lines may be; `log.level` and `--log` take the same.

use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// Whether this is a level, or `target=level` directives separated by commas.
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
    // `EnvFilter` panics at some directives with others, and no target of ours has any.
    if let Some(strange) = filter.chars().find(|character| !character.is_ascii()) {
        return Err(format!("{strange:?} stands in no target and in no level"));
    }
    EnvFilter::builder().parse(filter).map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_levels_or_directives() {
        for good in ["info", "off", "debug,turnpike_relay=trace", "turnpike::auth=off"] {
            assert!(check_filter(good).is_ok(), "{good}");
        }
        for bad in
            ["loud=very", "a=b=c", "inof", "", "info,", "info,turnpike_relay", " \u{7dd}=", "\u{e9}=info"]
        {
            assert!(check_filter(bad).is_err(), "{bad}");
        }
    }
}
