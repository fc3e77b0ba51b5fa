//! Public address of a machine behind a 1:1 NAT, from the cloud's metadata service or from Kubernetes. The
//! result is passed to `turnpike serve` in files or on its command line.

mod cloud;
mod http;
mod kubernetes;

use std::{
    fmt, fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressSource {
    Metadata,
    /// External addresses of this pod's Kubernetes node.
    Node,
    /// An annotation of this pod's Kubernetes node.
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

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublicAddressError {
    #[error("{asked}: {why}")]
    Unknown { asked: AddressSource, why: String },
    #[error("no default route on this machine, so there is no address to relay on")]
    NoRoute,
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicAddress {
    /// Values for `relay.addresses`.
    pub relay: Vec<String>,
    pub zone: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SourceAnswer {
    addresses: Vec<IpAddr>,
    zone: Option<String>,
}

impl PublicAddress {
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
        let SourceAnswer { addresses, zone } = told.map_err(|trouble| unknown(trouble.to_string()))?;
        if addresses.is_empty() {
            return Err(unknown("no address in the response".to_owned()));
        }
        Ok(Self { relay: paired(&own, &addresses), zone })
    }

    /// Writes the files `relay-addresses` and `zone`, for `TURNPIKE_RELAY_ADDRESSES_FILE` and
    /// `TURNPIKE_FLEET_ZONE_FILE`. Files for unknown values are empty.
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

/// Pairs each local address with the public one of the same family, if they differ.
fn paired(own: &[IpAddr], outer: &[IpAddr]) -> Vec<String> {
    let of_family = |own: &IpAddr| outer.iter().find(|outer| outer.is_ipv4() == own.is_ipv4());
    let pair = |own: &IpAddr| match of_family(own) {
        Some(outer) if outer != own => format!("{own}={outer}"),
        _ => own.to_string(),
    };
    own.iter().map(pair).collect()
}

fn zone(text: &str) -> Option<String> {
    // Google prefixes the zone with the project: projects/123/zones/europe-west1-b.
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
    fn written_files_have_the_format_that_serve_reads() {
        let directory = turnpike_testkit::Dir::new();
        let found = PublicAddress { relay: vec!["10.0.0.5=203.0.113.5".to_owned()], zone: None };
        let place = directory.path().join("place");
        found.write(&place).expect("the directory is writable");
        let read = |name| fs::read_to_string(place.join(name)).expect("the file was written");
        assert_eq!(
            (read("relay-addresses").as_str(), read("zone").as_str()),
            ("10.0.0.5=203.0.113.5\n", "\n")
        );
    }

    #[test]
    fn documented_sources_are_accepted() {
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
