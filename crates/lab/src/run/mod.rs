//! Making the runs of an experiment: processes in their namespaces, readiness, windows, order, and what becomes of failures.

mod compare;
pub(crate) mod halt;
mod links;
pub(crate) mod rates;
mod ready;
mod result;
pub(crate) mod session;
pub(crate) mod stage;

use self::{compare::compare, stage::RunStage};
use crate::{
    error::LabError,
    profile,
    record::Record,
    request::{RunRequest, Task},
};

/// Does on `stage` what `request` asks for. Where nothing was measured the record's directory is gone.
pub(crate) fn carry_out(request: &RunRequest, stage: &RunStage) -> Result<Record, LabError> {
    match &request.task {
        Task::Compare => compare(request, stage),
        Task::Rates { plan, rounds } => rates::run(request, stage, plan, *rounds),
        Task::Profile => profile::profile(request, stage).inspect_err(|_| stage.leave_nothing()),
    }
}
