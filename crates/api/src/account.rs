//! Users, secrets, realms and API keys, in the configuration and in the store.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Users, with counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Users)]
pub struct UserList {
    /// Users that have an allocation.
    pub with_allocations: u64,
    /// Users in the configuration, in all realms.
    pub configured: u64,
    /// Secrets for time-limited credentials in the configuration, in all realms.
    pub secrets: u64,
    /// Keys for access tokens (RFC 7635), including those in a store.
    pub token_keys: u64,
    /// One page: users in the configuration first, then those in the store by realm and name.
    #[schema(max_items = 1000)]
    pub users: Vec<UserInfo>,
    /// The `cursor` of the next page; null on the last one.
    pub next: Option<String>,
}

/// The part of [`UserList`] without counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct UserPage {
    /// Users in the configuration first, then those in the store by realm and name.
    pub users: Vec<UserInfo>,
    /// The cursor of the next page.
    pub next: Option<String>,
}

/// A user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = User)]
pub struct UserInfo {
    /// The username.
    pub name: String,
    /// The realm.
    pub realm: String,
    /// The algorithms of its keys, such as `MD5, SHA-256`.
    pub keys: String,
    /// Its origin.
    pub from: AccountOrigin,
}

/// Origin of a user or a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[schema(as = Origin)]
#[serde(rename_all = "lowercase")]
pub enum AccountOrigin {
    /// The configuration file; it can only be changed there.
    Configuration,
    /// The store.
    Store,
}

/// A new user, or a new password for an existing one.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "alice", "password": "correct horse" }))]
pub struct NewUser {
    /// The username: 1 to 508 bytes without control characters or colons.
    #[schema(min_length = 1, max_length = 508)]
    pub name: String,
    /// The realm. Default: `server.realm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// The password. The store keeps keys that are derived from it.
    #[schema(min_length = 1, max_length = 1024)]
    pub password: String,
    /// Refuses (409) to change an existing user.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_new: bool,
}

/// Secrets for time-limited credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Secrets)]
pub struct SecretList {
    /// All secrets.
    pub secrets: Vec<SharedSecret>,
}

/// A secret for time-limited credentials, identified by its fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct SharedSecret {
    /// The realm.
    pub realm: String,
    /// The first 16 hex digits of its SHA-256.
    #[schema(min_length = 16, max_length = 16, pattern = "^[0-9a-f]{16}$")]
    pub fingerprint: String,
    /// Its origin.
    pub from: AccountOrigin,
    /// True if it signs new credentials.
    pub signs: bool,
    /// The last second in which it is accepted, after a rotation (RFC 3339).
    pub until: Option<String>,
}

/// A secret to be added.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "secret": "b835b34458676107ba09b78bc9a22be5" }))]
pub struct NewSecret {
    /// The secret, without leading or trailing whitespace.
    #[schema(min_length = 1, max_length = 256)]
    pub secret: String,
    /// The realm. Default: `server.realm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// Responds with 409 if the store already has this secret.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_new: bool,
}

/// Replacement of a realm's secret.
#[derive(Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "overlap_s": 3600 }))]
pub struct Rotation {
    /// The realm. Default: `server.realm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// The secret that signs new credentials. Default: a random one, which no response includes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 256)]
    pub secret: Option<String>,
    /// Seconds for which the other secrets are still accepted. Default: at least a minute more than
    /// `credentials.max_ttl`. 0 invalidates them immediately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 31536000)]
    pub overlap_s: Option<u32>,
}

/// Result of a rotation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rotated {
    /// The realm.
    pub realm: String,
    /// The first 16 hex digits of the SHA-256 of the secret that signs new credentials.
    pub fingerprint: String,
    /// The store, without its password.
    pub store: String,
    /// The last second in which the other secrets are accepted (RFC 3339); null if there are none.
    pub until: Option<String>,
    /// Note about the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Keys of applications.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Keys)]
pub struct KeyList {
    /// All keys, by name.
    pub keys: Vec<Key>,
}

/// A key that an application uses to request credentials. The key itself is not included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Key {
    /// Its name.
    pub name: String,
    /// The only realm that it is valid for; null for all.
    pub realm: Option<String>,
    /// Longest lifetime of its credentials in seconds; `credentials.max_ttl` also applies.
    pub max_ttl: Option<u32>,
    /// Requests per second. Default: `credentials.rate`.
    pub rate: Option<u32>,
}

/// A key to be added. Its owner keeps the key itself and sends only the hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "shop", "sha256": "4355a46b19d348dc2f57c046f8ef63d4538ebb936000f3c9ee954a27460dd865", "max_ttl": 3600 }))]
pub struct NewKey {
    /// Its name: lower-case letters, digits, `-` and `_`. The key itself is `tpk_NAME.SECRET`.
    #[schema(min_length = 1, max_length = 64, pattern = "^[a-z0-9_-]+$")]
    pub name: String,
    /// SHA-256 of the key in hex digits.
    #[schema(min_length = 64, max_length = 64, pattern = "^[0-9a-fA-F]+$")]
    pub sha256: String,
    /// The only realm that it is valid for. Default: all realms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// Longest lifetime of its credentials in seconds. Default: `credentials.max_ttl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 31536000)]
    pub max_ttl: Option<u32>,
    /// Requests per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000000)]
    pub rate: Option<u32>,
}

/// A change to the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Change)]
pub struct AccountChange {
    /// The username, the secret's fingerprint, or the name of the realm or key.
    pub name: String,
    /// The realm; empty for a key that is valid for all.
    pub realm: String,
    /// The store, without its password.
    pub store: String,
    /// True if the item existed before.
    pub existed: bool,
    /// Note about the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// All realms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Realms)]
pub struct RealmList {
    /// Realms in which clients are served.
    pub realms: Vec<RealmInfo>,
    /// Realms in the store.
    pub stored: Vec<StoredRealm>,
}

/// A realm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Realm)]
pub struct RealmInfo {
    /// The name, as in the REALM attribute.
    pub name: String,
    /// Its allocations.
    pub allocations: u64,
    /// Limit on its allocations; null if only `limits.allocations` applies.
    pub max_allocations: Option<u64>,
    /// Limit on the allocations of each of its users.
    pub max_allocations_per_user: u64,
    /// Bits per second of all its allocations together, in each direction.
    pub bits_per_second: Option<u64>,
    /// Bits per second of each of its users.
    pub bits_per_second_per_user: Option<u64>,
    /// Bits per second of each allocation.
    pub bits_per_second_per_allocation: Option<u64>,
    /// Maximum duration of an allocation in seconds, regardless of refreshes.
    pub max_allocation_duration: Option<u32>,
    /// The ports of its relayed transport addresses, such as `50000-50999`, if it has ports of its own.
    pub relay_ports: Option<String>,
    /// Users in the configuration.
    pub users: u64,
    /// Secrets for time-limited credentials in the configuration.
    pub secrets: u64,
    /// Listeners that serve it; if empty, all listeners that no realm names.
    pub listen: Vec<String>,
    /// TLS and DTLS server names that select it.
    pub server_names: Vec<String>,
}

/// A realm in a store. A limit in the configuration takes precedence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredRealm {
    /// The name, as in the REALM attribute.
    pub name: String,
    /// Limit on its allocations.
    pub max_allocations: Option<u64>,
    /// Limit on the allocations of each of its users.
    pub max_allocations_per_user: Option<u64>,
    /// Bits per second of each of its allocations, in each direction.
    pub bits_per_second_per_allocation: Option<u64>,
    /// Origins of web pages whose clients use this realm.
    pub origins: Vec<String>,
}

/// A realm to be served in addition to those in the configuration, or new limits for a realm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "blue.example", "max_allocations": 100 }))]
pub struct NewRealm {
    /// The name, as in the REALM attribute, without control characters, `"`, `\`, or leading or
    /// trailing whitespace.
    #[schema(min_length = 1, max_length = 127)]
    pub name: String,
    /// Limit on its allocations. Default: none.
    #[serde(alias = "max_sessions", default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000000)]
    pub max_allocations: Option<u64>,
    /// Limit on the allocations of each of its users. Default: none.
    #[serde(alias = "max_sessions_per_user", default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000000)]
    pub max_allocations_per_user: Option<u64>,
    /// Bits per second of each of its allocations, in each direction; stored as whole bytes per second.
    #[serde(alias = "bits_per_second_per_session", default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1000, maximum = 1000000000000u64)]
    pub bits_per_second_per_allocation: Option<u64>,
    /// Responds with 409 if the store already has this realm.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_new: bool,
}

/// Filter for users.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct UserQuery {
    /// The realm. Default: all realms.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// Users per page. Default: 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<usize>,
    /// The `next` of the previous page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// A realm.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RealmQuery {
    /// The realm. Default: all realms in lists, `server.realm` in changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
}
