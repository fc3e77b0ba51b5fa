//! `include = ["rules.d/*.toml"]`: additional files, which may contain only rules and includes.

use std::{
    fs,
    path::{Path, PathBuf},
};
use turnpike_strict::{TableEntry, Value, parse_file};

use turnpike_convert::forward::draft::Draft;

use super::file_format::{INCLUDE, is_mistyped_rule, is_oxidinetd, looks_like_toml, no_section, read_tables};
use crate::{
    Mistake, Origin,
    renamed::{RENAMED, rename_entries},
};

/// Maximum number of files for all patterns together. A pattern that matches a whole disk is an error.
const MOST_FILES: usize = 1000;
const DEEPEST: usize = 8;

const FORM: &str = "paths of TOML files with [[rule]], relative to this file, with the wildcards * and ?, such as [\"rules.d/*.toml\"]";

#[derive(Debug, Default)]
pub(crate) struct Included {
    pub(crate) drafts: Vec<Draft>,
    /// Included files, in the order in which they are read.
    pub(crate) files: Vec<PathBuf>,
    pub(crate) problems: Vec<Mistake>,
    pub(crate) warnings: Vec<String>,
    known: Vec<PathBuf>,
    open: Vec<PathBuf>,
}

impl Included {
    pub(crate) fn read(main: &Path, entries: &[TableEntry]) -> Self {
        let mut all = Self::default();
        // A path that does not exist on disk cannot be part of a loop.
        let canonical = fs::canonicalize(main).unwrap_or_else(|_| main.to_owned());
        all.known.push(canonical.clone());
        all.open.push(canonical);
        entries.iter().for_each(|entry| all.entry(main, entry));
        all
    }

    fn entry(&mut self, from: &Path, entry: &TableEntry) {
        let nodes = match &entry.node.value {
            Value::List(nodes) => nodes.as_slice(),
            _ => std::slice::from_ref(&entry.node),
        };
        for node in nodes {
            match &node.value {
                Value::Text(pattern) if !pattern.is_empty() => self.pattern(from, pattern, &node.origin),
                _ => self.refuse(&node.origin, format!("found {node}"), FORM),
            }
        }
    }

    fn pattern(&mut self, from: &Path, pattern: &str, origin: &Origin) {
        let beside = from.parent().unwrap_or(Path::new(""));
        if !pattern.contains(['*', '?', '[']) {
            return self.file(beside.join(pattern), origin);
        }
        // The directory's own name may contain pattern characters.
        let whole = Path::new(&glob::Pattern::escape(&beside.to_string_lossy())).join(pattern);
        // Editors leave behind files whose names begin with a dot.
        let options = glob::MatchOptions {
            case_sensitive: true,
            require_literal_separator: true,
            require_literal_leading_dot: true,
        };
        let found = match glob::glob_with(&whole.to_string_lossy(), options) {
            Ok(found) => found,
            Err(error) => {
                return self.refuse(origin, format!("found {pattern:?}: {}", error.msg), FORM);
            }
        };
        let mut nothing = true;
        for path in found {
            match path {
                Ok(path) if path.is_dir() => {}
                Ok(path) => {
                    nothing = false;
                    self.file(path, origin);
                }
                Err(error) => {
                    let problem = format!("cannot read {}: {}", error.path().display(), error.error());
                    self.refuse(origin, problem, "a readable directory");
                }
            }
            if self.files.len() > MOST_FILES {
                return;
            }
        }
        if nothing {
            self.warnings.push(format!("{origin}: include {pattern:?} matches no file"));
        }
    }

    fn file(&mut self, path: PathBuf, origin: &Origin) {
        let text = fs::canonicalize(&path).and_then(|canonical| Ok((fs::read_to_string(&path)?, canonical)));
        let (text, canonical) = match text {
            Ok(read) => read,
            Err(error) => {
                let problem = format!("cannot read {}: {error}", path.display());
                return self.refuse(origin, problem, "a readable file in UTF-8");
            }
        };
        if self.open.contains(&canonical) {
            let problem = format!("{} includes itself, directly or through other files", path.display());
            return self.refuse(origin, problem, "files that do not include each other in a loop");
        }
        if self.known.contains(&canonical) {
            return;
        }
        if self.open.len() > DEEPEST {
            let problem = format!("{} is nested too deeply: more than 8 levels of include", path.display());
            return self.refuse(origin, problem, "at most 8 levels of include");
        }
        self.files.push(path.clone());
        if self.files.len() > MOST_FILES {
            if self.files.len() == MOST_FILES + 1 {
                let problem = format!("{} exceeds the maximum number of files", path.display());
                self.refuse(origin, problem, "at most 1000 files in all");
            }
            return;
        }
        self.known.push(canonical.clone());
        self.open.push(canonical);
        self.content(&path, &text);
        self.open.pop();
    }

    fn content(&mut self, path: &Path, text: &str) {
        let before = self.problems.len();
        let is_toml = looks_like_toml(text);
        let mut entries = if is_toml { parse_file(path, text, &mut self.problems) } else { Vec::new() };
        if !is_toml || is_oxidinetd(&entries) {
            let origin = Origin::file(path);
            let expected =
                format!("TOML with [[rule]]; turnpike check-config --forward {} converts it", path.display());
            return self.refuse(&origin, "only turnpike's own rules can be included".to_owned(), &expected);
        }
        let renamed = rename_entries(&mut entries, RENAMED);
        self.problems.extend(renamed.conflicts);
        self.warnings.extend(renamed.notices);
        let broken = self.problems.len() > before;
        let mut includes = Vec::new();
        for entry in &entries {
            match entry.key.as_str() {
                "rule" => {
                    let drafts = read_tables(entry, broken, &mut self.problems);
                    self.drafts.extend(drafts);
                }
                INCLUDE => includes.push(entry),
                key if is_mistyped_rule(key) => self.problems.push(no_section(entry)),
                _ => self.problems.push(Mistake::new(
                    &entry.origin,
                    entry.key.clone(),
                    "an included file cannot contain settings",
                    "[[rule]] and include here, and settings in the including file",
                )),
            }
        }
        includes.into_iter().for_each(|entry| self.entry(path, entry));
    }

    fn refuse(&mut self, origin: &Origin, problem: String, expected: &str) {
        self.problems.push(Mistake::new(origin, INCLUDE, problem, expected));
    }
}

#[cfg(test)]
mod tests;
