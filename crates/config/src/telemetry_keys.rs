//! `[telemetry]`: metrics and logs for an OpenTelemetry collector.

use turnpike_convert::toml_text::{list, quoted};
use turnpike_wire::secret::MASK;

use super::{Secret, event_keys::is_url, key::ValueKind};

#[derive(Clone, Debug, PartialEq)]
pub struct TelemetrySettings {
    /// Base URL of the collector; `None` exports nothing.
    pub endpoint: Option<String>,
    /// Additional header fields of requests.
    pub headers: Vec<(String, Secret)>,
    /// Seconds between exports of metrics.
    pub interval: u32,
}

impl Default for TelemetrySettings {
    fn default() -> Self {
        Self { endpoint: None, headers: Vec::new(), interval: 60 }
    }
}

pub(super) const ENDPOINT: ValueKind<Option<String>> = ValueKind::one(
    "the URL of a collector (OTLP over HTTP), such as \"http://127.0.0.1:4318\", or \"\" for none",
    |reader, node| {
        let url = reader.text(node)?;
        match is_url(&url) {
            _ if url.is_empty() => Some(None),
            Ok(()) if url.contains('?') => reader.refuse(node, Some("it contains a query".to_owned())),
            Ok(()) => Some(Some(url)),
            Err(why) => reader.refuse(node, Some(why.to_owned())),
        }
    },
    |url| quoted(url.as_deref().unwrap_or_default()),
);

pub(super) const HEADERS: ValueKind<Vec<(String, Secret)>> = ValueKind::list(
    "a list of header fields such as \"Authorization: Bearer TOKEN\"",
    |reader, node| reader.list(node, |reader, node| reader.parsed(node, header)),
    |headers| list(headers.iter().map(|_| quoted(MASK))),
)
.secret();

/// RFC 9110 section 5: a token, and visible characters with single spaces or tabs between them.
fn header(field: &str) -> Result<(String, Secret), &'static str> {
    let (name, value) = field.split_once(':').ok_or("it has no colon")?;
    let is_token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    if name.is_empty() || !name.chars().all(is_token) {
        return Err("the name of the field is invalid");
    }
    let value = value.trim_matches(' ');
    if value.is_empty() || !value.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        return Err("the value of the field is empty or contains characters that header fields cannot");
    }
    Ok((name.to_owned(), Secret::new(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_fields_have_a_name_and_a_value() {
        let (name, value) = header("Authorization:  Bearer a b:c ").expect("a header field");
        assert_eq!((&*name, value.reveal()), ("Authorization", "Bearer a b:c"));
        for bad in ["", "a", ": b", "a b: c", "a:", "a: \r\nb: c", "a: \u{e9}"] {
            assert!(header(bad).is_err(), "{bad:?}");
        }
    }
}
