//! `turnpike forward` is killed, upgraded or reloaded, stalls, or runs out of descriptors.

use std::{net::TcpStream, thread, time::Duration};

use super::{
    Row, Wanted,
    cgroup::Frozen,
    forwarder::Forwarder,
    limits::{cpu_ms, few_descriptors},
    or_thorough,
    stalled::{watched, worker},
    talks::{self, Fate, Target},
    within,
};
use turnpike_trials::{SOON, V4, need};

use serde_json::Value;

pub(super) fn unharmed(seen: &Value) {
    assert_eq!((&seen["cut"], &seen["lost"]), (&0.into(), &0.into()), "{seen}");
}

#[test]
fn a_forwarder_is_killed_and_started_again() {
    let row = Row::new("a_forwarder_is_killed_and_started_again", "forward: SIGKILL and immediate restart");
    let seen = Forwarder::local(Wanted::default()).row(row, |forwarder, _| forwarder.kill_and_start());
    assert!(seen["cut"].as_u64() >= Some(Forwarder::clients()), "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_forwarder_is_upgraded_in_place() {
    let row = Row::new("a_forwarder_is_upgraded_in_place", "forward: two upgrades in place");
    let seen = Forwarder::local(Wanted::default()).row(row, |forwarder, _| {
        for _ in 0..2 {
            let before = forwarder.upgraded.upgrade();
            assert_ne!(before, forwarder.pid(), "no other process has taken over");
        }
    });
    unharmed(&seen);
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_forwarder_is_reloaded_again_and_again() {
    let row = Row::new(
        "a_forwarder_is_reloaded_again_and_again",
        "forward: 20 reloads per second, each with changes",
    );
    let seen = Forwarder::local(Wanted::default()).row(row, |forwarder, row| {
        let last = or_thorough(20, 100);
        for turn in 1..=last {
            forwarder.reload(turn);
            thread::sleep(Duration::from_millis(50));
        }
        within(SOON, "the last rules are in use", || forwarder.has_rules_of(last));
        assert!(!forwarder.has_rules_of(last - 1), "the previous rules are still in use");
        let [loaded, failed] = ["loaded", "failed"].map(|result| {
            let of_it = format!("result=\"{result}\"");
            forwarder.metrics().sum("turnpike_config_reloads_total", &of_it)
        });
        assert_eq!(failed, 0, "reloads were refused");
        // Two signals during a reload lead to only one more reload.
        let (asked, most) = (u64::from(last), loaded * 4 >= u64::from(last) * 3);
        assert!(most && loaded <= asked, "{loaded} of {asked} reloads were done");
        row.note(format!("{loaded} of {asked} reloads done; the last rules are in use"));
    });
    unharmed(&seen);
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_target_is_restarted() {
    let row = Row::new(
        "a_target_is_restarted",
        "forward: the target dies with all connections; another replaces it",
    );
    let seen = Forwarder::local(Wanted::default()).row(row, |forwarder, _| {
        forwarder.lose_target();
        assert_eq!(talks::newcomer(forwarder.tcp), Fate::Refused, "there is no target");
        thread::sleep(or_thorough(Duration::from_millis(500), Duration::from_secs(3)));
        forwarder.lead_to(Target::on(V4));
    });
    assert!(seen["cut"].as_u64() >= Some(Forwarder::clients()), "{seen}");
    assert!(seen["lost"].as_u64() > Some(0), "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn a_worker_of_a_forwarder_stalls() {
    let forwarder = Forwarder::local(watched(Wanted::default()));
    drop(need!(Frozen::thread(worker(forwarder.pid(), "forward-0"))));
    let row = Row::new("a_worker_of_a_forwarder_stalls", "forward: one of two workers stalls");
    let seen = forwarder.row(row, |forwarder, _| {
        let says =
            |forwarder: &Forwarder, text: &str| forwarder.lines().iter().any(|line| line.contains(text));
        let frozen = Frozen::thread(worker(forwarder.pid(), "forward-0"))
            .expect("freezing this thread has already succeeded");
        within(SOON, "the watchdog reports the stall", || says(forwarder, "a worker has been stuck"));
        thread::sleep(Duration::from_millis(500));
        drop(frozen);
        within(SOON, "the watchdog reports the recovery", || says(forwarder, "all workers respond again"));
    });
    assert_eq!(seen["cut"], 0, "{seen}");
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn no_descriptor_is_left_for_a_forwarder() {
    // A connection needs two descriptors, and a session needs one.
    let forwarder = Forwarder::local(few_descriptors(Wanted::default(), 150));
    let row = Row::new(
        "no_descriptor_is_left_for_a_forwarder",
        "forward: all descriptors used; more clients arrive",
    );
    let seen = forwarder.row(row, |forwarder, row| {
        let opened: Vec<TcpStream> = (0..300)
            .filter_map(|_| TcpStream::connect_timeout(&forwarder.tcp, Duration::from_millis(200)).ok())
            .collect();
        within(SOON, "the log reports the pause", || {
            forwarder.lines().iter().any(|line| line.contains("accepting is paused"))
        });
        let spent = cpu_ms(forwarder.pid());
        thread::sleep(Duration::from_secs(1));
        let spent = cpu_ms(forwarder.pid()) - spent;
        assert_ne!(talks::newcomer(forwarder.tcp), Fate::Served, "no descriptor is left");
        row.note(format!("with {} more connections waiting, {spent} ms CPU per second", opened.len()));
    });
    unharmed(&seen);
}
