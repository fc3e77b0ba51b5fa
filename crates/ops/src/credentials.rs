//! The credential store of a configuration: static users with keys made beforehand, and shared secrets from which
//! the keys of time-limited users are made on request. Asked on requests only, never on the packet path.

use std::collections::HashMap;

use turnpike_relay::CredentialStore;
use turnpike_turn::server::{Lookup, User as Named};
use turnpike_wire::integrity::{Key, KeyAlgorithm, userhash};

use crate::{
    config::{Settings, StoredKey, User, UserSecret},
    rest,
    secret::Secret,
};

/// Users and secrets of one realm.
///
/// Names that do not exist are verified against a random key, so that the time of an answer does not tell which
/// names exist. Keys are compared by the verifier, in constant time. The maps use the standard library's keyed hash,
/// because their keys are chosen by whoever sends a request.
pub struct Credentials {
    realm: String,
    users: HashMap<Box<str>, UserKeys>,
    by_hash: HashMap<[u8; 32], Box<str>>,
    secrets: Vec<Secret>,
    decoy: Key,
}

struct UserKeys {
    md5: Option<Key>,
    sha256: Option<Key>,
}

impl Credentials {
    /// Makes all keys of the static users.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        let realm = settings.realm.clone();
        let mut users = HashMap::with_capacity(settings.users.len());
        let mut by_hash = HashMap::with_capacity(settings.users.len());
        for user in &settings.users {
            by_hash.insert(userhash(&user.name, &realm), user.name.as_str().into());
            users.insert(user.name.as_str().into(), UserKeys::new(user, &realm));
        }
        let decoy = Key::from_bytes(&rand::random::<[u8; 16]>());
        Self { realm, users, by_hash, secrets: settings.secrets.clone(), decoy }
    }

    fn check_static(
        &self,
        name: &str,
        algorithm: KeyAlgorithm,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Option<Lookup> {
        let keys = self.users.get(name)?;
        let key = match algorithm {
            KeyAlgorithm::Md5 => keys.md5.as_ref(),
            KeyAlgorithm::Sha256 => keys.sha256.as_ref(),
        };
        let accepted = verify(key.unwrap_or(&self.decoy)) && key.is_some();
        Some(if accepted {
            Lookup::Accepted { username: name.into(), identity: name.into() }
        } else {
            Lookup::WrongKey { username: name.into() }
        })
    }

    fn check_time_limited(
        &self,
        name: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Option<Lookup> {
        if self.secrets.is_empty() {
            return None;
        }
        let (expiry, id) = rest::parse(name)?;
        if expiry < unix {
            return Some(Lookup::Expired { ago: unix - expiry });
        }
        let accepted = self.secrets.iter().any(|secret| {
            let password = rest::password(secret, name);
            verify(&Key::long_term(algorithm, name, &self.realm, password.as_bytes()))
        });
        Some(if accepted {
            // Quotas count the id, or a client would get a new quota with each new timestamp.
            let identity = if id.is_empty() { name } else { id };
            Lookup::Accepted { username: name.into(), identity: identity.into() }
        } else {
            Lookup::WrongKey { username: name.into() }
        })
    }
}

impl CredentialStore for Credentials {
    fn check(
        &self,
        user: Named<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup {
        let name = match user {
            Named::Name(name) => Some(name),
            // Time-limited names cannot be found by hash: they exist nowhere before the client makes them up.
            Named::Hash(hash) => self.by_hash.get(hash).map(AsRef::as_ref),
        };
        // Keys are good for one realm; during a reload a worker may still ask for the one before.
        let found = name.filter(|_| realm == self.realm).and_then(|name| {
            self.check_static(name, algorithm, verify)
                .or_else(|| self.check_time_limited(name, algorithm, unix, verify))
        });
        found.unwrap_or_else(|| {
            verify(&self.decoy);
            Lookup::NoSuchUser
        })
    }
}

impl UserKeys {
    fn new(user: &User, realm: &str) -> Self {
        match &user.secret {
            UserSecret::Password(password) => {
                let key =
                    |algorithm| Key::long_term(algorithm, &user.name, realm, password.reveal().as_bytes());
                Self { md5: Some(key(KeyAlgorithm::Md5)), sha256: Some(key(KeyAlgorithm::Sha256)) }
            }
            UserSecret::Keys(keys) => {
                let mut made = Self { md5: None, sha256: None };
                for key in keys {
                    let (slot, digits) = match key {
                        StoredKey::Md5(digits) => (&mut made.md5, digits),
                        StoredKey::Sha256(digits) => (&mut made.sha256, digits),
                    };
                    *slot = rest::unhex(digits.reveal()).map(|bytes| Key::from_bytes(&bytes));
                }
                made
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_700_000_000;

    fn settings() -> Settings {
        let (md5, _) = rest::stored_keys("stored", "turnpike", &Secret::new("pw"));
        let user = |name: &str, secret| User { name: name.to_owned(), secret };
        Settings {
            users: vec![
                user("alice", UserSecret::Password(Secret::new("pw"))),
                user("stored", UserSecret::Keys(StoredKey::from_hex(&md5).into_iter().collect())),
            ],
            secrets: vec![Secret::new("old"), Secret::new("new")],
            ..Settings::default()
        }
    }

    /// Asks as a client would that knows `password`.
    fn ask(user: Named<'_>, key_name: &str, algorithm: KeyAlgorithm, password: &str) -> Lookup {
        let key = Key::long_term(algorithm, key_name, "turnpike", password.as_bytes());
        Credentials::new(&settings())
            .check(user, "turnpike", algorithm, NOW, &mut |candidate| *candidate == key)
    }

    fn ask_name(name: &str, password: &str) -> Lookup {
        ask(Named::Name(name), name, KeyAlgorithm::Md5, password)
    }

    fn accepted(username: &str, identity: &str) -> Lookup {
        Lookup::Accepted { username: username.into(), identity: identity.into() }
    }

    fn wrong_key(username: &str) -> Lookup {
        Lookup::WrongKey { username: username.into() }
    }

    #[test]
    fn static_users_authenticate_with_both_algorithms() {
        assert_eq!(ask_name("alice", "pw"), accepted("alice", "alice"));
        let sha256 = ask(Named::Name("alice"), "alice", KeyAlgorithm::Sha256, "pw");
        assert_eq!(sha256, accepted("alice", "alice"));
        assert_eq!(ask_name("alice", "wrong"), wrong_key("alice"));
        assert_eq!(ask_name("bob", "pw"), Lookup::NoSuchUser);
    }

    #[test]
    fn stored_keys_authenticate_with_their_algorithm_only() {
        assert_eq!(ask_name("stored", "pw"), accepted("stored", "stored"));
        let sha256 = ask(Named::Name("stored"), "stored", KeyAlgorithm::Sha256, "pw");
        assert_eq!(sha256, wrong_key("stored"));
    }

    #[test]
    fn a_userhash_finds_its_static_user() {
        let hash = userhash("alice", "turnpike");
        assert_eq!(ask(Named::Hash(&hash), "alice", KeyAlgorithm::Sha256, "pw"), accepted("alice", "alice"));
        assert_eq!(ask(Named::Hash(&hash), "alice", KeyAlgorithm::Sha256, "wrong"), wrong_key("alice"));
        let stranger = userhash("bob", "turnpike");
        assert_eq!(ask(Named::Hash(&stranger), "bob", KeyAlgorithm::Sha256, "pw"), Lookup::NoSuchUser);
    }

    #[test]
    fn each_secret_makes_valid_time_limited_credentials_and_quotas_count_the_id() {
        let name = rest::username(NOW + 60, "carol");
        for secret in ["old", "new"] {
            let password = rest::password(&Secret::new(secret), &name);
            assert_eq!(ask_name(&name, &password), accepted(&name, "carol"), "{secret}");
        }
        assert_eq!(ask_name(&name, "guess"), wrong_key(&name));
    }

    #[test]
    fn an_expired_credential_says_for_how_long() {
        let name = rest::username(NOW - 42, "carol");
        let password = rest::password(&Secret::new("new"), &name);
        assert_eq!(ask_name(&name, &password), Lookup::Expired { ago: 42 });
        let last_second = rest::username(NOW, "carol");
        let password = rest::password(&Secret::new("new"), &last_second);
        assert_eq!(ask_name(&last_second, &password), accepted(&last_second, "carol"));
    }

    #[test]
    fn an_unknown_name_costs_a_verification_like_a_known_one() {
        let mut calls = 0;
        let lookup = Credentials::new(&settings()).check(
            Named::Name("bob"),
            "turnpike",
            KeyAlgorithm::Md5,
            NOW,
            &mut |_| {
                calls += 1;
                true
            },
        );
        assert_eq!((lookup, calls), (Lookup::NoSuchUser, 1));
    }

    #[test]
    fn keys_of_another_realm_accept_nobody() {
        let lookup = Credentials::new(&settings()).check(
            Named::Name("alice"),
            "elsewhere",
            KeyAlgorithm::Md5,
            NOW,
            &mut |_| true,
        );
        assert_eq!(lookup, Lookup::NoSuchUser);
    }
}
