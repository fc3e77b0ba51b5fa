//! What sessions came to, for metrics: how many ended by realm and listener, what they carried, and how long they lived. Workers count where
//! a session ends, which is no packet; whoever scrapes takes a copy.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use turnpike_turn::server::Effect;

/// Upper bounds of the lengths that are told apart, in seconds.
pub(crate) const LENGTHS: [u32; 8] = [1, 10, 60, 300, 1800, 3600, 14_400, 86_400];

/// Over all workers.
#[derive(Debug, Default)]
pub(crate) struct SessionTotals(Mutex<Totals>);

/// Realm, transport of the client, port of the listener: as many as are configured.
pub(crate) type Listened = (Arc<str>, &'static str, u16);

/// Since the start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    /// Sessions that ended.
    pub(crate) ended: BTreeMap<Listened, u64>,
    /// Payload bytes of these by realm, to peers and to clients.
    pub(crate) bytes: BTreeMap<Arc<str>, [u64; 2]>,
    /// Of these, by [`LENGTHS`]; the last lived longer.
    pub(crate) lengths: [u64; LENGTHS.len() + 1],
    /// All their lengths.
    pub(crate) lived_ms: u64,
}

impl SessionTotals {
    /// Counts a session that has ended; everything else is nothing.
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

    /// A copy.
    pub(crate) fn get(&self) -> Totals {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
