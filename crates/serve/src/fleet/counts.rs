//! Fleet metrics of this node.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{
    banned::Banned,
    node::OwnNode,
    quotas::QuotaCounts,
    tallies::{FleetCounters, HEARD, REASONS, RESULTS},
    unix,
};

#[derive(Clone, Debug, Default)]
pub(crate) struct FleetCounts {
    pub(crate) bans: u64,
    /// Counters of this node; `None` without a fleet.
    pub(crate) node: Option<NodeCounts>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct NodeCounts {
    pub(crate) is_up: bool,
    /// The store grants no quota until it knows the quotas that all nodes hold.
    pub(crate) is_recovering: bool,
    pub(crate) number: u16,
    pub(crate) is_cordoned: bool,
    pub(crate) nodes: [(&'static str, u64); 3],
    pub(crate) ring: u64,
    pub(crate) quotas: QuotaCounts,
    pub(crate) redirects: [(&'static str, u64); REASONS.len()],
    pub(crate) exchanges: [(&'static str, u64); RESULTS.len()],
    pub(crate) exchange_seconds: f64,
    pub(crate) heard: [(&'static str, u64); HEARD.len()],
    pub(crate) lines_lost: u64,
    pub(crate) returned: u64,
}

impl FleetCounts {
    pub(super) fn of(banned: &Banned, node: Option<&OwnNode>) -> Self {
        Self { bans: banned.count(unix()) as u64, node: node.map(NodeCounts::of) }
    }
}

impl NodeCounts {
    fn of(node: &OwnNode) -> Self {
        let FleetCounters { sent, exchanges, exchange_us, heard, lines_lost, returned } = &node.tallies;
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let mut nodes = [("serving", 0), ("draining", 0), ("silent", 0)];
        for (_, member) in node.members().iter() {
            let place = if !member.is_heard() { 2 } else { usize::from(member.beat.draining) };
            nodes[place].1 += 1;
        }
        #[expect(clippy::cast_precision_loss, reason = "the format defines a sum of seconds as a float")]
        let exchange_seconds = get(exchange_us) as f64 / 1e6;
        Self {
            is_up: !node.is_alone(),
            is_recovering: node.is_recovering(),
            number: node.number(),
            is_cordoned: node.is_cordoned(),
            nodes,
            ring: node.ring_version(),
            quotas: node.quotas.counts(),
            redirects: std::array::from_fn(|at| (REASONS[at], get(&sent[at]))),
            exchanges: std::array::from_fn(|at| (RESULTS[at], get(&exchanges[at]))),
            exchange_seconds,
            heard: std::array::from_fn(|at| (HEARD[at], get(&heard[at]))),
            lines_lost: get(lines_lost),
            returned: get(returned),
        }
    }
}
