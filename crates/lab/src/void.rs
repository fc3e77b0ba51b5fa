//! Why a round does not count: the generator was late, CPUs were stolen, the subject failed.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::metric;
use crate::record::Round;

/// Why a run was declared void.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Void {
    /// The generator sent later than due, so that the offered load was not the wanted one. Some metrics
    /// [survive](metric::survives_lateness) that.
    GeneratorLate {
        /// 99th percentile of its lateness, microseconds.
        p99_us: f64,
        /// What was allowed.
        limit_us: f64,
    },
    /// The hypervisor took CPU time away.
    CpuStolen {
        /// Percent of the machine's CPU time.
        percent: f64,
        /// What was allowed.
        limit_percent: f64,
    },
    /// The subject did not start, ended early, or delivered nothing.
    SubjectFailed {
        /// How, as a sentence part: "ended by signal 11 after 3.2 s".
        how: String,
    },
    /// Anything else, among it a workload that failed of itself.
    Other {
        /// What, as a sentence part.
        what: String,
    },
}

impl fmt::Display for Void {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GeneratorLate { p99_us, limit_us } => {
                write!(f, "the generator was late (p99 {p99_us:.0} µs, allowed {limit_us:.0} µs)")
            }
            Self::CpuStolen { percent, limit_percent } => {
                write!(f, "CPU time was stolen ({percent:.1} %, allowed {limit_percent:.1} %)")
            }
            Self::SubjectFailed { how } => write!(f, "the subject failed: {how}"),
            Self::Other { what } => f.write_str(what),
        }
    }
}

/// What a run may suffer and still count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Lateness of the generator, 99th percentile, microseconds.
    pub late_p99_us: f64,
    /// Stolen CPU time of the whole machine, percent.
    pub steal_percent: f64,
}

impl Default for Limits {
    /// 1 ms: a generator that is later than that no longer offers the rate it was told at the rates measured here.
    /// 1 % steal is a fifth of the difference that an experiment resolves by default.
    fn default() -> Self {
        Self { late_p99_us: 1_000.0, steal_percent: 1.0 }
    }
}

impl Limits {
    /// Why this run is void by its own metrics ([`metric::LATE_P99_US`], [`metric::STEAL_PERCENT`]), if it is.
    ///
    /// That a subject failed is known only to who ran it. A metric that was not recorded voids nothing.
    #[must_use]
    pub fn check(&self, round: &Round) -> Option<Void> {
        let metric = |name| round.metrics.get(name).copied();
        // First, for it spoils every metric, and lateness does not.
        if let Some(percent) = metric(metric::STEAL_PERCENT).filter(|&steal| steal > self.steal_percent) {
            return Some(Void::CpuStolen { percent, limit_percent: self.steal_percent });
        }
        if let Some(p99_us) = metric(metric::LATE_P99_US).filter(|&late| late > self.late_p99_us) {
            return Some(Void::GeneratorLate { p99_us, limit_us: self.late_p99_us });
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(name: &str, value: f64) -> Round {
        Round { metrics: [(name.to_owned(), value)].into(), ..Round::new(0, "a", 0) }
    }

    #[test]
    fn a_late_generator_voids_the_round() {
        let void = Limits::default().check(&round(metric::LATE_P99_US, 1_500.0)).unwrap();
        assert_eq!(void, Void::GeneratorLate { p99_us: 1_500.0, limit_us: 1_000.0 });
        assert_eq!(void.to_string(), "the generator was late (p99 1500 µs, allowed 1000 µs)");
        assert_eq!(Limits::default().check(&round(metric::LATE_P99_US, 999.0)), None);
    }

    #[test]
    fn stolen_cpus_void_the_round() {
        let void = Limits::default().check(&round(metric::STEAL_PERCENT, 3.25)).unwrap();
        assert_eq!(void.to_string(), "CPU time was stolen (3.2 %, allowed 1.0 %)");
        assert_eq!(Limits::default().check(&round(metric::STEAL_PERCENT, 0.5)), None);
    }

    #[test]
    fn a_run_both_late_and_robbed_is_void_for_what_spoils_more() {
        let mut both = round(metric::STEAL_PERCENT, 3.0);
        both.metrics.insert(metric::LATE_P99_US.to_owned(), 9_000.0);
        assert!(matches!(Limits::default().check(&both), Some(Void::CpuStolen { .. })));
    }

    #[test]
    fn a_round_without_these_metrics_counts() {
        assert_eq!(Limits::default().check(&Round::new(0, "a", 0)), None);
    }
}
