//! Values of attributes that have an inside.

use std::net::{IpAddr, SocketAddr};

use super::{COOKIE, Transaction};

/// Of an address (RFC 8489 section 14.1).
pub(crate) const FAMILY_IPV4: u8 = 1;
pub(crate) const FAMILY_IPV6: u8 = 2;

/// The value of XOR-MAPPED-ADDRESS and its like (RFC 8489 section 14.2), of the family that stands in it, IPv4-mapped or not. Its
/// first byte is reserved and means nothing.
#[inline]
#[must_use]
pub fn xor_address(value: &[u8], transaction: &Transaction) -> Option<SocketAddr> {
    let told = address(value)?;
    Some(xored(told, transaction))
}

/// The value of MAPPED-ADDRESS and its like (RFC 8489 section 14.1).
#[inline]
#[must_use]
pub fn address(value: &[u8]) -> Option<SocketAddr> {
    let [_, family, p0, p1, ip @ ..] = value else { return None };
    let ip = match *family {
        FAMILY_IPV4 => IpAddr::from(<[u8; 4]>::try_from(ip).ok()?),
        FAMILY_IPV6 => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_be_bytes([*p0, *p1])))
}

/// An address as XOR-… has it, and the other way round: the port under the cookie, the address under cookie and transaction ID.
#[inline]
pub(crate) fn xored(address: SocketAddr, transaction: &Transaction) -> SocketAddr {
    let [c0, c1, ..] = COOKIE;
    let port = address.port() ^ u16::from_be_bytes([c0, c1]);
    let ip = match address.ip() {
        IpAddr::V4(ip) => IpAddr::V4((ip.to_bits() ^ u32::from_be_bytes(COOKIE)).into()),
        IpAddr::V6(ip) => {
            let mut mask = [0; 16];
            mask[..4].copy_from_slice(&COOKIE);
            mask[4..].copy_from_slice(transaction);
            IpAddr::V6((ip.to_bits() ^ u128::from_be_bytes(mask)).into())
        }
    };
    SocketAddr::new(ip, port)
}

/// ERROR-CODE (RFC 8489 section 14.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorCode<'a> {
    /// 300 to 699.
    pub code: u16,
    /// For people; UTF-8 if its sender kept to the rules.
    pub reason: &'a [u8],
}

impl<'a> ErrorCode<'a> {
    /// Reads a value; that of ADDRESS-ERROR-CODE (RFC 8656 section 18.12) too, whose first byte is a family instead of reserved.
    #[must_use]
    pub fn of(value: &'a [u8]) -> Option<Self> {
        let [_, _, class, number, reason @ ..] = value else { return None };
        // Five bits above the three of the class are reserved.
        let class = class & 0x07;
        let is_code = (3..=6).contains(&class) && *number < 100;
        is_code.then(|| Self { code: u16::from(class) * 100 + u16::from(*number), reason })
    }
}

/// The types in UNKNOWN-ATTRIBUTES (RFC 8489 section 14.13). A lone byte at the end is none.
pub fn unknown_attributes(value: &[u8]) -> impl Iterator<Item = u16> + '_ {
    value.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}
