//! Browsers driven by tests.

mod browser;
mod driver;
mod page;

use std::net::IpAddr;

use crate::Serve;

pub use browser::{Browser, Chromium, Firefox};
pub use driver::{Devtools, Driver, Marionette};
pub use page::Page;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Over {
    Udp,
    Tcp,
    Tls,
}

impl Over {
    /// URI of the server (RFC 7065). Contains an address rather than `localhost`, because the server's ports differ between IPv4 and IPv6.
    pub fn uri<B: Browser>(self, serve: &Serve, family: IpAddr) -> String {
        let server = serve.address(family);
        match self {
            Self::Tls if B::TLS_WANTS_NAME => format!("turns:localhost:{}?transport=tcp", server.port()),
            Self::Udp => format!("turn:{server}?transport=udp"),
            Self::Tcp => format!("turn:{server}?transport=tcp"),
            Self::Tls => format!("turns:{server}?transport=tcp"),
        }
    }

    /// Name of the transport in `relayProtocol` (W3C webrtc-stats).
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
        }
    }
}
