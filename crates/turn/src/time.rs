#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds of a monotonic clock with any fixed start.
    pub ms: u64,
    /// Seconds since the Unix epoch, for nonces and time-limited credentials.
    pub unix: u64,
}
