//! What the product's threads share without a lock around all of it, built once more with the types of loom, which runs threads in
//! every order that there is and lets them see whatever their memory orderings allow. The files are the product's own: each says
//! `crate::sync`, which is the standard library there and loom here.
//!
//! Each function below is one model, and a test of the same name runs it. Beyond two threads and a few operations each there are too
//! many orders to try; the smallest case of each fault has no more.
#![cfg(not(test))] // Nor are the tests beside what is borrowed built here: they know nothing of loom.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "a model needs a part of what it borrows")]
#![allow(clippy::modulo_one, reason = "of one part, each key is in it")]
#![allow(missing_docs, unreachable_pub, reason = "functions that are called what they show")]

use loom::sync;

#[path = "../../relay/src/stream/admission.rs"]
mod admission;
#[path = "../../forward/src/gauge.rs"]
mod gauge;
#[path = "../../relay/src/pool_bits.rs"]
mod pool_bits;
#[path = "../../relay/src/quotas.rs"]
mod quotas;
#[path = "../../forward/src/rate.rs"]
mod rate;
#[path = "../../forward/src/resolver.rs"]
mod resolver;

use std::net::{IpAddr, Ipv4Addr};

use loom::{
    sync::{Arc, atomic::AtomicUsize, atomic::Ordering},
    thread::{self, JoinHandle},
};
use turnpike_turn::server::RelayTransport;

/// One part, so that it is no matter of chance who meets in it: loom wants every run alike.
const SHARDS: usize = 1;

/// What [`admission`] refuses with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    LimitTotal,
    LimitAddress,
}

/// What [`quotas`] is told of a realm.
#[derive(Clone, Debug)]
pub struct RealmLimits {
    pub realm: String,
    pub allocations: Option<usize>,
    pub allocations_per_user: Option<usize>,
}

/// What [`quotas`] is told of all of them.
#[derive(Clone, Debug)]
pub struct Config {
    pub max_allocations: usize,
    pub max_allocations_per_user: usize,
    pub max_allocations_per_prefix: Option<usize>,
    pub realm_limits: Vec<RealmLimits>,
}

/// Where all clients of a model are.
const HOME: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// So many allocations in total, and of one user.
fn quotas_of(max_allocations: usize, max_allocations_per_user: usize) -> Arc<quotas::Quotas> {
    let (max_allocations_per_prefix, realm_limits) = (None, Vec::new());
    Arc::new(quotas::Quotas::new(&Config {
        max_allocations,
        max_allocations_per_user,
        max_allocations_per_prefix,
        realm_limits,
    }))
}

/// What [`rate`] is told of a rule.
mod rule {
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Limits {
        pub(crate) bytes_per_second: Option<u64>,
        pub(crate) bytes_per_second_per_connection: Option<u64>,
        pub(crate) connections: Option<u64>,
    }
}

/// Runs `work` in a thread of its own, with something that is shared.
fn with<T: 'static, R: 'static>(shared: &Arc<T>, work: impl FnOnce(&T) -> R + 'static) -> JoinHandle<R> {
    let shared = Arc::clone(shared);
    thread::spawn(move || work(&shared))
}

fn join<R>(thread: JoinHandle<R>) -> R {
    thread.join().unwrap_or_else(|_| panic!("the thread has said why"))
}

pub fn a_gauge_lets_in_no_more_than_its_limit() {
    loom::model(|| {
        let shared = Arc::new((gauge::Gauge::new(1), AtomicUsize::new(0)));
        let visit = |(gauge, inside): &(gauge::Gauge, AtomicUsize)| {
            if gauge.enter() {
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "another is in");
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

pub fn a_gauge_refuses_nobody_for_the_sake_of_somebody_who_was_refused() {
    loom::model(|| {
        let gauge = Arc::new(gauge::Gauge::new(1));
        assert!(gauge.enter());
        let other = with(&gauge, gauge::Gauge::enter);
        gauge.leave();
        let again = gauge.enter();
        assert!(join(other) || again, "there was a place, and two were refused");
    });
}

pub fn quotas_are_never_exceeded_and_given_back_whole() {
    loom::model(|| {
        let quotas = quotas_of(1, 1);
        let visit = |quotas: &quotas::Quotas| {
            let acquired = quotas.acquire("realm", "alice", HOME).is_ok();
            if acquired {
                assert_eq!(quotas.held().iter().map(|(_, count)| *count).sum::<usize>(), 1);
                quotas.release("realm", "alice", HOME);
            }
            acquired
        };
        let other = with(&quotas, visit);
        let own = visit(&quotas);
        assert!(join(other) || own, "there was a place, and two were refused");
        assert!(quotas.held().is_empty());
        assert_eq!(quotas.acquire("realm", "alice", HOME), Ok(()));
    });
}

pub fn a_user_at_the_limit_takes_no_place_from_others() {
    loom::model(|| {
        let quotas = quotas_of(2, 1);
        assert_eq!(quotas.acquire("realm", "alice", HOME), Ok(()));
        // She is refused, whatever happens meanwhile, and bob is not.
        let greedy = with(&quotas, |quotas| quotas.acquire("realm", "alice", HOME));
        assert_eq!(quotas.acquire("elsewhere", "alice", HOME), Ok(()), "another user");
        assert!(join(greedy).is_err());
        assert_eq!(quotas.held().len(), 2);
    });
}

pub fn a_port_that_is_taken_again_has_nothing_open_but_what_its_owner_opens() {
    loom::model(|| {
        let bits = Arc::new(pool_bits::PoolBits::default());
        let (port, udp) = (50_000, RelayTransport::Udp);
        assert!(bits.take(port));
        bits.opened(port, udp);
        let next = with(&bits, move |bits| {
            let is_its = bits.take(port);
            if is_its {
                assert!(!bits.is_open(port, udp), "still somebody else's");
                bits.opened(port, udp);
            }
            is_its
        });
        bits.free(port);
        let is_open = join(next);
        assert_eq!(bits.is_open(port, udp), is_open, "the owner of a port has opened it, nobody else");
        assert_eq!(bits.is_taken(port), is_open);
    });
}

pub fn an_address_has_no_more_connections_than_it_may_and_loses_none() {
    loom::model(|| {
        let admission = Arc::new(admission::Admission::new(1, 1));
        let address = IpAddr::from([192, 0, 2, 1]);
        let visit = move |admission: &admission::Admission| {
            if admission.enter().is_err() {
                return false;
            }
            assert_eq!(admission.enter_from(address), Ok(()), "who is in is the only one");
            admission.leave_from(address);
            admission.leave();
            true
        };
        let other = with(&admission, visit);
        let own = visit(&admission);
        assert!(join(other) || own);
        assert!(visit(&admission), "nobody is left");
    });
}

pub fn a_bucket_gives_each_byte_once_whoever_fills_it() {
    loom::model(|| {
        let limits = rule::Limits { bytes_per_second: Some(1_000_000), ..rule::Limits::default() };
        let rates = rate::Rates::new(&limits).unwrap_or_else(|| panic!("there is a limit"));
        let pace = || rate::Pace::of(Some(&rates)).unwrap_or_else(|| panic!("there is a limit"));
        let (one, another) = (pace(), pace());
        // The burst.
        assert_eq!(one.take(rate::UP, u64::MAX, 1), 100_000);
        let other = thread::spawn(move || another.take(rate::UP, u64::MAX, 3));
        let own = one.take(rate::UP, u64::MAX, 2);
        let both = own + join(other);
        assert_eq!(both + one.take(rate::UP, u64::MAX, 3), 2000, "two milliseconds' worth");
    });
}

pub fn the_version_of_a_name_is_never_ahead_of_its_answer() {
    loom::model(|| {
        let name = Arc::new(resolver::Name::new("name.example", true));
        let answer = |last: u8| vec![IpAddr::from([192, 0, 2, last])];
        let writer = with(&name, move |name| {
            name.set(answer(1));
            name.set(answer(2));
        });
        // As a rule takes the answer: the version first.
        let version = name.version();
        let last = name.addresses().first().map_or(0, |ip| match ip {
            IpAddr::V4(ip) => u32::from(ip.octets()[3]),
            IpAddr::V6(_) => 0,
        });
        assert!(last >= version, "the answer of version {last} under version {version}");
        join(writer);
        assert_eq!((name.version(), name.addresses()), (2, answer(2)));
    });
}
