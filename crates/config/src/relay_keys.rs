//! `relay.addresses`: local addresses, each with the external one that peers see, or `auto` to detect them.

use std::net::IpAddr;

use turnpike_convert::forward::parts::without_zone;
use turnpike_turn::server::RelayAddress;
use turnpike_wire::address::is_swapped;

use crate::key::{ValueKind, list_of};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelayPlace {
    At(RelayAddress),
    /// The detected address of the same family as this external address.
    Behind(IpAddr),
    /// The detected address of each family that has no other entry.
    Detected,
}

impl RelayPlace {
    #[must_use]
    pub fn fixed(&self) -> Option<RelayAddress> {
        match self {
            Self::At(address) => Some(*address),
            Self::Behind(_) | Self::Detected => None,
        }
    }

    /// All addresses in the entry: local and external.
    pub(crate) fn named(&self) -> impl Iterator<Item = IpAddr> {
        let both = match self {
            Self::At(RelayAddress { bind, external }) => [Some(*bind), *external],
            Self::Behind(external) => [Some(*external), None],
            Self::Detected => [None, None],
        };
        both.into_iter().flatten()
    }

    /// Address family of the entry; `None` if it depends on the other entries.
    fn is_ipv4(&self) -> Option<bool> {
        self.named().next().map(|ip| ip.is_ipv4())
    }
}

impl std::fmt::Display for RelayPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::At(RelayAddress { bind, external: None }) => write!(f, "{bind}"),
            Self::At(RelayAddress { bind, external: Some(external) }) => write!(f, "{bind}={external}"),
            Self::Behind(external) => write!(f, "auto={external}"),
            Self::Detected => f.write_str("auto"),
        }
    }
}

/// Returns true if some addresses must be detected.
#[must_use]
pub fn is_detected(places: &[RelayPlace]) -> bool {
    places.is_empty() || places.iter().any(|place| place.fixed().is_none())
}

/// Resolves the entries with the detected addresses `found`. Also returns the entries for which no address
/// of the right family was found. If there are no entries, all detected addresses are used.
#[must_use]
pub fn resolve(places: &[RelayPlace], found: &[IpAddr]) -> (Vec<RelayAddress>, Vec<RelayPlace>) {
    let lone = |bind| RelayAddress { bind, external: None };
    if places.is_empty() {
        return (found.iter().copied().map(lone).collect(), Vec::new());
    }
    let (mut addresses, mut missing) = (Vec::new(), Vec::new());
    for place in places {
        match place {
            RelayPlace::At(address) => addresses.push(*address),
            RelayPlace::Behind(external) => {
                match found.iter().find(|ip| ip.is_ipv4() == external.is_ipv4()) {
                    // The external address may itself be an address of this machine.
                    Some(bind) => addresses.push(RelayAddress {
                        bind: *bind,
                        external: Some(*external).filter(|external| external != bind),
                    }),
                    None => missing.push(*place),
                }
            }
            RelayPlace::Detected => {
                let is_free =
                    |ip: &&IpAddr| !places.iter().any(|place| place.is_ipv4() == Some(ip.is_ipv4()));
                addresses.extend(found.iter().filter(is_free).copied().map(lone));
            }
        }
    }
    (addresses, missing)
}

pub(crate) const ADDRESSES: ValueKind<Vec<RelayPlace>> = list_of!(
    "a list of \"LOCAL\" or, behind a NAT, \"LOCAL=PUBLIC\", unicast and both of one family; \"auto\" in place of LOCAL, or [], to detect it",
    place
);

fn place(text: &str) -> Result<RelayPlace, String> {
    match text.trim().split_once('=') {
        None if text.trim() == "auto" => Ok(RelayPlace::Detected),
        Some((local, public)) if local.trim() == "auto" => unicast(public).map(RelayPlace::Behind),
        _ => address(text).map(RelayPlace::At),
    }
}

pub(crate) fn address(text: &str) -> Result<RelayAddress, String> {
    if let Some((public, local)) = text.split_once('/')
        && let (Ok(public), Ok(local)) = (unicast(public), unicast(local))
    {
        let (local, public) = if is_swapped(local, public) { (public, local) } else { (local, public) };
        return Err(format!("coturn's PUBLIC/LOCAL is LOCAL=PUBLIC here: write {local}={public}"));
    }
    let (bind, external) = match text.split_once('=') {
        Some((bind, external)) => (unicast(bind)?, Some(unicast(external)?)),
        None => (unicast(text)?, None),
    };
    if external.is_some_and(|external| external.is_ipv4() != bind.is_ipv4()) {
        return Err("the external and the local address are of different families".to_owned());
    }
    if let Some(external) = external.filter(|external| is_swapped(bind, *external)) {
        return Err(format!("LOCAL comes first, and {external} is private: write {external}={bind}"));
    }
    Ok(RelayAddress { bind, external })
}

fn unicast(text: &str) -> Result<IpAddr, String> {
    without_zone(text.trim())?;
    let ip: IpAddr = text.trim().parse().map_err(|_| format!("{text:?} is not an IP address"))?;
    if ip.is_unspecified() || ip.is_multicast() {
        return Err("peers cannot send to an unspecified or multicast address".to_owned());
    }
    Ok(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(texts: &[&str]) -> Vec<RelayPlace> {
        texts.iter().map(|text| place(text).expect("a place")).collect()
    }

    fn resolved(texts: &[&str], found: &[&str]) -> (Vec<String>, Vec<String>) {
        let found: Vec<IpAddr> = found.iter().map(|ip| ip.parse().expect("an address")).collect();
        let (addresses, missing) = resolve(&places(texts), &found);
        let addresses = addresses.into_iter().map(|address| RelayPlace::At(address).to_string());
        (addresses.collect(), missing.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn auto_resolves_to_the_detected_address_of_a_family() {
        const NOTHING: [&str; 0] = [];
        let both = ["10.0.0.5", "2001:db8::5"];
        for (texts, found, expected, missing) in [
            (&[][..], &both[..], &both[..], &NOTHING[..]),
            (&["auto"], &both, &both, &[]),
            (&["auto=203.0.113.5"], &both, &["10.0.0.5=203.0.113.5"], &[]),
            (&["auto=203.0.113.5", "auto"], &both, &["10.0.0.5=203.0.113.5", "2001:db8::5"], &[]),
            (&["auto=203.0.113.5", "auto"], &["10.0.0.5"], &["10.0.0.5=203.0.113.5"], &[]),
            (&["auto", "10.0.0.6"], &both, &["2001:db8::5", "10.0.0.6"], &[]),
            (&["auto=203.0.113.5"], &["203.0.113.5"], &["203.0.113.5"], &[]),
            (&["auto=203.0.113.5", "auto"], &["2001:db8::5"], &["2001:db8::5"], &["auto=203.0.113.5"]),
        ] {
            let (addresses, without) = resolved(texts, found);
            assert_eq!((addresses, without), (owned(expected), owned(missing)), "{texts:?} {found:?}");
        }
    }

    fn owned(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn relay_address_entries_round_trip() {
        for text in ["10.0.0.5", "10.0.0.5=203.0.113.5", "auto", "auto=203.0.113.5", "auto=2001:db8::5"] {
            assert_eq!(place(text).map(|place| place.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn wrong_entries_suggest_the_right_ones() {
        for (text, why) in [
            ("203.0.113.5/10.0.0.5", "write 10.0.0.5=203.0.113.5"),
            ("10.0.0.5/203.0.113.5", "write 10.0.0.5=203.0.113.5"),
            (
                "203.0.113.5=10.0.0.5",
                "LOCAL comes first, and 10.0.0.5 is private: write 10.0.0.5=203.0.113.5",
            ),
            ("203.0.113.5=100.64.0.9", "write 100.64.0.9=203.0.113.5"),
            ("auto=turn.example.org", "\"turn.example.org\" is not an IP address"),
            ("auto=0.0.0.0", "unspecified"),
            ("10.0.0.5=2001:db8::5", "different families"),
            ("automatic", "\"automatic\" is not an IP address"),
        ] {
            assert!(place(text).is_err_and(|error| error.contains(why)), "{text}");
        }
    }
}
