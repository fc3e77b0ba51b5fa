//! Figures of a meter.

/// Totals of both legs since measurement began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    pub client: MeasuredLeg,
    pub peer: MeasuredLeg,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasuredLeg {
    /// Smoothed, in microseconds.
    pub round_trip_us: Option<u64>,
    /// RTP from this end, as it arrived.
    pub uplink: Option<MeasuredFlow>,
    /// RTP to this end, as it reports, without the loss before the relay.
    pub downlink: Option<MeasuredFlow>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasuredFlow {
    pub expected: u64,
    pub lost: u64,
    pub reordered: u64,
    pub jitter_us: u64,
    pub longest_gap_us: u64,
}
