//! Reassembly of fragmented ClientHellos, which clients send on paths with a small MTU (RFC 6347 section
//! 4.2.3). Nothing is stored until the first fragment arrives with a valid cookie; in DTLS 1.2 the cookie is
//! in the first fragment. The limits are those of handshakes, in total and per network; at a limit, the
//! oldest entry is evicted.

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use slab::Slab;
use turnpike_turn::server::{Client, PrefixLengths};

use super::hello::{Fragment, MAX_HELLO};
use crate::bounded::{Bounded, Limits};

pub(super) struct Fragments {
    parts: Slab<Part>,
    by_client: HashMap<Client, usize, RandomState>,
    bounded: Bounded,
}

struct Part {
    client: Client,
    number: u64,
    message: u16,
    length: usize,
    bytes: Vec<u8>,
    deadline_ms: u64,
}

impl Fragments {
    pub(super) fn new(limits: Limits) -> Self {
        Self { parts: Slab::new(), by_client: HashMap::default(), bounded: Bounded::new(limits) }
    }

    pub(super) fn limit(&mut self, limits: Limits) {
        self.bounded.limit(limits);
    }

    /// Keeps a first fragment with a valid cookie for `wait_ms`. Returns false if the ClientHello is too long
    /// or the limits are reached.
    pub(super) fn begin(
        &mut self,
        client: &Client,
        fragment: &Fragment<'_>,
        now_ms: u64,
        wait_ms: u64,
    ) -> bool {
        if fragment.length > MAX_HELLO {
            return false;
        }
        self.forget(client);
        let network = PrefixLengths::SITE.of(client.address.ip());
        if self.bounded.is_crowded(network, now_ms) {
            return false;
        }
        if let Some(slot) = self.bounded.in_the_way(network) {
            self.remove(slot);
        }
        let slot = self.parts.vacant_key();
        let number = self.bounded.enter(slot, Some(network), now_ms);
        self.parts.insert(Part {
            client: *client,
            number,
            message: fragment.message,
            length: fragment.length,
            bytes: fragment.bytes.to_vec(),
            deadline_ms: now_ms + wait_ms,
        });
        self.by_client.insert(*client, slot);
        true
    }

    /// Appends a later fragment; returns false if there is a gap before it.
    pub(super) fn append(&mut self, client: &Client, fragment: &Fragment<'_>, now_ms: u64) -> bool {
        let Some(part) = self.by_client.get(client).and_then(|slot| self.parts.get_mut(*slot)) else {
            return false;
        };
        let fits = part.message == fragment.message && part.length == fragment.length;
        if part.deadline_ms <= now_ms || !fits || fragment.offset > part.bytes.len() {
            return false;
        }
        let known = part.bytes.len() - fragment.offset;
        part.bytes.extend_from_slice(fragment.bytes.get(known..).unwrap_or_default());
        true
    }

    pub(super) fn take_whole(&mut self, client: &Client) -> Option<Vec<u8>> {
        let slot = *self.by_client.get(client)?;
        let part = self.parts.get(slot)?;
        (part.bytes.len() == part.length).then(|| self.remove(slot))
    }

    fn forget(&mut self, client: &Client) {
        if let Some(slot) = self.by_client.get(client) {
            self.remove(*slot);
        }
    }

    fn remove(&mut self, slot: usize) -> Vec<u8> {
        let part = self.parts.remove(slot);
        self.by_client.remove(&part.client);
        self.bounded.leave(part.number);
        part.bytes
    }
}

#[cfg(test)]
mod tests {
    use turnpike_turn::server::ListenerId;

    use super::*;

    fn client(port: u16) -> Client {
        Client {
            listener: ListenerId(3),
            address: ([192, 0, 2, 1], port).into(),
            local: ([192, 0, 2, 9], 5349).into(),
        }
    }

    fn piece(whole: &[u8], offset: usize, len: usize) -> Fragment<'_> {
        Fragment { sequence: 1, message: 1, length: whole.len(), offset, bytes: &whole[offset..offset + len] }
    }

    #[test]
    fn fragments_are_joined_in_order_and_duplicates_are_ignored() {
        let whole: Vec<u8> = (0..100).collect();
        let mut fragments = Fragments::new([4, 4]);
        assert!(!fragments.append(&client(1), &piece(&whole, 40, 40), 0), "there is no first fragment");
        assert!(fragments.begin(&client(1), &piece(&whole, 0, 40), 0, 10));
        assert!(!fragments.append(&client(1), &piece(&whole, 50, 50), 0), "a gap");
        assert!(!fragments.append(&client(2), &piece(&whole, 40, 40), 0), "another client");
        let other = Fragment { message: 2, ..piece(&whole, 40, 60) };
        assert!(!fragments.append(&client(1), &other, 0), "another message");
        assert!(!fragments.append(&client(1), &piece(&whole, 40, 60), 10), "too late");
        assert!(fragments.append(&client(1), &piece(&whole, 10, 40), 9));
        assert!(fragments.append(&client(1), &piece(&whole, 0, 20), 9));
        assert_eq!(fragments.take_whole(&client(1)), None);
        assert!(fragments.append(&client(1), &piece(&whole, 50, 50), 9));
        assert_eq!(fragments.take_whole(&client(1)), Some(whole));
        assert_eq!(fragments.take_whole(&client(1)), None);
    }

    #[test]
    fn number_and_length_of_unfinished_hellos_are_bounded() {
        let whole = [7; 100];
        let mut fragments = Fragments::new([3, 2]);
        for port in 1..=1000 {
            let now_ms = u64::from(port) * 400;
            assert!(fragments.begin(&client(port), &piece(&whole, 0, 40), now_ms, 10));
        }
        assert!(
            !fragments.begin(&client(1001), &piece(&whole, 0, 40), 400_001, 10),
            "recent entries are protected"
        );
        assert_eq!((fragments.parts.len(), fragments.by_client.len(), fragments.bounded.len()), (2, 2, 2));
        assert!(fragments.append(&client(1000), &piece(&whole, 40, 60), 400_009));
        assert!(!fragments.append(&client(998), &piece(&whole, 40, 60), 399_209));
        let long = Fragment { length: MAX_HELLO + 1, ..piece(&whole, 0, 40) };
        assert!(!fragments.begin(&client(1), &long, 0, 10));
    }
}
