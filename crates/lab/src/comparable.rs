//! Whether the figures of two records, often of different days, may be held against each other.

use std::collections::{BTreeMap, BTreeSet};

use crate::record::{Build, Experiment, Record, Subject};

/// In what two records differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {first} and {second}")]
pub struct Difference {
    /// What: "kernel", "offloads of veth0".
    pub what: String,
    /// In the first record.
    pub first: String,
    /// In the second.
    pub second: String,
    /// Whether the figures of the two may no longer be compared; otherwise a reader should merely know.
    pub forbids: bool,
}

/// In what two records differ; they may be compared when none of the differences [forbids](Difference::forbids) it.
///
/// The programs measured may differ: that is what one compares. Where they run and what they are asked may not.
pub fn comparable(a: &Record, b: &Record) -> Vec<Difference> {
    let mut differences = Vec::new();
    let mut compare = |what: &str, first: String, second: String, forbids: bool| {
        if first != second {
            differences.push(Difference { what: what.to_owned(), first, second, forbids });
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
    let names = |e: &Experiment| e.subjects.iter().map(|s| s.name.as_str()).collect::<Vec<_>>().join(", ");
    compare("subjects", names(asked), names(other), false);
    if let (Some(left), Some(right)) = (&asked.load_cpus, &other.load_cpus) {
        compare("CPUs of the workload", left.clone(), right.clone(), true);
    }
    for (left, right) in asked.subjects.iter().zip(&other.subjects) {
        let cpus = |s: &Subject| s.cpus.clone().unwrap_or_else(|| "not pinned".to_owned());
        compare(&format!("CPUs of {}", left.name), cpus(left), cpus(right), true);
    }
    for before in &a.programs {
        let same = |build: &&Build| (&build.name, build.word) == (&before.name, before.word);
        let Some(after) = b.programs.iter().find(same) else { continue };
        let hash = |build: &Build| {
            build
                .sha256
                .as_ref()
                .map_or_else(|| "no hash".to_owned(), |hash| hash[..12.min(hash.len())].to_owned())
        };
        let file = before.path.rsplit('/').next().unwrap_or_default();
        compare(&format!("build of {} ({file})", before.name), hash(before), hash(after), false);
    }
    differences
}

/// The features in which two interfaces differ, as two texts; equal texts when in none.
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

    #[test]
    fn a_record_is_comparable_with_itself_on_another_day() {
        let a = record("x", &[(1.0, 1.0, 1.0)]);
        let b = Record {
            id: "other".to_owned(),
            started: "2026-11-21T08:00:00Z".to_owned(),
            seed: 7,
            ..a.clone()
        };
        assert_eq!(comparable(&a, &b), []);
    }

    #[test]
    fn each_difference_of_machine_or_question_forbids_the_comparison() {
        type Alter = fn(&mut Record);
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
    fn more_rounds_or_another_tool_version_are_told_and_allowed() {
        let base = record("x", &[(1.0, 1.0, 1.0)]);
        let mut other = base.clone();
        other.experiment.rounds = 20;
        other.environment.tools.remove("perf");
        // Of a record from before it was asked for nothing is known.
        other.environment.idle.clear();
        let differences = comparable(&base, &other);
        assert_eq!(differences.len(), 2);
        assert!(differences.iter().all(|difference| !difference.forbids));
        assert_eq!(differences[0].to_string(), "version of perf: 6.12 and absent");
    }

    #[test]
    fn differing_offloads_are_told_by_feature() {
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
