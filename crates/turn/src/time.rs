//! Time as it is passed in.

/// The two clocks that a state machine needs, read once per wake-up by whoever drives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds of a monotonic clock since any fixed start.
    pub ms: u64,
    /// Seconds since the Unix epoch, for nonces and time-limited credentials.
    pub unix: u64,
}
