//! How long clients wait for their allocations. Requests come here, packets never do.

use std::time::Duration;

use turnpike_turn::server::Effect;

/// Upper bounds of the times that are told apart.
pub const OPENING_BOUNDS: [Duration; 15] = [
    Duration::from_micros(100),
    Duration::from_micros(250),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_micros(2500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_millis(2500),
    Duration::from_secs(10),
];

/// From the wake-up in which an Allocate was received until its relay sockets were open, of those that succeeded. What waited for the
/// credential store is told to the millisecond. Never reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Openings {
    /// How many there were between one bound and the next; the last bucket has what is beyond the last bound.
    pub buckets: [u64; OPENING_BOUNDS.len() + 1],
    /// Of all of them.
    pub sum: Duration,
}

impl Openings {
    /// Counts a session that begins. `since` its wake-up so much time has passed: the clock is read for a new session only.
    pub(crate) fn hear(&mut self, effect: &Effect, since: impl FnOnce() -> Duration) {
        // One that has come from another process did not wait here.
        let Effect::Opened { waited_ms: Some(waited_ms), .. } = effect else { return };
        let time = Duration::from_millis(*waited_ms).saturating_add(since());
        let bucket = OPENING_BOUNDS.iter().position(|bound| time <= *bound);
        self.buckets[bucket.unwrap_or(OPENING_BOUNDS.len())] += 1;
        self.sum = self.sum.saturating_add(time);
    }

    /// Adds another worker's.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.buckets.iter_mut().zip(other.buckets) {
            *count += more;
        }
        self.sum = self.sum.saturating_add(other.sum);
    }
}

#[cfg(test)]
mod tests {
    use turnpike_turn::server::{AllocationId, Client, Link, ListenerId};

    use super::*;

    fn opened(waited_ms: Option<u64>) -> Effect {
        let address = "192.0.2.9:50000".parse().unwrap();
        Effect::Opened {
            allocation: AllocationId { index: 0, generation: 0 },
            session: "00112233445566778899aabbccddeeff".parse().unwrap(),
            client: Client { listener: ListenerId(0), address, local: "192.0.2.1:3478".parse().unwrap() },
            link: Link(0),
            expires_ms: 1,
            realm: "example.org".into(),
            username: "alice".into(),
            relayed: ("198.51.100.1:50000".parse().unwrap(), None),
            waited_ms,
        }
    }

    #[test]
    fn bounds_ascend_and_a_time_is_counted_below_the_first_that_it_does_not_exceed() {
        assert!(OPENING_BOUNDS.is_sorted());
        let mut openings = Openings::default();
        let us = Duration::from_micros;
        for (waited_ms, since) in [(0, us(100)), (0, us(101)), (7, us(400)), (20_000, us(1))] {
            openings.hear(&opened(Some(waited_ms)), || since);
        }
        let Openings { buckets, sum } = openings;
        assert_eq!((buckets[0], buckets[1], buckets[6], buckets[15]), (1, 1, 1, 1), "{buckets:?}");
        assert_eq!(sum, us(100 + 101 + 7400 + 20_000_001));
        openings.merge(&openings.clone());
        assert_eq!((openings.buckets[6], openings.sum), (2, 2 * sum));
    }

    #[test]
    fn what_comes_from_another_process_did_not_wait_here() {
        let mut openings = Openings::default();
        openings.hear(&opened(None), || panic!("the clock is not asked"));
        assert_eq!(openings, Openings::default());
    }
}
