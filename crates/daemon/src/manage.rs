//! `turnpike user`, `secret` and `realm`: what a store holds, listed and changed in place. A server that runs sees it by itself.

use std::time::Duration;

use tokio::{
    runtime::{self, Runtime},
    time::timeout,
};
use turnpike_config::{Origin, Secret, Settings, Sources, is_realm, is_username, restapi_credentials};
use turnpike_stores::{
    Backend, Database, Edit, Fault, Limits, RealmOptions, Rules, StoreError, UserKeys, UserRow,
};
use zeroize::Zeroizing;

use crate::{DaemonError, store};

/// One question. Somebody sits before it.
const DEADLINE: Duration = Duration::from_secs(30);

/// The store of a configuration, open for changes.
pub struct Management {
    runtime: Runtime,
    database: Database,
    name: String,
    settings: Settings,
}

/// A secret in a list, by its fingerprint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretRow {
    /// Where.
    pub realm: String,
    /// [`restapi_credentials::fingerprint`].
    pub fingerprint: String,
}

/// A realm in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RealmRow {
    /// Its name.
    pub realm: String,
    /// Allocations of all its users; `None` for no limit of its own.
    pub allocations: Option<usize>,
    /// Allocations of each of its users.
    pub allocations_per_user: Option<usize>,
    /// Web pages whose clients are led to it.
    pub origins: Vec<String>,
}

/// What became of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Whether it replaces what was there before.
    pub existed: bool,
    /// What somebody should know.
    pub note: Option<String>,
}

impl Management {
    /// Connects to nothing yet.
    ///
    /// # Errors
    /// The configuration is wrong, or has no store.
    pub fn open(sources: &Sources) -> Result<Self, DaemonError> {
        let settings = sources.load()?.settings;
        let Some((address, file)) = store::address(&settings)? else { return Err(DaemonError::NoStore) };
        let runtime =
            runtime::Builder::new_current_thread().enable_all().build().map_err(DaemonError::Control)?;
        let inside = runtime.enter();
        let database = Database::new(&address, 1, file, &Limits { deadline: DEADLINE, ..Limits::default() });
        drop(inside);
        Ok(Self { runtime, database, name: address.to_string(), settings })
    }

    /// The store, without its password.
    pub fn store(&self) -> &str {
        &self.name
    }

    /// The realm that is meant where none is named.
    pub fn realm(&self) -> &str {
        &self.settings.realm
    }

    /// Users of one realm, or of all.
    ///
    /// # Errors
    /// [`DaemonError::Store`].
    pub fn users(&self, realm: Option<&str>) -> Result<Vec<UserRow>, DaemonError> {
        let mut users: Vec<UserRow> = Vec::new();
        loop {
            let page = self.ask(self.database.users(realm, users.last()))?;
            if page.is_empty() {
                return Ok(users);
            }
            users.extend(page);
        }
    }

    /// Makes a user, or gives one another password.
    ///
    /// # Errors
    /// [`DaemonError::Store`], or a name that none can have.
    pub fn add_user(&self, name: &str, password: &Secret) -> Result<Changed, DaemonError> {
        if !is_username(name) {
            let why = "a name has 1 to 508 bytes, no control characters and no colon";
            return Err(DaemonError::Name(why));
        }
        let (realm, name) = (self.settings.realm.clone(), name.to_owned());
        let keys = UserKeys::new(&name, &realm, password.reveal());
        self.put(Edit::PutUser { realm, name, keys })
    }

    /// Whether there was such a user.
    ///
    /// # Errors
    /// [`DaemonError::Store`].
    pub fn remove_user(&self, name: &str) -> Result<bool, DaemonError> {
        self.edit(&Edit::RemoveUser { realm: self.settings.realm.clone(), name: name.to_owned() })
    }

    /// Secrets of one realm, or of all.
    ///
    /// # Errors
    /// [`DaemonError::Store`].
    pub fn secrets(&self, realm: Option<&str>) -> Result<Vec<SecretRow>, DaemonError> {
        let all = self.stored_secrets()?;
        let wanted = all.iter().filter(|(of, _)| realm.is_none_or(|realm| realm == of));
        let row = |(realm, secret): &(String, Secret)| {
            let fingerprint = restapi_credentials::fingerprint(secret);
            SecretRow { realm: realm.clone(), fingerprint }
        };
        Ok(wanted.map(row).collect())
    }

    /// Takes a secret for time-limited credentials.
    ///
    /// # Errors
    /// [`DaemonError::Store`].
    pub fn add_secret(&self, secret: &Secret) -> Result<Changed, DaemonError> {
        let secret = Zeroizing::new(secret.reveal().to_owned());
        self.put(Edit::AddSecret { realm: self.settings.realm.clone(), secret })
    }

    /// Takes a secret away, by its fingerprint. Whether there was one.
    ///
    /// # Errors
    /// [`DaemonError::Store`].
    pub fn remove_secret(&self, fingerprint: &str) -> Result<bool, DaemonError> {
        let realm = &self.settings.realm;
        let is_it = |(of, secret): &&(String, Secret)| {
            of == realm && restapi_credentials::fingerprint(secret).eq_ignore_ascii_case(fingerprint)
        };
        let all = self.stored_secrets()?;
        let Some((_, secret)) = all.iter().find(is_it) else { return Ok(false) };
        let secret = Zeroizing::new(secret.reveal().to_owned());
        self.edit(&Edit::RemoveSecret { realm: realm.clone(), secret })
    }

    /// Realms that the store names.
    ///
    /// # Errors
    /// [`DaemonError::Store`].
    pub fn realms(&self) -> Result<Vec<RealmRow>, DaemonError> {
        let rules = self.rules()?;
        let named = rules.realms.iter().filter(|(_, realm)| realm.named);
        let origins = |realm: &str| {
            let of_realm = rules.origins.iter().filter(|(_, of)| ***of == *realm);
            of_realm.map(|(origin, _)| origin.to_string()).collect()
        };
        let row = |(name, realm): (&Box<str>, &turnpike_stores::RealmRules)| RealmRow {
            realm: name.to_string(),
            allocations: realm.total_quota,
            allocations_per_user: realm.user_quota,
            origins: origins(name),
        };
        Ok(named.map(row).collect())
    }

    /// Names a realm, with these limits.
    ///
    /// # Errors
    /// [`DaemonError::Store`], or a name that none can have.
    pub fn add_realm(&self, realm: &str, options: RealmOptions) -> Result<Changed, DaemonError> {
        if !is_realm(realm) {
            return Err(DaemonError::Name(
                "a realm has 1 to 127 characters, and neither control characters nor \" nor \\",
            ));
        }
        self.put(Edit::PutRealm { realm: realm.to_owned(), options })
    }

    /// Names a realm no more. Whether there was one.
    ///
    /// # Errors
    /// [`DaemonError::Store`].
    pub fn remove_realm(&self, realm: &str) -> Result<bool, DaemonError> {
        self.edit(&Edit::RemoveRealm { realm: realm.to_owned() })
    }

    fn put(&self, edit: Edit) -> Result<Changed, DaemonError> {
        // One that is no store of ours is told before anything is written.
        let rules = self.rules()?;
        let existed = self.edit(&edit)?;
        let (Edit::PutUser { realm, .. } | Edit::AddSecret { realm, .. }) = &edit else {
            return Ok(Changed { existed, note: None });
        };
        // What --realm says, no server has heard of.
        let is_configured = !matches!(self.settings.origin("server.realm"), Origin::Flag(_));
        let is_served = is_configured
            || Settings::default().realm == *realm
            || self.settings.realms.iter().any(|own| own.name == *realm)
            || rules.realms.get(realm.as_str()).is_some_and(|realm| realm.named);
        let note = (!is_served).then(|| {
            format!(
                "a server serves realm {realm:?} where its server.realm or a [[realm]] names it, or after `turnpike realm add {realm}`"
            )
        });
        Ok(Changed { existed, note })
    }

    fn stored_secrets(&self) -> Result<Vec<(String, Secret)>, DaemonError> {
        let rules = self.rules()?;
        let all = rules.secrets.iter().flat_map(|(realm, secrets)| {
            secrets.iter().map(move |secret| (realm.to_string(), Secret::new(secret.as_str())))
        });
        Ok(all.collect())
    }

    fn rules(&self) -> Result<Rules, DaemonError> {
        self.ask(self.database.rules())
    }

    fn edit(&self, edit: &Edit) -> Result<bool, DaemonError> {
        self.ask(self.database.edit(edit))
    }

    fn ask<T>(&self, question: impl Future<Output = Result<T, StoreError>>) -> Result<T, DaemonError> {
        let slow = || StoreError {
            store: self.name.clone(),
            fault: Fault::Slow,
            detail: format!("not within {} s", DEADLINE.as_secs()),
        };
        let answer = self.runtime.block_on(async { timeout(DEADLINE, question).await });
        answer.unwrap_or_else(|_| Err(slow())).map_err(DaemonError::Store)
    }
}
