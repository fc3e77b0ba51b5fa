//! The settings of `turnpike forward` beside its rules, and the table of their keys.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
};

use turnpike_forward::{Access, CopyMode, Rule};
use turnpike_net::Datapath;

use super::rule_keys::{COPY, copy_mode, patterns, show_copy, show_patterns};
use crate::config::{
    AdminListen, LogFormat, Origin,
    key::{self, KeySpec, expected, scalar, show, show::quoted},
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
    /// Where metrics and health are served.
    pub admin: AdminListen,
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
    pub(crate) origins: BTreeMap<&'static str, Origin>,
}

impl Default for ForwardSettings {
    fn default() -> Self {
        Self {
            rules: Vec::new(),
            access: Access::default(),
            workers: None,
            datapath: None,
            max_connections: 16_384,
            resolve_every: 30,
            keep_going: false,
            copy: CopyMode::Auto,
            pid_file: None,
            // One above the TURN server's, so that both can run on one machine.
            admin: AdminListen::On(SocketAddr::from((Ipv4Addr::LOCALHOST, 9642))),
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            connection_file: None,
            connection_format: LineFormat::Rinetd,
            shutdown_deadline: 30,
            origins: BTreeMap::new(),
        }
    }
}

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
    scalar!(
        "forward.workers",
        reload: false,
        expected::WORKERS,
        |reader, node, settings| {
            settings.workers = key::workers(reader, node)?;
            Some(())
        },
        |settings| show::workers(settings.workers),
    ),
    scalar!(
        "forward.datapath",
        reload: false,
        expected::DATAPATH,
        |reader, node, settings| {
            settings.datapath = key::datapath(reader, node)?;
            Some(())
        },
        |settings| show::datapath(settings.datapath),
    ),
    scalar!(
        "forward.max_connections",
        reload: true,
        "a number, 1 to 1000000",
        |reader, node, settings| {
            settings.max_connections = reader.integer(node, &(1..=1_000_000))?;
            Some(())
        },
        |settings| settings.max_connections.to_string(),
    ),
    scalar!(
        "forward.resolve_every",
        reload: true,
        "seconds, 1 to 86400",
        |reader, node, settings| {
            settings.resolve_every = reader.integer(node, &(1..=86_400))?;
            Some(())
        },
        |settings| settings.resolve_every.to_string(),
    ),
    scalar!(
        "forward.keep_going",
        reload: true,
        "true or false",
        |reader, node, settings| {
            settings.keep_going = reader.boolean(node)?;
            Some(())
        },
        |settings| settings.keep_going.to_string(),
    ),
    scalar!(
        "forward.copy",
        reload: true,
        COPY,
        |reader, node, settings| {
            settings.copy = copy_mode(reader, node)?;
            Some(())
        },
        |settings| show_copy(settings.copy),
    ),
    KeySpec {
        path: "forward.allow",
        expected: super::parts::PATTERN_FORM,
        list: true,
        secret: false,
        reload: true,
        apply: |reader, node, settings| {
            settings.access.allow = patterns(reader, node)?;
            Some(())
        },
        show: |settings| show_patterns(&settings.access.allow),
    },
    KeySpec {
        path: "forward.deny",
        expected: super::parts::PATTERN_FORM,
        list: true,
        secret: false,
        reload: true,
        apply: |reader, node, settings| {
            settings.access.deny = patterns(reader, node)?;
            Some(())
        },
        show: |settings| show_patterns(&settings.access.deny),
    },
    scalar!(
        "forward.pid_file",
        reload: true,
        "the path of a file, \"\" for none",
        |reader, node, settings| {
            settings.pid_file = path(&reader.text(node)?);
            Some(())
        },
        |settings| show_path(settings.pid_file.as_ref()),
    ),
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
        "log.connections",
        reload: true,
        "the path of a file, \"\" for none",
        |reader, node, settings| {
            settings.connection_file = path(&reader.text(node)?);
            Some(())
        },
        |settings| show_path(settings.connection_file.as_ref()),
    ),
    scalar!(
        "log.connections_format",
        reload: true,
        "\"rinetd\" or \"common\"",
        |reader, node, settings| {
            settings.connection_format = reader.parsed(node, |text| match text {
                "rinetd" => Ok(LineFormat::Rinetd),
                "common" => Ok(LineFormat::Common),
                _ => Err(""),
            })?;
            Some(())
        },
        |settings| {
            quoted(match settings.connection_format {
                LineFormat::Rinetd => "rinetd",
                LineFormat::Common => "common",
            })
        },
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

fn path(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| PathBuf::from(text))
}

fn show_path(path: Option<&PathBuf>) -> String {
    quoted(&path.map(|path| path.display().to_string()).unwrap_or_default())
}
