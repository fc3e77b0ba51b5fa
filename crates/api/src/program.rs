//! A program as a whole: its state, and the commands that it accepts.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use utoipa::{ToSchema, openapi::Object};

use crate::{ClientRefusals, FleetAdmin, Later, RefusalFilter, RelayRange, RuleState, one_of};

/// Control loop, log and sandbox of a running program.
pub trait Process: Send + Sync {
    fn is_draining(&self) -> bool;
    fn reload(&self) -> Later<'_, Result<Reloaded, NotReloaded>>;
    /// Stops accepting new clients, and stops the program within the limits in `wanted`. Returns `None` if
    /// it is already stopping.
    fn drain(&self, wanted: Drain) -> Later<'_, Option<Draining>>;
    fn log_level(&self) -> String;
    /// Replaces the filter for log lines.
    ///
    /// # Errors
    /// The error in the filter.
    fn set_log_level(&self, level: &str) -> Result<(), String>;
    /// `None` without a sandbox.
    fn sandbox(&self) -> Option<Sandbox> {
        None
    }
}

/// A running program; called on its control thread.
pub trait Program: Send + Sync + 'static {
    fn process(&self) -> &dyn Process;
    fn job(&self) -> Job;
    /// The effective configuration as TOML, secrets masked.
    fn to_toml(&self) -> String;
    /// Current number of allocations or connections.
    fn open(&self) -> u64;
    /// OpenMetrics text.
    fn metrics(&self) -> String;
    /// Recent refusals of the TURN server, most recent first; `None` for a forwarder.
    fn refusals(&self, _wanted: &RefusalFilter, _most: usize) -> Option<Vec<ClientRefusals>> {
        None
    }
    /// Configuration keys that control this kind and reason of refusal; possibly none.
    fn keys_of(&self, _kind: &str, _reason: &str) -> &'static [&'static str] {
        &[]
    }
    /// State of each forwarding rule; empty for a server.
    fn rules(&self) -> Vec<RuleStatus> {
        Vec::new()
    }
    /// Bans and the fleet; `None` for a forwarder.
    fn fleet(&self) -> Option<Arc<dyn FleetAdmin>> {
        None
    }
}

/// Reason why a reload changed nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotReloaded {
    /// The configuration is invalid; one line per error.
    Refused(Vec<String>),
    Draining,
    /// An upgrade is in progress or finished.
    Upgrade,
}

/// Counters of a forwarding rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleStatus {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: RuleState,
    /// Reason for waiting.
    pub waits_for: Option<String>,
    /// Open connections and UDP sessions.
    pub open: u64,
    /// Accepted connections and UDP sessions.
    pub accepted: u64,
    /// Datagrams and bytes to targets.
    pub to_target: (u64, u64),
    /// Datagrams and bytes to clients.
    pub to_client: (u64, u64),
    /// Ended connections, ended UDP sessions and dropped datagrams, by reason.
    pub ends: Vec<(&'static str, u64)>,
}

/// The running subcommand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Job {
    /// `turnpike serve`.
    Serve,
    /// `turnpike forward`.
    Forward,
}

/// State of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// The running subcommand.
    pub job: Job,
    /// Version of the program.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// Start time (RFC 3339).
    pub started_at: String,
    /// Seconds since the start.
    pub uptime_s: u64,
    /// True if it accepts no new clients and exits when the last allocation or connection ends.
    pub draining: bool,
    /// Allocations of a server or connections of a forwarder, including those of a previous process. At most 1 s old.
    pub open: u64,
    /// I/O path of a server for datagrams.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub datapath: Option<DatapathStatus>,
    /// Relay addresses of a server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub relays: Vec<RelayRange>,
    /// Name in its fleet; absent outside a fleet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Remaining privileges of the process; absent if there is no sandbox (`sandbox.mode`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
}

/// Remaining privileges of a process in its sandbox. If a part is null, it is not restricted, and `missing`
/// contains the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    /// Number of system calls that can be made.
    pub system_calls: Option<u64>,
    /// Directories and files that can be read.
    pub read: Option<Vec<String>>,
    /// Directories whose files can be written.
    pub written: Option<Vec<String>>,
    /// Capabilities as in capabilities(7), without `CAP_`.
    pub capabilities: Option<Vec<String>>,
    /// A sentence for each part that is not restricted.
    pub missing: Vec<String>,
}

/// I/O path for datagrams.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Datapath)]
pub struct DatapathStatus {
    /// The method, such as `gso`.
    pub step: String,
    /// Reason for the choice.
    pub why: String,
}

/// Build of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Build {
    /// Always `turnpike`.
    pub name: String,
    /// Version of the program.
    pub version: String,
    /// Architecture and system, such as `x86_64-linux`.
    pub target: String,
    /// Build profile.
    #[schema(schema_with = profile)]
    pub profile: String,
}

/// Rights of the requesting client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Access)]
pub struct ClientRights {
    /// True if changes are allowed: ending allocations, reloading, draining, setting the log level.
    pub may_change: bool,
}

/// Filter for log lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "level": "info" }))]
pub struct LogLevel {
    /// `error`, `warn`, `info`, `debug`, `trace`, `off`, or directives such as `info,turnpike_relay=debug`.
    #[schema(min_length = 1, max_length = 1000)]
    pub level: String,
}

/// Limits of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "deadline_s": 300 }))]
pub struct Drain {
    /// Seconds for which allocations or connections may continue, at most a day; default
    /// `shutdown.deadline`. 0 ends them immediately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 86400)]
    pub deadline_s: Option<u32>,
    /// Number of allocations or connections for which the program does not wait; default 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
}

impl Drain {
    #[must_use]
    pub fn patience(&self) -> Option<Duration> {
        self.deadline_s.map(|seconds| Duration::from_secs(seconds.into()))
    }
}

/// A drain in progress.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Draining {
    /// Remaining allocations or connections.
    pub open: u64,
    /// Seconds for which they may continue.
    pub deadline_s: f64,
}

/// Changes made by a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reloaded {
    /// One line for each key, realm, rule or certificate, such as `auth.users: 1 added`.
    pub changed: Vec<String>,
    /// Changed keys that take effect only after a restart.
    pub after_restart: Vec<String>,
    /// Warnings, for example about settings that could not be applied even though the others were.
    pub warnings: Vec<String>,
}

fn profile() -> Object {
    one_of("Build profile.", &["release", "debug"])
}
