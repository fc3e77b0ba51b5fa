//! Histograms of loss, jitter and round trips for metrics.

/// Upper bounds of the buckets: a ratio.
pub(crate) const LOSS_BOUNDS: [f64; 8] = [0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
/// Upper bounds in seconds.
pub(crate) const JITTER_BOUNDS: [f64; 8] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1];
/// Upper bounds in seconds.
pub(crate) const ROUND_TRIP_BOUNDS: [f64; 8] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0];

/// Samples in buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Samples {
    /// Number of samples per bucket; the last bucket has no bound.
    pub(crate) buckets: [u64; 9],
    pub(crate) sum: f64,
}

impl Samples {
    pub(super) fn add(&mut self, bounds: &[f64; 8], value: f64) {
        let bucket = bounds.iter().position(|bound| value <= *bound);
        self.buckets[bucket.unwrap_or(bounds.len())] += 1;
        self.sum += value;
    }
}

/// Samples of each flow (uplink and downlink of the client, then of the peer), and of each leg.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct QualityFigures {
    pub(crate) loss: [Samples; 4],
    pub(crate) jitter: [Samples; 4],
    pub(crate) round_trip: [Samples; 2],
}
