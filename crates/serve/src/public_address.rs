//! Where this machine is reached from outside, for machines whose public address none of their interfaces has: asked of the cloud's metadata
//! service, or of Kubernetes about the node. `turnpike serve` is then told by what stands in files, or on its command line.

mod cloud;
mod http;
mod kubernetes;

use std::{
    fmt, fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
};

/// Who is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressSource {
    /// The metadata service of the cloud.
    Metadata,
    /// Kubernetes, for the external addresses of this pod's node.
    Node,
    /// Kubernetes, for an annotation of this pod's node.
    Annotation(String),
}

impl FromStr for AddressSource {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "metadata" => Ok(Self::Metadata),
            None if text == "node" => Ok(Self::Node),
            Some(("annotation", key)) if !key.is_empty() => Ok(Self::Annotation(key.to_owned())),
            _ => Err("expected metadata, node or annotation:KEY"),
        }
    }
}

impl fmt::Display for AddressSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Metadata => f.write_str("the cloud's metadata service"),
            Self::Node => f.write_str("the external addresses of the Kubernetes node"),
            Self::Annotation(key) => write!(f, "annotation {key} of the Kubernetes node"),
        }
    }
}

/// Why it is not known; each message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublicAddressError {
    /// Somebody was asked in vain.
    #[error("{asked}: {why}")]
    Unknown {
        /// Who.
        asked: AddressSource,
        /// What happened.
        why: String,
    },
    /// Nobody outside could be reached from here.
    #[error("this machine has no default route, and so no address of its own to relay on")]
    NoRoute,
    /// A file.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicAddress {
    /// As `relay.addresses` has them.
    pub relay: Vec<String>,
    /// Of the node, where it is known.
    pub zone: Option<String>,
}

/// What somebody else knows of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Told {
    addresses: Vec<IpAddr>,
    zone: Option<String>,
}

impl PublicAddress {
    /// Asks.
    ///
    /// # Errors
    /// See [`PublicAddressError`].
    pub fn find(source: &AddressSource) -> Result<Self, PublicAddressError> {
        let own = turnpike_relay::route_addresses();
        if own.is_empty() {
            return Err(PublicAddressError::NoRoute);
        }
        let told = match source {
            AddressSource::Metadata => cloud::ask(),
            AddressSource::Node => kubernetes::ask(None),
            AddressSource::Annotation(key) => kubernetes::ask(Some(key)),
        };
        let unknown = |why| PublicAddressError::Unknown { asked: source.clone(), why };
        let Told { addresses, zone } = told.map_err(|trouble| unknown(trouble.to_string()))?;
        if addresses.is_empty() {
            return Err(unknown("it names no address".to_owned()));
        }
        Ok(Self { relay: paired(&own, &addresses), zone })
    }

    /// Writes the files `relay-addresses` and `zone`, for `TURNPIKE_RELAY_ADDRESSES_FILE` and `TURNPIKE_FLEET_ZONE_FILE`. What is not known is an
    /// empty file.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn write(&self, directory: &Path) -> Result<(), PublicAddressError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| PublicAddressError::Write { path, source }
        };
        fs::create_dir_all(directory).map_err(failed(directory))?;
        let zone = self.zone.clone().unwrap_or_default();
        for (name, text) in [("relay-addresses", self.relay.join("\n")), ("zone", zone)] {
            let path = directory.join(name);
            fs::write(&path, text + "\n").map_err(failed(&path))?;
        }
        Ok(())
    }
}

/// Each of our addresses with the outer one of its family, where that is another.
fn paired(own: &[IpAddr], outer: &[IpAddr]) -> Vec<String> {
    let of_family = |own: &IpAddr| outer.iter().find(|outer| outer.is_ipv4() == own.is_ipv4());
    let pair = |own: &IpAddr| match of_family(own) {
        Some(outer) if outer != own => format!("{own}={outer}"),
        _ => own.to_string(),
    };
    own.iter().map(pair).collect()
}

/// A name that a zone can have; anything else is none.
fn zone(text: &str) -> Option<String> {
    // Google's has the project in front: projects/123/zones/europe-west1-b.
    let name = text.trim().rsplit('/').next().unwrap_or_default();
    name.parse::<turnpike_fleet::NodeName>().ok().map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(all: &[&str]) -> Vec<IpAddr> {
        all.iter().map(|address| address.parse().expect("an address")).collect()
    }

    #[test]
    fn inner_addresses_are_paired_with_outer_ones_of_their_family() {
        let own = addresses(&["10.0.0.5", "2001:db8::5"]);
        assert_eq!(paired(&own, &addresses(&["203.0.113.5"])), ["10.0.0.5=203.0.113.5", "2001:db8::5"]);
        assert_eq!(
            paired(&own, &addresses(&["2001:db8::5", "203.0.113.5"])),
            ["10.0.0.5=203.0.113.5", "2001:db8::5"]
        );
        assert_eq!(paired(&addresses(&["203.0.113.5"]), &addresses(&["203.0.113.5"])), ["203.0.113.5"]);
    }

    #[test]
    fn a_zone_is_a_name_or_nothing() {
        assert_eq!(zone("eu-west-1a\n").as_deref(), Some("eu-west-1a"));
        assert_eq!(zone("projects/123/zones/europe-west1-b").as_deref(), Some("europe-west1-b"));
        assert_eq!((zone(""), zone("<html>")), (None, None));
    }

    #[test]
    fn what_is_found_is_written_as_serve_reads_it() {
        let directory = turnpike_testkit::Dir::new();
        let found = PublicAddress { relay: vec!["10.0.0.5=203.0.113.5".to_owned()], zone: None };
        let place = directory.path().join("place");
        found.write(&place).expect("our own directory");
        let read = |name| fs::read_to_string(place.join(name)).expect("it was written");
        assert_eq!(
            (read("relay-addresses").as_str(), read("zone").as_str()),
            ("10.0.0.5=203.0.113.5\n", "\n")
        );
    }

    #[test]
    fn sources_are_read_as_they_are_documented() {
        for (text, source) in [
            ("metadata", AddressSource::Metadata),
            ("node", AddressSource::Node),
            ("annotation:a/b", AddressSource::Annotation("a/b".to_owned())),
        ] {
            assert_eq!(text.parse(), Ok(source));
        }
        for bad in ["", "annotation", "annotation:", "node:x"] {
            assert!(bad.parse::<AddressSource>().is_err(), "{bad}");
        }
    }
}
