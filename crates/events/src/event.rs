//! An event as a CloudEvent in JSON (CloudEvents 1.0, structured mode).

use std::{borrow::Cow, fmt::Write as _};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use turnpike_wire::escape;

/// Type of the event that reports dropped events.
pub const LOST: &str = "lost";

/// An event without id and sequence number, which differ for each receiver.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) kind: &'static str,
    /// Members after the sequence number, and the closing brace.
    rest: Box<str>,
}

/// Data of a [`LOST`] event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LostEvents {
    /// Number of dropped events; absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) count: Option<u64>,
    /// Sequence numbers of the first and the last one; absent if they had none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last: Option<u64>,
    pub(crate) reason: Cow<'static, str>,
}

impl LostEvents {
    pub(crate) fn unnumbered(count: u64, reason: &'static str) -> Self {
        Self { count: Some(count), first: None, last: None, reason: reason.into() }
    }

    /// Adds these losses to those with the same reason.
    pub(crate) fn add_to(self, reports: &mut Vec<Self>) {
        match reports.iter_mut().find(|report| report.reason == self.reason) {
            Some(report) => {
                report.count = report.count.zip(self.count).map(|(one, other)| one + other);
                report.first = report.first.into_iter().chain(self.first).min();
                report.last = report.last.max(self.last);
            }
            None => reports.push(self),
        }
    }
}

impl Event {
    pub(crate) fn new(source: &str, kind: &'static str, data: &impl Serialize) -> Self {
        let json = |text: Result<String, _>| text.unwrap_or_else(|_: serde_json::Error| "null".to_owned());
        // Escaped like every JSON that turnpike writes, so that logs of receivers are safe to display.
        let data = json(serde_json::to_string(data));
        let rest = format!(
            "\"source\":{},\"type\":\"{kind}\",\"time\":\"{:.3}\",\"datacontenttype\":\"application/json\",\"data\":{}}}",
            json(serde_json::to_string(source)),
            Timestamp::now(),
            escape::json(&data)
        );
        Self { kind, rest: rest.into() }
    }

    /// Appends one line of JSON, without a line end.
    pub(crate) fn write(&self, id: impl std::fmt::Display, sequence: u64, to: &mut String) {
        // The sequence extension is text whose order is that of the events, hence the fixed length.
        let _ = write!(
            to,
            "{{\"specversion\":\"1.0\",\"id\":\"{id}\",\"sequence\":\"{sequence:020}\",{}",
            self.rest
        );
    }

    /// Approximate memory use in bytes.
    pub(crate) fn size(&self) -> usize {
        self.rest.len() + 128
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use turnpike_testkit::names;

    use super::*;

    #[test]
    fn every_username_is_valid_json_on_one_line() {
        let long = "\"\u{1}\n".repeat(169);
        for user in names::CORPUS.iter().map(|(name, _)| *name).chain([&*long]) {
            let event = Event::new("/turnpike/no\"de", "allocation.begin", &json!({ "user": user }));
            let mut text = String::new();
            event.write("a-7", 7, &mut text);
            assert!(!text.contains('\n'), "{text}");
            let read: Value = serde_json::from_str(&text).expect("valid JSON");
            assert_eq!(read["data"]["user"], *user);
            assert_eq!(read["source"], "/turnpike/no\"de");
            assert_eq!((&read["id"], &read["specversion"]), (&json!("a-7"), &json!("1.0")));
            assert_eq!(read["sequence"], "00000000000000000007");
            let time: Timestamp = read["time"].as_str().expect("text").parse().expect("RFC 3339");
            assert!(time > Timestamp::UNIX_EPOCH);
        }
    }
}
