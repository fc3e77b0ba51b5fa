//! View of a running TURN server for its admin interface.

use std::sync::{Arc, Weak};

use tokio::sync::watch;
use turnpike_admin::{Owner, ServerView};
use turnpike_api::{FleetAdmin, Job, Process, Program, Refusal, RefusalFilter};
use turnpike_config::AdminSettings;
use turnpike_net::Datapath;
use turnpike_process::{Control, MetricsPage};
use turnpike_relay::Relay;

use crate::{
    certificates::Told,
    effective_settings::EffectiveSettings,
    fleet::FleetOrders,
    refusals::{Refusals, keys_of_count},
    store::{SharedStore, shared},
};

pub(crate) struct AdminView {
    pub(crate) control: Control,
    pub(crate) metrics: MetricsPage,
    /// Weak, so that its owner can stop the relay while requests run.
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
        self.shown.borrow().configured.admin.clone()
    }

    fn server(&self) -> Option<ServerView> {
        let EffectiveSettings { in_force, addresses, .. } = self.shown.borrow().clone();
        Some(ServerView {
            relay: self.relay.upgrade()?,
            settings: in_force,
            store: shared(&self.store),
            certificates: self.certificates.in_use(),
            addresses,
            datapath: self.datapath,
            datapath_reason: Arc::clone(&self.datapath_reason),
        })
    }
}

impl Program for AdminView {
    fn process(&self) -> &dyn Process {
        &self.control
    }

    fn job(&self) -> Job {
        Job::Serve
    }

    fn to_toml(&self) -> String {
        self.shown.borrow().configured.to_toml()
    }

    fn open(&self) -> u64 {
        let own = self.relay.upgrade().map_or(0, |relay| relay.allocations());
        own + self.control.status().carried().apart("turnpike_allocations")
    }

    fn metrics(&self) -> String {
        (self.metrics)()
    }

    fn refusals(&self, wanted: &RefusalFilter, most: usize) -> Option<Vec<Refusal>> {
        Some(self.refusals.find(wanted, most).into_iter().map(Refusal::from).collect())
    }

    fn keys_of(&self, kind: &str, reason: &str) -> &'static [&'static str] {
        keys_of_count(kind, reason)
    }

    fn fleet(&self) -> Option<Arc<dyn FleetAdmin>> {
        let fleet = Arc::clone(&self.fleet);
        Some(fleet)
    }
}
