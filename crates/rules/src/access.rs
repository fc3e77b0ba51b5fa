//! Access control: `allow` and `deny` patterns in rinetd's notation.

mod spelling;

use std::{fmt::Write as _, net::IpAddr};

/// Pattern for the text of a client's address: `*` matches any number of characters, `?` exactly
/// one (rinetd(8)). Also allows a prefix such as `10.0.0.0/8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// For example `192.168.*` or `10.0.0.?`.
    Wildcard(String),
    Prefix(IpAddr, u8),
}

impl Pattern {
    /// Matches an address. An IPv4-mapped IPv6 address counts as IPv4. A wildcard is compared with the canonical text (RFC 5952
    /// for IPv6), ignoring case.
    pub fn matches(&self, client: IpAddr) -> bool {
        let client = client.to_canonical();
        match self {
            Self::Prefix(first, bits) => in_prefix(first.to_canonical(), *bits, client),
            Self::Wildcard(pattern) => {
                let mut text = AddressText::default();
                // The text of an address has at most 39 characters; `IpAddr` has no zone.
                write!(text, "{client}").is_ok() && wildcard(pattern.as_bytes(), text.as_bytes())
            }
        }
    }

    /// True if at least one address matches. A wildcard such as `127.0.0` matches none and is probably an error.
    pub fn fits_some_address(&self) -> bool {
        match self {
            Self::Prefix(..) => true,
            Self::Wildcard(pattern) => spelling::some_address_fits(pattern.as_bytes()),
        }
    }
}

/// Allow and deny lists. As in rinetd: if there are `allow` patterns, a client must match one of them; after that, any matching
/// `deny` refuses it. Global lists apply first, then the rule's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    pub allow: Vec<Pattern>,
    pub deny: Vec<Pattern>,
}

impl Access {
    pub fn admits(&self, client: IpAddr) -> bool {
        (self.allow.is_empty() || self.allow.iter().any(|pattern| pattern.matches(client)))
            && !self.deny.iter().any(|pattern| pattern.matches(client))
    }
}

fn in_prefix(first: IpAddr, bits: u8, client: IpAddr) -> bool {
    match (first, client) {
        (IpAddr::V4(first), IpAddr::V4(client)) => {
            let shift = 32_u32.saturating_sub(bits.into());
            (first.to_bits() ^ client.to_bits()).checked_shr(shift).unwrap_or(0) == 0
        }
        (IpAddr::V6(first), IpAddr::V6(client)) => {
            let shift = 128_u32.saturating_sub(bits.into());
            (first.to_bits() ^ client.to_bits()).checked_shr(shift).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// Greedy matching with one backtracking point, the last `*`: time is bounded by the product of the lengths for any pattern.
fn wildcard(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                back = Some((p + 1, t));
                p += 1;
            }
            Some(b'?') => {
                p += 1;
                t += 1;
            }
            Some(byte) if byte.eq_ignore_ascii_case(&text[t]) => {
                p += 1;
                t += 1;
            }
            _ => {
                let Some((after, from)) = back else { return false };
                back = Some((after, from + 1));
                p = after;
                t = from + 1;
            }
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// Text of an address, stored without a heap allocation per connection.
struct AddressText {
    bytes: [u8; 48],
    len: usize,
}

impl Default for AddressText {
    fn default() -> Self {
        Self { bytes: [0; 48], len: 0 }
    }
}

impl AddressText {
    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl std::fmt::Write for AddressText {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let end = self.len + text.len();
        self.bytes.get_mut(self.len..end).ok_or(std::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn glob(pattern: &str, client: &str) -> bool {
        Pattern::Wildcard(pattern.to_owned()).matches(client.parse().unwrap())
    }

    fn prefix(first: &str, bits: u8, client: &str) -> bool {
        Pattern::Prefix(first.parse().unwrap(), bits).matches(client.parse().unwrap())
    }

    #[test]
    fn star_matches_any_run_and_question_mark_one_character() {
        assert!(glob("*", "10.0.0.1"));
        assert!(glob("192.168.*", "192.168.7.9"));
        assert!(!glob("192.168.*", "192.169.7.9"));
        assert!(glob("10.0.0.?", "10.0.0.7"));
        assert!(!glob("10.0.0.?", "10.0.0.17"));
        assert!(glob("1*.*.5", "127.0.0.5"));
        assert!(!glob("1*.*.5", "127.0.0.51"));
        assert!(glob("10.0.0.1", "10.0.0.1"));
        assert!(!glob("10.0.0.1", "10.0.0.11"));
        assert!(!glob("", "10.0.0.1"));
    }

    #[test]
    fn mapped_address_counts_as_ipv4() {
        assert!(glob("10.*", "::ffff:10.1.2.3"));
        assert!(prefix("10.0.0.0", 8, "::ffff:10.1.2.3"));
    }

    #[test]
    fn ipv6_patterns_match_canonical_text_ignoring_case() {
        assert!(glob("2001:DB8::*", "2001:db8::1"));
        assert!(!glob("2001:db8:0:*", "2001:db8::1"));
    }

    #[test]
    fn prefix_compares_leading_bits() {
        assert!(prefix("10.0.0.0", 8, "10.255.0.1"));
        assert!(!prefix("10.0.0.0", 8, "11.0.0.1"));
        assert!(prefix("0.0.0.0", 0, "203.0.113.9"));
        assert!(!prefix("0.0.0.0", 0, "2001:db8::1"));
        assert!(prefix("10.0.0.1", 32, "10.0.0.1"));
        assert!(!prefix("10.0.0.1", 32, "10.0.0.0"));
        assert!(prefix("2001:db8::", 32, "2001:db8:ffff::1"));
        assert!(prefix("::", 0, "2001:db8:ffff::1"));
        assert!(!prefix("2001:db8::1", 128, "2001:db8::2"));
    }

    #[test]
    fn client_must_match_an_allow_and_no_deny() {
        let pattern = |text: &str| Pattern::Wildcard(text.to_owned());
        let access =
            Access { allow: vec![pattern("10.*"), pattern("127.*")], deny: vec![pattern("10.0.0.6")] };
        assert!(access.admits("10.0.0.5".parse().unwrap()));
        assert!(access.admits("127.0.0.1".parse().unwrap()));
        assert!(!access.admits("10.0.0.6".parse().unwrap()));
        assert!(!access.admits("192.0.2.1".parse().unwrap()));
        assert!(Access::default().admits("192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn pattern_with_many_stars_matches_in_bounded_time() {
        let pattern = format!("{}x", "*1".repeat(2000));
        assert!(!glob(&pattern, "111.111.111.111"));
    }
}
