//! 10,000 allocations per second on many nodes, which exchange quotas ten times per second: quotas are hardly
//! exceeded, and few requests are refused early.

use std::collections::HashMap;

use turnpike_fleet::{
    Ask, Books, LeaseTerms, Ledger, Levels, QuotaBucket, QuotaGrant, QuotaLevel, Sealer, grant,
};

use crate::chance::Chance;

const PER_TICK: usize = 1000;

struct Fleet {
    nodes: Vec<Node>,
    sums: HashMap<QuotaBucket, u32>,
    levels: HashMap<QuotaBucket, QuotaLevel>,
    terms: LeaseTerms,
    asked: Vec<(usize, Vec<Ask>)>,
}

#[derive(Default)]
struct Node {
    ledger: Ledger,
    levels: Levels,
    /// This node's share of each quota, as recorded by the store.
    held: HashMap<QuotaBucket, u32>,
}

impl Fleet {
    fn new(nodes: usize) -> Self {
        let terms = LeaseTerms { nodes: u32::try_from(nodes).unwrap(), enforced: true, books: Books::Whole };
        let nodes = std::iter::repeat_with(Node::default).take(nodes).collect();
        Self { nodes, sums: HashMap::new(), levels: HashMap::new(), terms, asked: Vec::new() }
    }

    /// Takes from all of these quotas or from none, as a server does.
    fn acquire(&mut self, node: usize, quotas: &[(QuotaBucket, u32)]) -> bool {
        let terms = self.terms;
        let Node { ledger, levels, .. } = &mut self.nodes[node];
        for (at, (bucket, limit)) in quotas.iter().enumerate() {
            if ledger.acquire(*bucket, *limit, levels.get(bucket), terms).is_err() {
                quotas[..at].iter().for_each(|(bucket, _)| ledger.release(*bucket));
                return false;
            }
        }
        true
    }

    fn release(&mut self, node: usize, quotas: &[(QuotaBucket, u32)]) {
        quotas.iter().for_each(|(bucket, _)| self.nodes[node].ledger.release(*bucket));
    }

    /// Answers the requests of the last tick, distributes the levels, and sends new requests.
    fn tick(&mut self) {
        let mut changed = Vec::new();
        for (node, asks) in std::mem::take(&mut self.asked) {
            for Ask { bucket, limit, used, want } in asks {
                let old = self.nodes[node].held.get(&bucket).copied().unwrap_or_default();
                let sum = self.sums.get(&bucket).copied().unwrap_or_default();
                let (held, sum, level) = grant(limit, self.terms.nodes, sum, old, used, want);
                self.nodes[node].held.insert(bucket, held);
                self.sums.insert(bucket, sum);
                if self.levels.insert(bucket, level).unwrap_or_default() != level {
                    changed.push((bucket, level));
                }
                let Node { ledger, levels, .. } = &mut self.nodes[node];
                ledger.granted(QuotaGrant { bucket, told: used, held, sum }, levels, self.terms);
            }
        }
        for Node { ledger, levels, .. } in &mut self.nodes {
            for (bucket, level) in &changed {
                levels.put(*bucket, *level);
                ledger.level_changed(*bucket, *level);
            }
        }
        for (at, Node { ledger, levels, .. }) in self.nodes.iter_mut().enumerate() {
            let asks = ledger.asks(500, levels, self.terms);
            if !asks.is_empty() {
                self.asked.push((at, asks));
            }
        }
    }

    fn used(&self, bucket: &QuotaBucket) -> u32 {
        self.nodes.iter().map(|node| node.ledger.used(bucket)).sum()
    }
}

/// Clients connect to random nodes until quotas are full; then some leave and others arrive. No quota is
/// exceeded by more than a twentieth, and no client is refused before 95 % of it is used.
fn quotas_hold(nodes: usize, users: usize, per_user: u32, per_realm: u32) {
    let (mut fleet, mut chance, sealer) = (Fleet::new(nodes), Chance::new(7), Sealer::new("secret"));
    let realm = (sealer.realm("realm"), per_realm);
    let quotas: Vec<[(QuotaBucket, u32); 2]> =
        (0..users).map(|user| [realm, (sealer.user("realm", &format!("user{user}")), per_user)]).collect();
    let mut open: Vec<(usize, usize)> = Vec::new();
    let capacity = usize::try_from(per_realm).unwrap().min(users * usize::try_from(per_user).unwrap());
    let ticks = 3 * capacity / PER_TICK + 50;
    let (mut refused_early, mut asked) = (0_u32, 0_u32);
    for tick in 0..ticks {
        for _ in 0..PER_TICK {
            let (node, user) = (chance.below(nodes), chance.below(users));
            asked += 1;
            if fleet.acquire(node, &quotas[user]) {
                open.push((node, user));
            } else {
                let free = |(bucket, limit): &(QuotaBucket, u32)| {
                    f64::from(fleet.used(bucket)) < 0.95 * f64::from(*limit)
                };
                // Sampled, because it inspects all nodes.
                refused_early += u32::from(asked % 10 == 0 && quotas[user].iter().all(free));
            }
        }
        for _ in 0..PER_TICK / 20 {
            if !open.is_empty() {
                let (node, user) = open.swap_remove(chance.below(open.len()));
                fleet.release(node, &quotas[user]);
            }
        }
        fleet.tick();
        assert!(
            f64::from(fleet.used(&realm.0)) <= 1.05 * f64::from(per_realm),
            "tick {tick}: {} of {per_realm} in the realm",
            fleet.used(&realm.0)
        );
        if tick % 10 == 9 {
            for quota in quotas.iter().step_by(1 + nodes * users / 200_000) {
                let (bucket, limit) = &quota[1];
                // Small limits can be exceeded by one allocation per node.
                let most = (1.05 * f64::from(*limit)).max(f64::from(*limit) + f64::from(fleet.terms.nodes));
                let used = fleet.used(bucket);
                assert!(f64::from(used) <= most, "tick {tick}: {used} of {limit}");
            }
        }
    }
    let early = 10.0 * f64::from(refused_early) / f64::from(asked);
    assert!(early < 0.05, "refused even though there was room: {early:.3}");
    let used = fleet.used(&realm.0);
    assert!(f64::from(used) > 0.93 * f64::from(u32::try_from(capacity).unwrap()), "{used} of {capacity}");
}

/// All requests for an unused bucket arrive within one exchange, so no node knows of the others' use.
#[test]
fn each_node_grants_its_share_of_a_burst_within_the_limit() {
    for (nodes, limit) in [(3, 300), (1, 300), (3, 1024), (10, 1000), (7, 100)] {
        let (mut fleet, user) = (Fleet::new(nodes), (Sealer::new("secret").user("realm", "alice"), limit));
        let share = limit / u32::try_from(nodes).unwrap();
        for node in 0..nodes {
            let taken = (0..limit).filter(|_| fleet.acquire(node, &[user])).count();
            let taken = u32::try_from(taken).unwrap();
            assert!(taken >= share, "node {node} of {nodes}: {taken} of {share}");
        }
        let most = limit.max(8 * u32::try_from(nodes).unwrap());
        assert!(fleet.used(&user.0) <= most, "{nodes} nodes: {} of {limit}", fleet.used(&user.0));
    }
}

#[test]
fn user_limits_hold_in_a_small_fleet() {
    quotas_hold(3, 50, 400, 100_000);
}

#[test]
fn realm_limit_holds_in_a_small_fleet() {
    quotas_hold(3, 1000, 1000, 20_000);
}

#[test]
fn small_user_limits_hold() {
    quotas_hold(5, 4000, 5, 100_000);
}

#[test]
fn realm_limit_holds_on_a_thousand_nodes() {
    quotas_hold(1000, 2000, 1000, 200_000);
}
