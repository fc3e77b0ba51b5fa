//! `[[alternate]]`: servers that clients are sent to, and the table of their keys.

use std::net::{Ipv4Addr, SocketAddr};

use turnpike_turn::server::{Alternate, AlternateWhen, Transport};

use super::{
    key::{
        KeySpec, Kind, field, named,
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
    field!("alternate.address", reload: true, ADDRESS, alternate.address),
    field!("alternate.domain", reload: true, DOMAIN, alternate.domain),
    field!("alternate.transports", reload: true, TRANSPORTS, alternate.transports),
    field!("alternate.when", reload: true, WHEN, alternate.when),
];

const ADDRESS: Kind<SocketAddr> = Kind {
    expected: "\"ADDR:PORT\" of another server, unicast",
    list: false,
    secret: false,
    read: |reader, node| reader.parsed(node, unicast),
    show: |address| quoted(&address.to_string()),
};

const DOMAIN: Kind<Option<String>> = Kind {
    expected: "the host name in that server's certificate, such as \"turn2.example.org\"",
    list: false,
    secret: false,
    read: |reader, node| reader.parsed(node, server_name).map(Some),
    show: |domain| domain.as_deref().map_or_else(String::new, quoted),
};

const TRANSPORTS: Kind<Vec<Transport>> = Kind {
    expected: "a list of \"udp\", \"tcp\", \"tls\" and \"dtls\", [] for all of them",
    list: true,
    secret: false,
    read: |reader, node| reader.list(node, |reader, node| reader.parsed_as(node)),
    show: |transports| list(transports.iter().map(|transport| quoted(transport.into()))),
};

const WHEN: Kind<AlternateWhen> = named!(
    "\"drain\", \"full\" or \"always\"",
    "drain" => AlternateWhen::Drain,
    "full" => AlternateWhen::Full,
    "always" => AlternateWhen::Always,
);

fn unicast(text: &str) -> Result<SocketAddr, &'static str> {
    let address: SocketAddr = text.trim().parse().map_err(|_| "")?;
    if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
        return Err("no client could connect there");
    }
    Ok(address)
}
