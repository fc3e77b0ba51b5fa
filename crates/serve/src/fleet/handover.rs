//! Handover of this node's fleet membership to a new process. After the offer, this process exchanges no
//! quotas unless the upgrade fails.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::{FleetMembership, node::OwnNode, offer::FleetOffer};

/// The fleet's part of an upgrade. If dropped without [`FleetHandover::forget`], it resumes normal service.
pub(crate) struct FleetHandover {
    fleet: Arc<FleetMembership>,
    is_forgotten: AtomicBool,
}

impl FleetHandover {
    pub(crate) fn new(fleet: Arc<FleetMembership>) -> Self {
        Self { fleet, is_forgotten: AtomicBool::new(false) }
    }

    /// Exports the state. Blocks until exchanges in progress have finished, so it must not be called on the
    /// runtime's thread.
    pub(crate) fn offer(&self) -> FleetOffer {
        let FleetMembership { banned, node, .. } = &*self.fleet;
        FleetOffer {
            bans: banned.list(),
            unannounced: banned.unannounced(),
            node: node.as_deref().map(OwnNode::offer),
        }
    }

    pub(crate) fn forget(&self) {
        self.is_forgotten.store(true, Ordering::Relaxed);
        self.fleet.banned.clear_unannounced();
        if let Some(node) = &self.fleet.node {
            node.hand_over();
        }
    }
}

impl Drop for FleetHandover {
    fn drop(&mut self) {
        if let Some(node) = self.fleet.node.as_ref().filter(|_| !self.is_forgotten.load(Ordering::Relaxed)) {
            node.resume_exchanges();
        }
    }
}
