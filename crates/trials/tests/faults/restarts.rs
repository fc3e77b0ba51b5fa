//! The server is killed, upgraded, or reloaded repeatedly.

use std::{
    fs,
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{Crowd, Row, Server, Wanted, allocations_under, as_before, or_thorough, within};
use turnpike_trials::{Dir, Load, PASSWORD, REALM, SOON, USER, ends};

#[test]
fn killed_and_started_again() {
    let mut server = Server::start(Wanted::flags(&["--workers", "2"]));
    let crowd = Crowd::of(&server);
    let clients = crowd.clients;
    let seen = Row::new("killed_and_started_again", "SIGKILL and immediate restart").run(
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
            ends(server.upgraded.upgrade());
        }
    });
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// Reloads 20 times a second, each time with a changed configuration.
pub(super) struct Storm {
    dir: Dir,
    file: PathBuf,
}

fn changing(turn: u64) -> String {
    format!(
        "[server]\nrealm = \"{REALM}\"\n[auth]\nusers = [\"{USER}:{PASSWORD}\", \"other:{turn}\"]\n[relay]\nports = \"49152-{}\"\n\
         [limits]\nallocations_per_user = {}\n[peers]\nallow = [\"127.0.0.0/8\", \"10.77.0.0/16\", \"10.{}.0.0/16\"]\n",
        65_000 + turn % 500,
        1_000 + turn % 20,
        100 + turn % 150,
    )
}

impl Storm {
    pub(super) fn new() -> Self {
        let dir = Dir::new();
        let file = dir.file("turnpike.toml", changing(0));
        Self { dir, file }
    }

    pub(super) fn wanted(&self, more: &[&str]) -> Wanted {
        let file = self.file.to_str().expect("UTF-8");
        Wanted { by_file: true, ..Wanted::flags(&[&["--workers", "2", "-c", file], more].concat()) }
    }

    /// Reloads until `meanwhile` ends; then requires that the last configuration is in use and that none was refused.
    pub(super) fn rages(
        &self,
        server: &mut Server,
        row: &mut Row,
        meanwhile: impl FnOnce(&mut Server, &mut Row, &AtomicBool),
    ) {
        let before = reloads(server);
        let (storms, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let pid = server.pid();
        let asked = thread::scope(|scope| {
            // Stops even if an assertion fails; otherwise the scope would never end.
            let end = Over(&is_over);
            let storm = scope.spawn(|| self.storm(pid, &storms, &is_over));
            meanwhile(server, row, &storms);
            drop(end);
            storm.join().expect("the reloading thread does not panic")
        });
        no_more_reloads(server);
        let after = reloads(server);
        let [loaded, failed] = [after[0] - before[0], after[1] - before[1]];
        // Reloads requested during a reload may be merged.
        assert!(
            asked >= 5 && 2 * loaded >= asked && failed == 0,
            "{loaded} of {asked} done, {failed} failed"
        );
        within(SOON, "the last configuration is in use", || {
            server.answers("other", &asked.to_string()).is_none()
        });
        assert_eq!(
            server.answers("other", &(asked - 1).to_string()),
            Some(401),
            "the configuration before the last one is no longer in use"
        );
        row.note(format!("{loaded} of {asked} reloads done, none refused; the last configuration is in use"));
    }

    fn storm(&self, pid: u32, storms: &AtomicBool, is_over: &AtomicBool) -> u64 {
        let mut turns = 0;
        while !is_over.load(Relaxed) {
            if storms.load(Relaxed) {
                turns += 1;
                let next = self.dir.file("next.toml", changing(turns));
                fs::rename(next, &self.file).expect("both files are in one directory");
                let kill = Command::new("sh").args(["-c", &format!("kill -HUP {pid}")]).status();
                assert!(kill.is_ok_and(|status| status.success()));
            }
            thread::sleep(Duration::from_millis(50));
        }
        turns
    }
}

struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn reloads(server: &Server) -> [u64; 2] {
    let metrics = server.metrics();
    ["loaded", "failed"]
        .map(|result| metrics.sum("turnpike_config_reloads_total", &format!("result=\"{result}\"")))
}

fn no_more_reloads(server: &Server) {
    let mut last = reloads(server);
    within(SOON, "no more reloads", || {
        thread::sleep(Duration::from_millis(200));
        let now = reloads(server);
        std::mem::replace(&mut last, now) == now
    });
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn reloaded_again_and_again() {
    let storm = Storm::new();
    let mut server = Server::start(storm.wanted(&[]));
    let crowd = Crowd::of(&server);
    let seen = Row::new("reloaded_again_and_again", "20 reloads per second, each with changes").run(
        &mut server,
        crowd,
        |server, row| {
            storm.rages(server, row, |server, row, storms| {
                let user = format!("{USER}:{PASSWORD}");
                let found =
                    allocations_under(server, &user, no_more_reloads, |_, on| storms.store(on, Relaxed));
                found.tell(row, "all users", "during reloads");
            });
        },
    );
    assert_eq!((&seen["lost"], &seen["returns_done"]), (&0.into(), &0.into()), "{seen}");
}

/// Kills a server that has many clients, which send little and reconnect within a second. `meet` inspects the server once all of them are
/// served again.
pub(super) fn all_return(
    mut row: Row,
    server: &mut Server,
    (clients, peer): (u64, &str),
    meet: impl FnOnce(&Server, &mut Row),
) {
    /// Maximum time in seconds within which the clients must have noticed the loss; otherwise the row is void.
    const AT_ONCE: f64 = 1.0;
    const NOT_AT_ONCE: f64 = 3.0;
    const OLDEST: Duration = Duration::from_millis(100);
    let dir = Dir::new();
    // Three datagrams in two seconds: all clients notice the loss within 0.7 s of each other. With more traffic, the test would measure the
    // generator rather than the server. The peer learns the client's address from its first datagram, which must arrive before the client
    // times out.
    let profile = dir.file(
        "thin.toml",
        "[[stream]]\nname = \"down\"\ndirection = \"to-client\"\nrate = 1.5\nsize = 100\n\
         [[stream]]\nname = \"up\"\ndirection = \"to-peer\"\nrate = 0.5\nsize = 100\n",
    );
    let before = server.kept();
    let crowd = Load::as_user(server.address, &format!("{USER}:{PASSWORD}"))
        .with_words(&["--profile", profile.to_str().expect("UTF-8"), "--peer", peer])
        .with(&format!("--clients {clients} --reconnect 3 --reconnect-spread 0.1"))
        .with("--warmup 1 --duration 600")
        .start();
    within(SOON * 2, "all clients are connected", || server.allocations() >= clients);
    within(SOON, "all clients receive data", || server.relayed() > 3 * clients);
    let said = server.lines().len();
    server.kill_and_start();
    let mut nobody = Instant::now();
    let (mut all_asked, mut all_there) = (None, None);
    within(SOON, "all return", || {
        let metrics = server.metrics();
        let now = Instant::now();
        let requests = metrics.sum("turnpike_requests_total", "method=\"allocate\"");
        let challenged = metrics.sum("turnpike_error_responses_total", "code=\"401\"");
        if requests == 0 {
            nobody = now - OLDEST;
        }
        all_asked = all_asked.or((challenged >= clients).then_some(now));
        all_there = all_there.or((metrics.sum("turnpike_allocations", "") >= clients).then_some(now));
        all_there.is_some()
    });
    let [asked, took] = [all_asked, all_there]
        .map(|then| (then.expect("all clients have sent a request") - nobody).as_secs_f64());
    let relayed = server.relayed();
    within(SOON, "all clients receive data again", || server.relayed() > relayed + 5 * clients);
    meet(server, &mut row);
    crowd.signal("INT");
    let run = crowd.wait(SOON * 2);
    let seen: Value = run.result();
    assert_eq!((&seen["clients_silent"], &seen["transport"]), (&0.into(), &"udp".into()), "{}", run.output());
    as_before(|| server.kept(), before, Duration::from_secs(30));
    let gave_up = seen["lost_within_ms"].as_f64().expect("the result has the field") / 1_000.0;
    assert!(gave_up <= NOT_AT_ONCE, "the clients gave up within {gave_up:.1} s: {}", run.output());
    if gave_up > AT_ONCE {
        row.void(format!("the clients gave up within {gave_up:.2} s, not {AT_ONCE} s"));
    }
    row.note(format!(
        "all {clients} clients gave up within {gave_up:.2} s; the last request came after {asked:.2} s, its allocation after \
         {took:.2} s; {} attempts unanswered",
        seen["returns_failed"]
    ));
    row.limit("seconds from first request to last allocation", took, 5.0);
    let log = super::row::complaints(&server.lines()[said..]);
    row.tell(&seen, &log, (before, server.kept()), clients);
}

/// A server for many clients; its configuration file exists as long as the directory does.
pub(super) fn for_many(dir: &Dir, more: &[&str]) -> Wanted {
    let file = dir.file("turnpike.toml", "[limits]\nallocations_per_user = 16384\n");
    let flags = ["--workers", "2", "--relay-ports", "20000-65535", "-c", file.to_str().expect("UTF-8")];
    Wanted::flags(&[&flags[..], more].concat())
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn ten_thousand_clients_reconnect() {
    let dir = Dir::new();
    let mut server = Server::start(for_many(&dir, &[]));
    let what = "SIGKILL and restart; 10,000 clients return within 1 s";
    let clients = or_thorough(500, 10_000);
    all_return(
        Row::new("ten_thousand_clients_reconnect", what),
        &mut server,
        (clients, "127.0.0.1:0"),
        |_, _| (),
    );
}
