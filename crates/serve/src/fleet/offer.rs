//! Fleet state passed to a new process, so that the fleet sees the same node: incarnation, number, keys,
//! quotas and bans.

use serde::{Deserialize, Serialize};
use turnpike_fleet::{Ban, NodeName, OpenedMessages, StoreEpoch, Subject, Told};

/// Exists even if no fleet is configured, because bans do not need one.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct FleetOffer {
    pub(super) bans: Vec<Ban>,
    /// Banned and unbanned subjects that the other nodes do not know about.
    #[serde(default)]
    pub(super) unannounced: Vec<Subject>,
    pub(super) node: Option<NodeOffer>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct NodeOffer {
    pub(super) identity: NodeIdentity,
    pub(super) incarnation: u64,
    pub(super) number: u16,
    pub(super) is_cordoned: bool,
    /// Sealed key ring. A process with a different secret cannot open it, so it does not become this
    /// node.
    pub(super) ring: Option<Vec<u8>>,
    /// Clients may have nonces, tickets or cookies made with the server's own key.
    pub(super) own_is_used: bool,
    pub(super) told: Vec<Told>,
    /// Epoch of the store and number of known nodes, if the store knows the quotas that all of them
    /// hold.
    #[serde(default)]
    pub(super) era: Option<(StoreEpoch, u32)>,
    #[serde(default)]
    pub(super) opened: OpenedMessages,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeIdentity {
    pub(super) store: String,
    pub(super) fleet: NodeName,
    pub(super) node: NodeName,
}
