//! Parsing of requests: methods, size limit and drop reasons for malformed ones.

pub(crate) mod allocate;
pub(crate) mod bad_request;
pub(crate) mod bindings;
pub(crate) mod classic;
pub(crate) mod connection_table;
pub(crate) mod connections;
pub(crate) mod context;
pub(crate) mod dispatch;
pub(crate) mod nat_discovery;
pub(crate) mod refresh;
pub(crate) mod refusal_log;
pub(crate) mod repeated_refusals;
pub(crate) mod response;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use strum::{IntoStaticStr, VariantArray};
use turnpike_wire::stun::{Class, Header, Invalid, View, kind, method, xor_address};

use super::DropReason;

/// Maximum length of a request in bytes. No request needs more: USERNAME, REALM and NONCE of 763 bytes each
/// and 64 peers of 24 bytes add up to 3,840. This limit bounds the hashing that an unauthenticated datagram
/// can cause.
pub const MAX_REQUEST_LEN: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Method {
    Binding,
    /// RFC 8656 section 7.
    Allocate,
    /// RFC 8656 section 8.
    Refresh,
    /// RFC 8656 section 10.
    CreatePermission,
    /// RFC 8656 section 12.
    ChannelBind,
    /// RFC 6062 section 5.2.
    Connect,
    /// RFC 6062 section 5.4.
    ConnectionBind,
}

impl Method {
    pub(crate) const fn number(self) -> u16 {
        match self {
            Self::Binding => method::BINDING,
            Self::Allocate => method::ALLOCATE,
            Self::Refresh => method::REFRESH,
            Self::CreatePermission => method::CREATE_PERMISSION,
            Self::ChannelBind => method::CHANNEL_BIND,
            Self::Connect => method::CONNECT,
            Self::ConnectionBind => method::CONNECTION_BIND,
        }
    }

    fn of(header: Header) -> Result<Self, DropReason> {
        let found = Self::VARIANTS.iter().copied().find(|method| method.number() == header.method);
        match (header.class, found) {
            (Class::Request, Some(method)) => Ok(method),
            (Class::Request, None) => Err(DropReason::UnknownMethod),
            (Class::Indication, Some(Self::Binding)) => Err(DropReason::Keepalive),
            _ => Err(DropReason::UnexpectedClass),
        }
    }
}

impl From<Invalid> for DropReason {
    fn from(invalid: Invalid) -> Self {
        match invalid {
            Invalid::NotStun => Self::NotStun,
            Invalid::Truncated => Self::Truncated,
            Invalid::Length | Invalid::Attribute => Self::Malformed,
            Invalid::Cookie => Self::ClassicStun,
            Invalid::Fingerprint => Self::Fingerprint,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Direct,
    /// Passed on together with its stream, which this worker now owns.
    HandedOver,
    /// Forwarded by worker `via`, which keeps the client.
    Forwarded {
        via: u16,
        /// The 5-tuple already has an allocation or a pending move on that worker.
        occupied: bool,
    },
}

pub(crate) struct Request<'a> {
    pub(crate) method: Method,
    pub(crate) view: View<'a>,
}

impl<'a> Request<'a> {
    pub(crate) fn parse(datagram: &'a [u8]) -> Result<Self, DropReason> {
        let header = Header::new_checked(datagram)?;
        if datagram.len() > MAX_REQUEST_LEN {
            return Err(DropReason::Oversized);
        }
        let method = Method::of(header)?;
        Ok(Self { method, view: View::new_checked(datagram)? })
    }

    pub(crate) fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.view.get(kind)
    }

    pub(crate) fn transaction(&self) -> [u8; 12] {
        self.view.header().transaction
    }

    /// Families are as encoded (IPv4-mapped stays IPv6); `None` for a malformed attribute.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Option<SocketAddr>> + '_ {
        let transaction = self.transaction();
        self.view.all(kind::XOR_PEER_ADDRESS).map(move |value| xor_address(value, &transaction))
    }

    /// Unknown comprehension-required attributes, sorted and distinct.
    pub(crate) fn unknown(&self, is_known: impl Fn(u16) -> bool) -> SmallVec<[u16; 4]> {
        let unknown = self.view.unknown(|kind| kind::is_comprehended(kind) || is_known(kind));
        let mut found: SmallVec<[u16; 4]> = unknown.collect();
        // The request length bounds the number of attributes and thus the time for sorting.
        found.sort_unstable();
        found.dedup();
        found
    }

    pub(crate) fn len_without_fingerprint(&self) -> usize {
        self.view.bytes().len() - if self.view.has_fingerprint() { 8 } else { 0 }
    }
}
