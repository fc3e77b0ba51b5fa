//! Problem with the media of an allocation.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bad media quality of an allocation, at the leg with the worst figure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QualityProblem {
    /// The troubled leg.
    pub leg: Leg,
    /// Direction of the trouble; null if it is the round trip.
    pub direction: Option<FlowDirection>,
    /// Its beginning (RFC 3339).
    pub since: String,
    /// Description of all troubles, the worst first.
    pub sentence: String,
}

/// Leg of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Leg {
    /// Between the client and the relay.
    Client,
    /// Between the relay and the peers.
    Peer,
}

/// Direction on a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FlowDirection {
    /// Media to the relay.
    Uplink,
    /// Media from the relay.
    Downlink,
}

impl QualityProblem {
    /// For example `client uplink`.
    #[must_use]
    pub fn place(&self) -> String {
        format!("{} {}", self.leg.name(), self.direction.map_or("round trip", FlowDirection::name))
    }
}

impl Leg {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Peer => "peer",
        }
    }
}

impl FlowDirection {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Uplink => "uplink",
            Self::Downlink => "downlink",
        }
    }
}
