//! Maps (shared port, peer address) to the allocation that owns it. Allocations on a shared port have the
//! same relayed transport address, so only the peer distinguishes them. A permission covers all ports of an
//! address (RFC 8656 section 9), so an allocation owns the whole address while it has a permission or a
//! channel for it.

use std::{
    hash::{BuildHasher as _, Hasher as _},
    net::IpAddr,
};

use foldhash::fast::RandomState;
use hashbrown::HashTable;

use crate::server::SharedPort;

/// The limits on permissions and channels bound this table, because each entry has at least one of them.
#[derive(Default)]
pub(super) struct Claims {
    table: HashTable<PeerClaim>,
    hasher: RandomState,
    /// Most recent lookup; the next datagram often has the same peer.
    last: Option<PeerClaim>,
}

#[derive(Clone, Copy)]
struct PeerClaim {
    port: SharedPort,
    peer: IpAddr,
    index: u32,
}

impl PeerClaim {
    #[inline]
    fn is(&self, port: SharedPort, peer: IpAddr) -> bool {
        self.port == port && self.peer == peer
    }
}

impl Claims {
    #[inline]
    pub(super) fn find(&mut self, port: SharedPort, peer: IpAddr) -> Option<u32> {
        if let Some(last) = self.last.filter(|last| last.is(port, peer)) {
            return Some(last.index);
        }
        let hash = hash(&self.hasher, port, peer);
        let found = *self.table.find(hash, |claim| claim.is(port, peer))?;
        self.last = Some(found);
        Some(found.index)
    }

    pub(super) fn take(&mut self, port: SharedPort, peer: IpAddr, index: u32) {
        let Self { table, hasher, .. } = self;
        let rehash = |claim: &PeerClaim| hash(hasher, claim.port, claim.peer);
        let entry = table.entry(hash(hasher, port, peer), |claim| claim.is(port, peer), rehash);
        entry.or_insert(PeerClaim { port, peer, index });
    }

    pub(super) fn release(&mut self, port: SharedPort, peer: IpAddr, index: u32) {
        self.last = None;
        let hash = hash(&self.hasher, port, peer);
        if let Ok(entry) = self.table.find_entry(hash, |claim| claim.is(port, peer) && claim.index == index) {
            entry.remove();
        }
    }
}

#[inline]
fn hash(seeded: &RandomState, SharedPort(port): SharedPort, peer: IpAddr) -> u64 {
    let mut hasher = seeded.build_hasher();
    hasher.write_u128(match peer {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    });
    hasher.write_u16(port);
    hasher.finish()
}
