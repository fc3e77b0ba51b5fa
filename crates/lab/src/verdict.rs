//! Verdicts: faster, slower, no difference shown, or cannot tell.
//!
//! Verdicts are conservative: they need enough rounds, a noise floor from the same run, an interval that
//! excludes 1 *and* an effect above the floor. A generator that fell behind, stolen CPU time or a failed
//! subject prevents a verdict.

use std::{collections::BTreeSet, fmt};

use crate::invalid_rounds::{VoidCause, VoidReason};
use crate::metric::{self, Preference};
use crate::record::{Round, RunRecord, VerdictRules};
use crate::stats::{self, Estimate, LogRatios, NoiseFloor};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Conclusion {
    Faster,
    Slower,
    Higher,
    Lower,
    /// The interval is narrow and contains 1; or the effect is below the noise floor, and the floor is below the resolution.
    NoDifference,
    CannotTell {
        reasons: Vec<VerdictReason>,
        rounds: Option<u32>,
    },
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum VerdictReason {
    #[error("{subject} failed in {runs} {} ({how})", if *runs == 1 { "run" } else { "runs" })]
    SubjectFailed { subject: String, runs: usize, how: String },
    #[error("{cause} in {rounds} of {of} rounds")]
    Void { cause: VoidCause, rounds: usize, of: usize },
    #[error("void rounds: {rounds} of {of} ({what})")]
    Voided { rounds: usize, of: usize, what: String },
    #[error("{}", if *not_supported { "not supported here" } else { "not measured for both" })]
    NotMeasured { not_supported: bool },
    #[error("there is no ratio in {rounds} rounds, because a value is zero")]
    NoRatio { rounds: usize },
    #[error("{have} valid rounds, at least {need} are needed")]
    TooFewRounds { have: usize, need: u32 },
    #[error("the baseline was not compared with itself")]
    NoNoiseFloor,
    #[error(
        "{percent:.1} % is below the noise floor: the baseline differs from itself by {floor_percent:.1} %{}",
        if *bias { ", always in the same direction" } else { "" }
    )]
    BelowNoiseFloor { percent: f64, floor_percent: f64, bias: bool },
    #[error("precision only ±{percent:.1} %, ±{wanted_percent:.1} % needed")]
    TooNoisy { percent: f64, wanted_percent: f64 },
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MetricVerdict {
    pub(crate) metric: String,
    pub(crate) subject: String,
    pub(crate) baseline: String,
    pub(crate) outcome: Conclusion,
    pub(crate) estimate: Option<Estimate>,
    pub(crate) floor: Option<NoiseFloor>,
    /// Medians of baseline and subject; set if there are no ratios because values are zero.
    pub(crate) medians: Option<(f64, f64)>,
    pub(crate) late: usize,
}

pub(crate) fn judge(record: &RunRecord, subject: &str, metric: &str) -> MetricVerdict {
    let rules = &record.experiment.rules;
    let baseline = record.baseline().unwrap_or_default().to_owned();
    let grounds = Evidence::of(record, &baseline, subject, metric);
    let medians = if grounds.has_ratios() { None } else { medians(&grounds.pairs) };
    // Zeros have no ratio, so a sign test decides instead.
    let zeros = match grounds.reasons[..] {
        [VerdictReason::NoRatio { .. }] => {
            weigh_zeros(&grounds.pairs, &record.aa_pairs(metric), metric::direction(metric))
        }
        _ => None,
    };
    let Evidence { estimate, floor, reasons, .. } = grounds;
    let outcome = match estimate {
        _ if let Some(outcome) = zeros => outcome,
        Some(estimate) if reasons.is_empty() => {
            weigh(&estimate, floor.as_ref(), rules, metric::direction(metric))
        }
        _ => {
            let rounds = estimate_rounds(&reasons, estimate.as_ref(), None, rules);
            Conclusion::CannotTell { reasons, rounds }
        }
    };
    let late = late_rounds(record, &baseline, subject, metric);
    MetricVerdict {
        metric: metric.to_owned(),
        subject: subject.to_owned(),
        baseline,
        outcome,
        estimate,
        floor,
        medians,
        late,
    }
}

pub(crate) struct Evidence {
    pairs: Vec<(f64, f64)>,
    pub(crate) estimate: Option<Estimate>,
    pub(crate) floor: Option<NoiseFloor>,
    pub(crate) reasons: Vec<VerdictReason>,
}

impl Evidence {
    pub(crate) fn of(record: &RunRecord, other: &str, subject: &str, metric: &str) -> Self {
        let pairs = record.pairs(other, subject, metric);
        let ratios = stats::log_ratios(pairs.iter().copied());
        let floor = NoiseFloor::new(&stats::log_ratios(record.aa_pairs(metric)).values, record.seed);
        let mut reasons = reasons_of_void(record, &[other, subject], metric, ratios.values.len());
        reasons.extend(reasons_of_data(record, &[other, subject], metric, &ratios, floor.is_some()));
        Self { estimate: Estimate::new(&ratios.values, record.seed), pairs, floor, reasons }
    }

    fn has_ratios(&self) -> bool {
        self.estimate.is_some()
    }
}

impl Conclusion {
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::Higher => "higher",
            Self::Lower => "lower",
            Self::NoDifference => "no difference shown",
            Self::CannotTell { .. } => "cannot tell",
        }
    }
}

impl fmt::Display for Conclusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())?;
        let Self::CannotTell { reasons, rounds } = self else { return Ok(()) };
        if let Some(rounds) = rounds {
            write!(f, ", needs about {rounds} rounds")?;
        }
        for (i, reason) in reasons.iter().enumerate() {
            write!(f, "{}{reason}", if i == 0 { ": " } else { "; " })?;
        }
        Ok(())
    }
}

impl fmt::Display for MetricVerdict {
    /// Formats one line, which starts with the metric, so that it is easy to find.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} against {}: {}", self.metric, self.subject, self.baseline, self.outcome)?;
        let Some(estimate) = &self.estimate else {
            let Some((before, after)) = self.medians else { return Ok(()) };
            let show = |value| metric::show(&self.metric, value);
            return write!(f, "; {0} ({2}: {1})", show(after), show(before), self.baseline);
        };
        let interval = estimate.interval();
        write!(f, "; {:.3} times as high", estimate.ratio())?;
        if estimate.rounds > 1 {
            write!(
                f,
                " ({:.0} % interval {:.3} to {:.3}",
                estimate.confidence() * 100.0,
                interval.low,
                interval.high
            )?;
        } else {
            f.write_str(" (no interval")?;
        }
        write!(f, ", higher in {} of {} rounds", estimate.higher, estimate.rounds)?;
        if let Some(floor) = &self.floor {
            write!(f, ", noise floor {:.1} %", floor.percent())?;
        }
        if self.late > 0 {
            write!(f, ", the generator fell behind in {} of them", self.late)?;
        }
        f.write_str(")")
    }
}

fn weigh(
    estimate: &Estimate,
    floor: Option<&NoiseFloor>,
    rules: &VerdictRules,
    better: Preference,
) -> Conclusion {
    let effect = estimate.log_ratio.abs();
    let resolution = rules.resolution.ln_1p();
    let precise = estimate.half_width() <= resolution;
    let reason = match floor.filter(|floor| effect <= floor.level) {
        _ if !estimate.excludes_one() && precise => return Conclusion::NoDifference,
        _ if !estimate.excludes_one() => {
            let percent = estimate.half_width().exp_m1() * 100.0;
            VerdictReason::TooNoisy { percent, wanted_percent: rules.resolution * 100.0 }
        }
        None => return outcome_of(estimate.log_ratio > 0.0, better),
        // The effect is below the floor, and the floor is below the resolution, so no relevant difference can be hidden.
        Some(floor) if precise && floor.level <= resolution => return Conclusion::NoDifference,
        Some(floor) => VerdictReason::BelowNoiseFloor {
            percent: effect.exp_m1() * 100.0,
            floor_percent: floor.percent(),
            bias: floor.is_bias(),
        },
    };
    let reasons = vec![reason];
    let rounds = estimate_rounds(&reasons, Some(estimate), floor, rules);
    Conclusion::CannotTell { reasons, rounds }
}

/// Sign test for values of zero, which have no ratio. In every round, the same side or both sides must be zero.
fn weigh_zeros(pairs: &[(f64, f64)], floor: &[(f64, f64)], better: Preference) -> Option<Conclusion> {
    let (before, after) = pairs.first()?;
    let like_the_first =
        |(a, b): &(f64, f64)| (*a == 0.0) == (*before == 0.0) && (*b == 0.0) == (*after == 0.0);
    let steady =
        floor.iter().all(|(a, b)| (*a == 0.0) == (*before == 0.0) && (*b == 0.0) == (*before == 0.0));
    if !steady || !pairs.iter().all(like_the_first) {
        return None;
    }
    match (*before == 0.0, *after == 0.0) {
        (true, true) => Some(Conclusion::NoDifference),
        (zero_before, _) if pairs.len() >= stats::ROUNDS_FOR_95_PERCENT => {
            Some(outcome_of(zero_before, better))
        }
        _ => None,
    }
}

fn medians(pairs: &[(f64, f64)]) -> Option<(f64, f64)> {
    let (before, after): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    Some((stats::median(&before)?, stats::median(&after)?))
}

fn outcome_of(higher: bool, better: Preference) -> Conclusion {
    match (better, higher) {
        (Preference::Higher, true) | (Preference::Lower, false) => Conclusion::Faster,
        (Preference::Higher, false) | (Preference::Lower, true) => Conclusion::Slower,
        (Preference::Neither, true) => Conclusion::Higher,
        (Preference::Neither, false) => Conclusion::Lower,
    }
}

fn concerned<'a>(record: &'a RunRecord, subjects: &[&str]) -> Vec<&'a Round> {
    let of_either = record.rounds.iter().filter(|round| subjects.contains(&round.subject.as_str()));
    of_either.chain(&record.aa).collect()
}

fn late_rounds(record: &RunRecord, baseline: &str, subject: &str, metric: &str) -> usize {
    let counting = |name: &str| {
        let counts = |round: &&Round| {
            round.subject == name && round.metrics.contains_key(metric) && record.counts(round, metric)
        };
        record.rounds.iter().filter(counts).collect::<Vec<_>>()
    };
    let (ours, theirs) = (counting(subject), counting(baseline));
    let indices = |runs: &[&Round]| runs.iter().map(|round| round.index).collect::<BTreeSet<_>>();
    let pairs = &indices(&ours) & &indices(&theirs);
    let late = |round: &&Round| round.voided.is_some() && pairs.contains(&round.index);
    distinct_rounds(ours.iter().chain(&theirs).copied().filter(late))
}

/// Reasons why rounds are void. Always lists a failed subject, but other void rounds only if there are many of them or too few valid
/// rounds.
pub(crate) fn reasons_of_void(
    record: &RunRecord,
    subjects: &[&str],
    metric: &str,
    usable: usize,
) -> Vec<VerdictReason> {
    let rules = &record.experiment.rules;
    let concerned = concerned(record, subjects);

    let mut reasons = Vec::new();
    for name in subjects {
        let mut failures =
            concerned.iter().filter(|round| round.subject == *name).filter_map(|r| match &r.voided {
                Some(VoidReason::SubjectFailed { how }) => Some(how),
                _ => None,
            });
        if let Some(how) = failures.next() {
            let runs = 1 + failures.count();
            reasons.push(VerdictReason::SubjectFailed {
                subject: (*name).to_owned(),
                runs,
                how: how.clone(),
            });
        }
    }

    let of = distinct_rounds(concerned.iter().copied());
    let rounds_with = |is: &dyn Fn(&VoidReason) -> bool| {
        let is_void = |round: &&Round| !record.counts(round, metric) && round.voided.as_ref().is_some_and(is);
        distinct_rounds(concerned.iter().copied().filter(is_void))
    };
    let void = rounds_with(&|void| !matches!(void, VoidReason::SubjectFailed { .. }));
    let too_many = void as f64 > rules.max_voided * of as f64;
    let least = rules.min_rounds as usize;
    let would_have_sufficed = usable < least && usable + void >= least;
    if void == 0 || !(too_many || would_have_sufficed) {
        return reasons;
    }
    reasons.extend(VoidCause::ALL.into_iter().filter_map(|cause| {
        let rounds = rounds_with(&|void| void.cause().is_some_and(|(other, _)| other == cause));
        (rounds > 0).then_some(VerdictReason::Void { cause, rounds, of })
    }));
    let what = concerned.iter().find_map(|round| match &round.voided {
        Some(VoidReason::Other { what }) => Some(what.clone()),
        _ => None,
    });
    if let Some(what) = what {
        let rounds = rounds_with(&|void| matches!(void, VoidReason::Other { .. }));
        reasons.push(VerdictReason::Voided { rounds, of, what });
    }
    reasons
}

fn distinct_rounds<'a>(rounds: impl Iterator<Item = &'a Round>) -> usize {
    rounds.map(|round| round.index).collect::<BTreeSet<_>>().len()
}

fn reasons_of_data(
    record: &RunRecord,
    subjects: &[&str],
    metric: &str,
    ratios: &LogRatios,
    floor: bool,
) -> Vec<VerdictReason> {
    let rules = &record.experiment.rules;
    let have = ratios.values.len();
    let mut reasons = Vec::new();
    if have == 0 && ratios.unusable == 0 && !record.rounds.is_empty() {
        let mut runs = record.rounds.iter().filter(|round| subjects.contains(&round.subject.as_str()));
        let not_supported = runs.any(|round| round.not_supported.contains(metric));
        return vec![VerdictReason::NotMeasured { not_supported }];
    }
    // One round is the minimum, whatever the rules say, because an empty set has no median.
    let need = rules.min_rounds.max(1);
    if have == 0 && ratios.unusable >= need as usize {
        reasons.push(VerdictReason::NoRatio { rounds: ratios.unusable });
        if rules.need_noise_floor && record.aa_pairs(metric).is_empty() {
            reasons.push(VerdictReason::NoNoiseFloor);
        }
        return reasons;
    }
    if have < need as usize {
        if ratios.unusable > 0 {
            reasons.push(VerdictReason::NoRatio { rounds: ratios.unusable });
        }
        reasons.push(VerdictReason::TooFewRounds { have, need });
    }
    if rules.need_noise_floor && !floor {
        reasons.push(VerdictReason::NoNoiseFloor);
    }
    reasons
}

/// Total number of rounds after which a verdict can be expected, if more rounds resolve all the reasons.
fn estimate_rounds(
    reasons: &[VerdictReason],
    estimate: Option<&Estimate>,
    floor: Option<&NoiseFloor>,
    rules: &VerdictRules,
) -> Option<u32> {
    let resolution = rules.resolution.ln_1p();
    reasons.iter().try_fold(0, |most: u32, reason| {
        let rounds = match (reason, estimate) {
            // Two rounds are not enough to estimate the noise.
            (VerdictReason::TooFewRounds { need, .. }, Some(e)) if e.rounds > 2 => {
                e.rounds_for(resolution).max(*need)
            }
            (VerdictReason::TooFewRounds { need, .. }, _) => *need,
            (VerdictReason::TooNoisy { .. }, Some(e)) => {
                // The larger of two estimates, so that a second attempt suffices.
                scaled(e.rounds, e.half_width() / resolution).max(e.rounds_for(resolution))
            }
            (VerdictReason::BelowNoiseFloor { bias: false, .. }, Some(e)) => {
                scaled(e.rounds, floor?.level / e.log_ratio.abs())
            }
            _ => return None,
        };
        Some(most.max(rounds))
    })
}

/// Returns at least one more than the current number of rounds.
fn scaled(rounds: usize, factor: f64) -> u32 {
    let wanted = (rounds as f64 * factor * factor).ceil().max(rounds as f64 + 1.0);
    #[expect(clippy::cast_possible_truncation, reason = "saturation is intended")]
    let wanted = wanted as u32;
    wanted
}

#[cfg(test)]
mod tests;
