//! What the API says, as JSON: each type is written by the server, read by the commands, and described by the OpenAPI document.

use serde::{Deserialize, Serialize};
use utoipa::{
    ToSchema,
    openapi::{Object, ObjectBuilder, Type},
};

/// One of these words.
fn words(description: &str, words: &[&'static str]) -> Object {
    let object = ObjectBuilder::new().schema_type(Type::String).description(Some(description));
    object.enum_values(Some(words.iter().copied())).build()
}

/// Transport between client and server.
pub(crate) fn transport() -> Object {
    words("Transport between client and server.", &["udp", "tcp", "tls", "dtls"])
}

fn relayed_transport() -> Object {
    words("Transport between server and peers.", &["udp", "tcp"])
}

fn profile() -> Object {
    words("Build profile.", &["release", "debug"])
}

/// Which program it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    /// `turnpike serve`.
    Serve,
    /// `turnpike forward`.
    Forward,
}

/// State of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Which program it is.
    pub job: Job,
    /// Version of the program.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// Time of its start (RFC 3339).
    pub started_at: String,
    /// Seconds since then.
    pub uptime_s: u64,
    /// It takes no new clients and ends with the last session or connection.
    pub draining: bool,
    /// Sessions of a server, connections of a forwarder, those of a previous process included. At most 1 s old.
    pub open: u64,
    /// Path of datagrams, of a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datapath: Option<Datapath>,
    /// Relay addresses of a server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub relays: Vec<RelayRange>,
    /// Name in its fleet; absent outside a fleet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Rights left to the process; absent without a sandbox (`sandbox.mode`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
}

/// Rights left to a process in its sandbox. A part that is null is not restricted, for a reason in `missing`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    /// Number of system calls that can be made.
    pub system_calls: Option<u64>,
    /// Directories and files that can be read.
    pub read: Option<Vec<String>>,
    /// Directories that can be written.
    pub written: Option<Vec<String>>,
    /// As capabilities(7) has them, without `CAP_`.
    pub capabilities: Option<Vec<String>>,
    /// A sentence for each part that is not restricted.
    pub missing: Vec<String>,
}

/// Path of datagrams.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Datapath {
    /// The step of the ladder, such as `gso`.
    pub step: String,
    /// Why that one.
    pub why: String,
}

/// Build of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Build {
    /// Always `turnpike`.
    pub name: String,
    /// Version of the program.
    pub version: String,
    /// Architecture and system, such as `x86_64-linux`.
    pub target: String,
    /// Build profile.
    #[schema(schema_with = profile)]
    pub profile: String,
}

/// Some sessions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionPage {
    /// In a fixed order that has no meaning.
    #[schema(max_items = 1000)]
    pub sessions: Vec<Session>,
    /// The `cursor` of the next page; null on the last one.
    pub next: Option<String>,
    /// The previous process if it does not answer, in a sentence: its sessions are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
}

/// An allocation of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// Its name for as long as it lives, on any worker: 32 hex digits.
    #[schema(min_length = 32, max_length = 32, pattern = "^[0-9a-f]{32}$")]
    pub id: String,
    /// The realm of its user.
    pub realm: String,
    /// The username that authenticated it.
    pub user: String,
    /// The name that quotas count by, if it is another one, such as the id of a time-limited credential.
    pub identity: Option<String>,
    /// The client's address.
    pub client: String,
    /// The address of the server that the client sends to.
    pub server: String,
    /// Between client and server.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Relayed transport addresses: one, or one of each family.
    pub relayed: Vec<Relayed>,
    /// Between the server and peers.
    #[schema(schema_with = relayed_transport)]
    pub relayed_transport: String,
    /// Follows its client to another address (RFC 8016).
    pub mobile: bool,
    /// Its client is disconnected and may return.
    pub away: bool,
    /// Seconds since it began.
    pub age_s: f64,
    /// Traffic relayed to peers.
    pub to_peer: Traffic,
    /// Traffic relayed to the client.
    pub to_client: Traffic,
    /// Connections to peers (RFC 6062).
    pub peer_connections: u64,
    /// The worker that has it now.
    pub worker: u64,
    /// PID of the previous process, if that serves the session since an upgrade in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<u32>,
    /// The node of the fleet that has it; absent where only the node that was asked can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Peers that may send to it; absent in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<Vec<Permission>>,
    /// Channels; absent in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<Vec<Channel>>,
}

/// A relayed transport address.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Relayed {
    /// Address and port, as the client sees them.
    pub address: String,
    /// Seconds until it ends, unless the client renews it.
    pub expires_in_s: u64,
}

/// Payload, without headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Traffic {
    /// Datagrams; none of a session that relays TCP.
    pub datagrams: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A peer that may send to a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Permission {
    /// Its address, on any port.
    pub peer: String,
    /// Seconds until it ends, unless the client renews it.
    pub expires_in_s: u64,
}

/// A channel of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Channel {
    /// Its number (RFC 8656 section 12).
    #[schema(minimum = 16384, maximum = 20479)]
    pub number: u16,
    /// Address and port.
    pub peer: String,
    /// Seconds until it ends, unless the client renews it.
    pub expires_in_s: u64,
}

/// Sessions of all nodes of a fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FleetSessions {
    /// Each with its node.
    #[schema(max_items = 1000)]
    pub sessions: Vec<Session>,
    /// Nodes that have not answered, and why; their sessions are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
    /// The `cursor` of the next page; null on the last one.
    pub next: Option<String>,
}

/// Servers that are one service, as one of them sees them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Fleet {
    /// Name of the fleet: `fleet.name`.
    pub name: String,
    /// The node that was asked.
    pub node: String,
    /// Where the fleet's store is, without a password.
    pub store: String,
    /// Why the node that was asked has not heard of the others lately; null if it has. If set, the rest is old.
    pub alone: Option<String>,
    /// The store is new, was emptied or is another server. Until it knows what all nodes have, each serves its equal share of quotas.
    #[serde(default)]
    pub recovering: bool,
    /// The version of the keys that all nodes share.
    pub keys: u64,
    /// All of them by name, the one that was asked included.
    pub nodes: Vec<FleetNode>,
}

/// A node of a fleet, as its last heartbeat describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FleetNode {
    /// Its name: `fleet.node`.
    pub name: String,
    /// Number of the node in CONNECTION-IDs and mobility tickets.
    #[schema(maximum = 65535)]
    pub number: u16,
    /// State towards new clients.
    pub state: NodeState,
    /// Seconds since its last heartbeat.
    pub silent_s: f64,
    /// `fleet.zone`; empty if that is not set.
    pub zone: String,
    /// Version of the program; null before it is known.
    pub version: Option<String>,
    /// The largest of its loads: 0 is idle, 1 is as much as it can take.
    pub busy: f64,
    /// Sessions that it has.
    pub sessions: u64,
    /// Limit of its sessions.
    pub max_sessions: u64,
    /// Payload both ways, in bits.
    pub bits_per_second: u64,
    /// Capacity for that, where it is configured.
    pub max_bits_per_second: Option<u64>,
    /// The share of a core that its busiest worker took lately, 0 to 1.
    pub cpu: f64,
    /// Relay ports that are free.
    pub relay_ports_left: u64,
    /// Relay ports in all.
    pub relay_ports: u64,
    /// Where clients reach it, such as `tls://203.0.113.5:5349`.
    pub addresses: Vec<String>,
}

/// State of a node towards new clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// It takes new clients.
    Serving,
    /// It has no room.
    Full,
    /// It takes no new clients.
    Draining,
    /// It has not been heard of lately.
    Silent,
}

/// Order to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeOrder {
    /// Its name.
    pub node: String,
    /// The node takes no new clients.
    pub drains: bool,
}

/// Bans in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bans {
    /// Sorted by their end.
    pub bans: Vec<Ban>,
}

/// A ban of a user, or of clients by their addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ban {
    /// The username, or the id of a time-limited one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The realm of that user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// A prefix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// When it ends (RFC 3339).
    pub until: String,
    /// Free text; may be empty.
    #[schema(max_length = 200)]
    pub reason: String,
}

/// A ban to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "user": "alice", "seconds": 3600, "reason": "abuse" }))]
pub struct NewBan {
    /// The username, or the id of a time-limited one: 1 to 508 bytes without control characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 508)]
    pub user: Option<String>,
    /// The realm of that user; default `server.realm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// In place of a user: an address, or a prefix such as `192.0.2.0/24`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Length of the ban, at most 31 days.
    #[schema(minimum = 1, maximum = 2_678_400)]
    pub seconds: u64,
    /// Free text for lists of bans, without control characters.
    #[serde(default)]
    #[schema(max_length = 200)]
    pub reason: String,
}

/// A ban that is in force now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Banned {
    /// The ban.
    pub ban: Ban,
    /// Sessions that it has ended on the node that was asked, its previous process included.
    pub ended: u64,
    /// The other nodes of the fleet know. If not, they are told when the store answers again.
    pub announced: bool,
}

/// A ban that was ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Unbanned {
    /// Bans that are left, sorted by their end.
    pub bans: Vec<Ban>,
    /// The other nodes of the fleet know. If not, they are told when the store answers again.
    pub announced: bool,
}

/// Users, and how many there are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Users {
    /// Users that have a session.
    pub with_sessions: u64,
    /// Users of the configuration, over all realms.
    pub configured: u64,
    /// Secrets of time-limited credentials in the configuration, over all realms.
    pub secrets: u64,
    /// Keys of access tokens (RFC 7635), those of a store included.
    pub token_keys: u64,
    /// A page of them: first those of the configuration, then those of the store by realm and name.
    #[schema(max_items = 1000)]
    pub users: Vec<User>,
    /// The `cursor` of the next page; null on the last one.
    pub next: Option<String>,
}

/// A user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct User {
    /// The username.
    pub name: String,
    /// The realm.
    pub realm: String,
    /// The algorithms of its keys, such as `MD5, SHA-256`.
    pub keys: String,
    /// Its origin.
    pub from: Origin,
}

/// Origin of a user or a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The configuration, which alone can change it.
    Configuration,
    /// The store.
    Store,
}

/// A new user, or a new password of an existing one.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "alice", "password": "correct horse" }))]
pub struct NewUser {
    /// The username: 1 to 508 bytes without control characters and colons.
    #[schema(min_length = 1, max_length = 508)]
    pub name: String,
    /// The realm; default `server.realm`.
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

/// Secrets of time-limited credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Secrets {
    /// All of them.
    pub secrets: Vec<SharedSecret>,
}

/// A secret of time-limited credentials, without itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct SharedSecret {
    /// The realm.
    pub realm: String,
    /// The first 16 hex digits of its SHA-256.
    #[schema(min_length = 16, max_length = 16, pattern = "^[0-9a-f]{16}$")]
    pub fingerprint: String,
    /// Its origin.
    pub from: Origin,
    /// Makes new credentials.
    pub signs: bool,
    /// The last second in which it counts, after a rotation (RFC 3339).
    pub until: Option<String>,
}

/// A secret to be added.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "secret": "b835b34458676107ba09b78bc9a22be5" }))]
pub struct NewSecret {
    /// The secret, without blanks at its ends.
    #[schema(min_length = 1, max_length = 256)]
    pub secret: String,
    /// The realm; default `server.realm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// Answers 409 if the store has this secret.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_new: bool,
}

/// Replacement of a realm's secret.
#[derive(Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "overlap_s": 3600 }))]
pub struct Rotation {
    /// The realm; default `server.realm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// The secret that signs new credentials; default a random one, which no answer shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 256)]
    pub secret: Option<String>,
    /// Seconds for which the other secrets still count; default at least a minute more than `credentials.max_ttl`. 0 ends them at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 31536000)]
    pub overlap_s: Option<u32>,
}

/// Result of a rotation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rotated {
    /// The realm.
    pub realm: String,
    /// The first 16 hex digits of the SHA-256 of the secret that makes new credentials.
    pub fingerprint: String,
    /// The store, without its password.
    pub store: String,
    /// The last second in which the others count (RFC 3339); none if there were no others.
    pub until: Option<String>,
    /// Note about the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Keys of applications.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Keys {
    /// All of them, by name.
    pub keys: Vec<Key>,
}

/// A key by which an application asks for credentials, without itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Key {
    /// Its name.
    pub name: String,
    /// The only realm that it is good for; null for all.
    pub realm: Option<String>,
    /// Longest lifetime of its credentials in seconds; `credentials.max_ttl` holds too.
    pub max_ttl: Option<u32>,
    /// Requests a second; default `credentials.rate`.
    pub rate: Option<u32>,
}

/// A key to be added. Its owner keeps the key and sends the hash alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "shop", "sha256": "4355a46b19d348dc2f57c046f8ef63d4538ebb936000f3c9ee954a27460dd865", "max_ttl": 3600 }))]
pub struct NewKey {
    /// Its name: small letters, digits, `-` and `_`. The key itself is `tpk_NAME.SECRET`.
    #[schema(min_length = 1, max_length = 64, pattern = "^[a-z0-9_-]+$")]
    pub name: String,
    /// SHA-256 of the key in hex digits.
    #[schema(min_length = 64, max_length = 64, pattern = "^[0-9a-fA-F]+$")]
    pub sha256: String,
    /// The only realm that it is good for; default all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// Longest lifetime of its credentials in seconds; default `credentials.max_ttl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 31536000)]
    pub max_ttl: Option<u32>,
    /// Requests a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000000)]
    pub rate: Option<u32>,
}

/// Request for a credential. Each member has a default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "user": "alice", "ttl": 600 }))]
pub struct CredentialsRequest {
    /// Owner of the credential: 1 to 256 bytes. Quotas count by it, and log lines name it; default a random name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 256)]
    pub user: Option<String>,
    /// Lifetime in seconds, at most `credentials.max_ttl`; default `credentials.ttl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 31536000)]
    pub ttl: Option<u32>,
    /// The realm; default that of the key, or `server.realm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 127)]
    pub realm: Option<String>,
    /// Token key (`oauth.key`): the answer has a token of it instead of a password (RFC 7635).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 508)]
    pub kid: Option<String>,
}

/// Configuration for a browser: an `RTCConfiguration` for `new RTCPeerConnection`.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct Credentials {
    /// This server.
    #[serde(rename = "iceServers")]
    pub ice_servers: Vec<IceServer>,
    /// REALM, for clients that do not take it from the server.
    pub realm: String,
    /// Lifetime in seconds.
    pub ttl: u32,
    /// Its end (RFC 3339).
    pub expires_at: String,
}

/// An `RTCIceServer` (W3C webrtc-pc).
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct IceServer {
    /// `turn:` and `turns:` URIs (RFC 7065), one for each transport, port and name.
    pub urls: Vec<String>,
    /// USERNAME; the kid of a token.
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

/// An `RTCOAuthCredential` (W3C webrtc-extensions), base64 both.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct IceToken {
    /// For MESSAGE-INTEGRITY.
    #[serde(rename = "macKey")]
    pub mac_key: String,
    /// For ACCESS-TOKEN.
    #[serde(rename = "accessToken")]
    pub access_token: String,
}

/// Credential in the form of the draft of a TURN REST API (draft-uberti-behave-turn-rest).
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct RestCredentials {
    /// USERNAME: its end and its owner.
    pub username: String,
    /// The password.
    pub password: String,
    /// Lifetime of both in seconds.
    pub ttl: u32,
    /// `turn:` and `turns:` URIs (RFC 7065).
    pub uris: Vec<String>,
}

/// A change of the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Change {
    /// The username, the fingerprint of the secret, the name of the realm or of the key.
    pub name: String,
    /// The realm; empty for a key that is good for all.
    pub realm: String,
    /// The store, without its password.
    pub store: String,
    /// It existed before.
    pub existed: bool,
    /// Note about the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// All realms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Realms {
    /// Realms that clients are served in.
    pub realms: Vec<Realm>,
    /// Realms of the store.
    pub stored: Vec<StoredRealm>,
}

/// A realm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Realm {
    /// REALM.
    pub name: String,
    /// Its sessions.
    pub sessions: u64,
    /// Limit of its sessions; null if `limits.allocations` alone holds.
    pub max_sessions: Option<u64>,
    /// Limit of each of its users.
    pub max_sessions_per_user: u64,
    /// Bits per second, each way, of all its sessions together.
    pub bits_per_second: Option<u64>,
    /// Bits per second of each of its users.
    pub bits_per_second_per_user: Option<u64>,
    /// Bits per second of each session.
    pub bits_per_second_per_session: Option<u64>,
    /// Seconds that a session may last, however often it is refreshed.
    pub session_length: Option<u32>,
    /// The ports of its relayed transport addresses, such as `50000-50999`, where it has some of its own.
    pub relay_ports: Option<String>,
    /// Users of the configuration.
    pub users: u64,
    /// Secrets of time-limited credentials in the configuration.
    pub secrets: u64,
    /// Listeners that serve it; empty if those serve it that no realm names.
    pub listen: Vec<String>,
    /// TLS and DTLS server names that lead to it.
    pub server_names: Vec<String>,
}

/// Realm of a store; a limit of the configuration comes before its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredRealm {
    /// REALM.
    pub name: String,
    /// Limit of its sessions.
    pub max_sessions: Option<u64>,
    /// Limit of each of its users.
    pub max_sessions_per_user: Option<u64>,
    /// Bits per second, each way, of each of its sessions.
    pub bits_per_second_per_session: Option<u64>,
    /// Origins of web pages whose clients get it.
    pub origins: Vec<String>,
}

/// A realm to be served beside those of the configuration, or new limits of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "blue.example", "max_sessions": 100 }))]
pub struct NewRealm {
    /// REALM, without control characters, `"`, `\` and blanks at its ends.
    #[schema(min_length = 1, max_length = 127)]
    pub name: String,
    /// Limit of its sessions; default none of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000000)]
    pub max_sessions: Option<u64>,
    /// Limit of each of its users; default none of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000000)]
    pub max_sessions_per_user: Option<u64>,
    /// Bits per second, each way, of each of its sessions; kept in whole bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1000, maximum = 1000000000000u64)]
    pub bits_per_second_per_session: Option<u64>,
    /// Answers 409 if the store has this realm.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_new: bool,
}

/// All limits that have a number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// One for each key of the configuration.
    pub limits: Vec<Limit>,
}

/// A limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Limit {
    /// Its key, such as `limits.allocations`.
    pub key: String,
    /// The limit; null for none. Times are in seconds (`limits.burst` in milliseconds), rates in bits per second (refusals in refusals per
    /// second), buffers in bytes.
    pub most: Option<u64>,
    /// Amount in use, where that is one number.
    pub used: Option<u64>,
}

/// Listeners and relay addresses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Listeners {
    /// For clients.
    pub listeners: Vec<Listener>,
    /// For peers.
    pub relays: Vec<RelayRange>,
}

/// A listener for clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Listener {
    /// With a certificate, `tcp` takes TLS too.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Address and port.
    pub address: String,
    /// A reload has removed it: it takes no new clients and is listed while it has sessions.
    pub closing: bool,
    /// Sessions that came in here and exist now.
    pub sessions: u64,
    /// Traffic that these have relayed to peers.
    pub to_peer: Traffic,
    /// Traffic that these have relayed to clients.
    pub to_client: Traffic,
}

/// An address with ports for relayed transport addresses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RelayRange {
    /// The address of this machine.
    pub address: String,
    /// The address that clients see, if it is another one.
    pub external: Option<String>,
    /// The lowest port.
    #[schema(maximum = 65535)]
    pub first_port: u16,
    /// The highest port.
    #[schema(maximum = 65535)]
    pub last_port: u16,
    /// Whether this machine has the address: without it no allocation is granted there.
    pub up: bool,
    /// Since when that is so (RFC 3339).
    pub since: String,
}

/// Certificates of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Certificates {
    /// The default one first.
    pub certificates: Vec<Certificate>,
}

/// A certificate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Certificate {
    /// Its file, as the configuration names it.
    pub file: String,
    /// Its DNS names.
    pub names: Vec<String>,
    /// The last second in which it is valid (RFC 3339).
    pub not_after: String,
    /// Seconds until then; below zero afterwards.
    pub expires_in_s: i64,
    /// DTLS can use it, too.
    pub dtls: bool,
}

/// All workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Workers {
    /// Workers by number.
    pub workers: Vec<Worker>,
}

/// A worker: one thread. Counts are since the start, and at most 100 ms old.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Worker {
    /// Its number, from 0.
    pub number: u64,
    /// Sessions that it has.
    pub sessions: u64,
    /// The share of a core that it took lately, 0 to 1.
    pub load: Option<f64>,
    /// The share of time in which it was ready to run lately but another thread had its core.
    pub waiting: Option<f64>,
    /// Time that a datagram would have waited for it just now, in microseconds; null without an answer.
    pub event_loop_us: Option<u64>,
    /// Times that it woke up.
    pub wakeups: u64,
    /// Receive calls.
    pub receive_calls: u64,
    /// Datagrams received; over the receive calls, the size of a batch.
    pub received: u64,
    /// Send calls.
    pub send_calls: u64,
    /// Datagrams sent.
    pub sent: u64,
    /// Traffic relayed to peers.
    pub to_peer: Traffic,
    /// Traffic relayed to clients.
    pub to_client: Traffic,
    /// Datagrams that the kernel dropped because the worker was too slow.
    pub kernel_drops: u64,
    /// Datagrams that the server dropped; `/metrics` has the reasons.
    pub dropped: u64,
}

/// An event of `/v1/live/events`.
#[derive(ToSchema)]
#[serde(tag = "event", content = "data", rename_all = "lowercase")]
pub enum LiveEvent {
    /// The first one: the last minutes.
    History(Box<History>),
    /// One each second.
    Live(Box<Live>),
}

/// State of the program at this moment, with rates over the last second or so (`interval_s`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Live {
    /// When (RFC 3339, with milliseconds).
    pub at: String,
    /// Seconds over which rates are measured.
    pub interval_s: f64,
    /// State of the program.
    pub status: Status,
    /// Cores that it took, 1.0 being one of them.
    pub cores: Option<f64>,
    /// Activity of the TURN server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<LiveServer>,
    /// Activity of each rule of a forwarder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<LiveRule>,
}

/// Activity of the TURN server at this moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveServer {
    /// Payload relayed to peers, a second.
    pub to_peer: Rate,
    /// Payload relayed to clients, a second.
    pub to_client: Rate,
    /// Traffic of both that the kernel relayed without waking a worker, a second.
    pub across: Rate,
    /// Datagrams that workers received, a second.
    pub received: f64,
    /// Datagrams that workers sent, a second.
    pub sent: f64,
    /// Well-formed requests, a second.
    pub requests: f64,
    /// Sessions that began, a second.
    pub opened: f64,
    /// Sessions that ended, a second.
    pub closed: f64,
    /// Duration of allocations in the last minute; null without any.
    pub opening: Option<Quantiles>,
    /// Losses and drops since the start, by reason; reasons that have not happened are left out.
    pub drops: Vec<Reason>,
    /// Refusals since the start, by reason, likewise.
    pub refusals: Vec<Reason>,
    /// Workers by number.
    pub workers: Vec<LiveWorker>,
    /// Datagrams of one receive call.
    pub batches: Vec<Batch>,
    /// Sessions by listener.
    pub listeners: Vec<LiveListener>,
    /// Sessions by realm; realms without any are left out.
    pub realms: Vec<LiveRealm>,
    /// Sessions that relay the most; null for some seconds after the first request, until they have been compared.
    pub talkers: Option<Talkers>,
}

/// Payload a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Rate {
    /// Datagrams.
    pub datagrams: f64,
    /// Bytes.
    pub bytes: f64,
}

/// Durations as upper bounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Quantiles {
    /// Number of allocations.
    pub count: u64,
    /// Median in seconds; null above the largest bucket.
    pub p50_s: Option<f64>,
    /// 99th percentile in seconds, likewise.
    pub p99_s: Option<f64>,
}

/// Count of one reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Reason {
    /// Kind, such as `packet` or `limit`.
    pub kind: String,
    /// Reason, as in `/metrics`.
    pub reason: String,
    /// Since the start.
    pub total: u64,
    /// A second.
    pub rate: f64,
    /// Keys of the configuration that decide it, such as `limits.allocations_per_user`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
}

/// Activity of a worker at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveWorker {
    /// Its number, from 0.
    pub number: u64,
    /// Sessions that it has.
    pub sessions: u64,
    /// The share of a core that it took, 0 to 1.
    pub load: Option<f64>,
    /// The share of time in which it was ready to run but another thread had its core.
    pub waiting: Option<f64>,
    /// Time that a datagram would have waited for it just now, in microseconds; null without an answer.
    pub event_loop_us: Option<u64>,
    /// Times that it woke up, a second.
    pub wakeups: f64,
    /// Datagrams received, a second.
    pub received: f64,
    /// Datagrams sent, a second.
    pub sent: f64,
    /// Datagrams of a receive call that brought any.
    pub receive_batch: Option<f64>,
    /// Datagrams of a send call.
    pub send_batch: Option<f64>,
    /// Datagrams that were lost or dropped, by the kernel or by us, a second.
    pub dropped: f64,
}

/// Receive calls that brought so many datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Batch {
    /// Lower bound.
    pub from: u64,
    /// Upper bound; null for the last.
    pub to: Option<u64>,
    /// Calls a second.
    pub rate: f64,
}

/// Sessions of a listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveListener {
    /// Transport.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Address and port.
    pub address: String,
    /// The TLS server name that the clients asked for, if it leads to realms of its own.
    pub server_name: Option<String>,
    /// Sessions.
    pub sessions: u64,
}

/// Sessions of a realm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveRealm {
    /// REALM.
    pub name: String,
    /// Sessions.
    pub sessions: u64,
}

/// Sessions that relay the most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Talkers {
    /// Seconds over which their rates are measured.
    pub interval_s: f64,
    /// Sessions that relayed anything in that time.
    pub active: u64,
    /// Sorted by bytes, the largest first.
    #[schema(max_items = 20)]
    pub talkers: Vec<Talker>,
}

/// A session that relays much.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Talker {
    /// Its name.
    pub id: String,
    /// The realm of its user.
    pub realm: String,
    /// The username that authenticated it.
    pub user: String,
    /// The client's address.
    pub client: String,
    /// Between client and server.
    #[schema(schema_with = transport)]
    pub transport: String,
    /// Payload to peers, a second.
    pub to_peer: Rate,
    /// Payload to the client, a second.
    pub to_client: Rate,
}

/// State of a rule of a forwarder towards clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleState {
    /// It takes clients.
    #[default]
    Listening,
    /// It cannot be bound yet; it is tried again (`forward.keep_going`).
    Waiting,
    /// It takes no new clients while its last connections end.
    Closed,
}

impl RuleState {
    /// As in JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Listening => "listening",
            Self::Waiting => "waiting",
            Self::Closed => "closed",
        }
    }
}

/// Activity of a rule of a forwarder at this moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveRule {
    /// Its name.
    pub name: String,
    /// State towards clients.
    pub state: RuleState,
    /// Reason for waiting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Connections and sessions that exist.
    pub open: u64,
    /// Connections and sessions that began, a second.
    pub accepted: f64,
    /// To targets, a second; datagrams of UDP alone.
    pub to_target: Rate,
    /// To clients, likewise.
    pub to_client: Rate,
    /// Ended connections and sessions and dropped datagrams since the start, by reason.
    pub ends: Vec<Reason>,
}

/// The last minutes, a second apart, in lists of equal length; null stands for an unknown value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// Time of the last point (RFC 3339); null without points.
    pub ends_at: Option<String>,
    /// Seconds between two points.
    pub step_s: f64,
    /// Sessions or connections.
    #[schema(max_items = 600)]
    pub open: Vec<Option<f64>>,
    /// Payload bits to peers or targets, a second.
    #[schema(max_items = 600)]
    pub to_peer_bps: Vec<Option<f64>>,
    /// Payload bits to clients, a second.
    #[schema(max_items = 600)]
    pub to_client_bps: Vec<Option<f64>>,
    /// Payload datagrams to peers or targets, a second.
    #[schema(max_items = 600)]
    pub to_peer_pps: Vec<Option<f64>>,
    /// Payload datagrams to clients, a second.
    #[schema(max_items = 600)]
    pub to_client_pps: Vec<Option<f64>>,
    /// Datagrams lost or dropped, a second.
    #[schema(max_items = 600)]
    pub dropped: Vec<Option<f64>>,
    /// Refusals, a second.
    #[schema(max_items = 600)]
    pub refused: Vec<Option<f64>>,
    /// The share of its core that the busiest worker took.
    #[schema(max_items = 600)]
    pub load: Vec<Option<f64>>,
    /// Microseconds that a datagram would have waited for the slowest worker.
    #[schema(max_items = 600)]
    pub event_loop_us: Vec<Option<f64>>,
}

/// Recent refusals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Refusals {
    /// The latest first.
    #[schema(max_items = 1000)]
    pub refusals: Vec<Refusal>,
}

/// Refusals of one client for one reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Refusal {
    /// The first one (RFC 3339).
    pub first_at: String,
    /// The last one.
    pub last_at: String,
    /// Number of refusals. Above some a second of one address, `/metrics` alone counts them.
    pub count: u64,
    /// Address of the client at the last one.
    pub client: String,
    /// Username that the client gave, if any.
    pub user: Option<String>,
    /// The realm of an authenticated user.
    pub realm: Option<String>,
    /// Refused thing: `credentials`, `peer`, a request such as `allocate`, `connection`, `tls_handshake`, `dtls_handshake`, `dtls_hello` (forgeable).
    pub asked: String,
    /// STUN error code of the answer; null without one.
    #[schema(minimum = 300, maximum = 699)]
    pub code: Option<u16>,
    /// Reason.
    pub reason: String,
    /// Remedy.
    pub remedy: String,
    /// Keys of the configuration that decide it, such as `limits.allocations_per_user`.
    pub keys: Vec<String>,
    /// Refusals among them that concern other users, requests or peers of the client.
    pub others: u64,
    /// The last users of these.
    #[schema(max_items = 16)]
    pub other_users: Vec<String>,
    /// The last peers of these.
    #[schema(max_items = 16)]
    pub other_peers: Vec<String>,
}

/// Rights of the client that asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Access {
    /// Changes are allowed: ending sessions, reload, drain, log level.
    pub may_change: bool,
}

/// Filter of log lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "level": "info" }))]
pub struct LogLevel {
    /// `error`, `warn`, `info`, `debug`, `trace`, `off`, or directives such as `info,turnpike_relay=debug`.
    #[schema(min_length = 1, max_length = 1000)]
    pub level: String,
}

/// Limit of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "deadline_s": 300 }))]
pub struct Drain {
    /// Seconds that sessions may live on, at most a day; default `shutdown.deadline`. 0 ends them at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 86400)]
    pub deadline_s: Option<u32>,
}

/// A drain under way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Draining {
    /// Sessions or connections that are left.
    pub open: u64,
    /// Seconds that they may live on.
    pub deadline_s: f64,
}

/// Changes made by a reload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reloaded {
    /// One line for each key, realm, rule or certificate, such as `auth.users: 1 added`.
    pub changed: Vec<String>,
    /// Keys that have changed, and take effect only after a restart.
    pub after_restart: Vec<String>,
    /// Doubts, and what could not be taken although the rest was.
    pub warnings: Vec<String>,
}

/// Why a request was not done (RFC 9457).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Always `about:blank`.
    #[serde(rename = "type")]
    #[schema(value_type = String)]
    pub kind: Box<str>,
    /// The phrase of the status.
    #[schema(value_type = String)]
    pub title: Box<str>,
    /// The HTTP status.
    #[schema(minimum = 400, maximum = 599)]
    pub status: u16,
    /// Description of the problem, and the remedy.
    pub detail: String,
    /// Kind of problem, for programs.
    #[schema(value_type = String, example = "no_such_session")]
    pub code: Box<str>,
    /// One line for each mistake, if there may be several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}
