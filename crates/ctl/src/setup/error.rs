//! Errors of `turnpike setup`, each one sentence with its remedy.

use std::{
    io::{self, ErrorKind},
    path::PathBuf,
};

use turnpike_probe::ProbeError;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// Answers that cannot work on this machine.
    #[error("{0}")]
    Answer(String),
    /// Errors that `turnpike check-config` found, one per line.
    #[error("{0}")]
    Rejected(String),
    #[error("cannot write {}: {source}; {}", path.display(), remedy(source.kind()))]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot run {program}: {source}")]
    Program { program: String, source: io::Error },
    #[error("{0}")]
    Start(String),
    #[error(transparent)]
    Probe(#[from] ProbeError),
    #[error("cannot ask: {0}; answer with flags instead (turnpike setup --help)")]
    Dialogue(io::Error),
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
}

impl SetupError {
    /// True if the flags, the answers or the resulting configuration are wrong.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Answer(_) | Self::Rejected(_))
    }

    pub(crate) fn answer<T>(text: impl Into<String>) -> Result<T, Self> {
        Err(Self::Answer(text.into()))
    }
}

fn remedy(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "free some space, or choose another file with --config"
        }
        ErrorKind::PermissionDenied => "run turnpike setup with sudo, or choose another file with --config",
        ErrorKind::NotFound => "create the directory, or choose another file with --config",
        ErrorKind::ReadOnlyFilesystem => {
            "remount the file system writable, or choose another file with --config"
        }
        _ => "choose another file with --config",
    }
}
