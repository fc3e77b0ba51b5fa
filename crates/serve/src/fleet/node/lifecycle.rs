//! Startup, draining, handover and shutdown of a node.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::timeout_at;
use turnpike_fleet::Notice;
use turnpike_relay::Relay;
use turnpike_stores::StoreError;

use super::OwnNode;
use crate::fleet::{
    keys::seal_ring,
    offer::{NodeIdentity, NodeOffer},
};

const LAST_WORDS: Duration = Duration::from_secs(3);

impl OwnNode {
    pub(in crate::fleet) fn begin(&self, relay: &Arc<Relay>) {
        let _ = self.relay.set(Arc::downgrade(relay));
        self.inherits.store(false, Ordering::Relaxed);
        self.put_keys();
        if self.is_draining() {
            relay.set_draining(true);
        }
    }

    pub(in crate::fleet) fn goes_on(&self) -> bool {
        self.goes_on
    }

    pub(in crate::fleet) fn is_over(&self) -> bool {
        self.left.load(Ordering::Relaxed) || self.is_relay_gone()
    }

    /// True if messages from other nodes no longer matter.
    pub(in crate::fleet) fn is_deaf(&self) -> bool {
        self.is_over() && (!self.is_handed_over() || self.is_relay_gone())
    }

    pub(in crate::fleet) fn is_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::Relaxed)
    }

    fn is_relay_gone(&self) -> bool {
        self.relay.get().is_some_and(|relay| relay.strong_count() == 0)
    }

    pub(in crate::fleet) fn is_cordoned(&self) -> bool {
        self.cordoned.load(Ordering::Relaxed)
    }

    /// True if no new clients are accepted, for any reason.
    pub(in crate::fleet) fn is_draining(&self) -> bool {
        self.is_cordoned() || self.stops.load(Ordering::Relaxed)
    }

    pub(in crate::fleet) fn set_cordoned(&self, cordoned: bool) {
        if self.cordoned.swap(cordoned, Ordering::Relaxed) == cordoned {
            return;
        }
        if cordoned {
            tracing::info!("drained: new clients are redirected to other nodes; serve keeps running");
        } else {
            tracing::info!("uncordoned: accepting new clients again");
        }
        if let Some(relay) = self.relay() {
            relay.set_draining(self.is_draining());
        }
    }

    /// True if the node is draining but not about to stop.
    pub(in crate::fleet) fn only_drains(&self) -> bool {
        self.is_cordoned() && !self.stops.load(Ordering::Relaxed)
    }

    pub(in crate::fleet) fn stop_taking(&self) {
        self.stops.store(true, Ordering::Relaxed);
    }

    /// Exports the state for the new process. Blocks until an exchange in progress has finished.
    pub(in crate::fleet) fn offer(&self) -> NodeOffer {
        self.rests.store(true, Ordering::Relaxed);
        drop(self.exchanging.blocking_lock());
        let custody = self.custody();
        NodeOffer {
            identity: NodeIdentity {
                store: self.store.name().to_owned(),
                fleet: self.setting(|settings| settings.name.clone()),
                node: self.name.clone(),
            },
            incarnation: self.incarnation,
            number: self.number(),
            is_cordoned: self.is_cordoned(),
            ring: custody.ring().map(|ring| seal_ring(&self.sealer, ring)),
            own_is_used: custody.own().1,
            told: self.quotas.told(),
            era: self.recovery.offer(),
            opened: self.opened().clone(),
        }
    }

    pub(in crate::fleet) fn resume_exchanges(&self) {
        self.rests.store(false, Ordering::Relaxed);
    }

    pub(in crate::fleet) fn rests(&self) -> bool {
        self.rests.load(Ordering::Relaxed)
    }

    /// Stops publishing, because the new process is now this node. This process now only listens for
    /// bans.
    pub(in crate::fleet) fn hand_over(&self) {
        self.handed_over.store(true, Ordering::Relaxed);
        self.left.store(true, Ordering::Relaxed);
    }

    /// Announces the departure and deletes the node's records, so that other nodes need not wait for a
    /// timeout.
    pub(in crate::fleet) async fn leave(&self) {
        if self.left.swap(true, Ordering::Relaxed) || self.number() == 0 {
            return;
        }
        let goodbye = async {
            self.say(Notice::Left { incarnation: self.incarnation }).await?;
            while self.store.reap(&self.name, self.number(), true).await? {}
            Ok::<_, StoreError>(())
        };
        let end = tokio::time::Instant::now() + LAST_WORDS;
        match timeout_at(end, goodbye).await {
            Ok(Ok(())) => tracing::info!("this node has left the fleet"),
            Ok(Err(error)) => {
                tracing::warn!("{error}; the other nodes will notice this departure only after a timeout");
            }
            Err(_) => {
                tracing::warn!(
                    "the fleet store is slow; the other nodes will notice this departure only after a timeout"
                );
            }
        }
        // Done after the departure notice, which must not wait for this.
        if !matches!(timeout_at(end, self.announce_orders()).await, Ok(Ok(()))) {
            let orders = self.banned.unannounced().len();
            tracing::warn!(orders, "left the fleet before all bans and unbans reached the other nodes");
        }
    }
}
