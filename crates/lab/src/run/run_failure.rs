//! Reasons why a run yields no figures.

use crate::{error::LabError, invalid_rounds::VoidReason};

#[derive(Debug)]
pub(crate) enum RunFailure {
    Interrupted,
    NotReady(String),
    HelperNotReady(String),
    Subject(String),
    Other(String),
    Fatal(LabError),
}

impl From<LabError> for RunFailure {
    fn from(error: LabError) -> Self {
        Self::Fatal(error)
    }
}

impl RunFailure {
    pub(crate) fn void(&self) -> Option<VoidReason> {
        match self {
            Self::NotReady(how) | Self::Subject(how) => Some(VoidReason::SubjectFailed { how: how.clone() }),
            Self::Other(what) | Self::HelperNotReady(what) => Some(VoidReason::Other { what: what.clone() }),
            Self::Interrupted | Self::Fatal(_) => None,
        }
    }

    pub(crate) fn into_error(self) -> LabError {
        match self {
            Self::Interrupted => LabError::failed("interrupted"),
            Self::NotReady(how) | Self::HelperNotReady(how) => {
                LabError::usage(format!("{how}: check its command and its readiness probe"))
            }
            Self::Subject(how) | Self::Other(how) => LabError::failed(how),
            Self::Fatal(error) => error,
        }
    }
}
