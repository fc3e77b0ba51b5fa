use super::*;
use crate::metric::{CPU_US_PER_PACKET, PACKETS_PER_CPU_S};
use crate::record::tests::record;

/// Record in which `new` is `ratio` times `old`, with a deterministic fluctuation of plus or minus `noise`.
fn steady(metric: &str, rounds: usize, ratio: f64, noise: f64) -> RunRecord {
    let wobble = |i: usize| 1.0 + noise * [0.3, -1.0, 0.7, 0.0, -0.4, 1.0, -0.8][i % 7];
    let values: Vec<_> =
        (0..rounds).map(|i| (100.0, 100.0 * wobble(i + 3), 100.0 * ratio * wobble(i))).collect();
    record(metric, &values)
}

fn reasons(verdict: &MetricVerdict) -> &[VerdictReason] {
    match &verdict.outcome {
        Conclusion::CannotTell { reasons, .. } => reasons,
        other => panic!("the verdict is clear: {other}"),
    }
}

fn rounds_needed(verdict: &MetricVerdict) -> Option<u32> {
    match &verdict.outcome {
        Conclusion::CannotTell { rounds, .. } => *rounds,
        other => panic!("the verdict is clear: {other}"),
    }
}

#[test]
fn verdicts_follow_the_direction_of_the_metric() {
    for (metric, ratio, outcome) in [
        (PACKETS_PER_CPU_S, 1.25, Conclusion::Faster),
        (PACKETS_PER_CPU_S, 0.8, Conclusion::Slower),
        (CPU_US_PER_PACKET, 1.25, Conclusion::Slower),
        (CPU_US_PER_PACKET, 0.8, Conclusion::Faster),
        ("batch_occupancy", 1.25, Conclusion::Higher),
        ("batch_occupancy", 0.8, Conclusion::Lower),
    ] {
        let verdict = judge(&steady(metric, 8, ratio, 0.01), "new", metric);
        assert_eq!(verdict.outcome, outcome, "{verdict}");
    }
}

#[test]
fn equal_subjects_show_no_difference_with_enough_precision() {
    let verdict = judge(&steady(PACKETS_PER_CPU_S, 8, 1.0, 0.02), "new", PACKETS_PER_CPU_S);
    assert_eq!(verdict.outcome, Conclusion::NoDifference, "{verdict}");
}

#[test]
fn noise_above_the_resolution_requires_more_rounds() {
    let verdict = judge(&steady(PACKETS_PER_CPU_S, 8, 1.0, 0.2), "new", PACKETS_PER_CPU_S);
    assert!(matches!(reasons(&verdict), [VerdictReason::TooNoisy { .. }]), "{verdict}");
    let needed = rounds_needed(&verdict).unwrap();
    assert!((30..300).contains(&needed), "{verdict}");
    assert!(verdict.to_string().contains(&format!("cannot tell, needs about {needed} rounds")), "{verdict}");
}

#[test]
fn five_rounds_are_too_few_even_for_a_clear_difference() {
    let verdict = judge(&steady(PACKETS_PER_CPU_S, 5, 2.0, 0.001), "new", PACKETS_PER_CPU_S);
    assert_eq!(reasons(&verdict), [VerdictReason::TooFewRounds { have: 5, need: 6 }]);
    assert_eq!(rounds_needed(&verdict), Some(6));
    assert!(verdict.estimate.is_some(), "the figures are shown anyway");
}

#[test]
fn rules_may_allow_fewer_rounds_with_lower_confidence() {
    let mut record = steady(PACKETS_PER_CPU_S, 3, 2.0, 0.001);
    record.experiment.rules.min_rounds = 3;
    let verdict = judge(&record, "new", PACKETS_PER_CPU_S);
    assert_eq!(verdict.outcome, Conclusion::Faster);
    assert!(verdict.to_string().contains("75 % interval"), "{verdict}");
}

#[test]
fn an_effect_below_the_noise_floor_gets_no_verdict() {
    let mut record = steady(PACKETS_PER_CPU_S, 8, 1.03, 0.001);
    for (i, round) in record.aa.iter_mut().enumerate() {
        round.metrics.insert(PACKETS_PER_CPU_S.to_owned(), if i % 2 == 0 { 90.0 } else { 110.0 });
    }
    let verdict = judge(&record, "new", PACKETS_PER_CPU_S);
    assert!(matches!(reasons(&verdict), [VerdictReason::BelowNoiseFloor { bias: false, .. }]), "{verdict}");
    assert!(rounds_needed(&verdict).unwrap() > 8);
}

#[test]
fn effects_below_a_low_noise_floor_are_not_differences() {
    let mut record = steady(PACKETS_PER_CPU_S, 8, 1.01, 0.001);
    for (i, round) in record.aa.iter_mut().enumerate() {
        round.metrics.insert(PACKETS_PER_CPU_S.to_owned(), if i % 2 == 0 { 98.0 } else { 102.0 });
    }
    assert_eq!(judge(&record, "new", PACKETS_PER_CPU_S).outcome, Conclusion::NoDifference);
    record.experiment.rules.resolution = 0.005;
    let verdict = judge(&record, "new", PACKETS_PER_CPU_S);
    assert!(matches!(reasons(&verdict), [VerdictReason::BelowNoiseFloor { .. }]), "{verdict}");
}

#[test]
fn more_rounds_are_not_suggested_against_a_bias() {
    let mut record = steady(PACKETS_PER_CPU_S, 8, 1.06, 0.001);
    for round in &mut record.aa {
        round.metrics.insert(PACKETS_PER_CPU_S.to_owned(), 110.0);
    }
    let verdict = judge(&record, "new", PACKETS_PER_CPU_S);
    assert!(matches!(reasons(&verdict), [VerdictReason::BelowNoiseFloor { bias: true, .. }]), "{verdict}");
    assert_eq!(rounds_needed(&verdict), None);
}

#[test]
fn a_verdict_needs_aa_runs_unless_the_rules_waive_them() {
    let mut record = steady(PACKETS_PER_CPU_S, 8, 2.0, 0.01);
    record.aa.clear();
    assert_eq!(reasons(&judge(&record, "new", PACKETS_PER_CPU_S)), [VerdictReason::NoNoiseFloor]);
    record.experiment.rules.need_noise_floor = false;
    assert_eq!(judge(&record, "new", PACKETS_PER_CPU_S).outcome, Conclusion::Faster);
}

#[test]
fn a_crashed_subject_gets_no_verdict() {
    let mut record = steady(PACKETS_PER_CPU_S, 20, 2.0, 0.01);
    record.rounds[7].voided =
        Some(VoidReason::SubjectFailed { how: "ended by signal 11 after 3.2 s".to_owned() });
    let verdict = judge(&record, "new", PACKETS_PER_CPU_S);
    let expected = "new failed in 1 run (ended by signal 11 after 3.2 s)";
    assert!(verdict.to_string().contains(expected), "{verdict}");
    assert_eq!(rounds_needed(&verdict), None);
}

/// Record in which the generator fell behind in the runs of `new` in the first six rounds, with `load`
/// offered per run.
fn late(metric: &str, load: impl Fn(&Round) -> f64) -> RunRecord {
    late_of("new", metric, load)
}

fn late_of(subject: &str, metric: &str, load: impl Fn(&Round) -> f64) -> RunRecord {
    let mut record = steady(metric, 20, 2.0, 0.01);
    for round in record.rounds.iter_mut().chain(&mut record.aa) {
        round.metrics.insert("offered_pps".to_owned(), load(round));
        if round.index < 6 && round.subject == subject {
            round.voided = Some(VoidReason::GeneratorLate { p99_us: 5_000.0, limit_us: 1_000.0 });
        }
    }
    record
}

#[test]
fn a_generator_that_often_fell_behind_prevents_the_verdict() {
    for metric in ["delivered_pps", "latency_p99_us", "loss_percent", "subject_cpu_s", "context_switches"] {
        let verdict = judge(&late(metric, |_| 1000.0), "new", metric);
        assert_eq!(
            reasons(&verdict),
            [VerdictReason::Void { cause: VoidCause::GeneratorLate, rounds: 6, of: 20 }],
            "{metric}"
        );
        assert_eq!(rounds_needed(&verdict), None);
    }
}

#[test]
fn cost_per_datagram_is_judged_if_the_generator_fell_behind() {
    for metric in
        [PACKETS_PER_CPU_S, CPU_US_PER_PACKET, "packets_per_busy_s", "busy_us_per_packet", "cpu_s_per_gb"]
    {
        let verdict = judge(&late(metric, |_| 1000.0), "new", metric);
        assert!(matches!(verdict.outcome, Conclusion::Faster | Conclusion::Slower), "{verdict}");
        assert_eq!((verdict.estimate.unwrap().rounds, verdict.late), (20, 6));
        assert!(verdict.to_string().ends_with(", the generator fell behind in 6 of them)"), "{verdict}");
        let mut robbed = late(metric, |_| 1000.0);
        robbed.rounds[0].voided = Some(VoidReason::CpuStolen { percent: 2.0, limit_percent: 1.0 });
        let verdict = judge(&robbed, "new", metric);
        assert_eq!((verdict.estimate.unwrap().rounds, verdict.late), (19, 5));
    }
}

#[test]
fn unequal_loads_prevent_the_verdict_if_the_generator_fell_behind() {
    for subject in ["new", "old"] {
        let slowed = |round: &Round| if round.subject == subject { 900.0 } else { 1000.0 };
        let verdict = judge(&late_of(subject, PACKETS_PER_CPU_S, slowed), "new", PACKETS_PER_CPU_S);
        assert_eq!(
            reasons(&verdict),
            [VerdictReason::Void { cause: VoidCause::GeneratorLate, rounds: 6, of: 20 }],
            "{subject}"
        );
    }
}

#[test]
fn shared_cores_prevent_the_verdict_for_every_metric() {
    for metric in ["packets_per_busy_s", CPU_US_PER_PACKET, "delivered_pps"] {
        let mut record = late(metric, |_| 1000.0);
        for round in record.rounds.iter_mut().filter(|round| round.index < 6) {
            round.voided = Some(VoidReason::CoresShared { percent: 40.0, limit_percent: 3.0 });
        }
        let verdict = judge(&record, "new", metric);
        assert_eq!(
            reasons(&verdict),
            [VerdictReason::Void { cause: VoidCause::CoresShared, rounds: 6, of: 20 }],
            "{metric}"
        );
    }
}

#[test]
fn a_verdict_starts_with_its_metric() {
    for (metric, ratio) in [(PACKETS_PER_CPU_S, 1.25), ("batch_occupancy", 1.25), ("latency_p50_us", 1.0)] {
        let verdict = judge(&steady(metric, 8, ratio, 0.01), "new", metric).to_string();
        assert!(verdict.starts_with(&format!("{metric}: new against old: ")), "{verdict}");
        assert_eq!(verdict.matches(metric).count(), 1, "{verdict}");
    }
    let none = judge(&record(PACKETS_PER_CPU_S, &[]), "new", PACKETS_PER_CPU_S).to_string();
    assert!(none.starts_with("packets_per_cpu_s: new against old: cannot tell"), "{none}");
}

#[test]
fn too_few_rounds_after_stolen_time_prevent_the_verdict() {
    let mut record = steady(PACKETS_PER_CPU_S, 6, 2.0, 0.01);
    record.aa[0].voided = Some(VoidReason::CpuStolen { percent: 9.0, limit_percent: 1.0 });
    assert_eq!(
        judge(&record, "new", PACKETS_PER_CPU_S).outcome,
        Conclusion::Faster,
        "one A/A run may be missing"
    );
    record.rounds[0].voided = Some(VoidReason::CpuStolen { percent: 9.0, limit_percent: 1.0 });
    let verdict = judge(&record, "new", PACKETS_PER_CPU_S);
    assert_eq!(
        reasons(&verdict),
        [
            VerdictReason::Void { cause: VoidCause::CpuStolen, rounds: 1, of: 6 },
            VerdictReason::TooFewRounds { have: 5, need: 6 }
        ]
    );
}

#[test]
fn a_void_round_among_many_is_skipped() {
    let mut record = steady(PACKETS_PER_CPU_S, 20, 2.0, 0.01);
    record.rounds[0].voided = Some(VoidReason::Other { what: "iperf3 ended with 1".to_owned() });
    let verdict = judge(&record, "new", PACKETS_PER_CPU_S);
    assert_eq!((verdict.outcome, verdict.estimate.unwrap().rounds), (Conclusion::Faster, 19));
}

#[test]
fn missing_metrics_differ_from_unsupported_ones() {
    let mut record = steady(PACKETS_PER_CPU_S, 8, 2.0, 0.01);
    assert_eq!(
        reasons(&judge(&record, "new", "cycles")),
        [VerdictReason::NotMeasured { not_supported: false }]
    );
    record.rounds[0].not_supported.insert("cycles".to_owned());
    assert_eq!(
        reasons(&judge(&record, "new", "cycles")),
        [VerdictReason::NotMeasured { not_supported: true }]
    );
}

#[test]
fn losses_of_zero_on_both_sides_show_no_difference() {
    let verdict = judge(&record("loss_percent", &[(0.0, 0.0, 0.0); 8]), "new", "loss_percent");
    assert_eq!(verdict.outcome, Conclusion::NoDifference);
    assert_eq!(verdict.to_string(), "loss_percent: new against old: no difference shown; 0 % (old: 0 %)");
}

#[test]
fn zeros_on_one_side_are_judged_by_sign() {
    let verdict = judge(&record("loss_percent", &[(0.0, 0.0, 2.0); 6]), "new", "loss_percent");
    assert_eq!(verdict.outcome, Conclusion::Slower);
    assert!(verdict.to_string().ends_with("new against old: slower; 2.000 % (old: 0 %)"), "{verdict}");
    let verdict = judge(&record("loss_percent", &[(2.0, 2.0, 0.0); 6]), "new", "loss_percent");
    assert_eq!(verdict.outcome, Conclusion::Faster);
}

#[test]
fn inconsistent_zeros_have_no_verdict() {
    let mixed = [(0.0, 0.0, 2.0), (0.0, 0.0, 0.0)].repeat(4);
    let unsteady_baseline = [(0.0, 1.0, 2.0); 8];
    let too_few = [(0.0, 0.0, 2.0); 5];
    for values in [&mixed[..], &unsteady_baseline, &too_few] {
        let verdict = judge(&record("loss_percent", values), "new", "loss_percent");
        let rounds = values.len();
        assert!(reasons(&verdict).contains(&VerdictReason::NoRatio { rounds }), "{verdict}");
    }
    let mut unfounded = record("loss_percent", &[(0.0, 0.0, 2.0); 8]);
    unfounded.aa.clear();
    assert!(reasons(&judge(&unfounded, "new", "loss_percent")).contains(&VerdictReason::NoNoiseFloor));
}

#[test]
fn an_empty_record_does_not_panic() {
    let verdict = judge(&record(PACKETS_PER_CPU_S, &[]), "new", PACKETS_PER_CPU_S);
    assert!(reasons(&verdict).contains(&VerdictReason::TooFewRounds { have: 0, need: 6 }), "{verdict}");
}
