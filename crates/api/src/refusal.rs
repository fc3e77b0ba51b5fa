//! Recently refused clients.

use serde::{Deserialize, Serialize};
use turnpike_turn::server::Cidr;
use utoipa::ToSchema;

use crate::NetworkInfo;

/// Filter for refusals.
#[derive(Clone, Debug, Default)]
pub struct RefusalFilter {
    /// Only clients within this prefix.
    pub client: Option<Cidr>,
    /// Part of the username.
    pub user: Option<String>,
}

/// Recent refusals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Refusals)]
pub struct RefusalList {
    /// Most recent first.
    #[schema(max_items = 1000)]
    pub refusals: Vec<ClientRefusals>,
}

/// Refusals of one client for the same reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Refusal)]
pub struct ClientRefusals {
    /// Time of the first refusal (RFC 3339).
    pub first_at: String,
    /// Time of the last refusal (RFC 3339).
    pub last_at: String,
    /// Number of refusals. At a high rate from one address, only `/metrics` counts all of them.
    pub count: u64,
    /// Address of the client at the last refusal.
    pub client: String,
    /// Country and autonomous system of the client; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkInfo>,
    /// Username that the client sent, if any.
    pub user: Option<String>,
    /// The realm of an authenticated user.
    pub realm: Option<String>,
    /// Refused item: `credentials`, `peer`, a request such as `allocate`, `connection`,
    /// `tls_handshake`, `dtls_handshake`, `dtls_hello` (can be spoofed).
    pub asked: String,
    /// STUN error code of the response; null if there was none.
    #[schema(minimum = 300, maximum = 699)]
    pub code: Option<u16>,
    /// Reason.
    pub reason: String,
    /// Remedy.
    pub remedy: String,
    /// Configuration keys that control this refusal, such as `limits.allocations_per_user`.
    pub keys: Vec<String>,
    /// Number of these refusals that concern other users, requests or peers of the same client.
    pub others: u64,
    /// The most recent of these other users.
    #[schema(max_items = 16)]
    pub other_users: Vec<String>,
    /// The most recent of these other peers.
    #[schema(max_items = 16)]
    pub other_peers: Vec<String>,
}
