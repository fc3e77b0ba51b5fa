//! Secrets of time-limited credentials: which of a realm's signs, and until when the others count. coturn's table knows no more of a
//! secret than itself; the rest stands beside it, in a table of ours that is made with the first rotation.

use std::{
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use zeroize::Zeroizing;

/// The secrets of a realm. Overwritten when nobody has them any more.
pub type Secrets = Arc<[StoredSecret]>;

/// A secret of time-limited credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredSecret {
    /// Itself.
    pub value: Zeroizing<String>,
    /// The Unix second of the rotation that made it; 0 of one that was added by itself.
    pub since: u64,
    /// The last Unix second in which it counts, once another one has taken its place; [`CUT_OFF`] if it ended at once.
    pub until: Option<u64>,
}

/// [`StoredSecret::until`] of a secret that a rotation without an overlap ended at once, as one that has leaked: sessions that began with
/// its credentials end too.
pub const CUT_OFF: u64 = 0;

impl StoredSecret {
    /// One that nobody has rotated.
    #[must_use]
    pub fn new(value: Zeroizing<String>) -> Self {
        Self { value, since: 0, until: None }
    }

    /// Whether credentials made with it are good in this Unix second.
    #[must_use]
    pub fn counts(&self, unix: u64) -> bool {
        self.until.is_none_or(|until| unix <= until)
    }

    /// Whether a rotation ended it at once.
    #[must_use]
    pub fn was_cut_off(&self) -> bool {
        self.until == Some(CUT_OFF)
    }
}

/// Names none.
impl fmt::Debug for StoredSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { since, until, .. } = self;
        write!(f, "StoredSecret {{ since: {since}, until: {until:?}, .. }}")
    }
}

/// Secrets of a realm that are remembered after their end.
const MOST_ENDED: usize = 16;

/// Ends up to this Unix second stay as they are when a rotation ends all other secrets: an end is never put off, and a secret that has
/// come to its end is not cut off afterwards.
pub(crate) fn latest_kept_end(since: u64, until: u64) -> u64 {
    if until == CUT_OFF { since.saturating_sub(1) } else { until }
}

/// Those of a realm's secrets, held before it was read again, that have come to their end since a rotation and are removed from the
/// store: sessions that began with their credentials go on.
pub(crate) fn ended(held: &[StoredSecret], read: &[StoredSecret], unix: u64) -> Vec<StoredSecret> {
    let is_left = |secret: &&StoredSecret| read.iter().any(|other| other.value == secret.value);
    let has_ended = |secret: &&StoredSecret| !secret.counts(unix) && !secret.was_cut_off();
    let mut ended: Vec<_> = held.iter().filter(|it| !is_left(it) && has_ended(it)).cloned().collect();
    // Secrets of one rotation end in the same second: those of one value come to lie side by side.
    ended.sort_by(|one, other| (other.until, &*one.value).cmp(&(one.until, &*other.value)));
    ended.dedup_by(|one, other| one.value == other.value);
    ended.truncate(MOST_ENDED);
    ended
}

/// The one that new credentials are made with: of those that have no end the latest, and among those that nobody has rotated always the
/// same, so that all servers of a store take the same one.
#[must_use]
pub fn signing(secrets: &[StoredSecret]) -> Option<&StoredSecret> {
    let lasting = secrets.iter().filter(|secret| secret.until.is_none());
    lasting.max_by(|one, other| (one.since, &*other.value).cmp(&(other.since, &*one.value)))
}

/// Now.
pub(crate) fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(value: &str, since: u64, until: Option<u64>) -> StoredSecret {
        StoredSecret { value: Zeroizing::new(value.to_owned()), since, until }
    }

    fn signs(secrets: &[StoredSecret]) -> Option<&str> {
        signing(secrets).map(|secret| secret.value.as_str())
    }

    #[test]
    fn the_latest_without_an_end_signs_and_of_equals_always_the_same() {
        assert_eq!(signs(&[]), None);
        let (a, b) = (secret("a", 0, None), secret("b", 0, None));
        assert_eq!([signs(&[a.clone(), b.clone()]), signs(&[b.clone(), a.clone()])], [Some("a"); 2]);
        let later = secret("z", 5, None);
        assert_eq!(signs(&[a.clone(), later.clone(), b]), Some("z"));
        let latest = secret("y", 6, None);
        assert_eq!(signs(&[latest, later]), Some("y"));
        let ending = secret("x", 9, Some(u64::MAX));
        assert_eq!(signs(&[ending.clone(), a]), Some("a"), "one that is about to go signs nothing");
        assert_eq!(signs(&[ending]), None);
    }

    #[test]
    fn one_with_an_end_counts_in_its_last_second_and_no_longer() {
        let ending = secret("a", 0, Some(100));
        assert_eq!([99, 100, 101].map(|unix| ending.counts(unix)), [true, true, false]);
        assert!(StoredSecret::new(Zeroizing::new(String::new())).counts(u64::MAX));
    }

    #[test]
    fn a_secret_is_remembered_after_the_end_that_its_rotation_gave_it_and_not_after_it_was_taken_away() {
        let signing = secret("signing", 100, None);
        let held = [
            secret("rotated", 50, Some(160)),
            secret("leaked", 40, Some(CUT_OFF)),
            secret("ended as another began to sign", 10, Some(100)),
            secret("removed", 30, Some(900)),
            secret("left", 20, Some(150)),
            signing.clone(),
        ];
        let read = [held[4].clone(), signing];
        let names =
            |unix| ended(&held, &read, unix).into_iter().map(|it| it.value.to_string()).collect::<Vec<_>>();
        let scheduled = "ended as another began to sign";
        assert_eq!(names(160), [scheduled], "the other counts in its last second");
        assert_eq!(names(161), ["rotated", scheduled]);
        let twice = [&held[..], &held[..]].concat();
        assert_eq!(ended(&twice, &read, 901).len(), 3, "each is remembered once");
        let many: Vec<_> = (0..100).map(|n| secret(&n.to_string(), n, Some(1000 + n))).collect();
        let kept = ended(&many, &[], 5000);
        assert_eq!((kept.len(), kept[0].until), (MOST_ENDED, Some(1099)), "the latest");
    }

    #[test]
    fn debug_output_never_holds_the_secret() {
        assert!(!format!("{:?}", [secret("hunter2", 1, Some(2))]).contains("hunter2"));
    }
}
