//! Address ranges in FIRST-LAST notation, and their conversion to prefixes for peer rules.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use crate::server::Cidr;

/// Range of addresses of one family, from the first to the last. IPv4-mapped addresses count as IPv6, as in
/// coturn; otherwise `::ffff:0.0.0.0-::ffff:255.255.255.255` would cover all of IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IpRange {
    family: Family,
    first: u128,
    last: u128,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Family {
    V4,
    V6,
}

impl IpRange {
    #[must_use]
    pub fn new(first: IpAddr, last: IpAddr) -> Option<Self> {
        let ((family, first), (other, last)) = (place(first), place(last));
        (family == other && first <= last).then_some(Self { family, first, last })
    }

    /// Minimal set of prefixes that covers exactly these addresses.
    #[must_use]
    pub fn prefixes(&self) -> Vec<Cidr> {
        let mut prefixes = Vec::new();
        let mut first = self.first;
        loop {
            // The length of the next prefix is limited by the trailing zeros of the first address and by the
            // rest of the range.
            let room = (self.last - first).checked_add(1).map_or(128, u128::ilog2);
            let free = first.trailing_zeros().min(room).min(self.family.bits());
            prefixes.push(self.family.prefix(first, free));
            let size = 1_u128.checked_shl(free).unwrap_or(0);
            match first.checked_add(size) {
                Some(next) if size > 0 && next <= self.last => first = next,
                _ => return prefixes,
            }
        }
    }

    /// This range without `other`: zero, one or two ranges.
    fn without(&self, other: &Self) -> impl Iterator<Item = Self> {
        let apart = self.family != other.family || other.last < self.first || self.last < other.first;
        let below = (other.first > self.first).then(|| Self { last: other.first - 1, ..*self });
        let above = (other.last < self.last).then(|| Self { first: other.last + 1, ..*self });
        let left = if apart { [Some(*self), None] } else { [below, above] };
        left.into_iter().flatten()
    }
}

#[must_use]
pub fn union(ranges: &[IpRange]) -> Vec<IpRange> {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable();
    let mut union: Vec<IpRange> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match union.last_mut() {
            Some(last) if last.family == range.family && range.first <= last.last.saturating_add(1) => {
                last.last = last.last.max(range.last);
            }
            _ => union.push(range),
        }
    }
    union
}

#[must_use]
pub fn difference(ranges: &[IpRange], but: &[IpRange]) -> Vec<IpRange> {
    but.iter()
        .fold(ranges.to_vec(), |left, taken| left.iter().flat_map(|range| range.without(taken)).collect())
}

impl From<Cidr> for IpRange {
    fn from(Cidr { base, bits }: Cidr) -> Self {
        let (family, first) = place(base);
        let free = family.bits() - u32::from(bits).min(family.bits());
        let last = first | 1_u128.checked_shl(free).map_or(u128::MAX, |size| size - 1);
        Self { family, first, last }
    }
}

/// Unlike a [`Cidr`], a prefix may have host bits set, because other servers accept such prefixes.
impl FromStr for IpRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unclear = || {
            format!(
                "{text:?} is not an address range: expected for example 10.0.0.0-10.0.0.255, 10.0.0.0/24 or 2001:db8::1"
            )
        };
        let ip = |text: &str| text.trim().parse::<IpAddr>().map_err(|_| unclear());
        if let Some((first, last)) = text.split_once('-') {
            return Self::new(ip(first)?, ip(last)?).ok_or_else(unclear);
        }
        let Some((base, bits)) = text.split_once('/') else {
            let address = ip(text)?;
            return Self::new(address, address).ok_or_else(unclear);
        };
        let base = ip(base)?;
        let most = if base.is_ipv4() { 32 } else { 128 };
        let bits = bits.trim().parse::<u8>().ok().filter(|bits| *bits <= most).ok_or_else(unclear)?;
        Ok(Cidr { base: masked(base, bits), bits }.into())
    }
}

impl fmt::Display for IpRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.family.address(self.first), self.family.address(self.last));
        if first == last { first.fmt(f) } else { write!(f, "{first}-{last}") }
    }
}

impl Family {
    fn bits(self) -> u32 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "an IPv4 address has 32 bits")]
    fn address(self, bits: u128) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::from_bits(bits as u32).into(),
            Self::V6 => Ipv6Addr::from_bits(bits).into(),
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most 128")]
    fn prefix(self, first: u128, free: u32) -> Cidr {
        Cidr { base: self.address(first), bits: (self.bits() - free) as u8 }
    }
}

fn place(ip: IpAddr) -> (Family, u128) {
    match ip {
        IpAddr::V4(ip) => (Family::V4, ip.to_bits().into()),
        IpAddr::V6(ip) => (Family::V6, ip.to_bits()),
    }
}

fn masked(base: IpAddr, bits: u8) -> IpAddr {
    let mask = |most: u32| u128::MAX.checked_shl(most - u32::from(bits)).unwrap_or(0);
    match base {
        #[expect(clippy::cast_possible_truncation, reason = "the mask of an IPv4 address")]
        IpAddr::V4(ip) => Ipv4Addr::from_bits(ip.to_bits() & mask(32) as u32).into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & mask(128)).into(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prefixes(text: &str) -> Vec<String> {
        let range: IpRange = text.parse().expect("a range");
        range.prefixes().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_range_converts_to_the_fewest_prefixes() {
        assert_eq!(prefixes("10.0.0.0-10.255.255.255"), ["10.0.0.0/8"]);
        assert_eq!(prefixes("172.17.13.200"), ["172.17.13.200/32"]);
        assert_eq!(prefixes("0.0.0.0-255.255.255.255"), ["0.0.0.0/0"]);
        assert_eq!(prefixes("::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"), ["::/0"]);
        assert_eq!(
            prefixes("172.17.13.133-172.17.13.140"),
            ["172.17.13.133/32", "172.17.13.134/31", "172.17.13.136/30", "172.17.13.140/32"]
        );
        assert_eq!(prefixes("123::45"), ["123::45/128"]);
        assert_eq!(prefixes("10.1.2.3/8"), ["10.0.0.0/8"], "host bits are ignored");
        assert_eq!(prefixes("::ffff:10.0.0.0-::ffff:10.0.0.1"), ["::ffff:10.0.0.0/127"]);
        assert_eq!(prefixes("255.255.255.255"), ["255.255.255.255/32"]);
    }

    #[test]
    fn a_range_of_mapped_addresses_contains_no_ipv4_address() {
        let range: IpRange = "::ffff:0.0.0.0-::ffff:255.255.255.255".parse().expect("a range");
        assert!(range.prefixes().iter().all(|prefix| !prefix.contains(IpAddr::from([192, 0, 2, 7]))));
    }

    #[test]
    fn invalid_ranges_are_refused() {
        for text in
            ["", "10.0.0.9-10.0.0.1", "10.0.0.1-::1", "10.0.0.0/33", "host", "10.0.0.1-", "1.2.3.4/x", "*"]
        {
            assert!(text.parse::<IpRange>().is_err_and(|why| why.contains("10.0.0.0-10.0.0.255")), "{text}");
        }
    }

    #[test]
    fn a_difference_keeps_the_remaining_addresses() {
        let ranges =
            |texts: &[&str]| -> Vec<IpRange> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let left = |all: &[&str], but: &[&str]| -> Vec<String> {
            difference(&ranges(all), &ranges(but)).iter().map(ToString::to_string).collect()
        };
        assert_eq!(
            left(&["10.0.0.0/8"], &["10.1.0.0/16"]),
            ["10.0.0.0-10.0.255.255", "10.2.0.0-10.255.255.255"]
        );
        assert_eq!(left(&["10.0.0.0/8"], &["0.0.0.0/0"]), NOTHING);
        assert_eq!(left(&["10.0.0.0/8", "::1"], &["10.0.0.0", "::2"]), ["10.0.0.1-10.255.255.255", "::1"]);
        assert_eq!(left(&["0.0.0.0/0"], &["0.0.0.0", "255.255.255.255"]), ["0.0.0.1-255.255.255.254"]);
    }

    const NOTHING: &[&str] = &[];

    #[test]
    fn a_union_lists_each_address_once() {
        let ranges = ["10.0.1.0/24", "::1", "10.0.0.0/24", "10.0.0.7", "10.0.0.0/24", "::ffff:10.0.2.0"];
        let all: Vec<IpRange> = ranges.iter().map(|text| text.parse().unwrap()).collect();
        let shown: Vec<String> = union(&all).iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["10.0.0.0-10.0.1.255", "::1", "::ffff:10.0.2.0"]);
        assert!(union(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn prefixes_and_differences_contain_the_right_addresses(
            (a, b, c, d, probe) in any::<(u16, u16, u16, u16, u16)>()
        ) {
            let v6 = |low: u16| IpAddr::V6(Ipv6Addr::from_bits(u128::from(low) | 0x2001 << 112));
            let range = |one: u16, other: u16| IpRange::new(v6(one.min(other)), v6(one.max(other))).unwrap();
            let within = |one: u16, other: u16| (one.min(other)..=one.max(other)).contains(&probe);
            let left = difference(&[range(a, b)], &[range(c, d)]);
            let holding = left.iter().flat_map(IpRange::prefixes).filter(|prefix| prefix.contains(v6(probe))).count();
            prop_assert_eq!(holding, usize::from(within(a, b) && !within(c, d)));
        }

        #[test]
        fn a_prefix_is_a_range_of_one_prefix(bits in 0_u8..=32, base: u32) {
            let base = masked(Ipv4Addr::from_bits(base).into(), bits);
            prop_assert_eq!(IpRange::from(Cidr { base, bits }).prefixes(), vec![Cidr { base, bits }]);
        }

        #[test]
        fn parsing_any_text_does_not_panic(text in "\\PC{0,40}") {
            let _ = text.parse::<IpRange>();
        }
    }
}
