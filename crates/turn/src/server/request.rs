//! A checked view of a STUN request (RFC 8489 section 5). Parsed here and not by `stun_types`, because that logs a
//! warning per malformed message, and what an attacker sends must never become a log line; it is the oracle of the tests.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use strum::{IntoStaticStr, VariantArray};
use turnpike_wire::{integrity, integrity::Mac};

use super::{DropReason, Family, attribute};

/// Bytes. No request needs more: 508 of USERNAME, 763 of REALM and of NONCE, 64 peers of 24 each come to 3,600. It
/// bounds what one unauthenticated datagram can make us hash.
pub const MAX_REQUEST_LEN: usize = 4096;

pub(super) const HEADER_LEN: usize = 20;
pub(super) const FINGERPRINT_LEN: usize = 8;
pub(super) const COOKIE: [u8; 4] = [0x21, 0x12, 0xA4, 0x42];

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Method {
    /// RFC 8489.
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
    /// The method's number. All of them fit into the low four bits of a message type.
    pub(super) const fn number(self) -> u16 {
        match self {
            Self::Binding => 0x001,
            Self::Allocate => 0x003,
            Self::Refresh => 0x004,
            Self::CreatePermission => 0x008,
            Self::ChannelBind => 0x009,
            Self::Connect => 0x00A,
            Self::ConnectionBind => 0x00B,
        }
    }
}

/// A well-formed request.
pub(super) struct Request<'a> {
    /// The whole message.
    pub(super) bytes: &'a [u8],
    pub(super) method: Method,
    pub(super) transaction: [u8; 12],
    /// Which attribute authenticates it; with both, the SHA-256 one counts.
    pub(super) mac: Option<Mac>,
    /// Whether it carries a FINGERPRINT, and so shall the response.
    pub(super) fingerprint: bool,
    pub(super) username: Option<&'a [u8]>,
    pub(super) userhash: Option<&'a [u8]>,
    pub(super) realm: Option<&'a [u8]>,
    pub(super) nonce: Option<&'a [u8]>,
    pub(super) password_algorithm: Option<&'a [u8]>,
    pub(super) password_algorithms: Option<&'a [u8]>,
    /// Comprehension-required attributes that we do not know.
    pub(super) unknown: SmallVec<[u16; 4]>,
    /// Where what counts ends: at the integrity attribute, or the FINGERPRINT.
    end: usize,
}

impl<'a> Request<'a> {
    pub(super) fn parse(datagram: &'a [u8]) -> Result<Self, DropReason> {
        let [t0, t1, l0, l1, c0, c1, c2, c3, rest @ ..] = datagram else { return Err(DropReason::Truncated) };
        let Some(transaction) = rest.first_chunk::<12>() else { return Err(DropReason::Truncated) };
        let length = usize::from(u16::from_be_bytes([*l0, *l1]));
        if datagram.len() < HEADER_LEN + length {
            return Err(DropReason::Truncated);
        }
        // RFC 8489 section 5: the length is that of the message without its header, and attributes are padded to 4 bytes.
        if datagram.len() != HEADER_LEN + length || length % 4 != 0 {
            return Err(DropReason::Malformed);
        }
        if [*c0, *c1, *c2, *c3] != COOKIE {
            return Err(DropReason::ClassicStun);
        }
        if datagram.len() > MAX_REQUEST_LEN {
            return Err(DropReason::Oversized);
        }
        let method = method_of(u16::from_be_bytes([*t0, *t1]))?;

        let mut request = Request {
            bytes: datagram,
            method,
            transaction: *transaction,
            mac: None,
            fingerprint: false,
            username: None,
            userhash: None,
            realm: None,
            nonce: None,
            password_algorithm: None,
            password_algorithms: None,
            unknown: SmallVec::new(),
            end: datagram.len(),
        };
        request.read_attributes()?;
        if request.fingerprint && integrity::check_fingerprint(datagram) != Some(true) {
            return Err(DropReason::Fingerprint);
        }
        Ok(request)
    }

    /// The first attribute of this type: others of it may be ignored (RFC 8489 section 14).
    pub(super) fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.attributes().find(|(found, _)| *found == kind).map(|(_, value)| value)
    }

    /// Every XOR-PEER-ADDRESS, of the family that stands in it, IPv4-mapped or not; `None` where one is malformed.
    pub(super) fn peers(&self) -> impl Iterator<Item = Option<SocketAddr>> + '_ {
        self.attributes()
            .filter(|(kind, _)| *kind == attribute::XOR_PEER_ADDRESS)
            .map(|(_, value)| read_xor_address(value, self.transaction))
    }

    /// In bytes.
    pub(super) fn len_without_fingerprint(&self) -> usize {
        self.bytes.len() - if self.fingerprint { FINGERPRINT_LEN } else { 0 }
    }

    /// Those that count, in order.
    fn attributes(&self) -> impl Iterator<Item = (u16, &'a [u8])> + use<'a> {
        Walk { message: &self.bytes[..self.end], offset: HEADER_LEN }
            .filter_map(Result::ok)
            .map(|(_, kind, value)| (kind, value))
    }

    fn read_attributes(&mut self) -> Result<(), DropReason> {
        for attribute in (Walk { message: self.bytes, offset: HEADER_LEN }) {
            let (offset, kind, value) = attribute?;
            match kind {
                attribute::FINGERPRINT => {
                    self.end = self.end.min(offset);
                    self.fingerprint = true;
                    // Nothing may stand behind it (RFC 8489 section 14.7).
                    if offset + FINGERPRINT_LEN != self.bytes.len() {
                        return Err(DropReason::Malformed);
                    }
                }
                attribute::MESSAGE_INTEGRITY if self.mac.is_none() => {
                    self.end = offset;
                    self.mac = Some(Mac::Sha1);
                }
                attribute::MESSAGE_INTEGRITY_SHA256 if self.mac != Some(Mac::Sha256) => {
                    self.end = self.end.min(offset);
                    self.mac = Some(Mac::Sha256);
                }
                // What stands behind the integrity is not covered by it, and does not count (RFC 8489 section 14.5).
                _ if self.mac.is_some() => {}
                attribute::USERNAME => _ = self.username.get_or_insert(value),
                attribute::USERHASH => _ = self.userhash.get_or_insert(value),
                attribute::REALM => _ = self.realm.get_or_insert(value),
                attribute::NONCE => _ = self.nonce.get_or_insert(value),
                attribute::PASSWORD_ALGORITHM => _ = self.password_algorithm.get_or_insert(value),
                attribute::PASSWORD_ALGORITHMS => _ = self.password_algorithms.get_or_insert(value),
                known if attribute::is_comprehended(known) => {}
                unknown if !self.unknown.contains(&unknown) && self.unknown.len() < 32 => {
                    self.unknown.push(unknown);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// REQUESTED-ADDRESS-FAMILY and ADDITIONAL-ADDRESS-FAMILY (RFC 8656 sections 18.6 and 18.11). `Err` is the value of a
/// family that is none; `None` a malformed attribute.
pub(super) fn read_family(value: &[u8]) -> Option<Result<Family, u8>> {
    match value {
        [0x01, _, _, _] => Some(Ok(Family::V4)),
        [0x02, _, _, _] => Some(Ok(Family::V6)),
        [other, _, _, _] => Some(Err(*other)),
        _ => None,
    }
}

/// XOR-PEER-ADDRESS (RFC 8489 section 14.2).
fn read_xor_address(value: &[u8], transaction: [u8; 12]) -> Option<SocketAddr> {
    let [_, family, p0, p1, address @ ..] = value else { return None };
    let port = u16::from_be_bytes([p0 ^ COOKIE[0], p1 ^ COOKIE[1]]);
    let ip = match family {
        1 => {
            let octets: [u8; 4] = address.try_into().ok()?;
            IpAddr::from(Ipv4Addr::from_bits(u32::from_be_bytes(octets) ^ u32::from_be_bytes(COOKIE)))
        }
        2 => {
            let octets: [u8; 16] = address.try_into().ok()?;
            IpAddr::from(Ipv6Addr::from_bits(u128::from_be_bytes(octets) ^ xor_mask(transaction)))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

/// What IPv6 addresses are XORed with: the cookie and the transaction ID.
pub(super) fn xor_mask(transaction: [u8; 12]) -> u128 {
    let mut mask = [0; 16];
    mask[..4].copy_from_slice(&COOKIE);
    mask[4..].copy_from_slice(&transaction);
    u128::from_be_bytes(mask)
}

/// The method of a request's message type; class and method are interleaved (RFC 8489 section 5, figure 3).
fn method_of(message_type: u16) -> Result<Method, DropReason> {
    let class = message_type & 0x0110;
    let number = message_type & !0x0110;
    let method = Method::VARIANTS.iter().copied().find(|method| method.number() == number);
    match (class, method) {
        (0x0000, Some(method)) => Ok(method),
        (0x0000, None) => Err(DropReason::UnknownMethod),
        (0x0010, Some(Method::Binding)) => Err(DropReason::Keepalive),
        _ => Err(DropReason::UnexpectedClass),
    }
}

/// Offset, type and value of each attribute of a message whose header has been checked.
struct Walk<'a> {
    message: &'a [u8],
    offset: usize,
}

impl<'a> Iterator for Walk<'a> {
    type Item = Result<(usize, u16, &'a [u8]), DropReason>;

    fn next(&mut self) -> Option<Self::Item> {
        let offset = self.offset;
        let [k0, k1, l0, l1, rest @ ..] = self.message.get(offset..)? else {
            return None;
        };
        let length = usize::from(u16::from_be_bytes([*l0, *l1]));
        let padded = length.next_multiple_of(4);
        if padded > rest.len() {
            self.offset = self.message.len();
            return Some(Err(DropReason::Malformed));
        }
        self.offset = offset + 4 + padded;
        Some(Ok((offset, u16::from_be_bytes([*k0, *k1]), &rest[..length])))
    }
}
