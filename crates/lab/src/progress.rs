//! Progress of an experiment: round k of n, current run, time left and the estimate so far.
//!
//! This module neither reads a clock nor prints: the caller passes in the time since the start and prints [`RunProgress::line`].

use std::time::Duration;

use crate::stats::Estimate;

#[derive(Clone, Debug, Default)]
pub(crate) struct RunProgress {
    pub(crate) rounds: u32,
    pub(crate) runs_per_round: u32,
    /// Expected duration of a run, used until the first one has ended.
    pub(crate) expected: Duration,
    pub(crate) runs_done: u32,
    /// Runs in `runs_done` that took no time, because their subject has been abandoned.
    pub(crate) runs_skipped: u32,
    /// Name of the running estimate, and the estimate.
    pub(crate) estimate: Option<(String, Estimate)>,
}

impl RunProgress {
    /// Progress line without a newline, such as
    ///
    /// `round 3 of 10, run 2 of 3: coturn, 12 min left, turnpike / coturn 1.52 (1.41 to 1.66)`
    pub(crate) fn line(&self, running: &str, elapsed: Duration) -> String {
        let runs = self.runs_per_round.max(1);
        let (round, run) = (self.runs_done / runs + 1, self.runs_done % runs + 1);
        let each = elapsed.checked_div(self.runs_done - self.runs_skipped).unwrap_or(self.expected);
        let left = each.saturating_mul((self.rounds * runs).saturating_sub(self.runs_done));
        let mut line =
            format!("round {round} of {}, run {run} of {runs}: {running}, {} left", self.rounds, show(left));
        if let Some((what, estimate)) = &self.estimate {
            line += &format!(", {what} {:.3}", estimate.ratio());
            if estimate.rounds > 1 {
                let interval = estimate.interval();
                line += &format!(" ({:.3} to {:.3})", interval.low, interval.high);
            }
        }
        line
    }
}

fn show(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 0..=90 => format!("{seconds} s"),
        seconds @ 91..=5_400 => format!("{} min", seconds.div_ceil(60)),
        seconds => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn time_left_follows_the_measured_durations() {
        let mut progress =
            RunProgress { rounds: 10, runs_per_round: 3, expected: s(8), ..RunProgress::default() };
        assert_eq!(progress.line("coturn", s(0)), "round 1 of 10, run 1 of 3: coturn, 4 min left");
        (progress.runs_done, progress.runs_skipped) = (28, 8);
        assert_eq!(progress.line("pion", s(200)), "round 10 of 10, run 2 of 3: pion, 20 s left");
        assert_eq!(show(s(7_300)), "2 h 1 min");
    }

    #[test]
    fn the_running_estimate_comes_last() {
        let estimate = |ratios: &[f64]| Some(("new / old".to_owned(), Estimate::new(ratios, 1).unwrap()));
        let mut progress = RunProgress { rounds: 1, estimate: estimate(&[0.0]), ..RunProgress::default() };
        assert!(progress.line("a", s(0)).ends_with(", new / old 1.000"));
        progress.estimate = estimate(&[0.0, 0.1]);
        assert!(progress.line("a", s(0)).ends_with("new / old 1.051 (1.000 to 1.105)"));
    }
}
