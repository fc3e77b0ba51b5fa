//! Settings that are right one by one and impossible together.

use std::{collections::HashSet, net::SocketAddr};

use super::{AdminListen, AlternateSettings, ConfigError, RealmSettings, Settings, TokenKeySettings};
use crate::realms;

/// [`turnpike_turn::server::RealmId`] counts them in 16 bits, `server.realm` being the first.
const MOST_REALMS: usize = 65_534;

/// Appends what cannot work. A limit that nobody set never makes an error: it only caps.
pub(crate) fn combinations(settings: &Settings, problems: &mut Vec<ConfigError>) {
    let mut refuse = |key: &'static str, problem: String, expected: &str| {
        problems.push(ConfigError::new(settings.origin(key), key, problem, expected));
    };

    if settings.listen.is_empty() {
        refuse("server.listen", "the list is empty".to_owned(), "at least one address to listen on");
    }
    if let Some(address) = repeated(settings.listen.iter().filter(|address| address.port() != 0)) {
        refuse("server.listen", format!("{address} is listed twice"), "each address once");
    }
    if let Some(address) = repeated(settings.tls_listen.iter().filter(|address| address.port() != 0)) {
        refuse("tls.listen", format!("{address} is listed twice"), "each address once");
    }
    if let Some(address) = repeated(settings.dtls_listen.iter().filter(|address| address.port() != 0)) {
        refuse("dtls.listen", format!("{address} is listed twice"), "each address once");
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
    if settings.tls_only && settings.tls_listen.is_empty() {
        refuse(
            "tls.only",
            "there is no tls.listen, and it holds for those listeners alone".to_owned(),
            "tls.listen with it; server.listen always takes plain TCP too, unless server.tcp is false",
        );
    }
    if let AdminListen::On(admin) = settings.admin
        && let Some((key, listener)) = stream_listeners(settings).find(|(_, at)| collide(admin, *at))
    {
        if settings.is_explicit("admin.listen") {
            refuse(
                "admin.listen",
                format!("{admin} is taken: {key} has {listener}, by TCP too"),
                "an address that neither server.listen nor tls.listen takes, or \"off\"",
            );
        } else {
            refuse(
                key,
                format!(
                    "{listener} is taken: the admin page is on {admin} unless admin.listen says otherwise"
                ),
                "another port, or another admin.listen (--admin)",
            );
        }
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
        refuse("relay.addresses", format!("{address} is listed twice"), "each address once");
    }
    let discovery = &settings.discovery;
    if discovery.families().any(|of| of.len() != 2 || of[0].bind == of[1].bind) {
        refuse(
            "nat_discovery.addresses",
            "clients are to compare two different addresses of a family".to_owned(),
            "two addresses for each family, or [] for none of it",
        );
    }
    if settings.is_explicit("nat_discovery.requests_per_source") && discovery.per_source > discovery.total {
        refuse(
            "nat_discovery.requests_per_source",
            format!("{} is above nat_discovery.requests {}", discovery.per_source, discovery.total),
            "at most nat_discovery.requests",
        );
    }
    if let Some(name) = repeated(settings.users.iter().map(|user| user.name.as_str())) {
        refuse("auth.users", format!("user {name:?} is listed twice"), "each user once");
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
    if realms::has_anybody(settings) && !settings.auth_required {
        refuse(
            "auth.required",
            "it is false, but users, secrets or token keys are configured".to_owned(),
            "true, or neither auth.users nor auth.secrets nor oauth.key nor store.url",
        );
    }
    if !settings.realms.is_empty() && !settings.auth_required {
        refuse(
            "auth.required",
            "it is false, but realms with users are configured".to_owned(),
            "true, or no [[realm]]",
        );
    }
    // `oauth.server_name` has at most 255 bytes; so must the name that stands for it.
    if !settings.oauth.keys.is_empty() && realms::third_party(settings).server_name.len() > 255 {
        refuse(
            "oauth.server_name",
            "server.realm stands for it, and is longer than 255 bytes".to_owned(),
            "a server name of its own",
        );
    }
    if settings.realms.len() > MOST_REALMS {
        refuse(
            "server.realm",
            format!("there are {} [[realm]]s beside it", settings.realms.len()),
            "at most 65534",
        );
    }
    let key_of = |key: &TokenKeySettings| {
        (key.kid.clone(), key.realm.clone().unwrap_or_else(|| settings.realm.clone()))
    };
    if let Some((kid, realm)) = repeated(settings.oauth.keys.iter().map(key_of)) {
        refuse(
            "oauth.key",
            format!("{kid:?} is listed twice in realm {realm:?}"),
            "each kid once in a realm",
        );
    }
    // A token does not say for which realm it is.
    let keys = &settings.oauth.keys;
    let elsewhere = |key: &&TokenKeySettings| {
        keys.iter().any(|other| other.key == key.key && key_of(other).1 != key_of(key).1)
    };
    if let Some(key) = keys.iter().find(elsewhere) {
        refuse(
            "oauth.key",
            format!(
                "the key of {:?} is that of another realm too, where its tokens would count as well",
                key.kid
            ),
            "a key of its own for each realm",
        );
    }
    let all = realms::all(settings);
    let known = |name: &String| all.iter().any(|realm| realm.name == name);
    if let Some(name) =
        settings.oauth.keys.iter().filter_map(|key| key.realm.as_ref()).find(|name| !known(name))
    {
        refuse(
            "oauth.key",
            format!("there is no realm {name:?}"),
            "the name of server.realm or of a [[realm]]",
        );
    }
    let is_user = |key: &&TokenKeySettings| {
        let realm = key.realm.as_ref().unwrap_or(&settings.realm);
        let of = all.iter().find(|view| view.name == realm);
        of.is_some_and(|view| view.users.iter().any(|user| user.name == key.kid))
    };
    if let Some(key) = settings.oauth.keys.iter().find(is_user) {
        refuse(
            "oauth.key",
            format!("{:?} is a user of the same realm", key.kid),
            "a kid that is nobody's name",
        );
    }
    let mut listeners = settings.listen.iter().chain(&settings.tls_listen).chain(&settings.dtls_listen);
    let unserved = listeners.find(|at| realms::served_at(&all, **at, None).is_empty());
    if let Some(listener) = unserved {
        refuse(
            "server.listen",
            format!("no realm serves {listener}"),
            "a [[realm]] that names it in its listen, one without listen and server_names, or users in [auth]",
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
    alternates(settings, problems);
    for (index, realm) in settings.realms.iter().enumerate() {
        one_realm(settings, index, realm, problems);
    }
}

/// Warnings for the log: settings that are valid, but probably a mistake.
pub(crate) fn doubts(settings: &Settings) -> Vec<String> {
    let mut doubts = Vec::new();
    let mut doubt = |key: &str, what: String| doubts.push(format!("{}: {key}: {what}", settings.origin(key)));
    let certificate = match (&settings.tls_cert, &settings.tls_certificates[..]) {
        (Some(_), _) => Some("tls.cert"),
        (None, [_, ..]) => Some("tls.certificates"),
        (None, []) => None,
    };
    let unused = !settings.tcp && settings.tls_listen.is_empty() && settings.dtls_listen.is_empty();
    if let Some(key) = certificate.filter(|_| unused) {
        doubt(
            key,
            "nothing uses it: server.tcp is false, and there is neither tls.listen nor dtls.listen"
                .to_owned(),
        );
    }
    if let Some(all) = settings.proxy_protocol_from.iter().find(|from| from.bits == 0) {
        doubt(
            "server.proxy_protocol_from",
            format!(
                "{}/0 lets anybody who connects by TCP claim any address, and refuses who claims none; name the proxies' \
                 own addresses",
                all.base
            ),
        );
    }
    doubts
}

/// Listeners by TCP, and the keys that name them.
fn stream_listeners(settings: &Settings) -> impl Iterator<Item = (&'static str, SocketAddr)> + '_ {
    let tcp = settings.listen.iter().filter(|_| settings.tcp).map(|at| ("server.listen", *at));
    tcp.chain(settings.tls_listen.iter().map(|at| ("tls.listen", *at)))
}

/// Whether the admin page takes the port of a listener. Its wildcard of IPv6 may stand for IPv4 too; ours never do.
fn collide(admin: SocketAddr, listener: SocketAddr) -> bool {
    let same_family = admin.is_ipv4() == listener.is_ipv4();
    let (any, all) = (admin.ip().is_unspecified(), listener.ip().is_unspecified());
    admin.port() == listener.port()
        && admin.port() != 0
        && (admin.ip() == listener.ip() || any && (same_family || admin.is_ipv6()) || all && same_family)
}

/// Whether one of our listeners is here, as far as settings tell: a wildcard one is on every address that they name, and on
/// loopback.
fn is_ours(settings: &Settings, address: SocketAddr) -> bool {
    let ip = address.ip();
    let relays = settings.relay_addresses.iter().chain(&settings.discovery.addresses);
    let named = relays.flat_map(|relay| [Some(relay.bind), relay.external]).flatten();
    let here = ip.is_loopback() || named.into_iter().any(|named| named == ip);
    let mut listeners = settings.listen.iter().chain(&settings.tls_listen).chain(&settings.dtls_listen);
    listeners.any(|listener| {
        let everywhere = listener.ip().is_unspecified() && listener.is_ipv4() == address.is_ipv4();
        listener.port() == address.port() && (listener.ip() == ip || everywhere && here)
    })
}

/// Appends what is wrong with the `[[alternate]]`s beside the rest.
fn alternates(settings: &Settings, problems: &mut Vec<ConfigError>) {
    for AlternateSettings { alternate, place } in &settings.alternates {
        let mut refuse = |problem: String, expected: &str| {
            problems.push(ConfigError::new(&place.0, "alternate.address", problem, expected));
        };
        let address = alternate.address;
        if is_ours(settings, address) {
            refuse(format!("{address} is this server: clients would go in a circle"), "another server");
        }
        if !settings.auth_required {
            refuse(
                "auth.required is false, and only who has authenticated may be sent elsewhere".to_owned(),
                "auth.required = true, or no [[alternate]] (RFC 8489 section 10)",
            );
        }
    }
}

/// Appends what is wrong with one `[[realm]]` beside the rest.
fn one_realm(settings: &Settings, index: usize, realm: &RealmSettings, problems: &mut Vec<ConfigError>) {
    let name = &realm.name;
    let listens = |address: &SocketAddr| {
        [&settings.listen, &settings.tls_listen, &settings.dtls_listen]
            .iter()
            .any(|all| all.contains(address))
    };
    let mut refuse = |key: &str, problem: String, expected: &str| {
        problems.push(ConfigError::new(&realm.place.0, key, problem, expected));
    };
    if settings.realms[..index].iter().any(|other| other.name == *name) {
        refuse("realm.name", format!("realm {name:?} is listed twice"), "each realm once");
    } else if *name == settings.realm && realms::serves_main(settings) {
        refuse(
            "realm.name",
            format!("{name:?} is server.realm already"),
            "another name, or the users of [auth] moved here",
        );
    }
    let is_empty = realm.users.is_empty() && realm.secrets.is_empty() && !realms::has_tokens(settings, name);
    if is_empty && !realms::names_store(settings) {
        refuse(
            "realm.users",
            format!(
                "realm {name:?} has neither users nor secrets nor an oauth.key: nobody could authenticate"
            ),
            "at least one user, secret or key, or a store that has some",
        );
    }
    if let Some(user) = repeated(realm.users.iter().map(|user| user.name.as_str())) {
        refuse("realm.users", format!("user {user:?} is listed twice"), "each user once");
    }
    if !settings.allow_md5
        && let Some(user) = realm.users.iter().find(|user| user.secret.is_md5_only())
    {
        refuse(
            "realm.users",
            format!(
                "auth.allow_md5 is false, but user {:?} has only an MD5 key and could never authenticate",
                user.name
            ),
            "a password or a SHA-256 key (64 hex digits) for that user",
        );
    }
    if let Some(address) = realm.listen.iter().find(|address| !listens(address)) {
        refuse(
            "realm.listen",
            format!("the server does not listen on {address}"),
            "addresses of server.listen, tls.listen or dtls.listen",
        );
    }
    let others = || settings.realms[..index].iter();
    if let Some(taken) =
        realm.server_names.iter().find(|name| others().any(|other| other.server_names.contains(name)))
    {
        refuse("realm.server_names", format!("{taken} leads to another realm already"), "each name once");
    }
    if realm.max_allocations.is_some_and(|most| most > settings.max_allocations) {
        refuse(
            "realm.allocations",
            format!("it is above limits.allocations {}", settings.max_allocations),
            "at most limits.allocations",
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
