//! The table of all keys of `serve`. Files, environment, flags,
//! `check-config` and reload all work from this table, so that a key exists everywhere or nowhere.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::Path,
};

use turnpike_relay::RelayAddress;
use turnpike_turn::server::{AllowRule, Cidr};

use super::{
    CertificateFiles, Settings, StoredKey, User, UserSecret, discovery_keys,
    key::{
        KeySpec, Kind, field, kind, number, scalar,
        show::{list, quoted, strings},
    },
    oauth_keys,
    read::Reader,
    source::{Node, Value},
    store_keys,
};
use crate::{Secret, secret::MASK};

/// All keys, section by section, in the order in which they are shown.
pub(crate) static KEYS: &[KeySpec<Settings>] = &[
    field!("server.listen", reload: false, ADDRESSES, listen),
    field!("server.tcp", reload: false, kind::SWITCH, tcp),
    field!("server.proxy_protocol_from", reload: false, CIDRS, proxy_protocol_from),
    field!("server.realm", reload: true, REALM, realm),
    scalar!(
        "server.software",
        reload: true,
        "a name of at most 127 characters, \"\" to send none",
        |reader, node, settings| {
            let software = reader.text(node)?;
            if software.chars().count() > 127 || software.contains(char::is_control) {
                return reader.refuse(node, None);
            }
            settings.software = software;
            Some(())
        },
        |settings| quoted(&settings.software),
    ),
    field!("server.workers", reload: false, kind::WORKERS, workers),
    field!("server.datapath", reload: false, kind::DATAPATH, datapath),
    number!("server.busy_poll_us", reload: false, "microseconds", 0..=1000, busy_poll_us),
    field!("tls.listen", reload: false, ADDRESSES, tls_listen, expected: SECURE_ADDRESSES),
    field!("tls.only", reload: false, kind::SWITCH, tls_only),
    field!(
        "tls.cert",
        reload: true,
        kind::FILE,
        tls_cert,
        expected: "the path of a PEM file with the certificate chain, \"\" for none",
    ),
    field!(
        "tls.key",
        reload: true,
        kind::FILE,
        tls_key,
        expected: "the path of a PEM file with the private key, \"\" for none",
    ),
    field!("tls.certificates", reload: true, CERTIFICATES, tls_certificates),
    field!("dtls.listen", reload: false, ADDRESSES, dtls_listen, expected: SECURE_ADDRESSES),
    field!("relay.addresses", reload: false, RELAY_ADDRESSES, relay_addresses),
    scalar!(
        "relay.ports",
        reload: false,
        "\"A-B\", ports 1 to 65535, at least 2 of them (EVEN-PORT reserves pairs), such as \"49152-65535\"",
        |reader, node, settings| {
            settings.ports = reader.parsed(node, port_range)?;
            Some(())
        },
        |settings| quoted(&format!("{}-{}", settings.ports.start(), settings.ports.end())),
    ),
    number!("relay.listener_buffer", reload: false, "bytes", 4096..=1_073_741_824, listener_buffer),
    number!("relay.buffer", reload: false, "bytes", 4096..=1_073_741_824, relay_buffer),
    field!("relay.rfc5766_channels", reload: true, kind::SWITCH, rfc5766_channels),
    field!("relay.tcp", reload: true, kind::SWITCH, relay_tcp),
    field!("relay.mobility", reload: true, kind::SWITCH, mobility),
    field!("auth.required", reload: true, kind::SWITCH, auth_required),
    field!("auth.users", reload: true, USERS, users),
    field!("auth.secrets", reload: true, SECRETS, secrets),
    number!("auth.nonce_lifetime", reload: true, "seconds", 60..=86_400, nonce_lifetime),
    field!("auth.allow_md5", reload: true, kind::SWITCH, allow_md5),
    oauth_keys::SERVER_NAME,
    number!("oauth.skew", reload: true, "seconds", 0..=300, oauth.skew),
    field!("oauth.key", reload: true, oauth_keys::KEYS, oauth.keys),
    field!("store.url", reload: true, store_keys::URL, store.url),
    field!("store.state", reload: false, store_keys::STATE, store.state),
    number!("store.connections", reload: true, "a number of connections", 1..=256, store.connections),
    number!("store.deadline", reload: true, "seconds", 1..=8, store.deadline),
    field!("store.unavailable", reload: true, store_keys::UNAVAILABLE, store.unavailable),
    number!("store.refresh", reload: true, "seconds", 1..=3600, store.refresh),
    number!("store.cache_users", reload: true, "a number of users", 1..=10_000_000, store.cache_users),
    number!("store.cache_lifetime", reload: true, "seconds", 1..=86_400, store.cache_lifetime),
    number!("store.cache_negative", reload: true, "seconds", 1..=3600, store.cache_negative),
    number!("store.cache_stale", reload: true, "seconds", 0..=31_536_000, store.cache_stale),
    field!("store.sha256", reload: true, kind::SWITCH, store.sha256),
    number!("limits.allocations", reload: false, "a number", 1..=1_000_000, max_allocations),
    number!("limits.allocations_per_user", reload: false, "a number", 1..=1_000_000, max_allocations_per_user),
    number!("limits.permissions", reload: true, "a number per allocation", 1..=65_535, max_permissions),
    scalar!(
        "limits.channels",
        reload: true,
        "a number per allocation, 1 to 4096 (RFC 8656 has the numbers 0x4000 to 0x4FFF)",
        |reader, node, settings| {
            settings.max_channels = reader.integer(node, &(1..=4096))?;
            Some(())
        },
        |settings| settings.max_channels.to_string(),
    ),
    number!("limits.peer_connections", reload: true, "a number", 1..=1_000_000, max_peer_connections),
    number!(
        "limits.peer_connections_per_allocation",
        reload: true,
        "a number",
        1..=65_536,
        max_peer_connections_per_allocation
    ),
    number!(
        "limits.peer_connections_per_user",
        reload: true,
        "a number",
        1..=1_000_000,
        max_peer_connections_per_user
    ),
    number!("limits.idle_connections", reload: false, "a number", 1..=1_000_000, max_idle_connections),
    number!(
        "limits.idle_connections_per_address",
        reload: false,
        "a number",
        1..=1_000_000,
        max_idle_connections_per_address
    ),
    number!("limits.half_open", reload: false, "a number of DTLS handshakes", 1..=1_000_000, max_half_open),
    number!(
        "limits.half_open_per_network",
        reload: false,
        "a number of DTLS handshakes",
        1..=1_000_000,
        max_half_open_per_network
    ),
    number!("limits.first_message", reload: false, "seconds", 1..=3600, first_message_timeout),
    number!("limits.idle", reload: false, "seconds", 1..=86_400, idle_timeout),
    number!("limits.stream_queue", reload: false, "bytes", 65_540..=1_073_741_824, stream_queue),
    number!("limits.default_lifetime", reload: true, "seconds", 60..=86_400, default_lifetime),
    number!("limits.max_lifetime", reload: true, "seconds", 60..=86_400, max_lifetime),
    field!("peers.allow", reload: true, ALLOW_RULES, allow),
    field!("peers.deny", reload: true, CIDRS, deny),
    field!(
        "nat_discovery.addresses",
        reload: false,
        RELAY_ADDRESSES,
        discovery.addresses,
        expected: "[], or two addresses of this machine for each family, \"IP\" or \"IP=EXTERNAL\", unicast",
    ),
    field!("nat_discovery.ports", reload: false, discovery_keys::PORTS, discovery.ports),
    number!(
        "nat_discovery.requests_per_source",
        reload: true,
        "requests a second",
        1..=1_000_000,
        discovery.per_source
    ),
    number!("nat_discovery.requests", reload: true, "requests a second", 1..=1_000_000, discovery.total),
    field!("admin.listen", reload: false, kind::ADMIN, admin),
    field!("admin.hosts", reload: false, kind::HOSTS, admin_hosts),
    field!("log.level", reload: false, kind::LOG_LEVEL, log_level),
    field!("log.format", reload: false, kind::LOG_FORMAT, log_format),
    number!("shutdown.deadline", reload: true, "seconds", 0..=86_400, shutdown_deadline),
];

/// Where to listen.
pub(super) const ADDRESSES: Kind<Vec<SocketAddr>> = Kind {
    expected: "a list of \"ADDR:PORT\" such as [\"0.0.0.0:3478\", \"[::]:3478\"]",
    list: true,
    secret: false,
    read: |reader, node| reader.list(node, |reader, node| reader.parsed_as(node)),
    show: |addresses| strings(addresses),
};

/// The same, with the port that TURN has for TLS and DTLS.
const SECURE_ADDRESSES: &str = "a list of \"ADDR:PORT\" such as [\"0.0.0.0:5349\", \"[::]:5349\"]";

/// REALM (RFC 8489 section 14.9: less than 128 characters).
pub(super) const REALM: Kind<String> = Kind {
    expected: "a name of 1 to 127 characters without control characters, \" or \\",
    list: false,
    secret: false,
    read: |reader, node| {
        let realm = reader.text(node)?;
        if !is_realm(&realm) {
            return reader.refuse(node, None);
        }
        Some(realm)
    },
    show: |realm| quoted(realm),
};

const CERTIFICATES: Kind<Vec<CertificateFiles>> = Kind {
    expected: "a list of { cert = \"FILE\", key = \"FILE\" }",
    list: true,
    secret: false,
    read: |reader, node| reader.list(node, certificate_files),
    show: |all| {
        let shown = |path: &Path| quoted(&path.display().to_string());
        list(
            all.iter()
                .map(|files| format!("{{ cert = {}, key = {} }}", shown(&files.cert), shown(&files.key))),
        )
    },
};

/// Addresses of this machine, each with the one that others see.
const RELAY_ADDRESSES: Kind<Vec<RelayAddress>> = Kind {
    expected: "a list of \"IP\" or \"IP=EXTERNAL\", unicast, both of one family, [] to detect them",
    list: true,
    secret: false,
    read: |reader, node| reader.list(node, |reader, node| reader.parsed(node, relay_address)),
    show: |addresses| {
        list(addresses.iter().map(|address| match address.external {
            Some(external) => quoted(&format!("{}={external}", address.bind)),
            None => quoted(&address.bind.to_string()),
        }))
    },
};

/// Static users.
pub(super) const USERS: Kind<Vec<User>> = Kind {
    expected: "a list of { name = \"...\", password = \"...\" }, of { name = \"...\", key = \"32 or 64 hex digits\" } or of \
               \"NAME:PASSWORD\"",
    list: true,
    secret: true,
    read: |reader, node| reader.list(node, user),
    show: |users| {
        list(users.iter().map(|user| {
            let kind = match user.secret {
                UserSecret::Password(_) => "password",
                UserSecret::Keys(_) => "key",
            };
            format!("{{ name = {}, {kind} = {} }}", quoted(&user.name), quoted(MASK))
        }))
    },
};

/// What is wrong with a user's name.
const BAD_NAME: &str = "a name has 1 to 508 bytes, no control characters and no colon";

/// Shared secrets of time-limited credentials.
pub(super) const SECRETS: Kind<Vec<Secret>> = Kind {
    expected: "a list of shared secrets, none of them empty",
    list: true,
    secret: true,
    read: |reader, node| {
        reader.list(node, |reader, node| {
            let secret = reader.secret(node)?;
            if secret.reveal().is_empty() {
                return reader.refuse(node, Some("the secret is empty".to_owned()));
            }
            Some(secret)
        })
    },
    show: |secrets| list(secrets.iter().map(|_| quoted(MASK))),
};

const CIDRS: Kind<Vec<Cidr>> = Kind {
    expected: "a list of prefixes such as [\"10.0.0.0/8\", \"2001:db8::/32\", \"192.0.2.7\"]",
    list: true,
    secret: false,
    read: |reader, node| {
        reader.list(node, |reader, node| reader.parsed(node, |text| text.trim().parse::<Cidr>()))
    },
    show: |prefixes| strings(prefixes),
};

const ALLOW_RULES: Kind<Vec<AllowRule>> = Kind {
    expected: "a list of prefixes, or of addresses with ports, such as [\"10.0.0.0/8\", \"2001:db8::/32\", \"192.0.2.7\", \
               \"192.0.2.7:5060\", \"[2001:db8::7]:5000-5100\"]",
    list: true,
    secret: false,
    read: |reader, node| {
        reader.list(node, |reader, node| reader.parsed(node, |text| text.trim().parse::<AllowRule>()))
    },
    show: |rules| strings(rules),
};

fn certificate_files(reader: &mut Reader<'_>, node: &Node) -> Option<CertificateFiles> {
    let entries = reader.table(node, &["cert", "key"])?;
    let mut find = |wanted: &str| match entries.iter().find(|entry| entry.key == wanted) {
        Some(entry) => match (kind::FILE.read)(reader, &entry.node)? {
            Some(path) => Some(path),
            None => reader.refuse(&entry.node, Some("the path is empty".to_owned())),
        },
        None => reader.refuse(node, Some(format!("it has no {wanted}"))),
    };
    let (cert, key) = (find("cert"), find("key"));
    Some(CertificateFiles { cert: cert?, key: key? })
}

fn relay_address(text: &str) -> Result<RelayAddress, &'static str> {
    let (bind, external) = match text.split_once('=') {
        Some((bind, external)) => (bind, Some(external)),
        None => (text, None),
    };
    let ip = |text: &str| text.trim().parse::<IpAddr>().map_err(|_| "not an IP address");
    let (bind, external) = (ip(bind)?, external.map(ip).transpose()?);
    for address in [Some(bind), external].into_iter().flatten() {
        if address.is_unspecified() || address.is_multicast() {
            return Err("peers cannot send to an unspecified or multicast address");
        }
    }
    if external.is_some_and(|external| external.is_ipv4() != bind.is_ipv4()) {
        return Err("the external address has another family than the local one");
    }
    Ok(RelayAddress { bind, external })
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>, &'static str> {
    let (first, last) = text.split_once('-').ok_or("")?;
    let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0).ok_or("");
    let (first, last) = (port(first)?, port(last)?);
    if first > last {
        return Err("the first port is above the last");
    }
    if first == last {
        return Err("a single port is too few");
    }
    Ok(first..=last)
}

fn user(reader: &mut Reader<'_>, node: &Node) -> Option<User> {
    if let Value::Text(text) = &node.value {
        let why = match text.split_once(':') {
            None => "it has no colon, and so no password".to_owned(),
            Some(("", _)) => "there is no name in front of the colon".to_owned(),
            Some((name, _)) if !is_username(name) => BAD_NAME.to_owned(),
            Some((name, "")) => format!("the password of {name:?}, behind the colon, is empty"),
            Some((name, password)) => {
                return Some(User {
                    name: name.to_owned(),
                    secret: UserSecret::Password(Secret::new(password)),
                });
            }
        };
        return reader.refuse(node, Some(why));
    }
    let entries = reader.table(node, &["name", "password", "key"])?;
    let find = |wanted: &str| entries.iter().find(|entry| entry.key == wanted).map(|entry| &entry.node);
    let Some(name) = find("name") else {
        return reader.refuse(node, Some("it has no name".to_owned()));
    };
    let name_text = reader.text(name)?;
    if !is_username(&name_text) {
        return reader.refuse(name, Some(BAD_NAME.to_owned()));
    }
    let secret = match (find("password"), find("key")) {
        (Some(password), None) => {
            let text = reader.secret(password)?;
            if text.reveal().is_empty() {
                return reader.refuse(password, Some("the password is empty".to_owned()));
            }
            UserSecret::Password(text)
        }
        (None, Some(key)) => {
            let keys = match &key.value {
                Value::List(_) => reader.list(key, stored_key)?,
                _ => vec![stored_key(reader, key)?],
            };
            if keys.is_empty() {
                return reader.refuse(key, Some("it has no key".to_owned()));
            }
            UserSecret::Keys(keys)
        }
        _ => return reader.refuse(node, Some("it needs either a password or a key".to_owned())),
    };
    Some(User { name: name_text, secret })
}

fn stored_key(reader: &mut Reader<'_>, node: &Node) -> Option<StoredKey> {
    let text = reader.secret(node)?;
    match StoredKey::from_hex(text.reveal()) {
        Some(key) => Some(key),
        None => {
            let why = "a key is 32 hex digits (MD5) or 64 (SHA-256), see `turnpike credentials --help`";
            reader.refuse(node, Some(why.to_owned()))
        }
    }
}

/// REALM has less than 128 characters (RFC 8489 section 14.9); what would have to be quoted is left out.
#[must_use]
pub fn is_realm(name: &str) -> bool {
    let bad = |c: char| c.is_control() || c == '"' || c == '\\';
    !name.is_empty() && name.chars().count() <= 127 && !name.contains(bad)
}

/// USERNAME is less than 509 bytes (RFC 8489 section 14.3); a colon would make the long-term key ambiguous.
#[must_use]
pub fn is_username(name: &str) -> bool {
    (1..=508).contains(&name.len()) && !name.contains(|c: char| c.is_control() || c == ':')
}
