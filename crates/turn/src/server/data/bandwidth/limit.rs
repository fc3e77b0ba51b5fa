//! A rate in numbers: what it brings, what of it may pass at once, and how long something takes. Separate because `interleave` builds it once
//! more, together with the pools.

use super::Bandwidth;

/// Tokens are thousandths of a bit: of any whole rate, a millisecond brings a whole number of them.
pub(super) const BYTE: i64 = 8000;
/// Who is held up asks again after so many milliseconds at the latest: others may have left something meanwhile.
pub(super) const PATIENCE_MS: u64 = 100;

/// What a rate brings in so many milliseconds.
pub(super) fn gained(rate: u64, elapsed_ms: u64) -> i64 {
    i64::try_from(rate.saturating_mul(elapsed_ms)).unwrap_or(i64::MAX)
}

/// Milliseconds in which a rate brings so much.
pub(super) fn needed_ms(rate: u64, tokens: i64) -> u64 {
    u64::try_from(tokens).unwrap_or(0).div_ceil(rate.max(1)).clamp(1, PATIENCE_MS)
}

/// A rate, and what of it may pass at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    /// Bits per second.
    pub(super) rate: u64,
    /// Tokens.
    pub(super) burst: i64,
}

impl Limit {
    pub(super) fn new(rate: u64, burst_ms: u32, least: i64) -> Self {
        let rate = rate.clamp(1, Bandwidth::MOST);
        Self { rate, burst: gained(rate, burst_ms.into()).max(least) }
    }
}
