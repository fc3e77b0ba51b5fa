//! Flags of `print-firewall`.

use std::path::PathBuf;

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use strum::VariantArray;
use turnpike_config::{Firewall, FirewallFormat, Mistakes};

use crate::{forward_args::ForwardArgs, serve_args::ServeArgs};

#[derive(Args)]
pub(crate) struct FirewallArgs {
    /// Use this file of forwarding rules instead: turnpike's own format, rinetd.conf or oxidinetd's
    #[arg(long, value_name = "FILE", conflicts_with = "ServeArgs")]
    forward: Option<PathBuf>,

    /// Output format
    #[arg(long, value_name = "FORMAT", default_value = "nftables", value_parser = format())]
    format: FirewallFormat,

    #[command(flatten)]
    serve: ServeArgs,
}

impl FirewallArgs {
    pub(crate) fn make(self) -> Result<String, Mistakes> {
        let firewall = match self.forward {
            Some(file) => Firewall::of_forwarder(&ForwardArgs::of_file(file).load()?.settings),
            // An unusable certificate does not change the ports.
            None => Firewall::of_server(&self.serve.into_sources().settings()?),
        };
        Ok(firewall.show(self.format))
    }
}

fn format() -> impl TypedValueParser<Value = FirewallFormat> {
    let names = FirewallFormat::VARIANTS.iter().map(|format| -> &'static str { format.into() });
    PossibleValuesParser::new(names).try_map(|name| name.parse::<FirewallFormat>())
}
