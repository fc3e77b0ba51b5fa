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

/// How the program is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Which program it is.
    pub job: Job,
    /// Of the program.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// When it was started (RFC 3339).
    pub started_at: String,
    /// Seconds since then.
    pub uptime_s: u64,
    /// Whether nothing new is taken, and the program ends with the last session or connection.
    pub draining: bool,
    /// Sessions of a server, connections of a forwarder. At most 100 ms old.
    pub open: u64,
    /// How datagrams enter and leave, of a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datapath: Option<Datapath>,
}

/// How datagrams enter and leave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Datapath {
    /// The step of the ladder, such as `gso`.
    pub step: String,
    /// Why that one.
    pub why: String,
}

/// What was built.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Build {
    /// Always `turnpike`.
    pub name: String,
    /// Of the program.
    pub version: String,
    /// Architecture and system, such as `x86_64-linux`.
    pub target: String,
    /// `release` or `debug`.
    pub profile: String,
}

/// Some sessions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionPage {
    /// In no order that means anything, but always the same one.
    pub sessions: Vec<Session>,
    /// The `cursor` of the next page; none behind the last one.
    pub next: Option<String>,
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
    /// Whether it follows its client to another address (RFC 8016).
    pub mobile: bool,
    /// Whether its client has gone, and may come back.
    pub away: bool,
    /// Seconds since it began.
    pub age_s: f64,
    /// What was relayed to peers.
    pub to_peer: Traffic,
    /// What was relayed to the client.
    pub to_client: Traffic,
    /// Connections to peers (RFC 6062).
    pub peer_connections: u64,
    /// The worker that has it, for now.
    pub worker: u64,
    /// The node of the fleet that has it, where another one than the one that was asked might.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Who may send to it; told of one session, not in lists.
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
    /// What the fleet is called: `fleet.name`.
    pub name: String,
    /// The node that was asked.
    pub node: String,
    /// Where the fleet's store is, without a password.
    pub store: String,
    /// Why the node that was asked knows nothing of the others as of late, where it does not: then what follows is old.
    pub alone: Option<String>,
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
    /// What CONNECTION-IDs and mobility tickets hold of it.
    pub number: u16,
    /// Whether it takes clients.
    pub state: NodeState,
    /// Seconds for which it has said nothing.
    pub silent_s: f64,
    /// `fleet.zone`; empty if nobody says.
    pub zone: String,
    /// Of the program; none before that is known.
    pub version: Option<String>,
    /// The largest of its loads: 0 is idle, 1 is as much as it can take.
    pub busy: f64,
    /// Sessions that it has.
    pub sessions: u64,
    /// The most that it may have.
    pub max_sessions: u64,
    /// Payload both ways, in bits.
    pub bits_per_second: u64,
    /// What it can carry of that, where somebody has said so.
    pub max_bits_per_second: Option<u64>,
    /// The share of a core that its busiest worker took lately, 0 to 1.
    pub cpu: f64,
    /// Relay ports that are free.
    pub relay_ports_left: u64,
    /// Of so many.
    pub relay_ports: u64,
    /// Where clients reach it, such as `tls://203.0.113.5:5349`.
    pub addresses: Vec<String>,
}

/// Whether a node takes clients.
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

/// What a node was told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeOrder {
    /// Which.
    pub node: String,
    /// Whether it is to take nobody new.
    pub drains: bool,
}

/// Who is banned.
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
pub struct NewUser {
    /// The username: 1 to 508 bytes without control characters and colons.
    pub name: String,
    /// The realm; `server.realm` if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
    /// The password. Keys are made of it; it is not kept.
    pub password: String,
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
}

/// A secret to be taken. Its `Debug` would show it, so there is none.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSecret {
    /// The secret.
    pub secret: String,
    /// The realm; `server.realm` if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub realm: Option<String>,
}

/// A change of the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Change {
    /// The username, the fingerprint of the secret, or the name of the realm.
    pub name: String,
    /// The realm.
    pub realm: String,
    /// The store, without its password.
    pub store: String,
    /// Whether it was there before.
    pub existed: bool,
    /// What somebody should know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// All realms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Realms {
    /// Those that clients are served in.
    pub realms: Vec<Realm>,
    /// What the store says of realms.
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
    /// Users of the configuration.
    pub users: u64,
    /// Secrets of time-limited credentials in the configuration.
    pub secrets: u64,
    /// Listeners that serve it alone or with others; any that no realm names, if there is none.
    pub listen: Vec<String>,
    /// TLS and DTLS server names that lead to it.
    pub server_names: Vec<String>,
}

/// What a store says of a realm; where the configuration says something else, that is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredRealm {
    /// REALM.
    pub name: String,
    /// The most sessions that it may have.
    pub max_sessions: Option<u64>,
    /// The most that each of its users may have.
    pub max_sessions_per_user: Option<u64>,
    /// Web pages whose clients are led to it.
    pub origins: Vec<String>,
}

/// A realm to be served beside those of the configuration, or to get other limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
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
    /// The most that there may be; of times, in seconds, and of buffers, in bytes.
    pub most: u64,
    /// How much of it is taken, where that is one number.
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
    /// Sessions that came in here and exist now.
    pub sessions: u64,
    /// What these have relayed to peers.
    pub to_peer: Traffic,
    /// What these have relayed to clients.
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
    /// Whether DTLS can use it, too.
    pub dtls: bool,
}

/// All workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Workers {
    /// By number.
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
    /// What a datagram would have waited for it just now, in microseconds; none if it did not answer.
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
    /// What was relayed to peers.
    pub to_peer: Traffic,
    /// What was relayed to clients.
    pub to_client: Traffic,
    /// Datagrams that the kernel dropped because the worker was too slow.
    pub kernel_drops: u64,
    /// Datagrams dropped for any reason of ours; `/metrics` has them by reason.
    pub dropped: u64,
}

/// How log lines are filtered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LogLevel {
    /// `error`, `warn`, `info`, `debug`, `trace`, `off`, or directives such as `info,turnpike_relay=debug`.
    #[schema(example = "info")]
    pub level: String,
}

/// How to drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
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

/// What a reload has changed.
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
    /// What is wrong here, and what to do instead.
    pub detail: String,
    /// Which problem it is, for programs.
    #[schema(value_type = String, example = "no_such_session")]
    pub code: Box<str>,
    /// One line a mistake, where there may be several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}
