//! Advice on void runs: the limit that was exceeded, the measured values, what to change, and how to raise the limit.

use std::fmt;

use crate::invalid_rounds::VoidCause;
use crate::record::RunRecord;
use crate::stats;
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
    let runs = format!("{} of {}", values.len(), plural(all().count(), "run"));
    let limits = &record.experiment.limits;
    let (what, mut tries, enough, flag, key) = match cause {
        VoidCause::GeneratorLate => (
            format!(
                "The generator fell behind in {runs}: 1 % of its datagrams left {} µs or more after they were due; the limit \
                 is {:.0} µs (late_p99_us). Rates, losses and latencies of such a run do not count; CPU per datagram does. Try:",
                span(&values, 0),
                limits.late_p99_us
            ),
            vec![
                "a lower rate or fewer clients (--rate, --clients of `turnpike load`)".to_owned(),
                cpu_for_the_load(record),
                quieter_machine(record),
            ],
            round_up(most * 1.1),
            "--max-late-us",
            "late_p99_us",
        ),
        VoidCause::CpuStolen => (
            format!(
                "The hypervisor stole CPU time in {runs}: {} % of the machine's CPU time; the limit is {} % (steal_percent). This \
                 affects every figure, so no metric of such a run counts. Try:",
                span(&values, 1),
                limits.steal_percent
            ),
            vec![
                "a different time of day, or a machine whose CPUs are not shared".to_owned(),
                idle_that_polls(record),
                "more rounds (--rounds): void ones are repeated, up to half of the requested number"
                    .to_owned(),
            ],
            round_up(most * 1.1).min(100.0),
            "--max-steal",
            "steal_percent",
        ),
        VoidCause::CoresShared => (
            format!(
                "Other processes used the subject's cores in {runs}: {} % of the time; the limit is {} % (foreign_percent). A subject \
                 that waits for its core then processes larger batches, so no metric of such a run counts. Try:",
                span(&values, 1),
                limits.foreign_percent
            ),
            vec![
                quieter_machine(record),
                "a different core for the subjects: --cpus, or `cpus` in the experiment file".to_owned(),
            ],
            round_up(most * 1.1).min(100.0),
            "--max-foreign",
            "foreign_percent",
        ),
    };
    tries.push(format!(
        "a higher limit, if that is acceptable: {flag} {enough}, or {key} = {enough} under [limits] in the experiment file"
    ));
    Some(Advice { what, tries })
}

fn cpu_for_the_load(record: &RunRecord) -> String {
    let pinned = |cpus: &Option<String>| cpus.clone().unwrap_or_else(|| "any CPU".to_owned());
    let subjects =
        record.experiment.subjects.first().map(|subject| pinned(&subject.cpus)).unwrap_or_default();
    format!(
        "a dedicated CPU for the load (now: load on {}, subjects on {subjects}): --load-cpus and --cpus, or `cpus` in the \
         experiment file; helpers share the CPU of the load",
        pinned(&record.experiment.load_cpus)
    )
}

fn idle_that_polls(record: &RunRecord) -> String {
    let now = match record.environment.idle.as_str() {
        "" => String::new(),
        idle => format!(" (now: {idle})"),
    };
    format!(
        "CPUs that poll before they halt, so that the host does not deschedule them{now}: see \"In a virtual machine\" in \
         docs/lab.md"
    )
}

fn quieter_machine(record: &RunRecord) -> String {
    match record.environment.notes.iter().find(|note| note.starts_with("load average")) {
        Some(note) => format!("a less busy machine ({note} at the start)"),
        None => "a less busy machine".to_owned(),
    }
}

fn plural(count: usize, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

fn span(values: &[f64], digits: usize) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    match stats::median(values) {
        Some(median) if values.len() > 1 => {
            format!("{least:.digits$} to {most:.digits$} (median {median:.digits$})")
        }
        _ => format!("{most:.digits$}"),
    }
}

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
        record.experiment.load_cpus = Some("1".to_owned());
        record.environment.notes.push("load average 3.20 2.00 1.00 2/300 4711".to_owned());
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
            "2000 to 19000 (median 10500) µs",
            "the limit is 1000 µs (late_p99_us)",
            "--clients",
            "load on 1, subjects on 0",
            "--load-cpus",
            "load average 3.20",
            "--max-late-us 50000",
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
        for (void, parts) in [
            (
                VoidReason::CpuStolen { percent: 3.26, limit_percent: 1.0 },
                [
                    "3.3 to 3.3 (median 3.3) %",
                    "the limit is 1 %",
                    "--max-steal 5,",
                    "steal_percent = 5 under",
                ],
            ),
            (
                VoidReason::CoresShared { percent: 12.0, limit_percent: 3.0 },
                [
                    "12.0 to 12.0 (median 12.0) %",
                    "the limit is 3 %",
                    "load average 3.20",
                    "--max-foreign 20,",
                ],
            ),
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
