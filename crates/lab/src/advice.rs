//! What can be done about runs that did not count: which limit was exceeded and by how much, what to change, and how to
//! allow more.

use crate::invalid_rounds::Void;
use crate::record::{Record, Round};
use crate::stats;
use crate::verdict::{MetricVerdict, Outcome, Reason};

/// One cause of void runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The limit, and what was measured.
    pub what: String,
    /// What to try, the best first.
    pub tries: Vec<String>,
}

/// For each cause that cost one of these verdicts, or all runs of a subject.
pub fn advice(record: &Record, verdicts: &[MetricVerdict]) -> Vec<Advice> {
    let cost = |is: fn(&Reason) -> bool| {
        verdicts.iter().any(|verdict| match &verdict.outcome {
            Outcome::CannotTell { reasons, .. } => reasons.iter().any(is),
            _ => false,
        })
    };
    let metric = &record.experiment.metric;
    let nothing_counts = record.experiment.subjects.iter().any(|subject| {
        let mut own = record.rounds.iter().filter(|round| round.subject == subject.name).peekable();
        own.peek().is_some() && own.all(|round| !record.counts(round, metric))
    });
    let mut all = Vec::new();
    if nothing_counts || cost(|reason| matches!(reason, Reason::GeneratorLate { .. })) {
        all.extend(late(record));
    }
    if nothing_counts || cost(|reason| matches!(reason, Reason::CpuStolen { .. })) {
        all.extend(stolen(record));
    }
    if nothing_counts || cost(|reason| matches!(reason, Reason::CoresShared { .. })) {
        all.extend(shared(record));
    }
    all
}

impl std::fmt::Display for Advice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.what)?;
        self.tries.iter().try_for_each(|text| write!(f, "\n  - {text}"))
    }
}

fn late(record: &Record) -> Option<Advice> {
    let measured = Measured::of(record, |void| match void {
        Void::GeneratorLate { p99_us, .. } => Some(*p99_us),
        _ => None,
    })?;
    let limit = record.experiment.limits.late_p99_us;
    let enough = round_up(measured.most * 1.1);
    let pinned = |cpus: &Option<String>| cpus.clone().unwrap_or_else(|| "any CPU".to_owned());
    let subjects =
        record.experiment.subjects.first().map(|subject| pinned(&subject.cpus)).unwrap_or_default();
    Some(Advice {
        what: format!(
            "The generator was late in {}: 1 % of what it sent left {} µs or more after it was due, {limit:.0} µs are \
             allowed (late_p99_us). Then rates, losses and latencies of a run do not count; CPU per datagram does. Try:",
            measured.runs(),
            measured.span(|us| format!("{us:.0}")),
        ),
        tries: vec![
            "a lower rate or fewer clients (--rate, --clients of `turnpike load`)".to_owned(),
            format!(
                "a CPU for the load alone (now: load on {}, subjects on {subjects}): --load-cpus and --cpus, or `cpus` in \
                 the experiment's file; helpers run with the load",
                pinned(&record.experiment.load_cpus)
            ),
            quieter_machine(record),
            format!(
                "where so late is good enough: --max-late-us {enough:.0}, or late_p99_us = {enough:.0} under [limits] in \
                 the experiment's file"
            ),
        ],
    })
}

fn stolen(record: &Record) -> Option<Advice> {
    let measured = Measured::of(record, |void| match void {
        Void::CpuStolen { percent, .. } => Some(*percent),
        _ => None,
    })?;
    let limit = record.experiment.limits.steal_percent;
    let enough = round_up(measured.most * 1.1).min(100.0);
    Some(Advice {
        what: format!(
            "The hypervisor took CPU time in {}: {} % of the machine's, {limit} % are allowed (steal_percent). That \
             changes every figure, so no metric of such a run counts. Try:",
            measured.runs(),
            measured.span(|percent| format!("{percent:.1}")),
        ),
        tries: vec![
            "another time of the day, or a machine whose CPUs are not shared".to_owned(),
            idle_that_polls(record),
            "more rounds (--rounds): void ones are made again, up to half as many as were wanted".to_owned(),
            format!(
                "where that is good enough: --max-steal {enough}, or steal_percent = {enough} under [limits] in the \
                 experiment's file"
            ),
        ],
    })
}

fn idle_that_polls(record: &Record) -> String {
    let now = match record.environment.idle.as_str() {
        "" => String::new(),
        idle => format!(" (now: {idle})"),
    };
    format!(
        "idle CPUs that poll before they halt, so that the host does not take them away{now}: see \"In a virtual machine\" of \
         docs/lab.md"
    )
}

fn shared(record: &Record) -> Option<Advice> {
    let measured = Measured::of(record, |void| match void {
        Void::CoresShared { percent, .. } => Some(*percent),
        _ => None,
    })?;
    let limit = record.experiment.limits.foreign_percent;
    let enough = round_up(measured.most * 1.1).min(100.0);
    Some(Advice {
        what: format!(
            "Others used the subject's cores in {}: {} % of their time, {limit} % are allowed (foreign_percent). A subject \
             that waits for its core finds more work at once when it gets it, so no metric of such a run counts. Try:",
            measured.runs(),
            measured.span(|percent| format!("{percent:.1}")),
        ),
        tries: vec![
            quieter_machine(record),
            "another core for the subjects: --cpus, or `cpus` in the experiment's file".to_owned(),
            format!(
                "where that is good enough: --max-foreign {enough}, or foreign_percent = {enough} under [limits] in the \
                 experiment's file"
            ),
        ],
    })
}

fn quieter_machine(record: &Record) -> String {
    match record.environment.notes.iter().find(|note| note.starts_with("load average")) {
        Some(note) => format!("a quieter machine ({note} when it began)"),
        None => "a quieter machine".to_owned(),
    }
}

/// By how much a limit was exceeded in the runs that it made void.
struct Measured {
    count: usize,
    of: usize,
    least: f64,
    median: f64,
    most: f64,
}

impl Measured {
    fn of(record: &Record, value: impl Fn(&Void) -> Option<f64>) -> Option<Self> {
        let runs = || record.rounds.iter().chain(&record.aa);
        let values: Vec<f64> =
            runs().filter_map(|round: &Round| round.voided.as_ref().and_then(&value)).collect();
        Some(Self {
            count: values.len(),
            of: runs().count(),
            least: values.iter().copied().reduce(f64::min)?,
            median: stats::median(&values)?,
            most: values.iter().copied().reduce(f64::max)?,
        })
    }

    fn runs(&self) -> String {
        format!("{} of {} {}", self.count, self.of, if self.of == 1 { "run" } else { "runs" })
    }

    fn span(&self, show: impl Fn(f64) -> String) -> String {
        if self.count == 1 {
            return show(self.most);
        }
        format!("{} to {} (median {})", show(self.least), show(self.most), show(self.median))
    }
}

/// The next number of one significant figure that is 1, 2 or 5.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.max(f64::MIN_POSITIVE).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|figure| figure * power)
        .into_iter()
        .find(|round| *round >= value)
        .unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::record;
    use crate::report;

    fn late_record(metric: &str) -> Record {
        let mut record = record(metric, &[(100.0, 100.0, 200.0); 6]);
        record.experiment.load_cpus = Some("1".to_owned());
        record.environment.notes.push("load average 3.20 2.00 1.00 2/300 4711".to_owned());
        for (i, round) in record.rounds.iter_mut().chain(&mut record.aa).enumerate() {
            round.voided =
                Some(Void::GeneratorLate { p99_us: 2_000.0 + 1_000.0 * i as f64, limit_us: 1_000.0 });
        }
        record
    }

    #[test]
    fn a_late_generator_is_told_with_its_limit_what_was_measured_the_flag_and_what_to_try() {
        let record = late_record("delivered_pps");
        let [advice] = &advice(&record, &report::verdicts(&record))[..] else { panic!("one cause") };
        let text = advice.to_string();
        for part in [
            "late in 18 of 18 runs",
            "2000 to 19000 (median 10500) µs",
            "1000 µs are allowed (late_p99_us)",
            "--clients",
            "load on 1, subjects on 0",
            "--load-cpus",
            "load average 3.20",
            "--max-late-us 50000",
            "late_p99_us = 50000 under [limits]",
        ] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn nothing_is_advised_where_nothing_was_lost() {
        let sound = record("delivered_pps", &[(100.0, 100.0, 200.0); 6]);
        assert_eq!(advice(&sound, &report::verdicts(&sound)), []);
        // One void round of twenty costs no verdict.
        let mut one = record("delivered_pps", &[(100.0, 100.0, 200.0); 20]);
        one.rounds[0].voided = Some(Void::GeneratorLate { p99_us: 2_000.0, limit_us: 1_000.0 });
        assert_eq!(advice(&one, &report::verdicts(&one)), []);
    }

    #[test]
    fn a_lone_subject_without_a_run_that_counts_gets_advice_too() {
        let mut record = late_record("delivered_pps");
        record.experiment.subjects.truncate(1);
        assert_eq!(advice(&record, &[]).len(), 1);
    }

    #[test]
    fn stolen_time_is_told_with_its_own_limit() {
        let mut record = late_record("delivered_pps");
        for round in record.rounds.iter_mut().chain(&mut record.aa) {
            round.voided = Some(Void::CpuStolen { percent: 3.26, limit_percent: 1.0 });
        }
        let [advice] = &advice(&record, &report::verdicts(&record))[..] else { panic!("one cause") };
        let text = advice.to_string();
        assert!(text.contains("3.3 to 3.3 (median 3.3) %") && text.contains("1 % are allowed"), "{text}");
        assert!(
            text.contains("--max-steal 5,") && text.contains("steal_percent = 5 under [limits]"),
            "{text}"
        );
    }

    #[test]
    fn cores_that_others_used_are_told_with_their_own_limit() {
        let mut record = late_record("packets_per_busy_s");
        for round in record.rounds.iter_mut().chain(&mut record.aa) {
            round.voided = Some(Void::CoresShared { percent: 12.0, limit_percent: 3.0 });
        }
        let [advice] = &advice(&record, &report::verdicts(&record))[..] else { panic!("one cause") };
        let text = advice.to_string();
        for part in
            ["12.0 to 12.0 (median 12.0) %", "3 % are allowed", "load average 3.20", "--max-foreign 20,"]
        {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn a_limit_is_rounded_up_to_a_plain_number() {
        assert_eq!([1.0, 1.1, 4.0, 7.0, 21_000.0].map(round_up), [1.0, 2.0, 5.0, 10.0, 50_000.0]);
    }
}
