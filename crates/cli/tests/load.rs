//! `turnpike load turn` through `turnpike serve` to `turnpike reflect`, on loopback: what is printed and how it exits.

mod support;

use std::process::{Command, Output};

use support::Server;

struct Bench {
    server: Server,
    reflector: Server,
    address: String,
    peer: String,
}

impl Bench {
    fn start() -> Self {
        let mut server = Server::serve(&[
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "off",
            "--allow-peer",
            "127.0.0.0/8",
            "--user",
            "a:b",
            "--secret",
            "north",
        ]);
        let address = server.wait_for("listening on udp ");
        let mut reflector = Server::start(&["reflect", "--listen", "127.0.0.1:0", "--workers", "1"]);
        let peer = reflector.wait_for("listening on udp ");
        Self { server, reflector, address, peer }
    }

    fn load(&self, user: &str, arguments: &[&str]) -> Output {
        turnpike(
            &[
                &[
                    "load",
                    "turn",
                    self.address.as_str(),
                    "--peer",
                    self.peer.as_str(),
                    "--user",
                    user,
                    "--threads",
                    "1",
                ][..],
                &["--duration", "0.3", "--warmup", "0"],
                arguments,
            ]
            .concat(),
        )
    }
}

fn turnpike(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_turnpike")).args(arguments).output().expect("the program runs")
}

fn time_limited(ttl: &str) -> String {
    let output = turnpike(&["credentials", "--secret", "north", "--user", "carol", "--ttl", ttl]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let value = |label| text.lines().find_map(|line| line.strip_prefix(label)).expect("a line").to_owned();
    format!("{}:{}", value("username: "), value("password: "))
}

#[test]
fn traffic_comes_back_and_the_session_is_logged() {
    let mut bench = Bench::start();
    for via in ["channel", "send"] {
        let output = bench.load("a:b", &["--rate", "200", "--via", via, "--json", "-"]);
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(json["received"], json["sent"], "{json}");
        assert!(json["received"].as_u64().is_some_and(|received| received >= 50), "{json}");
        bench.server.wait_for("session ended user=\"a\"");
    }
    bench.reflector.signal("TERM");
    assert_eq!(bench.reflector.wait_for_exit().code(), Some(0));
    assert!(bench.reflector.seen.contains("sent back") || bench.reflector.seen.contains(" back, 0 refused"));
    bench.server.signal("TERM");
    assert_eq!(bench.server.wait_for_exit().code(), Some(0), "{}", bench.server.seen);
}

#[test]
fn a_limit_that_is_exceeded_exits_with_3() {
    let bench = Bench::start();
    let output = bench.load("a:b", &["--rate", "100", "--max-p99", "0"]);
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    let output = bench.load("a:b", &["--rate", "100", "--max-loss", "50"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn time_limited_credentials_are_accepted() {
    let mut bench = Bench::start();
    let output = bench.load(&time_limited("60"), &["--rate", "100"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    bench.server.wait_for(":carol\" client=");
}

#[test]
fn each_refused_credential_is_logged_with_its_reason() {
    let mut bench = Bench::start();
    for (user, reason) in [
        ("a:wrong", "reason=\"wrong key\""),
        ("nobody:x", "reason=\"no such user\""),
        ("1000000000:carol:x", "reason=\"expired "),
    ] {
        let output = bench.load(user, &[]);
        assert_eq!(output.status.code(), Some(1), "{user}");
        bench.server.wait_for(reason);
    }
}
