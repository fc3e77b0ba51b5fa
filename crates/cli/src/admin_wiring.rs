//! Brings a running program and its admin interface together: two crates of one floor, of which neither knows the other.

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use turnpike_admin::{
    Interface,
    model::Job,
    program::{Later, NotReloaded, Program, Reloaded, Server},
};
use turnpike_config::AdminSettings;
use turnpike_daemon::{AdminError, AdminInterface, Listening, ServerView, logging};

/// The admin interface, for `turnpike_daemon`.
pub(crate) struct Admin;

impl AdminInterface for Admin {
    fn listen(
        &self,
        job: turnpike_daemon::Job,
        settings: &AdminSettings,
        explicit: bool,
    ) -> Result<Box<dyn Listening>, AdminError> {
        Ok(Box::new(Bound(Interface::listen(job_of(job), settings, explicit)?)))
    }
}

struct Bound(Interface);

impl Listening for Bound {
    fn addresses(&self) -> Vec<SocketAddr> {
        self.0.addresses()
    }

    fn say_where(&self) {
        self.0.say_where();
    }

    fn serve(self: Box<Self>, program: turnpike_daemon::Program) {
        self.0.serve(Arc::new(Running(program)));
    }
}

/// A running program, for `turnpike_admin`.
struct Running(turnpike_daemon::Program);

impl Program for Running {
    fn job(&self) -> Job {
        job_of(self.0.job)
    }

    fn settings(&self) -> AdminSettings {
        self.0.admin()
    }

    fn to_toml(&self) -> String {
        self.0.to_toml()
    }

    fn open(&self) -> u64 {
        self.0.open()
    }

    fn metrics(&self) -> Result<String, fmt::Error> {
        self.0.metrics()
    }

    fn is_draining(&self) -> bool {
        self.0.control.is_draining()
    }

    fn reload(&self) -> Later<Result<Reloaded, NotReloaded>> {
        let control = self.0.control.clone();
        Box::pin(async move {
            match control.reload().await {
                Ok(turnpike_daemon::Reloaded { changed, after_restart, warnings }) => {
                    Ok(Reloaded { changed, after_restart, warnings })
                }
                Err(turnpike_daemon::NotReloaded::Refused(lines)) => Err(NotReloaded::Refused(lines)),
                Err(turnpike_daemon::NotReloaded::Draining) => Err(NotReloaded::Draining),
            }
        })
    }

    fn drain(&self, patience: Option<Duration>) -> Later<Option<(u64, Duration)>> {
        let control = self.0.control.clone();
        Box::pin(async move { control.drain(patience).await.map(|draining| (draining.open, draining.left)) })
    }

    fn log_level(&self) -> String {
        logging::level()
    }

    fn set_log_level(&self, level: &str) -> Result<(), String> {
        logging::set_level(level)
    }

    fn server(&self) -> Option<Server> {
        let ServerView { relay, settings, store, certificates, addresses, datapath, datapath_reason } =
            self.0.server()?;
        Some(Server { relay, settings, store, certificates, addresses, datapath, datapath_reason })
    }
}

fn job_of(job: turnpike_daemon::Job) -> Job {
    match job {
        turnpike_daemon::Job::Serve => Job::Serve,
        turnpike_daemon::Job::Forward => Job::Forward,
    }
}
