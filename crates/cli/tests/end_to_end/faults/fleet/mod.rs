//! Faults of a fleet: three nodes behind a balancer, clients by UDP, TCP and TLS, a user who always wants more than he may have, and one thing
//! that breaks. Each test is a row of docs/fleet.md; `cargo xtask faults fleet --write` writes them there. Needs root, HAProxy, nftables, Redis
//! and PostgreSQL.

mod crowd;
mod network;
mod quota;
mod service;
mod watch;

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use turnpike_testkit::alone::in_network_namespace;

use super::{Row, or_thorough, within};
use crate::harness::{SOON, is_root, lives, need, skip};
use crowd::{Crowd, Seen, clients, newcomers};
use network::{NODES, Network};
use service::{World, name, quota};
use watch::Watch;

/// The node that breaks, where one does.
const BROKEN: usize = 0;
/// Another one, which is asked about it.
const WITNESS: usize = 1;

/// What clients may notice.
#[derive(Clone, Copy, PartialEq)]
enum Notice {
    Nothing,
    /// Some datagrams are lost.
    Loss,
    /// Those of [`BROKEN`] lose their sessions, and nobody else loses anything.
    End,
}

/// Has a fault happen and end while a crowd talks through the fleet, and holds what comes of it against what may; `test` is the calling test's
/// name with its modules.
fn on_a_fleet(test: &str, what: &'static str, may: Notice, fault: impl FnOnce(&mut World, &mut Row)) {
    if !is_root() {
        return skip("only root can make machines for a fleet, and run a database as another user");
    }
    need!(Network::is_possible());
    let name: &'static str = test.rsplit("::").next().unwrap_or_default().to_owned().leak();
    in_network_namespace(test, || {
        let mut world = need!(World::up());
        let row = Row::new(name, what);
        // Where nobody has to come back, or it is not about the time, a machine with other things to do shall not make anybody.
        let patience = if may == Notice::End { or_thorough("3", "1") } else { "5" };
        let crowd = Crowd::begin(&world.network, patience);
        world.are_served(clients().into());
        crowd.flows();
        let outcome = Outcome::of(&mut world, crowd, row, fault);
        outcome.judge(may);
    });
}

struct Outcome {
    row: Row,
    seen: Vec<Seen>,
    /// Sessions of each node before.
    before: [u64; NODES],
    /// Allocations of each node afterwards, in percent of all, and how many of the newcomers each got.
    shares: [u64; NODES],
    newcomers: [u64; NODES],
    most_in_a_second: u64,
    most_of_one_user: usize,
    were_alone: bool,
    /// Seconds until the fleet was whole again, once the cause was mended.
    healed: f64,
}

impl Outcome {
    fn of(world: &mut World, crowd: Crowd, mut row: Row, fault: impl FnOnce(&mut World, &mut Row)) -> Self {
        let before = world.all_allocations();
        world.greedy.most();
        let alone = world.times_alone();
        let watch = Watch::start(world);
        fault(world, &mut row);
        let mended = Instant::now();
        world.is_whole();
        let healed = mended.elapsed().as_secs_f64();
        crowd.flows();
        let most_in_a_second = watch.most_in_a_second();

        // Nobody has heard of these users so far. They come when all nodes have looked at one another again: before, two might send a client to
        // each other.
        thread::sleep(Duration::from_secs(3));
        let begin = Instant::now();
        let more = Crowd::more(&world.network, "new");
        more.flows();
        let newcomers = watch.granted_since(begin);
        let after = world.all_allocations();
        let more = more.end();
        assert_eq!(more[0].count("lost"), 0, "newcomers are not served well");

        let seen = crowd.end();
        world.quota_is_used();
        let most_of_one_user = world.greedy.most();
        let were_alone = world.times_alone() > alone;
        // What was given up while a node could not be told ends by itself, later.
        let kept: u64 = seen.iter().map(|seen| seen.count("sessions_lost")).sum();
        within(SOON, "no session is left", || {
            world.all_allocations().iter().sum::<u64>() <= kept + NODES as u64
        });
        let all: u64 = after.iter().sum();
        let shares = after.map(|count| (100 * count + all / 2) / all.max(1));
        Self { row, seen, before, shares, newcomers, most_in_a_second, most_of_one_user, were_alone, healed }
    }

    fn sum(&self, name: &str) -> u64 {
        self.seen.iter().map(|seen| seen.count(name)).sum()
    }

    fn longest(&self, name: &str) -> f64 {
        self.seen.iter().map(|seen| seen.seconds(name)).fold(0.0, f64::max)
    }

    /// Writes the row; fails where somebody has noticed what he may not.
    fn judge(mut self, may: Notice) {
        let most = f64::from(quota());
        let beyond = ((self.most_of_one_user as f64 / most - 1.0) * 100.0).max(0.0);
        let (lost, of_others) = (self.sum("sessions_lost"), self.sum("lost_of_others"));
        if may == Notice::End {
            let p99 = self.longest("reconnect_ms_p99");
            self.row.limit("seconds until lost clients had another allocation, p99", p99, 3.0);
        }
        if !self.were_alone {
            self.row.limit("allocations beyond the quota, %", beyond, 5.0);
        }
        let of_transport = |seen: &Seen| {
            json!({
                "transport": seen.transport, "lost": seen.count("sessions_lost"),
                "p50": seen.seconds("reconnect_ms_p50"), "p99": seen.seconds("reconnect_ms_p99"),
                "max": seen.seconds("reconnect_ms_max"),
            })
        };
        let transports: Vec<Value> = self.seen.iter().map(of_transport).collect();
        let broken = self.before[BROKEN];
        let fleet = json!({
            "sessions_lost": lost, "sessions_of_the_broken": (may == Notice::End).then_some(broken),
            "sent": self.sum("sent"), "lost": self.sum("lost"), "lost_of_others": of_others,
            "longest_silence": self.longest("pause_ms_max"), "reconnect": transports,
            "quota": quota(), "most_of_one_user": self.most_of_one_user, "beyond": beyond, "were_alone": self.were_alone,
            "most_in_a_second": self.most_in_a_second, "shares": self.shares, "newcomers": self.newcomers,
            "healed": self.healed,
        });
        println!("{fleet:#}");
        self.row.write(json!({ "clients": clients(), "log": [], "fleet": fleet }));
        let may_be_lost = if may == Notice::End { 1..=broken } else { 0..=0 };
        assert!(may_be_lost.contains(&lost), "{lost} sessions were lost, and {may_be_lost:?} may have been");
        if may != Notice::Loss {
            assert_eq!(of_others, 0, "datagrams of those were lost who kept their sessions");
        }
        assert!(self.were_alone || beyond <= 5.0, "{} allocations of {most}", self.most_of_one_user);
    }
}

/// How long a store is away, and a link.
fn a_while() {
    thread::sleep(or_thorough(Duration::from_secs(4), Duration::from_secs(8)));
}

#[test]
fn a_node_is_killed() {
    on_a_fleet(
        "faults::fleet::a_node_is_killed",
        "SIGKILL to a node, started again when its clients are elsewhere",
        Notice::End,
        |world, _| {
            world.kill(BROKEN);
            world.are_served(clients().into());
            world.nodes[BROKEN].again();
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults fleet"]
fn a_node_loses_its_link() {
    on_a_fleet(
        "faults::fleet::a_node_loses_its_link",
        "the only link of a node is down for 8 s: to clients, peers, stores and other nodes",
        Notice::End,
        |world, _| {
            world.network.cut(BROKEN, true);
            a_while();
            world.network.cut(BROKEN, false);
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults fleet"]
fn the_link_of_a_node_flaps() {
    on_a_fleet(
        "faults::fleet::the_link_of_a_node_flaps",
        "the only link of a node is down for 0.3 s, three times",
        Notice::Loss,
        |world, _| {
            for is_cut in [true, false, true, false, true, false] {
                world.network.cut(BROKEN, is_cut);
                thread::sleep(Duration::from_millis(300));
            }
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults fleet"]
fn a_node_and_the_store_are_partitioned() {
    on_a_fleet(
        "faults::fleet::a_node_and_the_store_are_partitioned",
        "what a node says to the Redis is dropped for 8 s",
        Notice::Nothing,
        |world, _| {
            world.network.partition(Some(BROKEN), world.store.address, true);
            a_while();
            world.network.partition(Some(BROKEN), world.store.address, false);
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults fleet"]
fn all_nodes_and_the_store_are_partitioned() {
    on_a_fleet(
        "faults::fleet::all_nodes_and_the_store_are_partitioned",
        "what all nodes say to the Redis is dropped for 8 s",
        Notice::Nothing,
        |world, _| {
            world.network.partition(None, world.store.address, true);
            a_while();
            world.network.partition(None, world.store.address, false);
        },
    );
}

#[test]
fn the_store_is_killed_and_comes_back_empty() {
    on_a_fleet(
        "faults::fleet::the_store_is_killed_and_comes_back_empty",
        "SIGKILL to the Redis, started again with nothing in it after half a second",
        Notice::Nothing,
        |world, _| {
            world.redis.kill();
            thread::sleep(Duration::from_millis(500));
            world.redis.start();
            let keys = world.redis.say("DBSIZE");
            assert!(keys.starts_with(':'), "{keys}");
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults fleet"]
fn the_store_stands_still() {
    on_a_fleet(
        "faults::fleet::the_store_stands_still",
        "the Redis stands still for 8 s (SIGSTOP)",
        Notice::Nothing,
        |world, _| {
            world.redis.signal("STOP");
            a_while();
            world.redis.signal("CONT");
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults fleet"]
fn the_users_are_away() {
    on_a_fleet(
        "faults::fleet::the_users_are_away",
        "PostgreSQL crashes and is started again after 8 s",
        Notice::Nothing,
        |world, _| {
            world.postgres.kill();
            a_while();
            world.postgres.start();
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults fleet"]
fn upgraded_node_by_node() {
    on_a_fleet(
        "faults::fleet::upgraded_node_by_node",
        "`turnpike upgrade` of each node, one after the other",
        Notice::Nothing,
        |world, row| {
            let before = world.nodes.each_mut().map(|node| node.upgraded.next());
            world.is_whole();
            let stay = before.iter().filter(|pid| lives(**pid)).count();
            row.note(format!("{stay} old processes went on with clients over TCP and TLS"));
        },
    );
}

#[test]
#[ignore = "takes long: cargo xtask faults fleet"]
fn drained_and_uncordoned() {
    on_a_fleet(
        "faults::fleet::drained_and_uncordoned",
        "`turnpike fleet drain` of a node, newcomers, `uncordon`",
        Notice::Nothing,
        |world, row| {
            let asked = |world: &World, verb: &str| {
                let told = world.told(WITNESS, &["fleet", verb, &name(BROKEN)]);
                assert_eq!(told.code, Some(0), "{}", told.output());
            };
            let before = world.all_allocations();
            asked(world, "drain");
            within(SOON, "it drains", || world.readiness(BROKEN).is_some_and(|(status, _)| status == 503));
            let late = Crowd::more(&world.network, "late");
            late.flows();
            let during = world.all_allocations();
            // The greedy user is counted a moment later.
            assert!(
                during[BROKEN] <= before[BROKEN] + 1,
                "a node that drains has taken somebody: {during:?}"
            );
            let late = late.end();
            assert_eq!(late[0].count("lost"), 0, "who came meanwhile is not served well");
            let told = late[0].count("redirects");
            row.note(format!("{} came meanwhile, of whom {told} were told another node", newcomers()));
            asked(world, "uncordon");
        },
    );
}
