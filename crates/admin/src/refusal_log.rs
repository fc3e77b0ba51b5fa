//! Limits the log lines about refused requests, so that a client cannot fill the disk.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::{Mutex, PoisonError},
    time::Instant,
};

use turnpike_rates::{Rate, Rates};

use crate::via::Via;

pub(crate) struct RefusalLogLimit {
    began: Instant,
    rates: Mutex<Rates>,
}

impl Default for RefusalLogLimit {
    fn default() -> Self {
        // Few enough lines for people to read: a burst of five lines per address, then one per second.
        let rates = Rates::new(Rate::new(5, 1000), Rate::new(50, 100), 1024);
        Self { began: Instant::now(), rates: Mutex::new(rates) }
    }
}

impl RefusalLogLimit {
    pub(crate) fn admits(&self, via: &Via) -> bool {
        let now = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let local = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        let ip = via.address().map_or(local, |address| address.ip());
        self.rates.lock().unwrap_or_else(PoisonError::into_inner).admit_address(now, ip)
    }
}
