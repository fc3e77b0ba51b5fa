//! Rules of rinetd and oxidinetd, and the parts of rules that all formats have in common.

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

#[derive(Debug, Default)]
pub struct ForeignRules {
    pub drafts: Vec<Draft>,
    pub access: Access,
    /// File with one line per connection.
    pub connection_file: Option<LogFile>,
    pub pid_file: Option<PathBuf>,
    pub warnings: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LineFormat {
    /// rinetd's fields, separated by tabs.
    #[default]
    Rinetd,
    /// Common log format, rinetd's `logcommon`.
    Common,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFile {
    pub path: PathBuf,
    pub format: LineFormat,
}

#[derive(Clone, Debug)]
pub struct ForwardHost {
    pub services: Services,
    pub resolve: parts::Resolve,
}

impl ForwardHost {
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

    pub(super) fn machine(services: &str) -> ForwardHost {
        let resolve = |name: &str| match name {
            "localhost" => Ok(Some(std::net::Ipv4Addr::LOCALHOST.into())),
            "nowhere" => Ok(None),
            _ => Err(std::io::Error::other("unknown name in tests")),
        };
        ForwardHost { services: Services::parse(services), resolve }
    }
}
