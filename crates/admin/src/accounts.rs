//! Users, secrets and realms: listed, and changed where there is a store. For whoever asks a running program, and for commands where none
//! runs: both get the same answers.

use std::sync::Arc;

use axum::http::StatusCode;
use turnpike_config::{
    Secret, Settings, StoredKey, UserSecret, is_realm, is_username,
    realms::{self, RealmView},
    restapi_credentials::fingerprint,
};
use turnpike_stores::{Database, Directory, Edit, PAGE, RealmOptions, StoreError, UserKeys, UserRow};
use zeroize::Zeroizing;

use crate::model::{
    Change, NewRealm, NewSecret, NewUser, Origin, Problem, Secrets, SharedSecret, StoredRealm, User,
};

/// A store behind its cache.
pub type Store = Directory<Database>;

/// Users of a page, if nobody says how many.
const USERS: usize = 100;

/// What a configuration and its store know.
#[derive(Clone)]
pub struct Accounts {
    settings: Arc<Settings>,
    store: Option<Store>,
}

/// Some users, and where to go on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UserPage {
    pub(crate) users: Vec<User>,
    pub(crate) next: Option<Place>,
}

/// Where a list of users is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// So many of the configuration have been told.
    Configured(usize),
    /// Those of the store behind this realm and name.
    Stored(String, String),
}

impl Place {
    /// As a cursor: letters, digits and a point.
    pub(crate) fn to_text(&self) -> String {
        match self {
            Self::Configured(told) => told.to_string(),
            Self::Stored(realm, name) => format!("{}.{}", hex::encode(realm), hex::encode(name)),
        }
    }

    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let word = |digits: &str| String::from_utf8(hex::decode(digits).ok()?).ok();
        match text.split_once('.') {
            Some((realm, name)) => Some(Self::Stored(word(realm)?, word(name)?)),
            None => text.parse().ok().map(Self::Configured),
        }
    }
}

impl Accounts {
    /// Of these settings, with what a store adds to them where that is known, and of that store.
    #[must_use]
    pub fn new(settings: Arc<Settings>, store: Option<Store>) -> Self {
        Self { settings, store }
    }

    /// Users of one realm or of all: those of the configuration first. Their number is 1 to [`PAGE`].
    pub(crate) async fn users(
        &self,
        realm: Option<&str>,
        limit: Option<usize>,
        from: Option<Place>,
    ) -> Result<UserPage, Problem> {
        let limit = match limit.unwrap_or(USERS) {
            limit @ 1..=PAGE => limit,
            _ => return Err(Problem::bad_request(format!("limit is expected to be 1 to {PAGE}"))),
        };
        let mut users = Vec::new();
        let after = match from.unwrap_or(Place::Configured(0)) {
            Place::Stored(realm, name) => Some(UserRow { realm, name, keys: "" }),
            Place::Configured(told) => {
                users.extend(configured(&self.settings, realm).skip(told).take(limit));
                if users.len() == limit {
                    return Ok(UserPage { users, next: Some(Place::Configured(told + limit)) });
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
        let next = last.map(|last| Place::Stored(last.realm.clone(), last.name.clone()));
        let stored =
            |UserRow { realm, name, keys }| User { name, realm, keys: keys.to_owned(), from: Origin::Store };
        users.extend(rows.into_iter().map(stored));
        Ok(UserPage { users, next })
    }

    /// Makes a user, or gives one another password.
    pub(crate) async fn put_user(&self, new: NewUser) -> Result<Change, Problem> {
        let NewUser { name, realm, password } = new;
        let password = Zeroizing::new(password);
        if !is_username(&name) {
            let why = "name is expected to have 1 to 508 bytes, no control characters and no colon";
            return Err(Problem::bad_request(why));
        }
        if password.is_empty() {
            return Err(Problem::bad_request("the password is empty"));
        }
        let realm = self.realm(realm.as_deref())?;
        let keys = UserKeys::new(&name, &realm, &password);
        let edit = Edit::PutUser { realm: realm.clone(), name: name.clone(), keys };
        self.put(edit, name, realm).await
    }

    /// Removes a user.
    pub(crate) async fn remove_user(&self, realm: Option<&str>, name: &str) -> Result<Change, Problem> {
        let (realm, name) = (self.realm(realm)?, name.to_owned());
        let edit = Edit::RemoveUser { realm: realm.clone(), name: name.clone() };
        self.remove(edit, USER, name, realm).await
    }

    /// Secrets of one realm or of all, by realm and fingerprint.
    pub(crate) async fn secrets(&self, realm: Option<&str>) -> Result<Secrets, Problem> {
        self.read().await?;
        let is_wanted = |of: &str| realm.is_none_or(|realm| realm == of);
        let shared = |realm: &str, secret: &Secret, from| SharedSecret {
            realm: realm.to_owned(),
            fingerprint: fingerprint(secret),
            from,
        };
        let mut secrets = Vec::new();
        for RealmView { name, secrets: all, .. } in realms::all(&self.settings) {
            secrets.extend(all.iter().map(|secret| shared(name, secret, Origin::Configuration)));
        }
        secrets
            .extend(self.stored_secrets().iter().map(|(realm, secret)| shared(realm, secret, Origin::Store)));
        secrets.retain(|secret| is_wanted(&secret.realm));
        secrets.sort_unstable();
        Ok(Secrets { secrets })
    }

    /// Takes one more secret.
    pub(crate) async fn put_secret(&self, new: NewSecret) -> Result<Change, Problem> {
        let secret = Secret::new(new.secret);
        if secret.reveal().is_empty() {
            return Err(Problem::bad_request("the secret is empty"));
        }
        let realm = self.realm(new.realm.as_deref())?;
        let text = Zeroizing::new(secret.reveal().to_owned());
        let edit = Edit::AddSecret { realm: realm.clone(), secret: text };
        self.put(edit, fingerprint(&secret), realm).await
    }

    /// Removes a secret by its fingerprint.
    pub(crate) async fn remove_secret(&self, realm: Option<&str>, wanted: &str) -> Result<Change, Problem> {
        let realm = self.realm(realm)?;
        self.read().await?;
        let is_it = |(of, secret): &&(String, Secret)| {
            *of == realm && fingerprint(secret).eq_ignore_ascii_case(wanted)
        };
        let all = self.stored_secrets();
        let Some((_, secret)) = all.iter().find(is_it) else {
            return Err(missing(self.store()?, SECRET, wanted, &realm));
        };
        let secret = Zeroizing::new(secret.reveal().to_owned());
        self.remove(Edit::RemoveSecret { realm: realm.clone(), secret }, SECRET, wanted.to_owned(), realm)
            .await
    }

    /// Realms that the store names.
    pub(crate) async fn realms(&self) -> Result<Vec<StoredRealm>, Problem> {
        self.read().await?;
        let Some(rules) = self.store.as_ref().and_then(Store::rules) else { return Ok(Vec::new()) };
        let origins = |realm: &str| {
            let of_realm = rules.origins.iter().filter(|(_, of)| ***of == *realm);
            of_realm.map(|(origin, _)| origin.to_string()).collect()
        };
        let limit = |limit: Option<usize>| limit.map(|limit| limit as u64);
        let named = rules.realms.iter().filter(|(_, realm)| realm.named);
        let row = named.map(|(name, realm)| StoredRealm {
            name: name.to_string(),
            max_sessions: limit(realm.total_quota),
            max_sessions_per_user: limit(realm.user_quota),
            origins: origins(name),
        });
        Ok(row.collect())
    }

    /// Names a realm, or gives one other limits.
    pub(crate) async fn put_realm(&self, new: NewRealm) -> Result<Change, Problem> {
        let NewRealm { name, max_sessions, max_sessions_per_user } = new;
        let name = self.realm(Some(&name))?;
        let limit = |limit: Option<u64>| limit.unwrap_or_default();
        let options =
            RealmOptions { total_quota: limit(max_sessions), user_quota: limit(max_sessions_per_user) };
        self.put(Edit::PutRealm { realm: name.clone(), options }, name.clone(), name).await
    }

    /// Names a realm no more.
    pub(crate) async fn remove_realm(&self, name: &str) -> Result<Change, Problem> {
        let edit = Edit::RemoveRealm { realm: name.to_owned() };
        self.remove(edit, REALM, name.to_owned(), name.to_owned()).await
    }

    fn store(&self) -> Result<&Store, Problem> {
        self.store.as_ref().ok_or_else(|| {
            let detail = "there is no store: name one by store.url, or a directory for the embedded one by store.state";
            Problem::new(StatusCode::CONFLICT, "no_store", detail)
        })
    }

    /// The realm that is meant.
    fn realm(&self, named: Option<&str>) -> Result<String, Problem> {
        let realm = named.unwrap_or(&self.settings.realm);
        if is_realm(realm) {
            return Ok(realm.to_owned());
        }
        let why =
            "a realm is expected to have 1 to 127 characters, and neither control characters nor \" nor \\";
        Err(Problem::bad_request(why))
    }

    /// What others have written lately counts too.
    async fn read(&self) -> Result<(), Problem> {
        match &self.store {
            Some(store) => store.read().await.map_err(told),
            None => Ok(()),
        }
    }

    fn stored_secrets(&self) -> Vec<(String, Secret)> {
        let all = self.store.iter().flat_map(Store::all_secrets);
        let each = all.flat_map(|(realm, secrets)| {
            let of_realm = secrets.iter().map(|secret| (realm.to_string(), Secret::new(secret.as_str())));
            of_realm.collect::<Vec<_>>()
        });
        each.collect()
    }

    async fn put(&self, edit: Edit, name: String, realm: String) -> Result<Change, Problem> {
        let store = self.store()?;
        // One that is no store of ours is told before anything is written.
        if store.rules().is_none() {
            store.read().await.map_err(told)?;
        }
        let existed = store.edit(&edit).await.map_err(told)?;
        let named =
            store.rules().is_some_and(|rules| rules.realms.get(&*realm).is_some_and(|realm| realm.named));
        let is_served = named
            || self.settings.realm == realm
            || self.settings.realms.iter().any(|configured| configured.name == realm);
        let note = (!is_served).then(|| {
            format!("realm {realm:?} is served where server.realm or a [[realm]] names it, or after `turnpike realm add {realm}`")
        });
        Ok(Change { name, realm, store: store.name().to_owned(), existed, note })
    }

    async fn remove(&self, edit: Edit, what: Kind, name: String, realm: String) -> Result<Change, Problem> {
        let store = self.store()?;
        if !store.edit(&edit).await.map_err(told)? {
            return Err(missing(store, what, &name, &realm));
        }
        Ok(Change { name, realm, store: store.name().to_owned(), existed: true, note: None })
    }
}

/// What can be removed, and the code of the problem where it is not there.
type Kind = (&'static str, &'static str);

const USER: Kind = ("user", "no_such_user");
const SECRET: Kind = ("secret", "no_such_secret");
const REALM: Kind = ("realm", "no_such_realm");

fn missing(store: &Store, kind: Kind, name: &str, realm: &str) -> Problem {
    let place = if kind == REALM { String::new() } else { format!(" in realm {realm:?}") };
    let detail = format!("there is no {} {name:?}{place} in {}", kind.0, store.name());
    Problem::new(StatusCode::NOT_FOUND, kind.1, detail)
}

/// Those of the configuration, realm by realm.
fn configured<'a>(settings: &'a Settings, realm: Option<&'a str>) -> impl Iterator<Item = User> {
    let of = realms::all(settings).into_iter().filter(move |of| realm.is_none_or(|realm| realm == of.name));
    of.flat_map(|of| {
        of.users.iter().map(move |user| User {
            name: user.name.clone(),
            realm: of.name.to_owned(),
            keys: kinds(&user.secret).to_owned(),
            from: Origin::Configuration,
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

/// What is wrong with a store, which has no password in it.
fn told(error: StoreError) -> Problem {
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
    fn a_cursor_leads_back_to_its_place() {
        for place in [
            Place::Configured(0),
            Place::Configured(1000),
            Place::Stored(String::new(), "a".to_owned()),
            Place::Stored("exämple.org".to_owned(), "a/b.c d".to_owned()),
        ] {
            let text = place.to_text();
            assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'.'), "{text}");
            assert_eq!(Place::from_text(&text), Some(place));
        }
        for bad in ["", "-1", "x", ".6", "6.", "zz.61", "ff.61", "61.62.63"] {
            assert_eq!(Place::from_text(bad), None, "{bad}");
        }
    }
}
