//! Quality of the media that an allocation relays, by leg.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Quality of both legs of an allocation since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Quality {
    /// Between the client and the relay.
    pub client: LegQuality,
    /// Between the relay and the peers.
    pub peer: LegQuality,
}

/// Quality of one leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LegQuality {
    /// Smoothed round trip in milliseconds between the relay and this end.
    pub round_trip_ms: Option<f64>,
    /// RTP from this end, as it arrived at the relay.
    pub uplink: Option<FlowQuality>,
    /// RTP to this end, as its receiver reports it by unencrypted RTCP, without the loss before the relay.
    pub downlink: Option<FlowQuality>,
}

/// RTP in one direction of one leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FlowQuality {
    /// Datagrams that the sequence numbers promise.
    pub expected: u64,
    pub lost: u64,
    pub reordered: u64,
    /// Interarrival jitter in milliseconds (RFC 3550).
    pub jitter_ms: f64,
    /// Longest time without a datagram, in milliseconds.
    pub longest_gap_ms: u64,
}
