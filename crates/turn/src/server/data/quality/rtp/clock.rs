//! Interarrival jitter (RFC 3550 section 6.4.1), and the clock rate of the timestamps that it needs.

use super::arrival::Arrival;
use crate::server::data::quality::kernel::KernelStream;

/// Rates in use, in units per second.
const RATES: [u32; 7] = [8000, 12_000, 16_000, 24_000, 32_000, 48_000, 90_000];
/// Time over which the rate is estimated: a short one for the first estimate, a long one for its confirmation.
const FIRST_US: u64 = 1_000_000;
const NEXT_US: u64 = 8_000_000;
/// Differences above this are breaks in the timestamps.
const BREAK_US: u64 = 5_000_000;

/// Rate of timestamps, prepared so that datagrams cost no division.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rate {
    /// Microseconds per unit, in fractions of 2^24.
    unit_us: i64,
}

impl Rate {
    const fn of(per_second: u32) -> Self {
        Self { unit_us: (1_000_000 << 24) / per_second as i64 }
    }

    const fn us(self, units: i32) -> i64 {
        (units as i64 * self.unit_us + (1 << 23)) >> 24
    }
}

#[derive(Debug)]
pub(super) struct Clock {
    rate: Option<Rate>,
    is_static: bool,
    /// Timestamp and time at which the estimate began.
    began: (u32, u64),
    last: (u32, u64),
    /// Sixteenths of microseconds.
    jitter_16: u64,
}

impl Clock {
    pub(super) fn new(first: &Arrival) -> Self {
        let rate = static_rate(first.payload_type);
        let at = (first.timestamp, first.at_us);
        Self { rate, is_static: rate.is_some(), began: at, last: at, jitter_16: 0 }
    }

    pub(super) fn jitter_us(&self) -> u64 {
        self.jitter_16 / 16
    }

    /// Microseconds of a number of units.
    pub(super) fn us(&self, units: u32) -> u64 {
        let units = i32::try_from(units).unwrap_or(0);
        self.rate.map_or(0, |rate| rate.us(units).unsigned_abs())
    }

    #[inline]
    pub(super) fn arrived(&mut self, arrival: &Arrival) {
        let at = (arrival.timestamp, arrival.at_us);
        let before = std::mem::replace(&mut self.last, at);
        if let Some(rate) = self.rate {
            let elapsed = at.1.saturating_sub(before.1).cast_signed();
            let units = at.0.wrapping_sub(before.0).cast_signed();
            let difference = (elapsed - rate.us(units)).unsigned_abs();
            if difference > BREAK_US {
                self.began = at;
                return;
            }
            self.jitter_16 = self.jitter_16 + difference - (self.jitter_16 + 8) / 16;
        }
        let due_us = if self.rate.is_some() { NEXT_US } else { FIRST_US };
        if !self.is_static && at.1.saturating_sub(self.began.1) >= due_us {
            self.estimate(at);
        }
    }

    /// Follows a stream in the kernel, which measures the jitter itself once it knows the rate.
    pub(super) fn counted(&mut self, kernel: &KernelStream) {
        let at = (kernel.timestamp, kernel.at_us);
        if kernel.unit != 0 {
            self.jitter_16 = kernel.jitter_us * 16;
        }
        if !self.is_static && at.1.saturating_sub(self.began.1) >= FIRST_US {
            self.estimate(at);
        }
        self.last = at;
    }

    /// See [`KernelStream::unit`].
    pub(super) fn unit(&self) -> u32 {
        self.rate.map_or(0, |rate| u32::try_from((rate.unit_us * 1000) >> 16).unwrap_or(0))
    }

    #[cold]
    fn estimate(&mut self, at: (u32, u64)) {
        let began = std::mem::replace(&mut self.began, at);
        let units = u64::from(at.0.wrapping_sub(began.0));
        let rate = units.saturating_mul(1_000_000) / at.1.saturating_sub(began.1).max(1);
        let nearest = RATES.into_iter().min_by_key(|known| u64::from(*known).abs_diff(rate));
        // Too far from all rates: the timestamps broke, or do not follow the time.
        let Some(nearest) = nearest.filter(|known| u64::from(*known).abs_diff(rate) <= u64::from(known / 8))
        else {
            return;
        };
        let nearest = Rate::of(nearest);
        if self.rate.replace(nearest).is_some_and(|before| before != nearest) {
            self.jitter_16 = 0;
        }
    }
}

/// Rate of a static payload type (RFC 3551 section 6).
const fn static_rate(payload_type: u8) -> Option<Rate> {
    Some(Rate::of(match payload_type {
        0 | 3..=5 | 7..=9 | 12 | 15 | 18 => 8000,
        6 => 16_000,
        10 | 11 => 44_100,
        14 | 25 | 26 | 28 | 31..=34 => 90_000,
        _ => return None,
    }))
}
