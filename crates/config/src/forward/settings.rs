//! Settings of `turnpike forward` apart from its rules, and the table of their keys.

use std::{collections::BTreeMap, path::PathBuf};

use turnpike_convert::forward::LineFormat;
use turnpike_rules::{Access, CopyMode, Rule};

use super::rule_keys::{COPY, PATTERNS};
use crate::{
    AdminSettings, DatapathChoice, KeyChange, LogSettings, Origin, SandboxSettings, ShutdownSettings,
    TelemetrySettings, admin_keys,
    key::{self, ValueKind, kind, named, number, settings},
    keys, sandbox_keys, telemetry_keys,
};

settings! {
    /// Effective settings; [`ForwardSettings::default`] has the documented defaults.
    ForwardSettings by FORWARD_KEYS {
        workers: Option<usize> = None, start "forward.workers" kind::WORKERS;
        /// I/O path; also decides whether rules that do not set `kernel` forward datagrams in the kernel.
        datapath: DatapathChoice = DatapathChoice::Auto, start "forward.datapath" DATAPATH;
        /// Kernel flow table entries; a session uses two.
        kernel_flows: u32 = 65_536, start "forward.kernel_flows" number!(u32, "a number", 2..=4_194_304);
        /// Microseconds of polling before a worker sleeps.
        busy_poll_us: u32 = 0, start "forward.busy_poll_us" number!(u32, "microseconds", 0..=1000);
        /// Maximum number of connections and sessions of all rules together.
        max_connections: usize = 16_384,
            reload "forward.max_connections" number!(usize, "a number", 1..=1_000_000);
        resolve_every: u32 = 30, reload "forward.resolve_every" number!(u32, "seconds", 1..=86_400);
        /// Start even if some rules cannot bind.
        keep_going: bool = false, reload "forward.keep_going" kind::SWITCH;
        copy: CopyMode = CopyMode::Auto, reload "forward.copy" COPY;
        access: Access = Access::default(),
            reload "forward.allow" .allow PATTERNS, reload "forward.deny" .deny PATTERNS;
        pid_file: Option<PathBuf> = None, reload "forward.pid_file" kind::FILE;
        /// The default port is one above that of `serve`, so that both can run on one machine.
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
        log: LogSettings = LogSettings::default(),
            start "log.level" .level kind::LOG_LEVEL,
            start "log.format" .format kind::LOG_FORMAT;
        connections: Option<PathBuf> = None, reload "log.connections" kind::FILE;
        connections_format: LineFormat = LineFormat::Rinetd, reload "log.connections_format" LINE_FORMAT;
        telemetry: TelemetrySettings = TelemetrySettings::default(),
            start "telemetry.endpoint" .endpoint telemetry_keys::ENDPOINT,
            start "telemetry.headers" .headers telemetry_keys::HEADERS,
            start "telemetry.interval" .interval number!(u32, "seconds", 1..=3600);
        sandbox: SandboxSettings = SandboxSettings::default(),
            start "sandbox.mode" .mode sandbox_keys::MODE,
            start "sandbox.read" .read sandbox_keys::DIRECTORIES,
            start "sandbox.write" .write sandbox_keys::DIRECTORIES;
        shutdown: ShutdownSettings = ShutdownSettings::default(),
            reload "shutdown.deadline" .deadline number!(u32, "seconds", 0..=86_400),
            reload "shutdown.upgrade_deadline" .upgrade_deadline number!(u32, "seconds", 0..=604_800);
        rules: Vec<Rule> = Vec::new();
        origins: BTreeMap<&'static str, Origin> = BTreeMap::new();
    }
}

impl ForwardSettings {
    pub fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    pub fn is_explicit(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// Formats settings and rules as a TOML file, whatever format they came from, for example to convert
    /// a rinetd.conf.
    pub fn to_toml(&self) -> String {
        let mut text = key::table_as_toml(FORWARD_KEYS, self, &self.origins, &[]);
        for rule in &self.rules {
            text.push('\n');
            text.push_str(&super::rule_keys::as_toml(rule, self.max_connections, self.copy));
        }
        text
    }

    pub fn unchangeable(&self, new: &Self) -> Vec<&'static str> {
        key::unchangeable(FORWARD_KEYS, self, new)
    }

    pub fn changed(&self, new: &Self) -> Vec<KeyChange> {
        key::changes(FORWARD_KEYS, self, new)
    }
}

const DATAPATH: ValueKind<DatapathChoice> = ValueKind::one(
    "\"auto\", \"basic\", \"mmsg\", \"gso\" or \"kernel\"",
    |reader, node| {
        reader.parsed(node, |text| match text {
            // `Datapath::from_str("auto")` probes the kernel, and this crate must not open sockets.
            "auto" => Ok(DatapathChoice::Auto),
            "kernel" => Ok(DatapathChoice::Kernel),
            step => step.parse().map(DatapathChoice::Step).map_err(|_| ""),
        })
    },
    keys::DATAPATH.show,
);

const LINE_FORMAT: ValueKind<LineFormat> =
    named!("\"rinetd\" or \"common\"", "rinetd" => LineFormat::Rinetd, "common" => LineFormat::Common);
