//! Some nodes lose the connection to a healthy store while others keep it. Uses the `World` of `recovery.rs`.

use proptest::prelude::*;

use crate::recovery::{ABANDONED, ALONE, BACK, Demand, USER, World, most};

/// Ticks within which reconnecting nodes find the store: the longest back-off.
const FOUND: u64 = 50;
/// Ticks until a reconnected node's quota is known: a heartbeat, its effect, and an exchange.
const TOLD: u64 = 20;

fn used_of(world: &World, is_there: impl Fn(usize) -> bool) -> u32 {
    (0..world.nodes.len()).filter(|at| is_there(*at)).map(|at| world.nodes[at].ledger.used(&USER)).sum()
}

/// The nodes in `away` lose the store for this many ticks, some with requests in flight.
fn part(world: &mut World, away: &[bool], ticks: u64, found: u64) {
    for at in (0..world.nodes.len()).filter(|at| away[*at]) {
        if world.chance.below(2) == 0 {
            world.exchange(at, false);
        }
        let found = world.chance.next() % found;
        world.nodes[at].away_until = world.tick + 1 + ticks + found;
    }
}

/// The store's sum is correct, and no node uses more than its quota, except for the unreported part.
fn books_are_right(world: &World, limit: u32) {
    let held =
        |at: usize| world.store.held.get(&at).and_then(|held| held.get(&USER)).copied().unwrap_or_default();
    let all: u32 = (0..world.nodes.len()).map(held).sum();
    assert_eq!(world.store.sums.get(&USER).copied().unwrap_or_default(), all, "the sum of what nodes hold");
    let untold = limit / (40 * u32::try_from(world.nodes.len()).unwrap());
    for (at, node) in world.nodes.iter().enumerate() {
        let used = node.ledger.used(&USER);
        assert!(used <= held(at).max(untold) + 1, "node {at} has {used} and holds {}", held(at));
    }
}

/// Ends sessions until the use is within the quota; after that, the quota can be used up without excess.
fn heals(world: &mut World, demand: Demand) -> bool {
    let Demand { limit, .. } = demand;
    let ends = Demand { ended: demand.ended.max(5), ..demand };
    let most = most(limit, world.nodes.len());
    let mut before = world.used(&USER);
    for _ in 0..2000 {
        ends.step_unchecked(world);
        let used = world.used(&USER);
        assert!(used <= most.max(before), "tick {}: {before}, and now {used} of {limit}", world.tick);
        before = used;
        if used <= limit {
            break;
        }
    }
    (0..BACK).for_each(|_| ends.step_unchecked(world));
    world.is_whole();
    (0..TOLD).for_each(|_| Demand { asked: 0, ended: 0, ..demand }.step_unchecked(world));
    books_are_right(world, limit);
    demand.is_met(world)
}

fn parted(away: &[bool], demand: Demand, before: u64, seed: u64, ticks: u64, found: u64) -> World {
    let mut world = World::new(away.len(), seed, 0);
    world.some_go_alone = true;
    (0..before).for_each(|_| demand.step_unchecked(&mut world));
    part(&mut world, away, ticks, found);
    world
}

proptest! {
    #![proptest_config(crate::cases(200))]

    /// A long partition: the cut-off nodes use their own limits, and the others consider them gone and return
    /// their quotas. Each side keeps to the limit: the connected nodes together, and each cut-off node on its
    /// own. A few seconds after the last reconnect, nothing beyond the limit is granted.
    #[test]
    fn each_side_of_a_partition_keeps_the_limit_and_recovers(
        away in prop::collection::vec(any::<bool>(), 2..8),
        limit in 100_u32..2000,
        asked in 1_usize..60,
        ended in 0_usize..30,
        before in 5_u64..120,
        ticks in prop_oneof![ALONE..100, 100..2 * ABANDONED],
        seed: u64,
    ) {
        let nodes = away.len();
        let demand = Demand { limit, asked, ended };
        let mut world = parted(&away, demand, before, seed, ticks, FOUND);
        let is_together = |world: &World, at: usize| world.tick >= world.nodes[at].away_until;
        for _ in 0..ticks {
            demand.step_unchecked(&mut world);
            let together = used_of(&world, |at| is_together(&world, at));
            prop_assert!(together <= most(limit, nodes), "tick {}: {together} of {limit}", world.tick);
            for (at, node) in world.nodes.iter().enumerate() {
                prop_assert!(node.ledger.used(&USER) <= limit, "tick {}: node {at}", world.tick);
            }
        }
        (0..FOUND + TOLD).for_each(|_| demand.step_unchecked(&mut world));
        world.is_whole();
        prop_assert!(heals(&mut world, demand), "{} of {limit}", world.used(&USER));
    }

    /// A short partition: a node can use up the share that it need not request, even though the others were
    /// granted everything. All nodes together exceed the limit by at most half.
    #[test]
    fn short_partition_uses_only_shares_that_need_no_request(
        away in prop::collection::vec(any::<bool>(), 2..8),
        limit in 100_u32..2000,
        asked in 5_usize..80,
        ended in 0_usize..30,
        before in 1_u64..15,
        ticks in 1_u64..ALONE,
        seed: u64,
    ) {
        let nodes = away.len();
        let demand = Demand { limit, asked, ended };
        let mut world = parted(&away, demand, before, seed, ticks, 1);
        let parted = u32::try_from(away.iter().filter(|away| **away).count()).unwrap();
        for _ in 0..ticks + TOLD {
            demand.step_unchecked(&mut world);
            let (used, most) = (world.used(&USER), most(limit, nodes) + (limit / 2).max(parted * 8));
            prop_assert!(used <= most, "tick {}: {used} of {limit}, {most} at most", world.tick);
        }
        world.is_whole();
        prop_assert!(heals(&mut world, demand), "{} of {limit}", world.used(&USER));
    }
}
