//! The fleet: three nodes, their Redis, and PostgreSQL with all users.

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

pub(super) const PASSWORD: &str = "pw";
const SECRET: &str = "of this fleet, and of at least 32 characters";

pub(super) fn quota() -> u32 {
    or_thorough(60, 300)
}

pub(super) struct World {
    pub(super) greedy: Greedy,
    pub(super) nodes: [Server; NODES],
    pub(super) redis: databases::Server,
    pub(super) postgres: databases::Server,
    pub(super) network: Network,
    pub(super) store: Proxy,
    _reflect: Reflect,
    _users: Proxy,
    _certificate: Certificate,
    _dir: Dir,
}

#[derive(Debug)]
pub(super) struct Books {
    pub(super) keys: u64,
    pub(super) era: u64,
    /// True if the store contains the state of all nodes.
    pub(super) is_whole: bool,
    pub(super) ring: u64,
    pub(super) nodes: u64,
    pub(super) cards: u64,
    /// Allocation counts: in total, in the realm (the same number), and per user in descending order.
    pub(super) sums: Vec<u64>,
}

impl World {
    /// Starts the fleet and the quota user; on failure returns the reason.
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

    /// Waits until the store and every node know all nodes, all nodes have the same keys and serve clients, and the balancer reaches them.
    pub(super) fn is_whole(&self) {
        within(SOON * 2, "the fleet is complete", || {
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

    pub(super) fn quota_is_used(&self) {
        let most = quota() as usize;
        within(SOON * 2, "the quota can be used", || self.greedy.count() >= most - most / 20);
    }

    pub(super) fn metrics(&self, node: usize) -> Option<Metrics> {
        self.nodes[node].metrics_now()
    }

    pub(super) fn readiness(&self, node: usize) -> Option<(u16, String)> {
        get_unix(&self.nodes[node].admin(), "/readyz").ok()
    }

    /// Allocations on a node, excluding the quota user's; 0 if the node is down.
    pub(super) fn allocations(&self, node: usize) -> u64 {
        let all = self.metrics(node).map_or(0, |metrics| metrics.sum("turnpike_allocations", ""));
        all.saturating_sub(self.greedy.count_at(node) as u64)
    }

    /// Allocations on each node, excluding the quota user's.
    pub(super) fn all_allocations(&self) -> [u64; NODES] {
        array::from_fn(|node| self.allocations(node))
    }

    pub(super) fn are_served(&self, clients: u64) {
        within(SOON * 2, &format!("{clients} clients have an allocation"), || {
            self.all_allocations().iter().sum::<u64>() >= clients
        });
    }

    /// Number of times that each node has logged the loss of the store.
    pub(super) fn times_alone(&self) -> [usize; NODES] {
        self.times_said(&["this node is alone"])
    }

    /// Number of times that each node has logged that the store lost its data.
    pub(super) fn times_emptied(&self) -> [usize; NODES] {
        self.times_said(&["the fleet store was emptied", "the fleet store has lost this node's data"])
    }

    /// For each node, the number of its log lines that contain one of these texts.
    fn times_said(&self, words: &[&str]) -> [usize; NODES] {
        array::from_fn(|node| {
            let lines = self.nodes[node].lines();
            lines.iter().filter(|line| words.iter().any(|words| line.contains(words))).count()
        })
    }

    /// Returns true if a node reports, over HTTP and in its log, that it cannot reach the fleet's store.
    pub(super) fn is_alone(&self, node: usize) -> bool {
        let said = self.nodes[node].lines();
        let said = said.iter().rev().find(|line| {
            line.contains("; this node is alone") || line.contains("this node is a member of the fleet")
        });
        said.is_some_and(|line| line.contains("alone"))
            && self.metrics(node).is_some_and(|metrics| metrics.sum("turnpike_fleet_up", "") == 0)
            && self.readiness(node) == Some((200, "alone\n".to_owned()))
    }

    pub(super) fn is_missed(&self, node: usize) -> bool {
        self.others_know(node, "serving", NODES as u64 - 1)
    }

    pub(super) fn drains_for_others(&self, node: usize) -> bool {
        self.others_know(node, "draining", 1)
    }

    /// Returns true if all nodes except `but` report this many nodes in this state.
    fn others_know(&self, but: usize, state: &str, count: u64) -> bool {
        let label = format!("state=\"{state}\"");
        let knows = |node| {
            self.metrics(node).is_some_and(|metrics| metrics.sum("turnpike_fleet_nodes", &label) == count)
        };
        (0..NODES).filter(|node| *node != but).all(knows)
    }

    pub(super) fn is_without_users(&self, node: usize) -> bool {
        self.metrics(node).is_some_and(|metrics| metrics.sum("turnpike_store_up", "") == 0)
    }

    pub(super) fn books(&self) -> Books {
        let numbers = |words: &str| -> Vec<u64> {
            let said = self.redis.say(words);
            // Lines with these prefixes are lengths in a multi-line reply.
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

    pub(super) fn kill(&mut self, node: usize) {
        self.nodes[node].kill();
        self.greedy.has_lost(node);
    }

    pub(super) fn told(&self, node: usize, words: &[&str]) -> Finished {
        let admin = format!("unix:{}", self.nodes[node].admin().display());
        Program::run(&mut turnpike(&[words, &["--admin", &admin]].concat()))
    }

    fn sees_all(&self, node: usize) -> bool {
        let status = self.told(node, &["fleet", "status", "--json"]);
        let status: Value = serde_json::from_str(&status.stdout).unwrap_or_default();
        let nodes = status["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
        nodes.len() == NODES && nodes.iter().all(|node| node["state"] == "serving")
    }
}

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
    // Allocations must not expire during a row.
    wanted.environment = vec![("TURNPIKE_LIMITS_DEFAULT_LIFETIME", "600".to_owned())];
    wanted.entry = [vec!["nsenter".to_owned()], network.nodes[node].nsenter()].concat();
    let address = node_address(node);
    Server::on(address, address.ip(), wanted)
}

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
    let psql = databases::installed("psql").expect("the program was found before");
    let words = postgres.coturn_words();
    let mut command = Command::new(psql);
    command.env("PGPASSWORD", databases::PASSWORD).args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", &words]);
    Program::run(command.args(["-c", &sql])).ended(0);
}
