//! Errors with a remedy, and their exit codes.

use std::{fs, io, path::Path};

use turnpike_strict::Mistakes;

#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// Errors that the user can fix (mistyped key, missing tool, no permission): exit code 2.
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    Failed(String),
}

impl LabError {
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }

    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Self::Failed(text.into())
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |error| Self::Failed(format!("{what}: {error}"))
    }

    pub(crate) fn read(path: &Path) -> Result<String, Self> {
        fs::read_to_string(path)
            .map_err(|error| Self::usage(format!("cannot read {}: {error}", path.display())))
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) => 1,
        }
    }
}

impl From<Mistakes> for LabError {
    fn from(mistakes: Mistakes) -> Self {
        Self::usage(mistakes.to_string())
    }
}
