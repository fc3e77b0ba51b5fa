//! Clients that were redirected recently. A client that ignores a 300 response retries here and is then
//! served. The table has a fixed size and stores hashes; a client whose entry was overwritten is redirected once more.

/// Seconds for which a redirect is remembered.
const REMEMBERED_S: u32 = 60;
/// Number of entries, 192 KiB in total. At 10,000 redirects per second, each is remembered for about as long
/// as a client waits for a response.
const PLACES: usize = 1 << 14;

#[derive(Clone, Copy, Default)]
struct RedirectEntry {
    who: u32,
    request: u32,
    /// Lower 32 bits of the Unix time in seconds.
    at: u32,
}

pub struct RecentRedirects(Box<[RedirectEntry]>);

impl Default for RecentRedirects {
    fn default() -> Self {
        Self(vec![RedirectEntry::default(); PLACES].into())
    }
}

impl RecentRedirects {
    /// True if the client may be redirected: this is its first request or a retransmission of it.
    /// `who` and `request` are hashes.
    #[must_use]
    pub fn may_go(&self, unix: u64, who: u64, request: u64) -> bool {
        let (place, who, request) = parts(who, request);
        let known = self.0[place];
        let recent = known.at != 0 && low(unix).wrapping_sub(known.at) < REMEMBERED_S;
        !(recent && known.who == who) || known.request == request
    }

    /// Records a redirect.
    pub fn note(&mut self, unix: u64, who: u64, request: u64) {
        let (place, who, request) = parts(who, request);
        self.0[place] = RedirectEntry { who, request, at: low(unix).max(1) };
    }
}

#[expect(clippy::cast_possible_truncation, reason = "reduced to the number of places; 32 bits are enough")]
fn parts(who: u64, request: u64) -> (usize, u32, u32) {
    (who as usize % PLACES, (who >> 32) as u32, (request >> 32) as u32)
}

#[expect(clippy::cast_possible_truncation, reason = "only differences between times matter")]
const fn low(unix: u64) -> u32 {
    unix as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maps a number to a well-distributed one, like a hash.
    fn hash(number: u64) -> u64 {
        number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number << 40
    }

    #[test]
    fn redirected_client_is_served_on_retry() {
        let mut sent = RecentRedirects::default();
        let (alice, bob) = (hash(1), hash(2));
        let requests = [hash(10), hash(11)];
        assert!(sent.may_go(1000, alice, requests[0]));
        sent.note(1000, alice, requests[0]);
        assert!(sent.may_go(1000, alice, requests[0]), "the same request, repeated");
        assert!(!sent.may_go(1001, alice, requests[1]));
        assert!(sent.may_go(1001, bob, requests[1]));
        assert!(!sent.may_go(1059, alice, requests[1]));
        assert!(sent.may_go(1060, alice, requests[1]), "a minute later");
    }

    #[test]
    fn many_clients_evict_few_entries() {
        let mut sent = RecentRedirects::default();
        for client in 0..1000 {
            sent.note(5000, hash(client), hash(1));
        }
        let remembered = (0..1000).filter(|client| !sent.may_go(5000, hash(*client), hash(2))).count();
        assert!(remembered > 900, "{remembered}");
    }
}
