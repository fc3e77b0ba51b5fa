//! A configuration of another server, translated into one of ours.

/// A translation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The file, with comments on the settings that have no translation.
    pub toml: String,
    /// Remarks, by line of the original.
    pub notes: Vec<Note>,
}

/// A remark about one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Line of the original, from 1; 0 for all of it and for command lines.
    pub line: usize,
    /// Name of the setting.
    pub option: String,
    /// The remark: the work to do, or the reason why there is none.
    pub text: String,
    /// Whether the operator has nothing to do.
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
