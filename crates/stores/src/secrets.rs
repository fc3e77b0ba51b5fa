//! Secrets for time-limited credentials: the one that signs new credentials, and the expiry of the others.
//! coturn's table contains only the secrets; their times are in a separate table, which the first rotation
//! creates.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use turnpike_wire::secret::Secret;

/// Secrets of a realm.
pub type Secrets = Arc<[StoredSecret]>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSecret {
    pub value: Secret,
    /// Unix second of the rotation that made this the signing secret; 0 if it was never rotated.
    pub since: u64,
    /// Last Unix second in which this secret is accepted, set by a rotation; [`CUT_OFF`] if it was invalidated
    /// immediately.
    pub until: Option<u64>,
}

/// [`StoredSecret::until`] of a leaked secret that was rotated without an overlap. Allocations that were
/// created with its credentials are ended too.
pub const CUT_OFF: u64 = 0;

impl StoredSecret {
    #[must_use]
    pub fn new(value: Secret) -> Self {
        Self { value, since: 0, until: None }
    }

    /// Returns true if credentials made with this secret are valid in this Unix second.
    #[must_use]
    pub fn counts(&self, unix: u64) -> bool {
        self.until.is_none_or(|until| unix <= until)
    }

    /// Returns true if a rotation invalidated this secret immediately.
    #[must_use]
    pub fn was_cut_off(&self) -> bool {
        self.until == Some(CUT_OFF)
    }
}

/// Maximum number of expired secrets kept per realm.
const MOST_ENDED: usize = 16;

/// Latest expiry that a rotation leaves unchanged: a rotation neither extends a secret nor invalidates
/// allocations of an expired one.
pub(crate) fn latest_kept_end(since: u64, until: u64) -> u64 {
    if until == CUT_OFF { since.saturating_sub(1) } else { until }
}

/// Expired secrets of `held` that are no longer in the store (`read`): allocations created with their
/// credentials continue.
pub(crate) fn ended(held: &[StoredSecret], read: &[StoredSecret], unix: u64) -> Vec<StoredSecret> {
    let is_left = |secret: &&StoredSecret| read.iter().any(|other| other.value == secret.value);
    let has_ended = |secret: &&StoredSecret| !secret.counts(unix) && !secret.was_cut_off();
    let mut ended: Vec<_> = held.iter().filter(|it| !is_left(it) && has_ended(it)).cloned().collect();
    // Secrets of one rotation expire in the same second; sorting by value too makes duplicates adjacent.
    ended.sort_by(|one, other| (other.until, one.value.reveal()).cmp(&(one.until, other.value.reveal())));
    ended.dedup_by(|one, other| one.value == other.value);
    ended.truncate(MOST_ENDED);
    ended
}

/// Secret that signs new credentials: the latest one without an expiry. If no secret was rotated, it is always
/// the same one, so that all servers agree.
#[must_use]
pub fn signing(secrets: &[StoredSecret]) -> Option<&StoredSecret> {
    let lasting = secrets.iter().filter(|secret| secret.until.is_none());
    lasting.max_by(|one, other| (one.since, other.value.reveal()).cmp(&(other.since, one.value.reveal())))
}

pub(crate) fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(value: &str, since: u64, until: Option<u64>) -> StoredSecret {
        StoredSecret { value: Secret::new(value), since, until }
    }

    fn signs(secrets: &[StoredSecret]) -> Option<&str> {
        signing(secrets).map(|secret| secret.value.reveal())
    }

    #[test]
    fn latest_secret_without_an_expiry_signs() {
        assert_eq!(signs(&[]), None);
        let (a, b) = (secret("a", 0, None), secret("b", 0, None));
        assert_eq!([signs(&[a.clone(), b.clone()]), signs(&[b.clone(), a.clone()])], [Some("a"); 2]);
        let later = secret("z", 5, None);
        assert_eq!(signs(&[a.clone(), later.clone(), b]), Some("z"));
        let latest = secret("y", 6, None);
        assert_eq!(signs(&[latest, later]), Some("y"));
        let ending = secret("x", 9, Some(u64::MAX));
        assert_eq!(signs(&[ending.clone(), a]), Some("a"), "an expiring secret does not sign");
        assert_eq!(signs(&[ending]), None);
    }

    #[test]
    fn expiring_secret_is_valid_through_its_last_second() {
        let ending = secret("a", 0, Some(100));
        assert_eq!([99, 100, 101].map(|unix| ending.counts(unix)), [true, true, false]);
        assert!(StoredSecret::new(Secret::new("")).counts(u64::MAX));
    }

    #[test]
    fn an_expired_secret_is_remembered_but_a_removed_one_is_not() {
        let signing = secret("signing", 100, None);
        let held = [
            secret("rotated", 50, Some(160)),
            secret("leaked", 40, Some(CUT_OFF)),
            secret("expired because of a rotation", 10, Some(100)),
            secret("removed", 30, Some(900)),
            secret("left", 20, Some(150)),
            signing.clone(),
        ];
        let read = [held[4].clone(), signing];
        let names = |unix| {
            ended(&held, &read, unix).into_iter().map(|it| it.value.reveal().to_owned()).collect::<Vec<_>>()
        };
        let scheduled = "expired because of a rotation";
        assert_eq!(names(160), [scheduled], "valid in its last second");
        assert_eq!(names(161), ["rotated", scheduled]);
        let twice = [&held[..], &held[..]].concat();
        assert_eq!(ended(&twice, &read, 901).len(), 3, "no duplicates");
        let many: Vec<_> = (0..100).map(|n| secret(&n.to_string(), n, Some(1000 + n))).collect();
        let kept = ended(&many, &[], 5000);
        assert_eq!((kept.len(), kept[0].until), (MOST_ENDED, Some(1099)), "the latest");
    }

    #[test]
    fn debug_output_never_contains_the_secret() {
        assert!(!format!("{:?}", [secret("hunter2", 1, Some(2))]).contains("hunter2"));
    }
}
