//! Detects records of dead nodes, whose quotas another node then returns. A live node must never be affected,
//! so a record must be old by the store's clock and must not have changed for some time by ours, because the
//! store's clock may be adjusted.

use std::collections::HashMap;

use crate::{
    members::{GONE_MS, NodeRecord},
    node::NodeName,
};

/// Age at which a record counts as orphaned. By then, nodes that lost their connection to the store have
/// reconnected.
const ABANDONED_MS: u64 = 2 * GONE_MS;

/// Observed records of all nodes.
#[derive(Clone, Debug, Default)]
pub struct OrphanedQuota {
    /// Timestamp in each record, and the time by our clock at which it last changed.
    seen: HashMap<NodeName, (u64, u64)>,
}

impl OrphanedQuota {
    /// Examines the records, which were read at `now_ms` by our clock and at `store_ms` by the store's. The
    /// store has responded to every request for `steady_ms`. Returns names and numbers of nodes that are
    /// dead, or whose quotas were only partly returned.
    pub fn look(
        &mut self,
        now_ms: u64,
        store_ms: u64,
        steady_ms: u64,
        records: &[NodeRecord],
    ) -> Vec<(NodeName, u16)> {
        let mut seen = HashMap::with_capacity(records.len());
        let mut abandoned = Vec::new();
        for NodeRecord { name, stamp_ms, beat } in records {
            let known = self.seen.get(name).filter(|(stamp, _)| stamp == stamp_ms);
            let since = known.map_or(now_ms, |(_, since)| *since);
            seen.insert(name.clone(), (*stamp_ms, since));
            let for_ms = now_ms.saturating_sub(since).min(steady_ms);
            // A node needs one heartbeat by its own clock to renew its record.
            let is_old = store_ms.saturating_sub(*stamp_ms) >= ABANDONED_MS && for_ms >= GONE_MS;
            if is_old && steady_ms >= ABANDONED_MS {
                abandoned.push((name.clone(), beat.number));
            }
        }
        self.seen = seen;
        abandoned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Beat, Load};

    fn record(name: &str, stamp_ms: u64) -> NodeRecord {
        let beat = Beat { number: 3, incarnation: 1, draining: false, load: Load::default() };
        NodeRecord { name: name.parse().unwrap(), stamp_ms, beat }
    }

    fn names(abandoned: &[(NodeName, u16)]) -> Vec<&str> {
        abandoned.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn record_is_orphaned_when_old_by_both_clocks() {
        let mut seen = OrphanedQuota::default();
        let records = [record("young", 100_000), record("old", 80_000), record("begun", 0)];
        assert!(seen.look(0, 90_000, 0, &records).is_empty());
        assert!(seen.look(10_500, 100_500, 19_999, &records).is_empty(), "others may not have reconnected");
        assert_eq!(names(&seen.look(10_500, 100_500, 20_000, &records)), ["old", "begun"]);
    }

    #[test]
    fn forward_clock_jump_orphans_no_record() {
        let mut seen = OrphanedQuota::default();
        let mut store_ms = 1_000_000;
        for beat in 1..100 {
            store_ms += if beat == 50 { 3_600_000 } else { 1000 };
            let stamp = |ago: u64| if beat == 50 { store_ms - 3_600_000 } else { store_ms - ago };
            let records = [record("a", stamp(0)), record("b", stamp(900))];
            assert!(seen.look(beat * 1000, store_ms, 60_000, &records).is_empty(), "beat {beat}");
        }
    }
}
