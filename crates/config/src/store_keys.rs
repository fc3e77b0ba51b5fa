//! `[store]`: a database with users, secrets, realms, token keys and peer rules, and how much of it is kept in memory.

use std::{collections::BTreeSet, path::PathBuf};

use turnpike_convert::toml_text::quoted;
use turnpike_strict::Value;

use super::{
    Secret,
    key::{Kind, named},
    secret::MASK,
};

/// Settings of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// Where it is, as the operator wrote it; `None` for the embedded one.
    pub url: Option<Secret>,
    /// Where the embedded one is.
    pub state: StateDir,
    /// Connections at once, to PostgreSQL and MySQL.
    pub connections: usize,
    /// Seconds that it has for an answer.
    pub deadline: u32,
    /// What clients get whose user it cannot tell.
    pub unavailable: WhenUnavailable,
    /// Seconds between two looks at all but users.
    pub refresh: u32,
    /// Users in memory.
    pub cache_users: usize,
    /// Seconds for which one is known.
    pub cache_lifetime: u32,
    /// Seconds for which a name that nobody has is known as that.
    pub cache_negative: u32,
    /// Seconds for which a user stays known while the store does not answer.
    pub cache_stale: u32,
    /// Whether each of its users has a SHA-256 key.
    pub sha256: bool,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            url: None,
            state: StateDir::Default,
            connections: 8,
            deadline: 2,
            unavailable: WhenUnavailable::Error,
            refresh: 10,
            cache_users: 100_000,
            cache_lifetime: 60,
            cache_negative: 10,
            cache_stale: 86_400,
            sha256: false,
        }
    }
}

/// Where the embedded store is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateDir {
    /// Where the machine's conventions have it.
    Default,
    /// There is none.
    Off,
    /// Here.
    At(PathBuf),
}

/// What clients get whose user the store cannot tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenUnavailable {
    /// 500.
    Error,
    /// No answer.
    Drop,
}

/// What the store in use says, brought together with the settings by whoever has read it. Nobody configures this.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Whether there is one that may have users.
    pub in_use: bool,
    /// Its limit for `server.realm`.
    pub allocations: Option<usize>,
    /// Its limit for each user of `server.realm`.
    pub allocations_per_user: Option<usize>,
    /// Its limit of bits per second for each allocation of `server.realm`.
    pub rate_per_allocation: Option<u64>,
    /// Limits of `[[realm]]`s that are its own, by realm and key of the configuration.
    pub realm_limits: BTreeSet<(String, &'static str)>,
    /// Realms in which it has users without a SHA-256 key, where it can tell.
    pub md5_only: Option<BTreeSet<String>>,
}

/// Where the store is. It may hold a password.
pub(super) const URL: Kind<Option<Secret>> = Kind::one(
    "postgres://USER:PASSWORD@HOST/DATABASE, mysql://..., redis://..., rediss://..., sqlite:///PATH or a line of \
               turnserver.conf (psql-userdb=...), \"\" for the embedded store",
    |reader, node| match &node.value {
        // A file has lines.
        Value::List(lines) if lines.len() == 1 => reader.secret(&lines[0]).map(Some),
        _ => reader.secret(node).map(|url| Some(url).filter(|url| !url.reveal().is_empty())),
    },
    |url| quoted(url.as_ref().map_or("", |_| MASK)),
)
.secret();

/// Where the embedded store is.
pub(super) const STATE: Kind<StateDir> = Kind::one(
    "a directory, \"\" for $STATE_DIRECTORY, $XDG_STATE_HOME/turnpike or ~/.local/state/turnpike, or \"off\" for no store",
    |reader, node| {
        let text = reader.text(node)?;
        Some(match &*text {
            "" => StateDir::Default,
            "off" => StateDir::Off,
            file if is_file_name(file) => {
                let why = "this names a database and not a directory: name a database with store.url (--store), as sqlite:///PATH";
                return reader.refuse(node, Some(why.to_owned()));
            }
            dir => StateDir::At(dir.into()),
        })
    },
    |state| match state {
        StateDir::Default => quoted(""),
        StateDir::Off => quoted("off"),
        StateDir::At(dir) => quoted(&dir.display().to_string()),
    },
);

fn is_file_name(text: &str) -> bool {
    text.contains("://") || [".sqlite", ".sqlite3", ".db"].iter().any(|ending| text.ends_with(ending))
}

/// What clients get whose user it cannot tell.
pub(super) const UNAVAILABLE: Kind<WhenUnavailable> = named!(
    "\"error\" (500) or \"drop\" (no answer)",
    "error" => WhenUnavailable::Error,
    "drop" => WhenUnavailable::Drop,
);
