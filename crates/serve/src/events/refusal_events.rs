//! Refusals as events, limited so that an attacker cannot flood the receivers: the first refusal of a client for one reason is an event,
//! and further ones are counted and reported once a minute.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use turnpike_rates::host;

use crate::refusals::{RefusalEntry, Why};

/// Interval of summaries.
const WINDOW: Duration = Duration::from_secs(60);
/// Maximum number of clients and reasons in a window.
const MOST: usize = 1024;
pub(super) const MORE_REFUSALS: &str = "too many clients were refused to report each one";

#[derive(Debug, Default)]
pub(super) struct RefusalEvents {
    known: HashMap<(IpAddr, Why), Repeated>,
    /// Refusals of clients for which there was no room.
    omitted: u64,
    next_look: Duration,
}

#[derive(Debug)]
struct Repeated {
    /// Refusals since the last event.
    since: Option<RefusalEntry>,
    due: Duration,
}

impl RefusalEvents {
    /// Returns the refusal if it is to be an event at once.
    pub(super) fn hear(&mut self, now: Duration, entry: RefusalEntry) -> Option<RefusalEntry> {
        if entry.why.is_ordinary() || entry.why.may_be_forged() {
            return None;
        }
        let key = (host(entry.client.ip()), entry.why.in_general());
        if let Some(known) = self.known.get_mut(&key) {
            known.since = Some(match known.since.take() {
                Some(before) => before.followed_by(entry),
                None => entry,
            });
            return None;
        }
        if self.known.len() >= MOST {
            self.omitted += entry.count;
            return None;
        }
        self.known.insert(key, Repeated { since: None, due: now + WINDOW });
        Some(entry)
    }

    /// Returns the summaries that are due, and the number of refusals without an event.
    pub(super) fn due(&mut self, now: Duration) -> (Vec<RefusalEntry>, u64) {
        if now < self.next_look {
            return (Vec::new(), 0);
        }
        self.next_look = now + WINDOW / 60;
        let mut summaries = Vec::new();
        self.known.retain(|_, known| {
            if known.due > now {
                return true;
            }
            known.due = now + WINDOW;
            let summary = known.since.take();
            let is_active = summary.is_some();
            summaries.extend(summary);
            is_active
        });
        // Reported together with the summaries, at most once a second.
        (summaries, std::mem::take(&mut self.omitted))
    }
}

#[cfg(test)]
mod tests {
    use turnpike_turn::server::{ClientNetwork, CredentialRefusal, Method, RequestRefusal};

    use super::*;

    fn refused(client: &str, why: CredentialRefusal) -> RefusalEntry {
        let client = client.parse().expect("an address");
        let (why, network) = (Why::Credentials(why), ClientNetwork::default());
        RefusalEntry {
            first_ms: 1,
            last_ms: 1,
            count: 1,
            client,
            network,
            user: "alice".into(),
            realm: None,
            why,
        }
    }

    #[test]
    fn repeated_refusals_are_counted_and_reported_once_a_minute() {
        let mut events = RefusalEvents::default();
        let seconds = Duration::from_secs;
        let hear = |events: &mut RefusalEvents, s, ago| {
            events.hear(seconds(s), refused("192.0.2.9:1", CredentialRefusal::Expired { ago })).is_some()
        };
        assert!(hear(&mut events, 0, 1));
        assert!((0..1000).all(|ago| !hear(&mut events, 1, ago)), "other ports and times are the same reason");
        let other = refused("192.0.2.9:1", CredentialRefusal::WrongKey);
        assert!(events.hear(seconds(1), other).is_some(), "another reason");
        assert_eq!(events.due(seconds(59)).0, []);
        let (summaries, omitted) = events.due(seconds(60));
        assert_eq!((summaries.len(), summaries[0].count, omitted), (1, 1000, 0));
        assert_eq!(events.due(seconds(121)).0, [], "no more refusals");
        assert!(hear(&mut events, 122, 1), "an event at once again");
    }

    #[test]
    fn a_flood_of_clients_is_only_counted() {
        let mut events = RefusalEvents::default();
        let flood = |events: &mut RefusalEvents| {
            let clients =
                (0..5000_u32).map(|host| format!("{}:1", std::net::Ipv4Addr::from_bits(0x0a00_0000 + host)));
            clients
                .filter(|client| {
                    events.hear(Duration::ZERO, refused(client, CredentialRefusal::WrongKey)).is_some()
                })
                .count()
        };
        assert_eq!(flood(&mut events), MOST);
        assert_eq!(events.due(Duration::from_secs(1)).1, 5000 - MOST as u64);
        // Clients in one IPv6 network are one client.
        let mut events = RefusalEvents::default();
        let reported = (0..500).filter(|host| {
            let client = format!("[2001:db8::{host:x}]:1");
            events.hear(Duration::ZERO, refused(&client, CredentialRefusal::WrongKey)).is_some()
        });
        assert_eq!(reported.count(), 1);
    }

    #[test]
    fn refusals_in_normal_operation_are_no_events() {
        let mut events = RefusalEvents::default();
        for why in [
            Why::Request(Method::Refresh, 438, RequestRefusal::Code),
            Why::Unproved(Method::Allocate, 400, RequestRefusal::Code),
            Why::Connection("dtls_hello", "no_cookie"),
        ] {
            let entry = RefusalEntry { why, ..refused("192.0.2.9:1", CredentialRefusal::WrongKey) };
            assert_eq!(events.hear(Duration::ZERO, entry), None, "{why:?}");
        }
        let why = Why::Request(Method::Allocate, 486, RequestRefusal::UserQuota);
        let entry = RefusalEntry { why, ..refused("192.0.2.9:1", CredentialRefusal::WrongKey) };
        assert!(why.is_quota() && events.hear(Duration::ZERO, entry).is_some());
    }
}
