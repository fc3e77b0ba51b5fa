//! Values of attributes that have an inside.

use std::net::{IpAddr, SocketAddr};

use super::{COOKIE, Transaction};

/// IPv4, in whatever attribute names a family (RFC 8489 section 14.1).
pub const FAMILY_IPV4: u8 = 1;
/// IPv6.
pub const FAMILY_IPV6: u8 = 2;

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
    /// Try Alternate: another server is to be asked (RFC 8489 section 10).
    pub const TRY_ALTERNATE: u16 = 300;
    /// Unauthenticated.
    pub const UNAUTHENTICATED: u16 = 401;
    /// Stale Nonce.
    pub const STALE_NONCE: u16 = 438;

    /// Whether it asks for credentials, or for the same with another nonce (RFC 8489 section 9.2.5).
    #[must_use]
    pub fn is_challenge(&self) -> bool {
        matches!(self.code, Self::UNAUTHENTICATED | Self::STALE_NONCE)
    }

    /// Reads a value; that of ADDRESS-ERROR-CODE (RFC 8656 section 18.12) too, whose first byte is a family instead of reserved.
    #[must_use]
    pub fn of(value: &'a [u8]) -> Option<Self> {
        let [_, _, class, number, reason @ ..] = value else { return None };
        // Five bits above the three of the class are reserved.
        let class = class & 0x07;
        let is_code = (3..=6).contains(&class) && *number < 100;
        is_code.then(|| Self { code: u16::from(class) * 100 + u16::from(*number), reason })
    }

    /// The reason as it was sent; [`crate::escape`] makes it fit to be shown.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(self.reason).into_owned()
    }
}

/// The types in UNKNOWN-ATTRIBUTES (RFC 8489 section 14.13). A lone byte at the end is none.
pub fn unknown_attributes(value: &[u8]) -> impl Iterator<Item = u16> + '_ {
    value.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}

/// The numbers in PASSWORD-ALGORITHMS (RFC 8489 section 14.11), in their order; [`crate::integrity::KeyAlgorithm::numbered`] knows
/// them. Ends where the list is cut short.
pub fn password_algorithms(mut value: &[u8]) -> impl Iterator<Item = u16> + '_ {
    std::iter::from_fn(move || {
        // Number, length of the parameters, parameters and padding; those that there are so far have no parameters.
        let [n0, n1, l0, l1, rest @ ..] = value else { return None };
        let parameters = usize::from(u16::from_be_bytes([*l0, *l1])).next_multiple_of(4);
        value = rest.get(parameters..).unwrap_or_default();
        Some(u16::from_be_bytes([*n0, *n1]))
    })
}

/// Security features of a nonce, of the first eight of 24 bits (RFC 8489 section 18.1).
pub mod feature {
    /// The challenge offers PASSWORD-ALGORITHMS.
    pub const PASSWORD_ALGORITHMS: u8 = 0x80;
    /// The server takes USERHASH.
    pub const USERNAME_ANONYMITY: u8 = 0x40;
}

/// The first eight [`feature`]s that a nonce announces (RFC 8489 section 9.2): "obMatJos2", and three bytes in base64. None without.
#[must_use]
pub fn security_features(nonce: &[u8]) -> u8 {
    let sextet = |digit: u8| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let Some([a, b, c, d, ..]) = nonce.strip_prefix(b"obMatJos2") else { return 0 };
    match [*a, *b, *c, *d].map(sextet) {
        [Some(a), Some(b), Some(_), Some(_)] => a << 2 | b >> 4,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn security_features_are_read_from_the_nonce_cookie() {
        assert_eq!(security_features(b"obMatJos2gAAArest"), feature::PASSWORD_ALGORITHMS);
        assert_eq!(security_features(b"obMatJos2QAAArest"), feature::USERNAME_ANONYMITY);
        assert_eq!(security_features(b"obMatJos2//+9"), 0xFF);
        assert_eq!(security_features(b"obMatJos2AAAA//499k954d6OL34oL9FSTvy64sA"), 0);
        assert_eq!(security_features(b"obMatJos2"), 0);
        assert_eq!(security_features("obMatJos2\u{e4}\u{e4}\u{e4}".as_bytes()), 0);
        assert_eq!(security_features(b"obMatJos2gAA="), 0);
        assert_eq!(security_features(b"gAAA"), 0);
    }

    #[test]
    fn parameters_of_password_algorithms_are_passed_over() {
        let numbers = |value: &[u8]| password_algorithms(value).collect::<Vec<_>>();
        assert_eq!(numbers(&[0, 2, 0, 0, 0, 1, 0, 0]), [2, 1]);
        assert_eq!(numbers(&[0, 9, 0, 3, 1, 2, 3, 0xEE, 0, 2, 0, 0]), [9, 2], "whatever the padding");
        assert_eq!(numbers(&[0, 9, 0, 200, 0, 1]), [9]);
        assert!(numbers(&[0, 9, 0]).is_empty() && numbers(&[]).is_empty());
    }
}
