//! The usage ledger: traffic of each user or customer.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::Traffic;

/// Groups of the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum UsageGrouping {
    /// User and realm.
    #[default]
    User,
    /// API key that issued the credential.
    Key,
    /// Name of the customer, given by the application that requested the credential.
    Identifier,
    /// Realm.
    Realm,
    /// Server.
    Node,
    /// Hour (UTC).
    Hour,
    /// Day (UTC).
    Day,
}

/// Selects usage; all conditions must be met.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct UsageFilter {
    /// One sum per user, key, identifier, realm, node, hour or day; default `user`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(inline)]
    pub by: Option<UsageGrouping>,
    /// Beginning (RFC 3339 or a date), rounded down to the hour; default: 30 days before the end, from midnight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// End (RFC 3339 or a date), rounded up to the hour; default: now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<String>,
    /// Only this user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Only this realm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// Only credentials issued to this API key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Only this identifier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identifier: Option<String>,
    /// Only this node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Length of the page; default 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<usize>,
    /// `next` of the previous page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// Usage in a period.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = UsageList)]
pub struct UsageList {
    /// Beginning of the period (RFC 3339).
    pub since: String,
    /// End of the period (RFC 3339).
    pub until: String,
    /// One page of sums, the largest first; hours and days in their order.
    #[schema(max_items = 1000)]
    pub usage: Vec<UsageEntry>,
    /// Runs of servers that were killed in this period, the latest first; at most ten seconds of usage are missing for each.
    #[schema(max_items = 100)]
    pub gaps: Vec<UsageGapInfo>,
    /// The `cursor` of the next page; null on the last one.
    pub next: Option<String>,
}

/// Sum of one group. Only the members that define the group are present.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Usage)]
pub struct UsageEntry {
    /// The user, without the time of a time-limited username.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The realm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// The API key; empty for credentials without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The identifier; empty for credentials without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identifier: Option<String>,
    /// The node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Beginning of the hour or day (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begins: Option<String>,
    /// Allocations that began.
    pub allocations: u64,
    /// Total duration of allocations.
    pub seconds: f64,
    /// Payload to peers.
    pub to_peer: Traffic,
    /// Payload to clients.
    pub to_client: Traffic,
    /// Highest rate of one owner on one node, as a mean of 4 s, both directions together.
    pub peak_bits_per_second: u64,
}

/// A run of a server that was killed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = UsageGap)]
pub struct UsageGapInfo {
    /// The node.
    pub node: String,
    /// Start of the run (RFC 3339).
    pub started: String,
    /// Time of the last recorded usage (RFC 3339).
    pub last: String,
}
