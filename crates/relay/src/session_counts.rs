//! What a worker counts when a session begins and when it ends: how long its client waited, how long it lived, and what each realm has had.
//! Requests come here, packets never do.

use std::{sync::Arc, time::Duration};

use turnpike_turn::server::Effect;

/// Upper bounds of [`SessionCounts::openings`].
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

/// Upper bounds of [`SessionCounts::lives`].
pub const LIFE_BOUNDS: [Duration; 11] = [
    Duration::from_secs(1),
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
    Duration::from_secs(300),
    Duration::from_secs(600),
    Duration::from_secs(1800),
    Duration::from_secs(3600),
    Duration::from_secs(4 * 3600),
    Duration::from_secs(12 * 3600),
    Duration::from_secs(24 * 3600),
];

/// Never reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionCounts {
    /// From the wake-up in which an Allocate was received until its relay sockets were open, of those that succeeded. What waited for the
    /// credential store is told to the millisecond.
    pub openings: Durations<{ OPENING_BOUNDS.len() + 1 }>,
    /// From there until the end.
    pub lives: Durations<{ LIFE_BOUNDS.len() + 1 }>,
    /// By realm, in the order in which they came.
    pub realms: Vec<RealmCounts>,
}

/// How many times there were between one bound and the next; the last bucket has what is beyond the last bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Durations<const N: usize> {
    /// Not cumulative.
    pub buckets: [u64; N],
    /// Of all of them.
    pub sum: Duration,
}

/// What a realm has had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RealmCounts {
    /// Its name.
    pub realm: Arc<str>,
    /// Sessions that began.
    pub opened: u64,
    /// Sessions that ended.
    pub closed: u64,
    /// What those that have ended had relayed to peers: datagrams and bytes of payload.
    pub to_peer: (u64, u64),
    /// To clients.
    pub to_client: (u64, u64),
}

impl<const N: usize> Default for Durations<N> {
    fn default() -> Self {
        Self { buckets: [0; N], sum: Duration::ZERO }
    }
}

impl<const N: usize> Durations<N> {
    fn count(&mut self, bounds: &[Duration], time: Duration) {
        let index = bounds.iter().position(|bound| time <= *bound).unwrap_or(N - 1);
        self.buckets[index] += 1;
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

impl SessionCounts {
    /// Counts what began or ended. `since` the wake-up of this tick so much time has passed: the clock is read for a new session only.
    pub(crate) fn hear(&mut self, effect: &Effect, since: impl FnOnce() -> Duration) {
        match effect {
            Effect::Opened { realm, waited_ms: Some(waited_ms), .. } => {
                let waited = Duration::from_millis(*waited_ms);
                self.openings.count(&OPENING_BOUNDS, waited.saturating_add(since()));
                self.realm(realm).opened += 1;
            }
            // It never began where there is no relayed address.
            Effect::Closed {
                realm,
                relayed: [Some(_), _] | [_, Some(_)],
                lived_ms,
                to_peer,
                to_client,
                ..
            } => {
                self.lives.count(&LIFE_BOUNDS, Duration::from_millis(*lived_ms));
                let counts = self.realm(realm);
                counts.closed += 1;
                for (sum, more) in [(&mut counts.to_peer, to_peer), (&mut counts.to_client, to_client)] {
                    *sum = (sum.0 + more.0, sum.1 + more.1);
                }
            }
            _ => {}
        }
    }

    fn realm(&mut self, realm: &Arc<str>) -> &mut RealmCounts {
        let index = match self.realms.iter().position(|counts| counts.realm == *realm) {
            Some(index) => index,
            None => {
                let realm = Arc::clone(realm);
                self.realms.push(RealmCounts {
                    realm,
                    opened: 0,
                    closed: 0,
                    to_peer: (0, 0),
                    to_client: (0, 0),
                });
                self.realms.len() - 1
            }
        };
        &mut self.realms[index]
    }

    /// Adds another worker's.
    pub fn merge(&mut self, other: &Self) {
        self.openings.merge(&other.openings);
        self.lives.merge(&other.lives);
        for RealmCounts { realm, opened, closed, to_peer, to_client } in &other.realms {
            let counts = self.realm(realm);
            counts.opened += opened;
            counts.closed += closed;
            counts.to_peer = (counts.to_peer.0 + to_peer.0, counts.to_peer.1 + to_peer.1);
            counts.to_client = (counts.to_client.0 + to_client.0, counts.to_client.1 + to_client.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use turnpike_turn::server::{
        AllocationId, Client, ClosedReason, Link, ListenerId, RelayTransport, SessionId, Transport,
    };

    use super::*;

    const ALLOCATION: AllocationId = AllocationId { index: 0, generation: 0 };

    fn session() -> SessionId {
        "00112233445566778899aabbccddeeff".parse().unwrap()
    }

    fn client() -> Client {
        let address = "192.0.2.9:50000".parse().unwrap();
        Client { listener: ListenerId(0), address, local: "192.0.2.1:3478".parse().unwrap() }
    }

    fn opened(realm: &str, waited_ms: Option<u64>) -> Effect {
        Effect::Opened {
            allocation: ALLOCATION,
            session: session(),
            client: client(),
            link: Link(0),
            expires_ms: 1,
            realm: realm.into(),
            username: "alice".into(),
            relayed: ("198.51.100.1:50000".parse().unwrap(), None),
            waited_ms,
        }
    }

    fn closed(realm: &str, lived_ms: u64, relayed: Option<&str>) -> Effect {
        Effect::Closed {
            allocation: ALLOCATION,
            session: session(),
            client: client(),
            realm: realm.into(),
            username: "alice".into(),
            identity: None,
            relayed: [relayed.map(|text| text.parse().unwrap()), None],
            transport: Transport::Udp,
            relay_transport: RelayTransport::Udp,
            reason: ClosedReason::Deleted,
            away: false,
            lived_ms,
            to_peer: (3, 300),
            to_client: (4, 400),
        }
    }

    #[test]
    fn bounds_ascend_and_a_time_is_counted_below_the_first_that_it_does_not_exceed() {
        assert!(OPENING_BOUNDS.is_sorted() && LIFE_BOUNDS.is_sorted());
        let mut counts = SessionCounts::default();
        let us = Duration::from_micros;
        for (waited_ms, since) in [(0, us(100)), (0, us(101)), (7, us(400)), (20_000, us(1))] {
            counts.hear(&opened("a", Some(waited_ms)), || since);
        }
        let buckets = counts.openings.buckets;
        assert_eq!((buckets[0], buckets[1], buckets[6], buckets[15]), (1, 1, 1, 1), "{buckets:?}");
        assert_eq!(counts.openings.sum, us(100 + 101 + 7400 + 20_000_001));
    }

    #[test]
    fn what_comes_from_another_process_is_no_opening_and_what_never_began_no_end() {
        let mut counts = SessionCounts::default();
        counts.hear(&opened("a", None), || panic!("the clock is not asked"));
        counts.hear(&closed("a", 0, None), || panic!("the clock is not asked"));
        assert_eq!(counts, SessionCounts::default());
    }

    #[test]
    fn each_realm_has_its_own_and_workers_add_up() {
        let mut counts = SessionCounts::default();
        counts.hear(&opened("a", Some(0)), || Duration::ZERO);
        counts.hear(&closed("a", 59_000, Some("198.51.100.1:50000")), || panic!("the clock is not asked"));
        let mut sum = SessionCounts::default();
        sum.hear(&opened("b", Some(0)), || Duration::ZERO);
        sum.merge(&counts);
        sum.merge(&counts);
        assert_eq!((sum.lives.buckets[3], sum.openings.buckets[0]), (2, 3));
        let of = |realm: &str| sum.realms.iter().find(|counts| *counts.realm == *realm).unwrap().clone();
        assert_eq!(
            (of("a").opened, of("a").closed, of("a").to_peer, of("a").to_client),
            (2, 2, (6, 600), (8, 800))
        );
        assert_eq!((of("b").opened, of("b").closed), (1, 0));
    }
}
