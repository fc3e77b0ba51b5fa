//! Recovery of quotas after the store has lost data: it was emptied, or a lagging replica took over. The
//! store then starts a new epoch, and grants nothing until it knows again what all nodes hold.
//!
//! ```text
//!  store   ── epoch 7, whole ──╳╌╌ empty, or another server ╌╌── epoch 8: grants nothing ─────────────────── epoch 8, whole ──
//!                                                                 │ a, who knows of 3 nodes, has reported      │
//!                                                                 │ b has reported      c has reported ────────┘ or 5 s without a report in progress
//!  node a  ── grants ────────── keeps its quota ───────────────────┴ claims its quota, and no more of half-used limits ── grants ──
//! ```
//!
//! Each request first checks that the store is still the server on which the epoch began. Therefore, no
//! grant is based on incomplete records, and no node has to notice the loss in time: requests from nodes
//! that do not know the new epoch are ignored. Only the store's own clock is used, and only for durations.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{lease::Books, members::BEAT_MS};

/// Duration of the recovery, unless a node is still reporting. By then, nodes that lost the store for less
/// than 3 s have reconnected; a node that lost it for longer uses its own limits.
pub const SETTLE_MS: u64 = 5 * BEAT_MS;
/// Minimum duration of the recovery, even if all known nodes have reported, because nodes may not know each
/// other yet.
pub const SHORTEST_MS: u64 = BEAT_MS;
/// Maximum wait for a node that is reporting, counted from its last heartbeat.
pub const TELLING_MS: u64 = 3 * BEAT_MS;
/// Maximum duration of the recovery.
pub const LONGEST_MS: u64 = 120 * BEAT_MS;

/// A period in which the store has lost nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreEpoch {
    /// Higher than every earlier number known to any node; 0 means no epoch.
    pub number: u64,
    /// Start of the epoch by the store's clock. Distinguishes epochs of the same number on unrelated servers.
    pub since_ms: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochState {
    pub era: StoreEpoch,
    /// All nodes expected to report their quotas have done so.
    pub is_whole: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EpochProgress {
    /// The old records of this node have not been removed yet.
    #[default]
    None,
    Telling,
    Done,
}

/// Report that a node sends with each heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeReport {
    /// Epoch that the node knows.
    pub era: StoreEpoch,
    /// Number of nodes that it knew before the loss, including itself; 0 for a node that has started since
    /// then.
    pub members: u32,
    pub progress: EpochProgress,
}

/// The store's record of its epoch; the store's scripts follow the same rules.
#[derive(Clone, Debug, Default)]
pub struct Chronicle {
    era: StoreEpoch,
    /// Identifies the server process; changes with every restart.
    run: String,
    until_ms: u64,
    is_whole: bool,
    expected: u32,
    told: BTreeSet<String>,
}

impl Chronicle {
    /// Handles a request from a node that knows epoch number `known`, on server `run`.
    pub fn look(&mut self, now_ms: u64, run: &str, known: u64) -> EpochState {
        if self.era.number == 0 || self.run != run || known > self.era.number {
            let number = self.era.number.max(known) + 1;
            let era = StoreEpoch { number, since_ms: now_ms };
            *self = Self { era, run: run.to_owned(), until_ms: now_ms + SETTLE_MS, ..Self::default() };
        }
        // The clock may have been set back.
        self.until_ms = self.until_ms.min(now_ms + SETTLE_MS);
        self.is_whole |= now_ms >= self.until_ms;
        self.state()
    }

    /// Handles a node's report after [`Self::look`].
    pub fn report(&mut self, now_ms: u64, name: &str, report: NodeReport) -> EpochState {
        let NodeReport { era, members, progress } = report;
        if self.is_whole || era != self.era || progress == EpochProgress::None {
            return self.state();
        }
        self.expected = self.expected.max(members);
        let age_ms = now_ms.saturating_sub(self.era.since_ms);
        if progress == EpochProgress::Telling {
            if age_ms < LONGEST_MS {
                self.until_ms = self.until_ms.max(now_ms + TELLING_MS);
            }
        } else if members > 0 {
            self.told.insert(name.to_owned());
        }
        let told = u32::try_from(self.told.len()).unwrap_or(u32::MAX);
        self.is_whole = self.expected > 0 && told >= self.expected && age_ms >= SHORTEST_MS;
        self.state()
    }

    fn state(&self) -> EpochState {
        EpochState { era: self.era, is_whole: self.is_whole }
    }
}

/// Action for a node after a change of the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpochChange {
    Nothing,
    /// The store has lost data: remove the remaining records of this node and report everything again.
    Begins,
    /// The store grants quotas, again or for the first time.
    Ends,
}

/// A node's view of the epoch.
#[derive(Clone, Debug, Default)]
pub struct Recovery {
    era: StoreEpoch,
    books: Books,
    /// Number of nodes that this node knew when the store was last complete.
    members: u32,
    /// Number of nodes at the last read.
    seen: u32,
    /// The records of this node from before the epoch must be removed.
    is_to_clear: bool,
}

impl Recovery {
    /// State of a process that takes over while the store is complete.
    #[must_use]
    pub fn after(era: StoreEpoch, members: u32) -> Self {
        Self { era, books: Books::Whole, members, seen: members, is_to_clear: false }
    }

    /// Applies the store's state.
    pub fn hear(&mut self, EpochState { era, is_whole }: EpochState) -> EpochChange {
        let before = std::mem::replace(&mut self.era, era);
        let books = match (is_whole, self.members) {
            (true, _) => Books::Whole,
            (false, 0) => Books::Unknown,
            (false, _) => Books::Recovering,
        };
        let was = std::mem::replace(&mut self.books, books);
        if before != era && (before.number > 0 || !is_whole) {
            self.is_to_clear = true;
            EpochChange::Begins
        } else if was != books {
            self.members = self.members.max(self.seen);
            EpochChange::Ends
        } else {
            EpochChange::Nothing
        }
    }

    /// Sets the number of known nodes, including this one.
    pub fn looked(&mut self, members: u32) {
        self.seen = members.max(1);
        if self.books == Books::Whole {
            self.members = self.seen;
        }
    }

    /// Notes that the records of this node were removed in that epoch.
    pub fn cleared(&mut self, era: StoreEpoch) {
        self.is_to_clear &= self.era != era;
    }

    /// Returns true until the old records are removed. Reports sent earlier would be removed with them.
    #[must_use]
    pub fn is_to_clear(&self) -> bool {
        self.is_to_clear
    }

    /// Report for the next heartbeat; `lost` buckets remain to be reported.
    #[must_use]
    pub fn report(&self, lost: usize) -> NodeReport {
        let progress = match (self.is_to_clear, lost) {
            (true, _) => EpochProgress::None,
            (false, 0) => EpochProgress::Done,
            (false, _) => EpochProgress::Telling,
        };
        NodeReport { era: self.era, members: self.members, progress }
    }

    /// Last known epoch.
    #[must_use]
    pub fn era(&self) -> StoreEpoch {
        self.era
    }

    /// Number of nodes known when the store was last complete; 0 if it never was.
    #[must_use]
    pub fn members(&self) -> u32 {
        self.members
    }

    #[must_use]
    pub fn books(&self) -> Books {
        self.books
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn done(era: StoreEpoch, members: u32) -> NodeReport {
        NodeReport { era, members, progress: EpochProgress::Done }
    }

    #[test]
    fn epoch_ends_with_a_new_server_or_a_later_epoch() {
        let mut store = Chronicle::default();
        let first = store.look(1000, "a", 0);
        assert_eq!(first, EpochState { era: StoreEpoch { number: 1, since_ms: 1000 }, is_whole: false });
        assert_eq!(store.look(2000, "a", 1), first);
        assert_eq!(store.look(3000, "b", 1).era, StoreEpoch { number: 2, since_ms: 3000 }, "another server");
        assert_eq!(
            store.look(4000, "b", 7).era,
            StoreEpoch { number: 8, since_ms: 4000 },
            "older than a node's epoch"
        );
        let mut emptied = Chronicle::default();
        assert_eq!(emptied.look(5000, "b", 8).era, StoreEpoch { number: 9, since_ms: 5000 });
    }

    #[test]
    fn epoch_is_complete_when_all_known_nodes_have_reported() {
        let mut store = Chronicle::default();
        let era = store.look(0, "a", 6).era;
        assert!(!store.report(1000, "one", done(era, 2)).is_whole);
        assert!(!store.report(1000, "one", done(era, 2)).is_whole, "a repeated report counts once");
        assert!(!store.report(1100, "new", done(era, 0)).is_whole, "the store does not wait for a new node");
        assert!(!store.report(1200, "two", done(era, 3)).is_whole, "one node is missing");
        assert!(
            !store.report(1300, "three", done(StoreEpoch { number: 6, ..era }, 3)).is_whole,
            "another epoch"
        );
        assert!(store.report(1400, "three", done(era, 3)).is_whole);
        assert!(store.look(1500, "a", 7).is_whole);
        assert!(!store.look(1500, "b", 7).is_whole, "another server");
    }

    #[test]
    fn new_nodes_have_a_moment_to_report() {
        let mut store = Chronicle::default();
        let era = store.look(0, "a", 0).era;
        assert!(!store.report(SHORTEST_MS - 1, "one", done(era, 1)).is_whole);
        assert!(store.report(SHORTEST_MS, "one", done(era, 1)).is_whole);
    }

    #[test]
    fn only_reporting_nodes_extend_the_wait() {
        let mut store = Chronicle::default();
        let era = store.look(0, "a", 0).era;
        store.report(1000, "one", done(era, 3));
        assert!(!store.look(SETTLE_MS - 1, "a", 1).is_whole);
        assert!(store.clone().look(SETTLE_MS, "a", 1).is_whole);
        let telling = NodeReport { era, members: 3, progress: EpochProgress::Telling };
        store.report(SETTLE_MS - 1, "two", telling);
        assert!(!store.clone().look(SETTLE_MS - 1 + TELLING_MS - 1, "a", 1).is_whole);
        assert!(store.clone().look(SETTLE_MS - 1 + TELLING_MS, "a", 1).is_whole);
        for beat in 5..=200 {
            store.look(beat * BEAT_MS, "a", 1);
            store.report(beat * BEAT_MS, "two", telling);
        }
        assert!(store.look(LONGEST_MS + TELLING_MS, "a", 1).is_whole, "the wait is bounded");
    }

    #[test]
    fn clock_set_back_does_not_extend_the_epoch() {
        let mut store = Chronicle::default();
        store.look(3_600_000, "a", 0);
        assert!(!store.look(1000, "a", 1).is_whole);
        assert!(store.look(1000 + SETTLE_MS, "a", 1).is_whole);
    }

    #[test]
    fn node_keeps_its_quota_until_the_store_is_complete() {
        let said = |number, is_whole| EpochState { era: StoreEpoch { number, since_ms: 0 }, is_whole };
        let mut node = Recovery::default();
        assert_eq!((node.books(), node.hear(said(1, true))), (Books::Unknown, EpochChange::Ends));
        node.looked(3);
        assert_eq!(node.hear(said(1, true)), EpochChange::Nothing);
        assert_eq!(node.hear(said(2, false)), EpochChange::Begins);
        assert_eq!(node.books(), Books::Recovering);
        node.looked(1);
        assert_eq!(
            node.report(7),
            NodeReport { era: said(2, false).era, members: 3, progress: EpochProgress::None }
        );
        node.cleared(said(1, true).era);
        assert!(node.is_to_clear(), "the node has cleared another epoch");
        node.cleared(said(2, true).era);
        assert_eq!(
            (node.report(7).progress, node.report(0).progress),
            (EpochProgress::Telling, EpochProgress::Done)
        );
        assert_eq!((node.hear(said(2, true)), node.books()), (EpochChange::Ends, Books::Whole));
        assert_eq!(
            (node.hear(said(3, true)), node.books()),
            (EpochChange::Begins, Books::Whole),
            "the state arrives late"
        );
    }

    #[test]
    fn node_started_during_recovery_knows_nothing_until_the_recovery_ends() {
        let said = |number, is_whole| EpochState { era: StoreEpoch { number, since_ms: 0 }, is_whole };
        let mut node = Recovery::default();
        assert_eq!((node.hear(said(1, false)), node.books()), (EpochChange::Begins, Books::Unknown));
        node.looked(3);
        node.cleared(said(1, false).era);
        assert_eq!(node.report(0).members, 0);
        assert_eq!((node.hear(said(2, false)), node.books()), (EpochChange::Begins, Books::Unknown));
        assert_eq!((node.hear(said(2, true)), node.books()), (EpochChange::Ends, Books::Whole));
        assert_eq!(node.report(0).members, 3, "the node knows as much as the others");
        assert_eq!((node.hear(said(3, false)), node.books()), (EpochChange::Begins, Books::Recovering));
    }

    proptest! {
        /// An epoch always becomes complete in the end, but not before all known nodes have reported or the
        /// wait is over.
        #[test]
        fn epoch_becomes_complete_but_not_too_soon(
            steps in prop::collection::vec((0_u64..3000, 0_u8..4, 0_u32..5, 0_u8..3, 0_u8..12), 1..80),
        ) {
            let (mut store, mut now, mut run, mut begun) = (Chronicle::default(), 1_000_000_u64, 0, 0);
            let mut told = BTreeSet::new();
            let mut expected = 0;
            for (passed, node, members, progress, other) in steps {
                now += passed;
                run += u64::from(other == 0);
                let before = store.era;
                let state = store.look(now, &run.to_string(), before.number);
                if state.era != before {
                    prop_assert!(state.era.number > before.number && !state.is_whole);
                    (begun, expected) = (now, 0);
                    told.clear();
                }
                prop_assert!(now - begun < LONGEST_MS + TELLING_MS || state.is_whole);
                let progress = [EpochProgress::None, EpochProgress::Telling, EpochProgress::Done][usize::from(progress)];
                let after = store.report(now, &node.to_string(), NodeReport { era: state.era, members, progress });
                if progress != EpochProgress::None {
                    expected = expected.max(members);
                }
                if progress == EpochProgress::Done && members > 0 {
                    told.insert(node);
                }
                let all = u32::try_from(told.len()).unwrap() >= expected && expected > 0;
                prop_assert!(!after.is_whole || all || now - begun >= SETTLE_MS || state.is_whole);
                prop_assert!(after.is_whole || !state.is_whole);
            }
        }
    }
}
