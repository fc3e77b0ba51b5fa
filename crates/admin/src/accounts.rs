//! Lists and changes users, secrets, realms and API keys, with or without a running program.

use std::{
    ops::RangeInclusive,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::http::StatusCode;
use jiff::Timestamp;
use turnpike_api::{
    AccountChange, AccountOrigin, Key, KeyList, NewKey, NewRealm, NewSecret, NewUser, Rotated, Rotation,
    SecretList, SharedSecret, StoredRealm, UserInfo, UserPage,
};
use turnpike_config::{
    Secret, Settings, StoredKey, UserSecret, api_keys,
    realms::{self, MOST_REALMS, RealmView},
    restapi_credentials::{fingerprint, new_secret},
};
use turnpike_stores::{
    ApiKey, CUT_OFF, Database, Directory, Edit, Existing, PAGE, RealmRules, StoreError, StoredLimits,
    StoredSecret, UserKeys, UserRow,
};
use turnpike_turn::server::Bandwidth;
use turnpike_wire::{
    escape,
    names::{is_realm, is_username},
    precis::opaque_string,
};
use zeroize::Zeroizing;

use crate::problem::Problem;

pub type AccountStore = Directory<Database>;

/// Default page size.
const USERS: usize = 100;
const YEAR: u32 = 31_536_000;
/// Valid allocation limits of a realm or a user, as in the configuration.
const ALLOCATIONS: RangeInclusive<u64> = 1..=1_000_000;
/// Maximum number of characters in a password.
const LONGEST_PASSWORD: usize = 1024;
/// Maximum number of characters in a secret: the width of the column in coturn's tables.
const LONGEST_SECRET: usize = 256;
/// Allowance for clock differences in seconds.
const SKEW: u32 = 60;

/// Secret that signs a realm's credentials: the one in the store or, if there is none, the first in the
/// configuration.
pub(crate) fn signing_secret(
    settings: &Settings,
    store: Option<&AccountStore>,
    realm: &str,
) -> Option<Secret> {
    store.and_then(|store| store.signing_secret(realm)).or_else(|| {
        let all = realms::all(settings);
        all.iter().find(|view| view.name == realm)?.secrets.first().cloned()
    })
}

#[derive(Clone)]
pub struct Accounts {
    settings: Arc<Settings>,
    store: Option<AccountStore>,
    /// True if the settings are those of the server that uses the store.
    is_complete: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum UserCursor {
    /// The page begins after this many users in the configuration.
    Configured(usize),
    /// The page begins after this realm and name in the store.
    Stored(String, String),
}

impl UserCursor {
    /// Formats the cursor as letters, digits and a dot.
    fn to_text(&self) -> String {
        match self {
            Self::Configured(told) => told.to_string(),
            Self::Stored(realm, name) => format!("{}.{}", hex::encode(realm), hex::encode(name)),
        }
    }

    fn from_text(text: &str) -> Option<Self> {
        let word = |digits: &str| String::from_utf8(hex::decode(digits).ok()?).ok();
        match text.split_once('.') {
            Some((realm, name)) => Some(Self::Stored(word(realm)?, word(name)?)),
            None => text.parse().ok().map(Self::Configured),
        }
    }
}

impl Accounts {
    /// `settings` must include those from the store.
    #[must_use]
    pub fn new(settings: Arc<Settings>, store: Option<AccountStore>) -> Self {
        Self { settings, store, is_complete: true }
    }

    /// Accounts of a store whose servers may have a different configuration.
    #[must_use]
    pub fn of_store(settings: Arc<Settings>, store: AccountStore) -> Self {
        Self { settings, store: Some(store), is_complete: false }
    }

    /// Users of one realm or of all, those in the configuration first; 1 to [`PAGE`] at a time.
    pub async fn users(
        &self,
        realm: Option<&str>,
        limit: Option<usize>,
        cursor: Option<&str>,
    ) -> Result<UserPage, Problem> {
        let wrong = || Problem::bad_request("cursor must be the `next` of another page");
        let from = cursor.map(|cursor| UserCursor::from_text(cursor).ok_or_else(wrong)).transpose()?;
        let limit = match limit.unwrap_or(USERS) {
            limit @ 1..=PAGE => limit,
            _ => return Err(Problem::bad_request(format!("limit must be 1 to {PAGE}"))),
        };
        realm.map_or(Ok(()), check_realm)?;
        let mut users = Vec::new();
        let after = match from.unwrap_or(UserCursor::Configured(0)) {
            UserCursor::Stored(realm, name) => Some(UserRow { realm, name, keys: "" }),
            UserCursor::Configured(told) => {
                users.extend(configured(&self.settings, realm).skip(told).take(limit));
                if users.len() == limit {
                    return Ok(UserPage {
                        users,
                        next: Some(UserCursor::Configured(told + limit).to_text()),
                    });
                }
                None
            }
        };
        let Some(store) = &self.store else { return Ok(UserPage { users, next: None }) };
        let mut rows = store.users(realm, after.as_ref()).await.map_err(told)?;
        let wanted = limit - users.len();
        let has_more = rows.len() == PAGE || rows.len() > wanted;
        rows.truncate(wanted);
        let last = rows.last().filter(|_| has_more);
        let next = last.map(|last| UserCursor::Stored(last.realm.clone(), last.name.clone()).to_text());
        let stored = |UserRow { realm, name, keys }| UserInfo {
            name,
            realm,
            keys: keys.to_owned(),
            from: AccountOrigin::Store,
        };
        users.extend(rows.into_iter().map(stored));
        Ok(UserPage { users, next })
    }

    pub async fn put_user(&self, new: NewUser) -> Result<AccountChange, Problem> {
        let NewUser { name, realm, password, only_new } = new;
        let password = Zeroizing::new(password);
        if !is_username(&name) {
            let why = "name must be 1 to 508 bytes long and contain neither control characters nor a colon";
            return Err(Problem::bad_request(why));
        }
        if !(1..=LONGEST_PASSWORD).contains(&password.chars().count()) {
            let why = format!("password must be 1 to {LONGEST_PASSWORD} characters long");
            return Err(Problem::bad_request(why));
        }
        // Clients use this form in USERNAME (RFC 8489 section 14.3).
        let name = opaque_string(&name).into_owned();
        let realm = self.realm(realm.as_deref())?;
        self.not_configured(USER, &name, &realm)?;
        let keys = UserKeys::new(&name, &realm, &password);
        let edit = Edit::PutUser { realm: realm.clone(), name: name.clone(), keys };
        self.put(edit, USER, existing(only_new), name, realm).await
    }

    pub async fn remove_user(&self, realm: Option<&str>, name: &str) -> Result<AccountChange, Problem> {
        let (realm, name) = (self.realm(realm)?, name.to_owned());
        let edit = Edit::RemoveUser { realm: realm.clone(), name: name.clone() };
        let removed = self.remove(edit, USER, name.clone(), realm.clone()).await;
        self.still_configured(removed, USER, &name, &realm)
    }

    /// Secrets of one realm or of all, sorted by realm and fingerprint.
    pub async fn secrets(&self, realm: Option<&str>) -> Result<SecretList, Problem> {
        realm.map_or(Ok(()), check_realm)?;
        self.read().await?;
        let is_wanted = |of: &str| realm.is_none_or(|realm| realm == of);
        let signs = |realm: &str, secret: &Secret| {
            signing_secret(&self.settings, self.store.as_ref(), realm).as_ref() == Some(secret)
        };
        let shared = |realm: &str, secret: &Secret, from, until: Option<u64>| SharedSecret {
            realm: realm.to_owned(),
            fingerprint: fingerprint(secret),
            from,
            signs: signs(realm, secret),
            until: until.map(date),
        };
        let mut secrets = Vec::new();
        for RealmView { name, secrets: all, .. } in realms::all(&self.settings) {
            secrets.extend(all.iter().map(|secret| shared(name, secret, AccountOrigin::Configuration, None)));
        }
        // A secret that was invalidated is not accepted, and will be removed soon.
        for (realm, secret) in self.stored_secrets().into_iter().filter(|(_, secret)| !secret.was_cut_off()) {
            secrets.push(shared(&realm, &secret.value, AccountOrigin::Store, secret.until));
        }
        secrets.retain(|secret| is_wanted(&secret.realm));
        secrets.sort_unstable();
        Ok(SecretList { secrets })
    }

    pub async fn put_secret(&self, new: NewSecret) -> Result<AccountChange, Problem> {
        let secret = Secret::new(new.secret);
        check_secret(&secret)?;
        let realm = self.realm(new.realm.as_deref())?;
        let fingerprint = fingerprint(&secret);
        let edit = Edit::AddSecret { realm: realm.clone(), secret };
        self.put(edit, SECRET, existing(new.only_new), fingerprint, realm).await
    }

    pub async fn remove_secret(&self, realm: Option<&str>, wanted: &str) -> Result<AccountChange, Problem> {
        let realm = self.realm(realm)?;
        self.read().await?;
        let is_it = |(of, secret): &(String, StoredSecret)| {
            *of == realm && fingerprint(&secret.value).eq_ignore_ascii_case(wanted)
        };
        let Some((_, secret)) = self.stored_secrets().into_iter().find(is_it) else {
            let missing = Err(missing(self.store()?, SECRET, wanted, &realm));
            return self.still_configured(missing, SECRET, wanted, &realm);
        };
        let edit = Edit::RemoveSecret { realm: realm.clone(), secret: secret.value };
        let removed = self.remove(edit, SECRET, wanted.to_owned(), realm.clone()).await;
        self.still_configured(removed, SECRET, wanted, &realm)
    }

    /// Makes another secret the signing secret. The others stay valid until the credentials made with them
    /// have expired.
    pub async fn rotate_secret(&self, rotation: Rotation) -> Result<Rotated, Problem> {
        let Rotation { realm, secret, overlap_s } = rotation;
        let realm = self.realm(realm.as_deref())?;
        let secret = secret.map_or_else(|| new_secret(rand::random()), Secret::new);
        check_secret(&secret)?;
        // A server that has not read the change yet continues with the previous secret.
        let lag = SKEW.max(self.settings.store.refresh.saturating_mul(2));
        if overlap_s.is_some_and(|overlap| overlap > YEAR) {
            return Err(Problem::bad_request(format!("overlap_s must be 0 to {YEAR}")));
        }
        let overlap = overlap_s.unwrap_or_else(|| self.settings.credentials.max_ttl.saturating_add(lag));
        self.read().await?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let end = since.saturating_add(overlap.into());
        let until = if overlap == 0 { CUT_OFF } else { end };
        let fingerprint = fingerprint(&secret);
        let edit = Edit::RotateSecret { realm: realm.clone(), secret, since, until };
        let change = self.put(edit, SECRET, Existing::Replace, fingerprint, realm).await?;
        let AccountChange { name: fingerprint, realm, store, existed, note } = change;
        let configured =
            realms::all(&self.settings).iter().any(|view| view.name == realm && !view.secrets.is_empty());
        let of_configuration = configured.then(|| {
            "secrets in the configuration do not expire: they stay valid until they are removed from it"
                .to_owned()
        });
        let until = existed.then(|| date(end));
        Ok(Rotated { realm, fingerprint, store, until, note: note.or(of_configuration) })
    }

    pub async fn keys(&self) -> Result<KeyList, Problem> {
        self.read().await?;
        let Some(store) = &self.store else { return Ok(KeyList::default()) };
        let shown = |key: &ApiKey| {
            let ApiKey { name, realm, max_ttl, rate, .. } = key.clone();
            Key { name, realm, max_ttl, rate }
        };
        Ok(KeyList { keys: store.api_keys().values().map(shown).collect() })
    }

    pub async fn put_key(&self, new: NewKey) -> Result<AccountChange, Problem> {
        let NewKey { name, sha256, realm, max_ttl, rate } = new;
        if !api_keys::is_name(&name) {
            let why = "name must be 1 to 64 lowercase letters, digits, - or _";
            return Err(Problem::bad_request(why));
        }
        let hash = hex::decode(&sha256).ok().and_then(|bytes| api_keys::KeyHash::try_from(bytes).ok());
        let hash = hash.ok_or_else(|| Problem::bad_request("sha256 must be 64 hex digits"))?;
        let realm = realm.map(|realm| self.realm(Some(&realm))).transpose()?;
        let is_within =
            |number: Option<u32>, most: u32| number.is_none_or(|number| (1..=most).contains(&number));
        if !is_within(max_ttl, YEAR) {
            return Err(Problem::bad_request(format!("max_ttl must be 1 to {YEAR}")));
        }
        if !is_within(rate, 1_000_000) {
            return Err(Problem::bad_request("rate must be 1 to 1000000"));
        }
        let key = ApiKey { name: name.clone(), hash, realm: realm.clone(), max_ttl, rate };
        self.put(Edit::PutApiKey(key), KEY, Existing::Keep, name, realm.unwrap_or_default()).await
    }

    pub async fn remove_key(&self, name: &str) -> Result<AccountChange, Problem> {
        let edit = Edit::RemoveApiKey { name: name.to_owned() };
        self.remove(edit, KEY, name.to_owned(), String::new()).await
    }

    pub async fn realms(&self) -> Result<Vec<StoredRealm>, Problem> {
        self.read().await?;
        let Some(rules) = self.store.as_ref().and_then(AccountStore::rules) else { return Ok(Vec::new()) };
        let origins = |realm: &str| {
            let of_realm = rules.origins.iter().filter(|(_, of)| ***of == *realm);
            of_realm.map(|(origin, _)| origin.to_string()).collect()
        };
        let limit = |limit: Option<usize>| limit.map(|limit| limit as u64);
        let named = rules.realms.iter().filter(|(_, realm)| realm.named);
        let row = named.map(|(name, RealmRules { limits, .. })| StoredRealm {
            name: name.to_string(),
            max_allocations: limit(limits.total_quota),
            max_allocations_per_user: limit(limits.user_quota),
            bits_per_second_per_allocation: limits.max_bps.map(Bandwidth::from_bytes),
            origins: origins(name),
        });
        Ok(row.collect())
    }

    /// Adds a realm, or changes the limits of an existing one.
    pub async fn put_realm(&self, new: NewRealm) -> Result<AccountChange, Problem> {
        let NewRealm {
            name,
            max_allocations,
            max_allocations_per_user,
            bits_per_second_per_allocation: rate,
            only_new,
        } = new;
        let name = self.realm(Some(&name))?;
        if rate.is_some_and(|rate| !Bandwidth::RATES.contains(&rate)) {
            let (least, most) = Bandwidth::RATES.into_inner();
            let detail = format!("bits_per_second_per_allocation must be {least} to {most}");
            return Err(Problem::bad_request(detail));
        }
        for (what, limit) in
            [("max_allocations", max_allocations), ("max_allocations_per_user", max_allocations_per_user)]
        {
            if limit.is_some_and(|limit| !ALLOCATIONS.contains(&limit)) {
                let (least, most) = ALLOCATIONS.into_inner();
                let detail =
                    format!("{what} must be {least} to {most}; without this field, there is no limit");
                return Err(Problem::bad_request(detail));
            }
        }
        let is_known = |realm: &RealmView<'_>| realm.name == name;
        if self.settings.realms.len() >= MOST_REALMS && !realms::all(&self.settings).iter().any(is_known) {
            let detail = format!(
                "a server has at most {MOST_REALMS} realms besides server.realm: remove another one first"
            );
            return Err(Problem::bad_request(detail));
        }
        let limit = |limit: Option<u64>| limit.and_then(|limit| usize::try_from(limit).ok());
        let limits = StoredLimits {
            total_quota: limit(max_allocations),
            user_quota: limit(max_allocations_per_user),
            max_bps: rate.map(|rate| rate / 8),
        };
        let wanted = [max_allocations.is_some(), max_allocations_per_user.is_some(), rate.is_some()];
        self.check_limits(&name, wanted)?;
        let edit = Edit::PutRealm { realm: name.clone(), limits };
        self.put(edit, REALM, existing(only_new), name.clone(), name).await
    }

    pub async fn remove_realm(&self, name: &str) -> Result<AccountChange, Problem> {
        let edit = Edit::RemoveRealm { realm: name.to_owned() };
        let removed = self.remove(edit, REALM, name.to_owned(), name.to_owned()).await;
        self.still_configured(removed, REALM, name, name)
    }

    /// Configuration key that defines this item, and its position.
    fn configured_at(&self, kind: ItemKind, name: &str, realm: &str) -> Option<String> {
        let view = realms::all(&self.settings).into_iter().find(|view| view.name == realm)?;
        let is_main = realm == self.settings.realm;
        let (has, key) = match kind.what {
            "user" => (view.users.iter().any(|user| user.name == name), "auth.users"),
            "secret" => {
                let is_it = |secret: &Secret| fingerprint(secret).eq_ignore_ascii_case(name);
                (view.secrets.iter().any(is_it), "auth.secrets")
            }
            "realm" => (self.configures_realm(realm), "server.realm"),
            _ => (false, ""),
        };
        has.then(|| match is_main {
            true => format!("{key} ({})", self.settings.origin(key)),
            false => format!("a [[realm]] ({realm:?})"),
        })
    }

    /// Returns true if the configuration has this realm. The settings also include realms from a store.
    fn configures_realm(&self, realm: &str) -> bool {
        let mut realms = self.settings.realms.iter();
        realm == self.settings.realm || realms.any(|own| own.name == realm && own.is_configured())
    }

    /// Rejects changes to items in the configuration, which overrides the store.
    fn not_configured(&self, kind: ItemKind, name: &str, realm: &str) -> Result<(), Problem> {
        let Some(place) = self.configured_at(kind, name, realm) else { return Ok(()) };
        let detail = format!(
            "{} {name:?} of realm {realm:?} is defined by {place}, which overrides the store: change it there, or remove it there first",
            kind.what
        );
        Err(Problem::new(StatusCode::CONFLICT, "user_configured", detail))
    }

    /// Rejects limits that a `[[realm]]` sets, because it overrides the store.
    fn check_limits(&self, realm: &str, wanted: [bool; 3]) -> Result<(), Problem> {
        let Some(own) = self.settings.realms.iter().find(|own| own.name == realm && own.is_configured())
        else {
            return Ok(());
        };
        let of_store = &self.settings.stored.realm_limits;
        let in_vain = own.limits().zip(wanted).filter_map(|((key, is_set), wanted)| {
            let counts = is_set && !of_store.contains(&(realm.to_owned(), key));
            (counts && wanted).then_some(key)
        });
        let keys = in_vain.collect::<Vec<_>>().join(", ");
        if keys.is_empty() {
            return Ok(());
        }
        let detail = format!(
            "realm {realm:?} has {keys} in the configuration, which overrides the store: change it there"
        );
        Err(Problem::new(StatusCode::CONFLICT, "realm_configured", detail))
    }

    /// Checks that the servers of this store serve the realm; returns a note if that is unknown.
    async fn check_served(&self, store: &AccountStore, realm: &str) -> Result<Option<String>, Problem> {
        let names_it = |store: &AccountStore| {
            store.rules().is_some_and(|rules| rules.realms.get(realm).is_some_and(|realm| realm.named))
        };
        let mut configured = self.settings.realms.iter().map(|own| &own.name).chain([&self.settings.realm]);
        if configured.any(|own| own == realm) || names_it(store) {
            return Ok(None);
        }
        self.read().await?;
        if names_it(store) {
            return Ok(None);
        }
        let shown = escape::name(realm);
        let remedy =
            format!("configure it as server.realm or a [[realm]], or run `turnpike realm add {shown}`");
        if self.is_complete {
            let detail = format!("realm {realm:?} is not served: {remedy} first");
            return Err(Problem::new(StatusCode::CONFLICT, "realm_not_served", detail));
        }
        Ok(Some(format!("if no server of this store has realm {realm:?} yet, {remedy}")))
    }

    /// Adds a note to the result of a removal if the configuration still has the item.
    fn still_configured(
        &self,
        removed: Result<AccountChange, Problem>,
        kind: ItemKind,
        name: &str,
        realm: &str,
    ) -> Result<AccountChange, Problem> {
        let Some(place) = self.configured_at(kind, name, realm) else { return removed };
        match removed {
            Ok(change) => {
                let note = format!("{} {name:?} is still valid: it is in {place}", kind.what);
                Ok(AccountChange { note: Some(note), ..change })
            }
            Err(problem) if problem.status == StatusCode::NOT_FOUND.as_u16() => {
                let detail = format!("{}; it is defined by {place}: remove it there", problem.detail);
                Err(Problem { detail, ..problem })
            }
            Err(problem) => Err(problem),
        }
    }

    fn store(&self) -> Result<&AccountStore, Problem> {
        self.store.as_ref().ok_or_else(|| {
            let detail =
                "there is no store: set store.url, or set store.state to a directory for the embedded store";
            Problem::new(StatusCode::CONFLICT, "no_store", detail)
        })
    }

    /// The requested realm, or the default.
    fn realm(&self, named: Option<&str>) -> Result<String, Problem> {
        let realm = named.unwrap_or(&self.settings.realm);
        check_realm(realm)?;
        Ok(realm.to_owned())
    }

    /// Reads the store again to include changes made by others.
    async fn read(&self) -> Result<(), Problem> {
        match &self.store {
            Some(store) => store.read().await.map_err(told),
            None => Ok(()),
        }
    }

    fn stored_secrets(&self) -> Vec<(String, StoredSecret)> {
        let all = self.store.iter().flat_map(AccountStore::all_secrets);
        let each = all.flat_map(|(realm, secrets)| {
            let of_realm = secrets.iter().map(|secret| (realm.to_string(), secret.clone()));
            of_realm.collect::<Vec<_>>()
        });
        each.collect()
    }

    async fn put(
        &self,
        edit: Edit,
        kind: ItemKind,
        existing: Existing,
        name: String,
        realm: String,
    ) -> Result<AccountChange, Problem> {
        let store = self.store()?;
        // Reports an invalid store before anything is written.
        if store.rules().is_none() {
            store.read().await.map_err(told)?;
        }
        // An API key may be valid for all realms.
        let note =
            if kind == REALM || realm.is_empty() { None } else { self.check_served(store, &realm).await? };
        let existed = store.apply(&edit, existing).await.map_err(told)?;
        if existed && existing == Existing::Keep {
            let detail = format!(
                "there is already a {} {name:?}: choose another name, or remove the existing one first",
                kind.what
            );
            return Err(Problem::new(StatusCode::CONFLICT, kind.exists, detail));
        }
        Ok(AccountChange { name, realm, store: store.name().to_owned(), existed, note })
    }

    async fn remove(
        &self,
        edit: Edit,
        what: ItemKind,
        name: String,
        realm: String,
    ) -> Result<AccountChange, Problem> {
        let store = self.store()?;
        if !store.edit(&edit).await.map_err(told)? {
            return Err(missing(store, what, &name, &realm));
        }
        Ok(AccountChange { name, realm, store: store.name().to_owned(), existed: true, note: None })
    }
}

/// A kind of item, with its error codes for missing and for existing items.
#[derive(Clone, Copy, PartialEq)]
struct ItemKind {
    what: &'static str,
    missing: &'static str,
    exists: &'static str,
}

const USER: ItemKind = ItemKind { what: "user", missing: "no_such_user", exists: "user_exists" };
const SECRET: ItemKind = ItemKind { what: "secret", missing: "no_such_secret", exists: "secret_exists" };
const REALM: ItemKind = ItemKind { what: "realm", missing: "no_such_realm", exists: "realm_exists" };
const KEY: ItemKind = ItemKind { what: "key", missing: "no_such_key", exists: "key_exists" };

fn existing(only_new: bool) -> Existing {
    if only_new { Existing::Keep } else { Existing::Replace }
}

/// Leading and trailing whitespace is not allowed, because a store may pad its columns (char(n) in SQL).
fn has_no_blanks_around(text: &str) -> bool {
    text.trim() == text
}

pub(crate) fn check_realm(realm: &str) -> Result<(), Problem> {
    if is_realm(realm) && has_no_blanks_around(realm) {
        return Ok(());
    }
    let why = "realm must be 1 to 127 characters long, without leading or trailing whitespace, control characters, \" or \\";
    Err(Problem::bad_request(why))
}

fn check_secret(secret: &Secret) -> Result<(), Problem> {
    if !(1..=LONGEST_SECRET).contains(&secret.reveal().chars().count()) {
        let why = format!("secret must be 1 to {LONGEST_SECRET} characters long");
        return Err(Problem::bad_request(why));
    }
    if !has_no_blanks_around(secret.reveal()) {
        return Err(Problem::bad_request(
            "the secret has leading or trailing whitespace, which a store does not preserve",
        ));
    }
    Ok(())
}

fn missing(store: &AccountStore, kind: ItemKind, name: &str, realm: &str) -> Problem {
    let place = if kind == REALM || kind == KEY { String::new() } else { format!(" in realm {realm:?}") };
    let detail = format!("there is no {} {name:?}{place} in {}", kind.what, store.name());
    Problem::new(StatusCode::NOT_FOUND, kind.missing, detail)
}

/// Users in the configuration, realm by realm.
fn configured<'a>(settings: &'a Settings, realm: Option<&'a str>) -> impl Iterator<Item = UserInfo> {
    let of = realms::all(settings).into_iter().filter(move |of| realm.is_none_or(|realm| realm == of.name));
    of.flat_map(|of| {
        of.users.iter().map(move |user| UserInfo {
            name: user.name.clone(),
            realm: of.name.to_owned(),
            keys: kinds(&user.secret).to_owned(),
            from: AccountOrigin::Configuration,
        })
    })
}

fn kinds(secret: &UserSecret) -> &'static str {
    let UserSecret::Keys(keys) = secret else { return "MD5, SHA-256" };
    let has_md5 = keys.iter().any(|key| matches!(key, StoredKey::Md5(_)));
    let has_sha256 = keys.iter().any(|key| matches!(key, StoredKey::Sha256(_)));
    match (has_md5, has_sha256) {
        (true, true) => "MD5, SHA-256",
        (false, true) => "SHA-256",
        (true, false) => "MD5",
        (false, false) => "none",
    }
}

/// Formats Unix seconds as RFC 3339.
fn date(unix: u64) -> String {
    let second = i64::try_from(unix).unwrap_or(i64::MAX);
    Timestamp::from_second(second).unwrap_or(Timestamp::MAX).to_string()
}

/// Converts a store error, which never contains a password.
pub(crate) fn told(error: StoreError) -> Problem {
    let (status, code) = if error.may_pass() {
        (StatusCode::SERVICE_UNAVAILABLE, "store_unavailable")
    } else {
        (StatusCode::BAD_GATEWAY, "store_refuses")
    };
    Problem::new(status, code, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_cursor_round_trips() {
        for place in [
            UserCursor::Configured(0),
            UserCursor::Configured(1000),
            UserCursor::Stored(String::new(), "a".to_owned()),
            UserCursor::Stored("exämple.org".to_owned(), "a/b.c d".to_owned()),
        ] {
            let text = place.to_text();
            assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'.'), "{text}");
            assert_eq!(UserCursor::from_text(&text), Some(place));
        }
        for bad in ["", "-1", "x", ".6", "6.", "zz.61", "ff.61", "61.62.63"] {
            assert_eq!(UserCursor::from_text(bad), None, "{bad}");
        }
    }
}
