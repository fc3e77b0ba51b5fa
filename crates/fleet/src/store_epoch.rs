//! What becomes of quotas when the store has lost what it knew: it was emptied, or another server took over that had not heard the last. From then on
//! it is in another era, and until it knows again what all nodes hold, it grants nothing.
//!
//! ```text
//!  store   ── era 7, whole ──╳╌╌ empty, or another server ╌╌── era 8: grants nothing ───────────────────── era 8, whole ──
//!                                                               │ a, who knows of 3 nodes, has told all      │
//!                                                               │ b has told all      c has told all ────────┘ or 5 s, and nobody tells any more
//!  node a  ── grants ────────── what it holds ──────────────────┴ claims what it holds, takes no more of what is half used ── grants ──
//! ```
//!
//! Whoever speaks to the store looks first whether that is still the server which the era began at. So nobody is granted anything by books that
//! somebody may be missing from, and no node has to notice anything in time: one that does not know of the new era is not heard before it does.
//! Only the store's own clock is used, and only to say how long something lasts.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{lease::Books, members::BEAT_MS};

/// Those who have lost the store for less than the 3 s after which they count for themselves have found it again by then.
pub const SETTLE_MS: u64 = 5 * BEAT_MS;
/// Nodes that had not seen one another yet have that time, even if all that are known have told all.
pub const SHORTEST_MS: u64 = BEAT_MS;
/// So long a node is waited for that tells what it holds, from its last beat on.
pub const TELLING_MS: u64 = 3 * BEAT_MS;
/// Nobody is waited for any more after that.
pub const LONGEST_MS: u64 = 120 * BEAT_MS;

/// A time for which the store has lost nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreEpoch {
    /// Each has a higher one than all before that anybody knows; 0 is none.
    pub number: u64,
    /// When it began, by the clock of the store. Two may have begun with one number, at servers that knew nothing of each other.
    pub since_ms: u64,
}

/// What the store says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochState {
    /// The one that it is in.
    pub era: StoreEpoch,
    /// Whether it knows what all nodes hold, as far as can be expected.
    pub is_whole: bool,
}

/// How far a node is with telling what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// What the store has of it is not given back yet.
    #[default]
    None,
    /// It tells.
    Telling,
    /// It has told all.
    Done,
}

/// What a node says of itself with each beat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The one that it knows of.
    pub era: StoreEpoch,
    /// How many nodes it knew, itself included, before the store had lost anything; 0 for one that has begun since.
    pub members: u32,
    /// How far it is.
    pub progress: Progress,
}

/// What the store keeps of its era. Its scripts do the same.
#[derive(Clone, Debug, Default)]
pub struct Chronicle {
    era: StoreEpoch,
    /// Which server, and which start of it.
    run: String,
    until_ms: u64,
    is_whole: bool,
    expected: u32,
    told: BTreeSet<String>,
}

impl Chronicle {
    /// Somebody speaks to the store, who knows of an era of this number. This is server `run`.
    pub fn look(&mut self, now_ms: u64, run: &str, known: u64) -> EpochState {
        if self.era.number == 0 || self.run != run || known > self.era.number {
            let number = self.era.number.max(known) + 1;
            let era = StoreEpoch { number, since_ms: now_ms };
            *self = Self { era, run: run.to_owned(), until_ms: now_ms + SETTLE_MS, ..Self::default() };
        }
        // Its clock may have been set back.
        self.until_ms = self.until_ms.min(now_ms + SETTLE_MS);
        self.is_whole |= now_ms >= self.until_ms;
        self.state()
    }

    /// A node reports, after the look.
    pub fn report(&mut self, now_ms: u64, name: &str, report: Report) -> EpochState {
        let Report { era, members, progress } = report;
        if self.is_whole || era != self.era || progress == Progress::None {
            return self.state();
        }
        self.expected = self.expected.max(members);
        let age_ms = now_ms.saturating_sub(self.era.since_ms);
        if progress == Progress::Telling {
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

/// What a node has to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Go on.
    Nothing,
    /// The store has lost something: what it has left of this node is to be given back, and all told anew.
    Begins,
    /// The store grants again, or for the first time.
    Ends,
}

/// What a node knows of it.
#[derive(Clone, Debug, Default)]
pub struct Recovery {
    era: StoreEpoch,
    books: Books,
    /// Nodes that it knew when the store was last whole.
    members: u32,
    /// Nodes that it has seen last.
    seen: u32,
    /// What the store had of this node when the era began is to be given back.
    is_to_clear: bool,
}

impl Recovery {
    /// Of a process that takes the place of another, for which the store was whole.
    #[must_use]
    pub fn after(era: StoreEpoch, members: u32) -> Self {
        Self { era, books: Books::Whole, members, seen: members, is_to_clear: false }
    }

    /// The store has said so.
    pub fn hear(&mut self, EpochState { era, is_whole }: EpochState) -> Turn {
        let before = std::mem::replace(&mut self.era, era);
        let books = match (is_whole, self.members) {
            (true, _) => Books::Whole,
            (false, 0) => Books::Unknown,
            (false, _) => Books::Recovering,
        };
        let was = std::mem::replace(&mut self.books, books);
        if before != era && (before.number > 0 || !is_whole) {
            self.is_to_clear = true;
            Turn::Begins
        } else if was != books {
            self.members = self.members.max(self.seen);
            Turn::Ends
        } else {
            Turn::Nothing
        }
    }

    /// This node has seen so many, itself included.
    pub fn looked(&mut self, members: u32) {
        self.seen = members.max(1);
        if self.books == Books::Whole {
            self.members = self.seen;
        }
    }

    /// What the store had of this node in that era is given back.
    pub fn cleared(&mut self, era: StoreEpoch) {
        self.is_to_clear &= self.era != era;
    }

    /// Whether something is to be given back still. Until then nothing is told: it would be given back as well.
    #[must_use]
    pub fn is_to_clear(&self) -> bool {
        self.is_to_clear
    }

    /// For the next beat; so much is to be told still.
    #[must_use]
    pub fn report(&self, lost: usize) -> Report {
        let progress = match (self.is_to_clear, lost) {
            (true, _) => Progress::None,
            (false, 0) => Progress::Done,
            (false, _) => Progress::Telling,
        };
        Report { era: self.era, members: self.members, progress }
    }

    /// The one that was heard of last.
    #[must_use]
    pub fn era(&self) -> StoreEpoch {
        self.era
    }

    /// Nodes that it knew when the store was last whole; 0 if it never was.
    #[must_use]
    pub fn members(&self) -> u32 {
        self.members
    }

    /// What the store knows.
    #[must_use]
    pub fn books(&self) -> Books {
        self.books
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn done(era: StoreEpoch, members: u32) -> Report {
        Report { era, members, progress: Progress::Done }
    }

    #[test]
    fn an_era_ends_with_the_server_with_its_books_and_with_who_knows_of_a_later_one() {
        let mut store = Chronicle::default();
        let first = store.look(1000, "a", 0);
        assert_eq!(first, EpochState { era: StoreEpoch { number: 1, since_ms: 1000 }, is_whole: false });
        assert_eq!(store.look(2000, "a", 1), first);
        assert_eq!(store.look(3000, "b", 1).era, StoreEpoch { number: 2, since_ms: 3000 }, "another server");
        assert_eq!(
            store.look(4000, "b", 7).era,
            StoreEpoch { number: 8, since_ms: 4000 },
            "older than somebody"
        );
        let mut emptied = Chronicle::default();
        assert_eq!(emptied.look(5000, "b", 8).era, StoreEpoch { number: 9, since_ms: 5000 });
    }

    #[test]
    fn the_books_are_whole_when_all_have_told_that_anybody_knew() {
        let mut store = Chronicle::default();
        let era = store.look(0, "a", 6).era;
        assert!(!store.report(1000, "one", done(era, 2)).is_whole);
        assert!(!store.report(1000, "one", done(era, 2)).is_whole, "it counts once");
        assert!(!store.report(1100, "new", done(era, 0)).is_whole, "nobody has waited for that one");
        assert!(!store.report(1200, "two", done(era, 3)).is_whole, "there is one more");
        assert!(
            !store.report(1300, "three", done(StoreEpoch { number: 6, ..era }, 3)).is_whole,
            "of another era"
        );
        assert!(store.report(1400, "three", done(era, 3)).is_whole);
        assert!(store.look(1500, "a", 7).is_whole);
        assert!(!store.look(1500, "b", 7).is_whole, "another server");
    }

    #[test]
    fn who_had_just_come_has_a_moment_to_say_so() {
        let mut store = Chronicle::default();
        let era = store.look(0, "a", 0).era;
        assert!(!store.report(SHORTEST_MS - 1, "one", done(era, 1)).is_whole);
        assert!(store.report(SHORTEST_MS, "one", done(era, 1)).is_whole);
    }

    #[test]
    fn nobody_is_waited_for_longer_than_some_seconds_but_who_tells() {
        let mut store = Chronicle::default();
        let era = store.look(0, "a", 0).era;
        store.report(1000, "one", done(era, 3));
        assert!(!store.look(SETTLE_MS - 1, "a", 1).is_whole);
        assert!(store.clone().look(SETTLE_MS, "a", 1).is_whole);
        let telling = Report { era, members: 3, progress: Progress::Telling };
        store.report(SETTLE_MS - 1, "two", telling);
        assert!(!store.clone().look(SETTLE_MS - 1 + TELLING_MS - 1, "a", 1).is_whole);
        assert!(store.clone().look(SETTLE_MS - 1 + TELLING_MS, "a", 1).is_whole);
        for beat in 5..=200 {
            store.look(beat * BEAT_MS, "a", 1);
            store.report(beat * BEAT_MS, "two", telling);
        }
        assert!(store.look(LONGEST_MS + TELLING_MS, "a", 1).is_whole, "it never comes to an end");
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_make_it_longer() {
        let mut store = Chronicle::default();
        store.look(3_600_000, "a", 0);
        assert!(!store.look(1000, "a", 1).is_whole);
        assert!(store.look(1000 + SETTLE_MS, "a", 1).is_whole);
    }

    #[test]
    fn a_node_holds_what_it_knows_until_the_store_is_whole_again() {
        let said = |number, is_whole| EpochState { era: StoreEpoch { number, since_ms: 0 }, is_whole };
        let mut node = Recovery::default();
        assert_eq!((node.books(), node.hear(said(1, true))), (Books::Unknown, Turn::Ends));
        node.looked(3);
        assert_eq!(node.hear(said(1, true)), Turn::Nothing);
        assert_eq!(node.hear(said(2, false)), Turn::Begins);
        assert_eq!(node.books(), Books::Recovering);
        node.looked(1);
        assert_eq!(node.report(7), Report { era: said(2, false).era, members: 3, progress: Progress::None });
        node.cleared(said(1, true).era);
        assert!(node.is_to_clear(), "that was another one");
        node.cleared(said(2, true).era);
        assert_eq!((node.report(7).progress, node.report(0).progress), (Progress::Telling, Progress::Done));
        assert_eq!((node.hear(said(2, true)), node.books()), (Turn::Ends, Books::Whole));
        assert_eq!((node.hear(said(3, true)), node.books()), (Turn::Begins, Books::Whole), "it comes late");
    }

    #[test]
    fn a_node_that_begins_while_the_store_recovers_knows_nothing_until_that_is_over() {
        let said = |number, is_whole| EpochState { era: StoreEpoch { number, since_ms: 0 }, is_whole };
        let mut node = Recovery::default();
        assert_eq!((node.hear(said(1, false)), node.books()), (Turn::Begins, Books::Unknown));
        node.looked(3);
        node.cleared(said(1, false).era);
        assert_eq!(node.report(0).members, 0);
        assert_eq!((node.hear(said(2, false)), node.books()), (Turn::Begins, Books::Unknown));
        assert_eq!((node.hear(said(2, true)), node.books()), (Turn::Ends, Books::Whole));
        assert_eq!(node.report(0).members, 3, "now it knows as much as the others");
        assert_eq!((node.hear(said(3, false)), node.books()), (Turn::Begins, Books::Recovering));
    }

    proptest! {
        /// Whatever servers, clocks and nodes say: books are whole some time after an era has begun, and not before all have told who are known.
        #[test]
        fn an_era_becomes_whole_and_not_too_soon(
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
                let progress = [Progress::None, Progress::Telling, Progress::Done][usize::from(progress)];
                let after = store.report(now, &node.to_string(), Report { era: state.era, members, progress });
                if progress != Progress::None {
                    expected = expected.max(members);
                }
                if progress == Progress::Done && members > 0 {
                    told.insert(node);
                }
                let all = u32::try_from(told.len()).unwrap() >= expected && expected > 0;
                prop_assert!(!after.is_whole || all || now - begun >= SETTLE_MS || state.is_whole);
                prop_assert!(after.is_whole || !state.is_whole);
            }
        }
    }
}
