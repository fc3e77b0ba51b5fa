//! `turnpike user`, `secret`, `realm` and `key`, using a running server or a store.

use std::io::{self, Write};

use serde::Serialize;
use tokio::runtime::{Builder, Runtime};
use turnpike_admin::Accounts;
use turnpike_api::{
    AccountChange, AccountOrigin, Key, KeyList, NewKey, NewRealm, NewSecret, NewUser, RealmList, RealmQuery,
    Rotated, Rotation, SecretList, SharedSecret, StoredRealm, UserInfo, UserPage, UserQuery,
};
use turnpike_wire::escape;

use super::{CommandError, ListOutput, OutputFormat, encoded, write_json};
use crate::client::Client;

const PAGE: usize = 1000;

/// Destination of changes.
pub enum AccountBackend {
    Running(Client),
    Here(Runtime, Accounts),
}

pub struct GeneratedSecret<'a> {
    /// `password`, `secret` or `key`.
    pub what: &'static str,
    pub text: &'a str,
}

/// Form and destination of a command's output.
pub struct Output<'a> {
    pub format: OutputFormat,
    pub out: &'a mut dyn Write,
    /// Shown with the output, and never again.
    pub generated: Option<GeneratedSecret<'a>>,
}

impl AccountBackend {
    /// Opens a store with `open`, in a new runtime.
    pub fn here<E: From<io::Error>>(open: impl FnOnce() -> Result<Accounts, E>) -> Result<Self, E> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let inside = runtime.enter();
        let accounts = open()?;
        drop(inside);
        Ok(Self::Here(runtime, accounts))
    }

    /// Lists users of one realm or of all, page by page. JSON output is one array.
    pub fn list_users(&self, realm: Option<String>, to: Output<'_>) -> Result<(), CommandError> {
        let mut list = ListOutput::new(to.format, ["NAME", "REALM", "KEYS", "FROM"]);
        let mut cursor = None;
        loop {
            let UserPage { users, next } = self.users(realm.clone(), cursor)?;
            list.show(to.out, &users, row_of_user)?;
            if next.is_none() {
                break;
            }
            cursor = next;
        }
        Ok(list.end(to.out, "no users")?)
    }

    /// Adds a user, or changes the password of an existing one.
    pub fn add_user(&self, new: NewUser, to: Output<'_>) -> Result<(), CommandError> {
        let change = match self {
            Self::Running(client) => client.post("/v1/users", Some(&new))?,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.put_user(new))?,
        };
        show_change("user", &change, None, to)
    }

    pub fn remove_user(&self, name: &str, realm: Option<String>, to: Output<'_>) -> Result<(), CommandError> {
        let change = match self {
            Self::Running(client) => client.delete(&path("/v1/users", name, realm))?,
            Self::Here(runtime, accounts) => {
                runtime.block_on(accounts.remove_user(realm.as_deref(), name))?
            }
        };
        show_change("user", &change, Some("removed"), to)
    }

    /// Lists secrets of one realm or of all, by their fingerprints.
    pub fn list_secrets(&self, realm: Option<String>, to: Output<'_>) -> Result<(), CommandError> {
        let SecretList { secrets } = match self {
            Self::Running(client) => client.get(&with_query("/v1/secrets", &RealmQuery { realm }))?,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.secrets(realm.as_deref()))?,
        };
        let mut list = ListOutput::new(to.format, ["FINGERPRINT", "REALM", "FROM", "SIGNS", "UNTIL"]);
        list.show(to.out, &secrets, row_of_secret)?;
        Ok(list.end(to.out, "no secrets")?)
    }

    pub fn add_secret(&self, new: NewSecret, to: Output<'_>) -> Result<(), CommandError> {
        let change = match self {
            Self::Running(client) => client.post("/v1/secrets", Some(&new))?,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.put_secret(new))?,
        };
        show_change("secret", &change, None, to)
    }

    pub fn remove_secret(
        &self,
        fingerprint: &str,
        realm: Option<String>,
        to: Output<'_>,
    ) -> Result<(), CommandError> {
        let change = match self {
            Self::Running(client) => client.delete(&path("/v1/secrets", fingerprint, realm))?,
            Self::Here(runtime, accounts) => {
                runtime.block_on(accounts.remove_secret(realm.as_deref(), fingerprint))?
            }
        };
        show_change("secret", &change, Some("removed"), to)
    }

    pub fn rotate_secret(&self, rotation: Rotation, to: Output<'_>) -> Result<(), CommandError> {
        let rotated: Rotated = match self {
            Self::Running(client) => client.post("/v1/secrets/rotation", Some(&rotation))?,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.rotate_secret(rotation))?,
        };
        if to.format.is_json() {
            return to.json(&rotated);
        }
        let Rotated { realm, fingerprint, store, until, note } = &rotated;
        let realm = escape::name(realm);
        writeln!(to.out, "secret {fingerprint} signs new credentials in realm {realm} ({store})")?;
        match until {
            Some(until) => writeln!(to.out, "the others stay valid until {until}, and are then removed")?,
            None => writeln!(to.out, "there was no other secret")?,
        }
        to.secret_and_note(note.as_deref())
    }

    pub fn list_keys(&self, to: Output<'_>) -> Result<(), CommandError> {
        let KeyList { keys } = match self {
            Self::Running(client) => client.get("/v1/keys")?,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.keys())?,
        };
        let mut list = ListOutput::new(to.format, ["NAME", "REALM", "MAX TTL", "RATE"]);
        list.show(to.out, &keys, row_of_key)?;
        Ok(list.end(to.out, "no keys")?)
    }

    pub fn add_key(&self, new: NewKey, to: Output<'_>) -> Result<(), CommandError> {
        let change = match self {
            Self::Running(client) => client.post("/v1/keys", Some(&new))?,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.put_key(new))?,
        };
        show_change("key", &change, None, to)
    }

    pub fn remove_key(&self, name: &str, to: Output<'_>) -> Result<(), CommandError> {
        let change = match self {
            Self::Running(client) => client.delete(&path("/v1/keys", name, None))?,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.remove_key(name))?,
        };
        show_change("key", &change, Some("removed"), to)
    }

    pub fn list_realms(&self, to: Output<'_>) -> Result<(), CommandError> {
        let realms = match self {
            Self::Running(client) => client.get::<RealmList>("/v1/realms")?.stored,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.realms())?,
        };
        let mut list =
            ListOutput::new(to.format, ["NAME", "ALLOCATIONS", "PER USER", "BITS/S EACH", "ORIGINS"]);
        list.show(to.out, &realms, row_of_realm)?;
        Ok(list.end(to.out, "no realms in the store")?)
    }

    /// Adds a realm, or changes the limits of an existing one.
    pub fn add_realm(&self, new: NewRealm, to: Output<'_>) -> Result<(), CommandError> {
        let change = match self {
            Self::Running(client) => client.post("/v1/realms", Some(&new))?,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.put_realm(new))?,
        };
        show_change("realm", &change, None, to)
    }

    pub fn remove_realm(&self, name: &str, to: Output<'_>) -> Result<(), CommandError> {
        let change = match self {
            Self::Running(client) => client.delete(&path("/v1/realms", name, None))?,
            Self::Here(runtime, accounts) => runtime.block_on(accounts.remove_realm(name))?,
        };
        show_change("realm", &change, Some("removed"), to)
    }

    fn users(&self, realm: Option<String>, cursor: Option<String>) -> Result<UserPage, CommandError> {
        match self {
            Self::Running(client) => {
                let query = UserQuery { realm, limit: Some(PAGE), cursor };
                Ok(client.get(&with_query("/v1/users", &query))?)
            }
            Self::Here(runtime, accounts) => {
                let users = accounts.users(realm.as_deref(), Some(PAGE), cursor.as_deref());
                Ok(runtime.block_on(users)?)
            }
        }
    }
}

fn with_query(path: &str, query: &impl Serialize) -> String {
    let words = serde_urlencoded::to_string(query).unwrap_or_default();
    if words.is_empty() { path.to_owned() } else { format!("{path}?{words}") }
}

/// Path of an item, with its realm.
fn path(collection: &str, name: &str, realm: Option<String>) -> String {
    with_query(&format!("{collection}/{}", encoded(name)), &RealmQuery { realm })
}

fn row_of_user(user: &UserInfo) -> [String; 4] {
    [user.name.clone(), user.realm.clone(), user.keys.clone(), place(user.from).to_owned()]
}

fn row_of_secret(secret: &SharedSecret) -> [String; 5] {
    let SharedSecret { realm, fingerprint, from, signs, until } = secret.clone();
    let signs = if signs { "yes" } else { "" };
    [fingerprint, realm, place(from).to_owned(), signs.to_owned(), until.unwrap_or_default()]
}

fn row_of_key(key: &Key) -> [String; 4] {
    let Key { name, realm, max_ttl, rate } = key.clone();
    let number = |number: Option<u32>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    [name, realm.unwrap_or_else(|| "all".to_owned()), number(max_ttl), number(rate)]
}

fn row_of_realm(realm: &StoredRealm) -> [String; 5] {
    let limit = |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), |limit| limit.to_string());
    [
        realm.name.clone(),
        limit(realm.max_allocations),
        limit(realm.max_allocations_per_user),
        limit(realm.bits_per_second_per_allocation),
        realm.origins.join(" "),
    ]
}

fn place(from: AccountOrigin) -> &'static str {
    match from {
        AccountOrigin::Configuration => "configuration",
        AccountOrigin::Store => "store",
    }
}

fn show_change(
    what: &str,
    change: &AccountChange,
    done: Option<&str>,
    to: Output<'_>,
) -> Result<(), CommandError> {
    if to.format.is_json() {
        return to.json(change);
    }
    let AccountChange { name, realm, store, existed, note } = change;
    let done = done.unwrap_or(if *existed { "changed" } else { "added" });
    let place = if what == "realm" || realm.is_empty() {
        String::new()
    } else {
        format!(" in realm {}", escape::name(realm))
    };
    writeln!(to.out, "{done} {what} {}{place} ({store})", escape::name(name))?;
    to.secret_and_note(note.as_deref())
}

impl<'a> Output<'a> {
    #[must_use]
    pub fn new(format: OutputFormat, out: &'a mut dyn Write) -> Self {
        Self { format, out, generated: None }
    }

    fn json(self, value: &impl Serialize) -> Result<(), CommandError> {
        let mut object = serde_json::to_value(value).map_err(io::Error::from)?;
        if let Some(GeneratedSecret { what, text }) = self.generated {
            object[what] = text.into();
        }
        Ok(write_json(self.out, &object)?)
    }

    fn secret_and_note(self, note: Option<&str>) -> Result<(), CommandError> {
        if let Some(GeneratedSecret { what, text }) = self.generated {
            writeln!(self.out, "{what}: {text}")?;
        }
        if let Some(note) = note {
            writeln!(self.out, "note: {note}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_can_be_encoded_in_a_path() {
        assert_eq!(path("/v1/users", "alice", None), "/v1/users/alice");
        let odd = path("/v1/users", "a/b ü?&.", Some("x y&z".to_owned()));
        assert_eq!(odd, "/v1/users/a%2Fb%20%C3%BC%3F%26%2E?realm=x+y%26z");
        assert_eq!(path("/v1/users", "..", None), "/v1/users/%2E%2E");
    }
}
