//! Store errors. Each message is one sentence that includes what to do; none contains a password.

use std::fmt;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct StoreError {
    /// Address of the store, as [`crate::StoreAddress`] prints it.
    pub store: String,
    /// Configuration key of the address.
    pub setting: &'static str,
    pub fault: StoreFault,
    /// Message of the database or the kernel.
    pub detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreFault {
    Unreachable,
    Slow,
    Login,
    Permission,
    NoDatabase,
    /// The schema is neither coturn's nor our own.
    Schema,
    Row,
    /// The table's character set cannot represent the text.
    Text,
    Tls,
    Other,
}

impl StoreError {
    pub(crate) fn new(store: &str, fault: StoreFault, detail: impl fmt::Display) -> Self {
        Self { store: store.to_string(), setting: "store.url", fault, detail: detail.to_string() }
    }

    /// Makes the message name `fleet.url` instead of the setting for the users' store.
    pub(crate) fn of_fleet(self) -> Self {
        Self { setting: "fleet.url", ..self }
    }

    /// Returns true if the address or the login is wrong, so that waiting does not help.
    #[must_use]
    pub fn is_misconfigured(&self) -> bool {
        matches!(self.fault, StoreFault::Login | StoreFault::Permission | StoreFault::NoDatabase)
    }

    /// Returns true for errors that may go away on their own; all others require action by an operator.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self.fault, StoreFault::Unreachable | StoreFault::Slow | StoreFault::Other)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, setting, fault, detail } = self;
        match fault {
            StoreFault::Unreachable => {
                write!(
                    f,
                    "{store} cannot be reached: {detail}; start it, or correct host and port in {setting}"
                )
            }
            StoreFault::Slow => write!(f, "{store} does not answer in time: {detail}"),
            StoreFault::Login => {
                write!(f, "{store} refuses the user or password: {detail}; correct them in {setting}")
            }
            StoreFault::Permission => {
                write!(f, "{store} does not allow this: {detail}; grant the user the permission")
            }
            StoreFault::NoDatabase => {
                write!(
                    f,
                    "{store} does not exist: {detail}; correct the database name in {setting}, or create it"
                )
            }
            StoreFault::Schema => write!(f, "{store} {detail}; see docs/stores.md"),
            StoreFault::Row => write!(f, "{store} has invalid data: {detail}; correct it there"),
            StoreFault::Tls => {
                write!(f, "TLS to {store} failed: {detail}; set its CA in {setting} (docs/stores.md)")
            }
            StoreFault::Text => {
                write!(
                    f,
                    "{store} cannot store this text: {detail}; convert the table to a character set such as utf8mb4"
                )
            }
            StoreFault::Other => write!(f, "{store} reports an error: {detail}"),
        }
    }
}
