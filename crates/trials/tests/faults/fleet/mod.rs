//! Fleet faults: three nodes behind a balancer, clients over UDP, TCP and TLS, a user who always requests more than the quota, and one
//! fault. Each test verifies that the fault took effect, and is a row in docs/dev/fleet-faults.md, written by `cargo xtask faults fleet
//! --write`. Needs root, HAProxy, nftables, Redis and PostgreSQL.

mod crowd;
mod network;
mod quota;
mod service;
mod visitors;
mod watch;

use std::{
    array, fs, thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use turnpike_testkit::alone::in_network_namespace;

use super::{Row, or_thorough, within};
use crowd::{Crowd, Seen, clients, newcomers};
use network::{NODES, Network};
use service::{World, name, quota};
use turnpike_trials::{SOON, is_root, lives, need, skip};
use visitors::{KNOWN, STRANGER, are_turned_away, ask, is_served};
use watch::Watch;

/// The faulty node, if the fault affects only one node.
const BROKEN: usize = 0;
/// A healthy node that reports on [`BROKEN`].
const WITNESS: usize = 1;
const NOBODY: [bool; NODES] = [false; NODES];
const ALL: [bool; NODES] = [true; NODES];
const ONE: [bool; NODES] = {
    let mut one = NOBODY;
    one[BROKEN] = true;
    one
};

#[derive(Clone, Copy, PartialEq)]
enum Notice {
    Nothing,
    Loss,
    /// All allocations on [`BROKEN`] end; other clients lose nothing.
    End,
}

#[derive(Clone, Copy)]
struct Expected {
    notice: Notice,
    alone: [bool; NODES],
}

/// Runs a fault while clients send data through the fleet, and compares the effect with the expectation; `test` is the calling test's full
/// name. `fault` verifies its effect, repairs the damage and returns the time of the repair.
fn on_a_fleet(
    test: &str,
    what: &'static str,
    notice: Notice,
    alone: [bool; NODES],
    fault: impl FnOnce(&mut World, &mut Row) -> Instant,
) {
    let expected = Expected { notice, alone };
    if !is_root() {
        return skip(
            "only root can create network namespaces for a fleet and run a database as another user",
        );
    }
    need!(Network::is_possible());
    let name: &'static str = test.rsplit("::").next().unwrap_or_default().to_owned().leak();
    in_network_namespace(test, || {
        let mut world = need!(World::up());
        let row = Row::new(name, what);
        // If no client has to reconnect, or the time does not matter, a longer timeout avoids reconnects on a busy machine.
        let patience = if notice == Notice::End { or_thorough("3", "1") } else { "5" };
        let crowd = Crowd::begin(&world.network, patience);
        world.are_served(clients().into());
        crowd.flows();
        let outcome = Outcome::of(&mut world, crowd, row, fault);
        outcome.judge(expected);
    });
}

struct Outcome {
    row: Row,
    seen: Vec<Seen>,
    before: [u64; NODES],
    shares: [u64; NODES],
    newcomers: [u64; NODES],
    most_in_a_second: u64,
    most_of_one_user: usize,
    alone: [bool; NODES],
    /// Seconds from the repair until the fleet was healthy.
    healed: f64,
}

impl Outcome {
    fn of(
        world: &mut World,
        crowd: Crowd,
        mut row: Row,
        fault: impl FnOnce(&mut World, &mut Row) -> Instant,
    ) -> Self {
        let before = world.all_allocations();
        world.greedy.most();
        let times_alone = world.times_alone();
        let watch = Watch::start(world);
        let mended = fault(world, &mut row);
        world.is_whole();
        let healed = mended.elapsed().as_secs_f64();
        crowd.flows();
        let most_in_a_second = watch.most_in_a_second();

        // New users, which no node has cached. They start once all nodes see each other again; earlier, two nodes might redirect a client
        // to each other.
        thread::sleep(Duration::from_secs(3));
        let begin = Instant::now();
        let more = Crowd::more(&world.network, "new");
        more.flows();
        let newcomers = watch.granted_since(begin);
        let after = world.all_allocations();
        let more = more.end();
        assert_eq!(more[0].count("lost"), 0, "new users lost datagrams");

        let seen = crowd.end();
        world.quota_is_used();
        let most_of_one_user = world.greedy.most();
        let now_alone = world.times_alone();
        let alone = array::from_fn(|node| now_alone[node] > times_alone[node]);
        // Allocations that clients gave up while their node was unreachable expire later.
        let kept: u64 = seen.iter().map(|seen| seen.count("allocations_lost")).sum();
        within(SOON, "all other allocations have ended", || {
            world.all_allocations().iter().sum::<u64>() <= kept + NODES as u64
        });
        let all: u64 = after.iter().sum();
        let shares = after.map(|count| (100 * count + all / 2) / all.max(1));
        Self { row, seen, before, shares, newcomers, most_in_a_second, most_of_one_user, alone, healed }
    }

    fn sum(&self, name: &str) -> u64 {
        self.seen.iter().map(|seen| seen.count(name)).sum()
    }

    fn longest(&self, name: &str) -> f64 {
        self.seen.iter().map(|seen| seen.seconds(name)).fold(0.0, f64::max)
    }

    /// Writes the row; fails if a client noticed more or less than expected.
    fn judge(mut self, Expected { notice, alone }: Expected) {
        let most = f64::from(quota());
        let beyond = ((self.most_of_one_user as f64 / most - 1.0) * 100.0).max(0.0);
        let (lost, of_others) = (self.sum("allocations_lost"), self.sum("lost_of_others"));
        if notice == Notice::End {
            let p99 = self.longest("reconnect_ms_p99");
            self.row.limit("p99 time to a new allocation, s", p99, 3.0);
        }
        let were_alone = self.alone != NOBODY;
        if !were_alone {
            self.row.limit("quota excess, %", beyond, MOST_BEYOND);
        }
        let of_transport = |seen: &Seen| {
            json!({
                "transport": seen.transport, "lost": seen.count("allocations_lost"),
                "p50": seen.seconds("reconnect_ms_p50"), "p99": seen.seconds("reconnect_ms_p99"),
                "max": seen.seconds("reconnect_ms_max"),
            })
        };
        let transports: Vec<Value> = self.seen.iter().map(of_transport).collect();
        let broken = self.before[BROKEN];
        let fleet = json!({
            "allocations_lost": lost, "allocations_of_the_broken": (notice == Notice::End).then_some(broken),
            "sent": self.sum("sent"), "lost": self.sum("lost"), "lost_of_others": of_others,
            "longest_silence": self.longest("pause_ms_max"), "reconnect": transports,
            "quota": quota(), "most_of_one_user": self.most_of_one_user, "beyond": beyond, "were_alone": were_alone,
            "most_in_a_second": self.most_in_a_second, "shares": self.shares, "newcomers": self.newcomers,
            "healed": self.healed,
        });
        println!("{fleet:#}");
        self.row.write(json!({ "clients": clients(), "log": [], "fleet": fleet }));
        // An allocation of the quota user may have been counted as another client's.
        let may_be_lost =
            if notice == Notice::End { broken.saturating_sub(1).max(1)..=broken } else { 0..=0 };
        assert!(may_be_lost.contains(&lost), "{lost} allocations were lost, expected {may_be_lost:?}");
        match notice {
            Notice::Loss => assert!(of_others > 0, "no datagram was lost although the link was down"),
            Notice::Nothing | Notice::End => {
                assert_eq!(of_others, 0, "clients that kept their allocation lost datagrams");
            }
        }
        // On a busy machine, other nodes may also lose contact with the store.
        let is_right =
            |node: usize| self.alone[node] == alone[node] || self.alone[node] && or_thorough(true, false);
        assert!(
            (0..NODES).all(is_right),
            "nodes that used local limits: {:?}, expected: {alone:?}",
            self.alone
        );
        assert!(were_alone || beyond <= MOST_BEYOND, "{} allocations, limit {most}", self.most_of_one_user);
    }
}

/// Maximum percentage by which a quota may be exceeded when all nodes get a burst at the same time: `turnpike_fleet::lease` bounds it by
/// half of the limit.
const MOST_BEYOND: f64 = 50.0;

fn a_while() {
    thread::sleep(or_thorough(Duration::from_secs(4), Duration::from_secs(8)));
}

fn are_alone(world: &World, alone: [bool; NODES]) {
    within(SOON, &format!("these nodes report that they are alone: {alone:?}"), || {
        let now: [bool; NODES] = array::from_fn(|node| world.is_alone(node));
        now == alone
    });
}

/// Waits until the other nodes and the balancer have noticed the loss of [`BROKEN`].
fn is_missed(world: &World) {
    within(SOON, "the other nodes have noticed the loss", || world.is_missed(BROKEN));
    within(SOON, "the balancer has noticed the loss", || !world.network.leads_to_all());
}

#[test]
fn a_node_is_killed() {
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "SIGKILL to a node; restarted once its clients have moved",
        Notice::End,
        NOBODY,
        |world, _| {
            world.kill(BROKEN);
            world.are_served(clients().into());
            is_missed(world);
            world.nodes[BROKEN].again();
            Instant::now()
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults fleet"]
fn a_node_loses_its_link() {
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "a node's only link is down for 8 s",
        Notice::End,
        ONE,
        |world, _| {
            world.network.cut(BROKEN, true);
            a_while();
            are_alone(world, ONE);
            is_missed(world);
            world.network.cut(BROKEN, false);
            Instant::now()
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults fleet"]
fn the_link_of_a_node_flaps() {
    const FLAP: Duration = Duration::from_millis(300);
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "a node's only link is down for 0.3 s, three times",
        Notice::Loss,
        NOBODY,
        |world, _| {
            for _ in 0..3 {
                let begun = Instant::now();
                world.network.cut(BROKEN, true);
                assert!(!world.network.reaches(BROKEN), "the node answers without a link");
                thread::sleep(FLAP.saturating_sub(begun.elapsed()));
                let begun = Instant::now();
                world.network.cut(BROKEN, false);
                within(SOON, "the node answers again", || world.network.reaches(BROKEN));
                thread::sleep(FLAP.saturating_sub(begun.elapsed()));
            }
            Instant::now()
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults fleet"]
fn a_node_and_the_store_are_partitioned() {
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "packets from one node to Redis are dropped for 8 s",
        Notice::Nothing,
        ONE,
        |world, _| {
            world.network.partition(Some(BROKEN), world.store.address, true);
            a_while();
            are_alone(world, ONE);
            within(SOON, "the other nodes have noticed the loss", || world.is_missed(BROKEN));
            world.network.partition(Some(BROKEN), world.store.address, false);
            Instant::now()
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults fleet"]
fn all_nodes_and_the_store_are_partitioned() {
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "packets from all nodes to Redis are dropped for 8 s",
        Notice::Nothing,
        ALL,
        |world, _| {
            world.network.partition(None, world.store.address, true);
            a_while();
            are_alone(world, ALL);
            world.network.partition(None, world.store.address, false);
            Instant::now()
        },
    );
}

#[test]
fn the_store_is_killed_and_comes_back_empty() {
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "SIGKILL to Redis; restarted empty after 0.5 s",
        Notice::Nothing,
        NOBODY,
        |world, row| {
            let (before, emptied) = (world.books(), world.times_emptied());
            assert!(before.is_whole && before.ring > 0, "{before:?}");
            world.redis.kill();
            // Keeps the nodes from writing to the store before it is inspected.
            world.store.refuse(true);
            // Removes a snapshot that Redis may have saved on its own.
            let _ = fs::remove_file(world.redis.dir.join("dump.rdb"));
            thread::sleep(Duration::from_millis(500));
            world.redis.start();
            assert_eq!(world.redis.say("DBSIZE"), ":0\r\n", "the restarted store is empty");
            world.store.refuse(false);
            let mended = Instant::now();
            within(SOON, "the store has the state of all nodes again", || {
                let (now, nodes, greedy) = (world.books(), NODES as u64, world.greedy.count() as u64);
                let all = u64::from(clients()) + greedy;
                now.is_whole
                    && now.era > before.era
                    && (now.ring, now.nodes, now.cards) == (before.ring, nodes, nodes)
                    && now.sums.get(1).is_some_and(|sum| *sum >= all)
                    && now.sums.get(2).is_some_and(|sum| *sum >= greedy)
            });
            let again = world.times_emptied();
            assert!(
                (0..NODES).all(|node| again[node] > emptied[node]),
                "not all nodes have noticed that the store was emptied: {emptied:?} before, {again:?} after"
            );
            let now = world.books();
            row.note(format!(
                "{} keys before the restart, none after it; the nodes then wrote {} keys, which cover all nodes, the same key ring and {} allocations, {} of them for one user",
                before.keys, now.keys, now.sums[0], now.sums[2]
            ));
            mended
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults fleet"]
fn the_store_hangs() {
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "SIGSTOP to Redis for 8 s",
        Notice::Nothing,
        ALL,
        |world, _| {
            world.redis.signal("STOP");
            a_while();
            are_alone(world, ALL);
            world.redis.signal("CONT");
            Instant::now()
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults fleet"]
fn the_user_database_is_down() {
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "PostgreSQL crashes; restarted after 8 s",
        Notice::Nothing,
        NOBODY,
        |world, row| {
            (0..NODES).for_each(|node| is_served(node, KNOWN, &[]));
            world.postgres.kill();
            are_turned_away();
            within(SOON, "all nodes have marked the store as down", || {
                (0..NODES).all(|node| world.is_without_users(node))
            });
            a_while();
            are_turned_away();
            (0..NODES).for_each(|node| is_served(node, KNOWN, &[]));
            assert!(
                (0..NODES).all(|node| world.is_without_users(node)),
                "a node has already reached the store"
            );
            world.postgres.start();
            let mended = Instant::now();
            (0..NODES).for_each(|node| is_served(node, STRANGER, &[500]));
            row.note("all nodes answered 500 to uncached users and served cached ones");
            // Probes are at most 5 s apart, and each takes at most 2 s.
            row.limit("time until uncached users were served, s", mended.elapsed().as_secs_f64(), 7.0);
            mended
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults fleet"]
fn upgraded_node_by_node() {
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "`turnpike upgrade` of each node in turn",
        Notice::Nothing,
        NOBODY,
        |world, row| {
            let before = world.nodes.each_mut().map(|node| node.upgraded.upgrade());
            let mended = Instant::now();
            world.is_whole();
            for (node, old) in world.nodes.iter().zip(before) {
                assert!(node.pid() != old && lives(node.pid()), "no process took over from {old}");
            }
            let stay = before.iter().filter(|pid| lives(**pid)).count();
            row.note(format!("old processes that kept their TCP and TLS clients: {stay}"));
            mended
        },
    );
}

#[test]
#[ignore = "thorough: cargo xtask faults fleet"]
fn drained_and_uncordoned() {
    on_a_fleet(
        turnpike_testkit::this_test!(),
        "`turnpike fleet drain` of a node, new users, `uncordon`",
        Notice::Nothing,
        NOBODY,
        |world, row| {
            let asked = |world: &World, verb: &str| {
                world.told(WITNESS, &["fleet", verb, &name(BROKEN)]).ended(0);
            };
            let before = world.all_allocations();
            asked(world, "drain");
            within(SOON, "the node drains", || {
                world.readiness(BROKEN).is_some_and(|(status, _)| status == 503)
            });
            within(SOON, "the other nodes know that it drains", || world.drains_for_others(BROKEN));
            let late = Crowd::more(&world.network, "late");
            late.flows();
            let during = world.all_allocations();
            // The quota user's allocation is counted a moment later.
            assert!(during[BROKEN] <= before[BROKEN] + 1, "a drained node accepted a client: {during:?}");
            let late = late.end();
            assert_eq!(late[0].count("lost"), 0, "clients that connected during the drain lost datagrams");
            let told = late[0].count("redirects");
            row.note(format!("{} new users during the drain, {told} of them redirected", newcomers()));
            // Nodes redirect a client only once because of load, but a drained node always does.
            let answers = [ask(BROKEN, KNOWN), ask(BROKEN, KNOWN)];
            assert_eq!(answers, [Some(300); 2], "a drained node always redirects");
            asked(world, "uncordon");
            Instant::now()
        },
    );
}
