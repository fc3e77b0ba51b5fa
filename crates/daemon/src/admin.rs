//! What the admin interface can ask of a running program.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::sync::watch;
use turnpike_admin::{Owner, ServerView};
use turnpike_api::{
    Draining, FleetAdmin, Job, Later, NotReloaded, Program, Refusal, RefusalFilter, Reloaded, Rule,
    RuleState, Sandbox,
};
use turnpike_config::AdminSettings;
use turnpike_forward::{RuleId, RuleSnapshot, RuleStanding};
use turnpike_net::Datapath;
use turnpike_process::{Control, MetricsPage, logging, sandbox};
use turnpike_relay::Relay;

use crate::{
    certificates::Told,
    effective_settings::EffectiveSettings,
    fleet::FleetOrders,
    refusals::{Refusals, keys_of_count},
    store::{SharedStore, shared},
};

/// Descriptors set apart for the admin interface and for files that are read while the program runs: one for each connection, one for
/// each of those that are just being closed, and some for configuration, certificates and `/proc`.
pub(crate) const DESCRIPTORS: u64 = 48;

/// More of them, where applications ask for credentials on a listener of its own.
pub(crate) const CREDENTIALS_DESCRIPTORS: u64 = 144;

/// Reads the counters of each rule of a forwarder.
pub(crate) type Rules = Arc<dyn Fn() -> Vec<(RuleId, RuleSnapshot)> + Send + Sync>;

/// A running program. Answers on the runtime of its control thread.
pub(crate) struct AdminView {
    pub(crate) job: Job,
    pub(crate) control: Control,
    pub(crate) admin: Arc<dyn Fn() -> AdminSettings + Send + Sync>,
    pub(crate) toml: Arc<dyn Fn() -> String + Send + Sync>,
    pub(crate) open: Arc<dyn Fn() -> u64 + Send + Sync>,
    pub(crate) metrics: MetricsPage,
    pub(crate) server: Option<ServerHandle>,
    pub(crate) rules: Option<Rules>,
}

/// The TURN server of a running program.
pub(crate) struct ServerHandle {
    /// Weak, so that the last owner can stop the relay while others look at it.
    pub(crate) relay: Weak<Relay>,
    pub(crate) shown: watch::Receiver<EffectiveSettings>,
    pub(crate) store: SharedStore,
    pub(crate) certificates: Arc<Told>,
    pub(crate) datapath: Datapath,
    pub(crate) datapath_reason: Arc<str>,
    pub(crate) fleet: Arc<FleetOrders>,
    pub(crate) refusals: Arc<Refusals>,
}

impl Owner for AdminView {
    fn settings(&self) -> AdminSettings {
        (self.admin)()
    }

    fn server(&self) -> Option<ServerView> {
        let server = self.server.as_ref()?;
        let EffectiveSettings { in_force, addresses, .. } = server.shown.borrow().clone();
        Some(ServerView {
            relay: server.relay.upgrade()?,
            settings: in_force,
            store: shared(&server.store),
            certificates: server.certificates.in_use(),
            addresses,
            datapath: server.datapath,
            datapath_reason: Arc::clone(&server.datapath_reason),
        })
    }
}

impl Program for AdminView {
    fn job(&self) -> Job {
        self.job
    }

    fn to_toml(&self) -> String {
        (self.toml)()
    }

    fn open(&self) -> u64 {
        (self.open)()
    }

    fn metrics(&self) -> String {
        (self.metrics)()
    }

    fn is_draining(&self) -> bool {
        self.control.is_draining()
    }

    fn reload(&self) -> Later<'_, Result<Reloaded, NotReloaded>> {
        Box::pin(self.control.reload())
    }

    fn drain(&self, patience: Option<Duration>) -> Later<'_, Option<Draining>> {
        Box::pin(self.control.drain(patience))
    }

    fn log_level(&self) -> String {
        logging::level()
    }

    fn set_log_level(&self, level: &str) -> Result<(), String> {
        logging::set_level(level)
    }

    fn refusals(&self, wanted: &RefusalFilter, most: usize) -> Option<Vec<Refusal>> {
        let found = self.server.as_ref()?.refusals.find(wanted, most);
        Some(found.into_iter().map(Refusal::from).collect())
    }

    fn sandbox(&self) -> Option<Sandbox> {
        let sandbox = sandbox::in_force()?;
        let files = sandbox.files.as_ref().ok();
        let capabilities = sandbox.capabilities.as_ref().ok();
        Some(Sandbox {
            system_calls: sandbox.system_calls.as_ref().ok().map(|count| *count as u64),
            read: files.map(|files| files.read.clone()),
            written: files.map(|files| files.written.clone()),
            capabilities: capabilities.map(|kept| kept.iter().map(|&name| name.to_owned()).collect()),
            missing: sandbox.missing(),
        })
    }

    fn keys_of(&self, kind: &str, reason: &str) -> &'static [&'static str] {
        keys_of_count(kind, reason)
    }

    fn rules(&self) -> Vec<Rule> {
        let rule = |(RuleId(name), counted): (RuleId, RuleSnapshot)| {
            let ends = counted.ended.iter().map(|(reason, count)| (<&'static str>::from(*reason), *count));
            let dropped = [
                ("datagrams_dropped", counted.dropped_datagrams),
                ("datagrams_limited", counted.limited_datagrams),
            ];
            let (state, waits_for) = match counted.standing {
                RuleStanding::Listening => (RuleState::Listening, None),
                RuleStanding::Waiting(why) => (RuleState::Waiting, Some(why)),
                RuleStanding::Closed => (RuleState::Closed, None),
            };
            Rule {
                name,
                state,
                waits_for,
                open: counted.active,
                accepted: counted.accepted,
                to_target: (counted.to_target_datagrams, counted.to_target_bytes),
                to_client: (counted.to_client_datagrams, counted.to_client_bytes),
                ends: ends.chain(dropped).collect(),
            }
        };
        self.rules.iter().flat_map(|rules| rules()).map(rule).collect()
    }

    fn fleet(&self) -> Option<Arc<dyn FleetAdmin>> {
        let fleet = Arc::clone(&self.server.as_ref()?.fleet);
        Some(fleet)
    }
}
