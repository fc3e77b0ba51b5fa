//! Why a store cannot be used, or did not answer. Each message is one sentence with what to do; none holds a password.

use std::fmt;

/// What is wrong, and with which store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct StoreError {
    /// As [`crate::StoreAddress`] shows it.
    pub store: String,
    /// The key of the configuration that names it.
    pub setting: &'static str,
    /// What kind of trouble.
    pub fault: Fault,
    /// What the database or the kernel said.
    pub detail: String,
}

/// Kinds of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nobody is there, or the way to there is broken.
    Unreachable,
    /// It has not answered in time.
    Slow,
    /// It does not know the user, or not by this password.
    Login,
    /// The user may not do what is needed.
    Permission,
    /// It has no database of this name.
    NoDatabase,
    /// What is in there is not what coturn or we make.
    Schema,
    /// One row cannot be read.
    Row,
    /// Its character set has no such text.
    Text,
    /// Its certificate, or the TLS handshake.
    Tls,
    /// Anything else that it refuses.
    Other,
}

impl StoreError {
    pub(crate) fn new(store: &str, fault: Fault, detail: impl fmt::Display) -> Self {
        Self { store: store.to_string(), setting: "store.url", fault, detail: detail.to_string() }
    }

    /// The same of a fleet's store.
    pub(crate) fn of_fleet(self) -> Self {
        Self { setting: "fleet.url", ..self }
    }

    /// Returns true if the address or the login is wrong, so that waiting cannot help.
    #[must_use]
    pub fn is_misconfigured(&self) -> bool {
        matches!(self.fault, Fault::Login | Fault::Permission | Fault::NoDatabase)
    }

    /// Whether waiting may help: what else is wrong, somebody has to change.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self.fault, Fault::Unreachable | Fault::Slow | Fault::Other)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, setting, fault, detail } = self;
        match fault {
            Fault::Unreachable => {
                write!(
                    f,
                    "{store} cannot be reached: {detail}; start it, or name its host and port in {setting}"
                )
            }
            Fault::Slow => write!(f, "{store} does not answer in time: {detail}"),
            Fault::Login => {
                write!(f, "{store} refuses user or password: {detail}; correct them in {setting}")
            }
            Fault::Permission => write!(f, "{store} does not allow it: {detail}; grant this user the right"),
            Fault::NoDatabase => {
                write!(f, "{store} does not exist: {detail}; name the database in {setting}, or create it")
            }
            Fault::Schema => write!(f, "{store} {detail}; docs/stores.md has the tables"),
            Fault::Row => write!(f, "{store} has what cannot be read: {detail}; correct it there"),
            Fault::Tls => {
                write!(
                    f,
                    "{store} cannot be trusted: {detail}; name its authority in {setting} (docs/stores.md)"
                )
            }
            Fault::Text => {
                write!(
                    f,
                    "{store} cannot hold this text: {detail}; give the table a character set that has it, such as utf8mb4"
                )
            }
            Fault::Other => write!(f, "{store} refuses: {detail}"),
        }
    }
}
