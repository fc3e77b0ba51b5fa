//! Progress of an experiment: round k of n, current run, time left and the estimate so far.
//!
//! This module neither reads a clock nor prints: the caller passes in the time since the start and prints [`RunProgress::line`].

use std::time::Duration;

use crate::stats::{self, Estimate};

#[derive(Clone, Debug)]
pub(crate) struct RunProgress {
    rounds: u32,
    runs_per_round: u32,
    expected: Duration,
    took: Vec<f64>,
    /// Planned runs that were skipped.
    fallen_out: usize,
    began: Option<Duration>,
    running: Option<String>,
    estimate: Option<(String, Estimate)>,
}

impl RunProgress {
    pub(crate) fn new(rounds: u32, runs_per_round: u32, expected: Duration) -> Self {
        Self {
            rounds,
            runs_per_round,
            expected,
            took: Vec::new(),
            fallen_out: 0,
            began: None,
            running: None,
            estimate: None,
        }
    }

    pub(crate) fn run_begins(&mut self, what: impl Into<String>, now: Duration) {
        self.running = Some(what.into());
        self.began = Some(now);
    }

    pub(crate) fn run_ends(&mut self, now: Duration) {
        if let Some(began) = self.began.take() {
            self.took.push(now.saturating_sub(began).as_secs_f64());
        }
        self.running = None;
    }

    pub(crate) fn skip_run(&mut self) {
        self.fallen_out += 1;
    }

    pub(crate) fn add_round(&mut self) {
        self.rounds += 1;
    }

    pub(crate) fn estimate(&mut self, what: impl Into<String>, estimate: Option<Estimate>) {
        self.estimate = estimate.map(|estimate| (what.into(), estimate));
    }

    pub(crate) fn runs_done(&self) -> usize {
        self.took.len() + self.fallen_out
    }

    /// Time left, based on the median duration of the runs so far: a slow first start would skew a mean.
    pub(crate) fn left(&self, now: Duration) -> Duration {
        let runs = (self.rounds as usize * self.runs_per_round as usize).saturating_sub(self.runs_done());
        let each = stats::median(&self.took).map_or(self.expected, Duration::from_secs_f64);
        let spent = self.began.map_or(Duration::ZERO, |began| now.saturating_sub(began)).min(each);
        each.saturating_mul(u32::try_from(runs).unwrap_or(u32::MAX)).saturating_sub(spent)
    }

    /// Progress line without a newline, such as
    ///
    /// `round 3 of 10, run 2 of 3: coturn, 12 min left, turnpike / coturn 1.52 (1.41 to 1.66)`
    pub(crate) fn line(&self, now: Duration) -> String {
        let runs = (self.runs_per_round as usize).max(1);
        let (round, run) = (self.runs_done() / runs + 1, self.runs_done() % runs + 1);
        let mut line = if round > self.rounds as usize {
            format!("rounds done: {}", self.rounds)
        } else {
            format!("round {round} of {}, run {run} of {runs}", self.rounds)
        };
        if let Some(running) = &self.running {
            line += &format!(": {running}");
        }
        let left = self.left(now);
        if !left.is_zero() {
            line += &format!(", {} left", show(left));
        }
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
        0 => "1 s".to_owned(),
        seconds @ 1..=90 => format!("{seconds} s"),
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
    fn the_first_line_is_based_only_on_the_plan() {
        let mut progress = RunProgress::new(10, 3, s(8));
        assert_eq!(progress.line(s(0)), "round 1 of 10, run 1 of 3, 4 min left");
        progress.run_begins("coturn", s(0));
        assert_eq!(progress.line(s(6)), "round 1 of 10, run 1 of 3: coturn, 4 min left");
        assert_eq!(progress.left(s(6)), s(234));
    }

    #[test]
    fn time_left_follows_the_measured_durations() {
        let mut progress = RunProgress::new(4, 2, s(5));
        for (begin, end) in [(0, 60), (60, 70), (70, 80)] {
            progress.run_begins("a", s(begin));
            progress.run_ends(s(end));
        }
        assert_eq!(progress.runs_done(), 3);
        assert_eq!(progress.left(s(80)), s(50), "five runs of 10 s, the median");
        progress.run_begins("b", s(80));
        assert_eq!(progress.left(s(84)), s(46));
        assert_eq!(progress.left(s(500)), s(40), "a hanging run does not reduce the time of the others");
    }

    #[test]
    fn a_skipped_run_takes_no_time() {
        let mut progress = RunProgress::new(2, 2, s(10));
        progress.run_begins("a", s(0));
        progress.run_ends(s(10));
        progress.skip_run();
        assert_eq!(progress.line(s(10)), "round 2 of 2, run 1 of 2, 20 s left");
    }

    #[test]
    fn the_running_estimate_comes_last() {
        let mut progress = RunProgress::new(2, 1, s(10));
        progress.run_begins("a", s(0));
        progress.run_ends(s(10));
        progress.estimate("new / old", Estimate::new(&[0.0], 1));
        assert_eq!(progress.line(s(10)), "round 2 of 2, run 1 of 1, 10 s left, new / old 1.000");
        progress.estimate("new / old", Estimate::new(&[0.0, 0.1], 1));
        assert!(
            progress.line(s(10)).ends_with("new / old 1.051 (1.000 to 1.105)"),
            "{}",
            progress.line(s(10))
        );
    }

    #[test]
    fn a_void_round_adds_a_round_and_completion_is_shown() {
        let mut progress = RunProgress::new(1, 1, s(10));
        progress.run_begins("a", s(0));
        progress.run_ends(s(10));
        assert_eq!(progress.line(s(10)), "rounds done: 1");
        progress.add_round();
        assert_eq!(progress.line(s(10)), "round 2 of 2, run 1 of 1, 10 s left");
    }

    #[test]
    fn long_times_are_shown_in_hours() {
        assert_eq!(show(s(7_300)), "2 h 1 min");
        assert_eq!(show(s(91)), "2 min");
        assert_eq!(show(Duration::from_millis(10)), "1 s");
    }
}
