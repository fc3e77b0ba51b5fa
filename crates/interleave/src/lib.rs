//! Models of lock-free data shared between threads, built with loom, which runs threads in every interleaving that their memory orderings
//! allow. The modules are production source files; they import `crate::sync`, which re-exports the standard library in production and loom
//! in this crate.
//!
//! Each function below is one model, run by a test of the same name. Keep models to two threads with a few operations each: more would
//! produce too many interleavings to explore, and two threads are enough to expose the bugs in question.
//!
//! loom (0.7) remembers only the last access to each atomic. It therefore misses some interleavings in which a thread writes a value that
//! it read earlier and another thread has read the atomic in between. If two threads access an atomic in different ways, the model
//! therefore runs twice, with the threads' roles swapped.
#![cfg(not(test))] // The unit tests in the included files are not written for loom.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "a model uses only part of a file")]
#![allow(clippy::modulo_one, reason = "with a single shard, every key maps to it")]
#![allow(
    unreachable_pub,
    reason = "the included files are private modules here, so their `pub` items are unreachable"
)]

use loom::sync;

#[path = "../../forward/src/balance.rs"]
mod balance;
#[path = "../../stores/src/cache.rs"]
mod cache;
#[path = "../../forward/src/gauge.rs"]
mod gauge;
#[path = "../../turn/src/server/data/bandwidth/limit.rs"]
mod limit;
#[path = "../../turn/src/server/data/bandwidth/pool.rs"]
mod pool;
#[path = "../../relay/src/pool_bits.rs"]
mod pool_bits;
#[path = "../../relay/src/quotas.rs"]
mod quotas;
#[path = "../../forward/src/rate.rs"]
mod rate;
#[path = "../../forward/src/resolver.rs"]
mod resolver;
#[path = "../../forward/src/tally.rs"]
mod tally;
#[path = "../../forward/src/targets.rs"]
mod targets;

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use loom::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};
use turnpike_turn::server::{AllocationLimits, Bandwidth, RelayTransport, UserRef, Way};

use limit::{BYTE, Limit, gained, needed_ms};
pub use turnpike_forward::{Address, Balance, Endpoint, Host, Limits, PortRange, Rule, UnixName, ZonedIp};
pub use turnpike_turn::server::RealmLimits;

/// One shard, because loom requires every run of a model to make the same accesses.
const SHARDS: usize = 1;

#[derive(Clone, Debug)]
pub struct Config {
    pub limits: AllocationLimits,
    pub realm_limits: Vec<RealmLimits>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct UserKeys(u32);

const HOME: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

fn quotas_of(allocations: usize, allocations_per_user: usize) -> Arc<quotas::Quotas> {
    let limits = AllocationLimits { allocations, allocations_per_user, allocations_per_prefix: None };
    Arc::new(quotas::Quotas::new(&Config { limits, realm_limits: Vec::new() }))
}

fn with<T: 'static, R: 'static>(shared: &Arc<T>, work: impl FnOnce(&T) -> R + 'static) -> JoinHandle<R> {
    let shared = Arc::clone(shared);
    thread::spawn(move || work(&shared))
}

fn join<R>(thread: JoinHandle<R>) -> R {
    thread.join().unwrap_or_else(|_| panic!("the thread panicked"))
}

pub fn gauge_never_exceeds_its_limit() {
    loom::model(|| {
        let shared = Arc::new((gauge::Gauge::new(1), AtomicUsize::new(0)));
        let visit = |(gauge, inside): &(gauge::Gauge, AtomicUsize)| {
            if gauge.enter() {
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "another thread has entered");
                inside.fetch_sub(1, Ordering::SeqCst);
                gauge.leave();
            }
        };
        let other = with(&shared, visit);
        visit(&shared);
        join(other);
        assert_eq!(shared.0.now(), 0);
    });
}

pub fn a_refused_entry_does_not_cause_another_refusal() {
    loom::model(|| {
        let gauge = Arc::new(gauge::Gauge::new(1));
        assert!(gauge.enter());
        let other = with(&gauge, gauge::Gauge::enter);
        gauge.leave();
        let again = gauge.enter();
        assert!(join(other) || again, "one slot was free, but both threads were refused");
    });
}

pub fn quotas_are_never_exceeded_and_always_fully_returned() {
    loom::model(|| {
        let quotas = quotas_of(1, 1);
        let visit = |quotas: &quotas::Quotas| {
            let acquired = quotas.acquire(UserRef::new("realm", "alice"), HOME).is_ok();
            if acquired {
                assert_eq!(quotas.held().iter().map(|(_, count)| *count).sum::<usize>(), 1);
                quotas.release(UserRef::new("realm", "alice"), HOME);
            }
            acquired
        };
        let other = with(&quotas, visit);
        let own = visit(&quotas);
        assert!(join(other) || own, "one slot was free, but both threads were refused");
        assert!(quotas.held().is_empty());
        assert_eq!(quotas.acquire(UserRef::new("realm", "alice"), HOME), Ok(()));
    });
}

pub fn user_at_the_limit_does_not_block_other_users() {
    loom::model(|| {
        let quotas = quotas_of(2, 1);
        assert_eq!(quotas.acquire(UserRef::new("realm", "alice"), HOME), Ok(()));
        // Every interleaving refuses a second allocation by alice, and none refuses one by the other user.
        let greedy = with(&quotas, |quotas| quotas.acquire(UserRef::new("realm", "alice"), HOME));
        assert_eq!(
            quotas.acquire(UserRef::new("elsewhere", "alice"), HOME),
            Ok(()),
            "alice in the other realm is a different user"
        );
        assert!(join(greedy).is_err());
        assert_eq!(quotas.held().len(), 2);
    });
}

pub fn reused_port_is_open_only_for_its_new_owner() {
    loom::model(|| {
        let bits = Arc::new(pool_bits::PoolBits::default());
        let (port, udp) = (50_000, RelayTransport::Udp);
        assert!(bits.take(port));
        bits.opened(port, udp);
        let next = with(&bits, move |bits| {
            let is_its = bits.take(port);
            if is_its {
                assert!(!bits.is_open(port, udp), "still open from its previous owner");
                bits.opened(port, udp);
            }
            is_its
        });
        bits.free(port);
        let is_open = join(next);
        assert_eq!(bits.is_open(port, udp), is_open, "only its owner opened the port");
        assert_eq!(bits.is_taken(port), is_open);
    });
}

pub fn bucket_grants_each_byte_once() {
    loom::model(|| {
        let limits = Limits { max_bytes_per_second: Some(1_000_000), ..Limits::default() };
        let rates = rate::RuleRates::new(&limits).unwrap_or_else(|| panic!("no limit is set"));
        let pace = || rate::Pace::of(Some(&rates)).unwrap_or_else(|| panic!("no limit is set"));
        let (one, another) = (pace(), pace());
        assert_eq!(one.take(rate::UP, u64::MAX, 1), 100_000);
        let other = thread::spawn(move || another.take(rate::UP, u64::MAX, 3));
        let own = one.take(rate::UP, u64::MAX, 2);
        let both = own + join(other);
        assert_eq!(both + one.take(rate::UP, u64::MAX, 3), 2000, "two milliseconds' worth");
    });
}

pub fn version_of_a_name_is_never_visible_before_its_answer() {
    loom::model(|| {
        let name = Arc::new(resolver::ResolvedName::new("name.example", true));
        let answer = |last: u8| vec![ZonedIp::from([192, 0, 2, last])];
        let writer = with(&name, move |name| {
            name.set(Ok(answer(1)));
            name.set(Ok(answer(2)));
        });
        // Read the version before the addresses, as `forward::targets` does.
        let version = name.version();
        let last = name.addresses().first().map_or(0, |ip| match ip.ip() {
            IpAddr::V4(ip) => u32::from(ip.octets()[3]),
            IpAddr::V6(_) => 0,
        });
        assert!(last >= version, "the answer of version {last} was visible under version {version}");
        join(writer);
        assert_eq!((name.version(), name.addresses()), (2, answer(2)));
    });
}

fn pool_of(rate: u64, burst: i64) -> Arc<pool::RatePool> {
    Arc::new(pool::RatePool::new(Limit { rate, burst }, 0))
}

fn take_all(pool: &pool::RatePool, now_ms: u64) -> i64 {
    pool.take(Way::ToPeer, i64::MAX, 0, now_ms)
}

pub fn pool_grants_each_accrued_bit_once() {
    loom::model(|| {
        let pool = pool_of(1000, 10_000);
        assert_eq!(take_all(&pool, 0), 10_000, "the burst");
        let other = with(&pool, |pool| take_all(pool, 3));
        let own = take_all(&pool, 2);
        let both = own + join(other);
        assert_eq!(both + take_all(&pool, 3), 3000, "three milliseconds' worth");
    });
}

pub fn unused_part_of_a_lease_returns_to_the_pool() {
    loom::model(|| {
        let burst = 6 * 2048 * BYTE;
        let pool = pool_of(1, burst);
        let visit = |pool: &Arc<pool::RatePool>, now_ms| {
            let lease = pool::PoolLease::new(Arc::clone(pool));
            assert_eq!(lease.offers(Way::ToPeer, BYTE, 0, now_ms), BYTE, "the pool has enough");
            lease.spend(Way::ToPeer, BYTE, 0);
        };
        let shared = Arc::new(Arc::clone(&pool));
        let other = with(&shared, move |pool| visit(pool, 1));
        visit(&pool, 0);
        join(other);
        // Returning bits to a full pool has no effect.
        let left = take_all(&pool, 1);
        assert!((burst - 2 * BYTE..=burst - 2 * BYTE + 1).contains(&left), "{left} of {burst} bits are left");
    });
}

pub fn shares_do_not_exceed_the_pool() {
    loom::model(|| {
        let pool = pool_of(120, 10_000);
        let asks = |pool: &pool::RatePool, period| pool.join(Way::ToPeer, period, pool::WHOLE);
        (0..3).for_each(|_| asks(&pool, 1));
        // The first call of `join` in a period starts that period.
        let ask = move |pool: &pool::RatePool| {
            asks(pool, 2);
            let share = pool.share(Way::ToPeer);
            assert!(share <= 120 / 3, "the share of one of three allocations is {share} of 120 bits");
        };
        let other = with(&pool, ask);
        ask(&pool);
        join(other);
        // Each call of `join` is counted once, either in the old period or in the new one.
        let before = pool.share(Way::ToPeer);
        asks(&pool, 3);
        let shares = (before, pool.share(Way::ToPeer));
        assert!([(120 / 3, 120 / 2), (120 / 4, 120)].contains(&shares), "{shares:?}");
    });
}

pub fn worker_that_is_behind_does_not_lose_a_share() {
    for [own, other] in [[2, 3], [3, 2]] {
        loom::model(move || {
            let pool = pool_of(120, 10_000);
            let asks = |pool: &pool::RatePool, period| pool.join(Way::ToPeer, period, pool::WHOLE);
            let is_one_of_five = |pool: &pool::RatePool| {
                let share = pool.share(Way::ToPeer);
                assert!(share >= 120 / 5, "the share after five requests is {share} of 120 bits");
            };
            (0..3).for_each(|_| asks(&pool, 1));
            let worker = with(&pool, move |pool| asks(pool, other));
            asks(&pool, own);
            is_one_of_five(&pool);
            join(worker);
            is_one_of_five(&pool);
            asks(&pool, 9);
            assert_eq!(pool.share(Way::ToPeer), 120, "old requests are no longer counted");
        });
    }
}

pub fn changing_a_limit_grants_no_more_than_the_larger_of_old_and_new() {
    loom::model(|| {
        let pool = pool_of(1000, 10_000);
        assert_eq!(take_all(&pool, 0), 10_000, "the burst");
        let reload = with(&pool, |pool| pool.set(Limit { rate: 2000, burst: 5000 }));
        let given = take_all(&pool, 10);
        assert!([5000, 10_000].contains(&given), "{given}");
        join(reload);
        assert_eq!(take_all(&pool, 12), 4000, "at the new rate");
    });
}

pub fn pool_in_use_is_not_removed() {
    loom::model(|| {
        let pool = pool_of(1000, 10_000);
        let other = with(&pool, |pool| pool.take(Way::ToClient, 1, 0, 0));
        assert!(!pool::RatePool::is_idle(&pool, 0), "the pool is in use");
        assert_eq!(join(other), 1);
        assert!(!pool::RatePool::is_idle(&pool, 0), "the pool is not full");
        assert!(pool::RatePool::is_idle(&pool, 1), "the pool is full");
    });
}

pub fn older_answer_does_not_bring_back_an_invalidated_user() {
    for (everybody, swapped) in [(false, false), (false, true), (true, false), (true, true)] {
        loom::model(move || {
            let lifetimes = cache::Lifetimes {
                user: Duration::from_secs(60),
                absent: Duration::from_secs(60),
                stale: Duration::from_secs(60),
            };
            let shared = Arc::new((AtomicU32::new(1), cache::Cache::new(1, lifetimes)));
            let change = move |(database, cache): &(AtomicU32, cache::Cache<()>)| {
                database.store(2, Ordering::SeqCst);
                if everybody {
                    cache.clear();
                } else {
                    cache.forget("user");
                }
                assert!(is_new(cache), "later lookups get the old password");
            };
            let look_up = |(database, cache): &(AtomicU32, cache::Cache<()>)| {
                let epoch = cache.epoch();
                let found = std::sync::Arc::new(UserKeys(database.load(Ordering::SeqCst)));
                cache.put(epoch, "user", Some(found));
            };
            if swapped {
                let other = with(&shared, look_up);
                change(&shared);
                join(other);
            } else {
                let other = with(&shared, change);
                look_up(&shared);
                join(other);
            }
            assert!(is_new(&shared.1), "an old password is still cached");
        });
    }
}

fn is_new(cache: &cache::Cache<()>) -> bool {
    match cache.get("user") {
        cache::Cached::Fresh(keys) | cache::Cached::Stale(keys) => *keys == UserKeys(2),
        cache::Cached::Absent | cache::Cached::Unknown => true,
    }
}

/// A DNS name and its targets. The targets use the first answer; the name already has a second one.
fn targets_of_a_name() -> (std::sync::Arc<resolver::ResolvedName>, Arc<targets::Targets>) {
    let name = std::sync::Arc::new(resolver::ResolvedName::new("name.example", true));
    name.set(Ok(vec![answer(1)]));
    let ports = PortRange { first: 80, last: 80 };
    let target = Endpoint { host: Host::Name("name.example".to_owned()), ports, weight: 1 };
    let rule = Rule { targets: vec![target], ..Rule::default() };
    let targets = targets::Targets::new(&rule, |_, _| std::sync::Arc::clone(&name));
    name.set(Ok(vec![answer(2)]));
    (name, Arc::new(targets))
}

fn answer(last: u8) -> ZonedIp {
    [192, 0, 2, last].into()
}

fn addresses(targets: &targets::Targets) -> Vec<Address> {
    targets.current().iter().map(|member| member.address(0)).collect()
}

fn at(last: u8) -> Vec<Address> {
    vec![answer(last).at(80).into()]
}

pub fn choice_never_uses_an_answer_older_than_its_version() {
    loom::model(|| {
        let (name, targets) = targets_of_a_name();
        let writer = {
            let name = std::sync::Arc::clone(&name);
            thread::spawn(move || name.set(Ok(vec![answer(3)])))
        };
        let version = name.version();
        let chosen = addresses(&targets);
        assert!(chosen == at(3) || (version < 3 && chosen == at(2)), "{chosen:?} under version {version}");
        join(writer);
        assert_eq!(addresses(&targets), at(3));
    });
}

pub fn two_workers_apply_an_answer_and_both_see_its_addresses() {
    loom::model(|| {
        let (_name, targets) = targets_of_a_name();
        let worker = with(&targets, addresses);
        assert_eq!(addresses(&targets), at(2), "one of the threads applied it");
        assert_eq!(join(worker), at(2), "one of the threads applied it");
    });
}

pub fn connection_keeps_an_address_that_the_name_lost() {
    loom::model(|| {
        let (name, targets) = targets_of_a_name();
        assert_eq!(addresses(&targets), at(2));
        let worker = with(&targets, |targets| {
            let targets::Pick::At(seat, _) = targets.pick(None, 0, &[], false) else {
                panic!("no target was picked");
            };
            let slot = seat.slot();
            assert!(
                targets.member(slot).is_some_and(|member| member.slot == slot),
                "the target has been removed"
            );
            assert_eq!(seat.keep(), slot);
            assert!(targets.member(slot).is_some(), "the target has been removed");
            slot
        });
        name.set(Ok(vec![answer(3)]));
        assert_eq!(addresses(&targets), at(3));
        let slot = join(worker);
        targets.leave(slot);
        name.set(Ok(vec![answer(4)]));
        assert_eq!(addresses(&targets), at(4));
        assert!(targets.member(slot).is_none(), "the entry still exists without an owner");
    });
}
