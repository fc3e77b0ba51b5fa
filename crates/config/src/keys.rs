//! Value types of the keys of `serve`, for the table of [`Settings`](crate::Settings).

use std::{
    net::SocketAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use turnpike_convert::forward::parts::without_zone;
use turnpike_convert::toml_text::{list, quoted};
use turnpike_strict::{Value, ValueNode, find};
use turnpike_turn::server::{Cidr, ClientRule, QualityLevel, RelayAddress};
use turnpike_wire::address::{AddressError, socket_address};
use turnpike_wire::names::{is_realm, is_username};
use turnpike_wire::secret::MASK;

use super::{
    CertificateFiles, ConfiguredUser, DatapathChoice, StoredKey, UserSecret,
    key::{ValueKind, kind, list_of, named, text},
    read::ValueReader,
};
use crate::{AllowedPeer, RelayPlace, Secret, relay_keys};

pub(super) const ADDRESSES: ValueKind<Vec<SocketAddr>> =
    list_of!("a list of \"ADDR:PORT\", such as [\"0.0.0.0:3478\", \"[::]:3478\"]", |text| {
        address(text.trim())
    });

/// Parses `ADDR:PORT`, with an optional zone.
pub(super) fn address(text: &str) -> Result<SocketAddr, &'static str> {
    zoned(socket_address(text))
}

pub(super) fn zoned<T>(read: Result<T, AddressError>) -> Result<T, &'static str> {
    read.map_err(|error| match error {
        AddressError::Form => "",
        AddressError::NoSuchInterface => "this machine has no interface of that name",
    })
}

pub(super) const DATAPATH: ValueKind<DatapathChoice> = ValueKind::one(
    "\"auto\", \"basic\", \"mmsg\", \"gso\", \"kernel\", \"xdp\" or \"xdp-generic\"",
    |reader, node| {
        reader.parsed(node, |text| match text {
            // `Datapath::from_str("auto")` probes the kernel, and this crate must not open sockets.
            "auto" => Ok(DatapathChoice::Auto),
            "kernel" => Ok(DatapathChoice::Kernel),
            "xdp" => Ok(DatapathChoice::Xdp),
            "xdp-generic" => Ok(DatapathChoice::XdpGeneric),
            other => other.parse().map(DatapathChoice::Step).map_err(|_| ""),
        })
    },
    |datapath| match datapath {
        DatapathChoice::Auto => quoted("auto"),
        DatapathChoice::Step(step) => quoted(&step.to_string()),
        DatapathChoice::Kernel => quoted("kernel"),
        DatapathChoice::Xdp => quoted("xdp"),
        DatapathChoice::XdpGeneric => quoted("xdp-generic"),
    },
);

pub(super) const QUALITY: ValueKind<QualityLevel> = named!(
    "\"off\", \"headers\" or \"on\" (RTCP reports too)",
    "off" => QualityLevel::Off,
    "headers" => QualityLevel::Headers,
    "on" => QualityLevel::On,
);

/// Like [`ADDRESSES`], but the example has TURN's port for TLS and DTLS.
pub(super) const SECURE_ADDRESSES: &str =
    "a list of \"ADDR:PORT\", such as [\"0.0.0.0:5349\", \"[::]:5349\"]";

pub(super) const REALM: ValueKind<String> =
    text!("a name of 1 to 127 characters without control characters, \" or \\", is_realm);

pub(super) const SOFTWARE: ValueKind<String> =
    text!("a name of at most 127 characters, or \"\" to send none", |software| {
        software.chars().count() <= 127 && !software.contains(char::is_control)
    });

pub(super) const CERTIFICATES: ValueKind<Vec<CertificateFiles>> = ValueKind::list(
    "a list of { cert = \"FILE\", key = \"FILE\" }",
    |reader, node| reader.list(node, certificate_files),
    |all| {
        let shown = |path: &Path| quoted(&path.display().to_string());
        list(
            all.iter()
                .map(|files| format!("{{ cert = {}, key = {} }}", shown(&files.cert), shown(&files.key))),
        )
    },
);

pub(super) const KEY_PASSWORD: ValueKind<Option<Secret>> = ValueKind::one(
    "the password of encrypted private keys, \"\" for none",
    |reader, node| {
        let password = match &node.value {
            Value::List(lines) if lines.len() == 1 => reader.secret(&lines[0])?,
            _ => reader.secret(node)?,
        };
        Some(Some(password).filter(|password| !password.reveal().is_empty()))
    },
    |password| quoted(password.as_ref().map_or("", |_| MASK)),
)
.secret();

pub(super) const EXTERNAL_ADDRESSES: ValueKind<Vec<RelayAddress>> = ValueKind::list(
    "a list of \"IP\" or \"IP=EXTERNAL\", unicast, both of one family",
    |reader, node| reader.list(node, |reader, node| reader.parsed(node, relay_keys::address)),
    |addresses| list(addresses.iter().map(|address| quoted(&RelayPlace::At(*address).to_string()))),
);

pub(super) const PORTS: ValueKind<RangeInclusive<u16>> = ValueKind::one(
    "\"A-B\", ports 1 to 65535, at least 2 of them (EVEN-PORT reserves pairs), such as \"49152-65535\"",
    |reader, node| reader.parsed(node, port_range),
    |ports| quoted(&format!("{}-{}", ports.start(), ports.end())),
);

pub(super) const USERS: ValueKind<Vec<ConfiguredUser>> = ValueKind::list(
    "a list of { name = \"...\", password = \"...\" }, of { name = \"...\", key = \"32 or 64 hex digits\" } or of \
     \"NAME:PASSWORD\"",
    |reader, node| reader.list(node, user),
    |users| {
        list(users.iter().map(|user| {
            let kind = match user.secret {
                UserSecret::Password(_) => "password",
                UserSecret::Keys(_) => "key",
            };
            format!("{{ name = {}, {kind} = {} }}", quoted(&user.name), quoted(MASK))
        }))
    },
)
.secret();

const BAD_NAME: &str = "a name is 1 to 508 bytes long, without control characters or colons";

pub(super) const SECRETS: ValueKind<Vec<Secret>> = ValueKind::list(
    "a list of shared secrets, none of them empty",
    |reader, node| {
        reader.list(node, |reader, node| {
            let secret = reader.secret(node)?;
            if secret.reveal().is_empty() {
                return reader.refuse(node, Some("the secret is empty".to_owned()));
            }
            Some(secret)
        })
    },
    |secrets| list(secrets.iter().map(|_| quoted(MASK))),
)
.secret();

pub(super) const CIDRS: ValueKind<Vec<Cidr>> =
    list_of!("a list of prefixes, such as [\"10.0.0.0/8\", \"2001:db8::/32\", \"192.0.2.7\"]", |text| {
        without_zone(text.trim())?.parse::<Cidr>()
    });

pub(super) const CLIENT_RULES: ValueKind<Vec<ClientRule>> = list_of!(
    "a list of prefixes, such as [\"10.0.0.0/8\", \"2001:db8::/32\", \"192.0.2.7\"], of countries (\"country:DE\"), or of \
     autonomous systems (\"AS64500\")",
    |text| without_zone(text.trim())?.parse::<ClientRule>()
);

pub(super) const FILES: ValueKind<Vec<PathBuf>> = ValueKind::list(
    "a list of paths of files",
    |reader, node| {
        reader.list(node, |reader, node| match (kind::FILE.read)(reader, node)? {
            Some(path) => Some(path),
            None => reader.refuse(node, Some("the path is empty".to_owned())),
        })
    },
    |paths| list(paths.iter().map(|path| quoted(&path.display().to_string()))),
);

pub(super) const ALLOWED_PEERS: ValueKind<Vec<AllowedPeer>> = list_of!(
    "a list of prefixes, of host names, or of addresses and names with ports, such as [\"10.0.0.0/8\", \"2001:db8::/32\", \"192.0.2.7\", \
     \"192.0.2.7:5060\", \"[2001:db8::7]:5000-5100\", \"sfu.internal\"]",
    |text| without_zone(text.trim())?.parse::<AllowedPeer>()
);

fn certificate_files(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<CertificateFiles> {
    let entries = reader.table(node, &["cert", "key"])?;
    let mut find = |wanted: &str| match find(entries, wanted) {
        Some(node) => match (kind::FILE.read)(reader, node)? {
            Some(path) => Some(path),
            None => reader.refuse(node, Some("the path is empty".to_owned())),
        },
        None => reader.refuse(node, Some(format!("it has no {wanted}"))),
    };
    let (cert, key) = (find("cert"), find("key"));
    Some(CertificateFiles { cert: cert?, key: key? })
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>, &'static str> {
    let (first, last) = text.split_once('-').ok_or("")?;
    let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0).ok_or("");
    let (first, last) = (port(first)?, port(last)?);
    if first > last {
        return Err("the first port is above the last");
    }
    if first == last {
        return Err("a single port is not enough");
    }
    Ok(first..=last)
}

fn user(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<ConfiguredUser> {
    if let Value::Text(text) = &node.value {
        let why = match text.split_once(':') {
            None => "the colon and the password are missing".to_owned(),
            Some(("", _)) => "the name before the colon is missing".to_owned(),
            Some((name, _)) if !is_username(name) => BAD_NAME.to_owned(),
            Some((name, "")) => format!("the password of {name:?}, after the colon, is empty"),
            Some((name, password)) => {
                return Some(ConfiguredUser {
                    name: name.to_owned(),
                    secret: UserSecret::Password(Secret::new(password)),
                });
            }
        };
        return reader.refuse(node, Some(why));
    }
    let entries = reader.table(node, &["name", "password", "key"])?;
    let find = |wanted| find(entries, wanted);
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
    Some(ConfiguredUser { name: name_text, secret })
}

fn stored_key(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<StoredKey> {
    let text = reader.secret(node)?;
    match StoredKey::from_hex(text.reveal()) {
        Some(key) => Some(key),
        None => {
            let why = "a key is 32 hex digits (MD5) or 64 (SHA-256); see `turnpike credentials --help`";
            reader.refuse(node, Some(why.to_owned()))
        }
    }
}
