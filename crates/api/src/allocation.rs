//! Allocations of clients, with their permissions and channels.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema, openapi::Object};

use crate::{NetworkInfo, QualityProblem, one_of, quality::Quality, transport};

/// A page of allocations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AllocationPage {
    /// Allocations in an arbitrary but stable order.
    #[schema(max_items = 1000)]
    pub allocations: Vec<Allocation>,
    /// The `cursor` of the next page; null on the last one.
    pub next: Option<String>,
    /// A message if allocations are missing because the previous process does not answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
}

/// Allocations of all nodes of a fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FleetAllocations {
    /// The allocations, each with its `node`.
    #[schema(max_items = 1000)]
    pub allocations: Vec<Allocation>,
    /// Nodes that did not answer, and why; their allocations are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
    /// The `cursor` of the next page; null on the last one.
    pub next: Option<String>,
}

/// An allocation of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Allocation {
    /// Its identifier, which never changes: 32 hex digits.
    #[schema(min_length = 32, max_length = 32, pattern = "^[0-9a-f]{32}$")]
    pub id: String,
    /// The realm of its user.
    pub realm: String,
    /// The username that authenticated it.
    pub user: String,
    /// The name used for quotas, if it differs, such as the id of a time-limited credential.
    pub identity: Option<String>,
    /// The client's address.
    pub client: String,
    /// Country and autonomous system of the client; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkInfo>,
    /// The address of the server that the client sends to.
    pub server: String,
    /// Transport between client and server.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Relayed transport addresses: one, or one of each family.
    pub relayed: Vec<RelayedAddress>,
    /// Transport between server and peers.
    #[schema(schema_with = relayed_transport)]
    pub relayed_transport: String,
    /// True if it can follow its client to another address (RFC 8016).
    pub mobile: bool,
    /// True if its client is disconnected but may return.
    pub away: bool,
    /// Seconds since it was created.
    pub age_s: f64,
    /// Traffic relayed to peers.
    pub to_peer: Traffic,
    /// Traffic relayed to the client.
    pub to_client: Traffic,
    /// Quality of its media; absent if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quality: Option<Quality>,
    /// Trouble of its media; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quality_problem: Option<QualityProblem>,
    /// Connections to peers (RFC 6062).
    pub peer_connections: u64,
    /// Its current worker.
    pub worker: u64,
    /// PID of the previous process, if it still serves the allocation after an upgrade in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<u32>,
    /// Its node in the fleet; absent if it can only be the queried node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Peers that may send to it; absent in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<Vec<Permission>>,
    /// Channels; absent in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<Vec<Channel>>,
}

impl Allocation {
    /// Sets the node.
    #[must_use]
    pub fn of_node(self, node: &str) -> Self {
        Self { node: Some(node.to_owned()), ..self }
    }

    /// Sets the process, unless it is set already.
    #[must_use]
    pub fn of_process(self, pid: u32) -> Self {
        Self { process: self.process.or(Some(pid)), ..self }
    }
}

/// A relayed transport address.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Relayed)]
pub struct RelayedAddress {
    /// Address and port, as the client sees them.
    pub address: String,
    /// Seconds until it expires unless the client refreshes it.
    pub expires_in_s: u64,
}

/// Payload, without headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Traffic {
    /// Datagrams; 0 for an allocation that relays TCP.
    pub datagrams: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A peer that may send to an allocation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Permission {
    /// Its address, on any port.
    pub peer: String,
    /// Seconds until it expires unless the client refreshes it.
    pub expires_in_s: u64,
}

/// A channel of an allocation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Channel {
    /// Its number (RFC 8656 section 12).
    #[schema(minimum = 16384, maximum = 20479)]
    pub number: u16,
    /// Address and port.
    pub peer: String,
    /// Seconds until it expires unless the client refreshes it.
    pub expires_in_s: u64,
}

pub(crate) fn relayed_transport() -> Object {
    one_of("Transport between server and peers.", &["udp", "tcp"])
}

/// Filter for allocations: all conditions must be met.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AllocationQuery {
    /// The username, or the id of a time-limited username.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The realm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// The client: `ADDR:PORT`, an address, or a prefix such as `192.0.2.0/24`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Transport between client and server.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(schema_with = transport)]
    pub transport: Option<String>,
    /// A relayed transport address, in the same form as `client`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relayed: Option<String>,
    /// Allocations per page. Default: 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<usize>,
    /// The `next` of the previous page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}
