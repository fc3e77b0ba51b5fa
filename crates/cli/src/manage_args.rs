//! Flags of `turnpike user`, `secret` and `realm`, and what they print.

use std::{fs, io, path::PathBuf};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use turnpike_config::{Flags, Secret, Sources};
use turnpike_daemon::{Changed, DaemonError, Management, RealmOptions};

/// Where the store is; the same flags, variables and file as of `serve`.
#[derive(Args)]
pub(crate) struct StoreArgs {
    /// Configuration file of `serve`, for its store and its realm
    #[arg(short, long, value_name = "FILE", env = "TURNPIKE_CONFIG")]
    config: Option<PathBuf>,

    /// Database in place of the embedded store, as `serve --store`; prefer TURNPIKE_STORE_URL_FILE
    #[arg(long, value_name = "URL")]
    store: Option<String>,

    /// Directory of the embedded store, as `serve --state` [default: $STATE_DIRECTORY, $XDG_STATE_HOME/turnpike or
    /// ~/.local/state/turnpike]
    #[arg(long, value_name = "DIR")]
    state: Option<String>,

    /// Realm that is meant [default: server.realm of the configuration, else turnpike; of list, all]
    #[arg(long, value_name = "R")]
    realm: Option<String>,

    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

/// Subcommands of `turnpike user`.
#[derive(Subcommand)]
pub(crate) enum UserCommand {
    /// Make a user, or give one another password; without a password one is made up and printed
    Add {
        /// Name, 1 to 508 bytes without a colon
        name: String,
        /// The password. Other users of this machine can see it in the process list
        #[arg(long, value_name = "PASSWORD", conflicts_with = "password_file")]
        password: Option<String>,
        /// File whose first line is the password; "-" is standard input
        #[arg(long, value_name = "FILE")]
        password_file: Option<PathBuf>,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// List users, with the algorithms of their keys
    List {
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Remove a user: sessions live on until they expire, and are not refreshed
    Remove {
        /// Name.
        name: String,
        #[command(flatten)]
        store: StoreArgs,
    },
}

/// Subcommands of `turnpike secret`.
#[derive(Subcommand)]
pub(crate) enum SecretCommand {
    /// Take a shared secret for time-limited credentials; without one it is made up and printed
    Add {
        /// The secret. Other users of this machine can see it in the process list
        #[arg(long, value_name = "S", conflicts_with = "secret_file")]
        secret: Option<String>,
        /// File whose first line is the secret; "-" is standard input
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// List secrets by their fingerprints
    List {
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Remove a secret: credentials made with it are refused from then on
    Remove {
        /// Fingerprint, as `turnpike secret list` shows it.
        fingerprint: String,
        #[command(flatten)]
        store: StoreArgs,
    },
}

/// Subcommands of `turnpike realm`.
#[derive(Subcommand)]
pub(crate) enum RealmCommand {
    /// Have a realm served beside server.realm, or change its limits
    Add {
        /// REALM, 1 to 127 characters.
        name: String,
        /// Allocations of all its users together; 0 for no limit of its own
        #[arg(long, value_name = "N", default_value_t = 0)]
        allocations: u64,
        /// Allocations of each of its users; 0 for no limit of its own
        #[arg(long, value_name = "N", default_value_t = 0)]
        allocations_per_user: u64,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// List the realms of the store, with their limits and origins
    List {
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Have a realm served no more; its sessions end. Its users and secrets stay in the store
    Remove {
        /// REALM.
        name: String,
        #[command(flatten)]
        store: StoreArgs,
    },
}

/// What a command has to say.
pub(crate) enum Outcome {
    /// Printed.
    Said(String),
    /// What was to be removed is not there.
    Missing(String),
}

impl UserCommand {
    pub(crate) fn run(self) -> Result<Outcome, DaemonError> {
        match self {
            Self::Add { name, password, password_file, store } => {
                let given = first_line(password, password_file, "password")?;
                let password = given.clone().unwrap_or_else(made_up);
                let (management, json) = store.open()?;
                let changed = management.add_user(&name, &password)?;
                let shown = given.is_none().then_some(("password", &password));
                Ok(said_of_change(&management, json, ("user", &name), shown, &changed))
            }
            Self::List { store } => {
                let realm = store.realm.clone();
                let (management, json) = store.open()?;
                let users = management.users(realm.as_deref())?;
                let rows = users.into_iter().map(|user| vec![user.name, user.realm, user.keys.to_owned()]);
                Ok(said_of_list(json, &["user", "realm", "keys"], rows.collect()))
            }
            Self::Remove { name, store } => {
                let (management, json) = store.open()?;
                let existed = management.remove_user(&name)?;
                Ok(said_of_removal(&management, json, ("user", &name), existed))
            }
        }
    }
}

impl SecretCommand {
    pub(crate) fn run(self) -> Result<Outcome, DaemonError> {
        match self {
            Self::Add { secret, secret_file, store } => {
                let given = first_line(secret, secret_file, "secret")?;
                let secret = given.clone().unwrap_or_else(made_up);
                let (management, json) = store.open()?;
                let changed = management.add_secret(&secret)?;
                let fingerprint = turnpike_config::restapi_credentials::fingerprint(&secret);
                let shown = given.is_none().then_some(("secret", &secret));
                Ok(said_of_change(&management, json, ("fingerprint", &fingerprint), shown, &changed))
            }
            Self::List { store } => {
                let realm = store.realm.clone();
                let (management, json) = store.open()?;
                let secrets = management.secrets(realm.as_deref())?;
                let rows = secrets.into_iter().map(|secret| vec![secret.fingerprint, secret.realm]);
                Ok(said_of_list(json, &["fingerprint", "realm"], rows.collect()))
            }
            Self::Remove { fingerprint, store } => {
                let (management, json) = store.open()?;
                let existed = management.remove_secret(&fingerprint)?;
                Ok(said_of_removal(&management, json, ("fingerprint", &fingerprint), existed))
            }
        }
    }
}

impl RealmCommand {
    pub(crate) fn run(self) -> Result<Outcome, DaemonError> {
        match self {
            Self::Add { name, allocations, allocations_per_user, store } => {
                let options = RealmOptions { total_quota: allocations, user_quota: allocations_per_user };
                let (management, json) = store.of_realm(&name).open()?;
                let changed = management.add_realm(&name, options)?;
                Ok(said_of_change(&management, json, ("realm", &name), None, &changed))
            }
            Self::List { store } => {
                let (management, json) = store.open()?;
                let limit = |limit: Option<usize>| limit.map_or_else(String::new, |limit| limit.to_string());
                let rows = management.realms()?.into_iter().map(|realm| {
                    let limits = [realm.allocations, realm.allocations_per_user].map(limit);
                    [&[realm.realm][..], &limits, &[realm.origins.join(" ")]].concat()
                });
                let names = ["realm", "allocations", "allocations_per_user", "origins"];
                Ok(said_of_list(json, &names, rows.collect()))
            }
            Self::Remove { name, store } => {
                let (management, json) = store.of_realm(&name).open()?;
                let existed = management.remove_realm(&name)?;
                Ok(said_of_removal(&management, json, ("realm", &name), existed))
            }
        }
    }
}

impl StoreArgs {
    /// The store, and whether JSON is wanted.
    fn open(self) -> Result<(Management, bool), DaemonError> {
        let mut flags = Flags::new();
        flags.set("store.url", "--store", self.store);
        flags.set("store.state", "--state", self.state);
        flags.set("server.realm", "--realm", self.realm);
        Ok((Management::open(&Sources::from_process(self.config, flags))?, self.json))
    }

    /// Of commands that name a realm anyway.
    fn of_realm(self, realm: &str) -> Self {
        Self { realm: Some(realm.to_owned()), ..self }
    }
}

fn said_of_change(
    management: &Management,
    json: bool,
    (what, name): (&str, &str),
    shown: Option<(&str, &Secret)>,
    changed: &Changed,
) -> Outcome {
    let (store, realm) = (management.store(), management.realm());
    if json {
        let mut object = json!({ what: name, "realm": realm, "store": store, "existed": changed.existed });
        if let Some((key, value)) = shown {
            object[key] = Value::from(value.reveal());
        }
        return Outcome::Said(object.to_string());
    }
    let done = if changed.existed { "changed" } else { "added" };
    let place = if what == "realm" { String::new() } else { format!(" in realm {realm}") };
    let mut text = format!("{done} {what} {name}{place} ({store})");
    if let Some((key, value)) = shown {
        text += &format!("\n{key}: {}", value.reveal());
    }
    if let Some(note) = &changed.note {
        text += &format!("\nnote: {note}");
    }
    Outcome::Said(text)
}

fn said_of_removal(
    management: &Management,
    json: bool,
    (what, name): (&str, &str),
    existed: bool,
) -> Outcome {
    let (store, realm) = (management.store(), management.realm());
    let place = if what == "realm" { String::new() } else { format!(" in realm {realm}") };
    if !existed {
        return Outcome::Missing(format!("there is no {what} {name}{place} ({store})"));
    }
    Outcome::Said(if json {
        json!({ what: name, "realm": realm, "store": store, "removed": true }).to_string()
    } else {
        format!("removed {what} {name}{place} ({store})")
    })
}

/// Objects by the names of columns; for people a table. Numbers are numbers in JSON, and what is empty is left out.
fn said_of_list(json: bool, names: &[&str], rows: Vec<Vec<String>>) -> Outcome {
    if json {
        let value = |text: &str| text.parse::<u64>().map_or_else(|_| Value::from(text), Value::from);
        let objects = rows.iter().map(|row| {
            let cells = names.iter().zip(row).filter(|(_, cell)| !cell.is_empty());
            let is_count = |name: &str| name.starts_with("allocations");
            let cell = |name: &str, cell: &str| if is_count(name) { value(cell) } else { Value::from(cell) };
            cells
                .map(|(name, text)| ((*name).to_owned(), cell(name, text)))
                .collect::<serde_json::Map<_, _>>()
        });
        return Outcome::Said(Value::from(objects.collect::<Vec<_>>()).to_string());
    }
    let heading = names.iter().map(|name| name.to_uppercase().replace('_', " ")).collect();
    let lines: Vec<Vec<String>> = std::iter::once(heading).chain(rows).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..names.len()).map(width).collect();
    let line = |cells: &Vec<String>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    Outcome::Said(lines.iter().map(line).collect::<Vec<_>>().join("\n"))
}

/// 128 bits by chance, as hex digits.
fn made_up() -> Secret {
    turnpike_daemon::random_password()
}

fn first_line(
    text: Option<String>,
    file: Option<PathBuf>,
    what: &str,
) -> Result<Option<Secret>, DaemonError> {
    let unreadable = |path: &PathBuf, source| DaemonError::Unreadable { path: path.clone(), source };
    let line = match (text, file) {
        (Some(text), _) => text,
        (None, None) => return Ok(None),
        (None, Some(path)) => {
            let read = if path.as_os_str() == "-" {
                io::read_to_string(io::stdin())
            } else {
                fs::read_to_string(&path)
            };
            let text = read.map(Secret::new).map_err(|error| unreadable(&path, error))?;
            text.reveal().lines().next().unwrap_or_default().to_owned()
        }
    };
    if line.is_empty() {
        return Err(DaemonError::Name(if what == "secret" {
            "the secret is empty"
        } else {
            "the password is empty"
        }));
    }
    Ok(Some(Secret::new(line)))
}
