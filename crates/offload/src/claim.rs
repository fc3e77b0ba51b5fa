//! Claim to the filters at TC, which do not show whether their process still runs.

use std::{
    io,
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
    },
};

use crate::error::OffloadError;

/// Abstract names belong to a network namespace, as filters do, and are free again once no process has the
/// socket open.
const NAME: &str = "turnpike kernel path";

/// Held by the only process in this network namespace that attaches filters. Filters found without this
/// claim are those of a killed process.
pub(crate) struct Claim(OwnedFd);

impl Claim {
    pub(crate) fn take() -> Result<Self, OffloadError> {
        match SocketAddr::from_abstract_name(NAME).and_then(|name| UnixDatagram::bind_addr(&name)) {
            Ok(socket) => Ok(Self(socket.into())),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(OffloadError::Taken),
            Err(error) => Err(error.into()),
        }
    }

    /// `claim` comes from the process that held it so far and may still hold it.
    pub(crate) fn from_previous(claim: OwnedFd) -> Self {
        Self(claim)
    }

    pub(crate) fn try_clone(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }
}
