//! Flags and output of `turnpike public-address`.

use std::{net::IpAddr, path::PathBuf};

use clap::Args;
use turnpike_serve::{AddressSource, PublicAddress, PublicAddressError};

#[derive(Args)]
pub(crate) struct PublicAddressArgs {
    /// Source of the address: metadata, node or annotation:KEY
    ///
    /// metadata asks the cloud's metadata service, node asks Kubernetes for the external addresses of the node named in NODE_NAME, and
    /// annotation:KEY reads that annotation of the node
    #[arg(long, value_name = "SOURCE", default_value = "metadata")]
    from: AddressSource,

    /// Write the files relay-addresses and zone to this directory
    ///
    /// Set TURNPIKE_RELAY_ADDRESSES_FILE and TURNPIKE_FLEET_ZONE_FILE to these files [default: print the addresses on standard output]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl PublicAddressArgs {
    /// Returns the addresses, one per line, unless they were written to files.
    pub(crate) fn run(self) -> Result<Option<String>, PublicAddressError> {
        let found = PublicAddress::find(&self.from)?;
        match self.out {
            None => Ok(Some(found.relay.join("\n"))),
            Some(directory) => found.write(&directory).map(|()| None),
        }
    }
}

/// IPv4 address that the metadata service maps to this machine, if there is one.
pub(crate) fn of_cloud() -> Option<IpAddr> {
    let found = PublicAddress::find(&AddressSource::Metadata).ok()?;
    found.relay.iter().find_map(|pair| pair.split_once('=')?.1.parse().ok())
}

pub(crate) const PUBLIC_ADDRESS: &str = "\
Print the public address of this machine, in the form of relay.addresses: LOCAL=PUBLIC for each address behind a NAT, as in most clouds.

Supports the metadata services of AWS (and compatible ones), Azure, Google, Hetzner and DigitalOcean. In a Kubernetes pod, the service \
account needs permission to get nodes.";

pub(crate) const PUBLIC_ADDRESS_EXAMPLES: &str = "\
Examples:
  turnpike public-address                                   (prints 10.0.0.5=203.0.113.5)
  turnpike public-address --out /run/turnpike/place
  TURNPIKE_RELAY_ADDRESSES_FILE=/run/turnpike/place/relay-addresses turnpike serve
  turnpike public-address --from node --out /run/turnpike/place
  turnpike public-address --from annotation:example.org/public-address --out /run/turnpike/place";
