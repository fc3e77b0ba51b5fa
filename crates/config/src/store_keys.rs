//! `[store]`: a database with users, secrets, realms, token keys and peer rules, and the size of its cache.

use std::{collections::BTreeSet, env, path::PathBuf};

use turnpike_convert::toml_text::quoted;
use turnpike_strict::Value;
use turnpike_wire::secret::MASK;

use super::{
    Secret,
    key::{ValueKind, named},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// Address of the store, unparsed; `None` for the embedded store.
    pub url: Option<Secret>,
    pub state: StateDir,
    pub connections: usize,
    /// Seconds to wait for an answer.
    pub deadline: u32,
    /// Response to clients while their user cannot be looked up.
    pub unavailable: WhenUnavailable,
    pub refresh: u32,
    pub cache_users: usize,
    /// Seconds for which a user is cached.
    pub cache_lifetime: u32,
    /// Seconds for which the absence of a user is cached.
    pub cache_negative: u32,
    /// Seconds for which a cached user stays valid while the store is down.
    pub cache_stale: u32,
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateDir {
    Default,
    Off,
    At(PathBuf),
}

impl StateDir {
    /// Directory of the server's own files, if any. systemd may pass several, separated by colons;
    /// the first one is used.
    #[must_use]
    pub fn directory(&self) -> Option<PathBuf> {
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let absolute = |path: &PathBuf| path.is_absolute();
        match self {
            Self::Off => None,
            Self::At(dir) => Some(dir.clone()),
            Self::Default => {
                let systemd = variable("STATE_DIRECTORY")
                    .and_then(|dirs| Some(PathBuf::from(dirs.to_str()?.split(':').next()?)));
                let xdg = || variable("XDG_STATE_HOME").filter(absolute).map(|dir| dir.join("turnpike"));
                let home =
                    || variable("HOME").filter(absolute).map(|home| home.join(".local/state/turnpike"));
                systemd.filter(absolute).or_else(xdg).or_else(home)
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenUnavailable {
    /// Responds with error 500.
    Error,
    /// Sends no response.
    Drop,
}

/// Content of the store in use, added to the settings once it has been read. Not configurable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// True if a store is in use that may contain users.
    pub in_use: bool,
    pub allocations: Option<usize>,
    pub allocations_per_user: Option<usize>,
    /// Limit per allocation of `server.realm`, in bits per second.
    pub rate_per_allocation: Option<u64>,
    /// Limits that the store sets for `[[realm]]`s, by realm and configuration key.
    pub realm_limits: BTreeSet<(String, &'static str)>,
    /// Realms with users that lack a SHA-256 key; `None` if unknown.
    pub md5_only: Option<BTreeSet<String>>,
}

pub(super) const URL: ValueKind<Option<Secret>> = ValueKind::one(
    "postgres://USER:PASSWORD@HOST/DATABASE, mysql://..., redis://..., rediss://..., sqlite:///PATH, https://TOKEN@HOST/PATH or a line of \
               turnserver.conf (psql-userdb=...), or \"\" for the embedded store",
    |reader, node| match &node.value {
        Value::List(lines) if lines.len() == 1 => reader.secret(&lines[0]).map(Some),
        _ => reader.secret(node).map(|url| Some(url).filter(|url| !url.reveal().is_empty())),
    },
    |url| quoted(url.as_ref().map_or("", |_| MASK)),
)
.secret();

pub(super) const STATE: ValueKind<StateDir> = ValueKind::one(
    "a directory, \"\" for $STATE_DIRECTORY, $XDG_STATE_HOME/turnpike or ~/.local/state/turnpike, or \"off\" for no store",
    |reader, node| {
        let text = reader.text(node)?;
        Some(match &*text {
            "" => StateDir::Default,
            "off" => StateDir::Off,
            file if is_file_name(file) => {
                let why =
                    "this is a database, not a directory: set store.url (--store) to sqlite:///PATH instead";
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

pub(super) const UNAVAILABLE: ValueKind<WhenUnavailable> = named!(
    "\"error\" (500) or \"drop\" (no answer)",
    "error" => WhenUnavailable::Error,
    "drop" => WhenUnavailable::Drop,
);
