//! Result of translating another server's configuration.

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// turnpike's configuration file, with comments on settings that have no translation.
    pub toml: String,
    pub notes: Vec<Note>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Line in the original, from 1; 0 for the whole file and for command lines.
    pub line: usize,
    pub option: String,
    /// Description of the work to do, or the reason why there is none.
    pub text: String,
    /// True if the operator does not have to do anything.
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
