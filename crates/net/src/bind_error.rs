//! A socket that cannot listen: the place, the error, and the remedy.

use std::{fmt, io};

use crate::is_exhaustion;

#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {place}: {source}; {remedy}")]
pub struct BindError {
    /// Address, preceded by the protocol if the address alone is ambiguous.
    pub place: String,
    pub source: io::Error,
    pub remedy: String,
}

impl BindError {
    /// `setting` names the setting that contains the address, with a preposition: `with --listen`.
    #[must_use]
    pub fn ip(place: impl fmt::Display, source: io::Error, setting: &str) -> Self {
        let remedy = match source.kind() {
            io::ErrorKind::AddrInUse => {
                format!(
                    "another program or listener has this port: stop it, or choose another port {setting}"
                )
            }
            io::ErrorKind::PermissionDenied => format!(
                "ports below 1024 need CAP_NET_BIND_SERVICE: grant it (setcap cap_net_bind_service=ep), or choose a \
                 higher port {setting}"
            ),
            io::ErrorKind::AddrNotAvailable => {
                format!("choose an address of this machine (ip address) {setting}")
            }
            _ if is_exhaustion(&source) => "raise the limit of open files (ulimit -n)".to_owned(),
            _ => format!("choose another address {setting}"),
        };
        Self { place: place.to_string(), source, remedy }
    }

    /// Like [`BindError::ip`], for a Unix socket.
    #[must_use]
    pub fn unix(place: impl fmt::Display, source: io::Error, setting: &str) -> Self {
        let remedy = match source.kind() {
            io::ErrorKind::AddrInUse => {
                format!(
                    "another program or listener has this path: stop it, or choose another path {setting}"
                )
            }
            io::ErrorKind::AlreadyExists => {
                format!("choose another path {setting}, or remove the file yourself")
            }
            io::ErrorKind::NotFound => {
                format!("create its directory first, or choose another path {setting}")
            }
            io::ErrorKind::PermissionDenied => format!(
                "this user needs write access to the directory: choose another path {setting}, such as one in \
                 systemd's RuntimeDirectory="
            ),
            _ => format!("choose another path {setting}"),
        };
        Self { place: place.to_string(), source, remedy }
    }

    /// Adds an alternative remedy.
    #[must_use]
    pub fn or(mut self, remedy: &str) -> Self {
        self.remedy.push_str(", or ");
        self.remedy.push_str(remedy);
        self
    }
}
