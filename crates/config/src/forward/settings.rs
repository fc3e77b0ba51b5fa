//! The settings of `turnpike forward` beside its rules, and the table of their keys.

use std::{collections::BTreeMap, path::PathBuf};

use turnpike_convert::forward::LineFormat;
use turnpike_rules::{Access, CopyMode, Rule};

use super::rule_keys::{COPY, PATTERNS};
use crate::{
    AdminSettings, Change, DatapathChoice, LogFormat, Origin, SandboxSettings, admin_keys,
    key::{self, Kind, kind, named, number, settings},
    keys, sandbox_keys,
};

settings! {
    /// Effective settings; [`ForwardSettings::default`] holds the documented defaults.
    ForwardSettings by FORWARD_KEYS {
        /// Threads; `None` is one per core.
        workers: Option<usize> = None, start "forward.workers" kind::WORKERS;
        /// Step of the ladder, and whether rules that do not say have the kernel forward lone datagrams.
        datapath: DatapathChoice = DatapathChoice::Auto, start "forward.datapath" DATAPATH;
        /// Flows that the kernel has, two a session.
        kernel_flows: u32 = 65_536, start "forward.kernel_flows" number!(u32, "a number", 2..=4_194_304);
        /// Microseconds that a worker looks for more before it sleeps.
        busy_poll_us: u32 = 0, start "forward.busy_poll_us" number!(u32, "microseconds", 0..=1000);
        /// Connections and sessions of all rules at a time.
        max_connections: usize = 16_384,
            reload "forward.max_connections" number!(usize, "a number", 1..=1_000_000);
        /// Seconds after which a host name is resolved again.
        resolve_every: u32 = 30, reload "forward.resolve_every" number!(u32, "seconds", 1..=86_400);
        /// Whether to run although some rules cannot be bound.
        keep_going: bool = false, reload "forward.keep_going" kind::SWITCH;
        /// How TCP moves bytes where a rule does not say.
        copy: CopyMode = CopyMode::Auto, reload "forward.copy" COPY;
        /// Asked before each rule's own.
        access: Access = Access::default(),
            reload "forward.allow" .allow PATTERNS, reload "forward.deny" .deny PATTERNS;
        /// Where the process ID goes.
        pid_file: Option<PathBuf> = None, reload "forward.pid_file" kind::FILE;
        /// Where the admin interface listens, and who may use it. One above the TURN server's, so that both can run on one machine.
        admin: AdminSettings = AdminSettings::on_port(9642),
            start "admin.listen" .listen admin_keys::LISTEN,
            reload "admin.hosts" .hosts kind::HOSTS,
            reload "admin.loopback" .loopback admin_keys::ACCESS,
            reload "admin.tokens" .tokens admin_keys::TOKENS,
            reload "admin.read_tokens" .read_tokens admin_keys::TOKENS,
            start "admin.tls_cert" .tls_cert kind::FILE,
            start "admin.tls_key" .tls_key kind::FILE,
            start "admin.client_ca" .client_ca kind::FILE,
            start "admin.read_client_ca" .read_client_ca kind::FILE;
        /// Filter of log lines.
        log_level: String = "info".to_owned(), start "log.level" kind::LOG_LEVEL;
        /// How log lines look.
        log_format: LogFormat = LogFormat::Text, start "log.format" kind::LOG_FORMAT;
        /// A file with a line per connection, beside the log.
        connection_file: Option<PathBuf> = None, reload "log.connections" kind::FILE;
        /// How its lines look.
        connection_format: LineFormat = LineFormat::Rinetd, reload "log.connections_format" LINE_FORMAT;
        /// What the process gives up at the start.
        sandbox: SandboxSettings = SandboxSettings::default(),
            start "sandbox.mode" .mode sandbox_keys::MODE,
            start "sandbox.read" .read sandbox_keys::DIRECTORIES,
            start "sandbox.write" .write sandbox_keys::DIRECTORIES;
        /// Seconds that connections get to end after SIGTERM.
        shutdown_deadline: u32 = 30, reload "shutdown.deadline" number!(u32, "seconds", 0..=86_400);
        /// Seconds that connections which stay in the old process get to end after an upgrade.
        upgrade_deadline: u32 = 3600,
            reload "shutdown.upgrade_deadline" number!(u32, "seconds", 0..=604_800);
        /// All rules, those of the file first.
        rules: Vec<Rule> = Vec::new();
        /// Who set what; keys that are missing have their default.
        origins: BTreeMap<&'static str, Origin> = BTreeMap::new();
    }
}

impl ForwardSettings {
    /// Place that names the value of this key.
    pub fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    /// Whether somebody asked for the value of this key.
    pub fn is_explicit(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// Settings and rules as a TOML file, whatever format they came from; a way to leave rinetd.conf behind.
    pub fn to_toml(&self) -> String {
        let mut text = key::table_as_toml(FORWARD_KEYS, self, &self.origins, &[]);
        for rule in &self.rules {
            text.push('\n');
            text.push_str(&super::rule_keys::as_toml(rule, self.max_connections, self.copy));
        }
        text
    }

    /// Keys whose value differs in `new` but which a running forwarder cannot change.
    pub fn unchangeable(&self, new: &Self) -> Vec<&'static str> {
        key::unchangeable(FORWARD_KEYS, self, new)
    }

    /// Keys whose value differs in `new` and that a running forwarder takes over.
    pub fn changed(&self, new: &Self) -> Vec<Change> {
        key::changes(FORWARD_KEYS, self, new)
    }
}

/// How datagrams enter and leave.
const DATAPATH: Kind<DatapathChoice> = Kind::one(
    "\"auto\", \"basic\", \"mmsg\", \"gso\" or \"kernel\"",
    |reader, node| {
        reader.parsed(node, |text| match text {
            // `Datapath::from_str("auto")` asks the kernel, and nothing here may open a socket.
            "auto" => Ok(DatapathChoice::Auto),
            "kernel" => Ok(DatapathChoice::Kernel),
            step => step.parse().map(DatapathChoice::Step).map_err(|_| ""),
        })
    },
    keys::DATAPATH.show,
);

const LINE_FORMAT: Kind<LineFormat> =
    named!("\"rinetd\" or \"common\"", "rinetd" => LineFormat::Rinetd, "common" => LineFormat::Common);
