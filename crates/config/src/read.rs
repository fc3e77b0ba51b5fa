//! Typed readers for one value. If the value is invalid, they report its position and the expected form, and
//! reading continues.

use std::{fmt::Display, ops::RangeInclusive, str::FromStr};

use turnpike_strict::{TableEntry, Value, ValueNode};

use super::{Mistake, Secret};

/// Checks passed in by the program, because they need crates that this one does not depend on.
#[derive(Clone, Copy, Debug)]
pub struct Checks {
    /// Fails with the reason if the text is not a log filter.
    pub log_filter: fn(&str) -> Result<(), String>,
    /// Returns the canonical form of a TURN URI (RFC 7065), or the reason why the text is not one.
    pub turn_uri: fn(&str) -> Result<String, String>,
}

impl Checks {
    pub const NONE: Self = Self { log_filter: |_| Ok(()), turn_uri: |uri| Ok(uri.to_owned()) };
}

/// Reads the value of one key. An invalid value is reported as a [`Mistake`] and read as `None`.
pub(crate) struct ValueReader<'a> {
    path: &'static str,
    expected: &'static str,
    secret: bool,
    pub(crate) checks: Checks,
    problems: &'a mut Vec<Mistake>,
}

impl<'a> ValueReader<'a> {
    /// Messages end with "expected" and `expected`; they do not show the value if it is `secret`.
    pub(crate) fn new(
        (path, expected, secret): (&'static str, &'static str, bool),
        checks: Checks,
        problems: &'a mut Vec<Mistake>,
    ) -> Self {
        Self { path, expected, secret, checks, problems }
    }

    pub(crate) fn text(&mut self, node: &ValueNode) -> Option<String> {
        self.as_text(node).map(str::to_owned)
    }

    pub(crate) fn secret(&mut self, node: &ValueNode) -> Option<Secret> {
        self.as_text(node).map(Secret::new)
    }

    fn as_text<'n>(&mut self, node: &'n ValueNode) -> Option<&'n str> {
        match &node.value {
            Value::Text(text) => Some(text.as_str()),
            _ => self.refuse(node, None),
        }
    }

    pub(crate) fn boolean(&mut self, node: &ValueNode) -> Option<bool> {
        match &node.value {
            Value::Boolean(value) => Some(*value),
            Value::Text(text) => match text.as_str() {
                "true" if node.origin.is_textual() => Some(true),
                "false" if node.origin.is_textual() => Some(false),
                text => self.refuse_suggesting(node, None, meant_switch(text)),
            },
            _ => self.refuse(node, None),
        }
    }

    pub(crate) fn integer<T>(&mut self, node: &ValueNode, range: &RangeInclusive<T>) -> Option<T>
    where
        T: TryFrom<i64> + PartialOrd,
    {
        let value = match &node.value {
            Value::Integer(value) => Some(*value),
            Value::Text(text) if node.origin.is_textual() => text.parse().ok(),
            _ => None,
        };
        match value.and_then(|value| T::try_from(value).ok()).filter(|value| range.contains(value)) {
            Some(value) => Some(value),
            None => {
                let text = if let Value::Text(text) = &node.value { text.as_str() } else { "" };
                let meant = meant_number(text, self.expected)
                    .filter(|meant| T::try_from(*meant).is_ok_and(|meant| range.contains(&meant)));
                self.refuse_suggesting(node, None, meant.map(|meant| meant.to_string()).as_deref())
            }
        }
    }

    /// Parses text with `parse`; its error is reported.
    pub(crate) fn parsed<T, E: Display>(
        &mut self,
        node: &ValueNode,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        match parse(self.as_text(node)?) {
            Ok(value) => Some(value),
            Err(error) => {
                let detail = error.to_string();
                self.refuse(node, Some(detail))
            }
        }
    }

    pub(crate) fn parsed_as<T: FromStr>(&mut self, node: &ValueNode) -> Option<T> {
        self.parsed(node, |text| text.trim().parse::<T>().map_err(|_| ""))
    }

    pub(crate) fn list<T>(
        &mut self,
        node: &ValueNode,
        mut item: impl FnMut(&mut Self, &ValueNode) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Value::List(nodes) = &node.value else {
            return self.refuse(node, None);
        };
        let read: Vec<Option<T>> = nodes.iter().map(|node| item(self, node)).collect();
        read.into_iter().collect()
    }

    /// Returns the entries of an inline table, and reports keys that are not `allowed`.
    pub(crate) fn table<'n>(&mut self, node: &'n ValueNode, allowed: &[&str]) -> Option<&'n [TableEntry]> {
        let Value::Table(entries) = &node.value else {
            return self.refuse(node, None);
        };
        let mut good = true;
        for entry in entries.iter().filter(|entry| !allowed.contains(&entry.key.as_str())) {
            good = false;
            self.problems.push(entry.unknown(self.path, allowed));
        }
        good.then_some(entries)
    }

    pub(crate) fn refuse<T>(&mut self, node: &ValueNode, detail: Option<String>) -> Option<T> {
        self.refuse_suggesting(node, detail, None)
    }

    pub(crate) fn refuse_suggesting<T>(
        &mut self,
        node: &ValueNode,
        detail: Option<String>,
        meant: Option<&str>,
    ) -> Option<T> {
        let found = if self.secret { node.kind().to_owned() } else { node.to_string() };
        let problem = match detail.filter(|detail| !detail.is_empty()) {
            Some(detail) => format!("found {found}: {detail}"),
            None => format!("found {found}"),
        };
        let mistake = Mistake::new(&node.origin, self.path, problem, self.expected);
        self.problems.push(mistake.suggesting(meant));
        None
    }
}

/// Recognizes other programs' spellings of true and false.
fn meant_switch(text: &str) -> Option<&'static str> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "on" | "yes" | "1" | "enable" | "enabled" => Some("true"),
        "false" | "off" | "no" | "0" | "disable" | "disabled" => Some("false"),
        _ => None,
    }
}

/// Converts a number with a unit, as other programs write times and sizes, to the expected seconds or bytes.
fn meant_number(text: &str, expected: &str) -> Option<i64> {
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let number: i64 = text.strip_suffix(unit)?.parse().ok()?;
    let (is_time, is_size) =
        (expected.contains("seconds"), expected.contains("bytes") || expected.contains("bits"));
    let factor = match unit.trim() {
        "s" | "sec" if is_time => 1,
        "m" | "min" if is_time => 60,
        "h" if is_time => 3600,
        "d" if is_time => 86_400,
        _ if !is_size => return None,
        "B" | "b" => 1,
        "k" | "K" | "kB" | "KB" => 1000,
        "m" | "M" | "MB" => 1_000_000,
        "g" | "G" | "GB" => 1_000_000_000,
        "Ki" | "KiB" => 1 << 10,
        "Mi" | "MiB" => 1 << 20,
        "Gi" | "GiB" => 1 << 30,
        _ => return None,
    };
    number.checked_mul(factor)
}
