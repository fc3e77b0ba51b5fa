//! Interarrival jitter of one flow (RFC 3550 section 6.4.1).

/// Running estimate `J += (|D| - J) / 16`, where D is the difference between consecutive transit times.
/// Stored as an integer scaled by 16, as in RFC 3550 appendix A.8.
#[derive(Clone, Copy, Debug, Default)]
pub struct Jitter {
    scaled: u64,
    last_transit: Option<u64>,
}

impl Jitter {
    #[inline]
    pub fn note(&mut self, transit: u64) {
        if let Some(last) = self.last_transit.replace(transit) {
            self.scaled += transit.abs_diff(last);
            self.scaled -= (self.scaled.saturating_sub(transit.abs_diff(last)) + 8) >> 4;
        }
    }

    pub fn estimate(&self) -> Option<f64> {
        self.last_transit.map(|_| self.scaled as f64 / 16.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constant_transit_time_has_no_jitter() {
        let mut jitter = Jitter::default();
        assert_eq!(jitter.estimate(), None);
        for _ in 0..100 {
            jitter.note(250);
        }
        assert_eq!(jitter.estimate(), Some(0.0));
    }

    #[test]
    fn an_alternating_transit_time_converges_to_its_step() {
        let mut jitter = Jitter::default();
        for n in 0..1_000_u64 {
            jitter.note(1_000 + (n % 2) * 64);
        }
        let estimate = jitter.estimate().unwrap();
        assert!((estimate - 64.0).abs() < 1.0, "{estimate}");
    }
}
