//! Renamed fields. For one version, responses from older programs are understood, and old paths return their list under its old name.

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

/// Gives the fields in a response from an older program their new names. A quote within a JSON string is preceded by a
/// backslash, so `"name":` is always a field.
#[must_use]
pub fn with_new_fields(json: &str) -> Cow<'_, str> {
    RENAMED_FIELDS.iter().fold(Cow::Borrowed(json), |text, RenamedField { old, new }| {
        let [old, new] = [old, new].map(|name| format!("\"{name}\":"));
        if !text.contains(&old) || text.contains(&new) { text } else { text.replace(&old, &new).into() }
    })
}

/// Gives the list in a response its old name, for clients that use an old path.
#[must_use]
pub fn with_old_list(json: &str) -> String {
    json.replace("\"allocations\":[", "\"sessions\":[")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_from_older_programs_are_understood() {
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
