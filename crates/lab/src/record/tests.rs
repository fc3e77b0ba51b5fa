use turnpike_testkit::Dir;

use super::*;

/// Record with two subjects, `old` and `new`, and one metric: `(old, old again, new)` per round.
pub(crate) fn record(metric: &str, values: &[(f64, f64, f64)]) -> RunRecord {
    let subject = |name: &str| RecordedSubject {
        name: name.to_owned(),
        command: vec![format!("./{name}"), "serve".to_owned()],
        cpus: Some("0".to_owned()),
    };
    let mut record = RunRecord {
        format: FORMAT,
        id: "2026-11-20-relay".to_owned(),
        started: "2026-11-20T10:44:21Z".to_owned(),
        command: vec!["turnpike".to_owned(), "lab".to_owned(), "ab".to_owned()],
        seed: 42,
        environment: Environment {
            kernel: "6.12.1".to_owned(),
            cpu_model: "Test CPU".to_owned(),
            idle: "driver none, governor haltpoll, polls for at most 200 µs".to_owned(),
            cores: 2,
            memory_bytes: 8 << 30,
            offloads: [("veth0".to_owned(), [("gso".to_owned(), true), ("gro".to_owned(), true)].into())]
                .into(),
            tools: [("perf".to_owned(), "6.12".to_owned())].into(),
            commit: Some("0123456789abcdef".to_owned()),
            ..Environment::default()
        },
        experiment: RecordedExperiment {
            name: "relay-flood".to_owned(),
            subjects: vec![subject("old"), subject("new")],
            workload: "load turn --clients 8 --rate max --size 120".to_owned(),
            metric: metric.to_owned(),
            rounds: u32::try_from(values.len()).unwrap(),
            duration_s: 5.0,
            warmup_s: 1.0,
            ..RecordedExperiment::default()
        },
        ..RunRecord::default()
    };
    for (index, (old, again, new)) in (0..).zip(values) {
        let run = |name: &str, place: u32, value: f64| Round {
            metrics: [(metric.to_owned(), value)].into(),
            ..Round::new(index, name, place)
        };
        record.rounds.push(run("old", 0, *old));
        record.rounds.push(run("new", 1, *new));
        record.aa.push(run("old", 2, *again));
    }
    record
}

fn full_record() -> RunRecord {
    let mut record = record("delivered_pps", &[(100.0, 101.0, 110.0), (90.0, 91.0, 99.0)]);
    record.rounds[0].voided = Some(VoidReason::CpuStolen { percent: 2.0, limit_percent: 1.0 });
    record.rounds[1].not_supported.insert("cycles".to_owned());
    record.rounds[1].latency = Some(LatencySummary { p50: 40.0, p99: 90.0, ..LatencySummary::default() });
    record.rounds[1].notes.push("GSO was refused".to_owned());
    record.sweeps.push(Sweep {
        subject: "new".to_owned(),
        round: Some(0),
        points: vec![SweepPoint {
            offered_pps: 1e5,
            delivered_pps: 9e4,
            loss_percent: 10.0,
            ..SweepPoint::default()
        }],
        found: Vec::new(),
    });
    record.syscalls.insert(
        "new".to_owned(),
        vec![Syscall { name: "sendmmsg".to_owned(), calls: 10, errors: 1, seconds: 0.25 }],
    );
    let symbol = Symbol { name: "udp_sendmsg".to_owned(), kernel: true, percent: 12.5 };
    let profile = CpuProfile { samples: 8, kernel_percent: 75.0, symbols: vec![symbol] };
    record.profiles.insert("new".to_owned(), profile);
    record.programs.push(BuildFile {
        name: "new".to_owned(),
        path: "/usr/bin/new".to_owned(),
        size: 3,
        modified: "2026-11-20T10:00:00Z".to_owned(),
        sha256: Some("ab".repeat(32)),
        version: Some("new 2.0".to_owned()),
        ..BuildFile::default()
    });
    record.interrupted = true;
    record
}

#[test]
fn a_record_is_the_same_after_saving_and_loading() {
    let dir = Dir::new();
    let record = full_record();
    record.save(dir.path()).unwrap();
    assert_eq!(RunRecord::load(dir.path()).unwrap(), record);
    assert_eq!(RunRecord::load(&dir.at(FILE)).unwrap(), record);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left in the directory");
}

#[test]
fn percentiles_of_a_latency_are_metrics_with_a_direction() {
    let mut round = Round::new(0, "a", 0);
    let latency =
        LatencySummary { p50: 1.0, p90: 2.0, p99: 3.0, p999: 4.0, max: 5.0, ..LatencySummary::default() };
    round.metrics.extend(latency.metrics());
    round.latency = Some(latency);
    assert_eq!(round.metrics.values().copied().sum::<f64>(), 15.0);
    assert_eq!(round.metrics["latency_p999_us"], 4.0);
    for name in round.metrics.keys() {
        assert_eq!(crate::metric::direction(name), crate::metric::Preference::Lower, "{name}");
    }
}

#[test]
fn an_infinite_metric_does_not_make_the_record_unreadable() {
    let dir = Dir::new();
    let mut record = record("x", &[(1.0, 1.0, 1.0)]);
    record.rounds[0].metrics.insert("cpu_us_per_packet".to_owned(), f64::INFINITY);
    record.save(dir.path()).unwrap();
    let metrics = &RunRecord::load(dir.path()).unwrap().rounds[0].metrics;
    assert_eq!(metrics.keys().collect::<Vec<_>>(), ["x"]);
}

#[test]
fn a_newer_format_is_refused_whatever_it_contains() {
    let dir = Dir::new();
    fs::write(dir.at(FILE), r#"{"format": 99, "surprise": []}"#).unwrap();
    let error = RunRecord::load(dir.path()).unwrap_err();
    assert!(error.to_string().contains("format 99"), "{error}");
}

#[test]
fn missing_and_damaged_records_are_reported() {
    let dir = Dir::new();
    assert!(RunRecord::load(dir.path()).is_err());
    fs::write(dir.at(FILE), "{\"format\": 1").unwrap();
    let error = RunRecord::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains(FILE) && error.contains("not a lab record"), "{error}");
}

#[test]
fn if_the_generator_fell_behind_only_cost_per_datagram_counts() {
    let late = || Some(VoidReason::GeneratorLate { p99_us: 5_000.0, limit_us: 1_000.0 });
    let mut record = record(metric::CPU_US_PER_PACKET, &[(3.0, 3.0, 2.0); 6]);
    for round in record.rounds.iter_mut().chain(&mut record.aa) {
        round.metrics.insert(metric::OFFERED_PPS.to_owned(), 1000.0);
        round.metrics.insert("latency_p50_us".to_owned(), 80.0);
        round.metrics.insert(metric::DELIVERED_PPS.to_owned(), 999.0);
        round.metrics.insert(metric::SUBJECT_CPU_S.to_owned(), 1.0);
        round.voided = late();
    }
    assert_eq!(record.pairs("old", "new", metric::CPU_US_PER_PACKET), [(3.0, 2.0); 6]);
    assert_eq!(record.aa_pairs(metric::CPU_US_PER_PACKET), [(3.0, 3.0); 6]);
    assert_eq!(record.values("new", metric::CPU_US_PER_PACKET).len(), 6);
    for fallen in ["latency_p50_us", metric::DELIVERED_PPS, metric::SUBJECT_CPU_S] {
        assert_eq!(record.pairs("old", "new", fallen), [], "{fallen}");
    }
    // A run with a different or unknown load does not count.
    record.rounds[1].metrics.insert(metric::OFFERED_PPS.to_owned(), 900.0);
    record.rounds[3].metrics.remove(metric::OFFERED_PPS);
    assert_eq!(record.pairs("old", "new", metric::CPU_US_PER_PACKET).len(), 4);
    // Nor does a run that is void for any other reason.
    record.rounds[5].voided = Some(VoidReason::CpuStolen { percent: 2.0, limit_percent: 1.0 });
    assert_eq!(record.pairs("old", "new", metric::CPU_US_PER_PACKET).len(), 3);
}

#[test]
fn pairs_skip_void_runs_and_match_rounds() {
    let mut record = record("x", &[(1.0, 1.5, 2.0), (3.0, 3.5, 4.0), (5.0, 5.5, 6.0), (7.0, 7.5, 8.0)]);
    record.rounds[2].voided = Some(VoidReason::SubjectFailed { how: "crashed".to_owned() });
    record.aa[3].voided = Some(VoidReason::Other { what: "no".to_owned() });
    record.rounds.reverse();
    assert_eq!(record.pairs("old", "new", "x"), [(1.0, 2.0), (5.0, 6.0), (7.0, 8.0)]);
    assert_eq!(record.aa_pairs("x"), [(1.0, 1.5), (5.0, 5.5)]);
    assert_eq!(record.pairs("old", "new", "y"), []);
    assert_eq!(record.pairs("old", "nobody", "x"), []);
}
