//! Credentials in the forms of hosted TURN services, whose clients can use this server unchanged.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Request in the form of Cloudflare's TURN service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "ttl": 86400, "customIdentifier": "alice" }))]
pub struct CloudflareRequest {
    /// Lifetime in seconds, at most `credentials.max_ttl`. Default: `credentials.ttl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 31536000)]
    pub ttl: Option<u32>,
    /// Owner of the credential, for quotas and log lines: 1 to 256 bytes. Default: a random name.
    #[serde(rename = "customIdentifier", default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 256)]
    pub custom_identifier: Option<String>,
}

/// Response of Cloudflare's `generate-ice-servers`: STUN without a credential, then TURN.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct CloudflareIceServers {
    /// For `new RTCPeerConnection`.
    #[serde(rename = "iceServers")]
    pub ice_servers: Vec<CloudflareIceServer>,
}

/// Response of Cloudflare's `generate`: all URIs in one object.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct CloudflareCredentials {
    /// Element of `iceServers` for `new RTCPeerConnection`.
    #[serde(rename = "iceServers")]
    pub ice_servers: CloudflareIceServer,
}

/// URIs, with the credential that they need.
#[derive(Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CloudflareIceServer {
    /// `stun:`, `turn:` and `turns:` URIs.
    pub urls: Vec<String>,
    /// The username.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// The password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<String>,
}

/// Response of Twilio's `Tokens.json`.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct TwilioToken {
    /// The account of the path.
    pub account_sid: String,
    /// Time of the request (RFC 2822).
    pub date_created: String,
    /// Equals `date_created`.
    pub date_updated: String,
    /// One element for each URI.
    pub ice_servers: Vec<TwilioIceServer>,
    /// The password.
    pub password: String,
    /// Lifetime in seconds, as text.
    #[schema(pattern = "^[0-9]+$")]
    pub ttl: String,
    /// The username.
    pub username: String,
}

/// A URI, with the credential that it needs.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct TwilioIceServer {
    /// The URI, under the old name of the field.
    pub url: String,
    /// The URI.
    pub urls: String,
    /// The username; absent for STUN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// The password; absent for STUN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<String>,
}
