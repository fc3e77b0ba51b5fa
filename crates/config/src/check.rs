//! Checks of settings that are valid one by one but cannot work together.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
};

use turnpike_turn::server::{AllocationLimits, Alternate, Bandwidth, Rates, Transport};

use super::{
    AcmeChallenge, AllowedPeer, AlternateSettings, CertificateName, CredentialsSettings, DatapathChoice,
    FleetSettings, Mistake, RealmSettings, RelayPlace, Settings, TlsSettings, TokenKeySettings,
    UsageSettings,
};
use crate::{
    acme_keys::MOST_NAMES,
    event_keys::MOST_WEBHOOKS,
    limit_keys,
    realms::{self, MOST_REALMS},
    relay_doubts,
    usage_keys::MOST_QUOTAS,
};

/// Keys whose default is capped by another setting. An explicit value above that limit is an error.
pub(crate) fn capped_defaults(settings: &Settings) -> Vec<&'static str> {
    let Settings { credentials, discovery, allocation_limits, .. } = settings;
    let AllocationLimits { allocations, allocations_per_user, .. } = allocation_limits;
    [
        ("credentials.ttl", credentials.ttl > credentials.max_ttl),
        ("nat_discovery.requests_per_source", discovery.requests_per_source > discovery.requests),
        ("limits.allocations", *allocations > relay_ports(settings) && settings.relay.shared_ports == 0),
        ("limits.allocations_per_user", allocations_per_user > allocations),
    ]
    .into_iter()
    .filter_map(|(key, is_above)| (is_above && !settings.is_explicit(key)).then_some(key))
    .collect()
}

/// Appends combinations that cannot work. A default that is too high is not an error; it is only capped.
pub(crate) fn combinations(settings: &Settings, problems: &mut Vec<Mistake>) {
    let mut judge = Judge { settings, problems };
    judge.listeners();
    judge.hand_on();
    judge.admin();
    judge.credentials();
    judge.certificates();
    judge.addresses();
    judge.workers();
    judge.limits();
    judge.rates();
    judge.peers();
    judge.clients();
    judge.users();
    judge.tokens();
    judge.fleet();
    judge.events();
    judge.usage();
    alternates(settings, problems);
    for (index, realm) in settings.realms.iter().enumerate() {
        one_realm(settings, index, realm, problems);
    }
}

struct Judge<'a> {
    settings: &'a Settings,
    problems: &'a mut Vec<Mistake>,
}

impl Judge<'_> {
    fn refuse(&mut self, key: &'static str, problem: impl Into<String>, expected: &str) {
        self.problems.push(Mistake::new(self.settings.origin(key), key, problem, expected));
    }

    fn listeners(&mut self) {
        let settings = self.settings;
        if settings.listen.is_empty() {
            self.refuse("server.listen", "the list is empty", "at least one address to listen on");
        }
        let others = settings.tls.listen.len() + settings.dtls.listen.len();
        if !settings.udp && !settings.tcp && others == 0 {
            let key = if settings.is_explicit("server.udp") { "server.udp" } else { "server.tcp" };
            let problem =
                "server.udp and server.tcp are false, and there is neither tls.listen nor dtls.listen";
            self.refuse(key, problem, "at least one of them");
        }
        let lists = [&settings.listen, &settings.tls.listen, &settings.dtls.listen];
        for (key, list) in ["server.listen", "tls.listen", "dtls.listen"].into_iter().zip(lists) {
            if let Some(address) = repeated(list.iter().filter(|address| address.port() != 0)) {
                self.refuse(key, format!("{address} is listed twice"), "each address once");
            }
        }
        let by_tcp =
            |address: &&SocketAddr| settings.tcp && address.port() != 0 && settings.listen.contains(address);
        if let Some(address) = settings.tls.listen.iter().find(by_tcp) {
            self.refuse(
                "tls.listen",
                format!("{address} is in server.listen too"),
                "addresses that are not in server.listen: with a certificate, those accept TLS clients as well",
            );
        }
        if settings.tls.only && settings.tls.listen.is_empty() {
            self.refuse(
                "tls.only",
                "the key affects only the listeners in tls.listen, and there are none",
                "tls.listen as well; server.listen also accepts plain TCP unless server.tcp is false",
            );
        }
        let all = realms::all(settings);
        let unserved = lists.into_iter().flatten().find(|at| realms::served_at(&all, **at, None).is_empty());
        if let Some(listener) = unserved {
            self.refuse(
                "server.listen",
                format!("no realm serves {listener}"),
                "a [[realm]] that names it in its listen, one without listen and server_names, or users in [auth]",
            );
        }
    }

    fn hand_on(&mut self) {
        let settings = self.settings;
        for to in settings.hand_on.iter().map(|rule| rule.to) {
            let is_here = |at: SocketAddr| {
                let everywhere = at.ip().is_unspecified() && at.is_ipv4() == to.is_ipv4();
                at.port() == to.port() && (at.ip() == to.ip() || everywhere && is_local(settings, to.ip()))
            };
            if let Some((key, listener)) = stream_listeners(settings).find(|(_, at)| is_here(*at)) {
                self.refuse(
                    "server.hand_on",
                    format!("{to} is this server itself: {key} has {listener}"),
                    "the address of a web server; if it uses the same port, listen on addresses that it does not use",
                );
            }
            // All requests would come from the loopback address, which may have full access.
            if settings.admin.tcp().any(is_here) {
                self.refuse(
                    "server.hand_on",
                    format!("{to} is the admin interface, which must not be public"),
                    "the address of a web server",
                );
            }
        }
        if !settings.hand_on.is_empty() && stream_listeners(settings).next().is_none() {
            let problem = "there is no TCP listener: server.tcp is false and tls.listen is empty";
            self.refuse("server.hand_on", problem, "server.tcp = true, or tls.listen");
        }
    }

    fn clients(&mut self) {
        let rules =
            [("clients.allow", &self.settings.clients.allow), ("clients.deny", &self.settings.clients.deny)];
        for (key, rules) in rules {
            if let Some(rule) =
                rules.iter().find(|rule| rule.is_on_networks() && self.settings.geoip.files.is_empty())
            {
                self.refuse(
                    key,
                    format!("{rule} needs a database, and geoip.files is empty"),
                    "geoip.files as well",
                );
            }
        }
    }

    fn admin(&mut self) {
        let settings = self.settings;
        settings.admin.check(|key| settings.origin(key).clone(), self.problems);
        let taken = |admin| {
            let taken = stream_listeners(settings).find(|(_, at)| collide(admin, *at));
            taken.map(|found| (admin, found))
        };
        let Some((admin, (key, listener))) = settings.admin.tcp().find_map(taken) else { return };
        if settings.is_explicit("admin.listen") {
            self.refuse(
                "admin.listen",
                format!("{admin} is taken: {key} lists {listener}, which also accepts TCP"),
                "an address that neither server.listen nor tls.listen uses, or \"off\"",
            );
        } else {
            let problem = format!(
                "{listener} is taken: the admin interface is on {admin} unless admin.listen changes it"
            );
            self.refuse(key, problem, "another port, or another admin.listen (--admin)");
        }
    }

    fn credentials(&mut self) {
        let settings = self.settings;
        CredentialsSettings::check(settings, self.problems);
        let listen = &settings.credentials.listen;
        if let Some(address) = repeated(listen.iter().filter(|address| address.port() != 0)) {
            self.refuse("credentials.listen", format!("{address} is listed twice"), "each address once");
        }
        let others = || stream_listeners(settings).chain(settings.admin.tcp().map(|at| ("admin.listen", at)));
        let taken = |own: &SocketAddr| others().find(|(_, at)| collide(*own, *at)).map(|found| (*own, found));
        if let Some((own, (key, other))) = listen.iter().find_map(taken) {
            let problem = format!("{own} is taken: {key} lists {other}, which also accepts TCP");
            self.refuse("credentials.listen", problem, "an address that no other listener uses");
        }
    }

    fn certificates(&mut self) {
        let settings = self.settings;
        let none = settings.tls.certificates.is_empty() && settings.tls.acme.is_empty();
        let both = "both tls.cert and tls.key, or neither";
        match (&settings.tls.cert, &settings.tls.key) {
            (Some(_), None) => self.refuse("tls.cert", "there is no tls.key for it", both),
            (None, Some(_)) => self.refuse("tls.key", "there is no tls.cert for it", both),
            (None, None) if none && !settings.tls.listen.is_empty() => self.refuse(
                "tls.listen",
                "there is no certificate",
                "tls.cert and tls.key (--tls-cert FILE --tls-key FILE) as well, or tls.acme (--acme NAME)",
            ),
            _ => {}
        }
        if settings.tls.cert.is_none() && none && !settings.dtls.listen.is_empty() {
            self.refuse(
                "dtls.listen",
                "there is no certificate",
                "tls.cert and tls.key (--tls-cert FILE --tls-key FILE), an ECDSA certificate, as well, or tls.acme (--acme NAME)",
            );
        }
        if settings.tls.client_ca.is_some() && settings.tls.cert.is_none() && none {
            let expected = "tls.cert and tls.key, or tls.acme, as well";
            self.refuse("tls.client_ca", "there is no certificate for TLS", expected);
        }
        self.ordered_certificates();
    }

    fn ordered_certificates(&mut self) {
        let Settings { acme, tls, store, .. } = self.settings;
        if tls.acme.is_empty() {
            return;
        }
        if tls.acme.len() > MOST_NAMES {
            let problem = format!("{} names", tls.acme.len());
            self.refuse("tls.acme", problem, &format!("at most {MOST_NAMES}"));
        }
        if store.state.directory().is_none() {
            self.refuse(
                "tls.acme",
                "there is no directory for the certificates and the account",
                "store.state (--state DIR) as well",
            );
        }
        let is_dns = acme.challenge == AcmeChallenge::Dns;
        if is_dns && acme.hook.is_none() {
            self.refuse("acme.challenge", "there is no acme.hook to set the record", "acme.hook as well");
        }
        match (acme.eab_key_id.is_empty(), &acme.eab_key) {
            (false, None) => {
                self.refuse("acme.eab_key_id", "there is no acme.eab_key for it", "both or neither");
            }
            (true, Some(_)) => {
                self.refuse("acme.eab_key", "there is no acme.eab_key_id for it", "both or neither");
            }
            _ => {}
        }
        for name in &tls.acme {
            match name {
                CertificateName::Wildcard(_) if !is_dns => self.refuse(
                    "tls.acme",
                    format!("{name} is a wildcard"),
                    "acme.challenge = \"dns-01\" as well, the only one that validates wildcards",
                ),
                CertificateName::Ip(_) if is_dns => self.refuse(
                    "tls.acme",
                    format!("{name} is an address, and acme.challenge is \"dns-01\""),
                    "another acme.challenge: a record in the DNS cannot validate addresses",
                ),
                _ => {}
            }
        }
    }

    fn addresses(&mut self) {
        let settings = self.settings;
        let places = &settings.relay.addresses;
        if let Some(address) = repeated(places.iter().filter_map(|place| Some(place.fixed()?.bind))) {
            self.refuse("relay.addresses", format!("{address} is listed twice"), "each address once");
        }
        let detected = places.iter().filter(|place| place.fixed().is_none());
        let families = detected.map(|place| match place {
            RelayPlace::Behind(external) => Some(external.is_ipv4()),
            _ => None,
        });
        if repeated(families).is_some() {
            self.refuse(
                "relay.addresses",
                "two entries require the detection of an address of the same family, but only one can be detected",
                "auto=PUBLIC once for IPv4 and once for IPv6, auto once",
            );
        }
        let discovery = &settings.discovery;
        if !settings.udp && !discovery.addresses.is_empty() {
            self.refuse(
                "nat_discovery.addresses",
                "NAT discovery uses UDP, and server.udp is false",
                "server.udp = true, or [] for no NAT discovery",
            );
        }
        if discovery.families().any(|of| of.len() != 2 || of[0].bind == of[1].bind) {
            self.refuse(
                "nat_discovery.addresses",
                "clients need two different addresses of the same family",
                "two addresses for each family, or [] for no NAT discovery",
            );
        }
    }

    fn workers(&mut self) {
        let settings = self.settings;
        if settings.busy_poll_us > 0 && settings.coalesce_us > 0 {
            self.refuse(
                "server.coalesce_us",
                "server.busy_poll_us is set too, and the two contradict each other",
                "only one of them (--busy-poll-us for less latency, --coalesce-us for less CPU)",
            );
        }
        // Skipped for `workers = "auto"`: the number of cores differs between machines.
        let (shared, workers, room) =
            (settings.relay.shared_ports, settings.workers.unwrap_or(1), settings.relay.ports.len());
        if 2 * shared * workers > room {
            self.refuse(
                "relay.shared_ports",
                format!(
                    "{shared} ports for UDP clients and {shared} for others, for each worker ({workers} in total), do not fit into the \
                     {room} ports of relay.ports"
                ),
                "fewer shared ports, or more ports in relay.ports",
            );
        }
    }

    fn limits(&mut self) {
        let settings = self.settings;
        for (key, one, all, of_all) in [
            (
                "nat_discovery.requests_per_source",
                settings.discovery.requests_per_source as usize,
                settings.discovery.requests as usize,
                "nat_discovery.requests",
            ),
            (
                "limits.allocations_per_user",
                settings.allocation_limits.allocations_per_user,
                settings.allocation_limits.allocations,
                "limits.allocations",
            ),
        ] {
            if settings.is_explicit(key) && one > all {
                self.refuse(key, format!("{one} is above {of_all} {all}"), &format!("at most {of_all}"));
            }
        }
        let (default, max) = (settings.limits.default_lifetime, settings.limits.max_lifetime);
        if default > max {
            let key = ["limits.default_lifetime", "limits.max_lifetime"];
            self.refuse(
                key[usize::from(!settings.is_explicit(key[0]))],
                format!("default_lifetime {default} is above max_lifetime {max}"),
                "default_lifetime at most max_lifetime (both in seconds)",
            );
        }
        let (most, room) = (settings.allocation_limits.allocations, relay_ports(settings));
        if settings.is_explicit("limits.allocations") && most > room && settings.relay.shared_ports == 0 {
            self.refuse(
                "limits.allocations",
                format!("{most} allocations do not fit into the {room} ports of relay.ports"),
                "at most one allocation per port and relay address; widen relay.ports or add relay addresses",
            );
        }
        if settings.realms.len() > MOST_REALMS {
            let problem = format!("there are {} [[realm]]s besides it", settings.realms.len());
            self.refuse("server.realm", problem, &format!("at most {MOST_REALMS}"));
        }
    }

    fn rates(&mut self) {
        let settings = self.settings;
        let rates = [
            ("limits.bits_per_second_per_allocation", settings.rates.bits_per_second_per_allocation),
            ("limits.bits_per_second_per_user", settings.rates.bits_per_second_per_user),
            ("limits.bits_per_second_per_realm", settings.rates.bits_per_second_per_realm),
            ("limits.bits_per_second", settings.rates.bits_per_second),
        ];
        for (index, (key, rate)) in rates.into_iter().enumerate() {
            let Some(rate) = rate else { continue };
            let above = rates[index + 1..].iter().find(|(_, all)| all.is_some_and(|all| rate > all));
            if let Some((of_all, Some(all))) = above {
                self.refuse(key, format!("{rate} is above {of_all} {all}"), &format!("at most {of_all}"));
            }
        }
        let (most, all) =
            (settings.allocation_limits.allocations_per_prefix, settings.allocation_limits.allocations);
        if let Some(most) = most.filter(|most| *most > all) {
            let problem = format!("{most} is above limits.allocations {all}");
            self.refuse("limits.allocations_per_prefix", problem, "at most limits.allocations");
        }
        if let Some(realm) = limit_keys::without_ports(settings) {
            self.refuse(
                "relay.ports",
                format!("the realms' relay_ports use all of them, so realm {realm:?} has none"),
                "a wider range, or relay_ports for every realm",
            );
        }
    }

    fn peers(&mut self) {
        let names = self.settings.allow.iter().filter_map(AllowedPeer::name).count();
        if names > AllowedPeer::MOST_NAMES {
            let expected = format!("at most {}, or prefixes instead", AllowedPeer::MOST_NAMES);
            self.refuse("peers.allow", format!("{names} host names"), &expected);
        }
        if self.settings.allow_only && self.settings.allow.is_empty() {
            self.refuse(
                "peers.allow_only",
                "it is true, but peers.allow is empty: every peer would be refused",
                "peers.allow (--allow-peer) as well, or false",
            );
        }
    }

    fn users(&mut self) {
        let settings = self.settings;
        if let Some(name) = repeated(settings.auth.users.iter().map(|user| user.name.as_str())) {
            self.refuse("auth.users", format!("user {name:?} is listed twice"), "each user once");
        }
        if realms::has_anybody(settings) && !settings.auth.required {
            self.refuse(
                "auth.required",
                "it is false, but users, secrets or token keys are configured",
                "true, or neither auth.users nor auth.secrets nor oauth.key nor store.url",
            );
        }
        if !settings.realms.is_empty() && !settings.auth.required {
            let problem = "it is false, but realms with users are configured";
            self.refuse("auth.required", problem, "true, or no [[realm]]");
        }
        if settings.auth.binding && !settings.auth.required {
            self.refuse("auth.binding", "auth.required is false, so no request needs credentials", "false");
        }
        if settings.auth.binding && !settings.discovery.addresses.is_empty() {
            let problem = "NAT discovery answers Binding requests without credentials";
            self.refuse("auth.binding", problem, "false, or no nat_discovery.addresses");
        }
        if !settings.auth.allow_md5
            && let Some(user) = settings.auth.users.iter().find(|user| user.secret.is_md5_only())
        {
            self.refuse(
                "auth.allow_md5",
                format!(
                    "it is false, but user {:?} has only an MD5 key and could never authenticate",
                    user.name
                ),
                "true, or a password or a SHA-256 key (64 hex digits) for that user",
            );
        }
    }

    fn events(&mut self) {
        let events = &self.settings.events;
        if events.webhooks.is_empty() {
            return;
        }
        if events.webhooks.len() > MOST_WEBHOOKS {
            let problem = format!("there are {} webhooks", events.webhooks.len());
            self.refuse("events.webhook", problem, &format!("at most {MOST_WEBHOOKS}"));
        }
        if repeated(events.webhooks.iter().map(|webhook| &webhook.url)).is_some() {
            self.refuse("events.webhook", "two webhooks have the same url", "each url once");
        }
        if !events.allow_private && events.webhooks.iter().any(|webhook| webhook.url.starts_with("http://")) {
            let expected = "https://, or events.allow_private = true for a receiver in your own network";
            self.refuse(
                "events.webhook",
                "a url begins with http://, so others could read the events",
                expected,
            );
        }
        if self.settings.store.state.directory().is_none() {
            let problem = "there is no directory for undelivered events: store.state is \"off\", or no home directory is set";
            self.refuse("events.webhook", problem, "a directory in store.state");
        }
    }

    fn usage(&mut self) {
        let UsageSettings { days, quotas, .. } = &self.settings.usage;
        if let Some(kept) = quotas.iter().map(|quota| quota.per.days()).max().filter(|kept| kept > days) {
            let problem = format!("usage.days is {days}, so the sums of its period are not kept");
            self.refuse("usage.quota", problem, &format!("usage.days of {kept} or more"));
        }
        if quotas.len() > MOST_QUOTAS {
            let problem = format!("there are {} quotas", quotas.len());
            self.refuse("usage.quota", problem, &format!("at most {MOST_QUOTAS}"));
        }
    }

    fn tokens(&mut self) {
        let (settings, keys) = (self.settings, &self.settings.oauth.keys);
        // `oauth.server_name` is at most 255 bytes long, so the realm name that replaces it must be too.
        if !keys.is_empty() && realms::third_party(settings).server_name.len() > 255 {
            self.refuse(
                "oauth.server_name",
                "it defaults to server.realm, which is longer than 255 bytes",
                "a server name of its own",
            );
        }
        let realm_of = |key: &TokenKeySettings| key.realm.clone().unwrap_or_else(|| settings.realm.clone());
        if let Some((kid, realm)) = repeated(keys.iter().map(|key| (key.kid.clone(), realm_of(key)))) {
            let problem = format!("{kid:?} is listed twice in realm {realm:?}");
            self.refuse("oauth.key", problem, "each kid once in a realm");
        }
        // A token does not name its realm, so each realm needs a different key.
        let elsewhere = |key: &&TokenKeySettings| {
            keys.iter().any(|other| other.key == key.key && realm_of(other) != realm_of(key))
        };
        if let Some(key) = keys.iter().find(elsewhere) {
            let kid = &key.kid;
            self.refuse(
                "oauth.key",
                format!("another realm has the key of {kid:?} too, and would accept its tokens"),
                "a different key for each realm",
            );
        }
        let all = realms::all(settings);
        let known = |name: &&String| all.iter().any(|realm| realm.name == **name);
        if let Some(name) = keys.iter().filter_map(|key| key.realm.as_ref()).find(|name| !known(name)) {
            let expected = "the name of server.realm or of a [[realm]]";
            self.refuse("oauth.key", format!("there is no realm {name:?}"), expected);
        }
        let is_user = |key: &&TokenKeySettings| {
            let of = all.iter().find(|view| view.name == realm_of(key));
            of.is_some_and(|view| view.users.iter().any(|user| user.name == key.kid))
        };
        if let Some(key) = keys.iter().find(is_user) {
            let problem = format!("{:?} is a user of the same realm", key.kid);
            self.refuse("oauth.key", problem, "a kid that is not a username");
        }
    }
}

impl Judge<'_> {
    fn fleet(&mut self) {
        let settings = self.settings;
        if settings.fleet.url.is_none() {
            return;
        }
        if settings.fleet.secret.is_none() {
            self.refuse(
                "fleet.secret",
                "it is missing; the nodes of a fleet recognize each other by it",
                "the same secret on all nodes, for example from `openssl rand -hex 32`, in the file or in TURNPIKE_FLEET_SECRET_FILE",
            );
        }
        if !settings.auth.required {
            self.refuse(
                "fleet.url",
                "auth.required is false, and only authenticated clients may be redirected",
                "auth.required = true, or no fleet (RFC 8489 section 10)",
            );
        }
        let of_realms = settings.realms.iter().filter_map(|realm| realm.allocations).max();
        let limit = settings.fleet.allocations as usize;
        if limit > 0 && of_realms.is_some_and(|most| most > limit) {
            let problem = format!("a [[realm]] may have more than {limit}");
            self.refuse("fleet.allocations", problem, "at least the limit of each realm, or 0");
        }
    }
}

/// Size of a 401 response without its realm, in bytes.
const CHALLENGE: usize = 72;
/// Size of the shortest request that gets a 401 response, in bytes.
const SMALL_REQUEST: usize = 28;

pub(crate) fn doubts(settings: &Settings) -> Vec<String> {
    let mut doubts = Vec::new();
    let mut doubt = |key: &str, what: String| doubts.push(format!("{}: {key}: {what}", settings.origin(key)));
    // Detected addresses are checked once they are known.
    let fixed: Option<Vec<_>> = settings.relay.addresses.iter().map(RelayPlace::fixed).collect();
    relay_doubts(settings, &fixed.unwrap_or_default())
        .into_iter()
        .for_each(|what| doubt("relay.addresses", what));
    let certificate = match (&settings.tls.cert, &settings.tls.certificates[..]) {
        (Some(_), _) => Some("tls.cert"),
        (None, [_, ..]) => Some("tls.certificates"),
        (None, []) => (!settings.tls.acme.is_empty()).then_some("tls.acme"),
    };
    let unused = !settings.tcp && settings.tls.listen.is_empty() && settings.dtls.listen.is_empty();
    if let Some(key) = certificate.filter(|_| unused) {
        doubt(
            key,
            "nothing uses it: server.tcp is false, and there is neither tls.listen nor dtls.listen"
                .to_owned(),
        );
    }
    for realm in realms::all(settings) {
        let padded = |text: &str| text.len().next_multiple_of(4);
        let server_name = if realm.has_tokens() { 4 + padded(&settings.oauth.server_name) } else { 0 };
        let bytes = CHALLENGE + padded(realm.name) + server_name;
        if bytes > 4 * SMALL_REQUEST {
            let key = if realm.name == settings.realm { "server.realm" } else { "realm" };
            let what =
                if realm.has_tokens() { "the realm and oauth.server_name are" } else { "the realm is" };
            doubt(
                key,
                format!(
                    "{what} long: a forged request of {SMALL_REQUEST} bytes draws a reply of {bytes} bytes; use a shorter name, or set \
                     limits.refusals_per_prefix"
                ),
            );
        }
    }
    if settings.fleet.url.is_none() && settings.fleet != FleetSettings::default() {
        doubt("fleet.url", "it is missing, so the other keys of [fleet] have no effect".to_owned());
    }
    if let Some(all) = settings.proxy_protocol_from.iter().find(|from| from.bits == 0) {
        doubt(
            "server.proxy_protocol_from",
            format!(
                "{}/0 lets every TCP client claim any address, and refuses those without a PROXY header; list the proxies' \
                 own addresses",
                all.base
            ),
        );
    }
    let has_rates = limit_keys::bandwidth(settings)
        != Bandwidth { burst_ms: settings.rates.burst, ..Bandwidth::default() };
    if settings.datapath == DatapathChoice::Kernel && has_rates {
        doubt(
            "server.datapath",
            "clients with a rate limit are relayed in user space, where the limit is enforced".to_owned(),
        );
    }
    doubts
}

fn stream_listeners(settings: &Settings) -> impl Iterator<Item = (&'static str, SocketAddr)> + '_ {
    let tcp = settings.listen.iter().filter(|_| settings.tcp).map(|at| ("server.listen", *at));
    tcp.chain(settings.tls.listen.iter().map(|at| ("tls.listen", *at)))
}

/// Returns true if both need the same port. Only the admin interface's IPv6 wildcard can include IPv4.
fn collide(admin: SocketAddr, listener: SocketAddr) -> bool {
    let same_family = admin.is_ipv4() == listener.is_ipv4();
    let (any, all) = (admin.ip().is_unspecified(), listener.ip().is_unspecified());
    admin.port() == listener.port()
        && admin.port() != 0
        && (admin.ip() == listener.ip() || any && (same_family || admin.is_ipv6()) || all && same_family)
}

/// Returns true if this alternate is one of our listeners. A wildcard matches every configured address.
fn is_ours(settings: &Settings, Alternate { address, transports, .. }: &Alternate) -> bool {
    let ip = address.ip();
    let here = is_local(settings, ip);
    listeners(settings).any(|(transport, listener)| {
        let everywhere = listener.ip().is_unspecified() && listener.is_ipv4() == address.is_ipv4();
        let is_here = listener.port() == address.port() && (listener.ip() == ip || everywhere && here);
        is_here && (transports.is_empty() || transports.contains(&transport))
    })
}

/// Returns true for loopback addresses and the configured addresses of this machine.
fn is_local(settings: &Settings, ip: IpAddr) -> bool {
    let discovery = settings.discovery.addresses.iter().copied().map(RelayPlace::At);
    let places = settings.relay.addresses.iter().copied().chain(discovery);
    ip.is_loopback() || places.flat_map(|place| place.named().collect::<Vec<_>>()).any(|named| named == ip)
}

fn listeners(settings: &Settings) -> impl Iterator<Item = (Transport, SocketAddr)> + '_ {
    let TlsSettings { cert, certificates, acme, .. } = &settings.tls;
    let has_certificate = cert.is_some() || !certificates.is_empty() || !acme.is_empty();
    let lists = [
        (Transport::Udp, settings.udp, &settings.listen),
        (Transport::Tcp, settings.tcp, &settings.listen),
        (Transport::Tls, settings.tcp && has_certificate, &settings.listen),
        (Transport::Tls, true, &settings.tls.listen),
        (Transport::Dtls, true, &settings.dtls.listen),
    ];
    let served = lists.into_iter().filter(|(_, is_served, _)| *is_served);
    served.flat_map(|(transport, _, list)| list.iter().map(move |address| (transport, *address)))
}

fn alternates(settings: &Settings, problems: &mut Vec<Mistake>) {
    for AlternateSettings { alternate, place } in &settings.alternates {
        let mut refuse = |problem: String, expected: &str| {
            problems.push(Mistake::new(&place.0, "alternate.address", problem, expected));
        };
        let address = alternate.address;
        if is_ours(settings, alternate) {
            refuse(
                format!("{address} is this server: clients would be redirected in a loop"),
                "another server",
            );
        }
        if !settings.auth.required {
            refuse(
                "auth.required is false, and only authenticated clients may be redirected".to_owned(),
                "auth.required = true, or no [[alternate]] (RFC 8489 section 10)",
            );
        }
    }
}

fn one_realm(settings: &Settings, index: usize, realm: &RealmSettings, problems: &mut Vec<Mistake>) {
    let name = &realm.name;
    let listens = |address: &SocketAddr| listeners(settings).any(|(_, listener)| listener == *address);
    let mut refuse = |key: &str, problem: String, expected: &str| {
        problems.push(Mistake::new(&realm.place.0, key, problem, expected));
    };
    if settings.realms[..index].iter().any(|other| other.name == *name) {
        refuse("realm.name", format!("realm {name:?} is listed twice"), "each realm once");
    } else if *name == settings.realm && realms::serves_main(settings) {
        refuse(
            "realm.name",
            format!("{name:?} is server.realm already"),
            "another name; or move the users in [auth] to this [[realm]]",
        );
    }
    realm_users(settings, realm, &mut refuse);
    if let Some(address) = realm.listen.iter().find(|address| !listens(address)) {
        refuse(
            "realm.listen",
            format!("the server does not listen on {address}"),
            "addresses in server.listen, tls.listen or dtls.listen",
        );
    }
    let others = || settings.realms[..index].iter();
    if let Some(taken) =
        realm.server_names.iter().find(|name| others().any(|other| other.server_names.contains(name)))
    {
        refuse("realm.server_names", format!("{taken} already selects another realm"), "each name once");
    }
    realm_rates(settings, realm, &mut refuse);
    if let Some(range) = &realm.relay_ports {
        let ports = &settings.relay.ports;
        if !(ports.contains(range.start()) && ports.contains(range.end())) {
            refuse(
                "realm.relay_ports",
                format!(
                    "{}-{} is not within relay.ports {}-{}",
                    range.start(),
                    range.end(),
                    ports.start(),
                    ports.end()
                ),
                "a range within relay.ports",
            );
        }
    }
    // A realm's limit covers all nodes of a fleet together.
    let alone = settings.fleet.url.is_none();
    if alone && realm.allocations.is_some_and(|most| most > settings.allocation_limits.allocations) {
        refuse(
            "realm.allocations",
            format!("it is above limits.allocations {}", settings.allocation_limits.allocations),
            "at most limits.allocations",
        );
    }
}

fn realm_users(settings: &Settings, realm: &RealmSettings, refuse: &mut impl FnMut(&str, String, &str)) {
    let name = &realm.name;
    let is_empty = realm.users.is_empty() && realm.secrets.is_empty() && !realms::has_tokens(settings, name);
    if is_empty && !realms::names_store(settings) {
        refuse(
            "realm.users",
            format!(
                "realm {name:?} has neither users nor secrets nor an oauth.key, so no client could authenticate"
            ),
            "at least one user, secret or key, or a store that has some",
        );
    }
    if let Some(user) = repeated(realm.users.iter().map(|user| user.name.as_str())) {
        refuse("realm.users", format!("user {user:?} is listed twice"), "each user once");
    }
    if !settings.auth.allow_md5
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
}

fn realm_rates(settings: &Settings, realm: &RealmSettings, refuse: &mut impl FnMut(&str, String, &str)) {
    let Rates { per_allocation, per_user, per_realm } = limit_keys::rates_of(settings, realm);
    let rates = [
        ("bits_per_second_per_allocation", per_allocation),
        ("bits_per_second_per_user", per_user),
        ("bits_per_second", per_realm),
        ("limits.bits_per_second", settings.rates.bits_per_second),
    ];
    let said = [realm.bits_per_second_per_allocation, realm.bits_per_second_per_user, realm.bits_per_second];
    for (index, said) in said.into_iter().enumerate() {
        let Some(Some(rate)) = said else { continue };
        let above = rates[index + 1..].iter().find(|(_, all)| all.is_some_and(|all| rate > all));
        if let Some((of_all, Some(all))) = above {
            let problem = format!("{rate} is above {of_all} {all}, which applies in this realm");
            refuse(&format!("realm.{}", rates[index].0), problem, &format!("at most {of_all}"));
        }
    }
}

/// Maximum number of relayed transport addresses. Without configured addresses, detection finds at most one
/// per family.
fn relay_ports(settings: &Settings) -> usize {
    let ports = usize::from(settings.relay.ports.end() - settings.relay.ports.start()) + 1;
    let places = &settings.relay.addresses;
    let addresses = if places.is_empty() || **places == [RelayPlace::Detected] { 2 } else { places.len() };
    ports * addresses
}

fn repeated<T: std::hash::Hash + Eq + Clone>(items: impl Iterator<Item = T>) -> Option<T> {
    let mut seen = HashSet::new();
    let mut items = items;
    items.find(|item| !seen.insert(item.clone()))
}
