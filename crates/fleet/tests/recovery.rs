//! A store that loses data: it is emptied, or a lagging replica takes over. Nodes reconnect one after the
//! other, some never, and some have just started. Until the store is complete, each node grants its equal
//! share: no user is refused before that share is used up, quotas are exceeded by at most these shares, and
//! normal operation resumes soon. Ledgers, epochs and the store's rules are real. A tick is a tenth of a
//! second, in which each node may exchange once. Each store has its own clock.

use std::collections::HashMap;

use proptest::prelude::*;
use turnpike_fleet::{
    Ask, Books, Chronicle, EpochChange, EpochState, GONE_MS, LeaseTerms, Ledger, Levels, QuotaBucket,
    QuotaGrant, QuotaLevel, Recovery, SETTLE_MS, grant, reclaim,
};

use crate::chance::Chance;

const TICK_MS: u64 = 100;
/// Ticks between two heartbeats.
const BEAT: u64 = 10;
/// Start time by a correct clock.
const LONG_AGO_MS: u64 = 3_600_000;
/// Ticks until normal operation after the last reconnect: the wait for nodes, and two heartbeats.
pub(crate) const BACK: u64 = SETTLE_MS / TICK_MS + 2 * BEAT;
/// Ticks without a response after which a node uses its own limits.
pub(crate) const ALONE: u64 = 30;
/// Ticks without a heartbeat after which a node is considered gone.
const GONE: u64 = GONE_MS / TICK_MS;
/// Ticks without a heartbeat after which a node's quotas are returned.
pub(crate) const ABANDONED: u64 = 2 * GONE;

#[derive(Clone, Default)]
pub(crate) struct Store {
    chronicle: Chronicle,
    run: String,
    clock_ms: i64,
    records: HashMap<usize, u64>,
    pub(crate) sums: HashMap<QuotaBucket, u32>,
    levels: HashMap<QuotaBucket, QuotaLevel>,
    pub(crate) held: HashMap<usize, HashMap<QuotaBucket, u32>>,
    /// Levels that have changed since the last tick.
    changed: Vec<(QuotaBucket, QuotaLevel)>,
}

impl Store {
    fn put(&mut self, bucket: QuotaBucket, sum: u32, level: QuotaLevel) {
        self.sums.insert(bucket, sum);
        if self.levels.insert(bucket, level).unwrap_or_default() != level {
            self.changed.push((bucket, level));
        }
    }

    fn exchange(&mut self, node: usize, nodes: u32, whole: bool, ask: Ask) -> QuotaGrant {
        let Ask { bucket, limit, used, want } = ask;
        let held = self.held.entry(node).or_default();
        let old = held.get(&bucket).copied().unwrap_or_default();
        let sum = self.sums.get(&bucket).copied().unwrap_or_default();
        let (now, sum, level) = if whole {
            grant(limit, nodes, sum, old, used, want)
        } else {
            reclaim(limit, sum, old, used, want)
        };
        held.insert(bucket, now);
        self.put(bucket, sum, level);
        QuotaGrant { bucket, told: used, held: now, sum }
    }

    fn give_back(&mut self, node: usize) {
        for (bucket, held) in self.held.remove(&node).unwrap_or_default() {
            let sum = self.sums.get(&bucket).copied().unwrap_or_default().saturating_sub(held);
            let level = match self.levels.get(&bucket) {
                _ if sum == 0 => QuotaLevel::Calm,
                Some(QuotaLevel::Full) => QuotaLevel::Heavy,
                level => level.copied().unwrap_or_default(),
            };
            self.put(bucket, sum, level);
        }
    }
}

#[derive(Default)]
pub(crate) struct Node {
    pub(crate) ledger: Ledger,
    levels: Levels,
    recovery: Recovery,
    /// The node cannot reach the store before this tick.
    pub(crate) away_until: u64,
    was_away: bool,
    /// Tick of the last response, and the first tick of the uninterrupted series of responses.
    answered: u64,
    steady_since: u64,
    speaks_soon: bool,
    rereads: bool,
    is_dead: bool,
    /// True once the node has sent a heartbeat; clients arrive after that.
    has_joined: bool,
}

impl Node {
    fn terms(&self, nodes: u32, enforced: bool) -> LeaseTerms {
        LeaseTerms { nodes, enforced, books: self.recovery.books() }
    }

    fn hear(&mut self, era: EpochState) {
        match self.recovery.hear(era) {
            EpochChange::Nothing => {}
            EpochChange::Begins => self.speaks_soon = true,
            EpochChange::Ends => {
                self.ledger.settle();
                self.rereads = true;
            }
        }
    }

    fn put_level(&mut self, bucket: QuotaBucket, level: QuotaLevel) {
        if self.recovery.books() == Books::Whole {
            self.levels.put(bucket, level);
        } else {
            self.levels.raise(bucket, level);
        }
        self.ledger.level_changed(bucket, level);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    Emptied,
    /// FLUSHALL without a restart.
    Flushed,
    /// A replica that missed this many ticks takes over.
    Lags(usize),
}

pub(crate) struct World {
    pub(crate) store: Store,
    pub(crate) nodes: Vec<Node>,
    pub(crate) chance: Chance,
    pub(crate) tick: u64,
    past: Vec<Store>,
    remembers: usize,
    runs: u32,
    /// True if nodes that get no response for a long time use their own limits. If false, they keep to their
    /// quotas.
    pub(crate) some_go_alone: bool,
}

impl World {
    pub(crate) fn new(nodes: usize, seed: u64, remembers: usize) -> Self {
        let mut world = Self::begins(nodes, seed, remembers);
        for _ in 0..BACK {
            world.step();
        }
        world.is_whole();
        world
    }

    /// A fleet that starts for the first time, with an empty store.
    fn begins(nodes: usize, seed: u64, remembers: usize) -> Self {
        Self {
            store: Store { run: "0".to_owned(), ..Store::default() },
            nodes: std::iter::repeat_with(Node::default).take(nodes).collect(),
            chance: Chance::new(seed),
            tick: 0,
            past: Vec::new(),
            remembers,
            runs: 0,
            some_go_alone: false,
        }
    }

    fn count(&self) -> u32 {
        let is_there = |node: &&Node| !node.is_dead && self.tick - node.answered < GONE;
        u32::try_from(self.nodes.iter().filter(is_there).count()).unwrap()
    }

    fn is_alone(&self, at: usize) -> bool {
        self.some_go_alone && self.tick - self.nodes[at].answered > ALONE
    }

    fn now_ms(&self) -> u64 {
        (self.tick * TICK_MS + LONG_AGO_MS).checked_add_signed(self.store.clock_ms).unwrap()
    }

    pub(crate) fn set_clock(&mut self, by_ms: i64) {
        self.store.clock_ms += by_ms;
    }

    pub(crate) fn acquire(&mut self, node: usize, quotas: &[(QuotaBucket, u32)]) -> bool {
        let terms = self.nodes[node].terms(self.count(), !self.is_alone(node));
        let Node { ledger, levels, is_dead, has_joined, .. } = &mut self.nodes[node];
        if *is_dead || !*has_joined {
            return false;
        }
        for (at, (bucket, limit)) in quotas.iter().enumerate() {
            // A node never exceeds the limit by itself, whatever quotas the other nodes hold.
            if ledger.used(bucket) >= *limit
                || ledger.acquire(*bucket, *limit, levels.get(bucket), terms).is_err()
            {
                quotas[..at].iter().for_each(|(bucket, _)| ledger.release(*bucket));
                return false;
            }
        }
        true
    }

    pub(crate) fn used(&self, bucket: &QuotaBucket) -> u32 {
        self.nodes.iter().filter(|node| !node.is_dead).map(|node| node.ledger.used(bucket)).sum()
    }

    fn recovers(&self) -> bool {
        self.nodes.iter().any(|node| !node.is_dead && node.recovery.books() != Books::Whole)
    }

    pub(crate) fn step(&mut self) {
        self.tick += 1;
        self.reap();
        if self.remembers > 0 {
            self.past.push(self.store.clone());
            let forgotten = self.past.len().saturating_sub(self.remembers);
            self.past.drain(..forgotten);
        }
        let (count, first) = (self.nodes.len(), usize::try_from(self.tick).unwrap());
        for at in (first..first + count).map(|at| at % count) {
            let was_alone = self.is_alone(at);
            let node = &mut self.nodes[at];
            if node.is_dead {
                continue;
            }
            if self.tick < node.away_until {
                node.was_away = true;
                continue;
            }
            if node.was_away {
                node.speaks_soon |= was_alone;
                node.steady_since = self.tick;
            }
            node.answered = self.tick;
            if std::mem::take(&mut node.was_away) {
                self.reread(at);
            }
            let beats = (self.tick + at as u64).is_multiple_of(BEAT) || self.nodes[at].speaks_soon;
            let first = self.chance.below(2) == 0;
            if beats && first {
                self.beat(at);
            }
            self.exchange(at, true);
            if beats && !first {
                self.beat(at);
            }
            if std::mem::take(&mut self.nodes[at].rereads) {
                self.reread(at);
            }
        }
        let changed = std::mem::take(&mut self.store.changed);
        for node in self.nodes.iter_mut().filter(|node| !node.was_away && !node.is_dead) {
            changed.iter().for_each(|(bucket, level)| node.put_level(*bucket, *level));
        }
    }

    /// A node that has long been connected to the store returns the quotas of a node without heartbeats.
    fn reap(&mut self) {
        let tick = self.tick;
        let is_steady =
            |node: &Node| !node.is_dead && tick >= node.away_until && tick - node.steady_since >= ABANDONED;
        if !self.nodes.iter().any(is_steady) {
            return;
        }
        let is_old = |beaten: &u64| tick - beaten >= ABANDONED;
        let old: Vec<usize> =
            self.store.records.extract_if(|_, beaten| is_old(beaten)).map(|it| it.0).collect();
        old.into_iter().for_each(|at| self.store.give_back(at));
    }

    fn look(&mut self, at: usize) -> EpochState {
        let (now, known) = (self.now_ms(), self.nodes[at].recovery.era().number);
        let run = self.store.run.clone();
        self.store.chronicle.look(now, &run, known)
    }

    fn reread(&mut self, at: usize) {
        let era = self.look(at);
        let node = &mut self.nodes[at];
        node.hear(era);
        if node.recovery.books() == Books::Whole {
            node.levels.clear();
        }
        let levels: Vec<_> = self.store.levels.iter().map(|(bucket, level)| (*bucket, *level)).collect();
        levels.into_iter().for_each(|(bucket, level)| node.put_level(bucket, level));
    }

    fn beat(&mut self, at: usize) {
        let (now, count) = (self.now_ms(), self.count());
        let is_known = self.store.records.insert(at, self.tick).is_some();
        self.look(at);
        let report = self.nodes[at].recovery.report(self.nodes[at].ledger.lost());
        let era = self.store.chronicle.report(now, &at.to_string(), report);
        let node = &mut self.nodes[at];
        node.speaks_soon = false;
        node.hear(era);
        if !is_known || !node.has_joined || node.recovery.is_to_clear() {
            self.store.give_back(at);
            node.recovery.cleared(era.era);
            node.ledger.tell_all(node.terms(count, true));
            (node.speaks_soon, node.has_joined) = (true, true);
        }
        // Each read shows the number of nodes.
        node.recovery.looked(count);
    }

    pub(crate) fn exchange(&mut self, at: usize, is_answered: bool) {
        let count = self.count();
        let node = &mut self.nodes[at];
        if !node.has_joined || node.recovery.is_to_clear() {
            return;
        }
        let asks = node.ledger.asks(500, &node.levels, node.terms(count, true));
        if asks.is_empty() {
            return;
        }
        let era = self.look(at);
        let is_heard = era.era == self.nodes[at].recovery.era();
        let store = &mut self.store;
        let grants: Vec<QuotaGrant> = if is_heard {
            asks.iter().map(|ask| store.exchange(at, count, era.is_whole, *ask)).collect()
        } else {
            Vec::new()
        };
        let node = &mut self.nodes[at];
        if !is_answered {
            return node.ledger.unheard(&asks);
        }
        node.hear(era);
        let (terms, lost) = (node.terms(count, true), node.ledger.lost());
        grants.iter().for_each(|grant| node.ledger.granted(*grant, &node.levels, terms));
        node.ledger.unheard(&asks[grants.len()..]);
        node.speaks_soon |= lost > 0 && node.ledger.lost() == 0;
    }

    /// The store fails with responses in flight, and is available again after `outage` ticks.
    fn lose(&mut self, loss: Loss, outage: u64, mut found_after: impl FnMut(usize, &mut Chance) -> u64) {
        for at in 0..self.nodes.len() {
            if !self.nodes[at].is_dead && self.chance.below(3) == 0 {
                self.exchange(at, false);
            }
        }
        self.runs += 1;
        let run = self.runs.to_string();
        self.store = match loss {
            Loss::Emptied => Store { run, ..Store::default() },
            Loss::Flushed => Store { run: self.store.run.clone(), ..Store::default() },
            Loss::Lags(ticks) => {
                let at = self.past.len().saturating_sub(ticks.max(1));
                Store { run, changed: Vec::new(), ..self.past[at].clone() }
            }
        };
        if loss != Loss::Flushed {
            // Minutes ahead of or behind the other clock.
            self.store.clock_ms = i64::try_from(self.chance.below(1_200_000)).unwrap() - 600_000;
        }
        for (at, node) in self.nodes.iter_mut().enumerate() {
            node.away_until = self.tick + 1 + outage + found_after(at, &mut self.chance);
        }
    }

    fn begins_anew(&mut self, at: usize) {
        let Node { away_until, answered, .. } = self.nodes[at];
        self.nodes[at] = Node { away_until, answered, was_away: true, ..Node::default() };
    }

    pub(crate) fn is_whole(&self) {
        for node in self.nodes.iter().filter(|node| !node.is_dead) {
            assert_eq!((node.recovery.books(), node.ledger.lost()), (Books::Whole, 0));
        }
    }
}

pub(crate) const USER: QuotaBucket = QuotaBucket([7; 16]);

/// Allowed excess: 5 % in normal operation, and two allocations per node because of the loss, one before and
/// one after it.
pub(crate) fn most(limit: u32, nodes: usize) -> u32 {
    limit + limit / 20 + 2 * u32::try_from(nodes).unwrap()
}

/// Requests for a user's quota in each tick.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    pub(crate) limit: u32,
    /// Allocations requested from random nodes.
    pub(crate) asked: usize,
    /// Allocations that end, in thousandths of all.
    pub(crate) ended: usize,
}

impl Demand {
    /// The shares of all nodes come on top of their quotas until the store is complete.
    fn step(&self, world: &mut World) {
        let (before, recovers) = (world.used(&USER), world.recovers());
        self.step_unchecked(world);
        let shares = if recovers || world.recovers() { self.limit } else { 0 };
        let (used, most) = (world.used(&USER), most(self.limit, world.nodes.len()) + shares);
        assert!(used <= most.max(before), "tick {}: {before}, and now {used} of {}", world.tick, self.limit);
    }

    pub(crate) fn step_unchecked(&self, world: &mut World) {
        for _ in 0..self.asked {
            let at = world.chance.below(world.nodes.len());
            world.acquire(at, &[(USER, self.limit)]);
        }
        for at in 0..world.nodes.len() {
            for _ in 0..world.nodes[at].ledger.used(&USER) {
                if world.chance.below(1000) < self.ended {
                    world.nodes[at].ledger.release(USER);
                }
            }
        }
        world.step();
    }

    /// Returns true if the excess ends once enough sessions have ended, and the quota can be used up after
    /// that.
    fn heals(&self, world: &mut World) -> bool {
        let ends = Self { ended: self.ended.max(5), ..*self };
        for _ in 0..2000 {
            ends.step(world);
            if world.used(&USER) <= self.limit {
                break;
            }
        }
        world.used(&USER) <= self.limit && self.is_met(world)
    }

    pub(crate) fn is_met(&self, world: &mut World) -> bool {
        let wanted = Self { asked: self.asked.max(10), ended: 0, ..*self };
        for _ in 0..self.limit {
            wanted.step(world);
            if world.used(&USER) * 20 >= self.limit * 19 {
                return true;
            }
        }
        false
    }
}

fn losses() -> impl Strategy<Value = Loss> {
    prop_oneof![Just(Loss::Emptied), Just(Loss::Flushed), (1_usize..30).prop_map(Loss::Lags)]
}

proptest! {
    #![proptest_config(crate::cases(300))]

    /// For any loss, outage and order of reconnects: the quota is exceeded by the shares at most, and normal
    /// operation resumes a few seconds after the last reconnect.
    #[test]
    fn after_data_loss_no_more_than_all_shares_is_granted(
        nodes in 2_usize..8,
        limit in 100_u32..2000,
        asked in 1_usize..60,
        ended in 0_usize..30,
        before in 5_u64..120,
        what in prop::collection::vec((losses(), 0_u64..30, 1_u64..20, 0_u64..60), 1..3),
        seed: u64,
    ) {
        let mut world = World::new(nodes, seed, 30);
        let demand = Demand { limit, asked, ended };
        (0..before).for_each(|_| demand.step(&mut world));
        for (loss, outage, found, pause) in what {
            world.lose(loss, outage, |_, chance| chance.next() % found);
            (0..outage + found + pause).for_each(|_| demand.step(&mut world));
        }
        (0..BACK).for_each(|_| demand.step(&mut world));
        world.is_whole();
        prop_assert!(demand.heals(&mut world), "{} of {limit}", world.used(&USER));
    }

    /// Like the above, with a node that has just started, or starts during the recovery.
    #[test]
    fn new_node_grants_only_its_share_during_recovery(
        nodes in 2_usize..8,
        limit in 100_u32..2000,
        asked in 1_usize..60,
        loss in losses(),
        outage in 0_u64..30,
        found in 1_u64..20,
        begins in 0_u64..40,
        seed: u64,
    ) {
        let mut world = World::new(nodes, seed, 30);
        let demand = Demand { limit, asked, ended: 5 };
        (0..80).for_each(|_| demand.step(&mut world));
        world.lose(loss, outage, |at, chance| if at == 0 { 0 } else { chance.next() % found });
        for tick in 0..outage + found + begins + 1 {
            if tick == begins {
                world.begins_anew(0);
            }
            demand.step(&mut world);
        }
        (0..BACK).for_each(|_| demand.step(&mut world));
        world.is_whole();
        prop_assert!(demand.heals(&mut world), "{} of {limit}", world.used(&USER));
    }

    /// Like the above, but the store's clock is set back by any amount, or forward by a little.
    #[test]
    fn clock_jump_during_recovery_leads_to_no_additional_grants(
        nodes in 2_usize..8,
        limit in 100_u32..2000,
        asked in 10_usize..60,
        loss in losses(),
        found in 1_u64..20,
        by_ms in prop_oneof![-600_000_i64..0, 0_i64..1900],
        after in 0_u64..40,
        seed: u64,
    ) {
        let mut world = World::new(nodes, seed, 30);
        let demand = Demand { limit, asked, ended: 5 };
        (0..80).for_each(|_| demand.step(&mut world));
        world.lose(loss, 0, |_, chance| chance.next() % found);
        for tick in 0..found + 40 {
            if tick == after {
                world.set_clock(by_ms);
            }
            demand.step(&mut world);
        }
        (0..BACK).for_each(|_| demand.step(&mut world));
        world.is_whole();
        prop_assert!(demand.heals(&mut world), "{} of {limit}", world.used(&USER));
    }

    /// One node never returns: after a few seconds, the others get its share.
    #[test]
    fn recovery_does_not_wait_for_a_lost_node(
        nodes in 2_usize..8,
        limit in 100_u32..2000,
        asked in 10_usize..60,
        outage in 0_u64..30,
        seed: u64,
    ) {
        let mut world = World::new(nodes, seed, 0);
        let demand = Demand { limit, asked, ended: 5 };
        (0..80).for_each(|_| demand.step(&mut world));
        world.lose(Loss::Emptied, outage, |_, chance| chance.next() % 10);
        world.nodes[0].is_dead = true;
        (0..outage + 10 + BACK).for_each(|_| demand.step(&mut world));
        world.is_whole();
        prop_assert!(demand.heals(&mut world), "{} of {limit}", world.used(&USER));
    }
}

proptest! {
    #![proptest_config(crate::cases(100))]

    /// No node of a fleet that starts for the first time refuses a user before the node's share is used up.
    #[test]
    fn new_fleet_grants_each_nodes_share_immediately(nodes in 1_usize..8, limit in 1_u32..2000, ticks in BEAT..BACK, seed: u64) {
        let mut world = World::begins(nodes, seed, 0);
        (0..ticks).for_each(|_| world.step());
        let share = limit / u32::try_from(nodes).unwrap();
        for node in 0..nodes {
            for taken in 0..share {
                prop_assert!(world.acquire(node, &[(USER, limit)]), "node {node}: {taken} of {share}");
            }
        }
        prop_assert!(world.used(&USER) <= limit);
        let demand = Demand { limit, asked: 10, ended: 0 };
        // Until the nodes learn the level, they may together exceed their shares by half the limit.
        let most = limit + (limit / 2).max(8 * u32::try_from(nodes).unwrap());
        for _ in 0..BACK {
            demand.step_unchecked(&mut world);
            prop_assert!(world.used(&USER) <= most, "tick {}: {} of {limit}", world.tick, world.used(&USER));
        }
        world.is_whole();
        prop_assert!(demand.is_met(&mut world), "{} of {limit}", world.used(&USER));
    }

    /// After the store has lost a partly used quota, a node still grants its share until the store is
    /// complete.
    #[test]
    fn node_grants_its_share_while_the_store_recovers(
        nodes in 2_usize..8,
        limit in 100_u32..2000,
        used in 0_u32..70,
        loss in losses(),
        found in 1_u64..20,
        begins: bool,
        ticks in 0_u64..2 * BACK,
        seed: u64,
    ) {
        let mut world = World::new(nodes, seed, 30);
        for _ in 0..limit * used / 100 {
            let at = world.chance.below(nodes);
            world.acquire(at, &[(USER, limit)]);
            world.step();
        }
        (0..30).for_each(|_| world.step());
        world.lose(loss, 0, |_, chance| chance.next() % found);
        if begins {
            world.begins_anew(0);
        }
        for _ in 0..ticks {
            world.step();
            let share = limit / u32::try_from(nodes).unwrap();
            for node in 0..nodes {
                let it = &world.nodes[node];
                let is_full = it.levels.get(&USER) == QuotaLevel::Full;
                if it.has_joined && !is_full && it.recovery.books() != Books::Whole && it.ledger.used(&USER) < share {
                    prop_assert!(world.acquire(node, &[(USER, limit)]), "tick {}, node {node}", world.tick);
                }
            }
        }
    }
}

/// 10,000 allocations per second on 1,000 nodes, with half of the quotas in reserve.
#[test]
fn thousand_nodes_recover_with_an_empty_or_lagging_store() {
    const NODES: usize = 1000;
    const LIMIT: u32 = 100_000;
    for loss in [Loss::Emptied, Loss::Lags(10)] {
        let mut world = World::new(NODES, 5, 0);
        let realm = (QuotaBucket([1; 16]), LIMIT);
        let users: Vec<QuotaBucket> = (0..1000_u16)
            .map(|user| QuotaBucket(std::array::from_fn(|at| user.to_be_bytes()[at % 2] ^ 0x55)))
            .collect();
        let mut open: Vec<(usize, usize)> = Vec::new();
        let mut step = |world: &mut World, asked: usize| {
            let before = (world.used(&realm.0), world.recovers());
            for _ in 0..asked {
                let (at, user) = (world.chance.below(NODES), world.chance.below(users.len()));
                if world.acquire(at, &[realm, (users[user], 200)]) {
                    open.push((at, user));
                }
            }
            for _ in 0..50 {
                if !open.is_empty() {
                    let (at, user) = open.swap_remove(world.chance.below(open.len()));
                    for bucket in [realm.0, users[user]] {
                        world.nodes[at].ledger.release(bucket);
                    }
                }
            }
            world.step();
            let (used, shares) = (world.used(&realm.0), u32::from(before.1 || world.recovers()));
            let most_of_realm = (LIMIT + LIMIT / 20 + shares * LIMIT).max(before.0);
            assert!(used <= most_of_realm, "tick {}: {used} in the realm", world.tick);
            if world.tick.is_multiple_of(10) {
                for user in users.iter().step_by(50) {
                    let used = world.used(user);
                    assert!(used <= most(200, NODES), "tick {}: {used} of 200", world.tick);
                }
            }
            used
        };
        (0..110).for_each(|_| _ = step(&mut world, 1000));
        world.remembers = 11;
        (0..15).for_each(|_| _ = step(&mut world, 1000));
        world.remembers = 0;
        // The first fifth of the nodes reconnects at once and would have time to get the quotas of the
        // others.
        world.lose(loss, 5, |at, chance| if at < NODES / 5 { 0 } else { 15 + chance.next() % 10 });
        world.past.clear();
        (0..30 + BACK).for_each(|_| _ = step(&mut world, 3000));
        world.is_whole();
        let used = (0..100).map(|_| step(&mut world, 1000)).last().unwrap();
        assert!(f64::from(used) > 0.93 * f64::from(LIMIT), "{used}");
    }
}
