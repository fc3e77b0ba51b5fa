//! Fields with a new name. For one version, answers have scalars under both names, and answers of older programs
//! are understood.

use std::borrow::Cow;

struct RenamedField {
    old: &'static str,
    new: &'static str,
}

const RENAMED_FIELDS: [RenamedField; 6] = [
    RenamedField { old: "sessions", new: "allocations" },
    RenamedField { old: "max_sessions", new: "max_allocations" },
    RenamedField { old: "max_sessions_per_user", new: "max_allocations_per_user" },
    RenamedField { old: "bits_per_second_per_session", new: "bits_per_second_per_allocation" },
    RenamedField { old: "session_length", new: "max_allocation_duration" },
    RenamedField { old: "with_sessions", new: "with_allocations" },
];

/// Gives the fields in an answer from an older program their new names. A quote within a JSON string follows a backslash, so
/// `"name":` is always a field.
#[must_use]
pub fn with_new_fields(json: &str) -> Cow<'_, str> {
    RENAMED_FIELDS.iter().fold(Cow::Borrowed(json), |text, RenamedField { old, new }| {
        let [old, new] = [old, new].map(|name| format!("\"{name}\":"));
        if !text.contains(&old) || text.contains(&new) { text } else { text.replace(&old, &new).into() }
    })
}

/// Gives the list in an answer its old name, for clients that use an old path.
#[must_use]
pub fn with_old_list(json: &str) -> Cow<'_, str> {
    edit(Cow::Borrowed(json), "allocations", |_, separator, value| {
        value.is_empty().then(|| format!("\"sessions\"{separator}"))
    })
}

/// Replaces each field `name`. `write` gets the white space before it, the colon with the white space after it,
/// and the value if it is a number, a boolean or null (otherwise ""). Within a JSON string a quote has a
/// backslash before it, so that `"name":` is a field wherever it occurs.
fn edit<'t>(
    text: Cow<'t, str>,
    name: &str,
    write: impl Fn(&str, &str, &str) -> Option<String>,
) -> Cow<'t, str> {
    let key = format!("\"{name}\":");
    if !text.contains(&key) {
        return text;
    }
    let (mut edited, mut rest) = (String::with_capacity(text.len() * 5 / 4), &*text);
    while let Some(at) = rest.find(&key) {
        let (before, field) = rest.split_at(at);
        let after = &field[key.len()..];
        let blanks = after.len() - after.trim_start().len();
        let separator = &field[key.len() - 1..key.len() + blanks];
        let value = &after[blanks..];
        let end = value.find(|c: char| !matches!(c, '0'..='9' | 'a'..='z' | 'E' | '+' | '-' | '.'));
        let value = &value[..end.unwrap_or(value.len())];
        let gap = &before[before.trim_end().len()..];
        edited.push_str(before);
        let length = key.len() + blanks + value.len();
        match write(gap, separator, value) {
            Some(field) => edited.push_str(&field),
            None => edited.push_str(&field[..length]),
        }
        rest = &field[length..];
    }
    edited.push_str(rest);
    edited.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_older_programs_are_understood() {
        for (json, new) in [
            (r#"{"sessions":[],"next":null}"#, r#"{"allocations":[],"next":null}"#),
            (r#"{"sessions":3,"max_sessions":5}"#, r#"{"allocations":3,"max_allocations":5}"#),
            (r#"{"sessions":3,"allocations":3}"#, r#"{"sessions":3,"allocations":3}"#),
            (r#"{"session_length":null}"#, r#"{"max_allocation_duration":null}"#),
        ] {
            assert_eq!(with_new_fields(json), new);
        }
    }

    #[test]
    fn an_old_path_answers_with_the_old_list() {
        assert_eq!(
            with_old_list(r#"{"allocations":[{"id":"a"}],"next":null}"#),
            r#"{"sessions":[{"id":"a"}],"next":null}"#
        );
        assert_eq!(with_old_list(r#"{"allocations":3}"#), r#"{"allocations":3}"#);
    }
}
