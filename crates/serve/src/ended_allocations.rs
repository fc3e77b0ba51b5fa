//! Totals of ended allocations for metrics: count by realm and listener, traffic, and duration. Workers update
//! them when an allocation ends, not per packet; a scrape takes a copy.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use turnpike_turn::server::Effect;

/// Upper bounds of the duration histogram's buckets, in seconds.
pub(crate) const LENGTHS: [u32; 8] = [1, 10, 60, 300, 1800, 3600, 14_400, 86_400];

#[derive(Debug, Default)]
pub(crate) struct EndedAllocations(Mutex<Totals>);

/// Realm, client transport and listener port.
pub(crate) type Listened = (Arc<str>, &'static str, u16);

#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) ended: BTreeMap<Listened, u64>,
    /// Payload bytes by realm, to peers and to clients.
    pub(crate) bytes: BTreeMap<Arc<str>, [u64; 2]>,
    /// Number of allocations per bucket of [`LENGTHS`]; the last bucket counts those that lasted longer.
    pub(crate) lengths: [u64; LENGTHS.len() + 1],
    pub(crate) lived_ms: u64,
}

impl EndedAllocations {
    pub(crate) fn effect(&self, effect: &Effect) {
        let Effect::Closed { client, realm, transport, lived_ms, to_peer, to_client, .. } = effect else {
            return;
        };
        let mut totals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let listened = (Arc::clone(realm), <&str>::from(*transport), client.local.port());
        *totals.ended.entry(listened).or_default() += 1;
        let [peers, clients] = totals.bytes.entry(Arc::clone(realm)).or_default();
        *peers += to_peer.1;
        *clients += to_client.1;
        let bucket = LENGTHS.iter().position(|seconds| *lived_ms <= u64::from(*seconds) * 1000);
        totals.lengths[bucket.unwrap_or(LENGTHS.len())] += 1;
        totals.lived_ms += lived_ms;
    }

    pub(crate) fn get(&self) -> Totals {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
