//! Commands, and the replacement of `{name}` variables in commands, results and configuration files.

use std::{
    collections::BTreeMap,
    env,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use turnpike_strict::nearest;

use crate::{certificate, error::LabError};

/// The only built-in variable that an experiment may redefine.
pub(crate) const TURNPIKE: &str = "turnpike";

/// Command as one line (split into words as a shell would, but no shell is run) or as a list of words.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a command line or a list of words")]
pub(crate) enum CommandLine {
    Line(String),
    Words(Vec<String>),
}

impl CommandLine {
    pub(crate) fn words(&self) -> Result<Vec<String>, LabError> {
        let words = match self {
            Self::Line(line) => {
                shlex::split(line).ok_or_else(|| LabError::usage(format!("`{line}`: unclosed quote")))?
            }
            Self::Words(words) => words.clone(),
        };
        if words.is_empty() { Err(LabError::usage("a command is empty")) } else { Ok(words) }
    }
}

pub(crate) fn plain(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Variables(BTreeMap<String, String>);

impl Variables {
    pub(super) fn new(
        experiments: &Path,
        addresses: &BTreeMap<String, String>,
        point: &BTreeMap<String, String>,
        directory: &Path,
    ) -> Self {
        let mut names = addresses.clone();
        let turnpike = env::current_exe().unwrap_or_else(|_| PathBuf::from("turnpike"));
        names.extend(point.clone());
        names.insert("dir".to_owned(), directory.display().to_string());
        for (name, file) in
            [("result", "result.json"), ("cert", certificate::CERT), ("key", certificate::KEY)]
        {
            names.insert(name.to_owned(), directory.join(file).display().to_string());
        }
        names.insert("experiments".to_owned(), absolute(experiments));
        // Experiments may replace this program with another build.
        names.entry(TURNPIKE.to_owned()).or_insert_with(|| turnpike.display().to_string());
        Self(names)
    }

    /// Sets the variables for the workload's times. The workload runs one second longer than the measurement. `whole_*` are rounded up to
    /// whole seconds.
    pub(crate) fn set_window(&mut self, warmup: f64, duration: f64) {
        let told = duration + 1.0;
        for (name, value) in [
            ("warmup", warmup),
            ("duration", told),
            ("whole_duration", told.ceil()),
            ("total", warmup + told),
            ("whole_total", (warmup + told).ceil()),
        ] {
            self.set(name, value.to_string());
        }
    }

    pub(crate) fn with(&self, vars: &BTreeMap<String, toml::Value>) -> Result<Self, LabError> {
        let mut all = self.clone();
        for (name, value) in vars {
            all.set(name, self.text(&plain(value))?);
        }
        Ok(all)
    }

    pub(crate) fn set(&mut self, name: &str, value: impl Into<String>) {
        self.0.insert(name.to_owned(), value.into());
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Replaces each `{name}`; `{{` and `}}` are literal braces. Fails if a name is unknown.
    pub(crate) fn text(&self, text: &str) -> Result<String, LabError> {
        let mut filled = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            filled.push_str(&rest[..at]);
            rest = &rest[at..];
            if rest.starts_with("{{") || rest.starts_with("}}") {
                filled.push_str(&rest[..1]);
                rest = &rest[2..];
                continue;
            }
            let name = rest
                .strip_prefix('{')
                .and_then(|rest| rest.split_once('}'))
                .map(|(name, _)| name)
                .ok_or_else(|| {
                    LabError::usage(format!("\"{text}\": unmatched brace; double it for a literal one"))
                })?;
            let value = self.0.get(name).ok_or_else(|| self.unknown(name))?;
            filled.push_str(value);
            rest = &rest[name.len() + 2..];
        }
        filled.push_str(rest);
        Ok(filled)
    }

    pub(crate) fn replace_known(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("{{{name}}}"), value))
    }

    /// Replaces variables in a command. A value with spaces stays one word, but `{name*}` expands to as many words as the value has.
    pub(crate) fn command(&self, command: &CommandLine) -> Result<Vec<String>, LabError> {
        let mut filled = Vec::new();
        for word in command.words()? {
            match word.strip_prefix('{').and_then(|rest| rest.strip_suffix("*}")) {
                Some(name) => {
                    let value = self.0.get(name).ok_or_else(|| self.unknown(name))?;
                    let words = shlex::split(value)
                        .ok_or_else(|| LabError::usage(format!("{name} = \"{value}\": unclosed quote")))?;
                    for word in words {
                        filled.push(self.text(&word)?);
                    }
                }
                None => filled.push(self.text(&word)?),
            }
        }
        Ok(filled)
    }

    fn unknown(&self, name: &str) -> LabError {
        LabError::usage(match nearest(name, self.0.keys().map(String::as_str)) {
            Some(meant) => format!("unknown variable {{{name}}}; did you mean {{{meant}}}?"),
            None => format!(
                "unknown variable {{{name}}}; expected one of {}",
                self.0.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
            ),
        })
    }
}

fn absolute(path: &Path) -> String {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    path.canonicalize().unwrap_or_else(|_| path.to_owned()).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables() -> Variables {
        Variables(
            [("relay", "10.77.1.1"), ("port", "3478"), ("words", "a b")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
        )
    }

    #[test]
    fn variables_are_replaced_and_doubled_braces_become_literal() {
        assert_eq!(variables().text("{relay}:{port} {{x}}").unwrap(), "10.77.1.1:3478 {x}");
    }

    #[test]
    fn an_unknown_name_gets_a_suggestion() {
        let error = variables().text("{prot}").unwrap_err().to_string();
        assert_eq!(error, "unknown variable {prot}; did you mean {port}?");
        assert!(variables().text("{relay").is_err());
        assert!(variables().text("relay}").is_err());
    }

    #[test]
    fn a_value_with_spaces_stays_one_word() {
        let command = CommandLine::Line("echo {words} 'c d'".to_owned());
        assert_eq!(variables().command(&command).unwrap(), ["echo", "a b", "c d"]);
    }

    #[test]
    fn a_starred_variable_expands_to_several_words() {
        let mut variables = variables();
        variables.set("load", "--peer {relay}:7 --note 'c d'");
        let command = CommandLine::Line("load {load*} {words}".to_owned());
        let words = variables.command(&command).unwrap();
        assert_eq!(words, ["load", "--peer", "10.77.1.1:7", "--note", "c d", "a b"]);
        variables.set("load", "'");
        assert!(variables.command(&command).unwrap_err().to_string().contains("unclosed quote"));
        let unknown = CommandLine::Line("load {laod*}".to_owned());
        assert!(variables.command(&unknown).unwrap_err().to_string().contains("did you mean {load}?"));
    }

    #[test]
    fn configuration_files_keep_their_own_braces() {
        assert_eq!(variables().replace_known("server { listen {relay}; }"), "server { listen 10.77.1.1; }");
    }
}
