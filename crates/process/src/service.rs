//! [`Service`]: implemented once by each program that the control loop runs.

use std::{sync::Arc, time::Duration};

use turnpike_api::Reloaded;

use crate::{exposition::MetricsPage, upgrade::HandoverState};

/// A running service. Dropping it ends all sessions and joins the workers.
pub trait Service: Send + 'static {
    /// Subcommand that runs it, such as `serve`.
    const NAME: &'static str;
    /// Noun for the things that [`Service::open`] counts.
    const OPEN: &'static str;
    /// Gauges of sessions: after an upgrade, those of the previous process are added.
    const GAUGES: &'static [&'static str];

    /// Reads the configuration again. If it is wrong, nothing changes, and the error has one line for each mistake.
    fn reload(&mut self) -> impl Future<Output = Result<Reloaded, Vec<String>>>;
    /// Called each second while serving.
    fn tick(&mut self) {}
    /// Addresses or routes of this machine may have changed.
    fn machine_changed(&mut self) {}
    /// Applies changes of this machine. Called each second and after each change, but not during an upgrade.
    fn follow_machine(&mut self, _is_serving: bool) {}
    /// Returns true once a worker has ended by itself.
    fn has_failed(&self) -> bool;
    /// Time for sessions to end in a drain, as configured.
    fn drain_deadline(&self) -> Duration;
    /// Accepts nothing new from now on, and logs that.
    fn drain(&mut self, deadline: Duration);
    /// Returns true if all workers have taken commands since the last call.
    fn makes_progress(&self) -> bool;
    /// Number of sessions or connections now.
    fn open(&self) -> u64;
    /// Logs that this many sessions end with the process.
    fn log_left(&self, open: u64);
    /// State for a new process.
    fn handover_state(&self) -> Arc<dyn HandoverState>;
    /// The page of `/metrics`.
    fn metrics(&self) -> &MetricsPage;
    /// Time that sessions left behind by an upgrade may go on here, as configured.
    fn upgrade_deadline(&self) -> Duration;
    /// A new process serves from now on. Sessions that did not move go on here until `deadline`.
    fn handed_over(&mut self, deadline: Duration);
    /// Number of sessions, connections and other client state left here after an upgrade.
    fn left(&self) -> u64;
    /// Takes leave of other programs before the service is dropped.
    fn leave(&mut self) -> impl Future<Output = ()> {
        async {}
    }
}
