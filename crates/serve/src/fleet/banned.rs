//! Active bans: read by workers, changed by administrators and other nodes. Ends the allocations of banned
//! users and addresses.

use std::{
    net::IpAddr,
    sync::{Arc, OnceLock, PoisonError, RwLock, RwLockWriteGuard, Weak},
};

use tokio::sync::oneshot;
use turnpike_fleet::{Ban, Bans, Subject};
use turnpike_relay::{
    Relay,
    allocations::{AddressFilter, AllocationFilter, AllocationSnapshot, Look, SLICE_ALLOCATIONS},
};
use turnpike_turn::server::ClosedReason;

#[derive(Default)]
pub(super) struct Banned {
    bans: RwLock<Bans>,
    relay: OnceLock<Weak<Relay>>,
}

impl Banned {
    pub(super) fn set_relay(&self, relay: Weak<Relay>) {
        let _ = self.relay.set(relay);
    }

    pub(super) fn has(&self, unix: u64, realm: &str, names: [&str; 2], client: IpAddr) -> bool {
        self.bans.read().unwrap_or_else(PoisonError::into_inner).has(unix, realm, names, client)
    }

    /// Adds a ban issued on a server without a fleet, or in the previous process.
    pub(super) fn put(&self, ban: Ban) {
        self.write().put(ban);
    }

    pub(super) fn lift(&self, unix: u64, subject: &Subject) -> Option<Ban> {
        self.write().lift(unix, subject)
    }

    pub(super) fn order(&self, ban: Ban) {
        self.write().order(ban);
    }

    pub(super) fn order_lift(&self, unix: u64, subject: &Subject) -> Option<Ban> {
        self.write().order_lift(unix, subject)
    }

    /// Applies another node's ban. Returns false if a local ban or unban overrides it.
    pub(super) fn hear(&self, ban: Ban) -> bool {
        self.write().hear(ban)
    }

    pub(super) fn hear_lift(&self, unix: u64, subject: &Subject) {
        self.write().hear_lift(unix, subject);
    }

    pub(super) fn mark(&self, subjects: &[Subject]) {
        let mut bans = self.write();
        subjects.iter().for_each(|subject| bans.mark(subject.clone()));
    }

    pub(super) fn clear_unannounced(&self) {
        self.write().clear_unannounced();
    }

    pub(super) fn is_unannounced(&self, subject: &Subject) -> bool {
        self.bans.read().unwrap_or_else(PoisonError::into_inner).is_unannounced(subject)
    }

    pub(super) fn unannounced(&self) -> Vec<Subject> {
        self.bans.read().unwrap_or_else(PoisonError::into_inner).unannounced().cloned().collect()
    }

    pub(super) fn to_announce(&self, unix: u64, subject: &Subject, kept: &[Ban]) -> Option<Ban> {
        self.write().to_announce(unix, subject, kept)
    }

    pub(super) fn announced(&self, subject: &Subject, ban: Option<&Ban>) {
        self.write().announced(subject, ban);
    }

    pub(super) fn read(&self, unix: u64, kept: &[Ban]) {
        self.write().read(unix, kept);
    }

    pub(super) fn missing(&self, unix: u64, kept: &[Ban]) -> Vec<Ban> {
        self.bans.read().unwrap_or_else(PoisonError::into_inner).missing(unix, kept)
    }

    /// Removes bans that have expired by every clock in the fleet, and returns their subjects.
    pub(super) fn expire(&self, unix: u64) -> Vec<Subject> {
        // Usually nothing has expired: a read lock does not block the workers.
        let bans = self.bans.read().unwrap_or_else(PoisonError::into_inner);
        let has_some = bans.has_old(unix);
        drop(bans);
        if has_some { self.write().expire(unix) } else { Vec::new() }
    }

    pub(super) fn list(&self) -> Vec<Ban> {
        self.bans.read().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    pub(super) fn count(&self, unix: u64) -> usize {
        let bans = self.bans.read().unwrap_or_else(PoisonError::into_inner);
        bans.iter().filter(|ban| ban.is_in_force(unix)).count()
    }

    pub(super) async fn end_allocations(&self, subject: &Subject) -> u64 {
        let mut ended = 0;
        for filter in filters(subject) {
            ended += self.end_those(Arc::new(filter)).await.unwrap_or_default();
        }
        ended
    }

    async fn end_those(&self, filter: Arc<AllocationFilter>) -> Option<u64> {
        let mut ended = 0;
        for worker in 0..self.relay()?.workers() {
            let mut next = Some(0);
            while let Some(from) = next {
                let look =
                    Look { from, most: SLICE_ALLOCATIONS, filter: Arc::clone(&filter), details: false };
                let (sender, answer) = oneshot::channel();
                self.relay()?.look(worker, look, move |looked| _ = sender.send(looked));
                let looked = answer.await.ok()?;
                next = looked.next;
                for AllocationSnapshot { worker, slot, id, .. } in looked.allocations {
                    let (sender, answer) = oneshot::channel();
                    let told = move |was_there| _ = sender.send(was_there);
                    self.relay()?.end((worker, slot), id, ClosedReason::Banned, told);
                    ended += u64::from(answer.await.unwrap_or_default());
                }
            }
        }
        Some(ended)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Bans> {
        self.bans.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Must not be held across an await: the server cannot stop while this reference exists.
    fn relay(&self) -> Option<Arc<Relay>> {
        self.relay.get()?.upgrade()
    }
}

/// Filters that match the allocations of a subject. Quotas identify time-limited usernames by the id after
/// the colon.
fn filters(subject: &Subject) -> Vec<AllocationFilter> {
    match subject {
        Subject::User { realm, name } => {
            let of = |user: String| AllocationFilter {
                user: Some(user),
                realm: Some(realm.clone()),
                ..AllocationFilter::default()
            };
            vec![of(name.clone()), of(format!(":{name}"))]
        }
        Subject::Client(prefix) => {
            let client = Some(AddressFilter::Within(*prefix));
            vec![AllocationFilter { client, ..AllocationFilter::default() }]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_banned_users_allocations_are_matched_by_name_and_by_id() {
        let users = |subject: &str| -> Vec<_> {
            filters(&subject.parse().expect("a subject")).into_iter().map(|filter| filter.user).collect()
        };
        assert_eq!(users("user carol@here"), [Some("carol".to_owned()), Some(":carol".to_owned())]);
        assert_eq!(users("client 192.0.2.0/24"), [None]);
    }

    #[test]
    fn bans_end_at_their_expiry() {
        let banned = Banned::default();
        let subject: Subject = "user alice@here".parse().expect("a subject");
        banned.put(Ban::new(subject.clone(), 100, String::new()));
        let client = "192.0.2.1".parse().expect("an address");
        assert!(banned.has(99, "here", ["alice", "alice"], client));
        assert!(banned.expire(100).is_empty(), "still active by a slower clock");
        assert_eq!((banned.count(99), banned.count(100)), (1, 0));
        assert!(banned.lift(100, &subject).is_none());
        assert_eq!((banned.expire(1000), banned.list()), (vec![subject], vec![]));
    }
}
