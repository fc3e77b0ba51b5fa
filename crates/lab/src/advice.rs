//! Advice on void runs: the limit that was exceeded, the measured values, what to change, and how to raise the limit.

use std::fmt;

use crate::invalid_rounds::VoidCause;
use crate::record::RunRecord;
use crate::verdict::{Conclusion, MetricVerdict, VerdictReason};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Advice {
    pub(crate) what: String,
    /// Remedies, the best one first.
    pub(crate) tries: Vec<String>,
}

/// Advice for each cause that prevented a verdict or voided all runs of a subject.
pub(crate) fn advice(record: &RunRecord, verdicts: &[MetricVerdict]) -> Vec<Advice> {
    let metric = &record.experiment.metric;
    let nothing_counts = record.experiment.subjects.iter().any(|subject| {
        let mut own = record.rounds.iter().filter(|round| round.subject == subject.name).peekable();
        own.peek().is_some() && own.all(|round| !record.counts(round, metric))
    });
    let cost = |cause: &VoidCause| {
        let names_it = |reason: &VerdictReason| matches!(reason, VerdictReason::Void { cause: named, .. } if named == cause);
        verdicts.iter().any(|verdict| {
            matches!(&verdict.outcome, Conclusion::CannotTell { reasons, .. } if reasons.iter().any(names_it))
        })
    };
    let causes = VoidCause::ALL.into_iter().filter(|cause| nothing_counts || cost(cause));
    causes.filter_map(|cause| of_cause(record, cause)).collect()
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        self.tries.iter().try_for_each(|text| write!(f, "\n  - {text}"))
    }
}

fn of_cause(record: &RunRecord, cause: VoidCause) -> Option<Advice> {
    let all = || record.rounds.iter().chain(&record.aa);
    let voids = all().filter_map(|round| round.voided.as_ref()?.cause());
    let values: Vec<f64> = voids.filter(|(other, _)| *other == cause).map(|(_, value)| value).collect();
    let most = values.iter().copied().reduce(f64::max)?;
    let least = values.iter().copied().fold(most, f64::min);
    let runs = format!("{} of {} runs", values.len(), all().count());
    let limits = &record.experiment.limits;
    let enough = round_up(most * 1.1);
    let (what, tries, limit): (String, &[&str], String) = match cause {
        VoidCause::GeneratorLate => (
            format!(
                "The generator fell behind in {runs}: 1 % of its datagrams left {least:.0} to {most:.0} µs or more after they were due; the \
                 limit is {:.0} µs (late_p99_us). Rates, losses and latencies of such a run do not count; CPU per datagram does. Try:",
                limits.late_p99_us
            ),
            &[
                "a lower rate or fewer clients (--rate, --clients of `turnpike load`)",
                "a dedicated CPU for the load: --load-cpus and --cpus, or `cpus` in the experiment file",
                QUIETER,
            ],
            format!("--max-late-us {enough}, or late_p99_us = {enough}"),
        ),
        VoidCause::CpuStolen => (
            format!(
                "The hypervisor stole CPU time in {runs}: {least:.1} to {most:.1} % of the machine's CPU time; the limit is {} % \
                 (steal_percent). No metric of such a run counts. Try:",
                limits.steal_percent
            ),
            &[
                "a different time of day, or a machine whose CPUs are not shared",
                "CPUs that poll before they halt: see \"In a virtual machine\" in docs/lab.md",
                "more rounds (--rounds): void ones are repeated, up to half of the requested number",
            ],
            format!("--max-steal {0}, or steal_percent = {0}", enough.min(100.0)),
        ),
        VoidCause::CoresShared => (
            format!(
                "Other processes used the subject's cores in {runs}: {least:.1} to {most:.1} % of the time; the limit is {} % \
                 (foreign_percent). A subject that waits for its core then processes larger batches, so no metric of such a run counts. Try:",
                limits.foreign_percent
            ),
            &[QUIETER, "a different core for the subjects: --cpus, or `cpus` in the experiment file"],
            format!("--max-foreign {0}, or foreign_percent = {0}", enough.min(100.0)),
        ),
    };
    let mut tries: Vec<String> = tries.iter().map(|text| (*text).to_owned()).collect();
    tries.push(format!(
        "a higher limit, if that is acceptable: {limit} under [limits] in the experiment file"
    ));
    Some(Advice { what, tries })
}

const QUIETER: &str = "a less busy machine";

fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.max(f64::MIN_POSITIVE).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|figure| figure * power);
    steps.into_iter().find(|step| *step >= value).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invalid_rounds::VoidReason;
    use crate::record::tests::record;
    use crate::report;

    fn late_record(metric: &str) -> RunRecord {
        let mut record = record(metric, &[(100.0, 100.0, 200.0); 6]);
        for (i, round) in record.rounds.iter_mut().chain(&mut record.aa).enumerate() {
            round.voided =
                Some(VoidReason::GeneratorLate { p99_us: 2_000.0 + 1_000.0 * i as f64, limit_us: 1_000.0 });
        }
        record
    }

    #[test]
    fn a_generator_that_fell_behind_is_explained_with_remedies() {
        let record = late_record("delivered_pps");
        let [advice] = &advice(&record, &report::verdicts(&record))[..] else { panic!("not one cause") };
        let text = advice.to_string();
        for part in [
            "fell behind in 18 of 18 runs",
            "2000 to 19000 µs",
            "the limit is 1000 µs (late_p99_us)",
            "--clients",
            "--load-cpus",
            "--max-late-us 50000,",
            "late_p99_us = 50000 under [limits]",
        ] {
            assert!(text.contains(part), "{part} is missing from {text}");
        }
    }

    #[test]
    fn there_is_no_advice_unless_a_verdict_was_prevented() {
        let sound = record("delivered_pps", &[(100.0, 100.0, 200.0); 6]);
        assert_eq!(advice(&sound, &report::verdicts(&sound)), []);
        // A single void round in twenty does not prevent a verdict.
        let mut one = record("delivered_pps", &[(100.0, 100.0, 200.0); 20]);
        one.rounds[0].voided = Some(VoidReason::GeneratorLate { p99_us: 2_000.0, limit_us: 1_000.0 });
        assert_eq!(advice(&one, &report::verdicts(&one)), []);
    }

    #[test]
    fn a_subject_without_valid_runs_gets_advice() {
        let mut record = late_record("delivered_pps");
        record.experiment.subjects.truncate(1);
        assert_eq!(advice(&record, &[]).len(), 1);
    }

    #[test]
    fn stolen_time_and_shared_cores_have_their_own_limits() {
        let stolen = VoidReason::CpuStolen { percent: 3.26, limit_percent: 1.0 };
        let shared = VoidReason::CoresShared { percent: 12.0, limit_percent: 3.0 };
        for (void, parts) in [
            (stolen, ["3.3 to 3.3 %", "the limit is 1 %", "--max-steal 5,", "steal_percent = 5 under"]),
            (shared, ["12.0 to 12.0 %", "the limit is 3 %", "less busy", "--max-foreign 20,"]),
        ] {
            let mut record = late_record("packets_per_busy_s");
            for round in record.rounds.iter_mut().chain(&mut record.aa) {
                round.voided = Some(void.clone());
            }
            let [advice] = &advice(&record, &report::verdicts(&record))[..] else { panic!("not one cause") };
            let text = advice.to_string();
            for part in parts {
                assert!(text.contains(part), "{part} is missing from {text}");
            }
        }
    }

    #[test]
    fn suggested_limits_are_round_numbers() {
        assert_eq!([1.0, 1.1, 4.0, 7.0, 21_000.0].map(round_up), [1.0, 2.0, 5.0, 10.0, 50_000.0]);
    }
}
