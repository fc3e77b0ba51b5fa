//! Configuration: one TOML file, the environment and flags become [`Settings`], or a list of everything that is wrong.
//!
//! Precedence, key by key: flags, environment (`TURNPIKE_SECTION_KEY`, for secrets also `..._FILE`), file, defaults.
//! Loading opens no socket.

mod alternate_keys;
pub(crate) mod certificates;
mod check;
mod discovery_keys;
pub(crate) mod error;
mod exposed;
pub(crate) mod foreign;
pub(crate) mod key;
mod keys;
mod oauth_keys;
pub(crate) mod read;
mod realm_keys;
pub(crate) mod source;
mod tables;

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use turnpike_net::Datapath;
use turnpike_relay::RelayAddress;
use turnpike_turn::server::{AllowRule, Cidr};

pub use alternate_keys::AlternateSettings;
pub use certificates::Certificate;
pub use discovery_keys::DiscoverySettings;
pub use error::{ConfigError, ConfigErrors, Origin};
pub use oauth_keys::{OauthSettings, TokenKeySettings};
pub use realm_keys::RealmSettings;
pub use source::Flags;
pub use tables::Place;

use self::{
    alternate_keys::ALTERNATE_KEYS,
    error::nearest,
    key::KeySpec,
    keys::KEYS,
    read::Reader,
    realm_keys::REALM_KEYS,
    source::{Entry, Node, Value},
};
use crate::secret::Secret;

/// Effective settings; [`Settings::default`] holds the documented defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// UDP listeners, and TCP ones if `tcp`.
    pub listen: Vec<SocketAddr>,
    /// Whether `listen` is for TCP too.
    pub tcp: bool,
    /// Proxies whose connections begin with a PROXY header.
    pub proxy_protocol_from: Vec<Cidr>,
    /// Listeners for TLS.
    pub tls_listen: Vec<SocketAddr>,
    /// Whether these refuse clients without TLS.
    pub tls_only: bool,
    /// The default certificate chain, PEM.
    pub tls_cert: Option<PathBuf>,
    /// Its key, PEM.
    pub tls_key: Option<PathBuf>,
    /// More certificates, chosen by server name.
    pub tls_certificates: Vec<CertificateFiles>,
    /// Listeners for DTLS.
    pub dtls_listen: Vec<SocketAddr>,
    /// REALM.
    pub realm: String,
    /// SOFTWARE, empty for none.
    pub software: String,
    /// Threads; `None` is one per core.
    pub workers: Option<usize>,
    /// Step of the ladder; `None` is the highest that works.
    pub datapath: Option<Datapath>,
    /// Microseconds that a worker looks for more before it sleeps.
    pub busy_poll_us: u32,
    /// Relay addresses; empty means to detect them.
    pub relay_addresses: Vec<RelayAddress>,
    /// Ports of relayed transport addresses.
    pub ports: RangeInclusive<u16>,
    /// Bytes.
    pub listener_buffer: usize,
    /// Bytes.
    pub relay_buffer: usize,
    /// Whether relaying needs credentials.
    pub auth_required: bool,
    /// Static users.
    pub users: Vec<User>,
    /// Secrets of time-limited credentials; any of them will do.
    pub secrets: Vec<Secret>,
    /// Tokens in place of passwords.
    pub oauth: OauthSettings,
    /// Realms beside [`Self::realm`].
    pub realms: Vec<RealmSettings>,
    /// Seconds.
    pub nonce_lifetime: u32,
    /// Whether MD5 keys are accepted.
    pub allow_md5: bool,
    /// Whether channel numbers above 0x4FFF are accepted.
    pub rfc5766_channels: bool,
    /// Whether TCP is relayed (RFC 6062).
    pub relay_tcp: bool,
    /// Whether allocations follow their clients (RFC 8016).
    pub mobility: bool,
    /// Allocations in total.
    pub max_allocations: usize,
    /// Allocations of one user.
    pub max_allocations_per_user: usize,
    /// Permissions per allocation.
    pub max_permissions: usize,
    /// Channels per allocation.
    pub max_channels: usize,
    /// Connections to peers, in total.
    pub max_peer_connections: usize,
    /// Connections to peers of one allocation.
    pub max_peer_connections_per_allocation: usize,
    /// Connections to peers of one user, in total.
    pub max_peer_connections_per_user: usize,
    /// Connections without an allocation, in total.
    pub max_idle_connections: usize,
    /// Connections without an allocation, per address.
    pub max_idle_connections_per_address: usize,
    /// DTLS handshakes under way, in total.
    pub max_half_open: usize,
    /// DTLS handshakes under way, per network.
    pub max_half_open_per_network: usize,
    /// Seconds until the first message of a connection.
    pub first_message_timeout: u32,
    /// Seconds of silence of a connection without an allocation.
    pub idle_timeout: u32,
    /// Bytes that wait for a client over TCP or TLS.
    pub stream_queue: usize,
    /// Seconds.
    pub default_lifetime: u32,
    /// Seconds.
    pub max_lifetime: u32,
    /// Peers allowed though special, or on this machine.
    pub allow: Vec<AllowRule>,
    /// Peers refused though public.
    pub deny: Vec<Cidr>,
    /// Servers that clients are sent to.
    pub alternates: Vec<AlternateSettings>,
    /// Where clients may find out about their NAT.
    pub discovery: DiscoverySettings,
    /// Where metrics and health are served.
    pub admin: AdminListen,
    /// Names under which they are, beside addresses and `localhost`; in lower case.
    pub admin_hosts: Vec<String>,
    /// Filter of log lines.
    pub log_level: String,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Seconds that sessions get to end after SIGTERM.
    pub shutdown_deadline: u32,
    /// Who set what; keys that are missing have their default.
    pub(crate) origins: BTreeMap<&'static str, Origin>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: vec![
                SocketAddr::from((Ipv4Addr::UNSPECIFIED, 3478)),
                SocketAddr::from((Ipv6Addr::UNSPECIFIED, 3478)),
            ],
            tcp: true,
            proxy_protocol_from: Vec::new(),
            tls_listen: Vec::new(),
            tls_only: false,
            tls_cert: None,
            tls_key: None,
            tls_certificates: Vec::new(),
            dtls_listen: Vec::new(),
            realm: "turnpike".to_owned(),
            software: "turnpike".to_owned(),
            workers: None,
            datapath: None,
            busy_poll_us: 0,
            relay_addresses: Vec::new(),
            ports: 49_152..=65_535,
            listener_buffer: 4 << 20,
            relay_buffer: 512 << 10,
            auth_required: true,
            users: Vec::new(),
            secrets: Vec::new(),
            oauth: OauthSettings::default(),
            realms: Vec::new(),
            nonce_lifetime: 3600,
            allow_md5: true,
            rfc5766_channels: true,
            relay_tcp: true,
            mobility: true,
            max_allocations: 16_384,
            max_allocations_per_user: 1024,
            max_permissions: 64,
            max_channels: 64,
            max_peer_connections: 4096,
            max_peer_connections_per_allocation: 32,
            max_peer_connections_per_user: 1024,
            max_idle_connections: 4096,
            max_idle_connections_per_address: 512,
            max_half_open: 1024,
            max_half_open_per_network: 256,
            first_message_timeout: 10,
            idle_timeout: 60,
            stream_queue: 256 << 10,
            default_lifetime: 600,
            max_lifetime: 3600,
            allow: Vec::new(),
            deny: Vec::new(),
            alternates: Vec::new(),
            discovery: DiscoverySettings::default(),
            admin: AdminListen::On(SocketAddr::from((Ipv4Addr::LOCALHOST, 9641))),
            admin_hosts: Vec::new(),
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            shutdown_deadline: 30,
            origins: BTreeMap::new(),
        }
    }
}

type Differ = fn(&Settings, &Settings) -> bool;

/// Secret keys, and whether they differ between two settings: what is shown of them does not tell.
static SECRET_KEYS: &[(&str, Differ)] = &[
    ("auth.users", |old, new| old.users != new.users),
    ("auth.secrets", |old, new| old.secrets != new.secrets),
    ("oauth.key", |old, new| old.oauth.keys != new.oauth.keys),
];

impl Settings {
    /// Where the value of a key such as `admin.listen` comes from.
    #[must_use]
    pub fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    /// Whether somebody asked for the value of this key.
    #[must_use]
    pub fn is_explicit(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// The settings as a TOML file with each value's origin, secrets masked.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let realms = self.realms.iter().map(|realm| (realm, &realm.place));
        let alternates = self.alternates.iter().map(|alternate| (alternate, &alternate.place));
        key::table_as_toml(KEYS, self, &self.origins)
            + &tables::as_toml("realm", REALM_KEYS, realms)
            + &tables::as_toml("alternate", ALTERNATE_KEYS, alternates)
    }

    /// Keys whose value differs in `new` but which a running server cannot change.
    #[must_use]
    pub fn unchangeable(&self, new: &Self) -> Vec<&'static str> {
        key::unchangeable(KEYS, self, new)
    }

    /// Keys whose value differs in `new` and that a running server takes over.
    pub(crate) fn changed(&self, new: &Self) -> Vec<&'static str> {
        let secret = SECRET_KEYS.iter().filter(|(_, differs)| differs(self, new)).map(|(path, _)| *path);
        secret.chain(key::changed(KEYS, self, new)).collect()
    }
}

/// A certificate chain and its key, PEM both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The server's own certificate first, intermediate ones behind.
    pub cert: PathBuf,
    /// Not encrypted.
    pub key: PathBuf,
}

/// A static user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// USERNAME.
    pub name: String,
    /// How it authenticates.
    pub secret: UserSecret,
}

/// What is stored of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserSecret {
    /// The password.
    Password(Secret),
    /// Keys made from it, which are good for one realm.
    Keys(Vec<StoredKey>),
}

impl UserSecret {
    /// Whether this is no more than an MD5 key, of no use where those are not accepted.
    pub(crate) fn is_md5_only(&self) -> bool {
        match self {
            Self::Password(_) => false,
            Self::Keys(keys) => keys.iter().all(|key| matches!(key, StoredKey::Md5(_))),
        }
    }
}

/// A long-term key in hex digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredKey {
    /// 16 bytes.
    Md5(Secret),
    /// 32 bytes.
    Sha256(Secret),
}

impl StoredKey {
    /// Tells the algorithm by the length: 32 or 64 hex digits.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        match text.len() {
            32 => Some(Self::Md5(Secret::new(text))),
            64 => Some(Self::Sha256(Secret::new(text))),
            _ => None,
        }
    }
}

/// Where the admin HTTP listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminListen {
    /// Nowhere.
    Off,
    /// Here.
    On(SocketAddr),
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Settings and what the user should know about them.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    /// The certificates that they name, the default one first.
    pub certificates: Vec<Certificate>,
    /// Sentences for the log.
    pub warnings: Vec<String>,
}

/// Everything that settings come from. Kept for reloads: the file is read again, flags and environment stay.
#[derive(Clone)]
pub struct Sources {
    file: Option<PathBuf>,
    flags: Flags,
    environment: Vec<(String, String)>,
}

impl Sources {
    /// The environment is this process's; variables that are not UTF-8 do not count.
    #[must_use]
    pub fn from_process(file: Option<PathBuf>, flags: Flags) -> Self {
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("TURNPIKE_"))
            .collect();
        Self { file, flags, environment }
    }

    /// As given.
    #[must_use]
    pub fn new(file: Option<PathBuf>, environment: Vec<(String, String)>, flags: Flags) -> Self {
        Self { file, flags, environment }
    }

    /// The file, if one was named.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Reads, merges and judges all sources.
    ///
    /// # Errors
    /// Everything that is wrong, not only the first.
    pub fn load(&self) -> Result<Loaded, ConfigErrors> {
        match self.load_but_certificates()? {
            (loaded, problems) if problems.is_empty() => Ok(loaded),
            (_, problems) => Err(ConfigErrors::sorted(problems)),
        }
    }

    /// The same for a server that runs and can keep the certificates that it has: what is wrong with the new ones, if nothing else
    /// is wrong, stands beside the rest. A user must lose access though a certificate has expired.
    pub(crate) fn load_but_certificates(&self) -> Result<(Loaded, Vec<ConfigError>), ConfigErrors> {
        let mut problems = Vec::new();
        let entries = match &self.file {
            Some(path) => file_entries(path, &mut problems)?,
            None => Vec::new(),
        };
        self.merge(&entries, problems, certificates::load)
    }

    /// Tests look at no files but ours: they give a `certificates` of their own.
    fn merge(
        &self,
        file: &[Entry],
        mut problems: Vec<ConfigError>,
        certificates: fn(&Settings) -> certificates::Found,
    ) -> Result<(Loaded, Vec<ConfigError>), ConfigErrors> {
        let mut settings = Settings::default();
        let mut origins = BTreeMap::new();
        self.apply(KEYS, TABLES, file, &mut settings, &mut origins, &mut problems);
        settings.origins = origins;
        settings.realms = tables::read("realm", REALM_KEYS, &["realm.name"], file, &mut problems)
            .into_iter()
            .map(|read| RealmSettings { place: read.place, ..read.settings })
            .collect();
        settings.alternates =
            tables::read("alternate", ALTERNATE_KEYS, &["alternate.address"], file, &mut problems)
                .into_iter()
                .map(|read| AlternateSettings { place: read.place, ..read.settings })
                .collect();
        check::combinations(&settings, &mut problems);
        let found = certificates(&settings);
        if !problems.is_empty() {
            problems.extend(found.problems);
            return Err(ConfigErrors::sorted(problems));
        }
        let mut warnings = self.unknown_variables();
        warnings.extend(check::doubts(&settings));
        let with_secrets = exposed::files(file, &self.environment);
        warnings.extend(with_secrets.iter().filter_map(|file| exposed::warning(file, "the secrets in it")));
        warnings.extend(found.warnings);
        Ok((Loaded { settings, certificates: found.certificates, warnings }, found.problems))
    }

    /// Reads every key of a table from the entries of a file, the environment and the flags; `origins` learns who set what.
    /// `tables` are names of entries that somebody else reads.
    pub(crate) fn apply<S>(
        &self,
        keys: &'static [KeySpec<S>],
        tables: &[&'static str],
        file: &[Entry],
        settings: &mut S,
        origins: &mut BTreeMap<&'static str, Origin>,
        problems: &mut Vec<ConfigError>,
    ) {
        let from_file = sort_out(keys, tables, file, problems);
        for spec in keys {
            let environment = source::environment_node(spec, &self.environment, problems);
            let file = from_file.get(spec.path).map(|node| (*node).clone());
            // All sources are judged, though only the strongest counts: a mistake that a flag hides today is one
            // that surfaces on the day the flag goes.
            for node in [file, environment, self.flags.node(spec)].into_iter().flatten() {
                let origin = node.origin.clone();
                let mut reader = Reader::new(spec, problems);
                if (spec.apply)(&mut reader, &node, settings).is_some() {
                    origins.insert(spec.path, origin);
                }
            }
        }
    }

    /// Sentences about variables of the environment that look like ours.
    pub(crate) fn unknown_variables(&self) -> Vec<String> {
        source::unknown_variables(&self.environment, &known_variables())
    }
}

/// Every variable of the environment that some subcommand reads: all are known to all, as a machine that runs several of them may
/// have one environment.
#[must_use]
pub fn known_variables() -> Vec<String> {
    let settings = KEYS.iter().flat_map(KeySpec::variables).chain(crate::forward::variables());
    settings.chain(OTHER_VARIABLES.map(str::to_owned)).collect()
}

/// The entries of a file; one that is no file of ours is an error by itself.
fn file_entries(path: &Path, problems: &mut Vec<ConfigError>) -> Result<Vec<Entry>, ConfigErrors> {
    let Some(text) = source::file_text(path, problems) else { return Ok(Vec::new()) };
    entries_of(path, &text, problems)
}

fn entries_of(path: &Path, text: &str, problems: &mut Vec<ConfigError>) -> Result<Vec<Entry>, ConfigErrors> {
    if let Some(problem) = foreign::of_another_program(path, text, foreign::Reader::Serve) {
        return Err(ConfigErrors(vec![problem]));
    }
    let entries = source::parse_file(path, text, problems);
    let sections = (&own_sections()[..], &crate::forward::own_sections()[..]);
    match foreign::of_the_other_command(path, &entries, sections, foreign::Reader::Serve) {
        Some(problem) => Err(ConfigErrors(vec![problem])),
        None => Ok(entries),
    }
}

/// Sections and tables that `serve` has and `forward` has not.
pub(crate) fn own_sections() -> Vec<&'static str> {
    let sections = KEYS.iter().map(KeySpec::section).chain(TABLES.iter().copied());
    sections.filter(|section| !crate::forward::SHARED.contains(section)).collect()
}

/// Variables of the commands that have no settings.
const OTHER_VARIABLES: [&str; 4] =
    ["TURNPIKE_CONFIG", "TURNPIKE_LOAD_USER", "TURNPIKE_LOAD_ACCESS_TOKEN", "TURNPIKE_PROBE_USER"];

/// Tables of which there may be several.
const TABLES: &[&str] = &["realm", "alternate"];

/// The file's values by key path; unknown sections and keys become problems.
fn sort_out<'a, S>(
    table: &'static [KeySpec<S>],
    tables: &[&'static str],
    entries: &'a [Entry],
    problems: &mut Vec<ConfigError>,
) -> BTreeMap<&'static str, &'a Node> {
    let mut known = BTreeMap::new();
    for section in entries.iter().filter(|entry| !tables.contains(&entry.key.as_str())) {
        let keys: Vec<&KeySpec<S>> = table.iter().filter(|spec| spec.section() == section.key).collect();
        if keys.is_empty() {
            problems.push(unknown_section(table, tables, section));
            continue;
        }
        let Value::Table(members) = &section.node.value else {
            problems.push(ConfigError {
                origin: section.origin.clone(),
                key: section.key.clone(),
                problem: "it is a value".to_owned(),
                expected: format!("a table, [{}]", section.key),
                suggestion: None,
            });
            continue;
        };
        for member in members {
            match keys.iter().find(|spec| spec.name() == member.key) {
                Some(spec) => {
                    known.insert(spec.path, &member.node);
                }
                None => problems.push(unknown_key(table, section, member, &keys)),
            }
        }
    }
    known
}

fn unknown_section<S>(table: &'static [KeySpec<S>], tables: &[&'static str], section: &Entry) -> ConfigError {
    let mut sections: Vec<&str> = table.iter().map(KeySpec::section).collect();
    sections.dedup();
    sections.extend(tables);
    let is_table = matches!(section.node.value, Value::Table(_) | Value::List(_));
    let elsewhere = table.iter().find(|spec| !is_table && spec.name() == section.key).map(|spec| spec.path);
    ConfigError {
        origin: section.origin.clone(),
        key: section.key.clone(),
        problem: if is_table { "unknown section" } else { "unknown key outside of any section" }.to_owned(),
        expected: format!("one of the sections {}", sections.join(", ")),
        suggestion: elsewhere.or_else(|| nearest(&section.key, sections)).map(str::to_owned),
    }
}

fn unknown_key<S>(
    table: &'static [KeySpec<S>],
    section: &Entry,
    member: &Entry,
    keys: &[&KeySpec<S>],
) -> ConfigError {
    let names: Vec<&str> = keys.iter().map(|spec| spec.name()).collect();
    let elsewhere = table.iter().find(|spec| spec.name() == member.key).map(|spec| spec.path);
    ConfigError {
        origin: member.origin.clone(),
        key: format!("{}.{}", section.key, member.key),
        problem: "unknown key".to_owned(),
        expected: format!("one of {}", names.join(", ")),
        suggestion: nearest(&member.key, names).or(elsewhere).map(str::to_owned),
    }
}

#[cfg(test)]
mod tests;
