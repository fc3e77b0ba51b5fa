//! Automata for the text of addresses, which determine whether a pattern can match any address at all.
//!
//! IPv4 is in dotted decimal notation. IPv6 is in the canonical notation of RFC 5952, except IPv4-mapped addresses, which are
//! compared as IPv4.

use hashbrown::HashSet;

pub(super) fn some_address_fits(pattern: &[u8]) -> bool {
    search(pattern, [V4::default()], V4::after, V4::is_address)
        || search(pattern, V6::starts(), V6::after, V6::is_address)
}

/// Explores all reachable pairs of pattern position and automaton state: a few hundred per byte of the pattern.
fn search<S: Copy + Eq + std::hash::Hash>(
    pattern: &[u8],
    starts: impl IntoIterator<Item = S>,
    after: impl Fn(S, u8) -> Option<S>,
    is_end: impl Fn(S) -> bool,
) -> bool {
    const ALPHABET: &[u8] = b"0123456789abcdef.:";
    let mut open: Vec<(usize, S)> = starts.into_iter().map(|state| (0, state)).collect();
    let mut seen: HashSet<(usize, S), foldhash::fast::RandomState> = open.iter().copied().collect();
    while let Some((at, state)) = open.pop() {
        let mut reach = |next: (usize, S)| {
            if seen.insert(next) {
                open.push(next);
            }
        };
        match pattern.get(at) {
            None if is_end(state) => return true,
            None => {}
            Some(b'*') => {
                reach((at + 1, state));
                ALPHABET.iter().filter_map(|byte| after(state, *byte)).for_each(|next| reach((at, next)));
            }
            Some(b'?') => {
                ALPHABET.iter().filter_map(|byte| after(state, *byte)).for_each(|next| reach((at + 1, next)));
            }
            Some(byte) => {
                after(state, byte.to_ascii_lowercase()).into_iter().for_each(|next| reach((at + 1, next)));
            }
        }
    }
    false
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
struct V4 {
    octet: u8,
    value: Option<u8>,
}

impl V4 {
    fn after(self, byte: u8) -> Option<Self> {
        match (byte, self.value) {
            (b'.', Some(_)) if self.octet < 3 => Some(Self { octet: self.octet + 1, value: None }),
            (b'0'..=b'9', None) => Some(Self { value: Some(byte - b'0'), ..self }),
            // Octets have no leading zeros.
            (b'0'..=b'9', Some(value @ 1..)) => {
                let value = value.checked_mul(10)?.checked_add(byte - b'0')?;
                Some(Self { value: Some(value), ..self })
            }
            _ => None,
        }
    }

    fn is_address(self) -> bool {
        self.octet == 3 && self.value.is_some()
    }
}

/// Position in the text of an IPv6 address in which `::` replaces certain groups.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct V6 {
    first: u8,
    /// Number of groups that `::` replaces; 0 if there is no `::`.
    count: u8,
    /// Current group, from 0 to 8.
    group: u8,
    text: HexGroup,
    /// Number of consecutive zero groups before this one.
    zeros: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum HexGroup {
    Empty,
    /// Number of colons of `::` still expected.
    Due(u8),
    Zero,
    /// Number of digits read, and whether all are `f`.
    Digits(u8, bool),
}

impl V6 {
    fn starts() -> impl Iterator<Item = Self> {
        let places = (0..8_u8).flat_map(|first| (2..=8 - first).map(move |count| (first, count)));
        places.chain([(u8::MAX, 0)]).map(|(first, count)| {
            let text = if first == 0 { HexGroup::Due(2) } else { HexGroup::Empty };
            Self { first, count, group: 0, text, zeros: 0 }
        })
    }

    fn after(self, byte: u8) -> Option<Self> {
        let digit = byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        match (self.text, byte) {
            (HexGroup::Due(2), b':') => Some(Self { text: HexGroup::Due(1), ..self }),
            (HexGroup::Due(_), b':') => {
                Some(Self { group: self.first + self.count, text: HexGroup::Empty, zeros: 0, ..self })
            }
            (HexGroup::Empty, b'0') if self.group < 8 => Some(Self { text: HexGroup::Zero, ..self }),
            (HexGroup::Empty, _) if digit && self.group < 8 => {
                Some(Self { text: HexGroup::Digits(1, byte == b'f'), ..self })
            }
            (HexGroup::Digits(len @ ..4, is_f), _) if digit => {
                Some(Self { text: HexGroup::Digits(len + 1, is_f && byte == b'f'), ..self })
            }
            (HexGroup::Zero | HexGroup::Digits(..), b':') if self.group < 7 => {
                self.closed().map(Self::entered)
            }
            _ => None,
        }
    }

    fn is_address(self) -> bool {
        match self.text {
            HexGroup::Zero | HexGroup::Digits(..) => self.group == 7 && self.closed().is_some(),
            HexGroup::Empty => self.group == 8,
            HexGroup::Due(_) => false,
        }
    }

    /// State after a group; `None` if the canonical text would have `::` elsewhere: it replaces the
    /// longest run of zeros, or the first of several equally long runs.
    fn closed(self) -> Option<Self> {
        let is_zero = self.text == HexGroup::Zero;
        let follows = self.count > 0 && self.group == self.first + self.count;
        let precedes = self.count > 0 && self.group + 1 == self.first;
        let is_mapped =
            (self.first, self.count, self.group, self.text) == (0, 5, 5, HexGroup::Digits(4, true));
        let zeros = if is_zero { self.zeros + 1 } else { 0 };
        let most = match self.count {
            0 => 1,
            count if self.group < self.first => count - 1,
            count => count,
        };
        let is_canonical = zeros <= most && !(is_zero && (follows || precedes)) && !is_mapped;
        is_canonical.then_some(Self { zeros, group: self.group + 1, ..self })
    }

    /// State after the colon that follows a group.
    fn entered(self) -> Self {
        let text = if self.group == self.first { HexGroup::Due(1) } else { HexGroup::Empty };
        Self { text, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv6Addr};

    use proptest::prelude::*;

    use super::some_address_fits;

    fn fits(pattern: &str) -> bool {
        some_address_fits(pattern.as_bytes())
    }

    #[test]
    fn patterns_that_fit_no_address_are_found() {
        for pattern in [
            "127.0.0",
            "127",
            "127.0.0.",
            "127.0.0.*.*",
            "127.0.0.01",
            "999.0.0.1",
            "256.*",
            "1.2.3.4.*",
            "0000:*",
            "2001:0db8:*",
            "::ffff:127.*",
            "1:0:0:1:*:*:*:*:*",
            "0:0:0:0:0:*",
            "2001:db8::1::*",
            "fe80::0:*",
            "12345:*",
            "",
            "a",
        ] {
            assert!(!fits(pattern), "{pattern}");
        }
    }

    #[test]
    fn patterns_that_fit_some_address_are_found() {
        for pattern in [
            "*",
            "127.0.0.1",
            "127.0.0.*",
            "127.*",
            "*.1",
            "1*",
            "????.*",
            "2??.*",
            "::",
            "::1",
            "fe80:*",
            "FE80:*",
            "*::*",
            "2001:db8:0:*",
            "2001:db8:0:0:*",
            "0:*",
            "::ffff:0:0:*",
            "*:ffff",
            "1:0:0:2::",
            "?:?:?:?:?:?:?:?",
        ] {
            assert!(fits(pattern), "{pattern}");
        }
    }

    /// IPv6 addresses in which many groups are zero, so that all forms of `::` occur.
    fn address() -> impl Strategy<Value = IpAddr> {
        let group = prop_oneof![Just(0_u16), Just(0xffff), any::<u16>(), 0_u16..16];
        let v6 =
            prop::array::uniform8(group).prop_map(|groups| IpAddr::V6(Ipv6Addr::from(groups)).to_canonical());
        prop_oneof![any::<u32>().prop_map(|bits| IpAddr::V4(bits.into())), v6]
    }

    proptest! {
        #[test]
        fn every_address_text_fits_even_with_parts_replaced_by_stars(
            address in address(),
            stars in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..6), 0..4),
        ) {
            let mut text = address.to_string();
            for (at, len) in stars {
                let at = at.index(text.len());
                let end = (at + len).min(text.len());
                text.replace_range(at..end, "*");
            }
            prop_assert!(fits(&text), "{}", text);
        }

        #[test]
        fn pattern_without_stars_fits_only_if_it_is_an_address(text in "[0-2f]{1,3}([.:]{1,2}[0-2f]{1,3}){2,7}|::([01f]{1,2}:){0,6}[0-2]") {
            let canonical = text.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().to_string() == text);
            prop_assert_eq!(fits(&text), canonical, "{}", text);
        }
    }
}
