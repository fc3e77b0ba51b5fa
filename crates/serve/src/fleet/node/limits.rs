//! Quotas of a node, and how the state of the store affects them.

use std::sync::atomic::Ordering;

use turnpike_fleet::{Books, EpochChange, EpochState, LeaseTerms};
use turnpike_relay::SharedQuota;
use turnpike_turn::server::{QuotaRefusal, UserRef};

use super::OwnNode;
use crate::fleet::quotas::Buckets;

/// Maximum delay before a node registers again with a store that has lost data. Below this maximum, the
/// range of random delays grows by `REJOIN_MS_A_NODE` with each node.
const REJOIN_MS: u64 = 2000;
const REJOIN_MS_A_NODE: u64 = 10;

impl OwnNode {
    /// Registers everything with the store again, after a random delay that keeps all nodes from doing so at
    /// the same time.
    pub(in crate::fleet) fn tell_all_anew(&self) {
        let within = (u64::from(self.nodes()) * REJOIN_MS_A_NODE).clamp(1, REJOIN_MS);
        self.quiet_until.store(self.now_ms() + rand::random::<u64>() % within, Ordering::Relaxed);
        self.rereads.store(true, Ordering::Relaxed);
        self.quotas.tell_all(self.terms());
        if self.quotas.lost() == 0 {
            self.recovery.speak_soon();
        }
    }

    pub(in crate::fleet) fn is_quiet(&self) -> bool {
        self.now_ms() < self.quiet_until.load(Ordering::Relaxed)
    }

    pub(in crate::fleet) fn terms(&self) -> LeaseTerms {
        LeaseTerms {
            nodes: self.nodes(),
            enforced: !self.is_alone() && !self.inherits.load(Ordering::Relaxed),
            books: self.recovery.books(),
        }
    }

    pub(in crate::fleet) fn acquire(&self, asked: SharedQuota<'_>) -> Result<(), QuotaRefusal> {
        let total = match self.setting(|settings| settings.allocations) {
            0 => u32::MAX,
            limit => limit,
        };
        self.quotas.acquire(&self.buckets(asked.user), &asked, total, self.terms())
    }

    pub(in crate::fleet) fn release(&self, user: UserRef<'_>) {
        self.quotas.release(&self.buckets(user));
    }

    pub(super) fn buckets(&self, UserRef { realm, identity }: UserRef<'_>) -> Buckets {
        let sealer = &self.sealer;
        Buckets { total: sealer.total(), realm: sealer.realm(realm), user: sealer.user(realm, identity) }
    }

    /// Number of allocations, including those imported from the previous process.
    pub(in crate::fleet) fn allocations(&self) -> u32 {
        self.quotas.used(&self.sealer.total())
    }

    pub(in crate::fleet) fn hear_era(&self, era: EpochState) {
        match self.recovery.hear(era) {
            EpochChange::Nothing => {}
            EpochChange::Begins => {
                let number = era.era.number;
                match self.recovery.books() {
                    Books::Whole => {
                        tracing::info!(
                            era = number,
                            "the fleet store has lost this node's data; sending it again"
                        );
                    }
                    Books::Recovering => tracing::warn!(
                        era = number,
                        "the fleet store was emptied or replaced; each node grants its equal share of quotas until all have registered again"
                    ),
                    Books::Unknown => tracing::info!(
                        era = number,
                        "the fleet store is empty; each node grants its equal share of quotas until all have had time to register"
                    ),
                }
                self.recovery.speak_soon();
            }
            EpochChange::Ends => {
                tracing::info!(
                    era = era.era.number,
                    "the fleet store knows all nodes' quotas again and grants new ones"
                );
                self.quotas.settle();
                self.rereads.store(true, Ordering::Relaxed);
            }
        }
    }

    /// True if the store answers but does not yet know the quotas that all nodes hold.
    pub(in crate::fleet) fn is_recovering(&self) -> bool {
        !self.is_alone() && self.recovery.books() != Books::Whole
    }
}
