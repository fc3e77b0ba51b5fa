//! The usage ledger compared with the load generator: equal to the byte across reloads, upgrades, outages of the
//! database and full disks.

use crate::prelude::*;

use turnpike_testkit::this_test;
use turnpike_trials::coturn_store;

/// Payload bytes per datagram.
const SIZE: u64 = 300;

/// A server that records usage in a directory or in a database.
struct Recorded {
    serve: Serve,
    config: PathBuf,
    _dir: Dir,
}

const USERS: &str = "users = [\"alice:secret\", \"bob:secret\"]\n";

impl Recorded {
    fn start(more: &[&str]) -> Self {
        let dir = Dir::new();
        let state = dir.path().join("state").display().to_string();
        Self::start_on(dir, &[&["--state", &state], more].concat())
    }

    fn start_on(dir: Dir, more: &[&str]) -> Self {
        let config = dir.file("turnpike.toml", format!("[auth]\n{USERS}[usage]\ndays = 400\n"));
        let path = config.display().to_string();
        let serve = Serve::start_bare(
            &[
                &["-c", &path, "--realm", "example.org", "--workers", "2", "--relay-ip", "127.0.0.1"],
                &["--allow-peer", "127.0.0.0/8"][..],
                more,
            ]
            .concat(),
        );
        Self { serve, config, _dir: dir }
    }

    fn load(&self, user: &str, reflect: &Reflect, seconds: &str) -> Load {
        Load::as_user(self.serve.address(V4), &format!("{user}:secret"))
            .to(reflect.address)
            .with(&format!("--clients 4 --rate 400 --size {SIZE} --warmup 0 --duration {seconds}"))
    }

    fn usage(&self, more: &[&str]) -> Value {
        let admin = self.serve.admin().to_string();
        let run = Program::run(&mut turnpike(&[&["usage", "--json", "--admin", &admin], more].concat()));
        serde_json::from_str(&run.ended(0).stdout).expect("JSON")
    }

    fn sum(&self, user: &str) -> Usage {
        Usage::of(&self.usage(&["--user", user]))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Usage {
    allocations: u64,
    to_peer: (u64, u64),
    to_client: (u64, u64),
}

impl Usage {
    /// Adds up all entries.
    fn of(entries: &Value) -> Self {
        let mut sum = Self::default();
        for entry in entries.as_array().expect("an array") {
            let number = |pointer: &str| entry.pointer(pointer).and_then(Value::as_u64).expect("a number");
            sum.allocations += number("/allocations");
            sum.to_peer.0 += number("/to_peer/datagrams");
            sum.to_peer.1 += number("/to_peer/bytes");
            sum.to_client.0 += number("/to_client/datagrams");
            sum.to_client.1 += number("/to_client/bytes");
        }
        sum
    }

    /// Usage of a generator whose datagrams have all come back.
    fn of_load(runs: &[Finished]) -> Self {
        let mut sum = Self::default();
        for run in runs {
            let result = run.result();
            let count = |key: &str| result[key].as_u64().unwrap_or_else(|| panic!("{key} in {result}"));
            assert_eq!((count("lost"), count("duplicated")), (0, 0), "{result}");
            sum.allocations += count("clients");
            sum.to_peer.0 += count("sent");
            sum.to_client.0 += count("received");
        }
        sum.to_peer.1 = sum.to_peer.0 * SIZE;
        sum.to_client.1 = sum.to_client.0 * SIZE;
        sum
    }
}

/// A row for `cargo xtask usage`: the fault, then bytes in both directions.
fn tell(fault: &str, relayed: u64, recorded: u64) {
    println!("USAGE: {fault} | {relayed} | {recorded} | {}", relayed - recorded);
}

#[track_caller]
fn is_recorded(fault: &str, recorded: &Recorded, user: &str, expected: Usage) {
    let mut seen = Usage::default();
    let equal = || {
        seen = recorded.sum(user);
        (seen.allocations, seen.to_peer.1, seen.to_client.1)
            >= (expected.allocations, expected.to_peer.1, expected.to_client.1)
    };
    eventually("all usage is recorded", equal);
    assert_eq!(seen, expected);
    tell(fault, expected.to_peer.1 + expected.to_client.1, seen.to_peer.1 + seen.to_client.1);
}

#[test]
fn the_ledger_equals_the_generator_for_each_user() {
    let recorded = Recorded::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let [alice, bob] = ["alice", "bob"].map(|user| recorded.load(user, &reflect, "6").start());
    let [alice, bob] = [alice, bob].map(|load| load.wait(SOON));
    is_recorded("none", &recorded, "alice", Usage::of_load(&[alice]));
    let of_bob = Usage::of_load(&[bob]);
    is_recorded("none, another user", &recorded, "bob", of_bob);
    let all = Usage::of(&recorded.usage(&[]));
    assert!(all.to_peer.1 > of_bob.to_peer.1 && all.allocations == 8);
    for by in ["realm", "node", "hour", "day", "key", "identifier"] {
        assert_eq!(Usage::of(&recorded.usage(&["--by", by])), all, "{by}");
    }
    let admin = recorded.serve.admin().to_string();
    let csv = Program::run(&mut turnpike(&["usage", "--csv", "--admin", &admin])).ended(0).stdout;
    let lines: Vec<&str> = csv.lines().collect();
    assert!(lines[0].starts_with("realm,user,allocations,seconds,") && lines.len() == 3, "{csv}");
    assert!(lines.iter().any(|line| line.starts_with("example.org,bob,4,")), "{csv}");
}

#[test]
fn a_reload_and_two_upgrades_neither_lose_nor_double_usage() {
    let mut recorded = Recorded::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let mut upgraded = Upgraded::new(&recorded.serve.program);
    let load = recorded.load("alice", &reflect, "15").start();
    recorded.serve.wait_for_allocations(4);
    eventually("some usage is recorded", || recorded.sum("alice").to_peer.0 > 0);
    fs::write(&recorded.config, format!("[auth]\n{USERS}[usage]\ndays = 400\n[limits]\npermissions = 32\n"))
        .expect("writable");
    recorded.serve.program.signal("HUP");
    recorded.serve.program.line_with("limits.permissions");
    let first = upgraded.upgrade();
    recorded.serve.wait_for_allocations(4);
    let before = recorded.sum("alice").to_peer.0;
    eventually("the new process records usage", || recorded.sum("alice").to_peer.0 > before);
    upgraded.upgrade();
    let run = load.wait(SOON);
    is_recorded("reload and two upgrades", &recorded, "alice", Usage::of_load(&[run]));
    ends(first);
    assert_eq!(gaps(&recorded), 0);
}

fn gaps(recorded: &Recorded) -> usize {
    let (status, text) = fetch(recorded.serve.admin(), "/v1/usage").expect("an answer");
    assert_eq!(status, 200, "{text}");
    let list: Value = serde_json::from_str(&text).expect("JSON");
    list["gaps"].as_array().expect("an array").len()
}

#[test]
fn a_killed_server_loses_at_most_ten_seconds_and_the_ledger_has_the_gap() {
    let dir = Dir::new();
    let state = dir.path().join("state").display().to_string();
    let recorded = Recorded::start_on(Dir::new(), &["--state", &state]);
    let reflect = Reflect::start(V4, &[]);
    let load = recorded.load("alice", &reflect, "600").start();
    eventually("usage is recorded twice", || {
        let seen = recorded.sum("alice").to_peer.0;
        seen > 2000
    });
    let relayed = recorded.serve.metrics().sum("turnpike_relayed_bytes_total", "direction=\"to_peer\"");
    recorded.serve.program.signal("KILL");
    ends(recorded.serve.program.pid());
    load.signal("INT");
    let sent = load.wait(SOON).result()["sent"].as_u64().expect("a number") * SIZE;
    drop(recorded);

    let again = Recorded::start_on(Dir::new(), &["--state", &state]);
    let kept = again.sum("alice").to_peer.1;
    // 400 datagrams per second. More may have been relayed and recorded since the metrics were read.
    let relayed = relayed.max(kept);
    assert!(kept <= sent && relayed - kept <= 10 * 400 * SIZE, "{kept} of {relayed}, {sent} sent");
    tell("SIGKILL (to peers only)", relayed, kept);
    eventually("the gap is listed", || gaps(&again) == 1);
}

#[test]
fn usage_survives_an_outage_of_the_database() {
    let (server, proxy) = match coturn_store() {
        Ok(store) => store,
        Err(why) => return skip(&why),
    };
    let url = server.url(proxy.address, "");
    let mut recorded = Recorded::start_on(Dir::new(), &["--store", &url]);
    let reflect = Reflect::start(V4, &[]);
    let load = recorded.load("alice", &reflect, "20").start();
    eventually("some usage is recorded", || recorded.sum("alice").to_peer.0 > 0);
    proxy.refuse(true);
    recorded.serve.program.line_with("usage is not saved: ");
    let failed = || recorded.serve.metrics().sum("turnpike_usage_batches_total", "result=\"failed\"");
    eventually("a second batch fails", || failed() >= 2);
    proxy.refuse(false);
    let run = load.wait(SOON);
    recorded.serve.program.line_with("usage is saved in ");
    is_recorded("database away", &recorded, "alice", Usage::of_load(&[run]));
    let lines = recorded.serve.program.lines();
    assert_eq!(lines.iter().filter(|line| line.contains("usage is not saved")).count(), 1, "{lines:#?}");
}

#[test]
fn usage_survives_a_full_disk() {
    alone::in_namespaces(this_test!(), "m", &["mount", "-t", "tmpfs", "none", "/tmp"], || {
        let dir = Dir::new();
        let state = dir.path().join("state");
        fs::create_dir(&state).expect("writable");
        run("mount", &["-t", "tmpfs", "-o", "size=512k", "none", state.to_str().expect("UTF-8")]);
        let mut recorded = Recorded::start_on(Dir::new(), &["--state", state.to_str().expect("UTF-8")]);
        let reflect = Reflect::start(V4, &[]);
        let load = recorded.load("alice", &reflect, "20").start();
        eventually("some usage is recorded", || recorded.sum("alice").to_peer.0 > 0);
        let ballast = state.join("ballast");
        let filled = fs::write(&ballast, vec![0; 1 << 20]);
        assert!(filled.is_err(), "the disk is full");
        recorded.serve.program.line_with("usage is not saved: ");
        fs::remove_file(&ballast).expect("removable");
        let run = load.wait(SOON);
        recorded.serve.program.line_with("usage is saved in ");
        is_recorded("full disk", &recorded, "alice", Usage::of_load(&[run]));
    });
}

#[test]
fn two_servers_share_a_ledger() {
    let (server, _proxy) = match coturn_store() {
        Ok(store) => store,
        Err(why) => return skip(&why),
    };
    let url = server.url(server.address, "");
    let both = [(), ()].map(|()| Recorded::start_on(Dir::new(), &["--store", &url]));
    let reflect = Reflect::start(V4, &[]);
    let loads = both.each_ref().map(|recorded| recorded.load("alice", &reflect, "6").start());
    let runs = loads.map(|load| load.wait(SOON));
    let expected = Usage::of_load(&runs);
    both.iter().for_each(|recorded| is_recorded("two servers, one database", recorded, "alice", expected));
}
