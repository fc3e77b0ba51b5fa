//! Why a run did not give figures.

use crate::{error::LabError, invalid_rounds::Void};

/// What ended a run early.
#[derive(Debug)]
pub(crate) enum Halt {
    Interrupted,
    /// The subject did not start.
    NotReady(String),
    /// A helper did not start.
    HelperNotReady(String),
    /// The subject ended under load.
    Subject(String),
    /// The workload or a helper failed.
    Other(String),
    /// The lab itself cannot go on.
    Fatal(LabError),
}

impl From<LabError> for Halt {
    fn from(error: LabError) -> Self {
        Self::Fatal(error)
    }
}

impl Halt {
    /// As it stands in the record; nothing for what ends the whole experiment.
    pub(crate) fn void(&self) -> Option<Void> {
        match self {
            Self::NotReady(how) | Self::Subject(how) => Some(Void::SubjectFailed { how: how.clone() }),
            Self::Other(what) | Self::HelperNotReady(what) => Some(Void::Other { what: what.clone() }),
            Self::Interrupted | Self::Fatal(_) => None,
        }
    }

    /// As the error that ends a command that cannot do without this run.
    pub(crate) fn into_error(self) -> LabError {
        match self {
            Self::Interrupted => LabError::failed("interrupted"),
            Self::NotReady(how) | Self::HelperNotReady(how) => {
                LabError::usage(format!("{how}: correct its command or its readiness probe"))
            }
            Self::Subject(how) | Self::Other(how) => LabError::failed(how),
            Self::Fatal(error) => error,
        }
    }
}
