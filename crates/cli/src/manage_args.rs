//! Flags and output of `turnpike user`, `secret`, `realm` and `key`.

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
    commands::{AccountBackend, CommandError, GeneratedSecret, Output, OutputFormat},
};
use turnpike_serve::ServeError;

use crate::config_checks::CHECKS;

/// Store to change: that of a running server, or one named by the same flags as for `serve`.
#[derive(Args)]
pub(crate) struct StoreArgs {
    /// Use the running server at this address: unix:/PATH, ADDR:PORT on loopback, or https://HOST:PORT [default: TURNPIKE_ADMIN, else a
    /// running server of this user or machine, else the embedded store]
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["store", "state"])]
    admin: Option<Target>,

    /// File whose first line is a token from admin.tokens; not needed for the Unix socket [default: none]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// PEM file with certificate authorities to trust, or the server's own certificate, for https:// [default: the system's authorities]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Use the store and realm of this server configuration, whether or not a server is running
    #[arg(short, long, value_name = "FILE", env = "TURNPIKE_CONFIG")]
    config: Option<PathBuf>,

    /// Use this database, like `serve --store`; prefer TURNPIKE_STORE_URL_FILE
    #[arg(long, value_name = "URL")]
    store: Option<String>,

    /// Use the embedded store in this directory, like `serve --state` [default: $STATE_DIRECTORY, $XDG_STATE_HOME/turnpike or
    /// ~/.local/state/turnpike]
    #[arg(long, value_name = "DIR")]
    state: Option<String>,

    /// Realm [default: server.realm of the configuration, else turnpike; for lists and keys, all realms]
    #[arg(long, value_name = "R")]
    realm: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
pub(crate) enum UserCommand {
    /// Add a user, or change the user's password; if no password is given, one is generated and printed
    Add {
        /// Name, 1 to 508 bytes without a colon
        name: String,
        /// Password. Other users on this machine can see it in the process list
        #[arg(long, value_name = "PASSWORD", conflicts_with = "password_file")]
        password: Option<String>,
        /// File whose first line is the password; "-" is standard input
        #[arg(long, value_name = "FILE")]
        password_file: Option<PathBuf>,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// List users and the algorithms of their keys
    List {
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Remove a user; existing allocations expire and cannot be refreshed
    Remove {
        /// Name
        name: String,
        #[command(flatten)]
        store: StoreArgs,
    },
}

#[derive(Subcommand)]
pub(crate) enum SecretCommand {
    /// Add a shared secret for time-limited credentials; if no secret is given, one is generated and printed
    Add {
        /// Secret. Other users on this machine can see it in the process list
        #[arg(long, value_name = "S", conflicts_with = "secret_file")]
        secret: Option<String>,
        /// File whose first line is the secret; "-" is standard input
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// List the fingerprints of secrets
    List {
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Sign new credentials with a new secret; remove the old secrets once the credentials made with them have expired
    Rotate {
        /// Realm
        #[arg(value_name = "REALM", conflicts_with = "realm")]
        name: String,
        /// Seconds for which the old secrets stay valid, 0 to 31536000 [default: the server's credentials.max_ttl plus a minute]
        #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(..=31_536_000))]
        overlap: Option<u32>,
        /// File whose first line is the new secret; "-" is standard input [default: generate a secret and print it]
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Remove a secret; credentials made with it are refused immediately
    Remove {
        /// Fingerprint from `turnpike secret list`
        fingerprint: String,
        #[command(flatten)]
        store: StoreArgs,
    },
}

#[derive(Subcommand)]
pub(crate) enum RealmCommand {
    /// Add a realm, or change its limits
    Add {
        /// Realm, 1 to 127 characters
        name: String,
        /// Maximum allocations of all its users together; 0 for no limit of its own
        #[arg(long, value_name = "N", default_value_t = 0)]
        allocations: u64,
        /// Maximum allocations of each user; 0 for no limit of its own
        #[arg(long, value_name = "N", default_value_t = 0)]
        allocations_per_user: u64,
        /// Maximum bits per second of each allocation, in each direction, such as 2M; "none" for no limit of its own
        #[arg(long, value_name = "BITS", default_value = "none", value_parser = rate)]
        bits_per_second_per_allocation: BitRate,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// List realms with their limits and origins
    List {
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Stop serving a realm and end its allocations; its users and secrets stay in the store
    Remove {
        /// Realm
        name: String,
        #[command(flatten)]
        store: StoreArgs,
    },
}

/// Bits per second; `None` for no limit.
#[derive(Clone, Copy)]
pub(crate) struct BitRate(Option<u64>);

fn rate(text: &str) -> Result<BitRate, &'static str> {
    limit_keys::rate(text).map(BitRate)
}

#[derive(Subcommand)]
pub(crate) enum KeyCommand {
    /// Add a key for an application and print it once; the store keeps only its hash
    Add {
        /// Name, 1 to 64 lower-case letters, digits, - and _
        name: String,
        /// Maximum lifetime of its credentials in seconds, 1 to 31536000 [default: the server's credentials.max_ttl]
        #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..=31_536_000))]
        ttl_max: Option<u32>,
        /// Maximum requests per second, 1 to 1000000 [default: the server's credentials.rate]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        rate: Option<u32>,
        #[command(flatten)]
        store: StoreArgs,
    },
    /// List keys with their limits
    List {
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Remove a key; it is refused immediately, and credentials made with it stay valid until they expire
    Remove {
        /// Name
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
                let (realm, mut to) = store.output(out);
                to.generated = shown_if(given.is_none(), "password", &password);
                let new = NewUser { name, realm, password: password.reveal().to_owned(), only_new: false };
                Ok(store.backend_of_realm()?.add_user(new, to)?)
            }
            Self::List { store } => {
                let (realm, to) = store.output(out);
                Ok(store.backend()?.list_users(realm, to)?)
            }
            Self::Remove { name, store } => {
                let (realm, to) = store.output(out);
                Ok(store.backend_of_realm()?.remove_user(&name, realm, to)?)
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
                let (realm, mut to) = store.output(out);
                to.generated = shown_if(given.is_none(), "secret", &secret);
                let new = NewSecret { secret: secret.reveal().to_owned(), realm, only_new: false };
                Ok(store.backend_of_realm()?.add_secret(new, to)?)
            }
            Self::List { store } => {
                let (realm, to) = store.output(out);
                Ok(store.backend()?.list_secrets(realm, to)?)
            }
            Self::Rotate { name, overlap, secret_file, store } => {
                let given = first_line(None, secret_file)?;
                let secret = given.clone().unwrap_or_else(|| restapi_credentials::new_secret(rand::random()));
                let (_, mut to) = store.output(out);
                to.generated = shown_if(given.is_none(), "secret", &secret);
                let secret = Some(secret.reveal().to_owned());
                let rotation = Rotation { realm: Some(name), secret, overlap_s: overlap };
                Ok(store.backend()?.rotate_secret(rotation, to)?)
            }
            Self::Remove { fingerprint, store } => {
                let (realm, to) = store.output(out);
                Ok(store.backend_of_realm()?.remove_secret(&fingerprint, realm, to)?)
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
                bits_per_second_per_allocation: BitRate(rate),
                store,
            } => {
                let limit = |limit: u64| Some(limit).filter(|limit| *limit > 0);
                let new = NewRealm {
                    name,
                    max_allocations: limit(allocations),
                    max_allocations_per_user: limit(allocations_per_user),
                    bits_per_second_per_allocation: rate,
                    only_new: false,
                };
                let (_, to) = store.output(out);
                Ok(store.backend()?.add_realm(new, to)?)
            }
            Self::List { store } => {
                let (_, to) = store.output(out);
                Ok(store.backend()?.list_realms(to)?)
            }
            Self::Remove { name, store } => {
                let (_, to) = store.output(out);
                Ok(store.backend()?.remove_realm(&name, to)?)
            }
        }
    }
}

impl KeyCommand {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), ManageError> {
        match self {
            Self::Add { name, ttl_max, rate, store } => {
                let key = api_keys::make(&name, rand::random());
                let (realm, mut to) = store.output(out);
                // Only the hash leaves this process.
                let sha256 = api_keys::hash_digits(&key);
                to.generated = Some(GeneratedSecret { what: "key", text: key.reveal() });
                let new = NewKey { name, sha256, realm, max_ttl: ttl_max, rate };
                Ok(store.backend()?.add_key(new, to)?)
            }
            Self::List { store } => {
                let (_, to) = store.output(out);
                Ok(store.backend()?.list_keys(to)?)
            }
            Self::Remove { name, store } => {
                let (_, to) = store.output(out);
                Ok(store.backend()?.remove_key(&name, to)?)
            }
        }
    }
}

impl StoreArgs {
    /// Realm of the command, and its output.
    fn output<'a>(&self, out: &'a mut dyn Write) -> (Option<String>, Output<'a>) {
        (self.realm.clone(), Output::new(OutputFormat::of_stdout(self.json), out))
    }

    /// Backend for a change in one realm. Fails without --realm if the server that uses the store has another realm.
    fn backend_of_realm(self) -> Result<AccountBackend, ManageError> {
        let is_named = self.realm.is_some();
        self.open(|settings| {
            if is_named {
                return Ok(());
            }
            if let Some((server, file)) = turnpike_serve::realm_of_another(settings) {
                return Err(ManageError::OtherRealm { server, file, realm: settings.realm.clone() });
            }
            // A shared store may serve any realm.
            if settings.store.url.is_some() && !settings.is_explicit("server.realm") {
                return Err(ManageError::NoRealm);
            }
            Ok(())
        })
    }

    fn backend(self) -> Result<AccountBackend, ManageError> {
        self.open(|_| Ok(()))
    }

    /// Opens the named server or store, otherwise a running server, otherwise the default store after `check` accepts its settings.
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

fn names_store() -> bool {
    env::vars_os().any(|(name, _)| name.to_str().is_some_and(|name| name.starts_with("TURNPIKE_STORE_")))
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ManageError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(transparent)]
    Store(#[from] ServeError),
    #[error("cannot start an event loop for the store: {0}")]
    Loop(#[from] io::Error),
    /// The server that uses this store has another realm.
    #[error(
        "the server that uses this store has realm {server:?} ({}), but the change would apply to realm {realm:?}: choose the realm with --realm, \
         or the server's configuration with -c",
        file.display()
    )]
    OtherRealm {
        server: String,
        /// File that sets the server's realm.
        file: PathBuf,
        realm: String,
    },
    #[error(
        "the realm of the servers that use a shared store is unknown: choose it with --realm, or pass the server's configuration with -c"
    )]
    NoRealm,
    #[error("TURNPIKE_ADMIN: {0}")]
    Address(String),
    #[error("{}: {why}", path.display())]
    Secret { path: PathBuf, why: String },
    #[error("cannot read {}: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
}

fn shown_if<'a>(is_generated: bool, what: &'static str, secret: &'a Secret) -> Option<GeneratedSecret<'a>> {
    is_generated.then_some(GeneratedSecret { what, text: secret.reveal() })
}

/// 128 random bits as hex digits.
fn made_up() -> Secret {
    turnpike_serve::random_password()
}

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
