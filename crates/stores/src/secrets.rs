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
    /// The last Unix second in which it counts, once another one has taken its place.
    pub until: Option<u64>,
}

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
}

/// Names none.
impl fmt::Debug for StoredSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { since, until, .. } = self;
        write!(f, "StoredSecret {{ since: {since}, until: {until:?}, .. }}")
    }
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
    fn debug_output_never_holds_the_secret() {
        assert!(!format!("{:?}", [secret("hunter2", 1, Some(2))]).contains("hunter2"));
    }
}
