//! Converts the sources of settings (flags, environment, file) to [`ValueNode`]s that record their origin.

use std::{
    fs,
    path::{Path, PathBuf},
};

use turnpike_strict::{TableEntry, Value, ValueNode, nearest, parse_value};
use zeroize::Zeroizing;

use super::{
    Mistake, Origin,
    key::{KeySpec, variable},
    secret_file,
};

/// Settings on the command line, by key. Values remain text and are checked with all other sources, so that
/// all errors are reported together. A flag replaces the whole value of the key in the file, even a list.
#[derive(Clone, Default)]
pub struct Flags(Vec<(&'static str, &'static str, Vec<String>)>);

impl Flags {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn set(&mut self, key: &'static str, flag: &'static str, values: impl IntoIterator<Item = String>) {
        let values: Vec<String> = values.into_iter().collect();
        if !values.is_empty() {
            self.0.push((key, flag, values));
        }
    }

    pub(crate) fn node<S>(&self, spec: &KeySpec<S>) -> Option<ValueNode> {
        self.node_from(spec, Origin::Flag)
    }

    pub(crate) fn variable<S>(&self, spec: &KeySpec<S>) -> Option<ValueNode> {
        self.node_from(spec, |name| Origin::Environment(name.to_owned()))
    }

    fn node_from<S>(&self, spec: &KeySpec<S>, origin: impl Fn(&'static str) -> Origin) -> Option<ValueNode> {
        let (_, name, values) = self.0.iter().find(|(key, ..)| *key == spec.path)?;
        Some(textual(spec, values.iter().map(String::as_str), &origin(name)))
    }
}

/// Value from the environment: `TURNPIKE_SECTION_KEY`, or a file named by `TURNPIKE_SECTION_KEY_FILE`.
/// Entries of a list are separated by commas, or in a file by line breaks; a list of tables is TOML. A file for
/// a single value has one line.
pub(crate) fn environment_node<S>(
    spec: &KeySpec<S>,
    environment: &[(String, String)],
    problems: &mut Vec<Mistake>,
) -> Option<ValueNode> {
    let found = Variable::find(spec.path, environment, problems)?;
    if spec.list && found.has_tables() {
        return found.parsed(problems);
    }
    let Some(file) = &found.file else {
        let value = found.text.as_str();
        let parts = if spec.list { value.split(',').map(str::trim).collect() } else { vec![value] };
        return Some(textual(spec, parts.into_iter().filter(|part| !part.is_empty()), &found.origin()));
    };
    if spec.secret {
        return secrets(spec, file, &found.text, found.origin(), problems);
    }
    let lines: Vec<&str> = secret_file::lines(&found.text).map(|(_, line)| line).collect();
    if !spec.list && lines.len() > 1 {
        let what = format!("{} has {} lines", file.display(), lines.len());
        problems.push(Mistake::new(&found.origin(), spec.path, what, "one line"));
        return None;
    }
    Some(textual(spec, lines.into_iter(), &found.origin()))
}

/// Tables that can appear several times in the file, such as `[[realm]]`, from one variable.
pub(crate) fn environment_tables(
    name: &'static str,
    environment: &[(String, String)],
    problems: &mut Vec<Mistake>,
) -> Option<TableEntry> {
    let found = Variable::find(name, environment, problems)?;
    let origin = found.origin();
    let node = if found.text.trim().is_empty() {
        ValueNode { value: Value::List(Vec::new()), origin: origin.clone() }
    } else if found.has_tables() {
        found.parsed(problems)?
    } else {
        let expected = format!("TOML, [{{ key = \"value\", ... }}], with the keys of [[{name}]]");
        problems.push(Mistake::new(&origin, name, "it is not a list of tables", expected));
        return None;
    };
    Some(TableEntry { key: name.to_owned(), origin, node })
}

struct Variable {
    /// Ends in `_FILE` if the text was read from a file.
    name: String,
    file: Option<PathBuf>,
    text: Zeroizing<String>,
}

impl Variable {
    fn find(
        key: &'static str,
        environment: &[(String, String)],
        problems: &mut Vec<Mistake>,
    ) -> Option<Self> {
        let name = variable(key);
        let get = |wanted: &str| environment.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
        let file_name = format!("{name}_FILE");
        let mut refused = |name: String, problem: String, expected: &str| {
            problems.push(Mistake::new(&Origin::Environment(name), key, problem, expected));
            None
        };
        match (get(&name), get(&file_name)) {
            (None, None) => None,
            (Some(_), Some(_)) => {
                let problem = format!("{name} and {file_name} are both set");
                refused(name, problem, "one of them")
            }
            (Some(text), None) => Some(Self { name, file: None, text: Zeroizing::new(text.clone()) }),
            (None, Some(path)) => match fs::read_to_string(path) {
                Ok(text) => {
                    Some(Self { name: file_name, file: Some(path.into()), text: Zeroizing::new(text) })
                }
                Err(error) => {
                    let problem = format!("cannot read {path}: {error}");
                    refused(file_name, problem, "a readable file, one entry per line")
                }
            },
        }
    }

    fn origin(&self) -> Origin {
        Origin::Environment(self.name.clone())
    }

    /// Returns true for a list of tables: no other value begins with `[{`. An IPv6 address has no `{` after its `[`.
    fn has_tables(&self) -> bool {
        let text = self.text.trim_start().strip_prefix('[');
        text.is_some_and(|rest| rest.trim_start().starts_with('{'))
    }

    fn parsed(&self, problems: &mut Vec<Mistake>) -> Option<ValueNode> {
        let place = self.file.as_deref().unwrap_or(Path::new(&self.name));
        parse_value(place, self.text.trim(), problems)
    }
}

/// Reads the secrets in a file, one per line. Any error goes to `problems` and discards the whole file.
fn secrets<S>(
    spec: &KeySpec<S>,
    path: &Path,
    text: &str,
    origin: Origin,
    problems: &mut Vec<Mistake>,
) -> Option<ValueNode> {
    let mut nodes = Vec::new();
    let mut is_good = true;
    for (line, secret) in secret_file::lines(text) {
        let origin = Origin::File { path: path.to_owned(), line, column: 1 };
        if let Some(fault) = secret_file::fault(secret) {
            problems.push(Mistake::new(&origin, spec.path, fault, ""));
            is_good = false;
        }
        nodes.push(ValueNode { value: Value::text(secret), origin });
    }
    if nodes.is_empty() {
        let problem = format!("{} is empty", path.display());
        problems.push(Mistake::new(
            &origin,
            spec.path,
            problem,
            "at least one line, or leave the variable unset",
        ));
        return None;
    }
    is_good.then(|| ValueNode { value: Value::List(nodes), origin })
}

/// Warnings about unknown variables with our prefix. Not errors: Kubernetes sets `TURNPIKE_PORT` etc. in
/// every container if the namespace has a service named `turnpike`.
pub(crate) fn unknown_variables(environment: &[(String, String)], known: &[String]) -> Vec<String> {
    environment
        .iter()
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("TURNPIKE_") && !known.contains(name))
        .map(|name| match nearest(name, known.iter().map(String::as_str)) {
            Some(meant) => {
                format!("unknown environment variable {name} is ignored; did you mean {meant}?")
            }
            None => format!("unknown environment variable {name} is ignored"),
        })
        .collect()
}

fn textual<'a, S>(spec: &KeySpec<S>, values: impl Iterator<Item = &'a str>, origin: &Origin) -> ValueNode {
    let nodes = values.map(|text| ValueNode { value: Value::text(text), origin: origin.clone() });
    if spec.list {
        return ValueNode { value: Value::List(nodes.collect()), origin: origin.clone() };
    }
    nodes.last().unwrap_or(ValueNode { value: Value::text(""), origin: origin.clone() })
}
