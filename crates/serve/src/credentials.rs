//! Credential store of the server: static users with precomputed keys, shared secrets for time-limited users,
//! and the cached users and secrets of a database. Queried per request, never per packet.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use turnpike_config::{
    ConfiguredUser, Secret, Settings, StoredKey, UserSecret,
    realms::{self, RealmView},
    restapi_credentials,
};
use turnpike_relay::{CredentialStore, PendingLookup};
use turnpike_stores::{CachedUser, CredentialOwner, Secrets, StoredSecret, UserLookup};
use turnpike_turn::server::{
    CredentialCheck, CredentialQuery, LookupResult, OwnedUser, User as Named, Users,
};
use turnpike_wire::{
    integrity::{Key, KeyAlgorithm, userhash},
    precis::opaque_string,
};
use zeroize::Zeroizing;

use crate::store::UserStore;

/// Users and secrets of all realms.
///
/// Unknown names are verified against a random key, so that response times do not reveal which names exist.
/// The verifier compares keys in constant time. The maps use the standard library's keyed hash, because
/// clients choose the keys.
pub(crate) struct CredentialTable {
    realms: HashMap<Box<str>, Arc<RealmCredentials>>,
    store: Option<UserStore>,
    decoy: Key,
}

struct RealmCredentials {
    name: String,
    /// Each user is listed under the configured name and under its OpaqueString form, which clients send.
    users: HashMap<Box<str>, StaticUser>,
    by_hash: HashMap<[u8; 32], Box<str>>,
    secrets: Vec<Secret>,
}

struct StaticUser {
    /// Username after applying OpaqueString.
    name: Box<str>,
    /// Any of these may match: clients may or may not apply OpaqueString to the password.
    keys: Vec<StaticKeys>,
}

#[derive(PartialEq)]
struct StaticKeys {
    md5: Option<Key>,
    sha256: Option<Key>,
}

impl CredentialTable {
    /// Computes the keys of the static users. `store` is queried for all others.
    pub(crate) fn new(settings: &Settings, store: Option<UserStore>) -> Self {
        let all = realms::all(settings);
        let realms =
            all.iter().map(|realm| (realm.name.into(), Arc::new(RealmCredentials::new(realm)))).collect();
        Self { realms, store, decoy: Key::from_bytes(&rand::random::<[u8; 16]>()) }
    }

    /// Verifies against a decoy key, so that an unknown name takes as long to check as a known one.
    fn nobody(&self, verify: &mut dyn FnMut(&Key) -> bool) -> CredentialCheck {
        verify(&self.decoy);
        CredentialCheck::NoSuchUser
    }

    /// Looks up a name in the store if no static user has it; `timed` is the result of checking it as a
    /// time-limited name.
    fn check_stored(
        &self,
        store: &UserStore,
        (name, realm): (&str, &str),
        algorithm: KeyAlgorithm,
        timed: Option<CredentialCheck>,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> CredentialCheck {
        let known = if is_only_time_limited(name) { CachedUser::Absent } else { store.cached(realm, name) };
        // A key that matches no known secret may be derived from one that was just added to the store.
        let may_be_new = || {
            restapi_credentials::parse(name).is_some()
                && (store.secrets(realm).is_none() || store.may_have_new_secrets())
        };
        match known {
            CachedUser::Unknown => CredentialCheck::NeedsLookup,
            CachedUser::Absent => match timed {
                Some(untimely @ CredentialCheck::TooFarAhead { .. }) => untimely,
                _ if may_be_new() => CredentialCheck::NeedsLookup,
                Some(refused) => refused,
                None => self.nobody(verify),
            },
            CachedUser::User(keys) => {
                let key = keys.get(algorithm);
                let accepted = verify(key.unwrap_or(&self.decoy)) && key.is_some();
                if accepted {
                    CredentialCheck::Accepted {
                        username: name.into(),
                        identity: name.into(),
                        until_unix: None,
                    }
                } else {
                    CredentialCheck::WrongKey { username: name.into() }
                }
            }
        }
    }
}

impl Users for CredentialTable {
    fn check(
        &self,
        user: Named<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> CredentialCheck {
        // During a reload, a worker may still request a realm that has been removed.
        let known = self.realms.get(realm);
        let Some((known, name)) = known.and_then(|known| Some((known, known.name_of(user)?))) else {
            return self.nobody(verify);
        };
        if let Some(lookup) = known.check_static(name, algorithm, &self.decoy, verify) {
            return lookup;
        }
        let stored = self.store.as_ref().map(|store| StoredSecrets::of(store, realm)).unwrap_or_default();
        let timed = known.check_time_limited(name, algorithm, unix, &stored, verify);
        match (&self.store, timed) {
            (_, Some(accepted @ CredentialCheck::Accepted { .. })) => accepted,
            (Some(store), timed) => self.check_stored(store, (name, realm), algorithm, timed, verify),
            (None, timed) => timed.unwrap_or_else(|| self.nobody(verify)),
        }
    }
}

impl CredentialStore for CredentialTable {
    fn look_up(&self, query: CredentialQuery, lookup: PendingLookup) {
        let CredentialQuery { user, realm, algorithm, .. } = query;
        let (Some(store), Some(known), OwnedUser::Name(name)) = (&self.store, self.realms.get(&*realm), user)
        else {
            return lookup.finish(LookupResult::NoSuchUser);
        };
        let known = Arc::clone(known);
        let (of_realm, of_name, again) = (realm.clone(), name.clone(), store.clone());
        let by_secrets = move |lookup: PendingLookup| {
            let then = again.clone();
            again.refresh_secrets(&of_realm.clone(), move |secrets| {
                lookup.finish(match secrets {
                    Some(_) => known.time_limited(&of_name, algorithm, &StoredSecrets::of(&then, &of_realm)),
                    None => LookupResult::Unavailable,
                });
            });
        };
        if is_only_time_limited(&name) {
            return by_secrets(lookup);
        }
        store.look_up(&realm, &name.clone(), move |found| match found {
            UserLookup::User(keys) => lookup.finish(LookupResult::Keys {
                username: name.clone(),
                identity: name,
                keys: keys.get(algorithm).into_iter().map(|key| (key.clone(), None)).collect(),
            }),
            UserLookup::Absent if restapi_credentials::parse(&name).is_some() => by_secrets(lookup),
            UserLookup::Absent => lookup.finish(LookupResult::NoSuchUser),
            UserLookup::Unavailable => lookup.finish(LookupResult::Unavailable),
        });
    }
}

/// True for `TIME:ID` and `:TIME`. Other forms can also be usernames: `sip:4915112345678@example.org`, or an
/// extension number.
fn is_only_time_limited(name: &str) -> bool {
    let begins_with_time = |(first, _): (&str, &str)| first.bytes().all(|byte| byte.is_ascii_digit());
    name.split_once(':').is_some_and(begins_with_time) && restapi_credentials::parse(name).is_some()
}

impl RealmCredentials {
    fn new(realm: &RealmView<'_>) -> Self {
        let mut users = HashMap::with_capacity(realm.users.len());
        let mut by_hash = HashMap::with_capacity(realm.users.len());
        for user in realm.users {
            let name = opaque_string(&user.name);
            by_hash.insert(userhash(&name, realm.name), (&*name).into());
            for sent in [user.name.as_str(), &name] {
                let keys = StaticKeys::all(user, sent, realm.name);
                users.insert(sent.into(), StaticUser { name: (&*name).into(), keys });
            }
        }
        Self { name: realm.name.to_owned(), users, by_hash, secrets: realm.secrets.to_vec() }
    }

    /// Time-limited names cannot be found by userhash, because clients choose them.
    fn name_of<'a>(&'a self, user: Named<'a>) -> Option<&'a str> {
        match user {
            Named::Name(name) => Some(name),
            Named::Hash(hash) => self.by_hash.get(hash).map(AsRef::as_ref),
        }
    }

    fn check_static(
        &self,
        name: &str,
        algorithm: KeyAlgorithm,
        decoy: &Key,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Option<CredentialCheck> {
        let StaticUser { name, keys } = self.users.get(name)?;
        let accepted = keys.iter().any(|keys| {
            let key = match algorithm {
                KeyAlgorithm::Md5 => keys.md5.as_ref(),
                KeyAlgorithm::Sha256 => keys.sha256.as_ref(),
            };
            verify(key.unwrap_or(decoy)) && key.is_some()
        });
        Some(if accepted {
            CredentialCheck::Accepted { username: name.clone(), identity: name.clone(), until_unix: None }
        } else {
            CredentialCheck::WrongKey { username: name.clone() }
        })
    }

    fn check_time_limited(
        &self,
        name: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        stored: &StoredSecrets,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Option<CredentialCheck> {
        if self.secrets.is_empty() && stored.is_empty() {
            return None;
        }
        let (expiry, id) = restapi_credentials::parse(name)?;
        if let Some(ahead) = too_far_ahead(expiry, unix) {
            return Some(CredentialCheck::TooFarAhead { ahead });
        }
        let mut keys = self.keys_by_secret(name, algorithm, unix, expiry, stored);
        let accepted = keys.find(|(key, _)| verify(key));
        Some(match (accepted, unix.checked_sub(expiry)) {
            (Some((_, until_unix)), _) => {
                let (username, identity) = (name.into(), identity(name, id));
                CredentialCheck::Accepted { username, identity, until_unix }
            }
            (None, Some(ago @ 1..)) => CredentialCheck::Expired { ago },
            (None, _) => CredentialCheck::WrongKey { username: name.into() },
        })
    }

    /// All keys that a client may have used for a request that was waiting for the store.
    fn time_limited(&self, name: &str, algorithm: KeyAlgorithm, stored: &StoredSecrets) -> LookupResult {
        let Some((expiry, id)) = restapi_credentials::parse(name) else { return LookupResult::NoSuchUser };
        if self.secrets.is_empty() && stored.is_empty() {
            return LookupResult::NoSuchUser;
        }
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if let Some(ahead) = too_far_ahead(expiry, unix) {
            return LookupResult::TooFarAhead { ahead };
        }
        let keys = self.keys_by_secret(name, algorithm, unix, expiry, stored).collect();
        LookupResult::Keys { username: name.into(), identity: identity(name, id), keys }
    }

    /// One key per configured or stored secret, with the last Unix second in which the credential is valid.
    /// A secret removed from the store invalidates its credentials, but not running allocations.
    fn keys_by_secret<'a>(
        &'a self,
        name: &'a str,
        algorithm: KeyAlgorithm,
        unix: u64,
        expiry: u64,
        stored: &'a StoredSecrets,
    ) -> impl Iterator<Item = (Key, Option<u64>)> + 'a {
        let configured = self.secrets.iter().map(move |secret| (secret, expiry));
        let stored = stored.iter().map(move |secret| {
            let until = secret.until.filter(|_| !secret.counts(unix)).unwrap_or(u64::MAX);
            (&secret.value, expiry.min(until))
        });
        configured.chain(stored).map(move |(secret, until)| {
            let password = restapi_credentials::password(secret, name);
            (Key::long_term(algorithm, name, &self.name, password.reveal().as_bytes()), Some(until))
        })
    }
}

/// Returns the seconds until `expiry` if it is too far ahead to be intended.
fn too_far_ahead(expiry: u64, unix: u64) -> Option<u64> {
    expiry.checked_sub(unix).filter(|ahead| *ahead > restapi_credentials::MAX_AHEAD)
}

#[derive(Default)]
struct StoredSecrets {
    held: Secrets,
    ended: Secrets,
}

impl StoredSecrets {
    fn of(store: &UserStore, realm: &str) -> Self {
        Self { held: store.secrets(realm).unwrap_or_default(), ended: store.ended_secrets(realm) }
    }

    fn is_empty(&self) -> bool {
        self.held.is_empty() && self.ended.is_empty()
    }

    fn iter(&self) -> impl Iterator<Item = &StoredSecret> {
        self.held.iter().filter(|secret| !secret.was_cut_off()).chain(self.ended.iter())
    }
}

/// Name under which the quotas of a time-limited name are kept: its id, since otherwise each new timestamp
/// would get a new quota. The leading colon distinguishes the id from static users and token keys.
fn identity(name: &str, id: &str) -> Box<str> {
    let counted = if id.is_empty() { name } else { CredentialOwner::parse(id).user };
    [":", counted].concat().into_boxed_str()
}

impl StaticKeys {
    fn all(user: &ConfiguredUser, name: &str, realm: &str) -> Vec<Self> {
        match &user.secret {
            UserSecret::Password(password) => {
                let password = password.reveal().as_bytes();
                let of = |key: fn(KeyAlgorithm, &str, &str, &[u8]) -> Key| {
                    let key = |algorithm| Some(key(algorithm, name, realm, password));
                    Self { md5: key(KeyAlgorithm::Md5), sha256: key(KeyAlgorithm::Sha256) }
                };
                let (prepared, unprepared) = (of(Key::long_term), of(Key::unprepared));
                if prepared == unprepared { vec![prepared] } else { vec![prepared, unprepared] }
            }
            UserSecret::Keys(keys) => {
                let mut made = Self { md5: None, sha256: None };
                for key in keys {
                    let (slot, digits) = match key {
                        StoredKey::Md5(digits) => (&mut made.md5, digits),
                        StoredKey::Sha256(digits) => (&mut made.sha256, digits),
                    };
                    *slot = hex::decode(digits.reveal())
                        .ok()
                        .map(|bytes| Key::from_bytes(&Zeroizing::new(bytes)));
                }
                vec![made]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnpike_config::{AuthSettings, RealmSettings};

    const NOW: u64 = 1_700_000_000;

    fn settings() -> Settings {
        let (md5, _) = restapi_credentials::stored_keys("stored", "turnpike", &Secret::new("pw"));
        let user = |name: &str, secret| ConfiguredUser { name: name.to_owned(), secret };
        Settings {
            auth: AuthSettings {
                users: vec![
                    user("alice", UserSecret::Password(Secret::new("pw"))),
                    user("stored", UserSecret::Keys(StoredKey::from_hex(&md5).into_iter().collect())),
                ],
                secrets: vec![Secret::new("old"), Secret::new("new")],
                ..AuthSettings::default()
            },
            ..Settings::default()
        }
    }

    /// Clients that implement RFC 8489 apply OpaqueString to "Ame\u{301}lie" and "pa\u{a0}ss"; most browsers
    /// and libraries send both unchanged.
    #[test]
    fn users_and_passwords_match_with_and_without_opaque_string() {
        let (written, prepared) = ("Ame\u{301}lie", "Am\u{e9}lie");
        let secret = UserSecret::Password(Secret::new("pa\u{a0}ss"));
        let users = vec![ConfiguredUser { name: written.to_owned(), secret }];
        let credentials = CredentialTable::new(
            &Settings { auth: AuthSettings { users, ..AuthSettings::default() }, ..Settings::default() },
            None,
        );
        let ask = |user: Named<'_>, name: &str, password: &str| {
            let key = Key::unprepared(KeyAlgorithm::Md5, name, "turnpike", password.as_bytes());
            credentials.check(user, "turnpike", KeyAlgorithm::Md5, NOW, &mut |it| *it == key)
        };
        let accepted = |identity: &str| CredentialCheck::Accepted {
            username: identity.into(),
            identity: identity.into(),
            until_unix: None,
        };
        for name in [written, prepared] {
            for password in ["pa ss", "pa\u{a0}ss"] {
                assert_eq!(ask(Named::Name(name), name, password), accepted(prepared), "{name} {password}");
            }
            assert_eq!(
                ask(Named::Name(name), name, "pass"),
                CredentialCheck::WrongKey { username: prepared.into() }
            );
            let hash = userhash(name, "turnpike");
            assert_eq!(ask(Named::Hash(&hash), prepared, "pa ss"), accepted(prepared));
        }
    }

    fn ask(user: Named<'_>, key_name: &str, algorithm: KeyAlgorithm, password: &str) -> CredentialCheck {
        let key = Key::long_term(algorithm, key_name, "turnpike", password.as_bytes());
        CredentialTable::new(&settings(), None)
            .check(user, "turnpike", algorithm, NOW, &mut |candidate| *candidate == key)
    }

    fn ask_name(name: &str, password: &str) -> CredentialCheck {
        ask(Named::Name(name), name, KeyAlgorithm::Md5, password)
    }

    fn accepted(username: &str, identity: &str) -> CredentialCheck {
        let until_unix = restapi_credentials::parse(username).map(|(expiry, _)| expiry);
        CredentialCheck::Accepted { username: username.into(), identity: identity.into(), until_unix }
    }

    fn wrong_key(username: &str) -> CredentialCheck {
        CredentialCheck::WrongKey { username: username.into() }
    }

    #[test]
    fn static_users_authenticate_with_both_algorithms() {
        assert_eq!(ask_name("alice", "pw"), accepted("alice", "alice"));
        let sha256 = ask(Named::Name("alice"), "alice", KeyAlgorithm::Sha256, "pw");
        assert_eq!(sha256, accepted("alice", "alice"));
        assert_eq!(ask_name("alice", "wrong"), wrong_key("alice"));
        assert_eq!(ask_name("bob", "pw"), CredentialCheck::NoSuchUser);
    }

    #[test]
    fn stored_keys_authenticate_with_their_algorithm_only() {
        assert_eq!(ask_name("stored", "pw"), accepted("stored", "stored"));
        let sha256 = ask(Named::Name("stored"), "stored", KeyAlgorithm::Sha256, "pw");
        assert_eq!(sha256, wrong_key("stored"));
    }

    #[test]
    fn a_userhash_identifies_its_static_user() {
        let hash = userhash("alice", "turnpike");
        assert_eq!(ask(Named::Hash(&hash), "alice", KeyAlgorithm::Sha256, "pw"), accepted("alice", "alice"));
        assert_eq!(ask(Named::Hash(&hash), "alice", KeyAlgorithm::Sha256, "wrong"), wrong_key("alice"));
        let stranger = userhash("bob", "turnpike");
        assert_eq!(
            ask(Named::Hash(&stranger), "bob", KeyAlgorithm::Sha256, "pw"),
            CredentialCheck::NoSuchUser
        );
    }

    #[test]
    fn every_secret_is_accepted_and_quotas_count_the_id() {
        let name = restapi_credentials::username(NOW + 60, "carol");
        for secret in ["old", "new"] {
            let password = restapi_credentials::password(&Secret::new(secret), &name);
            assert_eq!(ask_name(&name, password.reveal()), accepted(&name, ":carol"), "{secret}");
        }
        assert_eq!(ask_name(&name, "guess"), wrong_key(&name));
    }

    #[test]
    fn credentials_of_a_rotated_secret_expire_with_it_or_at_once_if_it_leaked() {
        let stored = |value: &str, since, until| StoredSecret {
            since,
            until,
            ..StoredSecret::new(Secret::new(value))
        };
        let held: Secrets = [
            stored("rotated", 0, Some(NOW + 10)),
            stored("leaked", 0, Some(turnpike_stores::CUT_OFF)),
            stored("signing", NOW + 10, None),
        ]
        .into();
        let stored = StoredSecrets { held, ended: [stored("ended", 0, Some(NOW - 5))].into() };
        let realm = RealmCredentials::new(&realms::all(&Settings::default())[0]);
        let name = restapi_credentials::username(NOW + 60, "carol");
        let until = |secret: &str, unix| {
            let password = restapi_credentials::password(&Secret::new(secret), &name);
            let key = Key::long_term(KeyAlgorithm::Md5, &name, "turnpike", password.reveal().as_bytes());
            let mut verify = |candidate: &Key| *candidate == key;
            match realm.check_time_limited(&name, KeyAlgorithm::Md5, unix, &stored, &mut verify) {
                Some(CredentialCheck::Accepted { until_unix, .. }) => until_unix,
                Some(CredentialCheck::WrongKey { .. }) => None,
                other => panic!("{other:?}"),
            }
        };
        let expiry = Some(NOW + 60);
        assert_eq!([NOW, NOW + 10].map(|unix| until("rotated", unix)), [expiry; 2]);
        assert_eq!([NOW + 11, NOW + 60].map(|unix| until("rotated", unix)), [Some(NOW + 10); 2]);
        assert_eq!(until("ended", NOW), Some(NOW - 5));
        assert_eq!(until("leaked", NOW), None);
        assert_eq!([NOW, NOW + 11].map(|unix| until("signing", unix)), [expiry; 2]);
        assert_eq!(until("other", NOW), None);
    }

    #[test]
    fn an_expired_credential_reports_its_expiry_or_age() {
        let ask = |expiry, password: Option<&str>| {
            let name = restapi_credentials::username(expiry, "carol");
            let made = restapi_credentials::password(&Secret::new("new"), &name);
            ask_name(&name, password.unwrap_or(made.reveal()))
        };
        let until = |lookup| match lookup {
            CredentialCheck::Accepted { until_unix, .. } => until_unix,
            other => panic!("{other:?}"),
        };
        assert_eq!(until(ask(NOW - 42, None)), Some(NOW - 42));
        assert_eq!(ask(NOW - 42, Some("guess")), CredentialCheck::Expired { ago: 42 });
        assert_eq!(until(ask(NOW, None)), Some(NOW));
    }

    #[test]
    fn an_expiry_more_than_ten_years_ahead_is_refused() {
        let ask = |expiry: u64| {
            let name = restapi_credentials::username(expiry, "carol");
            let password = restapi_credentials::password(&Secret::new("new"), &name);
            ask_name(&name, password.reveal())
        };
        let most = restapi_credentials::MAX_AHEAD;
        assert!(matches!(ask(NOW + most), CredentialCheck::Accepted { .. }));
        assert_eq!(ask(NOW + most + 1), CredentialCheck::TooFarAhead { ahead: most + 1 });
        assert_eq!(ask(NOW * 1000), CredentialCheck::TooFarAhead { ahead: NOW * 999 });
        assert_eq!(ask(u64::MAX), CredentialCheck::TooFarAhead { ahead: u64::MAX - NOW });
    }

    #[test]
    fn other_name_forms_of_coturn_are_accepted_for_the_same_user() {
        let accepts = |name: String, identity: &str| {
            let password = restapi_credentials::password(&Secret::new("new"), &name);
            assert_eq!(ask_name(&name, password.reveal()), accepted(&name, identity));
            assert_eq!(ask_name(&name, "guess"), wrong_key(&name));
        };
        let expiry = NOW + 60;
        accepts(format!("carol:{expiry}"), ":carol");
        accepts(format!(":{expiry}"), &format!("::{expiry}"));
        accepts(format!(":{expiry}:carol"), ":carol");
        accepts(format!("{expiry}"), &format!(":{expiry}"));
        assert_eq!(ask_name(&format!("carol:{}", NOW - 9), "x"), CredentialCheck::Expired { ago: 9 });
    }

    /// Clients of the credential service choose the id.
    #[test]
    fn a_time_limited_id_does_not_share_the_quota_of_a_user_or_token() {
        let timed = |id: &str| {
            let name = restapi_credentials::username(NOW + 60, id);
            match ask_name(&name, restapi_credentials::password(&Secret::new("new"), &name).reveal()) {
                CredentialCheck::Accepted { identity, .. } => identity,
                other => panic!("{other:?}"),
            }
        };
        let CredentialCheck::Accepted { identity: user, .. } = ask_name("alice", "pw") else { panic!() };
        assert_ne!(timed("alice"), user);
        assert_ne!(*timed("kid/0123456789abcdef"), *"kid/0123456789abcdef");
        // All timestamps of an id share a quota.
        let later = restapi_credentials::username(NOW + 99, "alice");
        assert_eq!(
            ask_name(&later, restapi_credentials::password(&Secret::new("old"), &later).reveal()),
            accepted(&later, &timed("alice"))
        );
        assert_ne!(timed("alice"), timed("bob"));
    }

    #[test]
    fn an_unknown_name_costs_one_verification_like_a_known_one() {
        let mut calls = 0;
        let lookup = CredentialTable::new(&settings(), None).check(
            Named::Name("bob"),
            "turnpike",
            KeyAlgorithm::Md5,
            NOW,
            &mut |_| {
                calls += 1;
                true
            },
        );
        assert_eq!((lookup, calls), (CredentialCheck::NoSuchUser, 1));
    }

    #[test]
    fn keys_of_another_realm_are_refused() {
        let lookup = CredentialTable::new(&settings(), None).check(
            Named::Name("alice"),
            "elsewhere",
            KeyAlgorithm::Md5,
            NOW,
            &mut |_| true,
        );
        assert_eq!(lookup, CredentialCheck::NoSuchUser);
    }

    #[test]
    fn each_realm_accepts_only_its_own_users_and_secrets() {
        let realm = |name: &str, user: &str, secret: &str| RealmSettings {
            name: name.to_owned(),
            users: vec![ConfiguredUser {
                name: user.to_owned(),
                secret: UserSecret::Password(Secret::new("pw")),
            }],
            secrets: vec![Secret::new(secret)],
            ..RealmSettings::default()
        };
        let settings =
            Settings { realms: vec![realm("a", "ann", "sa"), realm("b", "bob", "sb")], ..settings() };
        let store = CredentialTable::new(&settings, None);
        let timed = restapi_credentials::username(NOW + 60, "carol");
        let timed_password = restapi_credentials::password(&Secret::new("sb"), &timed);
        for (asked, name, password, good) in [
            ("a", "ann", "pw", true),
            ("b", "bob", "pw", true),
            ("turnpike", "alice", "pw", true),
            ("a", "bob", "pw", false),
            ("b", "ann", "pw", false),
            ("a", "alice", "pw", false),
            ("turnpike", "ann", "pw", false),
            ("b", &timed, timed_password.reveal(), true),
            ("a", &timed, timed_password.reveal(), false),
            ("turnpike", &timed, timed_password.reveal(), false),
        ] {
            // Clients compute the key for the realm that they send in the request.
            let key = Key::long_term(KeyAlgorithm::Sha256, name, asked, password.as_bytes());
            let mut verify = |candidate: &Key| *candidate == key;
            let lookup = store.check(Named::Name(name), asked, KeyAlgorithm::Sha256, NOW, &mut verify);
            assert_eq!(
                matches!(lookup, CredentialCheck::Accepted { .. }),
                good,
                "{name} in {asked}: {lookup:?}"
            );
        }
        let hash = userhash("ann", "a");
        let lookup = store.check(Named::Hash(&hash), "b", KeyAlgorithm::Sha256, NOW, &mut |_| true);
        assert_eq!(lookup, CredentialCheck::NoSuchUser);
    }

    /// Matrix servers use such usernames, and coturn accepts them.
    #[tokio::test]
    async fn a_user_in_a_store_may_have_a_colon_in_their_name() {
        let dir = turnpike_testkit::Dir::new();
        let address = turnpike_stores::StoreAddress::Sqlite(dir.at("users.sqlite"));
        let limits = turnpike_stores::DirectoryLimits::default();
        let file = turnpike_stores::SqliteUse::Own;
        let database = turnpike_stores::Database::new(&address, 1, file, &limits);
        let store = UserStore::new(database, "a store".to_owned(), limits);
        for name in ["@matrix:example.org", "sip:4915112345678@example.org", "4915112345678"] {
            let keys = turnpike_stores::UserKeys::new(name, "turnpike", "pw");
            let put =
                turnpike_stores::Edit::PutUser { realm: "turnpike".to_owned(), name: name.to_owned(), keys };
            store.edit(&put).await.expect("the store is writable");
            // `settings` also has a secret for time-limited credentials.
            let credentials = CredentialTable::new(&settings(), Some(store.clone()));
            let key = Key::long_term(KeyAlgorithm::Sha256, name, "turnpike", b"pw");
            let check = || {
                let mut verify = |candidate: &Key| *candidate == key;
                credentials.check(Named::Name(name), "turnpike", KeyAlgorithm::Sha256, NOW, &mut verify)
            };
            assert_eq!(check(), CredentialCheck::NeedsLookup, "{name}");
            let (sender, found) = tokio::sync::oneshot::channel();
            store.look_up("turnpike", name, move |found| assert!(sender.send(found).is_ok()));
            assert!(matches!(found.await, Ok(UserLookup::User(_))));
            let of_user =
                CredentialCheck::Accepted { username: name.into(), identity: name.into(), until_unix: None };
            assert_eq!(check(), of_user);
        }
    }
}
