//! Execution of experiments: processes in their namespaces, readiness, measurement windows, order, and
//! failures.

mod compare;
pub(crate) mod rates;
mod ready;
mod result;
pub(crate) mod run_failure;
pub(crate) mod session;
pub(crate) mod stage;

use self::{compare::compare, stage::RunStage};
use crate::{
    error::LabError,
    profile,
    record::RunRecord,
    request::{RunRequest, Task},
};

pub(crate) fn execute(request: &RunRequest, stage: &RunStage) -> Result<RunRecord, LabError> {
    match &request.task {
        Task::Compare => compare(request, stage),
        Task::Rates { plan, rounds } => rates::run(request, stage, plan, *rounds),
        Task::Profile => profile::profile(request, stage).inspect_err(|_| stage.remove_directory()),
    }
}
