//! What is wrong, and where: every mistake at once, each with what was expected.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// Where a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// A place in a file; line and column count from 1, the column in characters;
    /// line 0 is the file as a whole.
    File {
        /// The file as it was named.
        path: PathBuf,
        /// Line.
        line: usize,
        /// Column.
        column: usize,
    },
    /// An environment variable.
    Environment(String),
    /// A command line flag, with its dashes.
    Flag(&'static str),
    /// A place in a command line argument; the column counts characters from 1.
    Argument {
        /// The argument.
        text: String,
        /// Column.
        column: usize,
    },
}

impl Origin {
    /// A file as a whole.
    pub fn file(path: &Path) -> Self {
        Self::File { path: path.to_owned(), line: 0, column: 0 }
    }

    /// The place of a byte in the text of a file.
    pub fn in_text(path: &Path, text: &str, offset: usize) -> Self {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let column = before[line_start..].chars().count() + 1;
        Self::File { path: path.to_owned(), line: before.matches('\n').count() + 1, column }
    }

    /// Whether values from here are always text, so that `"4"` stands for the number 4.
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

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Where.
    pub origin: Origin,
    /// Which key, such as `relay.ports`; empty where the problem names it, or the file as a whole is meant.
    pub key: String,
    /// What is wrong; never holds a secret.
    pub problem: String,
    /// What would be right.
    pub expected: String,
    /// What was meant most likely.
    pub suggestion: Option<String>,
}

impl Mistake {
    /// One that suggests nothing.
    pub fn new(
        origin: &Origin,
        key: impl Into<String>,
        problem: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        let (key, problem, expected) = (key.into(), problem.into(), expected.into());
        Self { origin: origin.clone(), key, problem, expected, suggestion: None }
    }

    /// The same, with what was meant most likely.
    pub fn suggesting(self, meant: Option<&str>) -> Self {
        Self { suggestion: meant.map(str::to_owned), ..self }
    }

    /// Suggests the word that was most likely meant, in place of the list of all words.
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

/// All mistakes, at least one, in the order of their files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistakes(pub Vec<Mistake>);

impl Mistakes {
    /// File by file, in their order, then of the other sources. The file whose mistake comes first here is the first.
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
            // A stable sort: arguments are told in their own order.
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

/// The candidate that a mistyped word most likely meant: close by Damerau-Levenshtein distance, or none.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (word.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// The same as a part of a sentence, or else what there is.
pub fn hint<'a>(word: &str, candidates: impl Iterator<Item = &'a str> + Clone) -> String {
    match nearest(word, candidates.clone()) {
        Some(meant) => format!("did you mean \"{meant}\"?"),
        None => format!("there are: {}", candidates.collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_mistake_finds_its_key_and_noise_finds_none() {
        let keys = ["listen", "realm", "workers"];
        assert_eq!(nearest("lisen", keys), Some("listen"));
        assert_eq!(nearest("wrokers", keys), Some("workers"));
        assert_eq!(nearest("tls_certificate", keys), None);
    }
}
