//! Thresholds of bad quality, and the state of one figure against its threshold.

use turnpike_api::quality::FlowQuality;

/// Minimum number of datagrams in a window.
const FEWEST: u64 = 100;
/// Trouble ends below this part of its threshold, so that a figure near the threshold does not alternate.
const END: f64 = 0.5;
/// Smallest ratio of a receiver's jitter to that on arrival at the relay that proves jitter behind the relay. Both are estimates of RFC 3550,
/// which vary by 15 %, from different times: in a simulation with 40 ms before the relay, 1.25 blamed the wrong leg in 5 % to 9 % of the cases,
/// 1.75 in 1 %.
const LEAST_INCREASE: f64 = 1.75;

/// Figure with a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    Loss,
    Jitter,
    RoundTrip,
}

impl Measure {
    /// Loss that conceals badly in speech; jitter beyond a usual playout buffer; half of it is the one-way delay at
    /// which conversation suffers (ITU-T G.114: 150 ms).
    pub(super) fn threshold(self) -> f64 {
        match self {
            Self::Loss => 0.02,
            Self::Jitter => 30.0,
            Self::RoundTrip => 300.0,
        }
    }
}

/// Figure above its threshold: a ratio for loss, otherwise milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trouble {
    /// Unix time in seconds.
    pub(super) since: u64,
    pub(super) value: f64,
}

impl Trouble {
    pub(super) fn follow(trouble: &mut Option<Self>, measure: Measure, value: f64, now: u64) {
        let threshold = measure.threshold();
        let limit = if trouble.is_some() { threshold * END } else { threshold };
        let since = trouble.map_or(now, |trouble| trouble.since);
        *trouble = (value >= limit).then_some(Self { since, value });
    }
}

/// One direction of a leg.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FlowState {
    /// Counts at the beginning of the current window.
    expected: u64,
    lost: u64,
    /// End of the last window in Unix seconds.
    pub(super) judged_at: u64,
    pub(super) loss: Option<Trouble>,
    pub(super) jitter: Option<Trouble>,
}

/// Figures of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    pub(super) loss: f64,
    /// Jitter that this leg added, in milliseconds.
    pub(super) jitter_ms: f64,
}

impl FlowState {
    /// Judges the window that ends now; `None` if it has too few datagrams and continues. `before_ms` is the jitter
    /// with which the datagrams arrived at the relay, 0 for an uplink.
    pub(super) fn judge(&mut self, flow: &FlowQuality, before_ms: f64, now: u64) -> Option<Window> {
        if flow.expected < self.expected {
            // The worker has begun to measure again.
            (self.expected, self.lost) = (0, 0);
        }
        let expected = flow.expected - self.expected;
        if expected < FEWEST {
            return None;
        }
        // The total of lost datagrams decreases when a late datagram arrives.
        let lost = flow.lost.saturating_sub(self.lost).min(expected);
        (self.expected, self.lost, self.judged_at) = (flow.expected, flow.lost, now);
        #[expect(clippy::cast_precision_loss, reason = "counts of datagrams in a window")]
        let loss = lost as f64 / expected as f64;
        let window = Window { loss, jitter_ms: added_jitter(flow.jitter_ms, before_ms) };
        Trouble::follow(&mut self.loss, Measure::Loss, window.loss, now);
        Trouble::follow(&mut self.jitter, Measure::Jitter, window.jitter_ms, now);
        Some(window)
    }
}

/// Jitter that a leg added to that of the leg before it. Independent delays add as the squares do.
fn added_jitter(total_ms: f64, before_ms: f64) -> f64 {
    if total_ms < before_ms * LEAST_INCREASE {
        return 0.0;
    }
    (total_ms * total_ms - before_ms * before_ms).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(expected: u64, lost: u64, jitter_ms: f64) -> FlowQuality {
        FlowQuality { expected, lost, jitter_ms, ..FlowQuality::default() }
    }

    #[test]
    fn loss_is_judged_per_window_and_ends_below_half_the_threshold() {
        let mut state = FlowState::default();
        assert!(state.judge(&flow(1000, 0, 1.0), 0.0, 10).is_some());
        assert_eq!(state.loss, None);
        state.judge(&flow(2000, 31, 1.0), 0.0, 20);
        assert_eq!(state.loss, Some(Trouble { since: 20, value: 0.031 }));
        state.judge(&flow(3000, 46, 1.0), 0.0, 30);
        assert_eq!(state.loss, Some(Trouble { since: 20, value: 0.015 }));
        state.judge(&flow(4000, 51, 1.0), 0.0, 40);
        assert_eq!(state.loss, None);
    }

    #[test]
    fn small_windows_continue_until_they_have_enough_datagrams() {
        let mut state = FlowState::default();
        assert_eq!(state.judge(&flow(60, 30, 1.0), 0.0, 10), None);
        let window = state.judge(&flow(120, 30, 1.0), 0.0, 20).unwrap();
        assert_eq!(window, Window { loss: 0.25, jitter_ms: 1.0 });
    }

    #[test]
    fn totals_that_begin_again_and_late_datagrams_yield_no_false_loss() {
        let mut state = FlowState::default();
        state.judge(&flow(1000, 5, 1.0), 0.0, 10);
        assert_eq!(state.judge(&flow(1100, 3, 1.0), 0.0, 20).unwrap().loss, 0.0);
        assert_eq!(state.judge(&flow(200, 2, 1.0), 0.0, 30).unwrap().loss, 0.01);
    }

    #[test]
    fn jitter_of_the_leg_before_is_not_blamed_on_the_leg_behind() {
        let mut state = FlowState::default();
        assert_eq!(state.judge(&flow(1000, 0, 44.0), 40.0, 10).unwrap().jitter_ms, 0.0);
        assert_eq!(state.judge(&flow(2000, 0, 53.0), 28.0, 20).unwrap().jitter_ms, 45.0);
        assert!(state.jitter.is_some());
    }
}
