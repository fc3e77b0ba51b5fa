//! Rate arithmetic, in its own file because the `interleave` crate compiles it with the pools.

use super::Bandwidth;

/// Tokens per byte. A token is a thousandth of a bit, so that a whole number of tokens accrues per
/// millisecond at any rate.
pub(super) const BYTE: i64 = 8000;
/// Maximum wait before the next attempt, in milliseconds. Other workers may return tokens earlier.
pub(super) const PATIENCE_MS: u64 = 100;

pub(super) fn gained(rate: u64, elapsed_ms: u64) -> i64 {
    i64::try_from(rate.saturating_mul(elapsed_ms)).unwrap_or(i64::MAX)
}

pub(super) fn needed_ms(rate: u64, tokens: i64) -> u64 {
    u64::try_from(tokens).unwrap_or(0).div_ceil(rate.max(1)).clamp(1, PATIENCE_MS)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    /// Bits per second.
    pub(super) rate: u64,
    pub(super) burst: i64,
}

impl Limit {
    pub(super) fn new(rate: u64, burst_ms: u32, least: i64) -> Self {
        let rate = rate.clamp(1, Bandwidth::MOST);
        Self { rate, burst: gained(rate, burst_ms.into()).max(least) }
    }
}
