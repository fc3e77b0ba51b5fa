//! TOML files read strictly: an unknown key is an error that names file, line and the nearest key.

use std::{fs, path::Path};

use serde::de::DeserializeOwned;

use crate::error::LabError;

/// Reads `path` into `T`, which denies unknown fields.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, LabError> {
    let text = fs::read_to_string(path)
        .map_err(|error| LabError::usage(format!("cannot read {}: {error}", path.display())))?;
    parse(&path.display().to_string(), &text)
}

/// As [`read`], from text; `name` stands in messages where the path would.
pub(crate) fn parse<T: DeserializeOwned>(name: &str, text: &str) -> Result<T, LabError> {
    toml::from_str(text).map_err(|error| {
        let place = match error.span() {
            Some(span) => {
                let (line, column) = position(text, span.start);
                format!("{name}:{line}:{column}")
            }
            None => name.to_owned(),
        };
        LabError::usage(format!("{place}: {}", explain(error.message())))
    })
}

/// Line and column of a byte offset, both from 1, the column in characters.
fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// Serde names the unknown key and all known ones between backticks; a reader wants the nearest first.
fn explain(message: &str) -> String {
    let message = message.trim().replace('\n', ", ");
    let Some(rest) = message.strip_prefix("unknown field `") else { return message };
    let names: Vec<&str> = rest.split('`').step_by(2).filter(|name| !name.is_empty()).collect();
    let Some((unknown, known)) = names.split_first() else { return message };
    match nearest(unknown, known.iter().copied()) {
        Some(meant) => format!("unknown key \"{unknown}\"; did you mean \"{meant}\"?"),
        None => format!("unknown key \"{unknown}\"; known here: {}", known.join(", ")),
    }
}

/// The candidate that a mistyped word most likely meant: close by Damerau-Levenshtein distance, or none.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (word.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only their names matter")]
    struct Example {
        rounds: Option<u32>,
        duration: Option<f64>,
        inner: Option<Inner>,
    }

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only their names matter")]
    struct Inner {
        namespace: Option<String>,
    }

    fn refusal(text: &str) -> String {
        parse::<Example>("x.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_the_nearest_key() {
        assert_eq!(
            refusal("rounds = 6\nduratoin = 3\n"),
            "x.toml:2:1: unknown key \"duratoin\"; did you mean \"duration\"?"
        );
        assert_eq!(
            refusal("\n[inner]\nnamspace = 'a'\n"),
            "x.toml:3:1: unknown key \"namspace\"; did you mean \"namespace\"?"
        );
    }

    #[test]
    fn a_key_like_no_other_gets_the_list() {
        assert_eq!(
            refusal("colour = 1\n"),
            "x.toml:1:1: unknown key \"colour\"; known here: rounds, duration, inner"
        );
    }

    #[test]
    fn a_wrong_type_and_broken_syntax_have_a_place_too() {
        assert!(refusal("rounds = 'six'\n").starts_with("x.toml:1:10: "), "{}", refusal("rounds = 'six'\n"));
        assert!(refusal("rounds = 1\nrounds ==\n").starts_with("x.toml:2:"));
    }
}
