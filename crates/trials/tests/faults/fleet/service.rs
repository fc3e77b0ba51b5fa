//! The fleet itself: three nodes, the Redis between them, and PostgreSQL with the users of all.

use std::{array, fmt::Write as _, process::Command};

use serde_json::Value;
use turnpike_testkit::databases::{self, Proxy};

use super::{
    crowd::{clients, users},
    network::{NODES, Network, STORES, balancer_of, node_address},
    quota::{GREEDY, Greedy},
};
use crate::faults::{Server, Wanted, or_thorough, within};
use turnpike_trials::coturn_store;
use turnpike_trials::{
    Certificate, Dir, Finished, Metrics, Program, REALM, Reflect, SOON, get_unix, turnpike,
};

/// Of all users.
pub(super) const PASSWORD: &str = "pw";
const SECRET: &str = "of this fleet, and of at least 32 characters";

/// Allocations that one user may have at all nodes together.
pub(super) fn quota() -> u32 {
    or_thorough(60, 300)
}

pub(super) struct World {
    pub(super) greedy: Greedy,
    pub(super) nodes: [Server; NODES],
    pub(super) redis: databases::Server,
    pub(super) postgres: databases::Server,
    pub(super) network: Network,
    /// By which nodes reach the Redis.
    pub(super) store: Proxy,
    _reflect: Reflect,
    _users: Proxy,
    _certificate: Certificate,
    _dir: Dir,
}

/// What the Redis knows of the fleet.
#[derive(Debug)]
pub(super) struct Books {
    /// In all of it.
    pub(super) keys: u64,
    pub(super) era: u64,
    /// It knows what all nodes have.
    pub(super) is_whole: bool,
    /// The version of the keys for nonces and tickets.
    pub(super) ring: u64,
    /// That have beaten, and that have said who they are.
    pub(super) nodes: u64,
    pub(super) cards: u64,
    /// Allocations: of all, of the realm, which is as many, and of the users, most first.
    pub(super) sums: Vec<u64>,
}

impl World {
    /// All of it, and the user who wants too much. Or why it cannot be here.
    pub(super) fn up() -> Result<Self, String> {
        let dir = Dir::new();
        let redis = databases::Server::redis()?;
        let postgres = coturn_store()?.0;
        enter_users(&postgres);
        let network = Network::up(&dir);
        let (store, users) = (Proxy::on(STORES, redis.address), Proxy::on(STORES, postgres.address));
        let urls = [redis.url(store.address, ""), postgres.url(users.address, "")];
        let certificate = Certificate::new(&["turn.example.org"]);
        let nodes = array::from_fn(|node| start(node, &network, &dir, &urls, &certificate));
        let reflect = Reflect::start_in(&network.clients, super::network::PEERS);
        let world = Self {
            greedy: Greedy::start(PASSWORD),
            nodes,
            redis,
            postgres,
            network,
            store,
            _reflect: reflect,
            _users: users,
            _certificate: certificate,
            _dir: dir,
        };
        world.is_whole();
        world.quota_is_used();
        Ok(world)
    }

    /// Waits until the store knows all nodes, every node says that all are there, knows the same keys, and serves; and the balancer finds them.
    pub(super) fn is_whole(&self) {
        within(SOON * 2, "the fleet is whole", || {
            if self.redis.say("HLEN turnpike:{turnpike}:nodes") != format!(":{NODES}\r\n") {
                return false;
            }
            let tell = |node| self.metrics(node);
            let all: Option<Vec<Metrics>> = (0..NODES).map(tell).collect();
            let Some(all) = all else { return false };
            let is_whole = |metrics: &Metrics| {
                metrics.sum("turnpike_fleet_up", "") == 1
                    && metrics.sum("turnpike_store_up", "") == 1
                    && metrics.sum("turnpike_fleet_nodes", "state=\"serving\"") == NODES as u64
                    && metrics.sum("turnpike_fleet_nodes", "") == NODES as u64
            };
            let keys = |metrics: &Metrics| metrics.sum("turnpike_fleet_key_ring_version", "");
            all.iter().all(is_whole)
                && all.iter().all(|metrics| keys(metrics) == keys(&all[0]))
                && (0..NODES).all(|node| self.readiness(node) == Some((200, "ok\n".to_owned())))
                && (0..NODES).all(|node| self.sees_all(node))
                && self.network.leads_to_all()
        });
    }

    /// Waits until the greedy user has what he may have.
    pub(super) fn quota_is_used(&self) {
        let most = quota() as usize;
        within(SOON * 2, "the quota can be used", || self.greedy.count() >= most - most / 20);
    }

    pub(super) fn metrics(&self, node: usize) -> Option<Metrics> {
        self.nodes[node].metrics_now()
    }

    /// Status and words of its `/readyz`.
    pub(super) fn readiness(&self, node: usize) -> Option<(u16, String)> {
        get_unix(&self.nodes[node].admin(), "/readyz").ok()
    }

    /// Allocations of all but the greedy user at a node; none at one that does not live.
    pub(super) fn allocations(&self, node: usize) -> u64 {
        let all = self.metrics(node).map_or(0, |metrics| metrics.sum("turnpike_allocations", ""));
        all.saturating_sub(self.greedy.count_at(node) as u64)
    }

    /// The same at all nodes.
    pub(super) fn all_allocations(&self) -> [u64; NODES] {
        array::from_fn(|node| self.allocations(node))
    }

    /// Waits until so many clients have an allocation.
    pub(super) fn are_served(&self, clients: u64) {
        within(SOON * 2, &format!("{clients} clients have an allocation"), || {
            self.all_allocations().iter().sum::<u64>() >= clients
        });
    }

    /// How often each node has said that it goes by limits of its own, without the store.
    pub(super) fn times_alone(&self) -> [usize; NODES] {
        self.times_said(&["this node is alone"])
    }

    /// How often each node has said that the store knows no more what it was told.
    pub(super) fn times_emptied(&self) -> [usize; NODES] {
        self.times_said(&[
            "the fleet's store was emptied",
            "the fleet's store has lost what this node had told it",
        ])
    }

    /// In how many lines of its log each node has said one of these.
    fn times_said(&self, words: &[&str]) -> [usize; NODES] {
        array::from_fn(|node| {
            let lines = self.nodes[node].lines();
            lines.iter().filter(|line| words.iter().any(|words| line.contains(words))).count()
        })
    }

    /// Whether a node says wherever it can be asked, and has said in its log, that it is without the store of the fleet.
    pub(super) fn is_alone(&self, node: usize) -> bool {
        let said = self.nodes[node].lines();
        let said = said.iter().rev().find(|line| {
            line.contains("; this node is alone") || line.contains(": this node is one of the fleet")
        });
        said.is_some_and(|line| line.contains("alone"))
            && self.metrics(node).is_some_and(|metrics| metrics.sum("turnpike_fleet_up", "") == 0)
            && self.readiness(node) == Some((200, "alone\n".to_owned()))
    }

    /// Whether all other nodes have missed a node's beats.
    pub(super) fn is_missed(&self, node: usize) -> bool {
        self.others_know(node, "serving", NODES as u64 - 1)
    }

    /// Whether all other nodes know that a node drains.
    pub(super) fn drains_for_others(&self, node: usize) -> bool {
        self.others_know(node, "draining", 1)
    }

    /// Whether all nodes but one know so many in this state.
    fn others_know(&self, but: usize, state: &str, count: u64) -> bool {
        let label = format!("state=\"{state}\"");
        let knows = |node| {
            self.metrics(node).is_some_and(|metrics| metrics.sum("turnpike_fleet_nodes", &label) == count)
        };
        (0..NODES).filter(|node| *node != but).all(knows)
    }

    /// Whether a node has given the store of users up.
    pub(super) fn is_without_users(&self, node: usize) -> bool {
        self.metrics(node).is_some_and(|metrics| metrics.sum("turnpike_store_up", "") == 0)
    }

    /// What is in the Redis.
    pub(super) fn books(&self) -> Books {
        let numbers = |words: &str| -> Vec<u64> {
            let said = self.redis.say(words);
            // In an answer of several lines these tell of lengths.
            let values = said.lines().filter(|line| !line.starts_with(['*', '$']));
            values.filter_map(|line| line.trim_start_matches(':').parse().ok()).collect()
        };
        let number = |words: &str| numbers(words).first().copied().unwrap_or_default();
        let mut sums = numbers("HVALS turnpike:{turnpike}:sums");
        sums.sort_unstable_by(|a, b| b.cmp(a));
        Books {
            keys: number("DBSIZE"),
            era: number("HGET turnpike:{turnpike}:era number"),
            is_whole: number("HGET turnpike:{turnpike}:era whole") == 1,
            ring: number("HGET turnpike:{turnpike}:ring version"),
            nodes: number("HLEN turnpike:{turnpike}:nodes"),
            cards: number("HLEN turnpike:{turnpike}:cards"),
            sums,
        }
    }

    /// Ends a node at once.
    pub(super) fn kill(&mut self, node: usize) {
        self.nodes[node].kill();
        self.greedy.has_lost(node);
    }

    /// What `turnpike` says to these words about this node.
    pub(super) fn told(&self, node: usize, words: &[&str]) -> Finished {
        let admin = format!("unix:{}", self.nodes[node].admin().display());
        Program::run(&mut turnpike(&[words, &["--admin", &admin]].concat()))
    }

    /// Whether `turnpike fleet status` shows all nodes as serving.
    fn sees_all(&self, node: usize) -> bool {
        let status = self.told(node, &["fleet", "status", "--json"]);
        let status: Value = serde_json::from_str(&status.stdout).unwrap_or_default();
        let nodes = status["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
        nodes.len() == NODES && nodes.iter().all(|node| node["state"] == "serving")
    }
}

/// What a node is called.
pub(super) fn name(node: usize) -> String {
    format!("n{}", node + 1)
}

fn start(
    node: usize,
    network: &Network,
    dir: &Dir,
    [store, users]: &[String; 2],
    certificate: &Certificate,
) -> Server {
    let (name, balancer, quota) = (name(node), balancer_of(node), quota());
    let text = format!(
        "[server]\nrealm = \"{REALM}\"\nproxy_protocol_from = [\"{balancer}\"]\n\
         [fleet]\nurl = \"{store}\"\nsecret = \"{SECRET}\"\nnode = \"{name}\"\n[store]\nurl = \"{users}\"\n\
         [limits]\nallocations = {}\nallocations_per_user = {quota}\n[peers]\nallow = [\"10.78.0.0/16\"]\n",
        clients() + quota
    );
    let file = dir.file(&format!("{name}.toml"), text);
    let mut wanted = Wanted::flags(&["--workers", "1", "-c", file.to_str().expect("UTF-8")]);
    wanted.flags.extend(certificate.flags().map(str::to_owned));
    wanted.by_file = true;
    // Nothing ends by itself while a row lasts.
    wanted.environment = vec![("TURNPIKE_LIMITS_DEFAULT_LIFETIME", "600".to_owned())];
    wanted.entry = [vec!["nsenter".to_owned()], network.nodes[node].nsenter()].concat();
    let address = node_address(node);
    Server::on(address, address.ip(), wanted)
}

/// Each client's user, and the greedy one.
fn enter_users(postgres: &databases::Server) {
    let key = |name: &str| format!("md5({name} || ':{REALM}:{PASSWORD}')");
    let mut sql =
        format!("INSERT INTO turnusers_lt SELECT '{REALM}', '{GREEDY}', {};", key(&format!("'{GREEDY}'")));
    for (name, count) in users() {
        let name = format!("'{name}' || n");
        let _ = write!(
            sql,
            "INSERT INTO turnusers_lt SELECT '{REALM}', {name}, {} FROM generate_series(0, {}) n;",
            key(&name),
            count - 1
        );
    }
    let psql = databases::installed("psql").expect("it was there before");
    let words = postgres.coturn_words();
    let mut command = Command::new(psql);
    command.env("PGPASSWORD", databases::PASSWORD).args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", &words]);
    Program::run(command.args(["-c", &sql])).ended(0);
}
