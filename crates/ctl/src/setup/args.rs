//! Flags of `turnpike setup`. Each question has a flag that answers it in advance.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use clap::Args;
use rustix::process::geteuid;
use turnpike_wire::address::socket_address;

use crate::setup::answers::{CertificateSource, ClientAccess, HostName, HttpsPort, OrNone, RelayPorts};

/// Configuration of the packaged service.
pub(crate) const SERVICE_CONFIG: &str = "/etc/turnpike/turnpike.toml";

const QUESTIONS: &str = "Answers";

#[derive(Debug, Args)]
pub struct SetupArgs {
    /// Configuration file to write [default: /etc/turnpike/turnpike.toml for root if that directory exists, else turnpike.toml]
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// DNS name of this server [default: none]
    #[arg(long, value_name = "NAME|none", help_heading = QUESTIONS)]
    pub(crate) name: Option<OrNone<HostName>>,

    /// Certificate: automatic, none, or a file with the chain (PEM) [default: automatic with a name]
    ///
    /// With automatic, the server obtains and renews a certificate from Let's Encrypt; you accept its terms of service. Files below
    /// /etc/letsencrypt/live are copied for the service, now and at each renewal
    #[arg(long, value_name = "automatic|none|FILE", help_heading = QUESTIONS)]
    pub(crate) certificate: Option<CertificateSource>,

    /// Private key of the certificate (PEM, not encrypted) [default: privkey.pem in the directory of the certificate]
    #[arg(long, value_name = "FILE", help_heading = QUESTIONS)]
    pub(crate) key: Option<PathBuf>,

    /// Email address for notices from the certificate authority [default: none]
    #[arg(long, value_name = "ADDRESS", help_heading = QUESTIONS)]
    pub(crate) email: Option<String>,

    /// Access for users: secret, api or user:NAME [default: secret]
    ///
    /// secret: an application derives credentials from a shared secret, like coturn's use-auth-secret. api: an application requests them
    /// over HTTP, with a key from `turnpike key add`. user:NAME: one user with a password
    #[arg(long, value_name = "KIND", help_heading = QUESTIONS)]
    pub(crate) access: Option<ClientAccess>,

    /// Listen on port 443 too: yes, no, or the address of a web server to share it with
    ///
    /// A web server gets the connections for other names, each with a PROXY header [default: yes with a certificate if the port is free]
    #[arg(long, value_name = "yes|no|ADDR:PORT", help_heading = QUESTIONS)]
    pub(crate) port_443: Option<HttpsPort>,

    /// Public address of a NAT in front of this machine
    ///
    /// [default: detected from the cloud's metadata service or the DNS name]
    #[arg(long, value_name = "IP|none", help_heading = QUESTIONS)]
    pub(crate) public_address: Option<OrNone<IpAddr>>,

    /// First and last relay port [default: 49152-65535]
    #[arg(long, value_name = "A-B", help_heading = QUESTIONS)]
    pub(crate) relay_ports: Option<RelayPorts>,

    /// Listen on this address over UDP and TCP; repeat for several [default: port 3478 of all addresses]
    #[arg(long, value_name = "ADDR:PORT", value_parser = socket_address, help_heading = QUESTIONS)]
    pub(crate) listen: Vec<SocketAddr>,

    /// Start the service, or restart it, without asking
    #[arg(long)]
    pub(crate) start: bool,

    /// Probe from another machine as well, over SSH; turnpike must be installed there
    #[arg(long, value_name = "[USER@]HOST")]
    pub(crate) helper: Option<String>,

    /// Replace an edited configuration file; the old one is kept as FILE.bak
    #[arg(long)]
    pub(crate) force: bool,

    /// Print the file on standard output and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

impl SetupArgs {
    pub(crate) fn config(&self) -> io::Result<PathBuf> {
        let has_service_config = || is_root() && Path::new(SERVICE_CONFIG).parent().is_some_and(Path::is_dir);
        let config = match &self.config {
            Some(config) => config,
            None if has_service_config() => Path::new(SERVICE_CONFIG),
            None => Path::new("turnpike.toml"),
        };
        std::path::absolute(config)
    }
}

pub(crate) fn is_root() -> bool {
    geteuid().is_root()
}
