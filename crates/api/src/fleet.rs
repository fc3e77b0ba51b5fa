//! Administration of a fleet, and its state as JSON.

use serde::{Deserialize, Serialize};
use turnpike_fleet::{
    Ban, ForwardedRequest, LONGEST_BAN_S, NodeName, Ordered, PeerAnswer, Rights, Subject, Unbanned,
};
use utoipa::ToSchema;

use crate::Later;

/// Administers a fleet from one of its nodes; bans work even without a fleet.
pub trait FleetAdmin: Send + Sync + 'static {
    /// Name of this node; `None` without a fleet.
    fn node(&self) -> Option<String>;
    /// The fleet as seen by this node; `None` without a fleet.
    fn status(&self) -> Option<FleetStatus>;
    fn health(&self) -> FleetHealth;
    /// Redirects new clients of a node to others, or lets it accept clients again. Its allocations
    /// continue.
    fn set_draining<'a>(&'a self, node: &'a str, drains: bool) -> Later<'a, Result<(), FleetError>>;
    fn ask(&self, request: PeerRequest) -> Later<'_, Result<PeerAnswer, FleetError>>;
    /// Next request from another node; `None` when the server stops.
    fn next_question(&self) -> Later<'_, Option<(ForwardedRequest, Reply)>>;
    /// Active bans, sorted by expiry.
    fn bans(&self) -> Vec<Ban>;
    /// Bans a subject on all nodes, and ends its allocations here. Without a fleet, the ban lasts only as
    /// long as this process.
    fn ban(&self, ban: Ban) -> Later<'_, Result<Ordered, FleetError>>;
    /// Lifts a ban that this node or the store knows of.
    fn unban(&self, subject: Subject) -> Later<'_, Result<Unbanned, FleetError>>;
    /// Announces to all nodes that a user's credential was changed or removed.
    fn revoked(&self, realm: String, name: String) -> Later<'_, ()>;
    /// Makes all nodes read the secrets, realms and limits in the store again.
    fn rules_changed(&self) -> Later<'_, ()>;
}

/// A request to the admin interface of another node.
#[derive(Clone, Debug)]
pub struct PeerRequest {
    pub node: String,
    /// `GET` or `DELETE`.
    pub method: String,
    /// Path with the query.
    pub path: String,
    pub rights: Rights,
    /// The client, for the audit log.
    pub by: String,
}

/// Sends the answer to the requesting node.
pub type Reply = Box<dyn FnOnce(PeerAnswer) + Send>;

/// State of a node with respect to its fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetHealth {
    /// Serving; in no fleet, or with current data from the other nodes.
    Healthy,
    /// Serving, but without current data from the other nodes.
    Isolated,
    /// Serving; until the store knows the usage of all nodes, each node grants its equal share of quotas.
    Recovering,
    /// An administrator redirects its new clients elsewhere.
    Cordoned,
}

/// Reason why a command failed; each message includes what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    #[error("this server is not in a fleet: set fleet.url to the fleet's store")]
    NoFleet,
    #[error("there is no node {0:?} in the fleet; `turnpike fleet status` lists them")]
    NoSuchNode(String),
    #[error("node {0} does not answer: it may have stopped, or have a different fleet.secret")]
    Silent(NodeName),
    /// The fleet's store does not answer.
    #[error("{0}")]
    Store(String),
    /// The ban is too short or too long.
    #[error("a ban lasts from 1 second to {} days", LONGEST_BAN_S / 86_400)]
    Length,
}

/// Servers that form one service, as seen by one of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Fleet)]
pub struct FleetStatus {
    /// Name of the fleet: `fleet.name`.
    pub name: String,
    /// The queried node.
    pub node: String,
    /// Address of the fleet's store, without its password.
    pub store: String,
    /// Reason why the queried node has no recent data from the others; null if it has such data. If set, the other
    /// fields are outdated.
    pub alone: Option<String>,
    /// True if the store is new, was emptied or was replaced. Until it knows the usage of all nodes, each
    /// node grants its equal share of quotas.
    #[serde(default)]
    pub recovering: bool,
    /// The version of the keys that all nodes share.
    pub keys: u64,
    /// All nodes by name, including the queried one.
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
    /// Its state for new clients.
    pub state: NodeState,
    /// Seconds since its last heartbeat.
    pub silent_s: f64,
    /// `fleet.zone`; empty if not set.
    pub zone: String,
    /// Version of the program; null before it is known.
    pub version: Option<String>,
    /// The highest of its load figures: 0 is idle, 1 is full.
    pub busy: f64,
    /// Its current allocations.
    pub allocations: u64,
    /// Limit on its allocations.
    pub max_allocations: u64,
    /// Relayed payload in bits per second, both directions together.
    pub bits_per_second: u64,
    /// Configured capacity in bits per second.
    pub max_bits_per_second: Option<u64>,
    /// Recent CPU use of its busiest worker as a share of a core, 0 to 1.
    pub cpu: f64,
    /// Free relay ports.
    pub relay_ports_left: u64,
    /// All relay ports.
    pub relay_ports: u64,
    /// Addresses for clients, such as `tls://203.0.113.5:5349`.
    pub addresses: Vec<String>,
}

/// State of a node for new clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// It accepts new clients.
    Serving,
    /// It is full.
    Full,
    /// It accepts no new clients.
    Draining,
    /// Its heartbeats are missing.
    Silent,
}

/// Command to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeOrder {
    /// Its name.
    pub node: String,
    /// True if the node accepts no new clients.
    pub drains: bool,
}
