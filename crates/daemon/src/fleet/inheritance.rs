//! What a node gives to the process that takes its place, so that the fleet sees one and the same node: its name's process, its number, its keys,
//! what it holds of quotas, and who is banned. From the offer on nothing is exchanged about quotas, until that process does it or it comes to
//! nothing.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use serde::{Deserialize, Serialize};
use turnpike_fleet::{Ban, NodeName, Opened, StoreEpoch, Subject, Told};

use super::{Fleet, node::Node};

/// Of a server, be it in a fleet or not.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct FleetOffer {
    pub(super) bans: Vec<Ban>,
    /// Subjects of these and of lifted bans that the other nodes have not heard of.
    #[serde(default)]
    pub(super) unannounced: Vec<Subject>,
    pub(super) node: Option<NodeOffer>,
}

/// Of a node.
#[derive(Serialize, Deserialize)]
pub(super) struct NodeOffer {
    pub(super) identity: Identity,
    pub(super) incarnation: u64,
    /// 0 for none.
    pub(super) number: u16,
    pub(super) is_cordoned: bool,
    /// The key ring, sealed: whoever has another secret shall not be this node.
    pub(super) ring: Option<Vec<u8>>,
    /// Whether clients may have something that was made with the server's own key.
    pub(super) own_is_used: bool,
    pub(super) told: Vec<Told>,
    /// The era of the store and the nodes that are known, if the store knows what all of them hold.
    #[serde(default)]
    pub(super) era: Option<(StoreEpoch, u32)>,
    /// Messages that were carried out.
    #[serde(default)]
    pub(super) opened: Opened,
}

/// Which node of which fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) store: String,
    pub(super) fleet: NodeName,
    pub(super) node: NodeName,
}

/// The part of an upgrade that is the fleet's. Dropped before it is released, all goes on as before.
pub(crate) struct FleetEstate {
    fleet: Arc<Fleet>,
    is_released: AtomicBool,
}

impl FleetEstate {
    pub(crate) fn new(fleet: Arc<Fleet>) -> Self {
        Self { fleet, is_released: AtomicBool::new(false) }
    }

    /// What the other process has to know. Waits for what is under way; not to be called on the runtime's thread.
    pub(crate) fn offer(&self) -> FleetOffer {
        let Fleet { banned, node, .. } = &*self.fleet;
        FleetOffer {
            bans: banned.list(),
            unannounced: banned.unannounced(),
            node: node.as_deref().map(Node::offer),
        }
    }

    /// The other process is the node from now on.
    pub(crate) fn release(&self) {
        self.is_released.store(true, Ordering::Relaxed);
        self.fleet.banned.clear_unannounced();
        if let Some(node) = &self.fleet.node {
            node.hand_over();
        }
    }
}

impl Drop for FleetEstate {
    fn drop(&mut self) {
        if let Some(node) = self.fleet.node.as_ref().filter(|_| !self.is_released.load(Ordering::Relaxed)) {
            node.resume_exchanges();
        }
    }
}
