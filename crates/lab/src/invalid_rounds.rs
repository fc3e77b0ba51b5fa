//! Reasons to discard a round: the generator was late, CPUs were stolen, the subject failed.

use serde::{Deserialize, Serialize};

use crate::metric;
use crate::record::Round;

/// Why a run was declared void.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the messages say what their fields are")]
pub enum Void {
    /// The generator sent later than due, so that the offered load was not the wanted one. Some metrics
    /// [survive](metric::survives_lateness) that.
    #[error("the generator was late (p99 {p99_us:.0} µs, allowed {limit_us:.0} µs)")]
    GeneratorLate { p99_us: f64, limit_us: f64 },
    /// The hypervisor took CPU time away.
    #[error("CPU time was stolen ({percent:.1} %, allowed {limit_percent:.1} %)")]
    CpuStolen { percent: f64, limit_percent: f64 },
    /// Others used the subject's cores: other processes ran, for time that is neither its own nor the kernel's network threads'.
    #[error("others used the subject's cores ({percent:.1} %, allowed {limit_percent:.1} %)")]
    CoresShared { percent: f64, limit_percent: f64 },
    /// The subject did not start, ended early, or delivered nothing.
    #[error("the subject failed: {how}")]
    SubjectFailed { how: String },
    /// Anything else, among it a workload that failed of itself.
    #[error("{what}")]
    Other { what: String },
}

/// What a run may suffer and still count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Lateness of the generator, 99th percentile, microseconds.
    pub late_p99_us: f64,
    /// Stolen CPU time of the whole machine, percent.
    pub steal_percent: f64,
    /// Time of the subject's cores that went to others, percent; known only of a subject that is pinned.
    pub foreign_percent: f64,
    /// Loss, percent; absent where losses are what is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_percent: Option<f64>,
    /// Connections of the generator that broke or could not be opened, percent of what it sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken_percent: Option<f64>,
}

impl Default for Limits {
    /// 1 % steal is a fifth of the difference that an experiment resolves by default; 3 % of a core, and some of its kernel's own
    /// threads run there even where nothing else does.
    fn default() -> Self {
        Self {
            late_p99_us: turnpike_measure::LATE_P99_US as f64,
            steal_percent: 1.0,
            foreign_percent: 3.0,
            loss_percent: None,
            broken_percent: None,
        }
    }
}

impl Limits {
    /// Why this run is void by its own metrics ([`metric::LATE_P99_US`], [`metric::STEAL_PERCENT`],
    /// [`metric::FOREIGN_PERCENT`] and others), if it is.
    ///
    /// That a subject failed is known only to who ran it. A metric that was not recorded voids nothing.
    pub fn check(&self, round: &Round) -> Option<Void> {
        let above = |name: &str, limit: f64| round.metrics.get(name).copied().filter(|value| *value > limit);
        // Lateness last, for it does not spoil every metric.
        if let Some(percent) = above(metric::STEAL_PERCENT, self.steal_percent) {
            return Some(Void::CpuStolen { percent, limit_percent: self.steal_percent });
        }
        if let Some(percent) = above(metric::FOREIGN_PERCENT, self.foreign_percent) {
            return Some(Void::CoresShared { percent, limit_percent: self.foreign_percent });
        }
        for (name, limit, what) in [
            (metric::LOSS_PERCENT, self.loss_percent, "were lost"),
            (metric::BROKEN_PERCENT, self.broken_percent, "of the connections broke"),
        ] {
            if let Some((percent, limit)) = limit.and_then(|limit| Some((above(name, limit)?, limit))) {
                return Some(Void::Other {
                    what: format!("{percent:.2} % {what}, {limit} % are allowed ({name})"),
                });
            }
        }
        let p99_us = above(metric::LATE_P99_US, self.late_p99_us)?;
        Some(Void::GeneratorLate { p99_us, limit_us: self.late_p99_us })
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
    fn a_subject_that_had_to_share_its_cores_voids_the_round() {
        let void = Limits::default().check(&round(metric::FOREIGN_PERCENT, 12.5)).unwrap();
        assert_eq!(void.to_string(), "others used the subject's cores (12.5 %, allowed 3.0 %)");
        assert_eq!(Limits::default().check(&round(metric::FOREIGN_PERCENT, 2.9)), None);
        let allowed = Limits { foreign_percent: 20.0, ..Limits::default() };
        assert_eq!(allowed.check(&round(metric::FOREIGN_PERCENT, 12.5)), None);
    }

    #[test]
    fn losses_and_broken_connections_void_a_round_only_where_a_limit_says_so() {
        for (name, limits) in [
            (metric::LOSS_PERCENT, Limits { loss_percent: Some(5.0), ..Limits::default() }),
            (metric::BROKEN_PERCENT, Limits { broken_percent: Some(5.0), ..Limits::default() }),
        ] {
            assert_eq!(Limits::default().check(&round(name, 50.0)), None, "{name}");
            assert_eq!(limits.check(&round(name, 5.0)), None, "{name}");
            let void = limits.check(&round(name, 6.0)).unwrap().to_string();
            assert!(void.starts_with("6.00 % ") && void.contains(&format!("({name})")), "{void}");
        }
    }

    #[test]
    fn a_run_both_late_and_robbed_is_void_for_what_spoils_more() {
        let mut both = round(metric::STEAL_PERCENT, 3.0);
        both.metrics.insert(metric::LATE_P99_US.to_owned(), 9_000.0);
        assert!(matches!(Limits::default().check(&both), Some(Void::CpuStolen { .. })));
        both.metrics.remove(metric::STEAL_PERCENT);
        both.metrics.insert(metric::FOREIGN_PERCENT.to_owned(), 9.0);
        assert!(matches!(Limits::default().check(&both), Some(Void::CoresShared { .. })));
    }

    #[test]
    fn a_round_without_these_metrics_counts() {
        assert_eq!(Limits::default().check(&Round::new(0, "a", 0)), None);
    }
}
