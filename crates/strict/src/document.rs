//! Reads a file with serde. If an entry is invalid, it is removed and reading continues, so that one error
//! does not hide others.

use std::{
    collections::BTreeMap,
    mem,
    ops::Range,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;
use toml::{
    Spanned,
    de::{DeArray, DeTable, DeValue, Deserializer, Error},
};

use crate::{Mistake, Mistakes, Origin, nearest};

const MOST: usize = 50;

/// A file under validation: positions of its keys, and the errors found so far.
#[derive(Debug, Default)]
pub struct Document {
    file: PathBuf,
    /// Offset of each value by its path, such as `subject[1].cpus`.
    places: BTreeMap<String, usize>,
    /// Paths that already have an error: removed entries, or placeholders for missing ones.
    wrong: Vec<String>,
    mistakes: Vec<Mistake>,
    text: String,
}

impl Document {
    /// Parses the text of `file` as `T`, which must deny unknown fields. Recoverable errors are collected in
    /// the document.
    ///
    /// # Errors
    /// If nothing can be recovered.
    pub fn parse<T: DeserializeOwned>(file: &Path, text: &str) -> Result<(T, Self), Mistakes> {
        let (mut root, errors) = DeTable::parse_recoverable(text);
        let mut document = Self { text: text.to_owned(), ..Self::without_places(file) };
        for error in &errors {
            let at = document.origin(error.span().map_or(0, |span| span.start));
            document.tell(Mistake::new(&at, "", format!("invalid TOML: {}", one_line(error.message())), ""));
        }
        document.places =
            entries(root.get_ref()).into_iter().map(|entry| (entry.path, entry.value.start)).collect();
        let is_broken = !errors.is_empty();
        let mut mended = 0;
        loop {
            match T::deserialize(Deserializer::from(root.clone())) {
                Ok(value) => return Ok((value, document)),
                // Each iteration removes an entry or adds a missing one, so the loop terminates; the limit is
                // for malicious files with thousands of errors.
                Err(error) if mended < 4 * MOST && document.mend(&mut root, &error, is_broken) => mended += 1,
                Err(_) => break,
            }
        }
        document.finish()?;
        Err(Mistakes(vec![Mistake::new(&Origin::file(file), "", "cannot be read", "")]))
    }

    /// Document for values that do not come from a file. Error messages start with just `name`.
    pub fn without_places(name: &Path) -> Self {
        Self { file: name.to_owned(), ..Self::default() }
    }

    /// Keeps the text but reports no line numbers.
    pub fn forget_places(&mut self) {
        self.text.clear();
        self.places.clear();
        for mistake in &mut self.mistakes {
            mistake.origin = Origin::file(&self.file);
        }
    }

    /// Reports an error at `path`, unless there is one at or above it.
    pub fn problem(&mut self, path: &str, what: impl Into<String>) {
        if !self.is_wrong(path) {
            self.tell(Mistake::new(&self.nearest_place(path), "", what, ""));
        }
    }

    /// True if there is an error at `path`, above it, or below it.
    pub fn is_wrong(&self, path: &str) -> bool {
        self.wrong.iter().any(|wrong| is_below(path, wrong) || is_below(wrong, path))
    }

    /// Ends the validation.
    ///
    /// # Errors
    /// All errors in file order, if there are any.
    pub fn finish(self) -> Result<(), Mistakes> {
        let Mistakes(mut mistakes) = Mistakes::sorted(self.mistakes);
        let more = mistakes.len().saturating_sub(MOST);
        mistakes.truncate(MOST);
        if more > 0 {
            mistakes.push(Mistake::new(&Origin::file(&self.file), "", format!("further errors: {more}"), ""));
        }
        if mistakes.is_empty() { Ok(()) } else { Err(Mistakes(mistakes)) }
    }

    fn tell(&mut self, mistake: Mistake) {
        if !self.mistakes.contains(&mistake) {
            self.mistakes.push(mistake);
        }
    }

    /// Position of the key, or of its nearest existing parent.
    fn nearest_place(&self, path: &str) -> Origin {
        let mut path = path;
        loop {
            if let Some(offset) = self.places.get(path) {
                return self.origin(*offset);
            }
            match path.rfind(['.', '[']) {
                Some(end) => path = &path[..end],
                None => return Origin::file(&self.file),
            }
        }
    }

    fn origin(&self, offset: usize) -> Origin {
        Origin::in_text(&self.file, &self.text, offset)
    }

    /// Reports an error and changes the tree to reveal the next one; returns false if that is impossible.
    fn mend(&mut self, root: &mut Spanned<DeTable<'_>>, error: &Error, is_broken: bool) -> bool {
        let message = one_line(error.message());
        let Some(span) = error.span() else {
            self.tell(Mistake::new(&Origin::file(&self.file), "", message, ""));
            return false;
        };
        if let Some(field) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
            return self.add_missing(root, &span, field, is_broken);
        }
        let entries = entries(root.get_ref());
        let at = self.origin(span.start);
        let Some(entry) = innermost(&entries, &span) else {
            self.tell(Mistake::new(&at, "", message, ""));
            return false;
        };
        if self.is_stand_in(&entry.value) {
            return stand_in_again(root, entry);
        }
        // This line has already been reported as broken.
        let told = is_broken && self.mistakes.iter().any(|mistake| line(&mistake.origin) == line(&at));
        let mistake = explain(&at, &entry.key_name, &message);
        self.wrong.push(entry.path.clone());
        if mistake.key.is_empty()
            && let Some(meant) = &mistake.suggestion
        {
            // A misspelt key must not also be reported as missing.
            let parent = entry.path.strip_suffix(&entry.key_name).unwrap_or_default();
            self.wrong.push(format!("{parent}{meant}"));
        }
        if !told {
            self.tell(mistake);
        }
        remove(root.get_mut(), &entry.steps);
        true
    }

    fn add_missing(
        &mut self,
        root: &mut Spanned<DeTable<'_>>,
        span: &Range<usize>,
        field: &str,
        is_broken: bool,
    ) -> bool {
        let all = entries(root.get_ref());
        let table = all.iter().find(|entry| entry.is_table && entry.value == *span);
        let (steps, path) = table.map_or((Vec::new(), field.to_owned()), |entry| {
            (entry.steps.clone(), format!("{}.{field}", entry.path))
        });
        if !self.is_stand_in(span) && !is_broken && !self.is_wrong(&path) {
            let (offset, whose) = match table {
                Some(entry) => (entry.value.start, format!("[{}]", header(&entry.path))),
                None => (0, "the file".to_owned()),
            };
            let what = format!("{whose} lacks the required key \"{field}\"");
            self.tell(Mistake::new(&self.origin(offset), "", what, ""));
        }
        self.wrong.push(path);
        let Some(table) = table_at(root.get_mut(), &steps) else { return false };
        // This offset lies after the end of the text, so it cannot be mistaken for a position in the file.
        let beyond = self.text.len() + 1 + self.wrong.len();
        let key = Spanned::new(beyond..beyond, field.to_owned().into());
        table.insert(key, Spanned::new(beyond..beyond, DeValue::String("".into()))).is_none()
    }

    fn is_stand_in(&self, span: &Range<usize>) -> bool {
        span.start > self.text.len()
    }
}

/// Key or array item anywhere in the file.
struct Entry {
    path: String,
    steps: Vec<PathStep>,
    /// Last key of the path; an array item has the key of the array.
    key_name: String,
    key: Range<usize>,
    value: Range<usize>,
    is_table: bool,
}

#[derive(Clone)]
enum PathStep {
    Key(String),
    Item(usize),
}

fn entries(table: &DeTable<'_>) -> Vec<Entry> {
    let mut all = Vec::new();
    list_table(table, "", &[], &mut all);
    all
}

fn list_table(table: &DeTable<'_>, path: &str, steps: &[PathStep], all: &mut Vec<Entry>) {
    for (key, value) in table {
        let name = key.get_ref().to_string();
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let steps = [steps, &[PathStep::Key(name.clone())]].concat();
        list_value(value, path, steps, name, key.span(), all);
    }
}

fn list_value(
    value: &Spanned<DeValue<'_>>,
    path: String,
    steps: Vec<PathStep>,
    key_name: String,
    key: Range<usize>,
    all: &mut Vec<Entry>,
) {
    match value.get_ref() {
        DeValue::Table(table) => list_table(table, &path, &steps, all),
        DeValue::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                let steps = [&steps[..], &[PathStep::Item(index)]].concat();
                list_value(item, format!("{path}[{index}]"), steps, key_name.clone(), item.span(), all);
            }
        }
        _ => {}
    }
    all.push(Entry { path, steps, key_name, key, value: value.span(), is_table: value.get_ref().is_table() });
}

/// Entry that an error's span refers to: the key or value with exactly this span, or else the smallest that
/// contains it.
fn innermost<'a>(entries: &'a [Entry], span: &Range<usize>) -> Option<&'a Entry> {
    let holds = |range: &Range<usize>| range.start <= span.start && span.end <= range.end;
    entries
        .iter()
        .find(|entry| entry.key == *span || entry.value == *span)
        .or_else(|| entries.iter().filter(|entry| holds(&entry.value)).min_by_key(|entry| entry.value.len()))
}

fn table_at<'t, 'i>(table: &'t mut DeTable<'i>, steps: &[PathStep]) -> Option<&'t mut DeTable<'i>> {
    let Some((first, rest)) = steps.split_first() else { return Some(table) };
    let PathStep::Key(name) = first else { return None };
    match value_at(table.get_mut(name.as_str())?.get_mut(), rest)? {
        DeValue::Table(table) => Some(table),
        _ => None,
    }
}

fn value_at<'t, 'i>(value: &'t mut DeValue<'i>, steps: &[PathStep]) -> Option<&'t mut DeValue<'i>> {
    let Some((first, rest)) = steps.split_first() else { return Some(value) };
    let next = match (first, value) {
        (PathStep::Key(name), DeValue::Table(table)) => table.get_mut(name.as_str())?,
        (PathStep::Item(index), DeValue::Array(items)) => items.get_mut(*index)?,
        _ => return None,
    };
    value_at(next.get_mut(), rest)
}

fn remove(root: &mut DeTable<'_>, steps: &[PathStep]) {
    let Some(last) = steps.iter().rposition(|step| matches!(step, PathStep::Key(_))) else { return };
    if let (Some(table), PathStep::Key(name)) = (table_at(root, &steps[..last]), &steps[last]) {
        table.remove(name.as_str());
    }
}

/// Tries the next type for a placeholder; returns false after the last one.
fn stand_in_again(root: &mut Spanned<DeTable<'_>>, entry: &Entry) -> bool {
    let Some((last, before)) = entry.steps.split_last() else { return false };
    let (Some(table), PathStep::Key(name)) = (table_at(root.get_mut(), before), last) else { return false };
    let Some(value) = table.get_mut(name.as_str()) else { return false };
    let next = match value.get_ref() {
        DeValue::String(_) => DeValue::Array(DeArray::new()),
        DeValue::Array(_) => DeValue::Table(DeTable::new()),
        _ => return false,
    };
    let _ = mem::replace(value.get_mut(), next);
    true
}

fn is_below(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Table header of a path: `[subject]` for `subject[1]`.
fn header(path: &str) -> String {
    path.split('[').next().map_or_else(String::new, |name| {
        if path.ends_with(']') { format!("[{name}]") } else { path.to_owned() }
    })
}

fn one_line(message: &str) -> String {
    message.trim().replace('\n', ", ")
}

fn line(origin: &Origin) -> usize {
    if let Origin::File { line, .. } = origin { *line } else { 0 }
}

/// Converts a message from serde, which lists the unknown key and all known ones in backticks. Our message
/// suggests the nearest key first.
fn explain(at: &Origin, key: &str, message: &str) -> Mistake {
    let one_of = |known: &[&str]| format!("one of {}", known.join(", "));
    let names = |prefix| message.strip_prefix(prefix).map(backticked);
    if let Some([unknown, known @ ..]) = names("unknown field `").as_deref() {
        let meant = nearest(unknown, known.iter().copied());
        let expected = if meant.is_some() { String::new() } else { one_of(known) };
        return Mistake::new(at, "", format!("unknown key \"{unknown}\""), expected).suggesting(meant);
    }
    if let Some([found, known @ ..]) = names("unknown variant `").as_deref() {
        let meant = nearest(found, known.iter().copied());
        return Mistake::new(at, key, format!("found \"{found}\""), one_of(known)).suggesting(meant);
    }
    for kind in ["invalid type: ", "invalid value: ", "invalid length "] {
        if let Some((found, expected)) =
            message.strip_prefix(kind).and_then(|rest| rest.split_once(", expected "))
        {
            return Mistake::new(at, key, format!("found {}", found.replace('`', "")), in_words(expected));
        }
    }
    Mistake::new(at, key, message, "")
}

/// Names in a list such as "a`, expected one of `b`, `c`".
fn backticked(rest: &str) -> Vec<&str> {
    rest.split('`').step_by(2).filter(|name| !name.is_empty()).collect()
}

fn in_words(expected: &str) -> &str {
    match expected {
        "u16" | "u32" | "u64" | "usize" => "a non-negative whole number",
        "i64" => "a whole number",
        "f64" => "a number",
        "a boolean" => "true or false",
        "a string" => "text in quotes",
        "a sequence" => "a list in brackets",
        "a map" => "a table",
        other if other.starts_with("struct ") => "a table",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only their names matter")]
    struct Example {
        name: String,
        rounds: Option<u32>,
        duration: Option<f64>,
        inner: Inner,
        #[serde(default)]
        list: Vec<Inner>,
    }

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only their names matter")]
    struct Inner {
        namespace: Option<String>,
        command: Kind,
    }

    #[derive(Debug, serde::Deserialize)]
    #[serde(untagged, expecting = "expected a line or a list of words")]
    #[expect(dead_code, reason = "only their names matter")]
    enum Kind {
        Line(String),
        Words(Vec<String>),
    }

    const RIGHT: &str = "name = 'a'\n[inner]\ncommand = 'c'\n";

    fn refusals(text: &str) -> Vec<String> {
        let error = match Document::parse::<Example>(Path::new("x.toml"), text) {
            Ok((_, document)) => document.finish().unwrap_err(),
            Err(error) => error,
        };
        error.to_string().lines().map(str::to_owned).collect()
    }

    fn refusal(text: &str) -> String {
        refusals(text).join("\n")
    }

    #[test]
    fn unknown_key_is_reported_with_line_and_nearest_key() {
        assert_eq!(
            refusal(&format!("rounds = 6\nduratoin = 3\n{RIGHT}")),
            "x.toml:2:1: unknown key \"duratoin\"; did you mean \"duration\"?"
        );
        assert_eq!(
            refusal("name = 'a'\n\n[inner]\nnamspace = 'a'\ncommand = 'c'"),
            "x.toml:4:1: unknown key \"namspace\"; did you mean \"namespace\"?"
        );
    }

    #[test]
    fn unknown_key_without_a_near_match_lists_all_keys() {
        assert_eq!(
            refusal(&format!("colour = 1\n{RIGHT}")),
            "x.toml:1:1: unknown key \"colour\"; expected one of name, rounds, duration, inner, list"
        );
    }

    #[test]
    fn wrong_type_reports_found_and_expected_types() {
        assert_eq!(
            refusal(&format!("rounds = 'six'\n{RIGHT}")),
            "x.toml:1:10: rounds: found string \"six\"; expected a non-negative whole number"
        );
        assert_eq!(
            refusal(&RIGHT.replace("'c'", "7")),
            "x.toml:3:11: command: expected a line or a list of words"
        );
    }

    #[test]
    fn all_errors_are_reported_in_file_order() {
        let text = "\
nmae = 'a'
rounds = -1
duration = 'long'
[inner]
namespace = 5
command = 'c'
[[list]]
command = ['a', 'b']
colour = 1
[[list]]
namespace = 'b'
";
        assert_eq!(
            refusals(text),
            [
                "x.toml:1:1: unknown key \"nmae\"; did you mean \"name\"?",
                "x.toml:2:10: rounds: found integer -1; expected a non-negative whole number",
                "x.toml:3:12: duration: found string \"long\"; expected a number",
                "x.toml:5:13: namespace: found integer 5; expected text in quotes",
                "x.toml:9:1: unknown key \"colour\"; expected one of namespace, command",
                "x.toml:10:1: [[list]] lacks the required key \"command\"",
            ]
        );
    }

    #[test]
    fn missing_keys_are_reported_once_with_other_errors() {
        assert_eq!(
            refusals("rounds = true\n"),
            [
                "x.toml:1:1: the file lacks the required key \"name\"",
                "x.toml:1:1: the file lacks the required key \"inner\"",
                "x.toml:1:10: rounds: found boolean true; expected a non-negative whole number",
            ]
        );
    }

    #[test]
    fn syntax_error_has_a_position_and_hides_no_other_error() {
        let lines = refusals("rounds ==\nduratoin = 1\nname = 'a'\n[inner\n");
        assert!(lines[0].starts_with("x.toml:1:"), "{lines:?}");
        assert!(lines.iter().any(|line| line.starts_with("x.toml:2:1: unknown key")), "{lines:?}");
        assert!(lines.iter().any(|line| line.starts_with("x.toml:4:")), "{lines:?}");
        assert!(!lines.iter().any(|line| line.contains("lacks the required key")), "{lines:?}");
    }

    #[test]
    fn wrong_value_is_reported_once() {
        let text = format!("rounds = 'six'\n{RIGHT}");
        let (_, mut document) = Document::parse::<Example>(Path::new("x.toml"), &text).unwrap();
        document.problem("rounds", "too few");
        document.problem("inner.namespace", "no such namespace");
        document.problem("inner.namespace", "no such namespace");
        assert_eq!(
            document.finish().unwrap_err().to_string(),
            "x.toml:1:10: rounds: found string \"six\"; expected a non-negative whole number\n\
             x.toml:3:1: no such namespace"
        );
    }

    #[test]
    fn any_text_parses_or_yields_a_bounded_error() {
        let many: String = (0..500).map(|i| format!("key{i} = 1\n")).collect();
        let lines = refusals(&format!("{many}{RIGHT}"));
        assert!((40..=MOST + 2).contains(&lines.len()), "{}", lines.len());
        for text in ["", "=", "[[", "a.b.c = 1\na = 2", "inner = 5", "list = {}", "[[list]]\n[list]", "\u{0}"]
        {
            assert!(!refusals(text).is_empty(), "{text:?}");
        }
    }
}
