//! Rules of rinetd and oxidinetd, and the parts of rules that every format has in common.

pub mod draft;
pub mod oxidinetd;
pub mod parts;
pub mod rinetd;
mod services;

use std::{
    net::{IpAddr, ToSocketAddrs as _},
    path::PathBuf,
};

use turnpike_rules::Access;

use self::draft::Draft;
pub use self::services::Services;

/// The content of another forwarder's file.
#[derive(Debug, Default)]
pub struct ForeignRules {
    /// The rules.
    pub drafts: Vec<Draft>,
    /// Lists of clients for all rules.
    pub access: Access,
    /// The file with a line per connection.
    pub connection_file: Option<LogFile>,
    /// The file with the process ID.
    pub pid_file: Option<PathBuf>,
    /// Sentences for the log.
    pub warnings: Vec<String>,
}

/// How a line of the connection file looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LineFormat {
    /// rinetd's fields, separated by tabs.
    #[default]
    Rinetd,
    /// As web servers do, `logcommon` of rinetd.
    Common,
}

/// A connection file and its format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFile {
    /// The file.
    pub path: PathBuf,
    /// Its lines.
    pub format: LineFormat,
}

/// Names that a file may use, as this machine knows them.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Names of ports.
    pub services: Services,
    /// Names of addresses.
    pub resolve: parts::Resolve,
}

impl Machine {
    /// The machine that this process runs on.
    pub fn this() -> Self {
        let resolve = |name: &str| -> std::io::Result<Option<IpAddr>> {
            Ok((name, 0).to_socket_addrs()?.next().map(|address| address.ip()))
        };
        Self { services: Services::of_this_machine(), resolve }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Knows these services and `localhost`, and asks no name server.
    pub(super) fn machine(services: &str) -> Machine {
        let resolve = |name: &str| match name {
            "localhost" => Ok(Some(std::net::Ipv4Addr::LOCALHOST.into())),
            "nowhere" => Ok(None),
            _ => Err(std::io::Error::other("tests know no such name")),
        };
        Machine { services: Services::parse(services), resolve }
    }
}
