//! Session tickets (RFC 8446 section 4.6.1, RFC 5077): encrypted session state under a key shared by all
//! workers and rotated every six hours. rustls supports such tickets but does not expose its keys. These keys
//! can be passed to a new process, so that clients can resume their sessions there.

use std::{
    fmt,
    sync::{
        PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use aes_gcm::{
    Aes256Gcm,
    aead::{AeadInOut, KeyInit},
};
use rustls::server::ProducesTickets;
use serde::{Deserialize, Serialize};
use zeroize::{ZeroizeOnDrop, Zeroizing};

/// Time for which a key encrypts tickets; after that, it still decrypts them for an equally long time.
const TERM: Duration = Duration::from_secs(6 * 3600);
const NONCE_LEN: usize = 12;
const TAG_LEN: usize = 16;

type Key = [u8; 32];

/// Keys passed to another process. Excluded from debug output and zeroized on drop.
#[derive(Clone, Serialize, Deserialize, ZeroizeOnDrop)]
pub struct TicketKeys {
    current: Key,
    previous: Option<Key>,
    /// Age of the current key in seconds.
    age: u64,
}

impl fmt::Debug for TicketKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TicketKeys(..)")
    }
}

pub(super) struct Tickets {
    keys: RwLock<Keys>,
    is_disabled: AtomicBool,
}

#[derive(ZeroizeOnDrop)]
struct Keys {
    current: Key,
    previous: Option<Key>,
    #[zeroize(skip)]
    since: Instant,
}

impl Tickets {
    pub(super) fn new() -> Self {
        let keys = Keys { current: rand::random(), previous: None, since: Instant::now() };
        Self { keys: RwLock::new(keys), is_disabled: AtomicBool::new(false) }
    }

    /// Issues and accepts tickets, or neither.
    pub(super) fn enable(&self, is_enabled: bool) {
        self.is_disabled.store(!is_enabled, Ordering::Relaxed);
    }

    pub(super) fn keys(&self) -> TicketKeys {
        let keys = self.read();
        TicketKeys { current: keys.current, previous: keys.previous, age: keys.since.elapsed().as_secs() }
    }

    pub(super) fn take_over(&self, TicketKeys { current, previous, age }: &TicketKeys) {
        let now = Instant::now();
        // Soon after boot, the clock cannot represent that time; in that case the key is used slightly
        // longer.
        let since = now.checked_sub(Duration::from_secs(*age)).unwrap_or(now);
        *self.write() = Keys { current: *current, previous: *previous, since };
    }

    fn seal(&self, now: Instant, plain: &[u8]) -> Option<Vec<u8>> {
        let key = self.current(now);
        let nonce: [u8; NONCE_LEN] = rand::random();
        let mut ticket = Vec::with_capacity(NONCE_LEN + plain.len() + TAG_LEN);
        ticket.extend_from_slice(&nonce);
        ticket.extend_from_slice(plain);
        let text = &mut ticket[NONCE_LEN..];
        let tag = Aes256Gcm::new((&*key).into()).encrypt_inout_detached((&nonce).into(), &[], text.into());
        ticket.extend_from_slice(&tag.ok()?);
        Some(ticket)
    }

    fn open(&self, now: Instant, ticket: &[u8]) -> Option<Vec<u8>> {
        let (nonce, sealed) = ticket.split_first_chunk::<NONCE_LEN>()?;
        let (sealed, tag) = sealed.split_last_chunk::<TAG_LEN>()?;
        self.read().good(now).find_map(|key| {
            let mut text = sealed.to_vec();
            Aes256Gcm::new(key.into())
                .decrypt_inout_detached(nonce.into(), &[], text.as_mut_slice().into(), tag.into())
                .is_ok()
                .then_some(text)
        })
    }

    fn current(&self, now: Instant) -> Zeroizing<Key> {
        let keys = self.read();
        if keys.age(now) < TERM {
            return Zeroizing::new(keys.current);
        }
        drop(keys);
        let mut keys = self.write();
        let age = keys.age(now);
        if age >= TERM {
            let previous = (age < 2 * TERM).then_some(keys.current);
            *keys = Keys { current: rand::random(), previous, since: now };
        }
        Zeroizing::new(keys.current)
    }

    fn read(&self) -> RwLockReadGuard<'_, Keys> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Keys> {
        self.keys.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keys {
    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    fn good(&self, now: Instant) -> impl Iterator<Item = &Key> {
        let age = self.age(now);
        let current = (age < 2 * TERM).then_some(&self.current);
        let previous = self.previous.as_ref().filter(|_| age < TERM);
        current.into_iter().chain(previous)
    }
}

impl ProducesTickets for Tickets {
    fn enabled(&self) -> bool {
        !self.is_disabled.load(Ordering::Relaxed)
    }

    fn lifetime(&self) -> u32 {
        u32::try_from(TERM.as_secs()).unwrap_or(u32::MAX)
    }

    fn encrypt(&self, plain: &[u8]) -> Option<Vec<u8>> {
        self.seal(Instant::now(), plain)
    }

    /// TLS 1.2 also asks for clients that still have a ticket while tickets are disabled.
    fn decrypt(&self, cipher: &[u8]) -> Option<Vec<u8>> {
        if self.enabled() { self.open(Instant::now(), cipher) } else { None }
    }
}

impl fmt::Debug for Tickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tickets(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnpike_testkit::randomness;

    #[test]
    fn ticket_is_valid_for_one_to_two_terms() {
        let tickets = Tickets::new();
        let start = Instant::now();
        let early = tickets.seal(start, b"early").unwrap();
        let late = tickets.seal(start + TERM - Duration::from_secs(1), b"late").unwrap();
        for (term, ticket, text) in [(1, &early, "early"), (2, &late, "late")] {
            let before = start + term * TERM - Duration::from_secs(1);
            assert_eq!(tickets.open(before, ticket).as_deref(), Some(text.as_bytes()));
        }
        // The ticket expires even if no new one was created.
        assert_eq!(tickets.open(start + 2 * TERM + Duration::from_secs(1), &late), None);
        let next = tickets.seal(start + TERM + Duration::from_secs(1), b"next").unwrap();
        assert!(tickets.open(start + TERM + Duration::from_secs(1), &late).is_some());
        tickets.seal(start + 2 * TERM + Duration::from_secs(1), b"and so on").unwrap();
        let now = start + 2 * TERM + Duration::from_secs(1);
        assert_eq!((tickets.open(now, &late), tickets.open(now, &next).is_some()), (None, true));
    }

    #[test]
    fn changed_or_truncated_tickets_are_rejected() {
        let tickets = Tickets::new();
        let now = Instant::now();
        let ticket = tickets.seal(now, b"a session").unwrap();
        for at in 0..ticket.len() {
            let mut forged = ticket.clone();
            forged[at] ^= 1;
            assert_eq!(tickets.open(now, &forged), None, "{at}");
            assert_eq!(tickets.open(now, &ticket[..at]), None, "{at}");
        }
        assert_eq!(Tickets::new().open(now, &ticket), None, "another key");
    }

    #[test]
    fn tickets_are_valid_across_processes_that_share_keys() {
        let (here, there) = (Tickets::new(), Tickets::new());
        let now = Instant::now();
        let old = here.seal(now, b"old").unwrap();
        here.seal(now + TERM + Duration::from_secs(1), b"a new key").unwrap();
        let written = serde_json::to_string(&here.keys()).unwrap();
        there.take_over(&serde_json::from_str(&written).unwrap());
        assert_eq!(there.open(now, &old).as_deref(), Some(&b"old"[..]));
        let new = there.seal(now, b"new").unwrap();
        assert_eq!(here.open(now, &new).as_deref(), Some(&b"new"[..]));
    }

    #[test]
    fn tickets_are_random_and_their_keys_are_never_printed() {
        let tickets = Tickets::new();
        let now = Instant::now();
        let made = std::iter::repeat_with(|| tickets.seal(now, &[7; 32]).unwrap());
        let made: Vec<_> = made.take(randomness::SAMPLES).collect();
        randomness::judge(&made, &vec![0xFF; made[0].len()]).unwrap();
        let keys = TicketKeys { current: [213; 32], previous: None, age: 0 };
        assert!(!format!("{keys:?} {tickets:?}").contains("213"));
    }
}
