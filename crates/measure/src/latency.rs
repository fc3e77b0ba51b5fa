//! Latency histogram in microseconds, cheap enough to update per datagram.

use hdrhistogram::Histogram;

use crate::{Lateness, Percentiles};

/// Latencies from 1 us to 60 s with three significant digits (70 KiB); other values are clamped.
#[derive(Clone, Debug)]
pub struct Latency {
    histogram: Histogram<u32>,
    /// Smallest and largest value, kept separately because bucket bounds may be 0.1 % off.
    min_us: u64,
    max_us: u64,
}

impl Latency {
    const MAX_US: u64 = 60_000_000;

    pub fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, Self::MAX_US, 3)
            .expect("1 to 60,000,000 at 3 digits is a valid range");
        Self { histogram, min_us: u64::MAX, max_us: 0 }
    }

    #[inline]
    pub fn record(&mut self, us: u64) {
        self.record_n(us, 1);
    }

    #[inline]
    pub fn record_n(&mut self, us: u64, n: u32) {
        if n == 0 {
            return;
        }
        self.min_us = self.min_us.min(us);
        self.max_us = self.max_us.max(us);
        self.histogram.saturating_record_n(us.clamp(1, Self::MAX_US), n);
    }

    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Value in microseconds at this quantile (0 to 1); 0 when empty.
    pub fn quantile(&self, fraction: f64) -> u64 {
        if self.count() == 0 {
            return 0;
        }
        self.histogram.value_at_quantile(fraction).clamp(self.min(), self.max())
    }

    pub fn min(&self) -> u64 {
        if self.count() == 0 { 0 } else { self.min_us }
    }

    pub fn max(&self) -> u64 {
        self.max_us
    }

    pub fn merge(&mut self, other: &Self) {
        if other.count() == 0 {
            return;
        }
        self.histogram.add(&other.histogram).expect("histograms with equal bounds can be added");
        self.min_us = self.min_us.min(other.min_us);
        self.max_us = self.max_us.max(other.max_us);
    }

    pub fn clear(&mut self) {
        self.histogram.reset();
        self.min_us = u64::MAX;
        self.max_us = 0;
    }

    pub fn percentiles(&self) -> Percentiles {
        Percentiles {
            min: self.min(),
            p50: self.quantile(0.50),
            p90: self.quantile(0.90),
            p99: self.quantile(0.99),
            p999: self.quantile(0.999),
            max: self.max(),
        }
    }

    pub fn lateness(&self) -> Lateness {
        Lateness { p50: self.quantile(0.50), p99: self.quantile(0.99), max: self.max() }
    }
}

impl Default for Latency {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_a_known_distribution_are_within_a_thousandth() {
        let mut latency = Latency::new();
        for us in 1..=100_000 {
            latency.record(us);
        }
        for (fraction, expected) in [(0.5, 50_000.0), (0.9, 90_000.0), (0.99, 99_000.0), (0.999, 99_900.0)] {
            let value = latency.quantile(fraction) as f64;
            assert!((value - expected).abs() / expected < 0.002, "quantile {fraction}: {value}");
        }
        assert_eq!((latency.min(), latency.max(), latency.count()), (1, 100_000, 100_000));
    }

    #[test]
    fn merging_equals_recording_into_one_histogram() {
        let (mut whole, mut odd, mut even) = (Latency::new(), Latency::new(), Latency::new());
        for us in 10..5_000 {
            whole.record(us);
            if us % 2 == 0 { even.record(us) } else { odd.record(us) }
        }
        odd.merge(&even);
        assert_eq!(odd.percentiles(), whole.percentiles());
        assert_eq!(odd.count(), whole.count());
    }

    #[test]
    fn values_outside_the_range_are_counted_at_its_bounds() {
        let mut latency = Latency::new();
        latency.record(0);
        latency.record_n(u64::MAX, 3);
        assert_eq!(latency.count(), 4);
        assert_eq!(latency.min(), 0);
        assert!(latency.quantile(0.9) >= Latency::MAX_US);
    }

    #[test]
    fn empty_and_cleared_histograms_report_zeros() {
        let mut latency = Latency::new();
        assert_eq!(latency.percentiles(), Percentiles::default());
        latency.record(7);
        latency.clear();
        assert_eq!(latency.percentiles(), Percentiles::default());
        latency.record_n(9, 0);
        assert_eq!(latency.count(), 0);
    }
}
