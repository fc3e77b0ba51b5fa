//! Errors in settings, with their origin and the expected value.

use std::{
    fmt,
    path::{Path, PathBuf},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    /// Position in a file. Line and column start at 1; the column counts characters. Line 0 means the whole file.
    File {
        path: PathBuf,
        line: usize,
        column: usize,
    },
    Environment(String),
    Flag(&'static str),
    /// Position in a command line argument; the column starts at 1, in characters.
    Argument {
        text: String,
        column: usize,
    },
}

impl Origin {
    pub fn file(path: &Path) -> Self {
        Self::File { path: path.to_owned(), line: 0, column: 0 }
    }

    /// Position of a byte offset in the text of a file.
    pub fn in_text(path: &Path, text: &str, offset: usize) -> Self {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let column = before[line_start..].chars().count() + 1;
        Self::File { path: path.to_owned(), line: before.matches('\n').count() + 1, column }
    }

    /// True if values of this source are always text, so that `"4"` means the number 4.
    pub fn is_textual(&self) -> bool {
        matches!(self, Self::Environment(_) | Self::Flag(_) | Self::Argument { .. })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line: 0, .. } => write!(f, "{}", path.display()),
            Self::File { path, line, column } => write!(f, "{}:{line}:{column}", path.display()),
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::Flag(flag) => write!(f, "flag {flag}"),
            Self::Argument { text, column } => write!(f, "argument {text}, column {column}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    pub origin: Origin,
    /// Key, such as `relay.ports`; empty if the problem already names the key or concerns the whole file.
    pub key: String,
    /// Never contains a secret.
    pub problem: String,
    pub expected: String,
    pub suggestion: Option<String>,
}

impl Mistake {
    pub fn new(
        origin: &Origin,
        key: impl Into<String>,
        problem: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        let (key, problem, expected) = (key.into(), problem.into(), expected.into());
        Self { origin: origin.clone(), key, problem, expected, suggestion: None }
    }

    pub fn suggesting(self, meant: Option<&str>) -> Self {
        Self { suggestion: meant.map(str::to_owned), ..self }
    }

    /// Replaces the list of all allowed words with the one that was most likely meant.
    pub fn suggesting_instead(self, meant: Option<&str>) -> Self {
        match meant {
            Some(meant) => Self { expected: String::new(), ..self }.suggesting(Some(meant)),
            None => self,
        }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.problem)?;
        if !self.expected.is_empty() {
            write!(f, "; expected {}", self.expected)?;
        }
        match &self.suggestion {
            Some(key) => write!(f, "; did you mean \"{key}\"?"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Mistake {}

/// All errors (at least one), in file order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistakes(pub Vec<Mistake>);

impl Mistakes {
    /// Sorts errors: first those in files, in order of the files' first appearance, then those from other
    /// sources.
    pub fn sorted(mut problems: Vec<Mistake>) -> Self {
        let mut files: Vec<PathBuf> = Vec::new();
        for problem in &problems {
            if let Origin::File { path, .. } = &problem.origin
                && !files.contains(path)
            {
                files.push(path.clone());
            }
        }
        problems.sort_by_key(|problem| match &problem.origin {
            Origin::File { path, line, column } => {
                (0, files.iter().position(|file| file == path).unwrap_or(0), *line, *column)
            }
            Origin::Default => (1, 0, 0, 0),
            Origin::Environment(_) => (2, 0, 0, 0),
            Origin::Flag(_) => (3, 0, 0, 0),
            // The sort is stable, so arguments keep their order.
            Origin::Argument { .. } => (4, 0, 0, 0),
        });
        Self(problems)
    }
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            error.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Mistakes {}

/// Candidate nearest to a mistyped word by Damerau-Levenshtein distance, if close enough.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (word.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// The nearest candidate as part of a sentence, or else the list of candidates.
pub fn hint<'a>(word: &str, candidates: impl Iterator<Item = &'a str> + Clone) -> String {
    match nearest(word, candidates.clone()) {
        Some(meant) => format!("did you mean \"{meant}\"?"),
        None => format!("known: {}", candidates.collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typo_finds_its_key_and_noise_finds_none() {
        let keys = ["listen", "realm", "workers"];
        assert_eq!(nearest("lisen", keys), Some("listen"));
        assert_eq!(nearest("wrokers", keys), Some("workers"));
        assert_eq!(nearest("tls_certificate", keys), None);
    }
}
