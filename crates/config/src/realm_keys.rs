//! `[[realm]]`: what a realm beside `server.realm` is told, and the table of its keys.

use std::net::SocketAddr;

use super::{
    User,
    key::{
        KeySpec, scalar,
        show::{quoted, strings},
    },
    keys::{self, ALLOCATIONS, REALM, SECRETS, USERS},
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
    scalar!(
        "realm.name",
        reload: true,
        REALM,
        |reader, node, realm| {
            realm.name = keys::realm_name(reader, node)?;
            Some(())
        },
        |realm| quoted(&realm.name),
    ),
    KeySpec {
        path: "realm.users",
        expected: USERS,
        list: true,
        secret: true,
        reload: true,
        apply: |reader, node, realm| {
            realm.users = reader.list(node, keys::user)?;
            Some(())
        },
        show: |realm| keys::show_users(&realm.users),
    },
    KeySpec {
        path: "realm.secrets",
        expected: SECRETS,
        list: true,
        secret: true,
        reload: true,
        apply: |reader, node, realm| {
            realm.secrets = reader.list(node, keys::shared_secret)?;
            Some(())
        },
        show: |realm| keys::show_secrets(&realm.secrets),
    },
    KeySpec {
        path: "realm.listen",
        expected: "a list of addresses that the server listens on, such as [\"0.0.0.0:3478\"]",
        list: true,
        secret: false,
        reload: true,
        apply: |reader, node, realm| {
            realm.listen = reader.list(node, |reader, node| reader.parsed_as(node))?;
            Some(())
        },
        show: |realm| strings(&realm.listen),
    },
    KeySpec {
        path: "realm.server_names",
        expected: "a list of host names that TLS clients ask for, such as [\"turn.example.org\"]",
        list: true,
        secret: false,
        reload: true,
        apply: |reader, node, realm| {
            realm.server_names = reader.list(node, |reader, node| reader.parsed(node, server_name))?;
            Some(())
        },
        show: |realm| strings(&realm.server_names),
    },
    scalar!(
        "realm.allocations",
        reload: true,
        ALLOCATIONS,
        |reader, node, realm| {
            realm.max_allocations = Some(reader.integer(node, &(1..=1_000_000))?);
            Some(())
        },
        |realm| realm.max_allocations.map_or_else(String::new, |most| most.to_string()),
    ),
    scalar!(
        "realm.allocations_per_user",
        reload: true,
        ALLOCATIONS,
        |reader, node, realm| {
            realm.max_allocations_per_user = Some(reader.integer(node, &(1..=1_000_000))?);
            Some(())
        },
        |realm| realm.max_allocations_per_user.map_or_else(String::new, |most| most.to_string()),
    ),
];

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
