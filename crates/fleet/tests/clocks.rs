//! Clocks with offset and drift. Nodes, store and delays are simulated; messages, bans and keys are real.

use std::collections::BTreeMap;

use proptest::prelude::*;
use turnpike_fleet::{
    Ban, Bans, Beat, Card, FleetMembers, GONE_MS, KeyRing, Load, MemberChange, Message, NodeName, NodeRecord,
    Notice, OrphanedQuota, Sealer, Subject,
};

use crate::chance::Chance;

const BEGIN: u64 = 1_800_000_000;
const HEARD_S: u64 = 120;

#[derive(Clone, Copy, Debug)]
struct Clock {
    ahead_s: i64,
    /// Microseconds gained per second.
    drift: i64,
}

impl Clock {
    /// The clock's reading this many milliseconds after the start.
    fn unix(self, ms: u64) -> u64 {
        let drifted = i64::try_from(ms).unwrap() * self.drift / 1_000_000_000;
        (BEGIN + ms / 1000).checked_add_signed(self.ahead_s + drifted).unwrap()
    }
}

/// Clocks that differ by at most this much during the hour of the test.
fn clocks(differ_s: i64, nodes: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Clock>> {
    let most = differ_s / 2 - 1;
    let clock = (-most..=most, -100_i64..=100).prop_map(|(ahead_s, drift)| Clock { ahead_s, drift });
    prop::collection::vec(clock, nodes)
}

fn card(name: NodeName) -> Card {
    let (zone, version) = (String::new(), String::new());
    Card { name, incarnation: 1, zone, version, entrances: Vec::new(), domain: None }
}

fn alice() -> Subject {
    "user alice@here".parse().unwrap()
}

fn is_banned(bans: &Bans, unix: u64) -> bool {
    bans.has(unix, "here", ["alice", "alice"], [192, 0, 2, 1].into())
}

#[derive(Default)]
struct Kept(BTreeMap<String, Ban>);

impl Kept {
    fn put(&mut self, ban: Ban) {
        self.0.insert(ban.subject.to_string(), ban);
    }

    fn all(&self) -> Vec<Ban> {
        self.0.values().cloned().collect()
    }

    fn forget(&mut self, bans: &mut Bans, unix: u64) {
        bans.expire(unix).iter().for_each(|subject| _ = self.0.remove(&subject.to_string()));
    }
}

fn order_away(bans: &mut Bans, unix: u64, order: &Order, id: u64) {
    match order {
        Order::Ban(ends) => bans.order(Ban::new(alice(), BEGIN + ends, String::new()).with_id(id)),
        Order::Lift => _ = bans.order_lift(unix, &alice()),
    }
}

/// A node announces its pending command to the store; returns the message to the others.
fn announce(bans: &mut Bans, unix: u64, kept: &mut Kept) -> (Order, Ban) {
    let ban = bans.to_announce(unix, &alice(), &kept.all());
    ban.iter().for_each(|ban| kept.put(ban.clone()));
    bans.announced(&alice(), ban.as_ref());
    let ban = ban.unwrap_or_else(|| Ban::new(alice(), 0, String::new()));
    (if ban.until > 0 { Order::Ban(ban.until) } else { Order::Lift }, ban)
}

#[derive(Clone, Copy, Debug)]
enum Order {
    /// A ban until this many seconds after the start.
    Ban(u64),
    Lift,
}

fn orders() -> impl Strategy<Value = Vec<(u64, Order)>> {
    // Several bans with the same end must stay distinguishable.
    let ends = prop_oneof![Just(6000), 3000_u64..6000];
    let order = prop_oneof![ends.prop_map(Order::Ban), Just(Order::Lift)];
    prop::collection::vec((10_u64..400, order), 1..5)
}

proptest! {
    #![proptest_config(crate::cases(200))]

    #[test]
    fn message_is_accepted_for_about_two_minutes(
        sends in -300_i64..300,
        hears in -300_i64..300,
        way_ms in 0_u64..10_000,
    ) {
        let sealer = Sealer::new("secret");
        let [sends, hears] = [sends, hears].map(|ahead_s| Clock { ahead_s, drift: 0 });
        let message = Message { from: "a".parse().unwrap(), at: sends.unix(1000), notice: Notice::RulesChanged };
        let sealed = message.seal(&sealer, [1; 12]);
        let is_heard = |ms| Message::open(&sealer, hears.unix(ms), &sealed).is_some();
        let differ_ms = ((hears.ahead_s - sends.ahead_s) * 1000 + i64::try_from(way_ms).unwrap()).unsigned_abs();
        prop_assert!(is_heard(1000 + way_ms) || differ_ms > 1000 * (HEARD_S - 1), "{differ_ms} ms");
        prop_assert!(!is_heard(1000 + way_ms) || differ_ms < 1000 * (HEARD_S + 1), "{differ_ms} ms");
        if (hears.ahead_s - sends.ahead_s).unsigned_abs() <= HEARD_S {
            prop_assert!(!is_heard(1000 + 1000 * (2 * HEARD_S + 1)), "a replayed message is accepted");
        }
    }

    /// The store keeps a ban for as long as any node does, so that new nodes get it.
    #[test]
    fn ban_lasts_until_its_end_on_each_nodes_clock_and_reaches_new_nodes(
        clocks in clocks(120, 2..6),
        seconds in 1_u64..900,
    ) {
        let mut kept = Kept::default();
        let mut nodes = vec![Bans::default(); clocks.len()];
        let until = clocks[0].unix(0) + seconds;
        let ban = Ban::new(alice(), until, String::new());
        nodes.iter_mut().for_each(|bans| bans.put(ban.clone()));
        kept.put(ban);
        for second in 0..seconds + 4 * HEARD_S {
            for (at, (clock, bans)) in clocks.iter().zip(&mut nodes).enumerate() {
                let unix = clock.unix(1000 * second + 100 * at as u64);
                kept.forget(bans, unix);
                prop_assert_eq!(is_banned(bans, unix), unix < until, "second {}, node {}", second, at);
                let mut begins = Bans::default();
                begins.read(unix, &kept.all());
                prop_assert_eq!(is_banned(&begins, unix), unix < until, "second {}, a new node", second);
            }
        }
        prop_assert!(kept.0.is_empty() && nodes.iter().all(Bans::is_empty), "the ban is never removed");
    }
}

proptest! {
    // Failures need several coincidences, so run more cases.
    #![proptest_config(crate::cases(4000))]

    /// Nodes are disconnected for minutes while a ban is set and lifted, and the store may be emptied in the
    /// meantime. Once all nodes have reconnected, they agree on the last command. (Exception: if the store is
    /// emptied in the seconds in which a node that missed more than one command reconnects, it may get back
    /// an older ban.)
    #[test]
    fn disconnected_node_does_not_restore_a_lifted_ban(
        clocks in clocks(120, 2..5),
        orders in orders(),
        away in prop::collection::vec((0_u64..1500, 0_u64..900), 4),
        emptied in prop_oneof![Just(None), (0_u64..2000).prop_map(Some), Just(Some(u64::MAX))],
        anywhere: bool,
        seed: u64,
    ) {
        // Commands are also issued on disconnected nodes. They are announced on reconnect and take effect
        // then.
        let anywhere = anywhere && emptied.is_none();
        let emptied = emptied.map(|at| if at == u64::MAX { away[1].0 + away[1].1 + seed % 3 } else { at });
        let orders = if emptied.is_some() { vec![orders[0], (orders[0].0, Order::Lift)] } else { orders };
        let (mut kept, mut chance) = (Kept::default(), Chance::new(seed));
        let mut nodes = vec![Bans::default(); clocks.len()];
        // Notices sent, with their times.
        let mut said: Vec<(u64, Order, Ban)> = Vec::new();
        let mut gives_back = vec![None; clocks.len()];
        let is_there = |at: usize, second: u64| {
            let (from, seconds) = away[at];
            at == 0 || !(from..from + seconds).contains(&second)
        };
        let mut due: Vec<(u64, Order)> = Vec::new();
        orders.iter().fold(0, |second, (pause, order)| {
            due.push((second + pause, *order));
            second + pause
        });
        // The last command: its end by the issuer's clock if it was a ban.
        let mut last = None;
        for second in 0..2500 {
            let mut new = Vec::new();
            for (_, order) in due.iter().filter(|(at, _)| *at == second) {
                let by = loop {
                    let by = chance.below(clocks.len());
                    if anywhere || is_there(by, second) {
                        break by;
                    }
                };
                let unix = clocks[by].unix(1000 * second);
                if !is_there(by, second) {
                    let id = chance.next();
                    order_away(&mut nodes[by], unix, order, id);
                    continue;
                }
                let ban = match order {
                    Order::Ban(ends) => {
                        let ban = Ban::new(alice(), BEGIN + ends, String::new()).with_id(chance.next());
                        nodes[by].put(ban.clone());
                        last = Some(ban.until);
                        Some(ban)
                    }
                    // A node that does not know the ban lifts nothing.
                    Order::Lift => nodes[by].lift(unix, &alice()).inspect(|_| last = None),
                };
                if let Some(ban) = ban {
                    kept.put(ban.clone());
                    new.push((second, *order, ban));
                }
            }
            said.extend(new);
            let mut announced = Vec::new();
            let is_emptied = emptied == Some(second);
            if is_emptied {
                kept.0.clear();
            }
            for at in (0..clocks.len()).filter(|at| is_there(*at, second)) {
                let (unix, bans) = (clocks[at].unix(1000 * second), &mut nodes[at]);
                let comes_back = second > 0 && !is_there(at, second - 1);
                if comes_back || is_emptied || (second > 0 && emptied == Some(second - 1)) {
                    bans.read(unix, &kept.all());
                    gives_back[at] = Some(second + 2 + chance.next() % 4);
                }
                if bans.unannounced().count() > 0 {
                    let (order, ban) = announce(bans, unix, &mut kept);
                    last = Some(ban.until).filter(|until| *until > 0);
                    announced.push((second, order, ban));
                }
                // After reconnecting, the node receives the messages of the last two minutes.
                let from = if comes_back { second.saturating_sub(HEARD_S) } else { second };
                for (_, order, ban) in said.iter().filter(|(said, ..)| (from..=second).contains(said)) {
                    match order {
                        Order::Ban(_) => _ = bans.hear(ban.clone()),
                        Order::Lift => bans.hear_lift(unix, &alice()),
                    }
                }
                if gives_back[at] == Some(second) {
                    bans.missing(unix, &kept.all()).into_iter().for_each(|ban| kept.put(ban));
                }
                kept.forget(bans, unix);
            }
            // The other nodes receive the message in the next second.
            said.extend(announced.into_iter().map(|(at, order, ban)| (at + 1, order, ban)));
        }
        for (clock, bans) in clocks.iter().zip(&mut nodes) {
            let unix = clock.unix(2_500_000);
            bans.read(unix, &kept.all());
            prop_assert_eq!(is_banned(bans, unix), last.is_some_and(|until| unix < until));
        }
    }
}

proptest! {
    #![proptest_config(crate::cases(200))]

    /// No node uses a key that another connected node does not know, regardless of which node made it, and
    /// even if nodes are disconnected at times. Clocks may differ by the advance time minus some heartbeats.
    #[test]
    fn no_key_is_used_before_all_know_it(
        clocks in clocks(60 - 2 * BEATS_S as i64, 2..6),
        absences in absences(),
        rotation_s in 120_u64..600,
    ) {
        let fleet = Keys::new(&clocks, rotation_s).run(&absences);
        prop_assert_eq!(fleet.unknown, 0, "a key was used before all nodes knew it");
        prop_assert!(fleet.version() > 2, "no key was made");
    }

    /// Beyond that difference, a node that reads the ring late and whose clock is ahead of the maker's uses a
    /// key immediately; the others know the key one heartbeat later.
    #[test]
    fn key_is_known_one_heartbeat_after_its_creation(
        clocks in clocks(3600, 2..6),
        absences in absences(),
        rotation_s in 120_u64..600,
    ) {
        Keys::new(&clocks, rotation_s).run(&absences);
    }

    /// The store's clock is set forward and back by up to an hour. A node that sends heartbeats stays a
    /// member and keeps its quota. A dead one is gone after ten seconds, and its quota is returned soon after
    /// twenty. If the clock was set back, both happen later by that amount.
    #[test]
    fn store_clock_jumps_remove_no_live_node(
        sets in prop::collection::vec((30_u64..300, -3_600_000_i64..3_600_000), 0..4),
        dies in 100_u64..250,
        phases in prop::collection::vec(0_u64..1000, 3),
    ) {
        let (mut members, mut abandoned) = (FleetMembers::default(), OrphanedQuota::default());
        let mut set_ms: i64 = 0;
        let mut stamps = [0_u64; 3];
        let (mut gone, mut given_back) = (None, None);
        for ms in (0..300_000_u64).step_by(100) {
            let second = ms / 1000;
            if ms % 1000 == 0 {
                set_ms += sets.iter().filter(|(at, _)| *at == second).map(|(_, by)| by).sum::<i64>();
            }
            let store_ms = (BEGIN * 1000 + ms).checked_add_signed(set_ms).unwrap();
            for (at, stamp) in stamps.iter_mut().enumerate() {
                let beats = ms % 1000 / 100 == phases[at] / 100 && (at != 2 || second < dies);
                if beats || ms == 0 {
                    *stamp = store_ms;
                }
            }
            if ms % 1000 != 500 {
                continue;
            }
            let records: Vec<NodeRecord> = (0..3_usize)
                .map(|at| NodeRecord {
                    name: format!("n{at}").parse().unwrap(),
                    stamp_ms: stamps[at],
                    beat: Beat {
                        number: u16::try_from(at + 1).unwrap(),
                        incarnation: 1,
                        draining: false,
                        load: Load::default(),
                    },
                })
                .collect();
            for (name, number) in abandoned.look(ms, store_ms, ms, &records) {
                prop_assert!(number == 3 && second >= dies, "second {}: the quota of {} was returned", second, name);
                given_back.get_or_insert(ms);
            }
            let changes = members.look(ms, store_ms, ms, records);
            members.without_card().into_iter().for_each(|name| _ = members.put_card(card(name)));
            for change in changes {
                if let MemberChange::Gone { name, number } = change {
                    prop_assert!(number == 3 && second >= dies, "second {}: {} is gone", second, name);
                    gone.get_or_insert(ms);
                }
            }
        }
        let after = |at: Option<u64>| at.map(|ms| ms - dies * 1000);
        prop_assert!(after(gone).is_some_and(|ms| ms <= GONE_MS + 2000), "gone after {:?}", after(gone));
        let is_set_back = sets.iter().any(|(at, by)| *at + 2 >= dies && *by < 0);
        if dies < 250 && !is_set_back {
            prop_assert!(after(given_back).is_some_and(|ms| ms <= 2 * GONE_MS + 3000), "{:?}", after(given_back));
        }
    }
}

/// A node that is more than two minutes ahead removes a ban from the store early. The others still have it
/// and restore it at their next read; a node that starts in between does not know it.
#[test]
fn node_too_far_ahead_removes_a_ban_early() {
    let [right, ahead] = [0, 300].map(|ahead_s| Clock { ahead_s, drift: 0 });
    let (mut here, mut there, mut kept) = (Bans::default(), Bans::default(), Kept::default());
    let ban = Ban::new(alice(), right.unix(0) + 1000, String::new());
    [&mut here, &mut there].into_iter().for_each(|bans| bans.put(ban.clone()));
    kept.put(ban);
    let mut lacks = 0;
    for second in 0..1000 {
        kept.forget(&mut there, ahead.unix(1000 * second));
        kept.forget(&mut here, right.unix(1000 * second));
        assert!(is_banned(&here, right.unix(1000 * second)));
        lacks += u64::from(kept.0.is_empty());
    }
    assert_eq!(lacks, 300 - HEARD_S);
    assert_eq!(here.missing(right.unix(999_000), &kept.all()).len(), 1);
}

/// A node that is more than a minute ahead uses a new key as soon as it reads it; until their next heartbeat,
/// the others do not know it.
#[test]
fn node_too_far_ahead_uses_a_key_early() {
    for (ahead_s, is_too_soon) in [(50, false), (90, true)] {
        let clocks = [0, ahead_s, 0].map(|ahead_s| Clock { ahead_s, drift: 0 });
        // If the second node were connected, it would make the key itself.
        let absences = [Absence::default(), Absence { from: 100, after_a_key: 1 }, Absence::default()];
        let fleet = Keys::new(&clocks, 300).run(&absences);
        assert_eq!(fleet.unknown > 0, is_too_soon, "{ahead_s} s ahead");
    }
}

#[test]
fn old_key_is_kept_for_a_week_minus_the_clock_difference() {
    const WEEK_S: u64 = 7 * 86_400;
    let clocks = [-300, 0, 10, 300].map(|ahead_s| Clock { ahead_s, drift: 0 });
    let mut fleet = Keys::new(&clocks, 6 * 3600);
    let mut used: BTreeMap<[u8; 32], u64> = BTreeMap::new();
    for second in (0..16 * 86_400).step_by(60) {
        (0..clocks.len()).for_each(|at| fleet.beat(at, second));
        for at in 0..clocks.len() {
            used.insert(fleet.in_use(at, second), second);
        }
        let ring = fleet.stored.as_ref().unwrap();
        let is_kept = |key: &[u8; 32]| ring.keys().iter().any(|kept| kept.bytes == *key);
        for (key, last) in &used {
            assert!(second > last + WEEK_S - 600 || is_kept(key), "second {second}: last used at {last}");
        }
        assert!(ring.keys().len() <= 30, "second {second}: {} keys", ring.keys().len());
    }
}

const BEATS_S: u64 = 5;

/// A node loses the store at some second, and regains it some seconds after another node has made a key.
#[derive(Clone, Copy, Debug)]
struct Absence {
    from: u64,
    after_a_key: u64,
}

impl Default for Absence {
    fn default() -> Self {
        Self { from: u64::MAX, after_a_key: 0 }
    }
}

fn absences() -> impl Strategy<Value = Vec<Absence>> {
    let absence = (0_u64..1500, 0_u64..8).prop_map(|(from, after_a_key)| Absence { from, after_a_key });
    prop::collection::vec(prop_oneof![Just(Absence::default()), absence], 6)
}

struct Keys {
    clocks: Vec<Clock>,
    rings: Vec<Option<KeyRing>>,
    /// Connected nodes that have sent a heartbeat since reconnecting.
    there: Vec<bool>,
    stored: Option<KeyRing>,
    /// Second in which the key was made.
    made: u64,
    rotation_s: u64,
    unknown: u32,
}

impl Keys {
    fn new(clocks: &[Clock], rotation_s: u64) -> Self {
        let (rings, there) = (vec![None; clocks.len()], vec![false; clocks.len()]);
        Self { clocks: clocks.to_vec(), rings, there, stored: None, made: 0, rotation_s, unknown: 0 }
    }

    fn version(&self) -> u64 {
        self.stored.as_ref().map_or(0, |ring| ring.version)
    }

    fn in_use(&self, at: usize, second: u64) -> [u8; 32] {
        let unix = self.clocks[at].unix(1000 * second);
        let keys = self.rings[at].as_ref().unwrap().keys();
        keys.iter().rev().find(|key| key.from <= unix).unwrap_or(&keys[0]).bytes
    }

    fn knows(&self, at: usize, key: &[u8; 32]) -> bool {
        self.rings[at].as_ref().is_some_and(|ring| ring.keys().iter().any(|known| known.bytes == *key))
    }

    /// Simulates half an hour of heartbeats. After a heartbeat from all nodes, each knows the keys in use.
    fn run(mut self, absences: &[Absence]) -> Self {
        let nodes = self.clocks.len();
        let mut left: Vec<Option<u64>> = vec![None; nodes];
        let mut used: Vec<Vec<[u8; 32]>> = Vec::new();
        for second in 0..1800 {
            for at in 0..nodes {
                // The first node is always connected.
                let Absence { from, after_a_key } = absences[at];
                if at > 0 && second == from {
                    left[at] = Some(self.version());
                }
                let is_made = |version: &u64| *version < self.version() && second >= self.made + after_a_key;
                if left[at].as_ref().is_some_and(is_made) {
                    left[at] = None;
                }
                self.there[at] &= left[at].is_none();
                let is_its_turn = second % BEATS_S == at as u64 % BEATS_S || !self.there[at];
                if left[at].is_none() && is_its_turn {
                    self.beat(at, second);
                    self.count_unknown(second);
                }
            }
            self.count_unknown(second);
            let there: Vec<usize> = (0..nodes).filter(|at| self.there[*at]).collect();
            used.push(there.iter().map(|at| self.in_use(*at, second)).collect());
            if let Some(before) = second.checked_sub(BEATS_S) {
                let before = &used[usize::try_from(before).unwrap()];
                let is_known = |key| there.iter().all(|at| self.knows(*at, key));
                assert!(
                    before.iter().all(is_known),
                    "second {second}: a key is unknown one heartbeat after its use"
                );
            }
        }
        self
    }

    fn beat(&mut self, at: usize, second: u64) {
        let unix = self.clocks[at].unix(1000 * second);
        let stored = self.version();
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&(stored + 1).to_be_bytes());
        match &self.rings[at] {
            Some(ring) if ring.version == stored && ring.is_due(unix, self.rotation_s) => {
                (self.stored, self.made) = (Some(ring.rotated(unix, bytes)), second);
            }
            None if stored == 0 => self.stored = Some(KeyRing::first(unix, bytes)),
            _ => {}
        }
        self.rings[at].clone_from(&self.stored);
        self.there[at] = true;
    }

    fn count_unknown(&mut self, second: u64) {
        let there: Vec<usize> = (0..self.clocks.len()).filter(|at| self.there[*at]).collect();
        for by in &there {
            let key = self.in_use(*by, second);
            self.unknown += u32::from(there.iter().any(|at| !self.knows(*at, &key)));
        }
    }
}
