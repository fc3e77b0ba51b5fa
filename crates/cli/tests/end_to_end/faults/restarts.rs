//! The server ends, is replaced, or reads its configuration again and again.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{Crowd, Row, Server, Wanted, allocations_under, as_before, or_thorough, within};
use crate::harness::{Dir, Load, PASSWORD, REALM, SOON, USER, ends};

#[test]
fn killed_and_started_again() {
    let mut server = Server::start(Wanted::flags(&["--workers", "2"]));
    let crowd = Crowd::of(&server);
    let clients = crowd.clients;
    let seen = Row::new("killed_and_started_again", "SIGKILL, started again at once").run(
        &mut server,
        crowd,
        |server, _| server.kill_and_start(),
    );
    assert!(seen["returns_done"].as_u64().is_some_and(|returns| returns >= u64::from(clients)), "{seen}");
}

#[test]
fn upgraded_in_place() {
    let mut server = Server::start(Wanted::flags(&["--workers", "2"]));
    let crowd = Crowd::of(&server);
    let seen = Row::new("upgraded_in_place", "two upgrades in place").run(&mut server, crowd, |server, _| {
        for _ in 0..2 {
            ends(server.upgraded.next());
        }
    });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// A configuration that changes with each turn what a reload takes.
fn changing(turn: u64) -> String {
    format!(
        "[server]\nrealm = \"{REALM}\"\n[auth]\nusers = [\"{USER}:{PASSWORD}\", \"other:{turn}\"]\n[relay]\nports = \"49152-{}\"\n\
         [limits]\nallocations_per_user = {}\n[peers]\nallow = [\"127.0.0.0/8\", \"10.{}.0.0/16\"]\n",
        65_000 + turn % 500,
        1_000 + turn % 20,
        turn % 250,
    )
}

#[test]
fn reloaded_again_and_again() {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", changing(0));
    let flags = Wanted::flags(&["--workers", "2", "-c", file.to_str().expect("UTF-8")]);
    let mut server = Server::start(Wanted { by_file: true, ..flags });
    let crowd = Crowd::of(&server);
    let mut turns = 0;
    let seen = Row::new("reloaded_again_and_again", "20 reloads a second, each with changes").run(
        &mut server,
        crowd,
        |server, row| {
            let storms = AtomicBool::new(false);
            let over = AtomicBool::new(false);
            let pid = server.pid();
            thread::scope(|scope| {
                let storm = scope.spawn(|| {
                    let mut turns = 0;
                    while !over.load(Relaxed) {
                        if storms.load(Relaxed) {
                            turns += 1;
                            // In one go, as a careful operator does.
                            let next = dir.file("next.toml", changing(turns));
                            fs::rename(next, &file).expect("one directory");
                            let kill = std::process::Command::new("sh")
                                .args(["-c", &format!("kill -HUP {pid}")])
                                .status();
                            assert!(kill.is_ok_and(|status| status.success()));
                        }
                        thread::sleep(Duration::from_millis(50));
                    }
                    turns
                });
                let user = format!("{USER}:{PASSWORD}");
                let found =
                    allocations_under(server, &user, no_more_reloads, |_, on| storms.store(on, Relaxed));
                over.store(true, Relaxed);
                turns = storm.join().expect("the storm does not panic");
                found.tell(row, "all", "during reloads");
            });
            let loaded = server.metrics().sum("turnpike_config_reloads_total", "result=\"loaded\"");
            row.note(format!("{loaded} reloads were done of {turns} that were asked for"));
        },
    );
    assert!(turns >= 5);
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// Waits until no reload is under way any more.
fn no_more_reloads(server: &Server) {
    let done = || server.metrics().sum("turnpike_config_reloads_total", "");
    let mut last = done();
    within(SOON, "no more reloads", || {
        thread::sleep(Duration::from_millis(200));
        std::mem::replace(&mut last, done()) == last
    });
}

/// Ten thousand clients that hear little, whose server is killed, come back within one second.
#[test]
#[ignore = "takes long: cargo xtask faults"]
fn ten_thousand_return() {
    let clients: u64 = or_thorough(500, 10_000);
    let dir = Dir::new();
    // Each hears something each second: more would measure the generator. Its peer knows where it is by what it sends first, which has to
    // come before the client's patience is over.
    let profile = dir.file(
        "thin.toml",
        "[[stream]]\nname = \"down\"\ndirection = \"to-client\"\nrate = 1\nsize = 100\n\
         [[stream]]\nname = \"up\"\ndirection = \"to-peer\"\nrate = 0.5\nsize = 100\n",
    );
    let file = dir.file("turnpike.toml", "[limits]\nallocations_per_user = 16384\n");
    let wanted = Wanted::flags(&[
        "--workers",
        "2",
        "--relay-ports",
        "20000-65535",
        "-c",
        file.to_str().expect("UTF-8"),
    ]);
    let mut server = Server::start(wanted);
    let load = || {
        Load::as_user(server.address, &format!("{USER}:{PASSWORD}")).with(&[
            "--profile",
            profile.to_str().expect("UTF-8"),
            "--clients",
            &clients.to_string(),
            "--reconnect",
            "3",
            "--warmup",
            "1",
            "--duration",
            "600",
        ])
    };
    let before = server.kept();
    let crowd = load().start();
    within(SOON * 2, "all clients are there", || server.allocations() >= clients);
    within(SOON, "all hear something", || server.relayed() > 2 * clients);
    let said = server.lines().len();
    server.kill_and_start();
    let (mut first, mut last) = (None, None);
    within(SOON, "all are back", || {
        let allocations = server.allocations();
        let now = Instant::now();
        first = first.or((allocations > 0).then_some(now));
        last = last.or((allocations >= clients).then_some(now));
        last.is_some()
    });
    let took = (last.expect("all are back") - first.expect("one was first")).as_secs_f64();
    let relayed = server.relayed();
    within(SOON, "all hear something again", || server.relayed() > relayed + 5 * clients);
    crowd.signal("INT");
    let run = crowd.wait(SOON * 2);
    let seen: Value = run.result();
    assert_eq!(seen["clients_silent"], 0, "{}", run.output());
    as_before(|| server.kept(), before, Duration::from_secs(30));
    let mut row =
        Row::new("ten_thousand_return", "SIGKILL, started again; 10,000 clients return within a second");
    row.note(format!(
        "all {clients} had an allocation {took:.1} s after the first of them; {} tries found no answer",
        seen["returns_failed"]
    ));
    row.limit("seconds from the first client back to the last", took, 5.0);
    let log = super::row::complaints(&server.lines()[said..]);
    row.tell(&seen, &log, (before, server.kept()), clients);
}
