//! Result of translating another server's configuration.

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Our configuration file, with comments on settings without a translation.
    pub toml: String,
    pub notes: Vec<Note>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Line of the original, from 1; 0 for the whole file and for command lines.
    pub line: usize,
    pub option: String,
    /// Work to do, or the reason why nothing is needed.
    pub text: String,
    /// Needs no action by the operator.
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
