//! Rate limits of API keys: a token bucket per key with a burst of one second.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Maximum number of keys whose bucket is not full; additional keys have to wait.
const MOST: usize = 65_536;

/// The buckets. Full ones are removed when space is needed.
#[derive(Debug)]
pub(crate) struct KeyRates {
    began: Instant,
    /// Time when each bucket will be full, by key name, in microseconds since `began`.
    full_at: Mutex<HashMap<String, u64>>,
    most: usize,
}

impl Default for KeyRates {
    fn default() -> Self {
        Self { began: Instant::now(), full_at: Mutex::default(), most: MOST }
    }
}

impl KeyRates {
    /// Takes a token from this key's bucket, which gets `rate` tokens per second. If none is left,
    /// returns the wait until the next one.
    pub(crate) fn spend(&self, key: &str, rate: u32) -> Result<(), Duration> {
        let now = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.spend_at(now, key, rate)
    }

    fn spend_at(&self, now: u64, key: &str, rate: u32) -> Result<(), Duration> {
        const SECOND: u64 = 1_000_000;
        let interval = (SECOND / u64::from(rate.max(1))).max(1);
        let mut buckets = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= self.most && !buckets.contains_key(key) {
            buckets.retain(|_, full_at| *full_at > now);
            if buckets.len() >= self.most {
                return Err(Duration::from_micros(SECOND));
            }
        }
        let held = buckets.get(key).copied().unwrap_or_default();
        let full_at = held.max(now) + interval;
        let over = full_at.saturating_sub(now + SECOND);
        if over > 0 {
            return Err(Duration::from_micros(over));
        }
        buckets.insert(key.to_owned(), full_at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn granted(rates: &KeyRates, now: u64, key: &str, rate: u32) -> usize {
        (0..100).filter(|_| rates.spend_at(now, key, rate).is_ok()).count()
    }

    #[test]
    fn key_is_limited_to_its_rate_and_a_burst_of_one_second() {
        let rates = KeyRates::default();
        assert_eq!(granted(&rates, 0, "shop", 10), 10);
        assert_eq!(rates.spend_at(0, "shop", 10), Err(Duration::from_millis(100)));
        assert_eq!(granted(&rates, SECOND / 2, "shop", 10), 5);
        assert_eq!(granted(&rates, 100 * SECOND, "shop", 10), 10, "the burst is limited");
        assert_eq!(granted(&rates, 100 * SECOND, "other", 1), 1, "each key has its own bucket");
        assert_eq!(rates.spend_at(100 * SECOND, "other", 1), Err(Duration::from_secs(1)));
        assert_eq!(granted(&rates, 0, "fast", u32::MAX), 100);
    }

    #[test]
    fn key_rates_are_bounded_and_additional_keys_wait() {
        let rates = KeyRates { most: 3, ..KeyRates::default() };
        for key in ["a", "b", "c"] {
            assert_eq!(granted(&rates, 0, key, 2), 2);
        }
        assert_eq!(rates.spend_at(0, "d", 2), Err(Duration::from_secs(1)));
        assert_eq!(rates.spend_at(SECOND / 2, "a", 2), Ok(()), "existing keys keep their bucket");
        assert_eq!(rates.spend_at(SECOND + 1, "d", 2), Ok(()));
        assert_eq!(rates.full_at.lock().unwrap().len(), 2, "full buckets were removed");
    }
}
