//! The connection that a request arrived over, and the rights that it grants.

use std::{fmt, net::SocketAddr, sync::Arc};

use turnpike_config::{AdminAccess, AdminSettings};

#[derive(Clone, Debug)]
pub(crate) enum Via {
    /// Unix socket; with the client's user ID, if the kernel reports it.
    Unix(Option<u32>),
    Loopback(SocketAddr),
    /// TLS, with the client certificate, if any.
    Tls(SocketAddr, Option<ClientCertificate>),
    /// Another node, with the rights and the name of the client that connected to that node.
    Node(AdminAccess, String),
}

impl Via {
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Unix(_) | Self::Node(..) => None,
            Self::Loopback(address) | Self::Tls(address, _) => Some(*address),
        }
    }

    pub(crate) fn access(&self, settings: &AdminSettings) -> AdminAccess {
        match self {
            Self::Unix(_) => AdminAccess::Full,
            Self::Loopback(_) => settings.loopback,
            Self::Tls(_, certificate) => {
                certificate.as_ref().map_or(AdminAccess::None, |certificate| certificate.access)
            }
            Self::Node(access, _) => *access,
        }
    }

    pub(crate) fn is_node(&self) -> bool {
        matches!(self, Self::Node(..))
    }
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(Some(uid)) => write!(f, "local user {uid}"),
            Self::Unix(None) => f.write_str("a local user"),
            Self::Loopback(address) => write!(f, "{address}"),
            Self::Tls(address, None) => write!(f, "{address} over TLS"),
            Self::Tls(address, Some(certificate)) => {
                write!(f, "{address} over TLS with the client certificate {}", certificate.name)
            }
            Self::Node(_, by) => f.write_str(by),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct ClientCertificate {
    pub(crate) access: AdminAccess,
    /// Subject, serial number and issuer, for the audit log.
    pub(crate) name: Arc<str>,
}
