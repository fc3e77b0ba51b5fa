use std::net::{IpAddr, SocketAddr};

use super::{COOKIE, Transaction};

/// Number for IPv4 in any attribute with a family (RFC 8489 section 14.1).
pub const FAMILY_IPV4: u8 = 1;
pub const FAMILY_IPV6: u8 = 2;

/// The family is as encoded, so an IPv4-mapped address stays IPv6.
#[inline]
#[must_use]
pub fn xor_address(value: &[u8], transaction: &Transaction) -> Option<SocketAddr> {
    let told = address(value)?;
    Some(xored(told, transaction))
}

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

/// Encodes or decodes (RFC 8489 section 14.2).
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorCode<'a> {
    /// 300 to 699.
    pub code: u16,
    /// UTF-8 if the sender follows the RFC.
    pub reason: &'a [u8],
}

impl<'a> ErrorCode<'a> {
    /// RFC 8489 section 10.
    pub const TRY_ALTERNATE: u16 = 300;
    pub const UNAUTHENTICATED: u16 = 401;
    pub const STALE_NONCE: u16 = 438;

    /// True if the error asks for credentials or for a different nonce (RFC 8489 section 9.2.5).
    #[must_use]
    pub fn is_challenge(&self) -> bool {
        matches!(self.code, Self::UNAUTHENTICATED | Self::STALE_NONCE)
    }

    /// Also decodes ADDRESS-ERROR-CODE (RFC 8656 section 18.12), whose first byte is a family.
    #[must_use]
    pub fn of(value: &'a [u8]) -> Option<Self> {
        let [_, _, class, number, reason @ ..] = value else { return None };
        // The five bits above the class are reserved.
        let class = class & 0x07;
        let is_code = (3..=6).contains(&class) && *number < 100;
        is_code.then(|| Self { code: u16::from(class) * 100 + u16::from(*number), reason })
    }

    /// Escape the reason with [`crate::escape`] before display.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(self.reason).into_owned()
    }
}

/// Decodes UNKNOWN-ATTRIBUTES; ignores an odd byte at the end.
pub fn unknown_attributes(value: &[u8]) -> impl Iterator<Item = u16> + '_ {
    value.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}

/// Decodes PASSWORD-ALGORITHMS into numbers for [`crate::integrity::KeyAlgorithm::numbered`]; stops where the
/// list is truncated.
pub fn password_algorithms(mut value: &[u8]) -> impl Iterator<Item = u16> + '_ {
    std::iter::from_fn(move || {
        // The algorithms defined so far have no parameters.
        let [n0, n1, l0, l1, rest @ ..] = value else { return None };
        let parameters = usize::from(u16::from_be_bytes([*l0, *l1])).next_multiple_of(4);
        value = rest.get(parameters..).unwrap_or_default();
        Some(u16::from_be_bytes([*n0, *n1]))
    })
}

/// Security features of a nonce: the first eight of 24 bits (RFC 8489 section 18.1).
pub mod feature {
    pub const PASSWORD_ALGORITHMS: u8 = 0x80;
    pub const USERNAME_ANONYMITY: u8 = 0x40;
}

/// First eight [`feature`]s of a nonce (RFC 8489 section 9.2); 0 without the cookie "obMatJos2".
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
    fn parameters_of_password_algorithms_are_skipped() {
        let numbers = |value: &[u8]| password_algorithms(value).collect::<Vec<_>>();
        assert_eq!(numbers(&[0, 2, 0, 0, 0, 1, 0, 0]), [2, 1]);
        assert_eq!(numbers(&[0, 9, 0, 3, 1, 2, 3, 0xEE, 0, 2, 0, 0]), [9, 2], "padding may have any value");
        assert_eq!(numbers(&[0, 9, 0, 200, 0, 1]), [9]);
        assert!(numbers(&[0, 9, 0]).is_empty() && numbers(&[]).is_empty());
    }
}
