//! Converts the sources of settings (flags, environment, file) to [`Node`]s that record their origin.

use std::{fs, path::Path};

use turnpike_strict::{Node, Value, nearest};
use zeroize::Zeroizing;

use super::{Mistake, Origin, key::KeySpec, secret_file};

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

    pub(crate) fn node<S>(&self, spec: &KeySpec<S>) -> Option<Node> {
        self.node_from(spec, Origin::Flag)
    }

    pub(crate) fn variable<S>(&self, spec: &KeySpec<S>) -> Option<Node> {
        self.node_from(spec, |name| Origin::Environment(name.to_owned()))
    }

    fn node_from<S>(&self, spec: &KeySpec<S>, origin: impl Fn(&'static str) -> Origin) -> Option<Node> {
        let (_, name, values) = self.0.iter().find(|(key, ..)| *key == spec.path)?;
        Some(textual(spec, values.iter().map(String::as_str), &origin(name)))
    }
}

/// Value from the environment: `TURNPIKE_SECTION_KEY`, or a file named by `TURNPIKE_SECTION_KEY_FILE`.
/// Entries of a list are separated by commas, or in a file by line breaks. A file for a single value has one
/// line.
pub(crate) fn environment_node<S>(
    spec: &KeySpec<S>,
    environment: &[(String, String)],
    problems: &mut Vec<Mistake>,
) -> Option<Node> {
    let name = spec.variable();
    let get = |wanted: &str| environment.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
    let direct = get(&name);
    let file_name = format!("{name}_FILE");
    match (direct, get(&file_name)) {
        (Some(_), Some(_)) => {
            problems.push(Mistake::new(
                &Origin::Environment(name.clone()),
                spec.path,
                format!("{name} and {file_name} are both set"),
                "one of them",
            ));
            None
        }
        (Some(value), None) => {
            let origin = Origin::Environment(name);
            let parts =
                if spec.list { value.split(',').map(str::trim).collect() } else { vec![value.as_str()] };
            Some(textual(spec, parts.into_iter().filter(|part| !part.is_empty()), &origin))
        }
        (None, Some(path)) => match fs::read_to_string(path).map(Zeroizing::new) {
            Ok(text) => {
                let origin = Origin::Environment(file_name);
                if spec.secret {
                    return secrets(spec, Path::new(path), &text, origin, problems);
                }
                let lines: Vec<&str> = secret_file::lines(&text).map(|(_, line)| line).collect();
                if !spec.list && lines.len() > 1 {
                    let what = format!("{path} has {} lines", lines.len());
                    problems.push(Mistake::new(&origin, spec.path, what, "one line"));
                    return None;
                }
                Some(textual(spec, lines.into_iter(), &origin))
            }
            Err(error) => {
                problems.push(Mistake::new(
                    &Origin::Environment(file_name),
                    spec.path,
                    format!("cannot read {path}: {error}"),
                    "a readable file, one entry per line",
                ));
                None
            }
        },
        (None, None) => None,
    }
}

/// Reads the secrets in a file, one per line. Any error goes to `problems` and discards the whole file.
fn secrets<S>(
    spec: &KeySpec<S>,
    path: &Path,
    text: &str,
    origin: Origin,
    problems: &mut Vec<Mistake>,
) -> Option<Node> {
    let mut nodes = Vec::new();
    let mut is_good = true;
    for (line, secret) in secret_file::lines(text) {
        let origin = Origin::File { path: path.to_owned(), line, column: 1 };
        if let Some(fault) = secret_file::fault(secret) {
            problems.push(Mistake::new(&origin, spec.path, fault, ""));
            is_good = false;
        }
        nodes.push(Node { value: Value::text(secret), origin });
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
    is_good.then(|| Node { value: Value::List(nodes), origin })
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

fn textual<'a, S>(spec: &KeySpec<S>, values: impl Iterator<Item = &'a str>, origin: &Origin) -> Node {
    let nodes = values.map(|text| Node { value: Value::text(text), origin: origin.clone() });
    if spec.list {
        return Node { value: Value::List(nodes.collect()), origin: origin.clone() };
    }
    nodes.last().unwrap_or(Node { value: Value::text(""), origin: origin.clone() })
}
