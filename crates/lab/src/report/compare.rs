//! Comparison of several records, after a check of whether they are comparable.
//!
//! Ratios to a baseline measured in the same run are comparable across days. Absolute figures require the same machine, kernel and
//! workload.

use std::collections::{BTreeMap, BTreeSet};

use super::verdicts;
use crate::metric;
use crate::record::{BuildFile, RecordedExperiment, RecordedSubject, RunRecord};
use crate::stats;

/// Describes the records one after the other; differences from the first record come before the verdicts.
pub(crate) fn compare(records: &[RunRecord]) -> String {
    let mut text = String::new();
    for record in records {
        let differences = comparable(&records[0], record);
        let forbidden = differences.iter().any(|difference| difference.forbids);
        let metric = &record.experiment.metric;
        let baseline = record.baseline().and_then(|name| stats::median(&record.values(name, metric)));
        let (date, environment) = (record.started.get(..10).unwrap_or(&record.started), &record.environment);
        let commit = environment.commit.as_deref().unwrap_or("–");
        text += &format!(
            "{date} {} commit {}{}, baseline {}{}\n",
            record.id,
            commit.get(..9).unwrap_or(commit),
            if environment.dirty { "+" } else { "" },
            baseline.map_or_else(|| "–".to_owned(), |value| metric::show(metric, value)),
            if forbidden { ", NOT COMPARABLE with the first" } else { "" }
        );
        for difference in differences {
            text += &format!("    {} {difference}\n", if difference.forbids { "!" } else { "-" });
        }
        for verdict in verdicts(record) {
            text += &format!("    {verdict}\n");
        }
    }
    text
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {first} and {second}")]
pub(crate) struct RecordDifference {
    /// Kind of difference, such as "kernel" or "offloads of veth0".
    pub(crate) what: String,
    pub(crate) first: String,
    pub(crate) second: String,
    pub(crate) forbids: bool,
}

/// Differences between two records, which are comparable if no difference [forbids](RecordDifference::forbids) the comparison.
///
/// The measured programs may differ, but machine and workload must be the same.
fn comparable(a: &RunRecord, b: &RunRecord) -> Vec<RecordDifference> {
    let mut differences = Vec::new();
    let mut compare = |what: &str, first: String, second: String, forbids: bool| {
        if first != second {
            differences.push(RecordDifference { what: what.to_owned(), first, second, forbids });
        }
    };
    let (here, there) = (&a.environment, &b.environment);
    compare("kernel", here.kernel.clone(), there.kernel.clone(), true);
    compare("CPU model", here.cpu_model.clone(), there.cpu_model.clone(), true);
    compare("cores", here.cores.to_string(), there.cores.to_string(), true);
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
    compare("memory", gib(here.memory_bytes), gib(there.memory_bytes), false);
    if !here.idle.is_empty() && !there.idle.is_empty() {
        compare("idle CPUs", here.idle.clone(), there.idle.clone(), true);
    }
    let interfaces: BTreeSet<&String> = here.offloads.keys().chain(there.offloads.keys()).collect();
    for interface in interfaces {
        let (first, second) = offload_difference(here.offloads.get(interface), there.offloads.get(interface));
        compare(&format!("offloads of {interface}"), first, second, true);
    }
    let tools: BTreeSet<&String> = here.tools.keys().chain(there.tools.keys()).collect();
    for tool in tools {
        let version =
            |tools: &BTreeMap<String, String>| tools.get(tool).map_or("absent", String::as_str).to_owned();
        compare(&format!("version of {tool}"), version(&here.tools), version(&there.tools), false);
    }

    let (asked, other) = (&a.experiment, &b.experiment);
    compare("workload", asked.workload.clone(), other.workload.clone(), true);
    compare("metric", asked.metric.clone(), other.metric.clone(), true);
    compare("duration", format!("{} s", asked.duration_s), format!("{} s", other.duration_s), true);
    compare("warm-up", format!("{} s", asked.warmup_s), format!("{} s", other.warmup_s), true);
    compare("rounds", asked.rounds.to_string(), other.rounds.to_string(), false);
    let names =
        |e: &RecordedExperiment| e.subjects.iter().map(|s| s.name.as_str()).collect::<Vec<_>>().join(", ");
    compare("subjects", names(asked), names(other), false);
    if let (Some(left), Some(right)) = (&asked.load_cpus, &other.load_cpus) {
        compare("CPUs of the workload", left.clone(), right.clone(), true);
    }
    for (left, right) in asked.subjects.iter().zip(&other.subjects) {
        let cpus = |s: &RecordedSubject| s.cpus.clone().unwrap_or_else(|| "not pinned".to_owned());
        compare(&format!("CPUs of {}", left.name), cpus(left), cpus(right), true);
    }
    for before in &a.programs {
        let same = |build: &&BuildFile| (&build.name, build.word) == (&before.name, before.word);
        let Some(after) = b.programs.iter().find(same) else { continue };
        let hash = |build: &BuildFile| build.short_hash().unwrap_or("no hash").to_owned();
        let file = before.path.rsplit('/').next().unwrap_or_default();
        compare(&format!("build of {} ({file})", before.name), hash(before), hash(after), false);
    }
    differences
}

/// Offloads that differ between two interfaces, as one string per interface; the strings are equal if no offloads differ.
fn offload_difference(
    a: Option<&BTreeMap<String, bool>>,
    b: Option<&BTreeMap<String, bool>>,
) -> (String, String) {
    let (Some(a), Some(b)) = (a, b) else {
        let present =
            |side: Option<_>| if side.is_some() { "present" } else { "no such interface" }.to_owned();
        return (present(a), present(b));
    };
    let features: BTreeSet<&String> = a.keys().chain(b.keys()).filter(|f| a.get(*f) != b.get(*f)).collect();
    let list = |side: &BTreeMap<String, bool>| {
        let state = |feature: &&String| match side.get(*feature) {
            Some(true) => format!("{feature} on"),
            Some(false) => format!("{feature} off"),
            None => format!("{feature} absent"),
        };
        features.iter().map(state).collect::<Vec<_>>().join(", ")
    };
    (list(a), list(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::record;

    fn two_days() -> [RunRecord; 2] {
        let first = record("packets_per_cpu_s", &[(100.0, 101.0, 150.0); 8]);
        let mut second = record("packets_per_cpu_s", &[(90.0, 91.0, 150.0); 8]);
        second.id = "next".to_owned();
        second.started = "2026-11-21T09:00:00Z".to_owned();
        [first, second]
    }

    #[test]
    fn records_from_two_days_on_one_machine_are_comparable() {
        let text = compare(&two_days());
        assert!(
            text.contains("1.500 times") && text.contains("1.667 times") && !text.contains("NOT"),
            "{text}"
        );
        assert_eq!(compare(&[]), "");
    }

    #[test]
    fn a_different_kernel_prevents_the_comparison() {
        let mut records = two_days();
        records[1].environment.kernel = "6.1.0".to_owned();
        let text = compare(&records);
        assert_eq!(text.matches("NOT COMPARABLE").count(), 1, "{text}");
        assert!(text.contains("! kernel: 6.12.1 and 6.1.0"), "{text}");
    }

    #[test]
    fn a_record_is_comparable_with_itself_on_another_day() {
        let a = record("x", &[(1.0, 1.0, 1.0)]);
        let b = RunRecord {
            id: "other".to_owned(),
            started: "2026-11-21T08:00:00Z".to_owned(),
            seed: 7,
            ..a.clone()
        };
        assert_eq!(comparable(&a, &b), []);
    }

    #[test]
    fn differences_in_machine_or_workload_prevent_comparison() {
        type Alter = fn(&mut RunRecord);
        let base = record("x", &[(1.0, 1.0, 1.0)]);
        let changes: [(&str, Alter); 10] = [
            ("kernel", |r| r.environment.kernel = "6.1.0".to_owned()),
            ("CPU model", |r| r.environment.cpu_model = "Other".to_owned()),
            ("cores", |r| r.environment.cores = 64),
            ("idle CPUs", |r| r.environment.idle = "driver none, governor menu".to_owned()),
            ("offloads of veth0", |r| {
                r.environment.offloads.insert("veth0".to_owned(), [("gso".to_owned(), false)].into());
            }),
            ("workload", |r| r.experiment.workload = "iperf3".to_owned()),
            ("metric", |r| r.experiment.metric = "y".to_owned()),
            ("duration", |r| r.experiment.duration_s = 1.0),
            ("warm-up", |r| r.experiment.warmup_s = 0.0),
            ("CPUs of old", |r| r.experiment.subjects[0].cpus = None),
        ];
        for (what, change) in changes {
            let mut other = base.clone();
            change(&mut other);
            let differences = comparable(&base, &other);
            assert_eq!(differences.len(), 1, "{what}: {differences:?}");
            assert!(differences[0].what == what && differences[0].forbids, "{differences:?}");
        }
    }

    #[test]
    fn more_rounds_and_other_tool_versions_are_allowed() {
        let base = record("x", &[(1.0, 1.0, 1.0)]);
        let mut other = base.clone();
        other.experiment.rounds = 20;
        other.environment.tools.remove("perf");
        // Make the record look like an older one, which lacks this field.
        other.environment.idle.clear();
        let differences = comparable(&base, &other);
        assert_eq!(differences.len(), 2);
        assert!(differences.iter().all(|difference| !difference.forbids));
        assert_eq!(differences[0].to_string(), "version of perf: 6.12 and absent");
    }

    #[test]
    fn differing_offloads_are_listed_by_feature() {
        let base = record("x", &[(1.0, 1.0, 1.0)]);
        let mut other = base.clone();
        other.environment.offloads.insert("veth0".to_owned(), [("gso".to_owned(), false)].into());
        other.environment.offloads.insert("veth1".to_owned(), BTreeMap::new());
        let told: Vec<String> = comparable(&base, &other).iter().map(ToString::to_string).collect();
        assert_eq!(
            told,
            [
                "offloads of veth0: gro on, gso on and gro absent, gso off",
                "offloads of veth1: no such interface and present"
            ]
        );
    }
}
