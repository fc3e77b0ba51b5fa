//! Credentials that applications request for their clients.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Request for a credential. Each field has a default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "user": "alice", "ttl": 600 }))]
pub struct CredentialsRequest {
    /// Owner of the credential, for quotas and log lines: 1 to 256 bytes. Default: a random name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 256)]
    pub user: Option<String>,
    /// The application's name for its customer, for `turnpike usage`: 1 to 128 bytes. Part of the username.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 128)]
    pub identifier: Option<String>,
    /// Lifetime in seconds, at most `credentials.max_ttl`. Default: `credentials.ttl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 31536000)]
    pub ttl: Option<u32>,
    /// The realm. Default: that of the key, or `server.realm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// Token key (`oauth.key`): the response has a token instead of a password (RFC 7635).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 508)]
    pub kid: Option<String>,
}

/// Configuration for a browser: an `RTCConfiguration` for `new RTCPeerConnection`.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Credentials)]
pub struct IssuedCredential {
    /// The ICE servers: only this server.
    #[serde(rename = "iceServers")]
    pub ice_servers: Vec<IceServer>,
    /// The realm, for clients that do not learn it from the server.
    pub realm: String,
    /// Lifetime in seconds.
    pub ttl: u32,
    /// Its expiry (RFC 3339).
    pub expires_at: String,
}

/// An `RTCIceServer` (W3C webrtc-pc).
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct IceServer {
    /// `turn:` and `turns:` URIs (RFC 7065), one for each transport, port and name.
    pub urls: Vec<String>,
    /// The username; for a token, its kid.
    pub username: String,
    /// Password or token.
    pub credential: IceCredential,
    /// `oauth` for a token (W3C webrtc-extensions).
    #[serde(rename = "credentialType", default, skip_serializing_if = "Option::is_none")]
    pub credential_type: Option<String>,
}

/// A password, or a token.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum IceCredential {
    /// The password.
    Password(String),
    /// The token.
    Token(IceToken),
}

/// An `RTCOAuthCredential` (W3C webrtc-extensions), both parts in base64.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct IceToken {
    /// For MESSAGE-INTEGRITY.
    #[serde(rename = "macKey")]
    pub mac_key: String,
    /// For ACCESS-TOKEN.
    #[serde(rename = "accessToken")]
    pub access_token: String,
}

/// Credential in the form of the TURN REST API draft (draft-uberti-behave-turn-rest).
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct RestCredentials {
    /// The username, which contains the expiry and the owner.
    pub username: String,
    /// The password.
    pub password: String,
    /// Lifetime of the credential in seconds.
    pub ttl: u32,
    /// `turn:` and `turns:` URIs (RFC 7065).
    pub uris: Vec<String>,
}
