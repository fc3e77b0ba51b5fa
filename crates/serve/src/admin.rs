//! View of a running TURN server for its admin interface.

use std::sync::{Arc, Weak};

use jiff::Timestamp;
use tokio::sync::watch;
use turnpike_acme::{AcmeStatus, NameStatus};
use turnpike_admin::{Owner, ServerView};
use turnpike_api::{CertificateOrder, ClientRefusals, FleetAdmin, Job, Process, Program, RefusalFilter};
use turnpike_config::AdminSettings;
use turnpike_events::Events;
use turnpike_net::Datapath;
use turnpike_process::{Control, MetricsPage};
use turnpike_relay::Relay;
use turnpike_stores::UsageStore;

use crate::{
    certificates::CertificateState,
    effective_settings::EffectiveSettings,
    fleet::FleetOrders,
    geoip::GeoIp,
    quality::QualityMonitor,
    refusals::{Refusals, keys_of_count},
    store::{StoreInUse, shared},
};

pub(crate) struct ServerAdmin {
    pub(crate) control: Control,
    pub(crate) metrics: MetricsPage,
    /// Weak, so that its owner can stop the relay while requests are running.
    pub(crate) relay: Weak<Relay>,
    pub(crate) shown: watch::Receiver<EffectiveSettings>,
    pub(crate) store: StoreInUse,
    pub(crate) certificates: Arc<CertificateState>,
    pub(crate) acme: Arc<AcmeStatus>,
    pub(crate) datapath: Datapath,
    pub(crate) datapath_reason: Arc<str>,
    pub(crate) fleet: Arc<FleetOrders>,
    pub(crate) refusals: Arc<Refusals>,
    pub(crate) events: Arc<Events>,
    pub(crate) usage: Option<Arc<UsageStore>>,
    pub(crate) geoip: Arc<GeoIp>,
    pub(crate) quality: Arc<QualityMonitor>,
}

fn orders(acme: &AcmeStatus) -> Vec<CertificateOrder> {
    let order = |(name, status): (String, NameStatus)| {
        let next = i64::try_from(status.next).ok().and_then(|unix| Timestamp::from_second(unix).ok());
        let next = next.unwrap_or_default().to_string();
        CertificateOrder { name, next, failures: status.failures, error: status.held_up.or(status.error) }
    };
    acme.names().into_iter().map(order).collect()
}

impl Owner for ServerAdmin {
    fn settings(&self) -> AdminSettings {
        self.shown.borrow().configured.admin.clone()
    }

    fn events(&self) -> Option<Arc<Events>> {
        Some(Arc::clone(&self.events))
    }

    fn server(&self) -> Option<ServerView> {
        let EffectiveSettings { in_force, addresses, .. } = self.shown.borrow().clone();
        Some(ServerView {
            relay: self.relay.upgrade()?,
            settings: in_force,
            store: shared(&self.store),
            certificates: self.certificates.in_use(),
            orders: orders(&self.acme),
            addresses,
            datapath: self.datapath,
            datapath_reason: Arc::clone(&self.datapath_reason),
            usage: self.usage.clone(),
            networks: Some(self.geoip.clone()),
            qualities: Some(self.quality.clone()),
        })
    }
}

impl Program for ServerAdmin {
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

    fn refusals(&self, wanted: &RefusalFilter, most: usize) -> Option<Vec<ClientRefusals>> {
        Some(self.refusals.find(wanted, most).into_iter().map(ClientRefusals::from).collect())
    }

    fn keys_of(&self, kind: &str, reason: &str) -> &'static [&'static str] {
        keys_of_count(kind, reason)
    }

    fn fleet(&self) -> Option<Arc<dyn FleetAdmin>> {
        let fleet = Arc::clone(&self.fleet);
        Some(fleet)
    }
}
