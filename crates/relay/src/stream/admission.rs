//! How many connections may be open that have no allocation: they cost memory and a descriptor each, and whoever opens them has
//! shown no credential yet. Counted over all workers; connections with an allocation are bounded by the quotas.

use std::{
    hash::BuildHasher,
    net::{IpAddr, Ipv6Addr},
    sync::PoisonError,
};

use foldhash::fast::RandomState;
use hashbrown::HashMap;

use super::CloseReason;
use crate::{
    SHARDS,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

pub(crate) struct Admission {
    total: AtomicUsize,
    most: AtomicUsize,
    most_per_address: AtomicUsize,
    hasher: RandomState,
    shards: [Mutex<HashMap<IpAddr, usize, RandomState>>; SHARDS],
}

impl Admission {
    pub(crate) fn new(most: usize, most_per_address: usize) -> Self {
        Self {
            total: AtomicUsize::new(0),
            most: AtomicUsize::new(most),
            most_per_address: AtomicUsize::new(most_per_address),
            hasher: RandomState::default(),
            shards: std::array::from_fn(|_| Mutex::default()),
        }
    }

    /// So many from now on; nobody has to go for that.
    pub(crate) fn limit(&self, most: usize, most_per_address: usize) {
        self.most.store(most, Ordering::Relaxed);
        self.most_per_address.store(most_per_address, Ordering::Relaxed);
    }

    /// One more in total.
    pub(super) fn enter(&self) -> Result<(), CloseReason> {
        let most = self.most.load(Ordering::Relaxed);
        let within = |n: usize| (n < most).then_some(n + 1);
        let entered = self.total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within);
        entered.map(|_| ()).map_err(|_| CloseReason::LimitTotal)
    }

    /// One more of this address.
    pub(super) fn enter_from(&self, address: IpAddr) -> Result<(), CloseReason> {
        let most = self.most_per_address.load(Ordering::Relaxed);
        self.with(address, |count| {
            if *count >= most {
                return Err(CloseReason::LimitAddress);
            }
            *count += 1;
            Ok(())
        })
    }

    /// One more of both, whatever the limits: an allocation has ended, its connection has not.
    pub(super) fn return_from(&self, address: IpAddr) {
        self.total.fetch_add(1, Ordering::Relaxed);
        self.with(address, |count| *count += 1);
    }

    /// The opposite of [`Admission::enter`].
    pub(super) fn leave(&self) {
        self.total.fetch_sub(1, Ordering::Relaxed);
    }

    /// The opposite of [`Admission::enter_from`].
    pub(super) fn leave_from(&self, address: IpAddr) {
        self.with(address, |count| *count = count.saturating_sub(1));
    }

    fn with<T>(&self, address: IpAddr, change: impl FnOnce(&mut usize) -> T) -> T {
        let key = network(address);
        #[expect(clippy::cast_possible_truncation, reason = "reduced to the number of shards")]
        let shard = &self.shards[self.hasher.hash_one(key) as usize % SHARDS];
        let mut counts = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(key).or_insert(0);
        let result = change(count);
        if *count == 0 {
            counts.remove(&key);
        }
        result
    }
}

/// One customer has 2^64 IPv6 addresses: their network counts as one.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_at_its_limit_is_refused_and_leaves_others_alone() {
        let admission = Admission::new(10, 2);
        let [one, same, other] = ["2001:db8::1", "2001:db8::2", "192.0.2.1"].map(|ip| ip.parse().unwrap());
        assert_eq!(admission.enter_from(one), Ok(()));
        assert_eq!(admission.enter_from(same), Ok(()));
        assert_eq!(admission.enter_from(one), Err(CloseReason::LimitAddress));
        assert_eq!(admission.enter_from(other), Ok(()));
        admission.leave_from(same);
        assert_eq!(admission.enter_from(one), Ok(()));
    }

    #[test]
    fn the_total_bounds_all_and_those_who_come_back_count_though_there_is_no_room() {
        let admission = Admission::new(1, 9);
        let address = "192.0.2.1".parse().unwrap();
        assert_eq!(admission.enter(), Ok(()));
        assert_eq!(admission.enter(), Err(CloseReason::LimitTotal));
        admission.return_from(address);
        admission.leave();
        assert_eq!(admission.enter(), Err(CloseReason::LimitTotal));
        admission.leave();
        admission.leave_from(address);
        assert_eq!(admission.enter(), Ok(()));
        assert!(
            admission.shards.iter().all(|shard| shard.lock().unwrap().is_empty()),
            "nothing stays behind"
        );
    }
}
