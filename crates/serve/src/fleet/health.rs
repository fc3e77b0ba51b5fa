//! Availability of the store. Times are milliseconds of the node's own clock.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use turnpike_fleet::GONE_MS;
use turnpike_stores::StoreError;

/// Time without an answer after which a node is alone.
const ALONE_MS: u64 = 3000;
/// Time without an accepted heartbeat after which a node is alone, even if the store answers other requests:
/// by then the other nodes consider it gone.
const UNKNOWN_MS: u64 = GONE_MS;
/// Interval between log lines about the same error.
const AGAIN_MS: u64 = 60_000;
const NEVER: u64 = u64::MAX;

pub(super) struct Health {
    answered: AtomicU64,
    unbeaten: AtomicU64,
    /// Start of the period without failed requests.
    since: AtomicU64,
    said: AtomicBool,
    trouble: Mutex<Trouble>,
}

#[derive(Default)]
struct Trouble {
    last: Option<String>,
    told: Option<(String, u64)>,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            answered: AtomicU64::new(NEVER),
            unbeaten: AtomicU64::new(NEVER),
            since: AtomicU64::new(NEVER),
            said: AtomicBool::new(false),
            trouble: Mutex::default(),
        }
    }
}

impl Health {
    pub(super) fn answered(&self, now_ms: u64) {
        self.answered.store(now_ms, Ordering::Relaxed);
        let _ = self.since.compare_exchange(NEVER, now_ms, Ordering::Relaxed, Ordering::Relaxed);
        if !self.is_alone(now_ms) && self.said.swap(false, Ordering::Relaxed) {
            *self.trouble() = Trouble::default();
            tracing::info!("fleet store reachable again; this node is a member of the fleet");
        }
    }

    /// Records a heartbeat that the store has accepted or answered with a refusal.
    pub(super) fn beaten(&self, now_ms: u64) {
        self.unbeaten.store(NEVER, Ordering::Relaxed);
        self.answered(now_ms);
    }

    pub(super) fn unbeaten(&self, now_ms: u64, error: &StoreError) {
        let _ = self.unbeaten.compare_exchange(NEVER, now_ms, Ordering::Relaxed, Ordering::Relaxed);
        self.failed(now_ms, error);
    }

    pub(super) fn failed(&self, now_ms: u64, error: &StoreError) {
        self.since.store(NEVER, Ordering::Relaxed);
        let text = error.to_string();
        let mut trouble = self.trouble();
        if self.is_alone(now_ms) {
            if !self.said.swap(true, Ordering::Relaxed) {
                tracing::error!(
                    "{text}; this node is alone: quotas are local, and clients are not redirected because of load"
                );
                trouble.told = Some((text.clone(), now_ms));
            }
        } else if trouble
            .told
            .as_ref()
            .is_none_or(|(told, at)| *told != text && now_ms - at >= AGAIN_MS / 6 || now_ms - at >= AGAIN_MS)
        {
            tracing::warn!("{text}");
            trouble.told = Some((text.clone(), now_ms));
        }
        trouble.last = Some(text);
    }

    /// True if this node's view of the fleet is outdated.
    pub(super) fn is_alone(&self, now_ms: u64) -> bool {
        let answers = match self.answered.load(Ordering::Relaxed) {
            NEVER => false,
            at => now_ms.saturating_sub(at) <= ALONE_MS,
        };
        let is_unknown = match self.unbeaten.load(Ordering::Relaxed) {
            NEVER => false,
            since => now_ms.saturating_sub(since) >= UNKNOWN_MS,
        };
        !answers || is_unknown
    }

    /// Duration of the period without failed requests, in milliseconds.
    pub(super) fn steady_ms(&self, now_ms: u64) -> u64 {
        match self.since.load(Ordering::Relaxed) {
            NEVER => 0,
            since => now_ms.saturating_sub(since),
        }
    }

    pub(super) fn trouble_of(&self, now_ms: u64) -> Option<String> {
        self.is_alone(now_ms)
            .then(|| self.trouble().last.clone().unwrap_or_else(|| "no answer yet".to_owned()))
    }

    fn trouble(&self) -> std::sync::MutexGuard<'_, Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use turnpike_stores::StoreFault;

    use super::*;

    fn error() -> StoreError {
        StoreError {
            store: "redis://h".to_owned(),
            setting: "fleet.url",
            fault: StoreFault::Slow,
            detail: "2 s".to_owned(),
        }
    }

    #[test]
    fn a_node_is_alone_after_three_seconds_without_an_answer() {
        let health = Health::default();
        assert!(health.is_alone(0) && health.trouble_of(0).is_some());
        health.answered(1000);
        for (now, alone) in [(1000, false), (4000, false), (4001, true)] {
            assert_eq!(health.is_alone(now), alone, "{now}");
        }
        health.failed(4500, &error());
        assert_eq!(health.trouble_of(4500), Some(error().to_string()));
        health.answered(5000);
        assert_eq!((health.is_alone(5000), health.trouble_of(5000)), (false, None));
    }

    #[test]
    fn a_node_is_alone_when_the_store_answers_but_rejects_heartbeats() {
        let health = Health::default();
        health.beaten(1000);
        for now in (2000..2000 + UNKNOWN_MS).step_by(1000) {
            health.unbeaten(now, &error());
            health.answered(now);
            assert!(!health.is_alone(now), "{now}");
        }
        let late = 2000 + UNKNOWN_MS;
        health.answered(late);
        assert!(health.is_alone(late));
        health.unbeaten(late, &error());
        assert_eq!(health.trouble_of(late), Some(error().to_string()));
        health.beaten(late);
        assert_eq!((health.is_alone(late), health.trouble_of(late)), (false, None));
    }

    #[test]
    fn the_store_is_steady_while_nothing_fails() {
        let health = Health::default();
        assert_eq!(health.steady_ms(500), 0);
        health.answered(1000);
        health.answered(3000);
        assert_eq!(health.steady_ms(4000), 3000);
        health.failed(4000, &error());
        assert_eq!(health.steady_ms(4000), 0);
        health.answered(4500);
        assert_eq!(health.steady_ms(5000), 500);
    }
}
