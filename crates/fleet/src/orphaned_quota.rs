//! Whose records nobody renews: what such a node held of quotas is given back by another. It has to be sure of that, for who lives has been granted
//! it. So the record is old by the store's clock, and has been the same for as long by ours: the clock of a store may be set.

use std::collections::HashMap;

use crate::{
    members::{GONE_MS, Record},
    node::NodeName,
};

/// So long the store has to answer all, and so old a record has to be, before it counts for one that nobody renews: who lost the store has found
/// it again by then.
const ABANDONED_MS: u64 = 2 * GONE_MS;

/// What has been seen of all records, whoever they are of.
#[derive(Clone, Debug, Default)]
pub struct OrphanedQuota {
    /// What each says of its age, and since when by our clock it has said the same.
    seen: HashMap<NodeName, (u64, u64)>,
}

impl OrphanedQuota {
    /// The store has shown these at `now_ms` of our clock and `store_ms` of its own; for `steady_ms` it has answered whatever it was asked. Names and
    /// numbers of nodes that are gone, or whose giving back was begun and not ended.
    pub fn look(
        &mut self,
        now_ms: u64,
        store_ms: u64,
        steady_ms: u64,
        records: &[Record],
    ) -> Vec<(NodeName, u16)> {
        let mut seen = HashMap::with_capacity(records.len());
        let mut abandoned = Vec::new();
        for Record { name, stamp_ms, beat } in records {
            let known = self.seen.get(name).filter(|(stamp, _)| stamp == stamp_ms);
            let since = known.map_or(now_ms, |(_, since)| *since);
            seen.insert(name.clone(), (*stamp_ms, since));
            let for_ms = now_ms.saturating_sub(since).min(steady_ms);
            // A beat of its own clock is all that somebody needs to renew it.
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

    fn record(name: &str, stamp_ms: u64) -> Record {
        let beat = Beat { number: 3, incarnation: 1, draining: false, load: Load::default() };
        Record { name: name.parse().unwrap(), stamp_ms, beat }
    }

    fn names(abandoned: &[(NodeName, u16)]) -> Vec<&str> {
        abandoned.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn a_record_is_nobodys_when_it_is_old_and_all_had_time_to_renew_theirs() {
        let mut seen = OrphanedQuota::default();
        let records = [record("young", 100_000), record("old", 80_000), record("begun", 0)];
        assert!(seen.look(0, 90_000, 0, &records).is_empty());
        assert!(seen.look(10_500, 100_500, 19_999, &records).is_empty(), "others may not have come back");
        assert_eq!(names(&seen.look(10_500, 100_500, 20_000, &records)), ["old", "begun"]);
    }

    #[test]
    fn a_store_whose_clock_is_set_forward_makes_nobody_nobody() {
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
