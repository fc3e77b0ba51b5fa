//! Brings a running program and its admin interface together: two crates of one floor, of which neither knows the other.

use std::{fmt, io, net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use turnpike_admin::{
    Applications, Interface,
    model::{self, Job, RuleState, Sandbox},
    program::{
        Asked, Fleet, FleetRefusal, Later, NotReloaded, Program, Refusal, RefusalFilter, Reloaded, Reply,
        Rule, Server, Standing,
    },
};
use turnpike_config::{AdminSettings, Settings};
use turnpike_daemon::{
    AdminError, AdminInterface, FleetError, FleetOrders, FleetStatus, Lent, Listening, NodeState, NodeStatus,
    RuleId, RuleSnapshot, RuleStanding, ServerView, Serving, logging,
};
use turnpike_fleet::{Answer, Ban, Ordered, Question, Subject, Unbanned};

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

    fn close(&self) {
        self.0.close();
    }

    fn settled(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.0.settled())
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
        let refusal = |group: turnpike_daemon::RefusalGroup| {
            let (other_users, other_peers) = (group.user_names(), group.peer_names());
            let found = group.last;
            Refusal {
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
                keys: found.why.keys(),
                others: group.others,
                other_users,
                other_peers,
            }
        };
        Some(found.into_iter().map(refusal).collect())
    }

    fn keys_of(&self, kind: &str, reason: &str) -> &'static [&'static str] {
        turnpike_daemon::keys_of_count(kind, reason)
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
        self.0.rules().into_iter().map(rule).collect()
    }

    fn fleet(&self) -> Option<Arc<dyn Fleet>> {
        Some(Arc::new(Others(self.0.fleet()?)))
    }
}

/// Its fleet, for `turnpike_admin`.
struct Others(FleetOrders);

impl Fleet for Others {
    fn node(&self) -> Option<String> {
        self.0.node_name().map(str::to_owned)
    }

    fn status(&self) -> Option<model::Fleet> {
        self.0.status().map(fleet_of)
    }

    fn standing(&self) -> Standing {
        if self.0.is_cordoned() {
            Standing::Cordoned
        } else if self.0.is_alone() {
            Standing::Alone
        } else if self.0.is_recovering() {
            Standing::Recovering
        } else {
            Standing::Well
        }
    }

    fn set_draining(&self, node: &str, drains: bool) -> Later<Result<(), FleetRefusal>> {
        let (orders, node) = (self.0.clone(), node.to_owned());
        Box::pin(async move { orders.set_draining(&node, drains).await.map_err(refusal) })
    }

    fn ask(&self, asked: Asked) -> Later<Result<Answer, FleetRefusal>> {
        let orders = self.0.clone();
        Box::pin(async move {
            let Asked { node, method, path, rights, by } = asked;
            orders.ask(&node, (&method, &path), rights, &by).await.map_err(refusal)
        })
    }

    fn next_question(&self) -> Later<Option<(Question, Reply)>> {
        let orders = self.0.clone();
        Box::pin(async move {
            let turnpike_daemon::Asked { question, answer } = orders.next_question().await?;
            let reply: Reply = Box::new(move |said| _ = answer.send(said));
            Some((question, reply))
        })
    }

    fn bans(&self) -> Vec<Ban> {
        self.0.bans()
    }

    fn ban(&self, ban: Ban) -> Later<Result<Ordered, FleetRefusal>> {
        let orders = self.0.clone();
        Box::pin(async move { orders.ban(ban).await.map_err(refusal) })
    }

    fn unban(&self, subject: Subject) -> Later<Result<Unbanned, FleetRefusal>> {
        let orders = self.0.clone();
        Box::pin(async move { orders.unban(&subject).await.map_err(refusal) })
    }

    fn revoked(&self, realm: String, name: String) -> Later<()> {
        let orders = self.0.clone();
        Box::pin(async move { orders.revoked(&realm, &name).await })
    }

    fn rules_changed(&self) -> Later<()> {
        let orders = self.0.clone();
        Box::pin(async move { orders.rules_changed().await })
    }
}

fn refusal(error: FleetError) -> FleetRefusal {
    let text = error.to_string();
    match error {
        FleetError::NoFleet => FleetRefusal::None(text),
        FleetError::NoSuchNode(_) => FleetRefusal::NoSuchNode(text),
        FleetError::Silent(_) => FleetRefusal::Silent(text),
        FleetError::Length => FleetRefusal::Wrong(text),
        _ => FleetRefusal::Store(text),
    }
}

fn fleet_of(status: FleetStatus) -> model::Fleet {
    let FleetStatus { name, node, store, alone, recovering, keys, nodes, .. } = status;
    let nodes = nodes.into_iter().map(node_of).collect();
    model::Fleet { name, node, store, alone, recovering, keys, nodes }
}

fn node_of(status: NodeStatus) -> model::FleetNode {
    let NodeStatus { name, number, state, silent_ms, load, busy, zone, version, addresses } = status;
    #[expect(clippy::cast_precision_loss, reason = "2^53 ms are 285,000 years")]
    let silent_s = silent_ms as f64 / 1000.0;
    model::FleetNode {
        name,
        number,
        state: match state {
            NodeState::Serving => model::NodeState::Serving,
            NodeState::Full => model::NodeState::Full,
            NodeState::Draining => model::NodeState::Draining,
            NodeState::Silent => model::NodeState::Silent,
        },
        silent_s,
        zone,
        version,
        busy,
        sessions: load.allocations.into(),
        max_sessions: load.most_allocations.into(),
        bits_per_second: load.bits_per_second,
        max_bits_per_second: Some(load.most_bits_per_second).filter(|most| *most > 0),
        cpu: f64::from(load.cpu) / 1000.0,
        relay_ports_left: load.ports_left.into(),
        relay_ports: load.ports.into(),
        addresses: addresses.iter().map(|(transport, address)| format!("{transport}://{address}")).collect(),
    }
}

fn job_of(job: turnpike_daemon::Job) -> Job {
    match job {
        turnpike_daemon::Job::Serve => Job::Serve,
        turnpike_daemon::Job::Forward => Job::Forward,
    }
}
