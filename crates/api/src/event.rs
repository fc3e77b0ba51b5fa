//! Events for applications, in the stream and in webhooks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ClientRefusals, NetworkInfo, Traffic, allocation::relayed_transport, transport};

/// A CloudEvent (CloudEvents 1.0, JSON).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Always `1.0`.
    pub specversion: String,
    /// Unique, but an event that is delivered again keeps it.
    pub id: String,
    /// 20 digits that count the events of a receiver without gaps.
    pub sequence: String,
    /// The server: `/turnpike/NODE`.
    pub source: String,
    /// Type, such as `allocation.end`; it determines the members of `data`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Time (RFC 3339). Clocks can be set: use `sequence` for the order.
    pub time: String,
    /// Always `application/json`.
    pub datacontenttype: String,
    /// Data.
    pub data: EventData,
}

/// Data of an event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum EventData {
    /// `allocation.end`
    AllocationEnd(AllocationEnd),
    /// `allocation.begin`
    AllocationBegin(AllocationBegin),
    /// `refusal`, and `quota` if a limit on allocations refused them.
    Refusal(ClientRefusals),
    /// `quota` if a volume quota is used up, or nearly.
    Quota(QuotaUse),
    /// `certificate.renewed`, `certificate.failed` and `certificate.expiring`
    Certificate(CertificateEvent),
    /// `drain.begin` and `drain.end`
    Drain(DrainEvent),
    /// `node.joined` and `node.left`
    Node(NodeEvent),
    /// `lost`
    Lost(LostEvents),
}

/// A new allocation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AllocationBegin {
    /// Its identifier, which never changes: 32 hex digits.
    pub id: String,
    /// The realm of its user.
    pub realm: String,
    /// The username that authenticated it.
    pub user: String,
    /// The client's address.
    pub client: String,
    /// Country and autonomous system of the client; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkInfo>,
    /// The address of the server that the client sends to.
    pub server: String,
    /// Relayed transport addresses: one, or one of each family.
    pub relayed: Vec<String>,
}

/// An ended allocation with its totals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AllocationEnd {
    /// Its identifier.
    pub id: String,
    /// The realm of its user.
    pub realm: String,
    /// The username that authenticated it.
    pub user: String,
    /// The name used for quotas, if it differs, such as the id of a time-limited credential.
    pub identity: Option<String>,
    /// The client's last address.
    pub client: String,
    /// Country and autonomous system of the client; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkInfo>,
    /// The address of the server that the client sent to.
    pub server: String,
    /// Transport between client and server.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Relayed transport addresses that it has had.
    pub relayed: Vec<String>,
    /// Transport between server and peers.
    #[schema(schema_with = relayed_transport)]
    pub relayed_transport: String,
    /// Reason: `deleted`, `expired`, `shutdown`, `administrator`, `disconnected`, `max_age`, `banned`, `credential` or
    /// `address_gone`.
    pub reason: String,
    /// Its duration in seconds.
    pub seconds: f64,
    /// Traffic relayed to peers.
    pub to_peer: Traffic,
    /// Traffic relayed to the client.
    pub to_client: Traffic,
}

/// A volume quota (`usage.quota`) of which 80 or 100 percent are used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct QuotaUse {
    /// `user`, `key` or `realm`.
    pub by: String,
    /// Name of the user, API key or realm.
    pub name: String,
    /// Realm of a user.
    pub realm: Option<String>,
    /// `day` or `month`.
    pub per: String,
    /// Begin of the period (RFC 3339).
    pub since: String,
    /// 80 or 100.
    pub percent: u8,
    /// Payload bytes used in this period.
    pub bytes: u64,
    /// Payload bytes of the quota.
    pub quota: u64,
}

/// A certificate that was renewed, could not be renewed, or expires soon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CertificateEvent {
    /// Its file, or the name in `tls.acme` whose order failed; null if several files may be affected.
    pub certificate: Option<String>,
    /// End of its validity (RFC 3339).
    pub not_after: Option<String>,
    /// Reason of a failure.
    pub error: Option<String>,
}

/// Begin or end of a time without new allocations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainEvent {
    /// Current allocations.
    pub allocations: u64,
    /// Time limit in seconds; null if the server stays and only new clients are kept off it.
    pub deadline_s: Option<u64>,
}

/// Another node of the fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeEvent {
    /// Its name.
    pub node: String,
}

/// Events that the receiver does not get.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LostEvents {
    /// Their number, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// Sequence number of the first one, if they had any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<u64>,
    /// Sequence number of the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<u64>,
    /// Reason.
    pub reason: String,
}
