//! Detects the format of rule files, and reads the tables of our own format.

use std::fmt;

use turnpike_convert::forward::{draft::Draft, oxidinetd};
use turnpike_strict::{TableEntry, Value, nearest};

use super::{rule_keys::read_rules, settings::FORWARD_KEYS};
use crate::{Mistake, Origin, key::KeySpec};

pub(crate) const INCLUDE: &str = "include";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Turnpike,
    /// The format of rinetd.conf; also covers oxidinetd's `.conf`, which is a subset.
    Rinetd,
    Oxidinetd,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Turnpike => "turnpike's rules (TOML)",
            Self::Rinetd => "rinetd.conf",
            Self::Oxidinetd => "oxidinetd's rules (TOML)",
        })
    }
}

/// Reads `[[rule]]`. Missing keys are not reported if the TOML is broken.
pub(super) fn read_tables(entry: &TableEntry, broken: bool, problems: &mut Vec<Mistake>) -> Vec<Draft> {
    let Value::List(items) = &entry.node.value else {
        let what = if matches!(entry.node.value, Value::Table(_)) {
            "it is a single table"
        } else {
            "it is a single value, not a table"
        };
        problems.push(no_table(&entry.origin, what));
        return Vec::new();
    };
    let mut drafts = Vec::new();
    for item in items {
        match &item.value {
            Value::Table(entries) => {
                let mut found = Vec::new();
                drafts.extend(read_rules(entries, &item.origin, &mut found));
                problems.extend(found.into_iter().filter(|problem| !broken || problem.origin != item.origin));
            }
            _ => problems.push(no_table(&item.origin, "it is a single value, not a table")),
        }
    }
    drafts
}

/// Detects `[[rules]]` and similar typos.
pub(super) fn is_mistyped_rule(key: &str) -> bool {
    let sections = FORWARD_KEYS.iter().map(KeySpec::section);
    let known = sections.clone().any(|section| section == key);
    !known && nearest(key, sections.chain(["rule"])) == Some("rule")
}

pub(super) fn no_section(entry: &TableEntry) -> Mistake {
    Mistake::new(&entry.origin, entry.key.clone(), "unknown section", "rules as tables, [[rule]]")
        .suggesting(Some("rule"))
}

fn no_table(origin: &Origin, what: &str) -> Mistake {
    Mistake::new(origin, "rule", what, "tables, [[rule]]")
}

/// Judges by the first line with content: TOML starts with a key and `=`, or with `[`, but so does an IPv6
/// address in brackets in a rinetd.conf.
pub(super) fn looks_like_toml(text: &str) -> bool {
    let Some(line) = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'))
    else {
        return true;
    };
    if let Some(inner) = line.strip_prefix('[') {
        let inner = inner.split(']').next().unwrap_or_default();
        return inner.parse::<std::net::Ipv6Addr>().is_err();
    }
    line.split_once('=').is_some_and(|(key, _)| {
        let key = key.trim();
        !key.is_empty() && !key.contains(|c: char| c.is_whitespace() || c == '[')
    })
}

/// Judges by the keys. A mistyped key is decisive only if it does not also resemble one of ours.
pub(super) fn is_oxidinetd(entries: &[TableEntry]) -> bool {
    let ours = || FORWARD_KEYS.iter().map(KeySpec::section).chain(["rule", INCLUDE]);
    let theirs = |key: &str| oxidinetd::TOP.contains(&key);
    if entries.iter().any(|entry| theirs(&entry.key)) {
        return true;
    }
    let known = entries.iter().any(|entry| ours().any(|section| section == entry.key));
    !known
        && entries.iter().any(|entry| {
            nearest(&entry.key, ours()).is_none() && nearest(&entry.key, oxidinetd::TOP).is_some()
        })
}
