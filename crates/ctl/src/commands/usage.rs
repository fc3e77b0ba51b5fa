//! Output of `turnpike usage`.

use std::{
    borrow::Cow,
    io::{self, Write},
};

use turnpike_api::{UsageEntry, UsageFilter, UsageGapInfo, UsageGrouping, UsageList};
use turnpike_measure::units::{bytes, span};
use turnpike_wire::escape;

use super::{CommandError, ListOutput, OutputFormat, PAGE};
use crate::client::Client;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageFormat {
    Csv,
    Other(OutputFormat),
}

pub fn show_usage(
    client: &Client,
    mut wanted: UsageFilter,
    format: UsageFormat,
    out: &mut dyn Write,
    notices: &mut dyn Write,
) -> Result<(), CommandError> {
    let mut output = Output::new(format, wanted.by.unwrap_or_default());
    wanted.limit = Some(PAGE);
    loop {
        let words = serde_urlencoded::to_string(&wanted).unwrap_or_default();
        let page: UsageList = client.get(&format!("/v1/usage?{words}"))?;
        output.show(out, &page.usage)?;
        if page.next.is_some() {
            // A later page must not move the period.
            (wanted.since, wanted.until, wanted.cursor) = (Some(page.since), Some(page.until), page.next);
            continue;
        }
        output.end(out, &page.gaps)?;
        // CSV and JSON have no place for gaps.
        if !matches!(format, UsageFormat::Other(OutputFormat::Text(_))) {
            page.gaps.iter().try_for_each(|gap| writeln!(notices, "turnpike: {}", sentence(gap)))?;
        }
        return Ok(());
    }
}

enum Output {
    Csv(UsageGrouping, bool),
    List(Box<ListOutput<8>>, OutputFormat),
}

impl Output {
    fn new(format: UsageFormat, by: UsageGrouping) -> Self {
        let name = match by {
            UsageGrouping::User => "USER",
            UsageGrouping::Key => "KEY",
            UsageGrouping::Identifier => "IDENTIFIER",
            UsageGrouping::Realm => "",
            UsageGrouping::Node => "NODE",
            UsageGrouping::Hour => "HOUR",
            UsageGrouping::Day => "DAY",
        };
        match format {
            UsageFormat::Csv => Self::Csv(by, false),
            UsageFormat::Other(format) => {
                let head =
                    ["REALM", name, "ALLOCATIONS", "TIME", "DATAGRAMS", "TO PEERS", "TO CLIENT", "PEAK"];
                Self::List(Box::new(ListOutput::new(format, head)), format)
            }
        }
    }

    fn show(&mut self, out: &mut dyn Write, usage: &[UsageEntry]) -> io::Result<()> {
        match self {
            Self::Csv(by, begun) => {
                if !std::mem::replace(begun, true) {
                    writeln!(out, "{}", head(*by))?;
                }
                usage.iter().try_for_each(|entry| writeln!(out, "{}", line(*by, entry)))
            }
            Self::List(list, _) => list.show(out, usage, row),
        }
    }

    fn end(self, out: &mut dyn Write, gaps: &[UsageGapInfo]) -> io::Result<()> {
        let Self::List(list, format) = self else { return Ok(()) };
        list.end(out, "no usage in this period")?;
        if matches!(format, OutputFormat::Text(_)) {
            for gap in gaps {
                writeln!(out, "{}", format.sentence(&sentence(gap)))?;
            }
        }
        Ok(())
    }
}

fn sentence(gap: &UsageGapInfo) -> String {
    let node = escape::name(&gap.node);
    format!("missing: up to 10 s of usage after {}, when the server on node {node:#} was killed", gap.last)
}

fn row(entry: &UsageEntry) -> [String; 8] {
    let UsageEntry { user, key, identifier, node, begins, .. } = entry;
    let name = [user, key, identifier, node, begins].into_iter().flatten().next();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a duration in seconds")]
    let time = span(entry.seconds as u64);
    [
        entry.realm.clone().unwrap_or_default(),
        name.map_or_else(
            String::new,
            |name| if name.is_empty() { "(none)".to_owned() } else { name.clone() },
        ),
        entry.allocations.to_string(),
        time,
        (entry.to_peer.datagrams + entry.to_client.datagrams).to_string(),
        bytes(entry.to_peer.bytes),
        bytes(entry.to_client.bytes),
        format!("{}/s", bytes(entry.peak_bits_per_second / 8)),
    ]
}

fn labels(by: UsageGrouping) -> &'static str {
    match by {
        UsageGrouping::User => "realm,user",
        UsageGrouping::Key => "key",
        UsageGrouping::Identifier => "identifier",
        UsageGrouping::Realm => "realm",
        UsageGrouping::Node => "node",
        UsageGrouping::Hour | UsageGrouping::Day => "begins",
    }
}

fn head(by: UsageGrouping) -> String {
    format!(
        "{},allocations,seconds,to_peer_datagrams,to_peer_bytes,to_client_datagrams,to_client_bytes,\
         peak_bits_per_second",
        labels(by)
    )
}

fn line(by: UsageGrouping, entry: &UsageEntry) -> String {
    let UsageEntry { user, realm, key, identifier, node, begins, .. } = entry;
    let mut fields: Vec<Cow<'_, str>> = labels(by)
        .split(',')
        .map(|label| match label {
            "user" => user,
            "realm" => realm,
            "key" => key,
            "identifier" => identifier,
            "node" => node,
            _ => begins,
        })
        .map(|text| field(text.as_deref().unwrap_or_default()))
        .collect();
    let UsageEntry { allocations, seconds, to_peer, to_client, peak_bits_per_second, .. } = entry;
    fields.push(allocations.to_string().into());
    fields.push(seconds.to_string().into());
    for number in
        [to_peer.datagrams, to_peer.bytes, to_client.datagrams, to_client.bytes, *peak_bits_per_second]
    {
        fields.push(number.to_string().into());
    }
    fields.join(",")
}

/// A text field (RFC 4180). An apostrophe before `=`, `+`, `-`, `@` and control characters stops spreadsheets
/// from running a name as a formula; control characters are escaped, so that a row stays one line.
fn field(text: &str) -> Cow<'_, str> {
    let is_formula = text.starts_with(|first: char| "=+-@".contains(first) || first.is_control());
    let is_plain = !is_formula && !text.contains(|c: char| "\",".contains(c) || c.is_control());
    if is_plain {
        return Cow::Borrowed(text);
    }
    let mut quoted = String::with_capacity(text.len() + 8);
    quoted.push('"');
    if is_formula {
        quoted.push('\'');
    }
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\"\""),
            c if c.is_control() => quoted.extend(c.escape_unicode()),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    Cow::Owned(quoted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_fields_cannot_break_a_row_or_run_as_a_formula() {
        for (text, written) in [
            ("alice", "alice"),
            ("", ""),
            ("a,b", "\"a,b\""),
            ("say \"hi\"", "\"say \"\"hi\"\"\""),
            ("=1+1", "\"'=1+1\""),
            ("+1", "\"'+1\""),
            ("-1", "\"'-1\""),
            ("@sum", "\"'@sum\""),
            ("\t=1", "\"'\\u{9}=1\""),
            ("a\r\nb", "\"a\\u{d}\\u{a}b\""),
            ("1-1", "1-1"),
        ] {
            assert_eq!(field(text), written, "{text:?}");
        }
        let long = "x".repeat(500);
        assert_eq!(field(&long), long);
    }

    #[test]
    fn a_csv_row_has_as_many_fields_as_its_head() {
        for by in [UsageGrouping::User, UsageGrouping::Key, UsageGrouping::Day] {
            let entry: UsageEntry = serde_json::from_value(serde_json::json!({
                "user": "a", "realm": "r", "key": "k", "begins": "2026-11-30T00:00:00Z", "allocations": 1,
                "seconds": 1.5, "to_peer": { "datagrams": 2, "bytes": 3 }, "to_client": { "datagrams": 4, "bytes": 5 },
                "peak_bits_per_second": 6
            }))
            .expect("an entry");
            assert_eq!(line(by, &entry).split(',').count(), head(by).split(',').count(), "{by:?}");
        }
    }
}
