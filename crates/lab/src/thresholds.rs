//! Thresholds: limits that a figure must meet or should meet. The interval and the noise floor decide, never the median alone; a threshold
//! inside the interval is undecided.

use std::{cmp::Ordering, fmt};

use crate::{
    metric,
    record::{RunRecord, Threshold},
    stats::{self, ConfidenceInterval},
    verdict::{Evidence, VerdictReason, reasons_of_void},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThresholdKind {
    Must,
    Aim,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ThresholdOutcome {
    Met,
    Missed,
    Undecided(String),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ThresholdResult {
    pub(crate) threshold: Threshold,
    pub(crate) kind: ThresholdKind,
    pub(crate) subject: String,
    pub(crate) against: Option<String>,
    pub(crate) figure: Option<(f64, ConfidenceInterval)>,
    pub(crate) outcome: ThresholdOutcome,
}

pub(crate) fn evaluate(record: &RunRecord) -> Vec<ThresholdResult> {
    let experiment = &record.experiment;
    let kinds = [(ThresholdKind::Must, &experiment.must), (ThresholdKind::Aim, &experiment.aim)];
    kinds
        .into_iter()
        .flat_map(|(kind, thresholds)| {
            thresholds.iter().flat_map(move |threshold| threshold.evaluate(kind, record))
        })
        .collect()
}

impl Threshold {
    pub(crate) fn mistake(&self) -> Option<&'static str> {
        match (self.at_least, self.at_most) {
            (Some(limit), None) | (None, Some(limit)) if !limit.is_finite() || limit < 0.0 => {
                Some("a threshold is a number, at least 0")
            }
            (Some(_), None) | (None, Some(_)) if self.own && self.against.is_some() => {
                Some("a threshold for an absolute value (own = true) cannot have `against`")
            }
            (Some(limit), None) | (None, Some(limit)) if !self.own && limit == 0.0 => {
                Some("a ratio is never zero: a threshold of 0 needs own = true")
            }
            (Some(_), None) | (None, Some(_)) => None,
            _ => Some("a threshold needs exactly one of at_least and at_most"),
        }
    }

    fn evaluate(&self, kind: ThresholdKind, record: &RunRecord) -> Vec<ThresholdResult> {
        let names: Vec<&str> =
            record.experiment.subjects.iter().map(|subject| subject.name.as_str()).collect();
        let Some(subject) = self.subject.as_deref().or(names.last().copied()) else { return Vec::new() };
        let held = |against: Option<&str>, (figure, outcome)| ThresholdResult {
            threshold: self.clone(),
            kind,
            subject: subject.to_owned(),
            against: against.map(str::to_owned),
            figure,
            outcome,
        };
        if self.own {
            return vec![held(None, self.evaluate_value(record, subject))];
        }
        let others: Vec<&str> = match &self.against {
            Some(name) => vec![name],
            None => names.iter().copied().filter(|name| *name != subject).collect(),
        };
        if others.is_empty() {
            return vec![held(None, (None, undecided("no other subject was measured")))];
        }
        others
            .into_iter()
            .map(|other| held(Some(other), self.evaluate_ratio(record, subject, other)))
            .collect()
    }

    fn evaluate_ratio(
        &self,
        record: &RunRecord,
        subject: &str,
        other: &str,
    ) -> (Option<(f64, ConfidenceInterval)>, ThresholdOutcome) {
        let missing = |name: &str| record.experiment.subjects.iter().all(|subject| subject.name != name);
        if let Some(name) = [subject, other].into_iter().find(|name| missing(name)) {
            return (None, undecided(&format!("{name} was not measured")));
        }
        let Evidence { estimate, floor, reasons, .. } = Evidence::of(record, other, subject, &self.metric);
        let figure = estimate.map(|estimate| (estimate.ratio(), estimate.interval()));
        let outcome = match estimate {
            _ if !reasons.is_empty() => ThresholdOutcome::Undecided(in_words(&reasons)),
            None => undecided("no ratio"),
            // The comparison is logarithmic, so that the floor is symmetric.
            Some(estimate) => self.weigh(
                estimate.log_ratio,
                estimate.log_interval,
                f64::ln,
                floor.map_or(0.0, |floor| floor.level),
            ),
        };
        (figure, outcome)
    }

    fn evaluate_value(
        &self,
        record: &RunRecord,
        subject: &str,
    ) -> (Option<(f64, ConfidenceInterval)>, ThresholdOutcome) {
        let values = record.values(subject, &self.metric);
        let figure = stats::median_interval(&values, record.seed);
        let mut reasons = reasons_of_void(record, &[subject], &self.metric, values.len());
        let (have, need) = (values.len(), record.experiment.rules.min_rounds.max(1));
        if have < need as usize {
            reasons.push(VerdictReason::TooFewRounds { have, need });
        }
        let outcome = match figure {
            _ if !reasons.is_empty() => ThresholdOutcome::Undecided(in_words(&reasons)),
            None => undecided("not measured"),
            Some((median, interval)) => self.weigh(median, interval, |limit| limit, 0.0),
        };
        (figure, outcome)
    }

    /// Leaves the outcome undecided if the figure is within `floor` of the limit. `scale` converts the limit.
    fn weigh(
        &self,
        median: f64,
        interval: ConfidenceInterval,
        scale: impl Fn(f64) -> f64,
        floor: f64,
    ) -> ThresholdOutcome {
        let (limit, up) = match (self.at_least, self.at_most) {
            (Some(limit), _) => (limit, true),
            (None, limit) => (limit.unwrap_or_default(), false),
        };
        let at = scale(limit);
        let kept = if up { interval.low >= at } else { interval.high <= at };
        if !kept && interval.covers(at) {
            return undecided("the interval contains the threshold");
        }
        if (median - at).abs() < floor {
            return ThresholdOutcome::Undecided(format!(
                "closer to the threshold than the noise floor of {:.1} %",
                floor.exp_m1() * 100.0
            ));
        }
        if kept { ThresholdOutcome::Met } else { ThresholdOutcome::Missed }
    }
}

impl fmt::Display for Threshold {
    /// Formats the threshold, such as `packets_per_busy_s >= 1.1 x`, or `loss_percent <= 0.1 %` for an absolute value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sign, limit) = match (self.at_least, self.at_most) {
            (Some(limit), _) => ("≥", limit),
            (None, limit) => ("≤", limit.unwrap_or_default()),
        };
        if self.own {
            write!(f, "{sign} {}", metric::show(&self.metric, limit))
        } else {
            write!(f, "{sign} {} ×", short(limit))
        }
    }
}

impl ThresholdResult {
    pub(crate) fn figure_in_words(&self) -> Option<String> {
        let show = |figure: f64| {
            if self.threshold.own {
                metric::show(&self.threshold.metric, figure)
            } else {
                format!("{figure:.3}")
            }
        };
        let (median, interval) = self.figure?;
        Some(format!("{} ({} to {})", show(median), show(interval.low), show(interval.high)))
    }

    fn excess(&self) -> f64 {
        let limit = self.threshold.at_least.or(self.threshold.at_most).unwrap_or_default();
        let above = self.figure.map_or(f64::INFINITY, |(median, _)| median - limit);
        if self.threshold.at_least.is_some() { -above } else { above }
    }

    fn is_harder_than(&self, other: &Self) -> bool {
        let rank = |outcome: &ThresholdOutcome| match outcome {
            ThresholdOutcome::Missed => 2,
            ThresholdOutcome::Undecided(_) => 1,
            ThresholdOutcome::Met => 0,
        };
        match rank(&self.outcome).cmp(&rank(&other.outcome)) {
            Ordering::Equal => self.excess() > other.excess(),
            order => order == Ordering::Greater,
        }
    }
}

/// Selects the least favourable result of each threshold against several subjects.
pub(crate) fn hardest_results(record: &RunRecord) -> Vec<ThresholdResult> {
    let mut all: Vec<ThresholdResult> = Vec::new();
    for held in evaluate(record) {
        match all.iter_mut().find(|other| (other.kind, &other.threshold) == (held.kind, &held.threshold)) {
            Some(other) if held.is_harder_than(other) => *other = held,
            Some(_) => {}
            None => all.push(held),
        }
    }
    all
}

impl fmt::Display for ThresholdKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Must => "must",
            Self::Aim => "aim",
        })
    }
}

impl fmt::Display for ThresholdOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Met => f.write_str("met"),
            Self::Missed => f.write_str("missed"),
            Self::Undecided(why) => write!(f, "undecided: {why}"),
        }
    }
}

impl fmt::Display for ThresholdResult {
    /// Formats a line such as `must, packets_per_busy_s of turnpike ≥ 1.1 × coturn: met; 1.310 (1.280 to 1.350)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whom = self.against.as_ref().map_or_else(String::new, |against| format!(" {against}"));
        let Self { threshold, kind, subject, outcome, .. } = self;
        write!(f, "{kind}, {} of {subject} {threshold}{whom}: {outcome}", threshold.metric)?;
        self.figure_in_words().map_or(Ok(()), |figure| write!(f, "; {figure}"))
    }
}

fn short(ratio: f64) -> f64 {
    (ratio * 1e3).round() / 1e3
}

fn undecided(why: &str) -> ThresholdOutcome {
    ThresholdOutcome::Undecided(why.to_owned())
}

fn in_words(reasons: &[VerdictReason]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{invalid_rounds::VoidReason, record::tests::record};

    const METRIC: &str = "packets_per_busy_s";

    /// Record in which the ratio of `new` to `old` fluctuates by `noise` around `ratio`, and the baseline by a tenth of `noise`.
    fn samples(ratio: f64, noise: f64) -> RunRecord {
        let wobble = |i: usize| noise * [0.3, -1.0, 0.7, 0.0, -0.4, 1.0, -0.8, 0.1][i % 8];
        let values: Vec<_> = (0..8)
            .map(|i| (100.0, 100.0 * (1.0 + wobble(i + 3) / 10.0), 100.0 * ratio * (1.0 + wobble(i))))
            .collect();
        record(METRIC, &values)
    }

    fn at_least(limit: f64) -> Threshold {
        Threshold { metric: METRIC.to_owned(), at_least: Some(limit), ..Threshold::default() }
    }

    fn at_most(limit: f64) -> Threshold {
        Threshold { metric: METRIC.to_owned(), at_most: Some(limit), ..Threshold::default() }
    }

    fn outcome(record: &RunRecord, threshold: Threshold) -> ThresholdOutcome {
        let mut record = record.clone();
        record.experiment.must = vec![threshold];
        let [held] = &evaluate(&record)[..] else { panic!("not one threshold") };
        held.outcome.clone()
    }

    #[test]
    fn ratios_across_the_threshold_are_undecided() {
        let record = samples(1.5, 0.02);
        for (threshold, expected) in [
            (at_least(1.2), ThresholdOutcome::Met),
            (at_least(1.8), ThresholdOutcome::Missed),
            (at_most(1.8), ThresholdOutcome::Met),
            (at_most(1.2), ThresholdOutcome::Missed),
            (at_least(1.5), undecided("the interval contains the threshold")),
            (at_most(1.5), undecided("the interval contains the threshold")),
        ] {
            assert_eq!(outcome(&record, threshold.clone()), expected, "{threshold}");
        }
    }

    #[test]
    fn a_median_above_the_threshold_is_not_enough() {
        let record = samples(1.1, 0.3);
        let ratio = Evidence::of(&record, "old", "new", METRIC).estimate.unwrap().ratio();
        assert!(ratio > 1.05, "{ratio}");
        assert_eq!(outcome(&record, at_least(1.05)), undecided("the interval contains the threshold"));
    }

    #[test]
    fn figures_within_the_noise_floor_are_undecided() {
        let mut record = samples(1.1, 0.001);
        assert_eq!(outcome(&record, at_least(1.0)), ThresholdOutcome::Met);
        for (i, round) in record.aa.iter_mut().enumerate() {
            round.metrics.insert(METRIC.to_owned(), if i % 2 == 0 { 80.0 } else { 120.0 });
        }
        let ThresholdOutcome::Undecided(why) = outcome(&record, at_least(1.0)) else { panic!("decided") };
        assert!(why.starts_with("closer to the threshold than the noise floor of "), "{why}");
        assert_eq!(outcome(&record, at_least(3.0)), ThresholdOutcome::Missed);
    }

    #[test]
    fn thresholds_are_undecided_without_enough_valid_figures() {
        let mut few = samples(2.0, 0.01);
        few.rounds.retain(|round| round.index < 5);
        assert_eq!(outcome(&few, at_least(1.0)), undecided("5 valid rounds, at least 6 are needed"));
        let mut failed = samples(2.0, 0.01);
        failed.rounds[3].voided = Some(VoidReason::SubjectFailed { how: "code 1".to_owned() });
        assert_eq!(outcome(&failed, at_least(1.0)), undecided("new failed in 1 run (code 1)"));
        let absent = Threshold { against: Some("pion".to_owned()), ..at_least(1.0) };
        assert_eq!(outcome(&samples(2.0, 0.01), absent), undecided("pion was not measured"));
        let mut alone = samples(2.0, 0.01);
        alone.experiment.subjects.truncate(1);
        assert_eq!(outcome(&alone, at_least(1.0)), undecided("no other subject was measured"));
    }

    #[test]
    fn an_absolute_threshold_may_be_zero() {
        let own = |limit| Threshold {
            metric: "loss_percent".to_owned(),
            own: true,
            at_most: Some(limit),
            ..Threshold::default()
        };
        let lossless = record("loss_percent", &[(0.0, 0.0, 0.0); 6]);
        assert_eq!(outcome(&lossless, own(0.1)), ThresholdOutcome::Met);
        assert_eq!(
            outcome(&lossless, own(0.0)),
            ThresholdOutcome::Met,
            "exactly at the threshold counts as met"
        );
        let lossy = record("loss_percent", &[(0.0, 0.0, 3.0); 6]);
        assert_eq!(outcome(&lossy, own(0.1)), ThresholdOutcome::Missed);
        let mixed = record("loss_percent", &[(0.0, 0.0, 0.0), (0.0, 0.0, 3.0)].repeat(3));
        assert_eq!(outcome(&mixed, own(0.1)), undecided("the interval contains the threshold"));
        assert_eq!(
            outcome(&record("x", &[(1.0, 1.0, 1.0); 6]), own(0.1)),
            undecided("0 valid rounds, at least 6 are needed")
        );
    }

    #[test]
    fn a_threshold_against_all_is_checked_against_each() {
        let mut record = samples(2.0, 0.01);
        let mut third = record.experiment.subjects[0].clone();
        third.name = "third".to_owned();
        record.experiment.subjects.insert(1, third);
        let more: Vec<_> = record.rounds.iter().filter(|round| round.subject == "old").cloned().collect();
        for mut round in more {
            round.subject = "third".to_owned();
            round.metrics.insert(METRIC.to_owned(), 500.0);
            record.rounds.push(round);
        }
        record.experiment.aim = vec![at_least(1.0)];
        let held = evaluate(&record);
        let told: Vec<_> = held.iter().map(|held| (held.against.as_deref(), &held.outcome)).collect();
        assert_eq!(told, [(Some("old"), &ThresholdOutcome::Met), (Some("third"), &ThresholdOutcome::Missed)]);
        let [hardest] = &hardest_results(&record)[..] else { panic!("not one threshold") };
        assert_eq!(hardest, &held[1]);
        record.experiment.aim = vec![at_least(0.1), at_most(9.0)];
        let against: Vec<_> =
            super::hardest_results(&record).into_iter().filter_map(|held| held.against).collect();
        assert_eq!(against, ["third", "old"], "if both are met, the one closest to the threshold");
        record.experiment.aim = vec![at_least(1.0)];
        assert!(
            held[0].to_string().starts_with("aim, packets_per_busy_s of new ≥ 1 × old: met; "),
            "{}",
            held[0]
        );
    }

    #[test]
    fn invalid_thresholds_are_rejected() {
        let both = Threshold { at_most: Some(1.0), ..at_least(1.0) };
        let neither = Threshold { metric: METRIC.to_owned(), ..Threshold::default() };
        assert!(both.mistake().is_some() && neither.mistake().is_some());
        assert!(
            Threshold { own: true, against: Some("old".to_owned()), ..at_least(1.0) }.mistake().is_some()
        );
        assert!(
            at_least(0.0).mistake().is_some() && Threshold { own: true, ..at_most(0.0) }.mistake().is_none()
        );
        assert_eq!(at_least(f64::NAN).mistake(), Some("a threshold is a number, at least 0"));
        assert_eq!(at_least(1.0).mistake(), None);
    }
}
