//! Configurations of other servers, translated into one of ours.

pub mod coturn;

/// A translation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The file, with comments on what has no translation.
    pub toml: String,
    /// What somebody should know, by line of the original.
    pub notes: Vec<Note>,
}

/// What is to be said about one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Of the original, from 1; 0 for all of it.
    pub line: usize,
    /// Its name.
    pub option: String,
    /// What is to be done.
    pub text: String,
    /// Whether nothing has to be.
    pub is_harmless: bool,
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.line > 0 {
            write!(f, "line {}, ", self.line)?;
        }
        write!(f, "{}: {}", self.option, self.text)
    }
}
