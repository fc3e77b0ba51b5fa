//! Other servers that are one service with this one.

use serde::{Deserialize, Serialize};
use turnpike_fleet::{Answer, Ban, LONGEST_BAN_S, NodeName, Ordered, Question, Rights, Subject, Unbanned};
use utoipa::ToSchema;

use crate::Later;

/// Administers a fleet at one of its nodes; bans work without a fleet, too.
pub trait FleetAdmin: Send + Sync + 'static {
    /// Name of this node; `None` without a fleet.
    fn node(&self) -> Option<String>;
    /// The fleet, as this node sees it; `None` without one.
    fn status(&self) -> Option<FleetStatus>;
    /// State of this node among the others.
    fn health(&self) -> FleetHealth;
    /// Sends new clients of a node to others, or lets it take clients again. Its sessions go on.
    fn set_draining<'a>(&'a self, node: &'a str, drains: bool) -> Later<'a, Result<(), FleetError>>;
    /// Sends a request to the admin interface of another node.
    fn ask(&self, request: PeerRequest) -> Later<'_, Result<Answer, FleetError>>;
    /// The next request of another node; `None` when the server ends.
    fn next_question(&self) -> Later<'_, Option<(Question, Reply)>>;
    /// Bans in force, sorted by their end.
    fn bans(&self) -> Vec<Ban>;
    /// Bans a user or an address on all nodes, and ends their sessions here. Without a fleet the ban lasts as long as this process.
    fn ban(&self, ban: Ban) -> Later<'_, Result<Ordered, FleetError>>;
    /// Ends a ban that this node or the store knows of.
    fn unban(&self, subject: Subject) -> Later<'_, Result<Unbanned, FleetError>>;
    /// Tells all nodes that a user has another credential, or none.
    fn revoked(&self, realm: String, name: String) -> Later<'_, ()>;
    /// Has all nodes read secrets, realms and limits of the store again.
    fn rules_changed(&self) -> Later<'_, ()>;
}

/// A request to the admin interface of another node.
#[derive(Clone, Debug)]
pub struct PeerRequest {
    /// Name of the node.
    pub node: String,
    /// `GET` or `DELETE`.
    pub method: String,
    /// With the query.
    pub path: String,
    /// Rights of the client here.
    pub rights: Rights,
    /// The client, for the audit log.
    pub by: String,
}

/// The way back to the node that asked.
pub type Reply = Box<dyn FnOnce(Answer) + Send>;

/// State of a node among the others of its fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetHealth {
    /// It takes clients, and is in no fleet or knows the others.
    Healthy,
    /// It takes clients, and does not know the state of the others.
    Isolated,
    /// Serving; until the store knows what all nodes have, each serves its equal share of quotas.
    Recovering,
    /// An administrator sends its new clients elsewhere.
    Cordoned,
}

/// Why an order was not carried out; each message says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    /// The server is in no fleet.
    #[error("this server is in no fleet: name its store in fleet.url")]
    NoFleet,
    /// No node has this name.
    #[error("there is no node {0:?} in the fleet; `turnpike fleet status` lists them")]
    NoSuchNode(String),
    /// The node does not answer.
    #[error("node {0} does not answer: it may have ended, or have another fleet.secret")]
    Silent(NodeName),
    /// The fleet's store does not answer.
    #[error("{0}")]
    Store(String),
    /// A ban that is over before it begins, or too long.
    #[error("a ban lasts from 1 second to {} days", LONGEST_BAN_S / 86_400)]
    Length,
}

/// Servers that are one service, as one of them sees them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Fleet)]
pub struct FleetStatus {
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
