//! The table of all keys of `serve`. Files, environment, flags,
//! `check-config` and reload all work from this table, so that a key exists everywhere or nowhere.

use std::{
    net::IpAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use turnpike_relay::RelayAddress;
use turnpike_turn::server::Cidr;

use super::{
    CertificateFiles, Settings, StoredKey, User, UserSecret,
    key::{
        self, KeySpec, expected, scalar,
        show::{self, list, quoted, strings},
    },
    read::Reader,
    source::{Node, Value},
};
use crate::secret::{MASK, Secret};

/// All keys, section by section, in the order in which they are shown.
pub(crate) static KEYS: &[KeySpec<Settings>] = &[
    KeySpec {
        path: "server.listen",
        expected: "a list of \"ADDR:PORT\" such as [\"0.0.0.0:3478\", \"[::]:3478\"]",
        list: true,
        secret: false,
        reload: false,
        apply: |reader, node, settings| {
            settings.listen = reader.list(node, |reader, node| reader.parsed_as(node))?;
            Some(())
        },
        show: |settings| strings(&settings.listen),
    },
    scalar!(
        "server.tcp",
        reload: false,
        "true or false",
        |reader, node, settings| {
            settings.tcp = reader.boolean(node)?;
            Some(())
        },
        |settings| settings.tcp.to_string(),
    ),
    KeySpec {
        path: "server.proxy_protocol_from",
        expected: CIDRS,
        list: true,
        secret: false,
        reload: false,
        apply: |reader, node, settings| {
            settings.proxy_protocol_from = reader.list(node, cidr)?;
            Some(())
        },
        show: |settings| strings(&settings.proxy_protocol_from),
    },
    scalar!(
        "server.realm",
        reload: true,
        "a name of 1 to 127 characters without control characters, \" or \\",
        |reader, node, settings| {
            let realm = reader.text(node)?;
            let bad = |c: char| c.is_control() || c == '"' || c == '\\';
            if realm.is_empty() || realm.chars().count() > 127 || realm.contains(bad) {
                return reader.refuse(node, None);
            }
            settings.realm = realm;
            Some(())
        },
        |settings| quoted(&settings.realm),
    ),
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
    scalar!(
        "server.workers",
        reload: false,
        expected::WORKERS,
        |reader, node, settings| {
            settings.workers = key::workers(reader, node)?;
            Some(())
        },
        |settings| show::workers(settings.workers),
    ),
    scalar!(
        "server.datapath",
        reload: false,
        expected::DATAPATH,
        |reader, node, settings| {
            settings.datapath = key::datapath(reader, node)?;
            Some(())
        },
        |settings| show::datapath(settings.datapath),
    ),
    KeySpec {
        path: "tls.listen",
        expected: "a list of \"ADDR:PORT\" such as [\"0.0.0.0:5349\", \"[::]:5349\"]",
        list: true,
        secret: false,
        reload: false,
        apply: |reader, node, settings| {
            settings.tls_listen = reader.list(node, |reader, node| reader.parsed_as(node))?;
            Some(())
        },
        show: |settings| strings(&settings.tls_listen),
    },
    scalar!(
        "tls.only",
        reload: false,
        "true or false",
        |reader, node, settings| {
            settings.tls_only = reader.boolean(node)?;
            Some(())
        },
        |settings| settings.tls_only.to_string(),
    ),
    scalar!(
        "tls.cert",
        reload: true,
        "the path of a PEM file with the certificate chain, \"\" for none",
        |reader, node, settings| {
            settings.tls_cert = path(reader, node)?;
            Some(())
        },
        |settings| shown_path(settings.tls_cert.as_deref()),
    ),
    scalar!(
        "tls.key",
        reload: true,
        "the path of a PEM file with the private key, \"\" for none",
        |reader, node, settings| {
            settings.tls_key = path(reader, node)?;
            Some(())
        },
        |settings| shown_path(settings.tls_key.as_deref()),
    ),
    KeySpec {
        path: "tls.certificates",
        expected: "a list of { cert = \"FILE\", key = \"FILE\" }",
        list: true,
        secret: false,
        reload: true,
        apply: |reader, node, settings| {
            settings.tls_certificates = reader.list(node, certificate_files)?;
            Some(())
        },
        show: |settings| {
            list(settings.tls_certificates.iter().map(|files| {
                format!(
                    "{{ cert = {}, key = {} }}",
                    shown_path(Some(&files.cert)),
                    shown_path(Some(&files.key))
                )
            }))
        },
    },
    KeySpec {
        path: "dtls.listen",
        expected: "a list of \"ADDR:PORT\" such as [\"0.0.0.0:5349\", \"[::]:5349\"]",
        list: true,
        secret: false,
        reload: false,
        apply: |reader, node, settings| {
            settings.dtls_listen = reader.list(node, |reader, node| reader.parsed_as(node))?;
            Some(())
        },
        show: |settings| strings(&settings.dtls_listen),
    },
    KeySpec {
        path: "relay.addresses",
        expected: "a list of \"IP\" or \"IP=EXTERNAL\", unicast, both of one family, [] to detect them",
        list: true,
        secret: false,
        reload: false,
        apply: |reader, node, settings| {
            settings.relay_addresses =
                reader.list(node, |reader, node| reader.parsed(node, relay_address))?;
            Some(())
        },
        show: |settings| {
            list(settings.relay_addresses.iter().map(|address| match address.external {
                Some(external) => quoted(&format!("{}={external}", address.bind)),
                None => quoted(&address.bind.to_string()),
            }))
        },
    },
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
    scalar!(
        "relay.listener_buffer",
        reload: false,
        "bytes, 4096 to 1073741824",
        |reader, node, settings| {
            settings.listener_buffer = reader.integer(node, &BUFFER)?;
            Some(())
        },
        |settings| settings.listener_buffer.to_string(),
    ),
    scalar!(
        "relay.buffer",
        reload: false,
        "bytes, 4096 to 1073741824",
        |reader, node, settings| {
            settings.relay_buffer = reader.integer(node, &BUFFER)?;
            Some(())
        },
        |settings| settings.relay_buffer.to_string(),
    ),
    scalar!(
        "relay.rfc5766_channels",
        reload: true,
        "true or false",
        |reader, node, settings| {
            settings.rfc5766_channels = reader.boolean(node)?;
            Some(())
        },
        |settings| settings.rfc5766_channels.to_string(),
    ),
    scalar!(
        "auth.required",
        reload: true,
        "true or false",
        |reader, node, settings| {
            settings.auth_required = reader.boolean(node)?;
            Some(())
        },
        |settings| settings.auth_required.to_string(),
    ),
    KeySpec {
        path: "auth.users",
        expected: "a list of { name = \"...\", password = \"...\" }, of { name = \"...\", key = \"32 or 64 hex digits\" } or \
                   of \"NAME:PASSWORD\"",
        list: true,
        secret: true,
        reload: true,
        apply: |reader, node, settings| {
            settings.users = reader.list(node, user)?;
            Some(())
        },
        show: |settings| {
            list(settings.users.iter().map(|user| {
                let kind = match user.secret {
                    UserSecret::Password(_) => "password",
                    UserSecret::Keys(_) => "key",
                };
                format!("{{ name = {}, {kind} = {} }}", quoted(&user.name), quoted(MASK))
            }))
        },
    },
    KeySpec {
        path: "auth.secrets",
        expected: "a list of shared secrets, none of them empty",
        list: true,
        secret: true,
        reload: true,
        apply: |reader, node, settings| {
            settings.secrets = reader.list(node, |reader, node| {
                let secret = reader.text(node)?;
                if secret.is_empty() { reader.refuse(node, None) } else { Some(Secret::new(secret)) }
            })?;
            Some(())
        },
        show: |settings| list(settings.secrets.iter().map(|_| quoted(MASK))),
    },
    scalar!(
        "auth.nonce_lifetime",
        reload: true,
        "seconds, 60 to 86400",
        |reader, node, settings| {
            settings.nonce_lifetime = reader.integer(node, &(60..=86_400))?;
            Some(())
        },
        |settings| settings.nonce_lifetime.to_string(),
    ),
    scalar!(
        "auth.allow_md5",
        reload: true,
        "true or false",
        |reader, node, settings| {
            settings.allow_md5 = reader.boolean(node)?;
            Some(())
        },
        |settings| settings.allow_md5.to_string(),
    ),
    scalar!(
        "limits.allocations",
        reload: false,
        "a number, 1 to 1000000",
        |reader, node, settings| {
            settings.max_allocations = reader.integer(node, &(1..=1_000_000))?;
            Some(())
        },
        |settings| settings.max_allocations.to_string(),
    ),
    scalar!(
        "limits.allocations_per_user",
        reload: false,
        "a number, 1 to 1000000",
        |reader, node, settings| {
            settings.max_allocations_per_user = reader.integer(node, &(1..=1_000_000))?;
            Some(())
        },
        |settings| settings.max_allocations_per_user.to_string(),
    ),
    scalar!(
        "limits.permissions",
        reload: true,
        "a number per allocation, 1 to 65535",
        |reader, node, settings| {
            settings.max_permissions = reader.integer(node, &(1..=65_535))?;
            Some(())
        },
        |settings| settings.max_permissions.to_string(),
    ),
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
    scalar!(
        "limits.idle_connections",
        reload: false,
        "a number, 1 to 1000000",
        |reader, node, settings| {
            settings.max_idle_connections = reader.integer(node, &(1..=1_000_000))?;
            Some(())
        },
        |settings| settings.max_idle_connections.to_string(),
    ),
    scalar!(
        "limits.idle_connections_per_address",
        reload: false,
        "a number, 1 to 1000000",
        |reader, node, settings| {
            settings.max_idle_connections_per_address = reader.integer(node, &(1..=1_000_000))?;
            Some(())
        },
        |settings| settings.max_idle_connections_per_address.to_string(),
    ),
    scalar!(
        "limits.half_open",
        reload: false,
        "a number of DTLS handshakes, 1 to 1000000",
        |reader, node, settings| {
            settings.max_half_open = reader.integer(node, &(1..=1_000_000))?;
            Some(())
        },
        |settings| settings.max_half_open.to_string(),
    ),
    scalar!(
        "limits.half_open_per_network",
        reload: false,
        "a number of DTLS handshakes, 1 to 1000000",
        |reader, node, settings| {
            settings.max_half_open_per_network = reader.integer(node, &(1..=1_000_000))?;
            Some(())
        },
        |settings| settings.max_half_open_per_network.to_string(),
    ),
    scalar!(
        "limits.first_message",
        reload: false,
        "seconds, 1 to 3600",
        |reader, node, settings| {
            settings.first_message_timeout = reader.integer(node, &(1..=3600))?;
            Some(())
        },
        |settings| settings.first_message_timeout.to_string(),
    ),
    scalar!(
        "limits.idle",
        reload: false,
        "seconds, 1 to 86400",
        |reader, node, settings| {
            settings.idle_timeout = reader.integer(node, &(1..=86_400))?;
            Some(())
        },
        |settings| settings.idle_timeout.to_string(),
    ),
    scalar!(
        "limits.stream_queue",
        reload: false,
        "bytes, 65540 (the longest message) to 1073741824",
        |reader, node, settings| {
            settings.stream_queue = reader.integer(node, &(65_540..=1 << 30))?;
            Some(())
        },
        |settings| settings.stream_queue.to_string(),
    ),
    scalar!(
        "limits.default_lifetime",
        reload: true,
        "seconds, 60 to 86400",
        |reader, node, settings| {
            settings.default_lifetime = reader.integer(node, &(60..=86_400))?;
            Some(())
        },
        |settings| settings.default_lifetime.to_string(),
    ),
    scalar!(
        "limits.max_lifetime",
        reload: true,
        "seconds, 60 to 86400",
        |reader, node, settings| {
            settings.max_lifetime = reader.integer(node, &(60..=86_400))?;
            Some(())
        },
        |settings| settings.max_lifetime.to_string(),
    ),
    KeySpec {
        path: "peers.allow",
        expected: CIDRS,
        list: true,
        secret: false,
        reload: true,
        apply: |reader, node, settings| {
            settings.allow = reader.list(node, cidr)?;
            Some(())
        },
        show: |settings| strings(&settings.allow),
    },
    KeySpec {
        path: "peers.deny",
        expected: CIDRS,
        list: true,
        secret: false,
        reload: true,
        apply: |reader, node, settings| {
            settings.deny = reader.list(node, cidr)?;
            Some(())
        },
        show: |settings| strings(&settings.deny),
    },
    scalar!(
        "admin.listen",
        reload: false,
        expected::ADMIN,
        |reader, node, settings| {
            settings.admin = key::admin(reader, node)?;
            Some(())
        },
        |settings| show::admin(settings.admin),
    ),
    scalar!(
        "log.level",
        reload: false,
        expected::LOG_LEVEL,
        |reader, node, settings| {
            settings.log_level = key::log_level(reader, node)?;
            Some(())
        },
        |settings| quoted(&settings.log_level),
    ),
    scalar!(
        "log.format",
        reload: false,
        expected::LOG_FORMAT,
        |reader, node, settings| {
            settings.log_format = key::log_format(reader, node)?;
            Some(())
        },
        |settings| show::log_format(settings.log_format),
    ),
    scalar!(
        "shutdown.deadline",
        reload: true,
        expected::DEADLINE,
        |reader, node, settings| {
            settings.shutdown_deadline = reader.integer(node, &(0..=86_400))?;
            Some(())
        },
        |settings| settings.shutdown_deadline.to_string(),
    ),
];

const BUFFER: RangeInclusive<usize> = 4096..=1 << 30;

const CIDRS: &str = "a list of prefixes such as [\"10.0.0.0/8\", \"2001:db8::/32\", \"192.0.2.7\"]";

fn cidr(reader: &mut Reader<'_>, node: &Node) -> Option<Cidr> {
    reader.parsed(node, |text| text.trim().parse::<Cidr>())
}

/// A path as it stands; `None` inside for an empty one.
fn path(reader: &mut Reader<'_>, node: &Node) -> Option<Option<PathBuf>> {
    reader.text(node).map(|text| (!text.is_empty()).then(|| PathBuf::from(text)))
}

fn shown_path(path: Option<&Path>) -> String {
    quoted(&path.map_or_else(String::new, |path| path.display().to_string()))
}

fn certificate_files(reader: &mut Reader<'_>, node: &Node) -> Option<CertificateFiles> {
    let entries = reader.table(node, &["cert", "key"])?;
    let mut find = |wanted: &str| match entries.iter().find(|entry| entry.key == wanted) {
        Some(entry) => match path(reader, &entry.node)? {
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
        return match text.split_once(':') {
            Some((name, password)) if is_username(name) && !password.is_empty() => {
                Some(User { name: name.to_owned(), secret: UserSecret::Password(Secret::new(password)) })
            }
            _ => reader.refuse(node, None),
        };
    }
    let entries = reader.table(node, &["name", "password", "key"])?;
    let find = |wanted: &str| entries.iter().find(|entry| entry.key == wanted).map(|entry| &entry.node);
    let Some(name) = find("name") else {
        return reader.refuse(node, Some("it has no name".to_owned()));
    };
    let name_text = reader.text(name)?;
    if !is_username(&name_text) {
        return reader
            .refuse(name, Some("a name has 1 to 508 bytes, no control characters and no colon".to_owned()));
    }
    let secret = match (find("password"), find("key")) {
        (Some(password), None) => {
            let text = reader.text(password)?;
            if text.is_empty() {
                return reader.refuse(password, Some("the password is empty".to_owned()));
            }
            UserSecret::Password(Secret::new(text))
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
    let text = reader.text(node)?;
    match StoredKey::from_hex(&text) {
        Some(key) => Some(key),
        None => {
            let why = "a key is 32 hex digits (MD5) or 64 (SHA-256), see `turnpike credentials --help`";
            reader.refuse(node, Some(why.to_owned()))
        }
    }
}

/// USERNAME is less than 509 bytes (RFC 8489 section 14.3); a colon would make the long-term key ambiguous.
fn is_username(name: &str) -> bool {
    (1..=508).contains(&name.len()) && !name.contains(|c: char| c.is_control() || c == ':')
}
