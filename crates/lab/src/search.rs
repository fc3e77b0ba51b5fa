//! find-max: finds the highest offered rate whose loss stays within a goal, for several goals at once,
//! despite noise.
//!
//! Based on MLRsearch (RFC 9971, previously draft-ietf-bmwg-mlrsearch). Every trial at a rate counts for every goal. A rate becomes a
//! *lower bound* for a goal once it is certain that the goal is missed for at most half of the trial time, however the remaining trials
//! turn out, and an *upper bound* once it is certain that the goal is missed for more than half. Until then, the rate is tried again. A
//! hiccup therefore does not end the search, and a lucky trial does not decide it. Coarse phases of short trials find the region, and a
//! last phase of long trials decides.
//!
//! ```text
//! while let Some(trial) = search.next() {            the caller runs it: rate, seconds
//!     search.observe(sent, received);                 or search.observe_void() if the generator fell behind
//! }
//! search.found()                                     an interval per goal
//! ```

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize};

use crate::stats;

/// Fraction by which the offered rate may fall short of the requested one before the trial is void.
const SHORTFALL: f64 = 0.02;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RatePlan {
    Sweep(Vec<u64>),
    FindMax(SearchSettings),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SearchSettings {
    pub(crate) min_pps: u64,
    /// Rate of the first trial.
    pub(crate) max_pps: u64,
    /// Loss goals as ratios: 0.001 is 0.1 %.
    pub(crate) goals: Vec<f64>,
    /// Relative width of the resulting interval; at least the largest goal, because otherwise a looser goal could have a lower result.
    pub(crate) width: f64,
    pub(crate) short_s: f64,
    pub(crate) long_s: f64,
    /// Total seconds of long trials needed to decide a rate; an odd multiple of `long_s`, so that there are no ties.
    pub(crate) sum_s: f64,
    pub(crate) max_trials: usize,
    /// Number of void trials at a rate after which the generator is considered unable to reach that rate.
    pub(crate) max_voids: u32,
    /// Latency limit in microseconds; if the 99th percentile of a trial exceeds it, all datagrams of the trial count as lost.
    pub(crate) max_p99_us: Option<f64>,
}

impl Default for SearchSettings {
    fn default() -> Self {
        Self {
            min_pps: 1_000,
            max_pps: 2_000_000,
            goals: vec![0.0, 0.001, 0.005],
            width: 0.01,
            short_s: 1.0,
            long_s: 5.0,
            sum_s: 15.0,
            max_trials: 300,
            max_voids: 3,
            max_p99_us: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Trial {
    pub(crate) rate_pps: u64,
    pub(crate) duration_s: f64,
}

/// Result for one goal; rates in datagrams per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoundRate {
    pub max_loss: f64,
    /// `None` if not even the lowest rate meets the goal.
    pub lower_pps: Option<u64>,
    /// `None` if every rate that was tried meets the goal.
    pub upper_pps: Option<u64>,
    /// Median rate delivered in the trials at `lower_pps` that met the goal.
    pub delivered_pps: Option<f64>,
    pub because: SearchEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SearchEnd {
    Narrow,
    /// The highest rate of the search meets the goal, so the true maximum is higher.
    Highest,
    /// The lowest rate of the search misses the goal, so the true maximum is lower.
    Lowest,
    /// The generator cannot reach a higher rate steadily, so the true maximum may be higher.
    Generator,
    /// The search was interrupted, so the interval may be wide and based on short trials.
    Ended,
}

#[derive(Clone, Debug, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct SearchOptions {
    /// Lowest rate in datagrams per second
    #[arg(long, value_name = "PPS", default_value_t = 1_000)]
    pub(crate) min: u64,
    /// Highest rate; the search starts there
    #[arg(long, value_name = "PPS", default_value_t = 1_000_000)]
    pub(crate) max: u64,
    /// Width of the result in percent of the rate
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0)]
    #[serde(default = "three")]
    pub(crate) width: f64,
    /// Seconds per trial in the last phase
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    #[serde(default = "three")]
    pub(crate) trial: f64,
    /// Loss goals in percent
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_values_t = [0.0, 0.1, 0.5])]
    #[serde(deserialize_with = "one_goal")]
    pub(crate) loss: Vec<f64>,
    /// Latency (99th percentile) above which all datagrams of a trial count as lost.
    #[arg(skip)]
    pub(crate) max_p99_us: Option<f64>,
    /// Maximum time by which the generator may fall behind (99th percentile); must be below the limit for the subject's latency.
    #[arg(skip)]
    pub(crate) max_late_us: Option<f64>,
}

fn three() -> f64 {
    3.0
}

fn one_goal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    f64::deserialize(deserializer).map(|loss| vec![loss])
}

impl SearchOptions {
    pub(crate) fn settings(&self) -> Result<SearchSettings, String> {
        let &Self { min, max, width, trial, ref loss, max_p99_us, .. } = self;
        if min == 0 || min >= max {
            return Err(format!("min {min} and max {max}: expected 0 < min < max"));
        }
        if !(0.1..=50.0).contains(&width) {
            return Err(format!("width {width}: expected 0.1 to 50 percent"));
        }
        if !(0.1..=600.0).contains(&trial) {
            return Err(format!("trial {trial}: expected 0.1 to 600 seconds"));
        }
        if loss.is_empty() || loss.iter().any(|loss| !(0.0..100.0).contains(loss)) {
            return Err("loss: expected percentages from 0 to below 100".to_owned());
        }
        Ok(SearchSettings {
            min_pps: min,
            max_pps: max,
            goals: loss.iter().map(|percent| percent / 100.0).collect(),
            width: width / 100.0,
            short_s: (trial / 5.0).max(0.6).min(trial),
            long_s: trial,
            sum_s: trial * 3.0,
            max_p99_us,
            ..SearchSettings::default()
        })
    }
}

impl SearchSettings {
    pub(crate) fn loosest(&self) -> f64 {
        self.goals.iter().copied().fold(0.0, f64::max)
    }
}

impl fmt::Display for SearchEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Narrow => "narrow enough",
            Self::Highest => "the highest rate meets the goal",
            Self::Lowest => "the lowest rate misses the goal",
            Self::Generator => "the generator fell behind or was at its limit",
            Self::Ended => "interrupted",
        })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Search {
    settings: SearchSettings,
    phases: Vec<SearchPhase>,
    tried: BTreeMap<u64, Vec<TriedRate>>,
    voids: BTreeMap<(u64, usize), u32>,
    /// For each goal, the lowest rate that the generator cannot reach, and the rate reached instead, if
    /// known.
    ceilings: Vec<Option<(u64, Option<f64>)>>,
    trials: usize,
    /// Current phase. Earlier phases are not resumed, even if a later trial contradicts one of their bounds.
    phase: usize,
    current: Option<(Trial, Cursor)>,
}

#[derive(Clone, Copy, Debug)]
struct SearchPhase {
    trial_s: f64,
    sum_s: f64,
    width: f64,
}

#[derive(Clone, Copy, Debug)]
struct TriedRate {
    duration_s: f64,
    loss: f64,
    delivered_pps: f64,
    late: bool,
}

#[derive(Clone, Copy, Debug)]
struct Cursor {
    phase: usize,
    goal: usize,
    rate: u64,
    /// Relative distance of the next rate from the nearest bound; doubles with each move.
    step: f64,
    last: Option<RateBound>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RateBound {
    Lower,
    Upper,
}

impl Search {
    /// Creates a search, which is finished immediately if the settings are invalid (minimum above maximum, no goals).
    pub(crate) fn new(settings: SearchSettings) -> Self {
        let phase = |trial_s, sum_s, factor| SearchPhase { trial_s, sum_s, width: settings.width * factor };
        let phases = vec![
            phase(settings.short_s, settings.short_s, 4.0),
            phase(settings.short_s, 3.0 * settings.short_s, 2.0),
            phase(settings.long_s, settings.sum_s, 1.0),
        ];
        let ceilings = vec![None; settings.goals.len()];
        Self {
            settings,
            phases,
            tried: BTreeMap::new(),
            voids: BTreeMap::new(),
            ceilings,
            trials: 0,
            phase: 0,
            current: None,
        }
    }

    /// Returns the next trial, which stays the same until its result is observed; `None` when the search is finished.
    pub(crate) fn next(&mut self) -> Option<Trial> {
        if let Some((trial, _)) = self.current {
            return Some(trial);
        }
        self.advance(None);
        self.current.map(|(trial, _)| trial)
    }

    pub(crate) fn observe(&mut self, sent: u64, received: u64) {
        self.take(sent, received, false);
    }

    /// Records a trial in which the generator fell behind and therefore sent bursts. It counts for goals that it met, because bursts are
    /// harder on the subject than an even stream; otherwise it is void.
    pub(crate) fn observe_late(&mut self, sent: u64, received: u64) {
        self.take(sent, received, true);
    }

    fn take(&mut self, sent: u64, received: u64, late: bool) {
        let Some((trial, cursor)) = self.current else { return };
        let wanted = trial.rate_pps as f64 * trial.duration_s;
        // One datagram may be missing: at low rates, the last one may be sent just after the end.
        if sent == 0 || (sent as f64) < wanted * (1.0 - SHORTFALL) - 1.0 {
            self.void(Some(sent as f64 / trial.duration_s));
            return;
        }
        self.trials += 1;
        let loss = (1.0 - received as f64 / sent as f64).max(0.0);
        let tried = TriedRate {
            duration_s: trial.duration_s,
            loss,
            delivered_pps: (received as f64 / trial.duration_s).min(trial.rate_pps as f64 * (1.0 - loss)),
            late,
        };
        self.tried.entry(trial.rate_pps).or_default().push(tried);
        if late && loss > self.settings.goals[cursor.goal] {
            self.count_void(trial.rate_pps, cursor.goal, None);
        }
        self.current = None;
        self.advance(Some(cursor));
    }

    /// Records a void trial, which is repeated. After [`SearchSettings::max_voids`] void trials at a rate, the search stays below that
    /// rate.
    pub(crate) fn observe_void(&mut self) {
        self.void(None);
    }

    pub(crate) fn found(&self) -> Vec<FoundRate> {
        (0..self.settings.goals.len()).map(|goal| self.found_for(goal)).collect()
    }

    fn found_for(&self, goal: usize) -> FoundRate {
        let last = self.phases.len() - 1;
        let decided = self.finished(last, goal);
        let phase = if decided {
            last
        } else {
            (0..=last).rev().find(|&p| self.bounds(p, goal).0.is_some()).unwrap_or(0)
        };
        let (lower, upper) = self.bounds(phase, goal);
        let max_loss = self.settings.goals[goal];
        let delivered_pps = lower.and_then(|rate| {
            let kept = self.tried[&rate]
                .iter()
                .filter(|t| t.loss <= max_loss && t.duration_s >= self.phases[phase].trial_s);
            stats::median(&kept.map(|tried| tried.delivered_pps).collect::<Vec<_>>())
        });
        let ceiling = self.ceilings[goal].map(|(rate, _)| rate);
        let because = match (lower, upper) {
            _ if !decided => SearchEnd::Ended,
            (Some(lower), Some(upper)) if narrow(lower, upper, self.phases[phase].width) => SearchEnd::Narrow,
            _ if ceiling.is_some_and(|ceiling| upper.is_none_or(|upper| ceiling < upper)) => {
                SearchEnd::Generator
            }
            (_, None) => SearchEnd::Highest,
            (_, Some(_)) => SearchEnd::Lowest,
        };
        FoundRate { max_loss, lower_pps: lower, upper_pps: upper, delivered_pps, because }
    }

    fn void(&mut self, made_pps: Option<f64>) {
        let Some((trial, cursor)) = self.current.take() else { return };
        self.trials += 1;
        for goal in 0..self.settings.goals.len() {
            self.count_void(trial.rate_pps, goal, made_pps);
        }
        self.advance(Some(cursor));
    }

    fn count_void(&mut self, rate_pps: u64, goal: usize, made_pps: Option<f64>) {
        let voids = self.voids.entry((rate_pps, goal)).or_default();
        *voids += 1;
        let ceiling = &mut self.ceilings[goal];
        if *voids >= self.settings.max_voids && ceiling.is_none_or(|(rate, _)| rate_pps < rate) {
            *ceiling = Some((rate_pps, made_pps.filter(|&made| made > 0.0)));
        }
    }

    fn advance(&mut self, cursor: Option<Cursor>) {
        if self.trials >= self.settings.max_trials {
            return;
        }
        let cursor = match cursor {
            Some(cursor) => match self.decided(&cursor) {
                None => Some(cursor),
                decided => {
                    self.place(Some(Cursor { step: (cursor.step * 2.0).min(0.5), last: decided, ..cursor }))
                }
            },
            None => self.place(None),
        };
        self.phase = cursor.map_or(self.phases.len(), |cursor| cursor.phase);
        self.current = cursor.map(|cursor| {
            (Trial { rate_pps: cursor.rate, duration_s: self.phases[cursor.phase].trial_s }, cursor)
        });
    }

    /// Decision about the cursor's rate. A rate that the generator cannot reach counts as an upper bound.
    fn decided(&self, cursor: &Cursor) -> Option<RateBound> {
        if self.ceilings[cursor.goal].is_some_and(|(ceiling, _)| cursor.rate >= ceiling) {
            return Some(RateBound::Upper);
        }
        self.classify(cursor.phase, cursor.goal, cursor.rate)
    }

    fn place(&self, from: Option<Cursor>) -> Option<Cursor> {
        for phase in self.phase..self.phases.len() {
            for goal in 0..self.settings.goals.len() {
                if self.finished(phase, goal) {
                    continue;
                }
                let cursor = match from {
                    Some(cursor) if (cursor.phase, cursor.goal) == (phase, goal) => cursor,
                    _ => Cursor { phase, goal, rate: 0, step: 2.0 * self.phases[phase].width, last: None },
                };
                if let Some(rate) = self.choose(&cursor) {
                    return Some(Cursor { rate, ..cursor });
                }
            }
        }
        None
    }

    fn choose(&self, cursor: &Cursor) -> Option<u64> {
        let &Cursor { phase, goal, step, .. } = cursor;
        let (lower, upper) = self.range(phase, goal);
        if let Some(hint) = self.hint(phase, goal, lower, upper) {
            return Some(hint);
        }
        let up = |lower: u64| lower as f64 / (1.0 - step);
        let down = |upper: u64| upper as f64 * (1.0 - step);
        let rate = match (lower, upper) {
            (None, None) => self.settings.max_pps as f64,
            (Some(lower), None) => up(lower).max(lower as f64 + 1.0),
            // An overloaded subject still delivers about its maximum, so the next trial is at the rate that it delivered.
            (None, Some(upper)) if cursor.last.is_none() || phase == 0 => {
                self.delivered_at(goal, upper).filter(|&rate| rate < down(upper)).unwrap_or(down(upper))
            }
            (None, Some(upper)) => down(upper),
            (Some(lower), Some(upper)) => {
                let middle = (lower as f64 * upper as f64).sqrt();
                match cursor.last {
                    Some(RateBound::Lower) => up(lower).min(middle),
                    Some(RateBound::Upper) => down(upper).max(middle),
                    None => middle,
                }
            }
        };
        let rate = pps(rate).max(self.settings.min_pps).min(self.settings.max_pps);
        let inside = lower.is_none_or(|lower| rate > lower) && upper.is_none_or(|upper| rate < upper);
        inside.then_some(rate)
    }

    /// Finds a bound from the previous phase whose rate is still undecided in this phase.
    fn hint(&self, phase: usize, goal: usize, lower: Option<u64>, upper: Option<u64>) -> Option<u64> {
        let (low, high) = self.bounds(phase.checked_sub(1)?, goal);
        let undecided = |rate: &u64| {
            self.classify(phase, goal, *rate).is_none() && upper.is_none_or(|upper| *rate < upper)
        };
        low.filter(|_| lower.is_none()).filter(undecided).or_else(|| {
            high.filter(|high| upper.is_none() && lower.is_none_or(|lower| *high > lower)).filter(undecided)
        })
    }

    /// Median rate delivered at this offered rate, which is too high, or the rate that the generator reached instead.
    fn delivered_at(&self, goal: usize, rate: u64) -> Option<f64> {
        if let Some((_, made)) = self.ceilings[goal].filter(|(ceiling, _)| *ceiling == rate) {
            return made;
        }
        stats::median(&self.tried.get(&rate)?.iter().map(|tried| tried.delivered_pps).collect::<Vec<_>>())
    }

    fn finished(&self, phase: usize, goal: usize) -> bool {
        match self.range(phase, goal) {
            (Some(lower), _) if lower >= self.settings.max_pps => true,
            (Some(lower), Some(upper)) => narrow(lower, upper, self.phases[phase].width),
            (None, Some(upper)) => upper <= self.settings.min_pps,
            (_, None) => self.settings.min_pps > self.settings.max_pps,
        }
    }

    fn range(&self, phase: usize, goal: usize) -> (Option<u64>, Option<u64>) {
        let (lower, upper) = self.bounds(phase, goal);
        let ceiling = self.ceilings[goal].map(|(rate, _)| rate);
        (lower, upper.into_iter().chain(ceiling).min())
    }

    /// Finds the smallest upper bound and the largest lower bound below it. Lower bounds above that upper bound are ignored as luck.
    fn bounds(&self, phase: usize, goal: usize) -> (Option<u64>, Option<u64>) {
        let mut lower = None;
        for &rate in self.tried.keys() {
            match self.classify(phase, goal, rate) {
                Some(RateBound::Upper) => return (lower, Some(rate)),
                Some(RateBound::Lower) => lower = Some(rate),
                None => {}
            }
        }
        (lower, None)
    }

    /// Classifies a rate for a goal by its trials; `None` while further trials could change the result. Trials shorter than those of the
    /// phase have less time to lose anything and can therefore count only against the rate: if the lossy ones last longer in total than
    /// the lossless ones, the difference counts as lossy.
    fn classify(&self, phase: usize, goal: usize, rate: u64) -> Option<RateBound> {
        let (phase, max_loss) = (&self.phases[phase], self.settings.goals[goal]);
        let trials = self.tried.get(&rate)?;
        let seconds = |full: bool, kept: bool| -> f64 {
            trials
                .iter()
                .filter(|t| (t.duration_s >= phase.trial_s) == full && (t.loss <= max_loss) == kept)
                .filter(|t| kept || !t.late)
                .map(|t| t.duration_s)
                .sum()
        };
        let excess = (seconds(false, false) - seconds(false, true)).max(0.0);
        let bad = seconds(true, false) + excess;
        let good = seconds(true, true);
        let whole = (bad + good).max(phase.sum_s);
        // The goal may be missed for up to half of the time. This makes the result a median, which a hiccup does not change.
        let allowed = whole / 2.0;
        if whole - good <= allowed {
            Some(RateBound::Lower)
        } else if bad > allowed {
            Some(RateBound::Upper)
        } else {
            None
        }
    }
}

fn narrow(lower: u64, upper: u64, width: f64) -> bool {
    let between = upper.saturating_sub(lower);
    between <= 1 || between as f64 <= width * upper as f64
}

#[expect(clippy::cast_possible_truncation, reason = "saturation is intended")]
fn pps(rate: f64) -> u64 {
    rate as u64
}

#[cfg(test)]
mod tests;
