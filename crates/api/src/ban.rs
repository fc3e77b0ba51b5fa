//! Bans of users and of client addresses.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Active bans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Bans)]
pub struct BanList {
    /// Sorted by expiry.
    pub bans: Vec<BanEntry>,
}

/// A ban on a user, or on clients by their addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Ban)]
pub struct BanEntry {
    /// The username, or the id of a time-limited username.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The realm of that user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// An address prefix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Its expiry (RFC 3339).
    pub until: String,
    /// Free text; may be empty.
    #[schema(max_length = 200)]
    pub reason: String,
}

/// A ban to be created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "user": "alice", "seconds": 3600, "reason": "abuse" }))]
pub struct NewBan {
    /// The username, or the id of a time-limited username: 1 to 508 bytes without control characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 508)]
    pub user: Option<String>,
    /// The realm of that user. Default: `server.realm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// Address or prefix such as `192.0.2.0/24`, instead of a user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Duration of the ban, at most 31 days.
    #[schema(minimum = 1, maximum = 2_678_400)]
    pub seconds: u64,
    /// Free text for lists of bans, without control characters.
    #[serde(default)]
    #[schema(max_length = 200)]
    pub reason: String,
}

/// A ban that is now active.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Banned)]
pub struct BanResult {
    /// The ban.
    pub ban: BanEntry,
    /// Number of allocations that it ended on the queried node, including those in the node's previous
    /// process.
    pub ended: u64,
    /// True if the other nodes of the fleet have been informed. Otherwise they will be once the store
    /// answers again.
    pub announced: bool,
}

/// A ban that was lifted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Unbanned)]
pub struct UnbanResult {
    /// Remaining bans, sorted by expiry.
    pub bans: Vec<BanEntry>,
    /// True if the other nodes of the fleet have been informed. Otherwise they will be once the store
    /// answers again.
    pub announced: bool,
}
