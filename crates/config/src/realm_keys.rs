//! `[[realm]]`: what a realm beside `server.realm` is told, and the table of its keys.

use std::net::SocketAddr;

use super::{
    User,
    key::{KeySpec, Kind, field, show::strings},
    keys,
    tables::Place,
};
use crate::Secret;

/// A realm with users, secrets and limits of its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RealmSettings {
    /// REALM.
    pub name: String,
    /// Static users.
    pub users: Vec<User>,
    /// Secrets of time-limited credentials.
    pub secrets: Vec<Secret>,
    /// Listeners that serve this realm and others that name them, no more; empty for those that no realm names.
    pub listen: Vec<SocketAddr>,
    /// Names that TLS and DTLS clients ask for (SNI) and that lead to this realm, in lower case.
    pub server_names: Vec<String>,
    /// Allocations of all its users.
    pub max_allocations: Option<usize>,
    /// Allocations of each of its users.
    pub max_allocations_per_user: Option<usize>,
    /// Where it stands.
    pub place: Place,
}

/// The keys of one `[[realm]]`.
pub(crate) static REALM_KEYS: &[KeySpec<RealmSettings>] = &[
    field!("realm.name", reload: true, keys::REALM, name),
    field!("realm.users", reload: true, keys::USERS, users),
    field!("realm.secrets", reload: true, keys::SECRETS, secrets),
    field!(
        "realm.listen",
        reload: true,
        keys::ADDRESSES,
        listen,
        expected: "a list of addresses that the server listens on, such as [\"0.0.0.0:3478\"]",
    ),
    field!("realm.server_names", reload: true, SERVER_NAMES, server_names),
    field!("realm.allocations", reload: true, LIMIT, max_allocations),
    field!("realm.allocations_per_user", reload: true, LIMIT, max_allocations_per_user),
];

const SERVER_NAMES: Kind<Vec<String>> = Kind {
    expected: "a list of host names that TLS clients ask for, such as [\"turn.example.org\"]",
    list: true,
    secret: false,
    read: |reader, node| reader.list(node, |reader, node| reader.parsed(node, server_name)),
    show: |names| strings(names),
};

/// Without one, that of the whole server holds.
const LIMIT: Kind<Option<usize>> = Kind {
    expected: "a number, 1 to 1000000",
    list: false,
    secret: false,
    read: |reader, node| reader.integer(node, &(1..=1_000_000)).map(Some),
    show: |most| most.map_or_else(String::new, |most| most.to_string()),
};

/// A host name as clients send it in SNI (RFC 6066 section 3): no address, no final dot, no wildcard; case does not count.
pub(crate) fn server_name(text: &str) -> Result<String, &'static str> {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    if text.len() > 253 || !text.split('.').all(label) {
        return Err("not a host name");
    }
    if text.parse::<std::net::IpAddr>().is_ok() {
        return Err("clients send no addresses in SNI (RFC 6066)");
    }
    Ok(text.to_ascii_lowercase())
}
