//! View of a running forwarder that its admin interface uses.

use std::sync::{Arc, Weak};

use tokio::sync::watch;
use turnpike_admin::{Owner, ServerView};
use turnpike_api::{Job, Process, Program, RuleState, RuleStatus};
use turnpike_config::{AdminSettings, forward::ForwardSettings};
use turnpike_forward::{Forwarder, RuleId, RuleSnapshot, RuleStanding};
use turnpike_process::{Control, MetricsPage};

pub(crate) struct ForwarderAdmin {
    pub(crate) control: Control,
    pub(crate) metrics: MetricsPage,
    /// Weak reference, so that the owner can stop the forwarder while requests are running.
    pub(crate) forwarder: Weak<Forwarder>,
    pub(crate) shown: watch::Receiver<Arc<ForwardSettings>>,
}

impl Owner for ForwarderAdmin {
    fn settings(&self) -> AdminSettings {
        self.shown.borrow().admin.clone()
    }

    fn server(&self) -> Option<ServerView> {
        None
    }
}

impl Program for ForwarderAdmin {
    fn process(&self) -> &dyn Process {
        &self.control
    }

    fn job(&self) -> Job {
        Job::Forward
    }

    fn to_toml(&self) -> String {
        self.shown.borrow().to_toml()
    }

    fn open(&self) -> u64 {
        self.forwarder.upgrade().map_or(0, |forwarder| forwarder.active())
    }

    fn metrics(&self) -> String {
        (self.metrics)()
    }

    fn rules(&self) -> Vec<RuleStatus> {
        let snapshots = self.forwarder.upgrade().map_or_else(Vec::new, |forwarder| forwarder.snapshots());
        snapshots.into_iter().map(rule).collect()
    }
}

fn rule((RuleId(name), counted): (RuleId, RuleSnapshot)) -> RuleStatus {
    let ends = counted.ended.iter().map(|(reason, count)| (<&'static str>::from(*reason), *count));
    let dropped =
        [("datagrams_dropped", counted.dropped_datagrams), ("datagrams_limited", counted.limited_datagrams)];
    let (state, waits_for) = match counted.standing {
        RuleStanding::Listening => (RuleState::Listening, None),
        RuleStanding::Waiting(why) => (RuleState::Waiting, Some(why)),
        RuleStanding::Closed => (RuleState::Closed, None),
    };
    RuleStatus {
        name,
        state,
        waits_for,
        open: counted.active,
        accepted: counted.accepted,
        to_target: (counted.to_target_datagrams, counted.to_target_bytes),
        to_client: (counted.to_client_datagrams, counted.to_client_bytes),
        ends: ends.chain(dropped).collect(),
    }
}
