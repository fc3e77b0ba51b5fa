//! Shared parts of the database fuzz targets: strings for rows and keys, and checks after each change.

use std::panic::AssertUnwindSafe;

use tokio::runtime::{Builder, Runtime};
use turnpike_testkit::fuzz::Input;
use turnpike_wire::secret::Secret;

use crate::{
    ApiKey, Backend, Edit, Rules, StoreError, StoreFault, StoredLimits, StoredSecret, UserKeys,
    secrets::latest_kept_end, signing,
};

/// Maximum number of rows or keys, and of changes.
pub(crate) const MOST_ROWS: u8 = 24;
const MOST_EDITS: usize = 12;
/// Wording that occurs in error messages anyway. If the fuzzer picks part of it as a secret, finding that
/// part in an error is not a leak.
const ALWAYS_TOLD: &str = " in memory does not match coturn's schema: \"WRONGTYPE\": another kind of value; see docs/stores.md \
     turn/realm//secret turn/realm//allowed-peer-ip turn/realm//denied-peer-ip \
     unknown option of realm the API key is invalid and not accepted oauth_key has expired \
     in admin_user has users of coturn's web interface (), which turnpike ignores an oauth_key has no kid";
const LONG: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    Realm,
    User,
    Secret,
    Range,
    Limit,
    Number,
    Algorithm,
    TokenKey,
    Keys,
    Origin,
    ApiKey,
    Hash,
    Kid,
}

impl Word {
    fn known(self) -> &'static [&'static str] {
        match self {
            Self::Realm => &["", "north.gov", "b/c", "user", "é.example"],
            Self::User => &["alice", "x/y", "é", "key", "1800000000:bob"],
            Self::Secret => &["north secret", "süd%_*", "a long secret", "[x]?"],
            Self::Range => &["10.0.0.0-10.0.0.9", "192.0.2.1", "2001:db8::/32", "::-ffff::", "0.0.0.0/0"],
            Self::Limit => &["total-quota", "user-quota", "max-bps", "colour"],
            Self::Number => &["", "0", "12", "1800000000", "18446744073709551615", "99999999999999999999"],
            Self::Algorithm => &["", "A128GCM", "A256GCM", "AES-256-CBC"],
            Self::TokenKey => &["MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEK", "MTIzNDU2Nzg5MDEyMzQ1Ngo="],
            Self::Keys => &[
                "7da2270ccfa49786e0115366d3a3d14d",
                "7da2270ccfa49786e0115366d3a3d14d7da2270ccfa49786e0115366d3a3d14d",
                "hunter2hunter2",
            ],
            Self::Origin => &["https://a.example", "HTTPS://B.example:443/", "null"],
            Self::ApiKey => &["shop", "shop-1", "a"],
            Self::Hash => &["abababababababababababababababababababababababababababababababab", "ab"],
            Self::Kid => &["north", "south/y", "k"],
        }
    }

    pub(crate) fn is_private(self) -> bool {
        matches!(self, Self::Secret | Self::TokenKey | Self::Keys)
    }

    pub(crate) fn draw(self, input: &mut Input<'_>, well: bool) -> Option<String> {
        let how = input.byte();
        let text = match how % 16 {
            _ if well => (*input.choice(self.known())).to_owned(),
            0 => return None,
            1 | 2 => String::from_utf8_lossy(input.bytes()).into_owned(),
            _ => (*input.choice(self.known())).to_owned(),
        };
        // Padded like a char(n) column in SQL.
        Some(if how >= 240 && !well { format!("{text}   ") } else { text })
    }

    /// A valid name, because the callers of `edit` have already validated it.
    fn name(self, input: &mut Input<'_>) -> String {
        let text = self.draw(input, false).unwrap_or_default().replace(char::is_control, "_");
        let text = text.trim();
        if text.is_empty() { "a".to_owned() } else { text.to_owned() }
    }
}

pub(crate) fn runtime() -> AssertUnwindSafe<Runtime> {
    AssertUnwindSafe(Builder::new_current_thread().enable_time().build().expect("a runtime"))
}

/// Checks that an error is expected and shows nothing private.
pub(crate) fn is_told(error: &StoreError, faults: &[StoreFault], texts: &[(Word, String)]) {
    assert!(faults.contains(&error.fault), "{error}");
    says_nothing_private(&error.to_string(), texts);
}

/// Checks that no private string is shown, unless it is also a substring of a public one.
pub(crate) fn says_nothing_private(said: &str, texts: &[(Word, String)]) {
    for (word, text) in texts.iter().filter(|(word, text)| word.is_private() && text.len() >= LONG) {
        let is_elsewhere = texts.iter().any(|(other, found)| !other.is_private() && found.contains(text))
            || ALWAYS_TOLD.contains(text.as_str());
        assert!(is_elsewhere || !said.contains(text), "{word:?} {text:?} in {said}");
    }
}

/// Applies all changes that the input asks for, and checks each. `exact` means that no string stored so far
/// has leading or trailing spaces, which the backend ignores when it reads.
pub(crate) async fn edits<B: Backend>(backend: &B, input: &mut Input<'_>, exact: bool) {
    for _ in 0..MOST_EDITS {
        if input.is_empty() {
            return;
        }
        let edit = draw(input);
        // A row that cannot be read prevents some changes.
        if let Err(error) = change(backend, &edit, exact).await {
            assert!(matches!(error.fault, StoreFault::Row | StoreFault::Schema), "{error} after {edit:?}");
        }
    }
}

fn draw(input: &mut Input<'_>) -> Edit {
    let number = |input: &mut Input<'_>| u64::from(input.u16());
    let realm = Word::Realm.name(input);
    let secret = |input: &mut Input<'_>| Secret::new(Word::Secret.name(input));
    match input.below(9) {
        0 => {
            let name = Word::User.name(input);
            let keys = UserKeys::new(&name, &realm, &Word::Secret.name(input));
            Edit::PutUser { realm, name, keys }
        }
        1 => Edit::RemoveUser { realm, name: Word::User.name(input) },
        2 => Edit::AddSecret { realm, secret: secret(input) },
        3 => Edit::RemoveSecret { realm, secret: secret(input) },
        4 => {
            let (since, until) = (number(input), u64::from(input.u32()) << input.below(33));
            Edit::RotateSecret { realm, secret: secret(input), since, until }
        }
        5 => {
            let some = |input: &mut Input<'_>| Some(u32::from(input.u16())).filter(|number| *number > 0);
            let name = Word::ApiKey.name(input);
            let realm = Some(realm).filter(|_| input.below(2) == 0);
            let (max_ttl, rate) = (some(input), some(input));
            Edit::PutApiKey(ApiKey { name, hash: [input.byte(); 32], realm, max_ttl, rate })
        }
        6 => Edit::RemoveApiKey { name: Word::ApiKey.name(input) },
        7 => {
            let count = |input: &mut Input<'_>| Some(usize::from(input.u16())).filter(|limit| *limit > 0);
            let (total_quota, user_quota) = (count(input), count(input));
            let max_bps = Some(number(input)).filter(|limit| *limit > 0);
            Edit::PutRealm { realm, limits: StoredLimits { total_quota, user_quota, max_bps } }
        }
        _ => Edit::RemoveRealm { realm },
    }
}

/// Makes a change, and checks that written items are found and removed ones are not.
async fn change<B: Backend>(backend: &B, edit: &Edit, exact: bool) -> Result<(), StoreError> {
    match edit {
        Edit::PutUser { realm, name, keys } => {
            let was_there = backend.user(realm, name).await?.is_some();
            // A user without keys exists but cannot be found.
            assert!(backend.edit(edit).await? || !was_there);
            assert_eq!(backend.user(realm, name).await?.as_ref(), Some(keys));
        }
        Edit::RemoveUser { realm, name } => {
            let was_there = backend.user(realm, name).await?.is_some();
            assert!(backend.edit(edit).await? || !was_there);
            assert_eq!(backend.user(realm, name).await?, None);
        }
        // Secrets that differ only in leading or trailing spaces compare equal when read, so the result
        // cannot be checked.
        Edit::AddSecret { .. } | Edit::RemoveSecret { .. } | Edit::RotateSecret { .. } if !exact => {
            backend.edit(edit).await?;
        }
        Edit::AddSecret { realm, secret } => {
            let before = backend.secrets(realm).await?;
            let existed = backend.edit(edit).await?;
            let after = backend.secrets(realm).await?;
            assert_eq!(existed, has(&before, secret));
            assert!(
                after.contains(&StoredSecret::new(secret.clone())),
                "the secret exists and was not rotated"
            );
            assert_eq!(after.len(), before.len() + usize::from(!existed));
        }
        Edit::RemoveSecret { realm, secret } => {
            let before = backend.secrets(realm).await?;
            let existed = backend.edit(edit).await?;
            let after = backend.secrets(realm).await?;
            assert_eq!((existed, has(&after, secret)), (has(&before, secret), false));
            assert_eq!(after.len(), before.len() - usize::from(existed));
        }
        Edit::RotateSecret { realm, secret, since, until } => {
            let before = backend.secrets(realm).await?;
            assert_eq!(backend.edit(edit).await?, !before.is_empty());
            let after = backend.secrets(realm).await?;
            let signs = signing(&after).expect("a signing secret");
            assert_eq!((&signs.value, signs.since), (secret, *since));
            for other in before.iter().filter(|other| other.value != *secret) {
                let left = after.iter().find(|left| left.value == other.value).expect("still accepted");
                let kept = other.until.filter(|end| *end <= latest_kept_end(*since, *until));
                let sooner = kept.unwrap_or(*until);
                assert_eq!((left.since, left.until), (other.since, Some(sooner)));
            }
        }
        Edit::PutApiKey(key) => {
            backend.edit(edit).await?;
            if let Some(rules) = rules(backend).await? {
                assert_eq!(rules.api_keys.get(&*key.name), Some(key));
            }
        }
        Edit::RemoveApiKey { name } => {
            backend.edit(edit).await?;
            if let Some(rules) = rules(backend).await? {
                assert!(!rules.api_keys.contains_key(&**name));
            }
        }
        Edit::PutRealm { realm, limits } => {
            backend.edit(edit).await?;
            if let Some(rules) = rules(backend).await?.filter(|_| exact) {
                let found = &rules.realms[&**realm];
                assert_eq!((found.named, &found.limits), (true, limits));
            }
        }
        Edit::RemoveRealm { realm } => {
            backend.edit(edit).await?;
            if let Some(rules) = rules(backend).await?.filter(|_| exact) {
                assert_eq!(rules.realms.get(&**realm), None, "the realm is gone");
            }
            assert!(!backend.edit(edit).await?, "already removed");
        }
    }
    Ok(())
}

fn has(secrets: &[StoredSecret], wanted: &Secret) -> bool {
    secrets.iter().any(|secret| secret.value == *wanted)
}

/// Reads the rules; `None` if any row cannot be read, even one of another realm.
async fn rules<B: Backend>(backend: &B) -> Result<Option<Rules>, StoreError> {
    match backend.rules().await {
        Ok(rules) => Ok(Some(rules)),
        Err(error) if matches!(error.fault, StoreFault::Row | StoreFault::Schema) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let mut state = 7_u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    (0..48).map(|seed| [seed].into_iter().chain((0..400).map(|_| byte())).collect()).collect()
}
