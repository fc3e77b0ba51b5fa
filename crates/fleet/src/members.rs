//! The nodes of a fleet, as seen by one of them. A node is a member once its card has been read; only nodes
//! with the fleet's secret can write cards. A node is gone when its record has not changed for a long time.
//! Only time during which the store responded to us is counted, so that a store outage removes no node, and
//! clocks of different machines are never compared. Redirects to a node stop much sooner: when its record is
//! old by the store's clock, or another node has reported the record as overdue.

use std::{collections::BTreeMap, sync::Arc};

use crate::node::{Beat, Card, NodeName};

/// Milliseconds between two heartbeats of a node.
pub const BEAT_MS: u64 = 1000;
/// Maximum age of a record whose node has missed no heartbeat.
const LATE_MS: u64 = BEAT_MS + BEAT_MS / 4;
/// Time without a heartbeat after which no clients are redirected to a node.
const DOUBTFUL_MS: u64 = 2500;
/// Time without a heartbeat after which a node is gone. Longer than the reconnect back-off after a store
/// outage.
pub const GONE_MS: u64 = 10_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRecord {
    pub name: NodeName,
    /// Time of the write by the store's clock, in milliseconds.
    pub stamp_ms: u64,
    pub beat: Beat,
}

#[derive(Clone, Debug)]
pub struct FleetMember {
    pub card: Option<Arc<Card>>,
    pub beat: Beat,
    pub silent_ms: u64,
    stamp_ms: u64,
    /// Age of the last record by the store's clock, limited to the time for which the store has been
    /// responding to us.
    age_ms: u64,
    /// Another node has reported this member's record as overdue.
    is_doubted: bool,
    /// A new card is available, and replaces the old one once it has been read.
    has_new_card: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    /// A new node, or a new process of a known node, whose card has been read.
    Joined(NodeName),
    /// The node's record is overdue: no clients are redirected to the node.
    Silent { name: NodeName, incarnation: u64 },
    /// The node has sent no heartbeat for too long, or has left; its quotas are to be returned.
    Gone { name: NodeName, number: u16 },
}

#[derive(Clone, Debug, Default)]
pub struct FleetMembers {
    nodes: BTreeMap<NodeName, FleetMember>,
    looked_ms: Option<u64>,
}

impl FleetMembers {
    /// Applies the store's records, read at `now_ms` by our clock and `store_ms` by the store's. The store
    /// has responded to every request for `steady_ms`.
    pub fn look(
        &mut self,
        now_ms: u64,
        store_ms: u64,
        steady_ms: u64,
        records: Vec<NodeRecord>,
    ) -> Vec<MemberChange> {
        let since = self.looked_ms.replace(now_ms).map_or(0, |before| now_ms.saturating_sub(before));
        // During an outage, the other nodes could not write either.
        let passed = since.min(steady_ms);
        let mut changes = Vec::new();
        for member in self.nodes.values_mut() {
            member.silent_ms += passed;
        }
        for NodeRecord { name, stamp_ms, beat } in records {
            // The age of a new record can only be determined with the store's clock.
            let age_ms = store_ms.saturating_sub(stamp_ms);
            let known = self.nodes.get_mut(&name);
            match known.filter(|known| known.beat.incarnation == beat.incarnation) {
                Some(known) => {
                    let was_heard = known.is_heard_but_for(passed);
                    if known.stamp_ms != stamp_ms {
                        (known.stamp_ms, known.silent_ms, known.beat) = (stamp_ms, 0, beat);
                        known.is_doubted = false;
                    }
                    known.age_ms = age_ms.min(steady_ms);
                    if was_heard && known.age_ms >= DOUBTFUL_MS && known.card.is_some() {
                        changes.push(MemberChange::Silent { name, incarnation: beat.incarnation });
                    }
                }
                None if age_ms < GONE_MS => {
                    let member = FleetMember {
                        card: None,
                        beat,
                        silent_ms: age_ms,
                        stamp_ms,
                        age_ms: 0,
                        is_doubted: false,
                        has_new_card: false,
                    };
                    self.nodes.insert(name, member);
                }
                None => {}
            }
        }
        let gone = self.nodes.extract_if(.., |_, member| member.silent_ms >= GONE_MS);
        let gone = gone.filter(|(_, member)| member.card.is_some());
        changes.extend(gone.map(|(name, member)| MemberChange::Gone { name, number: member.beat.number }));
        changes
    }

    pub fn without_card(&self) -> Vec<NodeName> {
        let missing = self.nodes.iter().filter(|(_, member)| member.card.is_none() || member.has_new_card);
        missing.map(|(name, _)| name.clone()).collect()
    }

    pub fn has_new_card(&mut self, name: &NodeName) {
        if let Some(member) = self.nodes.get_mut(name) {
            member.has_new_card = true;
        }
    }

    pub fn put_card(&mut self, card: Card) -> Option<MemberChange> {
        let incarnation = card.incarnation;
        let member = self.nodes.get_mut(&card.name).filter(|it| it.beat.incarnation == incarnation)?;
        let joined = member.card.is_none().then(|| MemberChange::Joined(card.name.clone()));
        (member.card, member.has_new_card) = (Some(Arc::new(card)), false);
        joined
    }

    /// Handles another node's report that this node's record is overdue. Returns true if that was not known
    /// yet.
    pub fn doubt(&mut self, name: &NodeName, incarnation: u64) -> bool {
        let Some(member) = self.nodes.get_mut(name) else { return false };
        let is_news = member.beat.incarnation == incarnation && member.is_heard();
        member.is_doubted |= is_news;
        is_news
    }

    /// Handles a node's announcement that it is leaving.
    pub fn left(&mut self, name: &NodeName, incarnation: u64) -> Option<MemberChange> {
        let member = self.nodes.get(name).filter(|member| member.beat.incarnation == incarnation)?;
        let (number, was_known) = (member.beat.number, member.card.is_some());
        self.nodes.remove(name);
        was_known.then(|| MemberChange::Gone { name: name.clone(), number })
    }

    pub fn iter(&self) -> impl Iterator<Item = (&NodeName, &FleetMember)> {
        self.nodes.iter().filter(|(_, member)| member.card.is_some())
    }

    #[must_use]
    pub fn get(&self, name: &NodeName) -> Option<&FleetMember> {
        self.nodes.get(name).filter(|member| member.card.is_some())
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl FleetMember {
    /// True if clients may be redirected to this node.
    #[must_use]
    pub fn is_heard(&self) -> bool {
        self.is_heard_but_for(0)
    }

    /// True if the node has missed no heartbeat. Clients that could be served here are not redirected to a
    /// late node: it may have failed, and look idle only because the other nodes get its clients.
    #[must_use]
    pub fn is_on_time(&self) -> bool {
        self.is_heard() && self.age_ms <= LATE_MS
    }

    /// Like [`Self::is_heard`], but ignores the last `passed_ms` without a heartbeat.
    fn is_heard_but_for(&self, passed_ms: u64) -> bool {
        !self.is_doubted && self.silent_ms.saturating_sub(passed_ms).max(self.age_ms) < DOUBTFUL_MS
    }
}

/// Conflict over a node name. The store refuses a name while the record of another incarnation is fresh. A
/// killed process leaves such a record behind; a live one keeps renewing it.
#[derive(Clone, Debug, Default)]
pub struct NameConflict {
    /// The conflicting record, and the time it was first seen.
    seen: Option<(String, u64)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameVerdict {
    Wait,
    /// The record has not changed for long enough: take over the name by presenting this record.
    TakeOver(String),
    /// The record has changed: another live process has the name.
    Taken,
}

impl NameConflict {
    /// Handles the store's refusal of the name at `now_ms` because of this record.
    pub fn refused(&mut self, now_ms: u64, record: &str) -> NameVerdict {
        match &self.seen {
            Some((seen, _)) if seen != record => {
                self.seen = Some((record.to_owned(), now_ms));
                NameVerdict::Taken
            }
            Some((_, since)) if now_ms.saturating_sub(*since) >= DOUBTFUL_MS => {
                NameVerdict::TakeOver(record.to_owned())
            }
            Some(_) => NameVerdict::Wait,
            None => {
                self.seen = Some((record.to_owned(), now_ms));
                NameVerdict::Wait
            }
        }
    }

    pub fn granted(&mut self) {
        self.seen = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::Load;

    fn name(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn record(of: &str, stamp_ms: u64, incarnation: u64) -> NodeRecord {
        let beat = Beat { number: 7, incarnation, draining: false, load: Load::default() };
        NodeRecord { name: name(of), stamp_ms, beat }
    }

    fn card(of: &str, incarnation: u64, version: &str) -> Card {
        Card {
            name: name(of),
            incarnation,
            zone: String::new(),
            version: version.to_owned(),
            entrances: Vec::new(),
            domain: None,
        }
    }

    /// Applies records with our clock and that of a store one hour ahead, and reads all cards.
    fn look(members: &mut FleetMembers, now_ms: u64, records: Vec<NodeRecord>) -> Vec<MemberChange> {
        look_at(members, (now_ms, now_ms + 3_600_000, u64::MAX), records)
    }

    fn look_at(
        members: &mut FleetMembers,
        (now_ms, store_ms, steady_ms): (u64, u64, u64),
        records: Vec<NodeRecord>,
    ) -> Vec<MemberChange> {
        let cards: Vec<Card> =
            records.iter().map(|it| card(it.name.as_str(), it.beat.incarnation, "1")).collect();
        let mut changes = members.look(now_ms, store_ms, steady_ms, records);
        changes.extend(cards.into_iter().filter_map(|card| members.put_card(card)));
        changes
    }

    /// A node has no card if its secret is wrong or the store refused it.
    #[test]
    fn node_without_a_card_is_not_a_member() {
        let mut members = FleetMembers::default();
        let mut changes = Vec::new();
        for now in (0..30_000).step_by(1000) {
            let beats = if now < 15_000 { now } else { 15_000 };
            changes.extend(members.look(now, now, u64::MAX, vec![record("a", beats, 1)]));
            assert!(
                members.is_empty() && members.get(&name("a")).is_none() && members.iter().next().is_none()
            );
        }
        assert_eq!(changes, []);
        let mut members = FleetMembers::default();
        members.look(0, 0, u64::MAX, vec![record("a", 0, 1)]);
        assert_eq!(members.left(&name("a"), 1), None);
        members.look(1000, 1000, u64::MAX, vec![record("a", 1000, 1)]);
        assert_eq!(members.put_card(card("a", 1, "1")), Some(joined("a")));
        assert_eq!((members.put_card(card("a", 1, "2")), members.len()), (None, 1));
    }

    fn joined(of: &str) -> MemberChange {
        MemberChange::Joined(name(of))
    }

    fn silent(of: &str) -> MemberChange {
        MemberChange::Silent { name: name(of), incarnation: 1 }
    }

    fn gone(of: &str) -> MemberChange {
        MemberChange::Gone { name: name(of), number: 7 }
    }

    #[test]
    fn node_is_a_member_while_its_record_changes() {
        let mut members = FleetMembers::default();
        let at = |ms: u64| 3_600_000 + ms;
        assert_eq!(look(&mut members, 0, vec![record("a", at(0), 1)]), [joined("a")]);
        for beat in 1..10 {
            let now = beat * BEAT_MS;
            assert!(look(&mut members, now, vec![record("a", at(now), 1)]).is_empty());
            assert!(members.get(&name("a")).unwrap().is_heard());
        }
        let last = record("a", at(9000), 1);
        for (now, heard, change) in [
            (10_000, true, None),
            (11_000, true, None),
            (12_000, false, Some(silent("a"))),
            (18_000, false, None),
            (19_000, false, Some(gone("a"))),
        ] {
            let heard_now = |members: &FleetMembers| members.get(&name("a")).is_some_and(|it| it.is_heard());
            assert_eq!(look(&mut members, now, vec![last.clone()]), Vec::from_iter(change), "{now}");
            assert_eq!(heard_now(&members), heard, "{now}");
        }
        assert!(look(&mut members, 20_000, vec![last]).is_empty(), "an old record is not a member");
    }

    #[test]
    fn node_is_late_after_a_missed_heartbeat() {
        let mut members = FleetMembers::default();
        for (now, stamp, on_time) in
            [(0, 0, true), (900, 0, true), (1900, 1000, true), (2900, 1000, false), (3000, 3000, true)]
        {
            look(&mut members, now, vec![record("a", 3_600_000 + stamp, 1)]);
            let node = members.get(&name("a")).unwrap();
            assert_eq!((node.is_heard(), node.is_on_time()), (true, on_time), "{now}");
        }
    }

    /// Nodes of a fleet of a thousand read only every five seconds, so a record can be old when first seen.
    #[test]
    fn record_that_is_old_when_first_seen_is_distrusted_by_all() {
        let (mut one, mut other) = (FleetMembers::default(), FleetMembers::default());
        let at = |ms: u64| 3_600_000 + ms;
        for members in [&mut one, &mut other] {
            look(members, 0, vec![record("a", at(0), 1)]);
            assert!(!members.doubt(&name("b"), 1) && !members.doubt(&name("a"), 2), "no such process");
        }
        // The node has sent one more heartbeat and then stopped.
        assert_eq!(look(&mut one, 5000, vec![record("a", at(1000), 1)]), [silent("a")]);
        assert!(look(&mut one, 5100, vec![record("a", at(1000), 1)]).is_empty(), "already known");
        assert!(!one.get(&name("a")).unwrap().is_heard(), "the record is four seconds old");
        let heard = |members: &FleetMembers| members.get(&name("a")).unwrap().is_heard();
        assert!(heard(&other) && other.doubt(&name("a"), 1) && !heard(&other));
        assert!(!other.doubt(&name("a"), 1), "already known");
        assert!(look(&mut other, 5500, vec![record("a", at(5400), 1)]).is_empty());
        assert!(heard(&other), "the node was only late");
    }

    #[test]
    fn outage_or_data_loss_removes_no_node() {
        let mut members = FleetMembers::default();
        let at = |ms: u64| 3_600_000 + ms;
        let both = |ms| vec![record("a", at(ms), 1), record("b", at(ms), 2)];
        look(&mut members, 0, both(0));
        // After an hour, the store has been responding again for 200 ms, with old records.
        let back = 3_600_000;
        assert!(look_at(&mut members, (back, 2 * back, 200), both(0)).is_empty());
        // The store is empty: the nodes have a few heartbeats to reconnect.
        for beat in 1..10 {
            let now = back + beat * BEAT_MS;
            assert!(look_at(&mut members, (now, 2 * now, 200 + beat * BEAT_MS), vec![]).is_empty());
        }
        let now = back + 10 * BEAT_MS;
        let changes = look_at(&mut members, (now, now, 200 + 10 * BEAT_MS), vec![record("a", now, 1)]);
        assert_eq!(changes, [gone("b")]);
    }

    #[test]
    fn new_process_with_the_same_name_needs_its_own_card() {
        let mut members = FleetMembers::default();
        let look = |members: &mut FleetMembers, ms, incarnation| {
            members.look(ms, ms, u64::MAX, vec![record("a", ms, incarnation)])
        };
        assert_eq!((look(&mut members, 0, 1), members.without_card()), (vec![], vec![name("a")]));
        assert_eq!(members.put_card(card("a", 2, "1")), None, "another process");
        assert_eq!(members.put_card(card("a", 1, "1")), Some(joined("a")));
        assert!(members.without_card().is_empty());
        assert_eq!((look(&mut members, 1000, 2), members.len()), (vec![], 0));
        assert_eq!(members.without_card(), [name("a")]);
        assert_eq!(members.put_card(card("a", 2, "1")), Some(joined("a")));
        assert_eq!(members.left(&name("a"), 1), None);
        assert_eq!(members.left(&name("a"), 2), Some(gone("a")));
        assert!(members.is_empty());
    }

    #[test]
    fn old_card_is_used_until_the_new_one_is_read() {
        let mut members = FleetMembers::default();
        look(&mut members, 0, vec![record("a", 3_600_000, 1)]);
        members.has_new_card(&name("b"));
        assert!(members.without_card().is_empty(), "no node has that name");
        members.has_new_card(&name("a"));
        let version =
            |members: &FleetMembers| members.get(&name("a")).unwrap().card.as_ref().unwrap().version.clone();
        assert_eq!((members.without_card(), version(&members)), (vec![name("a")], "1".to_owned()));
        members.put_card(card("a", 1, "2"));
        assert_eq!((members.without_card(), version(&members)), (vec![], "2".to_owned()));
    }

    #[test]
    fn name_is_refused_while_renewed_and_taken_over_from_a_dead_process() {
        let mut claim = NameConflict::default();
        for now in [0, 1000, 2000] {
            assert_eq!(claim.refused(now, "1 7 a"), NameVerdict::Wait);
        }
        assert_eq!(claim.refused(2500, "1 7 a"), NameVerdict::TakeOver("1 7 a".to_owned()));
        let mut claim = NameConflict::default();
        assert_eq!(claim.refused(0, "1 7 a"), NameVerdict::Wait);
        assert_eq!(claim.refused(1000, "2 7 a"), NameVerdict::Taken);
        assert_eq!(claim.refused(2000, "3 7 a"), NameVerdict::Taken);
        assert_eq!(claim.refused(3000, "3 7 a"), NameVerdict::Wait);
        assert_eq!(claim.refused(4500, "3 7 a"), NameVerdict::TakeOver("3 7 a".to_owned()));
        claim.granted();
        assert_eq!(claim.refused(9000, "3 7 a"), NameVerdict::Wait);
    }
}
