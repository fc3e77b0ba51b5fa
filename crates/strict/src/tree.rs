//! A TOML file as a tree of nodes with their positions.

use std::{collections::BTreeSet, fmt, fs, path::Path};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};
use zeroize::Zeroizing;

use crate::{Mistake, Origin, nearest};

#[derive(Clone)]
pub struct ValueNode {
    pub value: Value,
    pub origin: Origin,
}

#[derive(Clone)]
pub enum Value {
    /// Zeroized on drop: it may be a password.
    Text(Zeroizing<String>),
    Integer(i64),
    Boolean(bool),
    List(Vec<ValueNode>),
    /// Keeps the file's order.
    Table(Vec<TableEntry>),
    /// Name of a TOML type that no key uses.
    Other(&'static str),
}

impl Value {
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(Zeroizing::new(text.into()))
    }
}

#[derive(Clone)]
pub struct TableEntry {
    pub key: String,
    pub origin: Origin,
    pub node: ValueNode,
}

pub fn find<'e>(entries: &'e [TableEntry], key: &str) -> Option<&'e ValueNode> {
    entries.iter().find(|entry| entry.key == key).map(|entry| &entry.node)
}

impl TableEntry {
    /// Error for an entry of `table` that is not in `names`.
    pub fn unknown(&self, table: &str, names: &[&str]) -> Mistake {
        let (key, expected) = (format!("{table}.{}", self.key), format!("one of {}", names.join(", ")));
        Mistake::new(&self.origin, key, "unknown key", expected)
            .suggesting_instead(nearest(&self.key, names.iter().copied()))
    }
}

impl ValueNode {
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match &self.value {
            Value::Text(_) => "a string",
            Value::Integer(_) => "an integer",
            Value::Boolean(_) => "a boolean",
            Value::List(_) => "an array",
            Value::Table(_) => "a table",
            Value::Other(kind) => kind,
        }
    }
}

impl fmt::Display for ValueNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Value::Text(text) if self.origin.is_textual() => write!(f, "{:?}", text.as_str()),
            Value::Text(text) => write!(f, "the string {:?}", text.as_str()),
            Value::Integer(value) => write!(f, "the integer {value}"),
            Value::Boolean(value) => write!(f, "the boolean {value}"),
            Value::List(_) | Value::Table(_) => f.write_str(self.kind()),
            Value::Other(kind) => write!(f, "a value of type {kind}"),
        }
    }
}

/// Text of a configuration file, which may contain passwords.
pub fn file_text(path: &Path, problems: &mut Vec<Mistake>) -> Option<Zeroizing<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Some(Zeroizing::new(text)),
        Err(error) => {
            problems.push(Mistake::new(
                &Origin::file(path),
                "",
                format!("cannot read the configuration file: {error}"),
                "a readable file in UTF-8",
            ));
            None
        }
    }
}

/// Parses a file into its top-level entries; syntax errors go to `problems`.
pub fn parse_file(path: &Path, text: &str, problems: &mut Vec<Mistake>) -> Vec<TableEntry> {
    let places = LineIndex { path, text };
    let (table, errors) = DeTable::parse_recoverable(text);
    places.report(&errors, problems);
    places.entries(table.get_ref())
}

/// Parses a single value. Errors and origins have `path` in them, which may be the name of a variable.
pub fn parse_value(path: &Path, text: &str, problems: &mut Vec<Mistake>) -> Option<ValueNode> {
    let places = LineIndex { path, text };
    let (value, errors) = DeValue::parse_recoverable(text);
    places.report(&errors, problems);
    errors.is_empty().then(|| places.node(&value))
}

struct LineIndex<'a> {
    path: &'a Path,
    text: &'a str,
}

impl LineIndex<'_> {
    fn report(&self, errors: &[toml::de::Error], problems: &mut Vec<Mistake>) {
        let mut told = BTreeSet::new();
        for error in errors {
            let start = error.span().map_or(0, |span| span.start);
            // Other errors at the same position follow from the first.
            if !told.insert(start) {
                continue;
            }
            // Keep only message and position, because the parser's full error text quotes the line, which may
            // contain a password.
            problems.push(Mistake::new(
                &self.origin(start),
                "",
                format!("invalid TOML: {}", error.message().replace('\n', ", ")),
                "",
            ));
        }
    }

    fn origin(&self, offset: usize) -> Origin {
        Origin::in_text(self.path, self.text, offset)
    }

    /// Entries of a table in file order (the parser's map is sorted by key).
    fn entries(&self, table: &DeTable<'_>) -> Vec<TableEntry> {
        let mut entries: Vec<_> = table.iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        entries
            .into_iter()
            .map(|(key, value)| TableEntry {
                key: key.get_ref().to_string(),
                origin: self.origin(key.span().start),
                node: self.node(value),
            })
            .collect()
    }

    fn node(&self, value: &Spanned<DeValue<'_>>) -> ValueNode {
        let converted = match value.get_ref() {
            DeValue::String(text) => Value::text(text.to_string()),
            DeValue::Boolean(value) => Value::Boolean(*value),
            DeValue::Integer(digits) => i64::from_str_radix(digits.as_str(), digits.radix())
                .map_or(Value::Other("integer"), Value::Integer),
            DeValue::Array(items) => Value::List(items.iter().map(|item| self.node(item)).collect()),
            DeValue::Table(table) => Value::Table(self.entries(table)),
            other => Value::Other(other.type_str()),
        };
        ValueNode { value: converted, origin: self.origin(value.span().start) }
    }
}
