//! What the interface asks of the program that it belongs to. The program is a crate of the same floor, so it is described here by what
//! is wanted of it; the binary brings the two together.

use std::{fmt, net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use turnpike_config::{AdminSettings, Certificate, Settings};
use turnpike_fleet::{Answer, Ban, Ordered, Question, Rights, Subject, Unbanned};
use turnpike_net::Datapath;
use turnpike_relay::{Relay, RelayState};
use turnpike_turn::server::Cidr;

use crate::{
    accounts::Store,
    model::{self, Job, RuleState, Sandbox},
};

/// An answer that takes its time.
pub type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A running program, asked on its control thread.
pub trait Program: Send + Sync + 'static {
    /// Which.
    fn job(&self) -> Job;
    /// Who may use the interface, now.
    fn settings(&self) -> AdminSettings;
    /// The effective configuration as TOML, secrets masked.
    fn to_toml(&self) -> String;
    /// Sessions or connections now.
    fn open(&self) -> u64;
    /// What it counts, as OpenMetrics text.
    ///
    /// # Errors
    /// None that is known.
    fn metrics(&self) -> Result<String, fmt::Error>;
    /// Whether nothing new is taken any more.
    fn is_draining(&self) -> bool;
    /// Reads the configuration again.
    fn reload(&self) -> Later<Result<Reloaded, NotReloaded>>;
    /// Takes nothing new, and ends after so long at the latest; `None` leaves that to the configuration. How many sessions or
    /// connections are left, and for how long they may stay; `None` if the program is ending already.
    fn drain(&self, patience: Option<Duration>) -> Later<Option<(u64, Duration)>>;
    /// Which log lines pass.
    fn log_level(&self) -> String;
    /// From now on these pass.
    ///
    /// # Errors
    /// What is wrong with it.
    fn set_log_level(&self, level: &str) -> Result<(), String>;
    /// The TURN server, if it is one and runs still.
    fn server(&self) -> Option<Server>;
    /// Clients that the TURN server has refused lately, the last ones first; `None` where there is no such server.
    fn refusals(&self, wanted: &RefusalFilter, most: usize) -> Option<Vec<Refusal>>;
    /// What the process has given up at its start; `None` where that was nothing.
    fn sandbox(&self) -> Option<Sandbox>;
    /// Configuration keys that control what is counted under this kind and reason; empty if none does.
    fn keys_of(&self, _kind: &str, _reason: &str) -> &'static [&'static str] {
        &[]
    }
    /// What each rule of a forwarder has counted; none where there is no forwarder.
    fn rules(&self) -> Vec<Rule>;
    /// Other servers that are one service with it, and who is banned; `None` of a program that is no server.
    fn fleet(&self) -> Option<Arc<dyn Fleet>> {
        None
    }
}

/// Other servers that are one service with this one, and who is banned, which there is without others too.
pub trait Fleet: Send + Sync + 'static {
    /// What this server is called among the others; `None` if it is in no fleet.
    fn node(&self) -> Option<String>;
    /// Who is there; `None` if it is in no fleet.
    fn status(&self) -> Option<model::Fleet>;
    /// Whether it takes clients, as far as the fleet goes.
    fn standing(&self) -> Standing;
    /// Has a node take nobody new, or clients again.
    fn set_draining(&self, node: &str, drains: bool) -> Later<Result<(), FleetRefusal>>;
    /// Asks a node for what is at a path, or to do something there.
    fn ask(&self, asked: Asked) -> Later<Result<Answer, FleetRefusal>>;
    /// The next question of another node, and the way back; `None` when there are no more.
    fn next_question(&self) -> Later<Option<(Question, Reply)>>;
    /// Who is banned.
    fn bans(&self) -> Vec<Ban>;
    /// Bans a user or an address everywhere; the number of sessions of this server that end.
    fn ban(&self, ban: Ban) -> Later<Result<Ordered, FleetRefusal>>;
    /// Ends a ban.
    fn unban(&self, subject: Subject) -> Later<Result<Unbanned, FleetRefusal>>;
    /// A user has another credential, or none: no node believes the old one any more.
    fn revoked(&self, realm: String, name: String) -> Later<()>;
    /// Secrets, realms or limits have changed in the store of users: all nodes read them.
    fn rules_changed(&self) -> Later<()>;
}

/// What is asked of another node.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Which.
    pub node: String,
    /// `GET` or `DELETE`.
    pub method: String,
    /// With what stands behind `?`.
    pub path: String,
    /// What the one who asks may do here.
    pub rights: Rights,
    /// Who that is.
    pub by: String,
}

/// The way back to who has asked.
pub type Reply = Box<dyn FnOnce(Answer) + Send>;

/// How a server stands in its fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It takes clients, and is in no fleet or knows the others.
    Well,
    /// It takes clients, and does not know how the others are.
    Alone,
    /// Serving; until the store knows what all nodes have, each serves its equal share of quotas.
    Recovering,
    /// Somebody has it take nobody new.
    Cordoned,
}

/// Why something was not done; the texts are for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FleetRefusal {
    /// There is no fleet.
    None(String),
    /// Nobody has this name.
    NoSuchNode(String),
    /// The node does not answer.
    Silent(String),
    /// The fleet's store does not.
    Store(String),
    /// It makes no sense.
    Wrong(String),
}

/// A TURN server as it is now. Not to be kept while waiting: the server does not stop as long as this is there.
pub struct Server {
    /// What relays.
    pub relay: Arc<Relay>,
    /// What is configured, with what the store adds.
    pub settings: Arc<Settings>,
    /// Where more users are, if there is one.
    pub store: Option<Store>,
    /// Those that are shown to clients.
    pub certificates: Arc<[Certificate]>,
    /// Those that relayed transport addresses are made on.
    pub addresses: Arc<[RelayState]>,
    /// The step of the ladder.
    pub datapath: Datapath,
    /// Why that.
    pub datapath_reason: Arc<str>,
}

/// What a reload has changed: lines for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// What is in force now and was not before.
    pub changed: Vec<String>,
    /// Keys that have changed, and take effect only after a restart.
    pub after_restart: Vec<String>,
    /// Doubts, and what could not be taken although the rest was.
    pub warnings: Vec<String>,
}

/// Why a reload has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotReloaded {
    /// The configuration is wrong: one line a mistake.
    Refused(Vec<String>),
    /// The program is about to end.
    Draining,
    /// Another process is about to take its place, or has.
    Upgrade,
}

/// Which refusals are wanted.
#[derive(Clone, Debug, Default)]
pub struct RefusalFilter {
    /// Of clients within this prefix.
    pub client: Option<Cidr>,
    /// With this in their username.
    pub user: Option<String>,
}

/// One client that was refused for one reason: all its users, requests and peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// For the first time, Unix milliseconds.
    pub first_ms: u64,
    /// For the last time, likewise.
    pub last_ms: u64,
    /// How often.
    pub count: u64,
    /// Where it came from the last time.
    pub client: SocketAddr,
    /// Who it said it was; empty where it did not.
    pub user: String,
    /// The realm of a user who had proved it.
    pub realm: Option<String>,
    /// What was refused.
    pub asked: &'static str,
    /// The error code of the answer.
    pub code: Option<u16>,
    /// What was wrong.
    pub reason: String,
    /// What to do about it.
    pub remedy: &'static str,
    /// Keys of the configuration that decide it.
    pub keys: &'static [&'static str],
    /// Refusals of other users, requests or peers that are counted in it.
    pub others: usize,
    /// Some users of these.
    pub other_users: Vec<String>,
    /// Some peers of these.
    pub other_peers: Vec<String>,
}

/// What a rule of a forwarder has counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// Its name.
    pub name: String,
    /// Whether it takes clients.
    pub state: RuleState,
    /// Why it waits, if it does.
    pub waits_for: Option<String>,
    /// Connections and sessions that exist.
    pub open: u64,
    /// Connections and sessions that began.
    pub accepted: u64,
    /// Datagrams and bytes to targets.
    pub to_target: (u64, u64),
    /// Datagrams and bytes to clients.
    pub to_client: (u64, u64),
    /// Why connections and sessions ended, and why datagrams were dropped.
    pub ends: Vec<(&'static str, u64)>,
}
