//! Settings that are right one by one and impossible together.

use std::{collections::HashSet, net::SocketAddr};

use super::{ConfigError, Settings};

/// Appends what cannot work. A limit that nobody set never makes an error: it only caps.
pub(crate) fn combinations(settings: &Settings, problems: &mut Vec<ConfigError>) {
    let mut refuse = |key: &'static str, problem: String, expected: &str| {
        problems.push(ConfigError {
            origin: settings.origin(key).clone(),
            key: key.to_owned(),
            problem,
            expected: expected.to_owned(),
            suggestion: None,
        });
    };

    if settings.listen.is_empty() {
        refuse("server.listen", "the list is empty".to_owned(), "at least one address to listen on");
    }
    if let Some(address) = repeated(settings.listen.iter().filter(|address| address.port() != 0)) {
        refuse("server.listen", format!("{address} stands there twice"), "each address once");
    }
    if let Some(address) = repeated(settings.tls_listen.iter().filter(|address| address.port() != 0)) {
        refuse("tls.listen", format!("{address} stands there twice"), "each address once");
    }
    if let Some(address) = repeated(settings.dtls_listen.iter().filter(|address| address.port() != 0)) {
        refuse("dtls.listen", format!("{address} stands there twice"), "each address once");
    }
    let no_certificate = settings.tls_cert.is_none() && settings.tls_certificates.is_empty();
    if no_certificate && !settings.dtls_listen.is_empty() {
        refuse(
            "dtls.listen",
            "there is no certificate".to_owned(),
            "tls.cert and tls.key (--tls-cert FILE --tls-key FILE), an ECDSA certificate, with it",
        );
    }
    let by_tcp =
        |address: &&SocketAddr| settings.tcp && address.port() != 0 && settings.listen.contains(address);
    if let Some(address) = settings.tls_listen.iter().find(by_tcp) {
        refuse(
            "tls.listen",
            format!("{address} is in server.listen too"),
            "addresses that server.listen does not name: with a certificate, those take TLS clients as well",
        );
    }
    match (&settings.tls_cert, &settings.tls_key) {
        (Some(_), None) => {
            refuse(
                "tls.cert",
                "there is no tls.key for it".to_owned(),
                "a certificate and its key, or neither",
            );
        }
        (None, Some(_)) => {
            refuse(
                "tls.key",
                "there is no tls.cert for it".to_owned(),
                "a certificate and its key, or neither",
            );
        }
        (None, None) if settings.tls_certificates.is_empty() && !settings.tls_listen.is_empty() => refuse(
            "tls.listen",
            "there is no certificate".to_owned(),
            "tls.cert and tls.key (--tls-cert FILE --tls-key FILE) with it",
        ),
        _ => {}
    }
    if let Some(address) = repeated(settings.relay_addresses.iter().map(|address| address.bind)) {
        refuse("relay.addresses", format!("{address} stands there twice"), "each address once");
    }
    if let Some(name) = repeated(settings.users.iter().map(|user| user.name.as_str())) {
        refuse("auth.users", format!("user {name:?} stands there twice"), "each user once");
    }
    if settings.default_lifetime > settings.max_lifetime {
        let key = if settings.is_explicit("limits.default_lifetime") {
            "limits.default_lifetime"
        } else {
            "limits.max_lifetime"
        };
        refuse(
            key,
            format!(
                "default_lifetime {} is above max_lifetime {}",
                settings.default_lifetime, settings.max_lifetime
            ),
            "default_lifetime at most max_lifetime (both in seconds)",
        );
    }
    if settings.is_explicit("limits.allocations_per_user")
        && settings.max_allocations_per_user > settings.max_allocations
    {
        refuse(
            "limits.allocations_per_user",
            format!(
                "{} is above limits.allocations {}",
                settings.max_allocations_per_user, settings.max_allocations
            ),
            "at most limits.allocations",
        );
    }
    let room = relay_ports(settings);
    if settings.is_explicit("limits.allocations") && settings.max_allocations > room {
        refuse(
            "limits.allocations",
            format!(
                "{} allocations do not fit into the {room} ports of relay.ports",
                settings.max_allocations
            ),
            "at most one allocation per port and relay address; widen relay.ports or add relay addresses",
        );
    }
    let anybody = !settings.users.is_empty() || !settings.secrets.is_empty();
    if anybody && !settings.auth_required {
        refuse(
            "auth.required",
            "it is false, but users or secrets are configured".to_owned(),
            "true, or neither auth.users nor auth.secrets",
        );
    }
    if !settings.allow_md5
        && let Some(user) = settings.users.iter().find(|user| user.secret.is_md5_only())
    {
        refuse(
            "auth.allow_md5",
            format!("it is false, but user {:?} has only an MD5 key and could never authenticate", user.name),
            "true, or a password or a SHA-256 key (64 hex digits) for that user",
        );
    }
}

/// Relayed transport addresses that can exist: one allocation takes at least one, and detection yields at most one
/// address a family.
fn relay_ports(settings: &Settings) -> usize {
    let ports = usize::from(settings.ports.end() - settings.ports.start()) + 1;
    let addresses = if settings.relay_addresses.is_empty() { 2 } else { settings.relay_addresses.len() };
    ports * addresses
}

fn repeated<T: std::hash::Hash + Eq + Clone>(items: impl Iterator<Item = T>) -> Option<T> {
    let mut seen = HashSet::new();
    let mut items = items;
    items.find(|item| !seen.insert(item.clone()))
}
