//! Flags of `turnpike user`, `secret`, `realm` and `key`, and what they print.

use std::{
    env, fs,
    io::{self, Write},
    path::PathBuf,
    sync::Arc,
};

use clap::{Args, Subcommand};
use turnpike_admin::Accounts;
use turnpike_api::{NewKey, NewRealm, NewSecret, NewUser, Rotation};
use turnpike_config::{
    Flags, Secret, Settings, Sources, api_keys, limit_keys, restapi_credentials, secret_file,
};
use turnpike_ctl::{
    client::{Client, Target},
    commands::{AccountBackend, CommandError, Format, GeneratedSecret},
};
use turnpike_serve::ServeError;

use crate::CHECKS;

/// Whose store it is: a running server's, or one that is named in the same way as for `serve`.
#[derive(Args)]
pub(crate) struct StoreArgs {
    /// Ask the running server at this address: unix:/PATH, ADDR:PORT on loopback, or https://HOST:PORT [default: TURNPIKE_ADMIN, else the server of this
    /// user or this machine, if one runs; else the embedded store]
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["store", "state"])]
    admin: Option<Target>,

    /// File whose first line is a token of admin.tokens; the Unix socket needs none [default: none]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// PEM file with the certificate authorities to trust, or with the server's own certificate, for https:// [default: those of this
    /// machine]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Use the store of this configuration of `serve`, and its realm, whether a server runs or not
    #[arg(short, long, value_name = "FILE", env = "TURNPIKE_CONFIG")]
    config: Option<PathBuf>,

    /// Use this database, as `serve --store` does; prefer TURNPIKE_STORE_URL_FILE
    #[arg(long, value_name = "URL")]
    store: Option<String>,

    /// Use the embedded store in this directory, as `serve --state` does [default: $STATE_DIRECTORY, $XDG_STATE_HOME/turnpike or
    /// ~/.local/state/turnpike]
    #[arg(long, value_name = "DIR")]
    state: Option<String>,

    /// Realm that is meant [default: server.realm of the configuration, else turnpike; of lists and keys, all]
    #[arg(long, value_name = "R")]
    realm: Option<String>,

    /// Print JSON in place of text for people
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
    /// Have another secret make new credentials; those that there are count until credentials made with them are over, and are removed then
    Rotate {
        /// REALM.
        #[arg(value_name = "REALM", conflicts_with = "realm")]
        name: String,
        /// Seconds for which the others count, 0 to 31536000 [default: a minute more than credentials.max_ttl of the server]
        #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(..=31_536_000))]
        overlap: Option<u32>,
        /// File whose first line is the new secret; "-" is standard input [default: it is made up and printed]
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
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
        /// Bits per second of each allocation, each way, such as 2M; "none" for no limit of its own
        #[arg(long, value_name = "BITS", default_value = "none", value_parser = rate)]
        bits_per_second_per_allocation: Rate,
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

/// Bits per second; `None` is no limit.
#[derive(Clone, Copy)]
pub(crate) struct Rate(Option<u64>);

fn rate(text: &str) -> Result<Rate, &'static str> {
    limit_keys::rate(text).map(Rate)
}

/// Subcommands of `turnpike key`.
#[derive(Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key for an application, and print it once: the store has its hash alone
    Add {
        /// Name, 1 to 64 small letters, digits, - and _
        name: String,
        /// Seconds that a credential made for it lives at most, 1 to 31536000 [default: credentials.max_ttl of the server]
        #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..=31_536_000))]
        ttl_max: Option<u32>,
        /// Requests a second, 1 to 1000000 [default: credentials.rate of the server]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        rate: Option<u32>,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// List keys, with what each may have
    List {
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Remove a key: it is refused from then on; what was made for it is good until its own end
    Remove {
        /// Name.
        name: String,
        #[command(flatten)]
        store: StoreArgs,
    },
}

impl UserCommand {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), ManageError> {
        match self {
            Self::Add { name, password, password_file, store } => {
                let given = first_line(password, password_file)?;
                let password = given.clone().unwrap_or_else(made_up);
                let (realm, json) = (store.realm.clone(), store.json);
                let shown =
                    given.is_none().then_some(GeneratedSecret { what: "password", text: password.reveal() });
                let new = NewUser { name, realm, password: password.reveal().to_owned(), only_new: false };
                Ok(store.backend_of_realm()?.add_user(new, shown, json, out)?)
            }
            Self::List { store } => {
                let (realm, json) = (store.realm.clone(), store.json);
                Ok(store.backend()?.list_users(realm, Format::of_stdout(json), out)?)
            }
            Self::Remove { name, store } => {
                let (realm, json) = (store.realm.clone(), store.json);
                Ok(store.backend_of_realm()?.remove_user(&name, realm, json, out)?)
            }
        }
    }
}

impl SecretCommand {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), ManageError> {
        match self {
            Self::Add { secret, secret_file, store } => {
                let given = first_line(secret, secret_file)?;
                let secret = given.clone().unwrap_or_else(made_up);
                let (realm, json) = (store.realm.clone(), store.json);
                let shown =
                    given.is_none().then_some(GeneratedSecret { what: "secret", text: secret.reveal() });
                let new = NewSecret { secret: secret.reveal().to_owned(), realm, only_new: false };
                Ok(store.backend_of_realm()?.add_secret(new, shown, json, out)?)
            }
            Self::List { store } => {
                let (realm, json) = (store.realm.clone(), store.json);
                Ok(store.backend()?.list_secrets(realm, Format::of_stdout(json), out)?)
            }
            Self::Rotate { name, overlap, secret_file, store } => {
                let given = first_line(None, secret_file)?;
                let secret = given.clone().unwrap_or_else(|| restapi_credentials::new_secret(rand::random()));
                let json = store.json;
                let shown =
                    given.is_none().then_some(GeneratedSecret { what: "secret", text: secret.reveal() });
                let rotation = Rotation {
                    realm: Some(name),
                    secret: Some(secret.reveal().to_owned()),
                    overlap_s: overlap,
                };
                Ok(store.backend()?.rotate_secret(rotation, shown, json, out)?)
            }
            Self::Remove { fingerprint, store } => {
                let (realm, json) = (store.realm.clone(), store.json);
                Ok(store.backend_of_realm()?.remove_secret(&fingerprint, realm, json, out)?)
            }
        }
    }
}

impl RealmCommand {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), ManageError> {
        match self {
            Self::Add {
                name,
                allocations,
                allocations_per_user,
                bits_per_second_per_allocation: Rate(rate),
                store,
            } => {
                let limit = |limit: u64| Some(limit).filter(|limit| *limit > 0);
                let new = NewRealm {
                    name,
                    max_sessions: limit(allocations),
                    max_sessions_per_user: limit(allocations_per_user),
                    bits_per_second_per_session: rate,
                    only_new: false,
                };
                let json = store.json;
                Ok(store.backend()?.add_realm(new, json, out)?)
            }
            Self::List { store } => {
                let json = store.json;
                Ok(store.backend()?.list_realms(Format::of_stdout(json), out)?)
            }
            Self::Remove { name, store } => {
                let json = store.json;
                Ok(store.backend()?.remove_realm(&name, json, out)?)
            }
        }
    }
}

impl KeyCommand {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), ManageError> {
        match self {
            Self::Add { name, ttl_max, rate, store } => {
                let key = api_keys::make(&name, rand::random());
                let (realm, json) = (store.realm.clone(), store.json);
                // The server gets no more than the hash, wherever it is.
                let sha256 = api_keys::hash_digits(&key);
                let new = NewKey { name, sha256, realm, max_ttl: ttl_max, rate };
                let shown = Some(GeneratedSecret { what: "key", text: key.reveal() });
                Ok(store.backend()?.add_key(new, shown, json, out)?)
            }
            Self::List { store } => {
                let json = store.json;
                Ok(store.backend()?.list_keys(Format::of_stdout(json), out)?)
            }
            Self::Remove { name, store } => {
                let json = store.json;
                Ok(store.backend()?.remove_key(&name, json, out)?)
            }
        }
    }
}

impl StoreArgs {
    /// The backend for a change in one realm. Without --realm that has to be the realm of the server that uses the store.
    fn backend_of_realm(self) -> Result<AccountBackend, ManageError> {
        let is_named = self.realm.is_some();
        self.open(|settings| {
            if is_named {
                return Ok(());
            }
            if let Some((server, file)) = turnpike_serve::realm_of_another(settings) {
                return Err(ManageError::OtherRealm { server, file, realm: settings.realm.clone() });
            }
            // Servers of a shared store may have any realm.
            if settings.store.url.is_some() && !settings.is_explicit("server.realm") {
                return Err(ManageError::NoRealm);
            }
            Ok(())
        })
    }

    fn backend(self) -> Result<AccountBackend, ManageError> {
        self.open(|_| Ok(()))
    }

    /// The server or the store that is named; otherwise a running server, or if there is none, the store that it would have, with
    /// settings that pass the check.
    fn open(
        self,
        check: impl FnOnce(&Settings) -> Result<(), ManageError>,
    ) -> Result<AccountBackend, ManageError> {
        let is_named = self.config.is_some() || self.store.is_some() || self.state.is_some() || names_store();
        if self.admin.is_some() || !is_named {
            let target = match (self.admin, env::var("TURNPIKE_ADMIN")) {
                (Some(target), _) => Some(target),
                (None, Ok(text)) => Some(text.parse().map_err(ManageError::Address)?),
                (None, Err(_)) => None,
            };
            let is_wanted = target.is_some();
            crate::warn_of_token(self.token_file.as_deref());
            let client = Client::new(target, self.token_file.as_deref()).map_err(CommandError::from)?;
            let client = client.trusting(self.ca);
            if is_wanted || client.finds_somebody().map_err(CommandError::from)? {
                return Ok(AccountBackend::Running(client));
            }
        }
        let mut flags = Flags::new();
        flags.set("store.url", "--store", self.store);
        flags.set("store.state", "--state", self.state);
        let has_file = self.config.is_some();
        let sources = Sources::from_process(self.config, flags, CHECKS);
        AccountBackend::here(|| {
            let (settings, store) = turnpike_serve::open_store(&sources)?;
            check(&settings)?;
            let settings = Arc::new(settings);
            Ok(if has_file {
                Accounts::new(settings, Some(store))
            } else {
                Accounts::of_store(settings, store)
            })
        })
    }
}

/// Whether this process's environment names a store.
fn names_store() -> bool {
    env::vars_os().any(|(name, _)| name.to_str().is_some_and(|name| name.starts_with("TURNPIKE_STORE_")))
}

/// Why a command has not done what it was to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManageError {
    /// Of a running server, or of the store.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] ServeError),
    /// There is no event loop.
    #[error("cannot wait for a store: {0}")]
    Loop(#[from] io::Error),
    /// The server of this store would never look there.
    #[error(
        "the server of this store has realm {server:?} ({}), and this would go to realm {realm:?}: name the realm with --realm, or the \
         server's configuration with -c",
        file.display()
    )]
    OtherRealm {
        /// The server's realm.
        server: String,
        /// The file that says so.
        file: PathBuf,
        /// The realm of this command's configuration.
        realm: String,
    },
    /// A shared store, and nothing that says which realm its servers have.
    #[error(
        "a shared store does not say which realm its servers have: name the realm with --realm, or the server's configuration with -c"
    )]
    NoRealm,
    /// TURNPIKE_ADMIN.
    #[error("TURNPIKE_ADMIN: {0}")]
    Address(String),
    /// A file of a secret or password that holds something else.
    #[error("{}: {why}", path.display())]
    Secret {
        /// Which.
        path: PathBuf,
        /// The fault.
        why: String,
    },
    /// A file that a flag names.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// 128 bits by chance, as hex digits.
fn made_up() -> Secret {
    turnpike_serve::random_password()
}

/// The text, or the first line of the file.
fn first_line(text: Option<String>, file: Option<PathBuf>) -> Result<Option<Secret>, ManageError> {
    let path = match (text, file) {
        (Some(text), _) => return Ok(Some(Secret::new(text))),
        (None, None) => return Ok(None),
        (None, Some(path)) => path,
    };
    let read =
        if path.as_os_str() == "-" { io::read_to_string(io::stdin()) } else { fs::read_to_string(&path) };
    let unreadable = |source| ManageError::Unreadable { path: path.clone(), source };
    let text = read.map(Secret::new).map_err(unreadable)?;
    secret_file::first_secret(text.reveal()).map(Some).map_err(|why| ManageError::Secret { path, why })
}
