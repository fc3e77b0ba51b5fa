//! What the API says, as JSON: each type is written by the server, read by the commands, and described by the OpenAPI document.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
    /// When it was started (RFC 3339).
    pub started_at: String,
    /// Seconds since then.
    pub uptime_s: u64,
    /// Nothing new is taken; the program ends with the last session or connection.
    pub draining: bool,
    /// Sessions of a server, connections of a forwarder, those of a previous process included. At most 1 s old.
    pub open: u64,
    /// Path of datagrams, of a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datapath: Option<Datapath>,
    /// Name in its fleet; absent outside a fleet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Rights left to the process; null where it has given up nothing (`sandbox.mode`).
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
    /// `release` or `debug`.
    pub profile: String,
}

/// Some sessions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionPage {
    /// In no order that means anything, but always the same one.
    pub sessions: Vec<Session>,
    /// The `cursor` of the next page; none behind the last one.
    pub next: Option<String>,
    /// The previous process if it does not answer, in a sentence: its sessions are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
}

/// An allocation of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// 32 hex digits: its name for as long as it lives, on whichever worker.
    pub id: String,
    /// The realm of its user.
    pub realm: String,
    /// The username that authenticated it.
    pub user: String,
    /// Whom quotas count, where that is another name: the id of a time-limited credential, say.
    pub identity: Option<String>,
    /// The client's address.
    pub client: String,
    /// The address of the server that the client sends to.
    pub server: String,
    /// Between client and server: `udp`, `tcp`, `tls` or `dtls`.
    pub transport: String,
    /// Relayed transport addresses: one, or one of each family.
    pub relayed: Vec<Relayed>,
    /// Between the server and peers: `udp` or `tcp`.
    pub relayed_transport: String,
    /// Follows its client to another address (RFC 8016).
    pub mobile: bool,
    /// Its client has gone, and may come back.
    pub away: bool,
    /// Seconds since it began.
    pub age_s: f64,
    /// Traffic relayed to peers.
    pub to_peer: Traffic,
    /// Traffic relayed to the client.
    pub to_client: Traffic,
    /// Connections to peers (RFC 6062).
    pub peer_connections: u64,
    /// The worker that has it, for now.
    pub worker: u64,
    /// PID of the previous process, if that serves the session since an upgrade in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<u32>,
    /// The node of the fleet that has it, where another one than the one that was asked might.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Peers that may send to it; of one session, not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<Vec<Permission>>,
    /// Channels; told of one session, not in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<Vec<Channel>>,
}

/// A relayed transport address.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Relayed {
    /// Address and port, as the client was told them.
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
    /// 16384 to 32767.
    pub number: u16,
    /// Address and port.
    pub peer: String,
    /// Seconds until it ends, unless the client renews it.
    pub expires_in_s: u64,
}

/// Sessions of all nodes of a fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FleetSessions {
    /// In no order that means anything; each with its node.
    pub sessions: Vec<Session>,
    /// Nodes that have not answered, and why; their sessions are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
    /// The `cursor` of the next page; none behind the last one.
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
    /// Why the node that was asked knows nothing of the others as of late, where it does not: then what follows is old.
    pub alone: Option<String>,
    /// The store is new, was emptied or is another server. Until it knows what all nodes have, each serves its equal share of quotas.
    #[serde(default)]
    pub recovering: bool,
    /// The version of the keys that all nodes share.
    pub keys: u64,
    /// All of them by name, the one that was asked included.
    pub nodes: Vec<FleetNode>,
}

/// A node of a fleet, as it has said of itself within some seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FleetNode {
    /// Its name: `fleet.node`.
    pub name: String,
    /// Number of the node in CONNECTION-IDs and mobility tickets.
    pub number: u16,
    /// State towards new clients.
    pub state: NodeState,
    /// Seconds for which it has said nothing.
    pub silent_s: f64,
    /// `fleet.zone`; empty if nobody says.
    pub zone: String,
    /// Version of the program; null before it is known.
    pub version: Option<String>,
    /// The largest of its loads: 0 is idle, 1 is as much as it can take.
    pub busy: f64,
    /// Sessions that it has.
    pub sessions: u64,
    /// The most that it may have.
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
    /// It does.
    Serving,
    /// It has no room.
    Full,
    /// It takes nobody new.
    Draining,
    /// Nobody knows as of late.
    Silent,
}

/// Order to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeOrder {
    /// Which.
    pub node: String,
    /// The node takes no new clients.
    pub drains: bool,
}

/// Bans in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bans {
    /// Those first whose ban ends first.
    pub bans: Vec<Ban>,
}

/// A ban: of a user, or of whoever comes from some addresses.
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
    /// As somebody wrote it; may be empty.
    pub reason: String,
}

/// A ban to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "user": "alice", "seconds": 3600, "reason": "abuse" }))]
pub struct NewBan {
    /// The username, or the id of a time-limited one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The realm of that user; `server.realm` if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// In place of a user: an address, or a prefix such as `192.0.2.0/24`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// For how long; 31 days at most.
    #[schema(minimum = 1, maximum = 2_678_400)]
    pub seconds: u64,
    /// Why, for whoever lists it; at most 200 characters.
    #[serde(default)]
    pub reason: String,
}

/// A ban that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Banned {
    /// It.
    pub ban: Ban,
    /// Sessions that it has ended, on the node that was asked.
    pub ended: u64,
    /// The other nodes of the fleet know. If not, they are told when the store answers again.
    pub announced: bool,
}

/// A ban that was ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Unbanned {
    /// Bans that are left, those first whose ban ends first.
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
    /// Some of them: those of the configuration first, then those of the store by realm and name.
    pub users: Vec<User>,
    /// The `cursor` of the next page; none behind the last one.
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
    /// Where it stands.
    pub from: Origin,
}

/// Where a user or a secret stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// In the configuration, by which alone it is changed.
    Configuration,
    /// In the store.
    Store,
}

/// A user to be made, or one that gets another password. Its `Debug` would show that, so there is none.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "alice", "password": "correct horse" }))]
pub struct NewUser {
    /// The username: 1 to 508 bytes without control characters and colons.
    pub name: String,
    /// The realm; `server.realm` if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// The password. Keys are made of it; it is not kept.
    pub password: String,
    /// An existing one stays as it is; the answer is 409 then.
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
    pub fingerprint: String,
    /// Where it stands.
    pub from: Origin,
    /// Makes new credentials.
    pub signs: bool,
    /// The last second in which it counts, once another one has taken its place (RFC 3339).
    pub until: Option<String>,
}

/// A secret to be taken. Its `Debug` would show it, so there is none.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "secret": "b835b34458676107ba09b78bc9a22be5" }))]
pub struct NewSecret {
    /// The secret.
    pub secret: String,
    /// The realm; `server.realm` if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// An existing one stays as it is; the answer is 409 then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_new: bool,
}

/// Another secret for a realm. Its `Debug` would show it, so there is none.
#[derive(Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "overlap_s": 3600 }))]
pub struct Rotation {
    /// The realm; `server.realm` if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// The secret that is to make new credentials; one is made up, and told nobody, if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Seconds for which the others count; a minute more than `credentials.max_ttl` if it is not there. 0 ends them at once.
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
    /// The one realm that it is good for; none for all.
    pub realm: Option<String>,
    /// Seconds that a credential made for it lives at most; `credentials.max_ttl` holds too.
    pub max_ttl: Option<u32>,
    /// Requests a second; `credentials.rate` if it is not there.
    pub rate: Option<u32>,
}

/// A key to be taken. Whoever makes it keeps it: only its hash is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "shop", "sha256": "4355a46b19d348dc2f57c046f8ef63d4538ebb936000f3c9ee954a27460dd865", "max_ttl": 3600 }))]
pub struct NewKey {
    /// Its name: 1 to 64 small letters, digits, `-` and `_`. The key itself is `tpk_NAME.SECRET`.
    pub name: String,
    /// SHA-256 of the key, 64 hex digits.
    pub sha256: String,
    /// The one realm that it is good for; all, if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// Seconds that a credential made for it lives at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 31536000)]
    pub max_ttl: Option<u32>,
    /// Requests a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000000)]
    pub rate: Option<u32>,
}

/// Wishes of an application. All of it may be left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "user": "alice", "ttl": 600 }))]
pub struct CredentialsRequest {
    /// Owner of the credential: 1 to 256 bytes. Quotas count by it, and log lines name it; absent, it is generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Seconds for which it is good; `credentials.ttl` if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub ttl: Option<u32>,
    /// The realm; that of the key, or `server.realm`, if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// The token key (`oauth.key`) of which a token is wanted, in place of a username and a password (RFC 7635).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kid: Option<String>,
}

/// Configuration for a browser: an `RTCConfiguration` for `new RTCPeerConnection`.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct Credentials {
    /// This server.
    #[serde(rename = "iceServers")]
    pub ice_servers: Vec<IceServer>,
    /// REALM, for clients that take none from the server.
    pub realm: String,
    /// Seconds for which it is good.
    pub ttl: u32,
    /// When that is over (RFC 3339).
    pub expires_at: String,
}

/// An `RTCIceServer` (W3C webrtc-pc).
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct IceServer {
    /// `turn:` and `turns:` URIs (RFC 7065), one for each transport, port and name.
    pub urls: Vec<String>,
    /// USERNAME: of a token its kid.
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
    /// USERNAME: when it ends, and whose it is.
    pub username: String,
    /// The password.
    pub password: String,
    /// Seconds for which both are good.
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
    /// Those that clients are served in.
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
    /// The most that it may have, where that is less than what all may have.
    pub max_sessions: Option<u64>,
    /// The most that each of its users may have.
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
    /// Listeners that serve it alone or with others; any that no realm names, if there is none.
    pub listen: Vec<String>,
    /// TLS and DTLS server names that lead to it.
    pub server_names: Vec<String>,
}

/// Realm of a store; a limit of the configuration comes before its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredRealm {
    /// REALM.
    pub name: String,
    /// The most sessions that it may have.
    pub max_sessions: Option<u64>,
    /// The most that each of its users may have.
    pub max_sessions_per_user: Option<u64>,
    /// Bits per second, each way, of each of its sessions.
    pub bits_per_second_per_session: Option<u64>,
    /// Web pages whose clients are led to it.
    pub origins: Vec<String>,
}

/// A realm to be served beside those of the configuration, or to get other limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "blue.example", "max_sessions": 100 }))]
pub struct NewRealm {
    /// REALM: 1 to 127 characters, without control characters, `"` and `\`.
    pub name: String,
    /// The most sessions that it may have; no limit of its own if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_sessions: Option<u64>,
    /// The most that each of its users may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_sessions_per_user: Option<u64>,
    /// Bits per second, each way, of each of its sessions; kept in whole bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1000, maximum = 1000000000000u64)]
    pub bits_per_second_per_session: Option<u64>,
    /// An existing one stays as it is; the answer is 409 then.
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
    /// The most that there may be; of times, in seconds (of `limits.burst`, in milliseconds), of rates, in bits per second (of refusals, in
    /// refusals per second), of buffers, in bytes. Without it there is no limit.
    pub most: Option<u64>,
    /// Amount in use, where that is one number.
    pub used: Option<u64>,
}

/// Where clients come in, and where they are relayed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Listeners {
    /// For clients.
    pub listeners: Vec<Listener>,
    /// For peers.
    pub relays: Vec<RelayRange>,
}

/// Where clients come in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Listener {
    /// `udp`, `tcp`, `tls` or `dtls`; where there is a certificate, `tcp` takes TLS too.
    pub transport: String,
    /// Address and port.
    pub address: String,
    /// Takes no new clients, because a reload has taken it away; shown as long as it has sessions.
    pub closing: bool,
    /// Sessions that came in here and exist now.
    pub sessions: u64,
    /// Traffic that these have relayed to peers.
    pub to_peer: Traffic,
    /// Traffic that these have relayed to clients.
    pub to_client: Traffic,
}

/// Where clients are relayed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RelayRange {
    /// The address of this machine.
    pub address: String,
    /// The address that clients are told, where that is another one.
    pub external: Option<String>,
    /// The lowest port.
    pub first_port: u16,
    /// The highest port.
    pub last_port: u16,
}

/// The certificates that clients are shown.
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
    /// The DNS names that it is good for.
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
    /// From 0 on.
    pub number: u64,
    /// Sessions that it has.
    pub sessions: u64,
    /// The share of a core that it took lately, 0 to 1.
    pub load: Option<f64>,
    /// The share of the time that it was ready to run lately and did not, because others had its core.
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
    /// Datagrams dropped for any reason of ours; `/metrics` has them by reason.
    pub dropped: u64,
}

/// An event of `/v1/live/events`.
#[derive(ToSchema)]
#[serde(tag = "event", content = "data", rename_all = "lowercase")]
#[schema(example = json!({ "event": "live", "data": { "at": "2026-11-29T12:00:00Z" } }))]
pub enum LiveEvent {
    /// The first one: the last minutes.
    History(Box<History>),
    /// One each second.
    Live(Box<Live>),
}

/// State of the program at this moment. Rates are of the last second or so: see `interval_s`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Live {
    /// When (RFC 3339, with milliseconds).
    pub at: String,
    /// Seconds that the rates are of.
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
    /// Time that allocations of the last minute took; null if there were none.
    pub opening: Option<Quantiles>,
    /// Losses and drops since the start, by reason; reasons that have not happened are left out.
    pub drops: Vec<Reason>,
    /// Refusals since the start, by reason, likewise.
    pub refusals: Vec<Reason>,
    /// Workers by number.
    pub workers: Vec<LiveWorker>,
    /// Datagrams of one receive call.
    pub batches: Vec<Batch>,
    /// Sessions by where and how their clients come in.
    pub listeners: Vec<LiveListener>,
    /// Sessions by realm; realms without any are left out.
    pub realms: Vec<LiveRealm>,
    /// Sessions that relay the most; none before they have been compared, which takes some seconds after the first who looks.
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

/// Upper bounds: so long or less it took for that share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Quantiles {
    /// Number of allocations.
    pub count: u64,
    /// Seconds for half of them; none if it is more than can be told.
    pub p50_s: Option<f64>,
    /// Seconds for 99 of 100.
    pub p99_s: Option<f64>,
}

/// Something that happens for several reasons.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Reason {
    /// Kind, such as `packet` or `limit`.
    pub kind: String,
    /// Why, as `/metrics` calls it.
    pub reason: String,
    /// Since the start.
    pub total: u64,
    /// A second.
    pub rate: f64,
}

/// Activity of a worker at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveWorker {
    /// From 0 on.
    pub number: u64,
    /// Sessions that it has.
    pub sessions: u64,
    /// The share of a core that it took, 0 to 1.
    pub load: Option<f64>,
    /// The share of the time that it was ready to run and did not, because others had its core.
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

/// Sessions whose clients come in here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LiveListener {
    /// `udp`, `tcp`, `tls` or `dtls`.
    pub transport: String,
    /// Address and port.
    pub address: String,
    /// The server name that leads to realms of its own, for those that asked for it.
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
    /// Seconds that their rates are of.
    pub interval_s: f64,
    /// Sessions that relayed anything at all in that time.
    pub active: u64,
    /// The one that relays the most bytes first.
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
    /// Between client and server: `udp`, `tcp`, `tls` or `dtls`.
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
    /// It does.
    #[default]
    Listening,
    /// It cannot be bound yet, and is tried again (`forward.keep_going`).
    Waiting,
    /// Its last connections end.
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
    /// Why it waits, if it does.
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
    /// Why connections and sessions ended, and datagrams were dropped, since the start.
    pub ends: Vec<Reason>,
}

/// The last minutes, a second apart; all lists are of the same length. Where nothing is known stands null.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// When the last point was (RFC 3339); none if there is none.
    pub ends_at: Option<String>,
    /// Seconds between two points.
    pub step_s: f64,
    /// Sessions or connections.
    pub open: Vec<Option<f64>>,
    /// Payload bits to peers or targets, a second.
    pub to_peer_bps: Vec<Option<f64>>,
    /// Payload bits to clients, a second.
    pub to_client_bps: Vec<Option<f64>>,
    /// Payload datagrams to peers or targets, a second.
    pub to_peer_pps: Vec<Option<f64>>,
    /// Payload datagrams to clients, a second.
    pub to_client_pps: Vec<Option<f64>>,
    /// Datagrams lost or dropped, a second.
    pub dropped: Vec<Option<f64>>,
    /// Refusals, a second.
    pub refused: Vec<Option<f64>>,
    /// The share of its core that the busiest worker took.
    pub load: Vec<Option<f64>>,
    /// Microseconds that a datagram would have waited for the slowest worker.
    pub event_loop_us: Vec<Option<f64>>,
}

/// Clients that were refused lately.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Refusals {
    /// The last one first.
    pub refusals: Vec<Refusal>,
}

/// A client that was refused for one reason, once or again and again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Refusal {
    /// For the first time (RFC 3339).
    pub first_at: String,
    /// For the last time.
    pub last_at: String,
    /// Number of times, as far as it is known: beyond some a second of one address they are counted in `/metrics` only.
    pub count: u64,
    /// Where it came from the last time.
    pub client: String,
    /// Username that the client gave, if it came as far as that.
    pub user: Option<String>,
    /// The realm of a user who had proved it.
    pub realm: Option<String>,
    /// Refused thing: `credentials`, `peer`, a request such as `allocate`, `connection`, `tls_handshake`, `dtls_handshake`, `dtls_hello` (forgeable).
    pub asked: String,
    /// The STUN error code of the answer, if there was one.
    pub code: Option<u16>,
    /// Reason.
    pub reason: String,
    /// Remedy.
    pub remedy: String,
    /// Keys of the configuration that decide it, such as `limits.allocations_per_user`; none where no key does.
    pub keys: Vec<String>,
    /// Refusals of other users, requests or peers of the client for this reason, which are counted in it.
    pub others: u64,
    /// The last users of these, 16 at most.
    pub other_users: Vec<String>,
    /// The last peers of these, 16 at most.
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
    pub level: String,
}

/// Limit of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "deadline_s": 300 }))]
pub struct Drain {
    /// Seconds that sessions may live on, at most a day; what `shutdown.deadline` says if it is not there. 0 ends them at once.
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
    /// Always `about:blank`: the status says what kind it is.
    #[serde(rename = "type")]
    #[schema(value_type = String)]
    pub kind: Box<str>,
    /// The phrase of the status.
    #[schema(value_type = String)]
    pub title: Box<str>,
    /// The HTTP status.
    pub status: u16,
    /// Description of the problem, and the remedy.
    pub detail: String,
    /// Which problem it is, for programs.
    #[schema(value_type = String, example = "no_such_session")]
    pub code: Box<str>,
    /// One line a mistake, where there may be several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}
