//! `[[alternate]]`: servers that clients are sent to, and the table of their keys.

use std::net::{Ipv4Addr, SocketAddr};

use turnpike_turn::server::{Alternate, AlternateWhen, Transport};

use super::{
    key::{
        KeySpec, scalar,
        show::{list, quoted},
    },
    realm_keys::server_name,
    tables::Place,
};

/// Another server, and where it was named.
#[derive(Clone, Debug, PartialEq)]
pub struct AlternateSettings {
    /// The server.
    pub alternate: Alternate,
    /// Where it stands.
    pub place: Place,
}

impl Default for AlternateSettings {
    fn default() -> Self {
        let alternate = Alternate {
            // Never used: the key must be there.
            address: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            domain: None,
            transports: Vec::new(),
            when: AlternateWhen::default(),
        };
        Self { alternate, place: Place::default() }
    }
}

/// The keys of one `[[alternate]]`.
pub(crate) static ALTERNATE_KEYS: &[KeySpec<AlternateSettings>] = &[
    scalar!(
        "alternate.address",
        reload: true,
        "\"ADDR:PORT\" of another server, unicast",
        |reader, node, settings| {
            settings.alternate.address = reader.parsed(node, unicast)?;
            Some(())
        },
        |settings| quoted(&settings.alternate.address.to_string()),
    ),
    scalar!(
        "alternate.domain",
        reload: true,
        "the host name in that server's certificate, such as \"turn2.example.org\"",
        |reader, node, settings| {
            settings.alternate.domain = Some(reader.parsed(node, server_name)?);
            Some(())
        },
        |settings| settings.alternate.domain.as_deref().map_or_else(String::new, quoted),
    ),
    KeySpec {
        path: "alternate.transports",
        expected: "a list of \"udp\", \"tcp\", \"tls\" and \"dtls\", [] for all of them",
        list: true,
        secret: false,
        reload: true,
        apply: |reader, node, settings| {
            settings.alternate.transports =
                reader.list(node, |reader, node| reader.parsed(node, transport))?;
            Some(())
        },
        show: |settings| {
            list(settings.alternate.transports.iter().map(|transport| quoted(transport_name(*transport))))
        },
    },
    scalar!(
        "alternate.when",
        reload: true,
        "\"drain\", \"full\" or \"always\"",
        |reader, node, settings| {
            settings.alternate.when = reader.parsed(node, when)?;
            Some(())
        },
        |settings| quoted(when_name(settings.alternate.when)),
    ),
];

fn unicast(text: &str) -> Result<SocketAddr, &'static str> {
    let address: SocketAddr = text.trim().parse().map_err(|_| "")?;
    if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
        return Err("no client could connect there");
    }
    Ok(address)
}

const TRANSPORTS: [(Transport, &str); 4] =
    [(Transport::Udp, "udp"), (Transport::Tcp, "tcp"), (Transport::Tls, "tls"), (Transport::Dtls, "dtls")];

fn transport(text: &str) -> Result<Transport, &'static str> {
    TRANSPORTS.iter().find(|(_, name)| *name == text).map(|(transport, _)| *transport).ok_or("")
}

fn transport_name(transport: Transport) -> &'static str {
    TRANSPORTS.iter().find(|(known, _)| *known == transport).map_or("", |(_, name)| name)
}

fn when(text: &str) -> Result<AlternateWhen, &'static str> {
    match text {
        "drain" => Ok(AlternateWhen::Drain),
        "full" => Ok(AlternateWhen::Full),
        "always" => Ok(AlternateWhen::Always),
        _ => Err(""),
    }
}

const fn when_name(when: AlternateWhen) -> &'static str {
    match when {
        AlternateWhen::Drain => "drain",
        AlternateWhen::Full => "full",
        AlternateWhen::Always => "always",
    }
}
