//! `[[alternate]]`: servers that clients are redirected to, and the table of its keys.

use std::net::{Ipv4Addr, SocketAddr};

use turnpike_convert::forward::parts::without_zone;
use turnpike_convert::toml_text::{list, quoted};
use turnpike_turn::server::{Alternate, AlternateWhen, Transport};

use turnpike_wire::names::server_name;

use super::{
    key::{ValueKind, named, settings},
    tables::KeyPosition,
};

settings! {
    AlternateSettings by ALTERNATE_KEYS {
        alternate: Alternate = nowhere(),
            reload "alternate.address" .address ADDRESS,
            reload "alternate.domain" .domain DOMAIN,
            reload "alternate.transports" .transports TRANSPORTS,
            reload "alternate.when" .when WHEN;
        place: KeyPosition = KeyPosition::default();
    }
}

/// Placeholder until the mandatory `alternate.address` is read.
fn nowhere() -> Alternate {
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    Alternate { address, domain: None, transports: Vec::new(), when: AlternateWhen::default() }
}

const ADDRESS: ValueKind<SocketAddr> = ValueKind::one(
    "\"ADDR:PORT\" of another server, unicast",
    |reader, node| reader.parsed(node, unicast),
    |address| quoted(&address.to_string()),
);

const DOMAIN: ValueKind<Option<String>> = ValueKind::one(
    "the host name in that server's certificate, such as \"turn2.example.org\"",
    |reader, node| reader.parsed(node, server_name).map(Some),
    |domain| domain.as_deref().map_or_else(String::new, quoted),
);

const TRANSPORTS: ValueKind<Vec<Transport>> = ValueKind::list(
    "a list of \"udp\", \"tcp\", \"tls\" and \"dtls\", or [] for all of them",
    |reader, node| reader.list(node, |reader, node| reader.parsed_as(node)),
    |transports| list(transports.iter().map(|transport| quoted(transport.into()))),
);

const WHEN: ValueKind<AlternateWhen> = named!(
    "\"drain\", \"full\" or \"always\"",
    "drain" => AlternateWhen::Drain,
    "full" => AlternateWhen::Full,
    "always" => AlternateWhen::Always,
);

fn unicast(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = without_zone(text.trim())?.parse().map_err(|_| "")?;
    if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
        return Err("clients cannot connect to this address".to_owned());
    }
    Ok(address)
}
