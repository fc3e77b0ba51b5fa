//! Flags of `turnpike public-address`, and what it prints or writes.

use std::path::PathBuf;

use clap::Args;
use turnpike_serve::{AddressSource, PublicAddress, PublicAddressError};

/// `turnpike public-address`.
#[derive(Args)]
pub(crate) struct PublicAddressArgs {
    /// Who is asked: metadata (the cloud's metadata service), node (Kubernetes, for the external addresses of the node that the
    /// environment names in NODE_NAME), or annotation:KEY (Kubernetes, for that annotation of the node)
    #[arg(long, value_name = "SOURCE", default_value = "metadata")]
    from: AddressSource,

    /// Directory for the files relay-addresses and zone, which TURNPIKE_RELAY_ADDRESSES_FILE and TURNPIKE_FLEET_ZONE_FILE may name [default:
    /// the addresses go to standard output]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl PublicAddressArgs {
    /// The addresses, one a line, unless they went into a file.
    pub(crate) fn run(self) -> Result<Option<String>, PublicAddressError> {
        let found = PublicAddress::find(&self.from)?;
        match self.out {
            None => Ok(Some(found.relay.join("\n"))),
            Some(directory) => found.write(&directory).map(|()| None),
        }
    }
}

pub(crate) const PUBLIC_ADDRESS: &str = "\
Say where this machine is reached from outside, as relay.addresses has it: each of its addresses with the outer one of its family \
(LOCAL=PUBLIC), where a NAT stands in front as it does in most clouds.

The metadata services of AWS, Azure, Google, Hetzner, DigitalOcean and whoever has the paths of AWS are known. In a pod of Kubernetes the \
service account has to be allowed to get nodes.";

pub(crate) const PUBLIC_ADDRESS_EXAMPLES: &str = "\
Examples:
  turnpike public-address                                   (prints 10.0.0.5=203.0.113.5)
  turnpike public-address --out /run/turnpike/place
  TURNPIKE_RELAY_ADDRESSES_FILE=/run/turnpike/place/relay-addresses turnpike serve
  turnpike public-address --from node --out /run/turnpike/place
  turnpike public-address --from annotation:example.org/public-address --out /run/turnpike/place";
