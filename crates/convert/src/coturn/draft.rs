//! Settings of a turnserver.conf, which are collected first because options can change each other's meaning.

use std::{
    collections::HashSet,
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    path::Path,
};

use turnpike_turn::server::AllocationLimits;

use super::{
    CoturnHost,
    peers::{OwnAddresses, PeerLists, PeerRules},
};
use crate::{
    toml_text::{quoted, strings},
    translation::Note,
};

#[derive(Default)]
pub(super) struct CoturnDraft {
    pub(super) listening_ips: Vec<IpAddr>,
    pub(super) listening_port: Option<u16>,
    pub(super) tls_listening_port: Option<u16>,
    pub(super) alt_listening_port: Option<u16>,
    pub(super) aux_servers: Vec<SocketAddr>,
    pub(super) relay_ips: Vec<IpAddr>,
    /// Public address, and the local one behind it.
    pub(super) external_ips: Vec<(IpAddr, Option<IpAddr>)>,
    pub(super) relay_threads: Option<usize>,
    pub(super) cpus: Option<usize>,
    pub(super) min_port: Option<u16>,
    pub(super) max_port: Option<u16>,
    pub(super) buffer: Option<usize>,
    pub(super) no_udp: bool,
    pub(super) no_tcp: bool,
    pub(super) no_tls: bool,
    /// `None` if the option is not set, which means off in coturn 4.17 and on in 4.6.
    pub(super) dtls: Option<bool>,
    pub(super) multiplex_peer: bool,
    pub(super) cert: Option<String>,
    pub(super) pkey: Option<String>,
    pub(super) pkey_pwd: Option<String>,
    pub(super) ca_file: Option<String>,
    pub(super) no_auth: bool,
    pub(super) lt_cred_mech: bool,
    pub(super) use_auth_secret: bool,
    pub(super) oauth: bool,
    pub(super) users: Vec<String>,
    pub(super) secrets: Vec<String>,
    pub(super) realm: Option<String>,
    pub(super) server_name: Option<String>,
    /// Connection string of the store, unparsed.
    pub(super) store: Option<String>,
    pub(super) user_quota: Option<usize>,
    pub(super) total_quota: Option<usize>,
    /// Bits per second.
    pub(super) max_bps: Option<u64>,
    pub(super) bps_capacity: Option<u64>,
    pub(super) max_lifetime: Option<u32>,
    pub(super) idle: Option<u32>,
    pub(super) nonce_lifetime: Option<u32>,
    pub(super) peers: PeerLists,
    pub(super) no_tcp_relay: bool,
    pub(super) stun_only: bool,
    pub(super) secure_stun: bool,
    pub(super) channel_lifetime: Option<u32>,
    pub(super) permission_lifetime: Option<u32>,
    pub(super) mobility: Option<bool>,
    pub(super) old_channels: Option<bool>,
    pub(super) software: Option<bool>,
    pub(super) rfc5780: bool,
    pub(super) alternates: Vec<(SocketAddr, AlternateClients)>,
    pub(super) prometheus: bool,
    pub(super) prometheus_port: Option<u16>,
    pub(super) prometheus_address: Option<IpAddr>,
    pub(super) log_level: Option<&'static str>,
}

/// Clients that are redirected to an alternate server.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum AlternateClients {
    /// UDP and TCP clients that have no alternate server of their own.
    Plain,
    Udp,
    Tcp,
    Secure,
}

const DEFAULT_DATABASES: [&str; 3] = ["/var/lib/turn/turndb", "/var/db/turndb", "/usr/local/var/db/turndb"];

struct TomlWriter {
    text: String,
    section: &'static str,
}

impl TomlWriter {
    fn key(&mut self, section: &'static str, key: &str, value: impl std::fmt::Display) {
        if self.section != section {
            let gap = if self.text.is_empty() { "" } else { "\n" };
            let _ = writeln!(self.text, "{gap}[{section}]");
            self.section = section;
        }
        let _ = writeln!(self.text, "{key} = {value}");
    }

    fn some(&mut self, section: &'static str, key: &str, value: Option<impl std::fmt::Display>) {
        if let Some(value) = value {
            self.key(section, key, value);
        }
    }
}

impl CoturnDraft {
    pub(super) fn finish(mut self, machine: &CoturnHost, notes: &mut Vec<Note>) -> String {
        let mut file = TomlWriter { text: String::new(), section: "" };
        let mut note = |option: &str, text: String| {
            notes.push(Note { line: 0, option: option.to_owned(), text, is_harmless: false });
        };
        self.server(&mut file);
        self.tls(&mut file, machine, &mut note);
        let ports = self.relay(&mut file, &mut note);
        self.auth(&mut file, machine, &mut note);
        self.limits(&mut file, ports);
        self.peers(&mut file, machine, &mut note);
        self.discovery(&mut file, &mut note);
        self.metrics(&mut file, &mut note);
        file.some("log", "level", self.log_level.map(quoted));
        self.others(&mut file);
        file.text
    }

    /// Returns true if the file uses this address as one of the server's own addresses.
    pub(super) fn names(&self, ip: IpAddr) -> bool {
        let external = self.external_ips.iter().flat_map(|(public, local)| [Some(*public), *local]);
        let listeners = self.aux_servers.iter().map(SocketAddr::ip);
        let all = self.listening_ips.iter().chain(&self.relay_ips).copied();
        all.chain(listeners).chain(external.flatten()).any(|own| own == ip)
    }

    /// Returns true if the file lists local addresses to listen on.
    pub(super) fn names_local_addresses(&self) -> bool {
        let has_local = self.external_ips.iter().any(|(_, local)| local.is_some());
        has_local || self.listening_ips.iter().chain(&self.relay_ips).any(|ip| !ip.is_unspecified())
    }

    fn ports(&self) -> RangeInclusive<u16> {
        self.min_port.unwrap_or(49_152)..=self.max_port.unwrap_or(65_535)
    }

    fn port(&self) -> u16 {
        self.listening_port.unwrap_or(3478)
    }

    fn listeners(&self, port: u16) -> Vec<SocketAddr> {
        let all = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        let ips = if self.listening_ips.is_empty() { &all[..] } else { &self.listening_ips };
        once(ips.iter().map(|ip| SocketAddr::new(*ip, port)).collect())
    }

    fn server(&self, file: &mut TomlWriter) {
        let named =
            !self.listening_ips.is_empty() || self.listening_port.is_some() || !self.aux_servers.is_empty();
        if named {
            let mut listen = self.listeners(self.port());
            listen.extend(&self.aux_servers);
            file.key("server", "listen", strings(&once(listen)));
        }
        if self.no_udp {
            file.key("server", "udp", false);
        }
        if self.no_tcp {
            file.key("server", "tcp", false);
        }
        if self.stun_only {
            file.key("server", "stun_only", true);
        }
        file.some("server", "realm", self.realm.as_deref().map(quoted));
        if self.software == Some(false) {
            file.key("server", "software", quoted(""));
        }
        // 0 relay threads mean that a single thread of coturn does everything.
        file.some("server", "workers", self.relay_threads.or(self.cpus).map(|threads| threads.max(1)));
    }

    fn tls(&self, file: &mut TomlWriter, machine: &CoturnHost, note: &mut impl FnMut(&str, String)) {
        let dtls = self.dtls == Some(true);
        let (cert, key) = match (&self.cert, &self.pkey) {
            (Some(cert), Some(key)) => (cert, key),
            (None, None) => {
                let is_wanted = self.tls_listening_port.is_some() && !self.no_tls;
                for (option, is_wanted) in [("dtls", dtls), ("tls-listening-port", is_wanted)] {
                    if is_wanted {
                        let why =
                            "there is no cert and no pkey, so neither coturn nor turnpike has TLS or DTLS";
                        note(option, why.to_owned());
                    }
                }
                return;
            }
            (Some(_), None) => return note("cert", "there is no pkey for it".to_owned()),
            (None, Some(_)) => return note("pkey", "there is no cert for it".to_owned()),
        };
        if self.no_tls && !dtls {
            return;
        }
        let port = self.tls_listening_port.unwrap_or(5349);
        if self.no_tls {
            note("no-tls", "with a certificate for DTLS, the TCP listeners accept TLS too".to_owned());
        } else {
            file.key("tls", "listen", strings(&self.listeners(port)));
        }
        file.key("tls", "cert", quoted(cert));
        file.key("tls", "key", quoted(key));
        file.some("tls", "key_password", self.pkey_pwd.as_deref().map(quoted));
        file.some("tls", "client_ca", self.ca_file.as_deref().map(quoted));
        if self.ca_file.is_some() && dtls {
            note("CA-file", "DTLS clients need no certificate".to_owned());
        }
        for (option, path) in [("cert", cert), ("pkey", key)] {
            if !Path::new(path).is_absolute() {
                note(
                    option,
                    format!("{path} is relative to the directory where turnpike starts: write the full path"),
                );
            }
        }
        let by_tls = self.listeners(port);
        let can_dtls = (machine.can_dtls)(Path::new(cert), Path::new(key));
        match (self.dtls, can_dtls) {
            (Some(false), _) => {}
            (Some(true), Some(false)) => note("dtls", no_dtls(&by_tls)),
            (Some(true), _) => {
                let both = once([self.listeners(self.port()), by_tls].concat());
                file.key("dtls", "listen", strings(&both));
                if can_dtls.is_none() {
                    let why =
                        "DTLS needs an ECDSA certificate (P-256 or P-384); without one, remove dtls.listen";
                    note("dtls", why.to_owned());
                }
            }
            // coturn 4.6 and older serve DTLS along with TLS unless disabled.
            (None, Some(true)) if !self.no_udp => file.key("dtls", "listen", strings(&by_tls)),
            (None, _) if !self.no_udp => note("cert", no_dtls(&by_tls)),
            (None, _) => {}
        }
    }

    fn relay(&mut self, file: &mut TomlWriter, note: &mut impl FnMut(&str, String)) -> usize {
        let addresses = self.relay_addresses(note);
        if !addresses.is_empty() {
            file.key("relay", "addresses", strings(&addresses));
        }
        let ports = self.ports();
        if self.min_port.is_some() || self.max_port.is_some() {
            file.key("relay", "ports", quoted(&format!("{}-{}", ports.start(), ports.end())));
        }
        if self.multiplex_peer {
            file.key("relay", "shared_ports", 1);
            note(
                "multiplex-peer",
                "a shared port distinguishes clients by their peers' addresses, but coturn's does so by address and port: if many clients talk to \
                 one media server, raise relay.shared_ports or remove it (docs/serve.md)"
                    .to_owned(),
            );
        }
        file.some("relay", "listener_buffer", self.buffer);
        file.some("relay", "buffer", self.buffer);
        file.some("relay", "rfc5766_channels", self.old_channels);
        if self.no_tcp_relay {
            file.key("relay", "tcp", false);
        }
        file.some("relay", "mobility", self.mobility);
        // If no addresses are configured, detection can find one per family.
        let addresses = if addresses.is_empty() { 2 } else { addresses.len() };
        ports.len().max(1) * addresses
    }

    fn relay_addresses(&self, note: &mut impl FnMut(&str, String)) -> Vec<String> {
        // If relay-ip is not set, coturn relays on the address that the client connected to.
        let named = if self.relay_ips.is_empty() { &self.listening_ips } else { &self.relay_ips };
        let mut addresses: Vec<(IpAddr, Option<IpAddr>)> = Vec::new();
        for ip in named.iter().filter(|ip| !ip.is_unspecified()) {
            if !addresses.iter().any(|(known, _)| known == ip) {
                addresses.push((*ip, None));
            }
        }
        let mut detected: Vec<IpAddr> = Vec::new();
        let (with_local, alone): (Vec<_>, Vec<_>) =
            self.external_ips.iter().partition(|(_, local)| local.is_some());
        for (public, local) in with_local.iter().chain(&alone).map(|(public, local)| (public, local)) {
            let is_of_family = |ip: &IpAddr| ip.is_ipv4() == public.is_ipv4();
            let of_family = addresses.iter().filter(|(local, _)| is_of_family(local)).count();
            match local {
                Some(local) => match addresses.iter_mut().find(|(known, _)| known == local) {
                    Some((_, known)) => *known = Some(*public),
                    None if self.relay_ips.is_empty() => addresses.push((*local, Some(*public))),
                    None => note(
                        "external-ip",
                        format!("{local} is not in relay-ip, so clients never get {public}"),
                    ),
                },
                None if of_family == 1 => {
                    let all = addresses.iter_mut();
                    all.filter(|(local, _)| is_of_family(local))
                        .for_each(|(_, known)| *known = Some(*public));
                }
                None if addresses.is_empty() && !detected.iter().any(is_of_family) => detected.push(*public),
                None if addresses.is_empty() => {
                    note("external-ip", format!("coturn uses only one such address: {public} is omitted"));
                }
                None => note(
                    "external-ip",
                    format!("set the local address behind {public}: relay.addresses = [\"LOCAL={public}\"]"),
                ),
            }
        }
        let shown = addresses.iter().map(|(local, public)| match public {
            Some(public) => format!("{local}={public}"),
            None => local.to_string(),
        });
        let mut shown: Vec<String> = shown.collect();
        if addresses.is_empty() {
            shown.extend(detected.iter().map(|public| format!("auto={public}")));
            // Detects the other family too, if the machine has it.
            shown.extend((detected.len() == 1).then(|| "auto".to_owned()));
        }
        shown
    }

    fn auth(&mut self, file: &mut TomlWriter, machine: &CoturnHost, note: &mut impl FnMut(&str, String)) {
        if self.no_auth {
            file.key("auth", "required", false);
            let has_some = !self.users.is_empty() || !self.secrets.is_empty() || self.store.is_some();
            if has_some {
                let why = "users, secrets and databases are omitted, because clients do not authenticate";
                note("no-auth", why.to_owned());
            }
            return self.nonces(file);
        }
        if self.secure_stun {
            file.key("auth", "binding", true);
        }
        let has_secret = self.use_auth_secret || !self.secrets.is_empty();
        if has_secret && !self.users.is_empty() {
            note(
                "user",
                "coturn ignores this option if use-auth-secret is set; in turnpike, such users can authenticate too"
                    .to_owned(),
            );
        }
        if !self.users.is_empty() {
            file.key("auth", "users", format!("[\n  {},\n]", self.users.join(",\n  ")));
        }
        if !self.secrets.is_empty() {
            file.key("auth", "secrets", strings(&self.secrets));
        }
        self.nonces(file);
        if let Some(name) = &self.server_name {
            file.key("oauth", "server_name", quoted(name));
        }
        self.database(file, machine, note);
    }

    fn database(&self, file: &mut TomlWriter, machine: &CoturnHost, note: &mut impl FnMut(&str, String)) {
        let has_nobody = self.users.is_empty() && self.secrets.is_empty();
        let wants_some = self.lt_cred_mech || self.use_auth_secret || self.oauth;
        let is_file = |path: &str| (machine.is_file)(Path::new(path));
        match &self.store {
            Some(store) => match store.strip_prefix("sqlite://").filter(|path| !is_file(path)) {
                Some(path) => note(
                    "userdb",
                    format!(
                        "{path} is not on this machine, so store.url is omitted, because turnpike would not start without the file. If it is on the \
                         server, add store.url = \"{store}\""
                    ),
                ),
                None => file.key("store", "url", quoted(store)),
            },
            None if has_nobody && wants_some => match DEFAULT_DATABASES.iter().find(|path| is_file(path)) {
                Some(path) => {
                    file.key("store", "url", quoted(&format!("sqlite://{path}")));
                    note("userdb", format!("not set, so users come from coturn's default database: {path}"));
                }
                None => note(
                    "userdb",
                    format!(
                        "not set, and coturn's default database is not on this machine: if it is on the server, add \
                         store.url = \"sqlite://{}\"; otherwise create users with turnpike user add",
                        DEFAULT_DATABASES[0]
                    ),
                ),
            },
            None if has_nobody => note(
                "no-auth",
                "coturn implies it if there are no users and lt-cred-mech is not set; turnpike generates a user instead: for an open relay, write \
                 auth.required = false"
                    .to_owned(),
            ),
            None => {}
        }
    }

    fn nonces(&self, file: &mut TomlWriter) {
        file.some("auth", "nonce_lifetime", self.nonce_lifetime);
    }

    /// Caps quotas at the number of relay ports unless allocations share them, because turnpike rejects
    /// higher ones.
    fn limits(&self, file: &mut TomlWriter, ports: usize) {
        let no_zero = |limit: Option<usize>| limit.filter(|limit| *limit > 0);
        let ports = if self.multiplex_peer { usize::MAX } else { ports };
        let total = no_zero(self.total_quota).map(|total| total.min(ports));
        let most = total.unwrap_or(AllocationLimits::default().allocations);
        file.some("limits", "allocations", total);
        file.some("limits", "allocations_per_user", no_zero(self.user_quota).map(|user| user.min(most)));
        file.some("limits", "bits_per_second", self.bps_capacity);
        file.some("limits", "bits_per_second_per_allocation", self.max_bps);
        file.some("limits", "idle", self.idle);
        file.some("limits", "max_lifetime", self.max_lifetime);
        // default_lifetime must not exceed max_lifetime.
        file.some("limits", "default_lifetime", self.max_lifetime.filter(|most| *most < 600));
        file.some("limits", "channel_lifetime", self.channel_lifetime);
        file.some("limits", "permission_lifetime", self.permission_lifetime);
    }

    fn peers(&self, file: &mut TomlWriter, machine: &CoturnHost, note: &mut impl FnMut(&str, String)) {
        let names = |ip| self.names(ip) || (machine.is_own)(ip);
        let own = OwnAddresses {
            includes: &names,
            are_local_named: self.names_local_addresses(),
            ports: self.ports(),
        };
        let PeerRules { allow, deny } = self.peers.rules(&own, note);
        for (key, list) in [("allow", allow), ("deny", deny)] {
            if !list.is_empty() {
                file.key("peers", key, strings(&list));
            }
        }
    }

    fn metrics(&self, file: &mut TomlWriter, note: &mut impl FnMut(&str, String)) {
        if !self.prometheus {
            return;
        }
        let loopback = self.prometheus_address.filter(IpAddr::is_loopback);
        let ip = loopback.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let at = SocketAddr::new(ip, self.prometheus_port.unwrap_or(9641));
        file.key("admin", "listen", strings(&["unix".to_owned(), at.to_string()]));
        if loopback.is_none() {
            let why = "metrics are served on loopback; for other machines, set an address in admin.listen, and admin.tls_cert, admin.tls_key \
                       and a token in admin.read_tokens";
            note("prometheus", why.to_owned());
        }
    }

    fn discovery(&self, file: &mut TomlWriter, note: &mut impl FnMut(&str, String)) {
        if !self.rfc5780 {
            return;
        }
        if self.no_udp {
            return note("rfc5780", "NAT discovery uses only UDP, but no-udp is set".to_owned());
        }
        if self.secure_stun && !self.no_auth {
            return note("rfc5780", "NAT discovery needs no credentials, but secure-stun is set".to_owned());
        }
        let mut addresses = Vec::new();
        for is_v4 in [true, false] {
            let of_family: Vec<IpAddr> = self
                .listening_ips
                .iter()
                .copied()
                .filter(|ip| ip.is_ipv4() == is_v4 && !ip.is_unspecified())
                .collect();
            if let [first, second] = of_family[..] {
                addresses.extend([first, second].map(|ip| {
                    let public = self.external_ips.iter().find(|(_, local)| *local == Some(ip));
                    public.map_or_else(|| ip.to_string(), |(public, _)| format!("{ip}={public}"))
                }));
            }
        }
        if addresses.is_empty() {
            return note(
                "rfc5780",
                "it needs two listening-ip options of the same family, which become nat_discovery.addresses"
                    .to_owned(),
            );
        }
        let alternate =
            self.alt_listening_port.filter(|port| *port > 0).unwrap_or(self.port().wrapping_add(1));
        file.key("nat_discovery", "addresses", strings(&addresses));
        file.key("nat_discovery", "ports", format!("[{}, {alternate}]", self.port()));
    }

    fn others(&self, file: &mut TomlWriter) {
        let has = |wanted: AlternateClients| self.alternates.iter().any(|(_, of)| *of == wanted);
        for (address, of) in &self.alternates {
            let transports: Vec<&str> = match of {
                // Transports that have their own alternate server use only that one.
                AlternateClients::Plain => [("udp", AlternateClients::Udp), ("tcp", AlternateClients::Tcp)]
                    .into_iter()
                    .filter(|(_, own)| !has(*own))
                    .map(|(name, _)| name)
                    .collect(),
                AlternateClients::Udp => vec!["udp"],
                AlternateClients::Tcp => vec!["tcp"],
                AlternateClients::Secure => vec!["tls", "dtls"],
            };
            if !transports.is_empty() {
                let gap = if file.text.is_empty() { "" } else { "\n" };
                let (address, transports) = (quoted(&address.to_string()), strings(&transports));
                let _ = write!(
                    file.text,
                    "{gap}[[alternate]]\naddress = {address}\ntransports = {transports}\nwhen = \"always\"\n"
                );
            }
        }
    }
}

fn no_dtls(listen: &[SocketAddr]) -> String {
    format!(
        "coturn up to 4.6, or with dtls set, serves DTLS there too. In turnpike, DTLS needs an ECDSA certificate (P-256 or P-384): if yours is RSA, add one \
         in tls.certificates; then set dtls.listen = {}",
        strings(listen)
    )
}

/// Removes duplicate addresses, which coturn accepts.
fn once(mut all: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let mut known = HashSet::new();
    all.retain(|address| known.insert(*address));
    all
}
