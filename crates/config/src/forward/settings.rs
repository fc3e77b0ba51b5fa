//! The settings of `turnpike forward` beside its rules, and the table of their keys.

use std::{collections::BTreeMap, path::PathBuf};

use turnpike_forward::{Access, CopyMode, Rule};
use turnpike_net::Datapath;

use super::rule_keys::{COPY, PATTERNS};
use crate::{
    AdminSettings, LogFormat, Origin, admin_keys,
    key::{self, KeySpec, Kind, field, kind, named, number},
};

/// Effective settings; [`ForwardSettings::default`] holds the documented defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardSettings {
    /// All rules, those of the file first.
    pub rules: Vec<Rule>,
    /// Asked before each rule's own.
    pub access: Access,
    /// Threads; `None` is one per core.
    pub workers: Option<usize>,
    /// Step of the ladder; `None` is the highest that works.
    pub datapath: Option<Datapath>,
    /// Microseconds that a worker looks for more before it sleeps.
    pub busy_poll_us: u32,
    /// Connections and sessions of all rules at a time.
    pub max_connections: usize,
    /// Seconds after which a host name is resolved again.
    pub resolve_every: u32,
    /// Whether to run although some rules cannot be bound.
    pub keep_going: bool,
    /// How TCP moves bytes where a rule does not say.
    pub copy: CopyMode,
    /// Where the process ID goes.
    pub pid_file: Option<PathBuf>,
    /// Where the admin interface listens, and who may use it.
    pub admin: AdminSettings,
    /// Filter of log lines.
    pub log_level: String,
    /// How log lines look.
    pub log_format: LogFormat,
    /// A file with a line per connection, beside the log.
    pub connection_file: Option<PathBuf>,
    /// How its lines look.
    pub connection_format: LineFormat,
    /// Seconds that connections get to end after SIGTERM.
    pub shutdown_deadline: u32,
    /// Who set what; keys that are missing have their default.
    pub origins: BTreeMap<&'static str, Origin>,
}

impl Default for ForwardSettings {
    fn default() -> Self {
        Self {
            rules: Vec::new(),
            access: Access::default(),
            workers: None,
            datapath: None,
            busy_poll_us: 0,
            max_connections: 16_384,
            resolve_every: 30,
            keep_going: false,
            copy: CopyMode::Auto,
            pid_file: None,
            // One above the TURN server's, so that both can run on one machine.
            admin: AdminSettings::on_port(9642),
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            connection_file: None,
            connection_format: LineFormat::Rinetd,
            shutdown_deadline: 30,
            origins: BTreeMap::new(),
        }
    }
}

type Differ = fn(&ForwardSettings, &ForwardSettings) -> bool;

/// Secret keys, and whether they differ between two settings: their shown values are all alike.
pub(super) static SECRET_KEYS: &[(&str, Differ)] = &[
    ("admin.tokens", |old, new| old.admin.tokens != new.admin.tokens),
    ("admin.read_tokens", |old, new| old.admin.read_tokens != new.admin.read_tokens),
];

impl ForwardSettings {
    /// Whether somebody asked for the value of this key.
    #[must_use]
    pub fn is_explicit(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// Settings and rules as a TOML file, whatever format they came from; a way to leave rinetd.conf behind.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = key::table_as_toml(FORWARD_KEYS, self, &self.origins);
        for rule in &self.rules {
            text.push('\n');
            text.push_str(&super::rule_keys::as_toml(rule, self));
        }
        text
    }

    /// Keys whose value differs in `new` but which a running forwarder cannot change.
    #[must_use]
    pub fn unchangeable(&self, new: &Self) -> Vec<&'static str> {
        key::unchangeable(FORWARD_KEYS, self, new)
    }

    /// Keys whose value differs in `new` and that a running forwarder takes over.
    #[must_use]
    pub fn changed(&self, new: &Self) -> Vec<&'static str> {
        let secret = SECRET_KEYS.iter().filter(|(_, differs)| differs(self, new)).map(|(path, _)| *path);
        secret.chain(key::changed(FORWARD_KEYS, self, new)).collect()
    }
}

/// How a line of the connection file looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LineFormat {
    /// rinetd's fields, separated by tabs.
    #[default]
    Rinetd,
    /// As web servers do, `logcommon` of rinetd.
    Common,
}

/// The connection file as other programs' configuration names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogFile {
    pub(crate) path: PathBuf,
    pub(crate) format: LineFormat,
}

/// All keys, section by section, in the order in which they are shown.
pub(crate) static FORWARD_KEYS: &[KeySpec<ForwardSettings>] = &[
    field!("forward.workers", reload: false, kind::WORKERS, workers),
    field!("forward.datapath", reload: false, kind::DATAPATH, datapath),
    number!("forward.busy_poll_us", reload: false, "microseconds", 0..=1000, busy_poll_us),
    number!("forward.max_connections", reload: true, "a number", 1..=1_000_000, max_connections),
    number!("forward.resolve_every", reload: true, "seconds", 1..=86_400, resolve_every),
    field!("forward.keep_going", reload: true, kind::SWITCH, keep_going),
    field!("forward.copy", reload: true, COPY, copy),
    field!("forward.allow", reload: true, PATTERNS, access.allow),
    field!("forward.deny", reload: true, PATTERNS, access.deny),
    field!("forward.pid_file", reload: true, kind::FILE, pid_file),
    field!("admin.listen", reload: false, admin_keys::LISTEN, admin.listen),
    field!("admin.hosts", reload: true, kind::HOSTS, admin.hosts),
    field!("admin.loopback", reload: true, admin_keys::ACCESS, admin.loopback),
    field!("admin.tokens", reload: true, admin_keys::TOKENS, admin.tokens),
    field!("admin.read_tokens", reload: true, admin_keys::TOKENS, admin.read_tokens),
    field!("admin.tls_cert", reload: false, kind::FILE, admin.tls_cert),
    field!("admin.tls_key", reload: false, kind::FILE, admin.tls_key),
    field!("admin.client_ca", reload: false, kind::FILE, admin.client_ca),
    field!("admin.read_client_ca", reload: false, kind::FILE, admin.read_client_ca),
    field!("log.level", reload: false, kind::LOG_LEVEL, log_level),
    field!("log.format", reload: false, kind::LOG_FORMAT, log_format),
    field!("log.connections", reload: true, kind::FILE, connection_file),
    field!("log.connections_format", reload: true, LINE_FORMAT, connection_format),
    number!("shutdown.deadline", reload: true, "seconds", 0..=86_400, shutdown_deadline),
];

const LINE_FORMAT: Kind<LineFormat> =
    named!("\"rinetd\" or \"common\"", "rinetd" => LineFormat::Rinetd, "common" => LineFormat::Common);
