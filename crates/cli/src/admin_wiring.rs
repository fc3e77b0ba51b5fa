//! Brings a running program and its admin interface together: two crates of one floor, of which neither knows the other.

use std::{fmt, io, net::SocketAddr, sync::Arc, time::Duration};

use turnpike_admin::{
    Applications, Interface,
    model::{Job, Sandbox},
    program::{Later, NotReloaded, Program, Refusal, RefusalFilter, Reloaded, Rule, Server},
};
use turnpike_config::{AdminSettings, Settings};
use turnpike_daemon::{
    AdminError, AdminInterface, Lent, Listening, RuleId, RuleSnapshot, ServerView, Serving, logging,
};

/// The admin interface, for `turnpike_daemon`.
pub(crate) struct Admin;

impl AdminInterface for Admin {
    fn listen(
        &self,
        job: turnpike_daemon::Job,
        settings: &AdminSettings,
        explicit: bool,
        lent: Vec<Lent>,
    ) -> Result<Box<dyn Listening>, AdminError> {
        Ok(Box::new(Bound(Interface::listen(job_of(job), settings, explicit, lent)?)))
    }

    fn listen_for_applications(
        &self,
        settings: &Settings,
        lent: Vec<Lent>,
    ) -> Result<Box<dyn Listening>, AdminError> {
        Ok(Box::new(ForApplications(Applications::listen(settings, lent)?)))
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

    fn serve(self: Box<Self>, program: turnpike_daemon::Program) -> Arc<dyn Serving> {
        Arc::new(Answering(self.0.serve(Arc::new(Running(program)))))
    }
}

struct Answering(turnpike_admin::Serving);

impl Serving for Answering {
    fn lend(&self) -> io::Result<Vec<Lent>> {
        self.0.lend()
    }

    fn leave(&self) {
        self.0.leave();
    }
}

struct ForApplications(Applications);

impl Listening for ForApplications {
    fn addresses(&self) -> Vec<SocketAddr> {
        self.0.addresses()
    }

    fn say_where(&self) {
        self.0.say_where();
    }

    fn serve(self: Box<Self>, program: turnpike_daemon::Program) -> Arc<dyn Serving> {
        Arc::new(Answering(self.0.serve(Arc::new(Running(program)))))
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
                Err(turnpike_daemon::NotReloaded::Upgrade) => Err(NotReloaded::Upgrade),
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

    fn refusals(&self, wanted: &RefusalFilter, most: usize) -> Option<Vec<Refusal>> {
        let RefusalFilter { client, user } = wanted.clone();
        let found = self.0.refusals(&turnpike_daemon::RefusalFilter { client, user }, most)?;
        let refusal = |found: turnpike_daemon::Refusal| Refusal {
            first_ms: found.first_ms,
            last_ms: found.last_ms,
            count: found.count,
            client: found.client,
            user: found.user.into_string(),
            realm: found.realm.as_deref().map(str::to_owned),
            asked: found.why.asked(),
            code: found.why.code(),
            reason: found.why.reason(),
            remedy: found.why.remedy(),
        };
        Some(found.into_iter().map(refusal).collect())
    }

    fn sandbox(&self) -> Option<Sandbox> {
        let sandbox = turnpike_daemon::sandbox()?;
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

    fn rules(&self) -> Vec<Rule> {
        let rule = |(RuleId(name), counted): (RuleId, RuleSnapshot)| {
            let ends = counted.ended.iter().map(|(reason, count)| (<&'static str>::from(*reason), *count));
            let dropped = [
                ("datagrams_dropped", counted.dropped_datagrams),
                ("datagrams_limited", counted.limited_datagrams),
            ];
            Rule {
                name,
                open: counted.active,
                accepted: counted.accepted,
                to_target: (counted.to_target_datagrams, counted.to_target_bytes),
                to_client: (counted.to_client_datagrams, counted.to_client_bytes),
                ends: ends.chain(dropped).collect(),
            }
        };
        self.0.rules().into_iter().map(rule).collect()
    }
}

fn job_of(job: turnpike_daemon::Job) -> Job {
    match job {
        turnpike_daemon::Job::Serve => Job::Serve,
        turnpike_daemon::Job::Forward => Job::Forward,
    }
}
