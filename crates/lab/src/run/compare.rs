//! Execution of a comparison. Each run starts fresh processes, in an order derived from the seed; a second baseline run per round
//! determines the noise floor; and the record is saved after every run.

use std::{collections::BTreeSet, time::Duration};

use super::{run_failure::RunFailure, stage::RunStage};
use crate::{
    error::LabError,
    experiment::ServiceSpec,
    invalid_rounds::VoidReason,
    order,
    probe::syscalls,
    progress::RunProgress,
    record::{Round, RunRecord},
    request::RunRequest,
    stats::{self, Estimate},
};

/// Expected time for starting and stopping the programs of a run, in seconds.
const OVERHEAD: f64 = 1.5;
/// Number of failures after which a subject that has never succeeded is abandoned.
const HOPELESS: usize = 2;

/// Runs the experiment of `request`. The record is saved in its directory even if the run is interrupted.
pub(super) fn compare(request: &RunRequest, stage: &RunStage) -> Result<RunRecord, LabError> {
    let mut record = stage.record(request)?;
    let experiment = &stage.experiment;
    let expected =
        experiment.discard + experiment.workload.rest + experiment.warmup + experiment.duration + OVERHEAD;
    let outcome = stage.run_rounds(&mut record, experiment.aa, expected, |service, round, _| {
        let mut session = stage.start(service)?;
        session.discard_first()?;
        session.measure(stage.window(), |_| {}, round)?;
        round.voided = experiment.limits.check(&round.metrics);
        Ok(())
    });
    let outcome = outcome.and_then(|()| match stage.traces_syscalls && !record.interrupted {
        true => stage.trace_all(&mut record),
        false => Ok(()),
    });
    let is_wrong = matches!(outcome, Err(LabError::Usage(_)));
    let is_measured = !record.rounds.is_empty() && !is_wrong;
    stage.keep(&mut record, is_measured)?;
    outcome.map(|()| record)
}

impl RunStage {
    /// Runs all rounds, each with every subject and, if `aa` is true, the baseline again. `measure` measures a subject once, which takes
    /// about `expected` seconds.
    pub(super) fn run_rounds(
        &self,
        record: &mut RunRecord,
        aa: bool,
        expected: f64,
        mut measure: impl FnMut(&ServiceSpec, &mut Round, &mut RunRecord) -> Result<(), RunFailure>,
    ) -> Result<(), LabError> {
        let subjects = &self.experiment.subject;
        let runs = subjects.len() + usize::from(aa);
        let wanted = record.experiment.rounds as usize;
        // Limit on the number of rounds, including repetitions of rounds that were void for external reasons.
        let most = wanted + wanted.div_ceil(2);
        let mut rounds = wanted;
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let mut progress = RunProgress {
            rounds: count(wanted),
            runs_per_round: count(runs),
            expected: Duration::from_secs_f64(expected),
            ..RunProgress::default()
        };
        let mut given_up = BTreeSet::new();
        self.console.note(&format!("{}: seed {}", record.id, record.seed));
        for (index, order) in order::plan(record.seed, runs, count(most)).into_iter().enumerate() {
            if index >= rounds {
                break;
            }
            for (place, run) in order.into_iter().enumerate() {
                let again = run == subjects.len();
                let service = &subjects[if again { 0 } else { run }];
                if given_up.contains(&service.name) {
                    progress.runs_done += 1;
                    progress.runs_skipped += 1;
                    continue;
                }
                let name = if again { format!("{} (again)", service.name) } else { service.name.clone() };
                self.console.progress(&progress.line(&name, self.console.elapsed()));
                let mut round = Round::new(count(index), &service.name, count(place));
                if let Err(halt) = measure(service, &mut round, record) {
                    if matches!(halt, RunFailure::Interrupted) {
                        record.interrupted = true;
                        self.console.note("interrupted: finished measurements are kept");
                        return Ok(());
                    }
                    // If the very first start fails, the experiment itself must be wrong.
                    let is_start = matches!(halt, RunFailure::NotReady(_) | RunFailure::HelperNotReady(_));
                    let is_first = !service.optional && runs_of(record, &service.name).next().is_none();
                    round.voided = halt.void().filter(|_| !(is_start && is_first));
                    if round.voided.is_none() {
                        return Err(halt.into_error());
                    }
                    round.metrics.clear();
                    round.latency = None;
                }
                progress.runs_done += 1;
                self.add(round, again, record)?;
                if always_fails(record, &service.name) {
                    let rest = if service.optional { "continuing without it" } else { "giving up" };
                    self.console.note(&format!("{} failed every time: {rest}", service.name));
                    if !service.optional {
                        return Ok(());
                    }
                    given_up.insert(service.name.clone());
                }
            }
            if let Some(candidate) = subjects.get(1) {
                let metric = &record.experiment.metric;
                let pairs = record.pairs(&subjects[0].name, &candidate.name, metric);
                let what = format!("{} / {}, {metric}", candidate.name, subjects[0].name);
                let estimate = Estimate::new(&stats::log_ratios(pairs).values, record.seed);
                progress.estimate = estimate.map(|estimate| (what, estimate));
            }
            // A round is repeated only if most rounds so far were valid.
            if is_void(record, index) && rounds < most && good_rounds(record, index) * 2 > index {
                rounds += 1;
                progress.rounds += 1;
            }
        }
        Ok(())
    }

    fn add(&self, round: Round, again: bool, record: &mut RunRecord) -> Result<(), LabError> {
        if let Some(void) = &round.voided {
            let counts = record.counts(&round, &record.experiment.metric);
            let what = if counts { "counts only for the cost per datagram" } else { "void" };
            self.console.note(&format!("round {}, {}: {what}, {void}", round.index + 1, round.subject));
        }
        let rounds = if again { &mut record.aa } else { &mut record.rounds };
        rounds.push(round);
        record.save(&self.directory)
    }

    fn trace_all(&self, record: &mut RunRecord) -> Result<(), LabError> {
        for service in &self.experiment.subject {
            self.console.note(&format!("syscalls of {}", service.name));
            let traced = self.start(service).and_then(|mut session| session.trace(self.window()));
            let table = match traced {
                Ok(Some(table)) => table,
                Ok(None) => {
                    let missing = "syscalls: not supported, because strace is not installed";
                    record.environment.notes.push(missing.to_owned());
                    return Ok(());
                }
                Err(RunFailure::Interrupted) => {
                    record.interrupted = true;
                    return Ok(());
                }
                Err(halt @ RunFailure::Fatal(_)) => return Err(halt.into_error()),
                Err(halt) => {
                    let note = format!("syscalls of {}: {}", service.name, halt.into_error());
                    record.environment.notes.push(note);
                    continue;
                }
            };
            crate::console::result(&format!(
                "\nsyscalls of {}\n{}",
                service.name,
                syscalls::describe(&table, 12)
            ));
            record.syscalls.insert(service.name.clone(), table);
        }
        Ok(())
    }
}

fn runs_of<'a>(record: &'a RunRecord, subject: &'a str) -> impl Iterator<Item = &'a Round> {
    record.rounds.iter().chain(&record.aa).filter(move |round| round.subject == subject)
}

fn always_fails(record: &RunRecord, subject: &str) -> bool {
    let failed = runs_of(record, subject)
        .filter(|round| matches!(round.voided, Some(VoidReason::SubjectFailed { .. })))
        .count();
    failed >= HOPELESS && failed == runs_of(record, subject).count()
}

/// Returns true if a run in this round was void for a reason that may not recur.
fn is_void(record: &RunRecord, index: usize) -> bool {
    record.rounds.iter().chain(&record.aa).any(|round| {
        round.index as usize == index
            && matches!(&round.voided, Some(void) if !matches!(void, VoidReason::SubjectFailed { .. }))
    })
}

fn good_rounds(record: &RunRecord, last: usize) -> usize {
    (0..=last).filter(|index| !is_void(record, *index)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rounds: Vec<Round>) -> RunRecord {
        RunRecord { rounds, ..RunRecord::default() }
    }

    fn round(index: u32, voided: Option<VoidReason>) -> Round {
        Round { voided, ..Round::new(index, "a", 0) }
    }

    #[test]
    fn only_subjects_that_never_worked_are_abandoned() {
        let failed = || Some(VoidReason::SubjectFailed { how: String::new() });
        assert!(always_fails(&record(vec![round(0, failed()), round(1, failed())]), "a"));
        assert!(!always_fails(&record(vec![round(0, failed())]), "a"));
        assert!(!always_fails(&record(vec![round(0, None), round(1, failed()), round(2, failed())]), "a"));
    }

    #[test]
    fn only_rounds_void_for_external_reasons_are_repeated() {
        let stolen = Some(VoidReason::CpuStolen { percent: 3.0, limit_percent: 1.0 });
        let failed = Some(VoidReason::SubjectFailed { how: String::new() });
        let record = record(vec![round(0, None), round(1, stolen), round(2, failed)]);
        assert!(!is_void(&record, 0) && is_void(&record, 1) && !is_void(&record, 2));
        assert_eq!(good_rounds(&record, 2), 2);
    }
}
