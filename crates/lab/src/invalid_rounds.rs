//! Reasons to void a run: a generator that fell behind, stolen or shared CPUs, a failed subject.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::metric;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum VoidReason {
    /// A generator that fell behind has changed the offered load, but some metrics remain valid.
    #[error("the generator fell behind (p99 {p99_us:.0} µs, limit {limit_us:.0} µs)")]
    GeneratorLate { p99_us: f64, limit_us: f64 },
    #[error("CPU time was stolen ({percent:.1} %, limit {limit_percent:.1} %)")]
    CpuStolen { percent: f64, limit_percent: f64 },
    /// CPU time of other processes, excluding the kernel's network threads.
    #[error("other processes used the subject's cores ({percent:.1} %, limit {limit_percent:.1} %)")]
    CoresShared { percent: f64, limit_percent: f64 },
    #[error("the subject failed: {how}")]
    SubjectFailed { how: String },
    #[error("{what}")]
    Other { what: String },
}

/// Causes for which no subject is responsible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VoidCause {
    GeneratorLate,
    CpuStolen,
    CoresShared,
}

impl VoidCause {
    pub(crate) const ALL: [Self; 3] = [Self::GeneratorLate, Self::CpuStolen, Self::CoresShared];
}

impl fmt::Display for VoidCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GeneratorLate => "the generator fell behind",
            Self::CpuStolen => "CPU time was stolen",
            Self::CoresShared => "other processes used the subjects' cores",
        })
    }
}

impl VoidReason {
    pub(crate) fn cause(&self) -> Option<(VoidCause, f64)> {
        match self {
            Self::GeneratorLate { p99_us, .. } => Some((VoidCause::GeneratorLate, *p99_us)),
            Self::CpuStolen { percent, .. } => Some((VoidCause::CpuStolen, *percent)),
            Self::CoresShared { percent, .. } => Some((VoidCause::CoresShared, *percent)),
            Self::SubjectFailed { .. } | Self::Other { .. } => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VoidLimits {
    pub late_p99_us: f64,
    /// Stolen time as a share of the whole machine's CPU time.
    pub steal_percent: f64,
    /// Share of the subject's cores used by other processes; known only for pinned subjects.
    pub foreign_percent: f64,
    /// Maximum loss; absent in experiments that measure losses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_percent: Option<f64>,
    /// Maximum share of the generator's connections that break or are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken_percent: Option<f64>,
}

impl Default for VoidLimits {
    /// Limits for a resolution of 5 %: 1 % of stolen time is a fifth of that, and 3 % of a core leaves room for kernel threads.
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

impl VoidLimits {
    pub(crate) fn check(&self, metrics: &BTreeMap<String, f64>) -> Option<VoidReason> {
        let above = |name: &str, limit: f64| metrics.get(name).copied().filter(|value| *value > limit);
        // Lateness is checked last, because it does not affect every metric.
        if let Some(percent) = above(metric::STEAL_PERCENT, self.steal_percent) {
            return Some(VoidReason::CpuStolen { percent, limit_percent: self.steal_percent });
        }
        if let Some(percent) = above(metric::FOREIGN_PERCENT, self.foreign_percent) {
            return Some(VoidReason::CoresShared { percent, limit_percent: self.foreign_percent });
        }
        for (name, limit, what) in [
            (metric::LOSS_PERCENT, self.loss_percent, "were lost"),
            (metric::BROKEN_PERCENT, self.broken_percent, "of the connections broke"),
        ] {
            if let Some((percent, limit)) = limit.and_then(|limit| Some((above(name, limit)?, limit))) {
                return Some(VoidReason::Other {
                    what: format!("{percent:.2} % {what}, the limit is {limit} % ({name})"),
                });
            }
        }
        let p99_us = above(metric::LATE_P99_US, self.late_p99_us)?;
        Some(VoidReason::GeneratorLate { p99_us, limit_us: self.late_p99_us })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(limits: VoidLimits, metrics: &[(&str, f64)]) -> Option<VoidReason> {
        limits.check(&metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect())
    }

    #[test]
    fn a_figure_above_its_limit_voids_the_round() {
        let usual = VoidLimits::default();
        let foreign = VoidLimits { foreign_percent: 20.0, ..usual };
        let loss = VoidLimits { loss_percent: Some(5.0), ..usual };
        let broken = VoidLimits { broken_percent: Some(5.0), ..usual };
        for (limits, metric, value, told) in [
            (usual, metric::LATE_P99_US, 1_500.0, "the generator fell behind (p99 1500 µs, limit 1000 µs)"),
            (usual, metric::LATE_P99_US, 999.0, ""),
            (usual, metric::STEAL_PERCENT, 3.25, "CPU time was stolen (3.2 %, limit 1.0 %)"),
            (usual, metric::STEAL_PERCENT, 0.5, ""),
            (
                usual,
                metric::FOREIGN_PERCENT,
                12.5,
                "other processes used the subject's cores (12.5 %, limit 3.0 %)",
            ),
            (usual, metric::FOREIGN_PERCENT, 2.9, ""),
            (foreign, metric::FOREIGN_PERCENT, 12.5, ""),
            (usual, metric::LOSS_PERCENT, 50.0, ""),
            (loss, metric::LOSS_PERCENT, 5.0, ""),
            (loss, metric::LOSS_PERCENT, 6.0, "6.00 % were lost, the limit is 5 % (loss_percent)"),
            (usual, metric::BROKEN_PERCENT, 50.0, ""),
            (
                broken,
                metric::BROKEN_PERCENT,
                6.0,
                "6.00 % of the connections broke, the limit is 5 % (broken_percent)",
            ),
            (usual, "unknown", 9e9, ""),
        ] {
            let void = check(limits, &[(metric, value)]).map_or_else(String::new, |void| void.to_string());
            assert_eq!(void, told, "{metric} {value}");
        }
    }

    #[test]
    fn stolen_time_takes_precedence_over_lateness() {
        let late = (metric::LATE_P99_US, 9_000.0);
        for (other, cause) in
            [(metric::STEAL_PERCENT, VoidCause::CpuStolen), (metric::FOREIGN_PERCENT, VoidCause::CoresShared)]
        {
            let void = check(VoidLimits::default(), &[late, (other, 9.0)]).unwrap();
            assert_eq!(void.cause(), Some((cause, 9.0)));
        }
    }
}
