//! [`Service`], implemented once by each program that the control loop runs.

use std::{sync::Arc, time::Duration};

use turnpike_api::Reloaded;

use crate::{exposition::MetricsPage, upgrade::HandoverState};

/// A running service. Dropping it ends all sessions and joins the workers.
pub trait Service: Send + 'static {
    /// Subcommand that runs the service, such as `serve`.
    const NAME: &'static str;
    /// Noun for the objects counted by [`Service::open`].
    const OPEN: &'static str;
    /// Names of gauges of sessions. After an upgrade, the values of the previous process are added.
    const GAUGES: &'static [&'static str];

    /// Reloads the configuration. If it fails, nothing changes; the error has one line per problem.
    fn reload(&mut self) -> impl Future<Output = Result<Reloaded, Vec<String>>>;
    /// Called every second while serving.
    fn tick(&mut self) {}
    fn machine_changed(&mut self) {}
    /// Applies changes to this machine's addresses and routes. Called every second and after each change,
    /// except during an upgrade.
    fn follow_machine(&mut self, _is_serving: bool) {}
    fn has_failed(&self) -> bool;
    /// Configured time limit of a drain.
    fn drain_deadline(&self) -> Duration;
    fn drain(&mut self, deadline: Duration);
    /// True if all workers have taken commands since the last call that returned true.
    fn makes_progress(&self) -> bool;
    /// Number of current sessions or connections.
    fn open(&self) -> u64;
    fn log_left(&self, open: u64);
    fn handover_state(&self) -> Arc<dyn HandoverState>;
    fn metrics(&self) -> &MetricsPage;
    /// Metrics for a collector: all that `/metrics` contains.
    fn exported_metrics(&self) -> MetricsPage;
    /// Configured time limit for sessions left behind by an upgrade.
    fn upgrade_deadline(&self) -> Duration;
    /// A new process has begun to serve. Sessions that did not move stay in this process until `deadline`.
    fn handed_over(&mut self, deadline: Duration);
    /// Number of sessions, connections and other client state left in this process after an upgrade.
    fn left(&self) -> u64;
    /// Notifies other programs before the service is dropped.
    fn leave(&mut self) -> impl Future<Output = ()> {
        async {}
    }
}
