//! Log filters, as in `log.level` and `--log`.

use tracing_subscriber::filter::{LevelFilter, Targets};

/// Accepts a level, or `target=level` directives separated by commas.
pub fn check_filter(filter: &str) -> Result<(), String> {
    log_filter(filter).map(drop)
}

pub(crate) fn log_filter(filter: &str) -> Result<Targets, String> {
    filter.split(',').map(str::trim).try_fold(Targets::new(), |targets, directive| {
        Ok(match directive.split_once('=') {
            None => targets.with_default(level(directive)?),
            Some((target, level_of)) if is_target(target) => targets.with_target(target, level(level_of)?),
            Some((target, _)) => return Err(format!("{target:?} is not a target, such as turnpike::auth")),
        })
    })
}

/// A word such as `inof`, as a target, would silence everything else.
fn level(word: &str) -> Result<LevelFilter, String> {
    let level = if word.is_empty() { None } else { word.parse().ok() };
    level.ok_or_else(|| format!("{word:?} is not a level"))
}

fn is_target(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|one| one.is_ascii_alphanumeric() || "_:-".contains(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_levels_or_directives() {
        let good =
            ["info", "off", "debug,turnpike_relay=trace", "turnpike::auth=off", "info, turnpike::auth=off"];
        for good in good {
            assert!(check_filter(good).is_ok(), "{good}");
        }
        let bad = [
            "loud=very",
            "a=b=c",
            "a=",
            "inof",
            "",
            "info,",
            "info,turnpike_relay",
            "info,=debug",
            "a[b{c=1}]=debug",
            " \u{7dd}=",
            "\u{e9}=info",
        ];
        for bad in bad {
            assert!(check_filter(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn directives_apply_to_their_target() {
        let filter = log_filter("info, turnpike::auth=off,turnpike_relay=trace").expect("valid");
        for (target, level, is_logged) in [
            ("turnpike", tracing::Level::INFO, true),
            ("turnpike", tracing::Level::DEBUG, false),
            ("turnpike::auth", tracing::Level::ERROR, false),
            ("turnpike_relay::worker", tracing::Level::TRACE, true),
        ] {
            assert_eq!(filter.would_enable(target, &level), is_logged, "{target} {level}");
        }
    }
}
