//! `turnpike probe` against `turnpike serve` and against other programs.

use crate::prelude::*;

fn probe(arguments: &[&str]) -> Finished {
    let mut all = vec!["probe"];
    all.extend(arguments);
    Program::run(&mut turnpike(&all))
}

fn as_user(server: SocketAddr, user: &str, more: &[&str]) -> Finished {
    // UDP only, so that the verdict does not depend on other listeners.
    let uri = format!("turn:{server}?transport=udp");
    let mut arguments = vec![uri.as_str(), "--user", user];
    arguments.extend(more);
    probe(&arguments)
}

fn line<'a>(report: &'a Value, area: &str) -> Vec<&'a Value> {
    let lines = report["findings"].as_array().expect("a list of lines");
    lines.iter().filter(|line| line["area"] == area).collect()
}

#[test]
fn default_server_is_usable_and_blocks_internal_peers() {
    let user = format!("{USER}:{PASSWORD}");
    let serve = Serve::start_bare(&["--realm", REALM, "--user", &user, "--relay-ip", "127.0.0.1"]);
    let report = as_user(serve.address(V4), &user, &["--json", "--fail-on", "bad"]).ended(0).result();
    assert_eq!(report["usable"], true, "{report}");
    assert_eq!(report["credentials_accepted"], true, "{report}");
    assert_eq!(report["realm"], REALM, "{report}");
    assert_eq!(report["transports"]["udp"]["reachable"], true, "{report}");
    assert_eq!(report["features"]["sha256"], true, "{report}");
    assert_eq!(report["features"]["userhash"], true, "{report}");
    assert_eq!(report["features"]["even_port"], true, "{report}");
    let peers = report["peers"].as_array().expect("a list");
    assert!(peers.len() >= 10, "{report}");
    for peer in peers {
        assert_eq!(peer["allowed"], false, "{peer}");
    }
    serve.wait_for_allocations(0);

    let text = as_user(serve.address(V4), &user, &[]).ended(0);
    assert!(text.stdout.contains("ok    credentials"), "{}", text.stdout);
    assert!(text.stdout.lines().last().is_some_and(|last| last.starts_with("usable; ")), "{}", text.stdout);
    assert!(!text.output().contains(PASSWORD), "{}", text.output());
}

#[test]
fn open_loopback_peers_are_reported_and_fail_on_request() {
    let serve = Serve::start(&[]);
    let user = format!("{USER}:{PASSWORD}");
    let report = as_user(serve.address(V4), &user, &["--json", "--fail-on", "bad"]).ended(3).result();
    let lines = line(&report, "peers");
    let bad: Vec<_> = lines.iter().filter(|line| line["level"] == "bad").collect();
    assert!(!bad.is_empty(), "{report}");
    assert!(bad[0]["what"].as_str().is_some_and(|what| what.contains("127.0.0.1 (loopback)")), "{report}");
    assert!(bad[0]["remedy"].as_str().is_some_and(|remedy| remedy.contains("--allow-peer")), "{report}");
    assert_eq!(as_user(serve.address(V4), &user, &[]).code, Some(0));
}

#[test]
fn refused_credential_is_reported_with_its_reason() {
    let serve = Serve::start(&["--secret", "north"]);
    let report = as_user(serve.address(V4), &format!("{USER}:looking-glass"), &["--json"]).ended(1).result();
    assert_eq!(report["credentials_accepted"], false, "{report}");
    let what = line(&report, "credentials")[0]["what"].to_string();
    assert!(what.contains("wrong password") && what.contains(REALM), "{report}");

    let expired = as_user(serve.address(V4), "1000000000:bob:cGFzc3dvcmQ=", &[]).ended(1);
    assert!(expired.stdout.contains("expired") && expired.stdout.contains("clock"), "{}", expired.stdout);

    let absent = probe(&[&format!("turn:{}?transport=udp", serve.address(V4))]).ended(0);
    assert!(absent.stdout.contains("--user NAME:PASSWORD"), "{}", absent.stdout);
}

#[test]
fn closed_silent_and_non_stun_ports_are_distinguished() {
    let closed = probe(&[&format!("turn:127.0.0.1:{}?transport=udp", free_port(V4))]).ended(1);
    assert!(closed.stdout.contains("refused"), "{}", closed.stdout);

    let silent = UdpSocket::bind((V4, 0)).expect("loopback");
    let address = silent.local_addr().expect("bound");
    let mute = probe(&[&format!("turn:{address}?transport=udp"), "--timeout", "1"]).ended(1);
    assert!(mute.stdout.contains("no answer in time"), "{}", mute.stdout);

    let web = TcpListener::bind((V4, 0)).expect("loopback");
    let address = web.local_addr().expect("bound");
    thread::spawn(move || {
        for mut stream in web.incoming().flatten() {
            thread::spawn(move || {
                let _ = stream.write_all(b"\x80TTP/1.1 400 Bad Request\r\n\r\n");
            });
        }
    });
    let other = probe(&[&format!("turn:{address}?transport=tcp"), "--timeout", "5"]).ended(1);
    assert!(other.stdout.contains("does not speak STUN"), "{}", other.stdout);

    let drip = TcpListener::bind((V4, 0)).expect("loopback");
    let address = drip.local_addr().expect("bound");
    thread::spawn(move || {
        for mut stream in drip.incoming().flatten() {
            thread::spawn(move || {
                while stream.write_all(&[0]).is_ok() {
                    thread::sleep(Duration::from_millis(50));
                }
            });
        }
    });
    for uri in [format!("turn:{address}?transport=tcp"), format!("turns:{address}?transport=tcp")] {
        probe(&[&uri, "--timeout", "1"]).ended(1);
    }
}

#[test]
fn invalid_name_is_bad_usage() {
    for (name, word) in [
        ("http://turn.example.org", "turn"),
        ("turn://a", "slashes"),
        ("turn:a:99999", "port"),
        ("turn:a?transport=sctp", "transport=udp"),
        ("turn:a@b", "--user"),
    ] {
        let run = probe(&[name]);
        assert_eq!(run.code, Some(2), "{name}: {}", run.output());
        assert!(run.stderr.contains(word), "{name}: {}", run.output());
    }
    probe(&["turn:127.0.0.1", "--count", "0"]).ended(2);
    probe(&["turn:127.0.0.1", "--fail-on", "ok"]).ended(2);
}

#[test]
fn stun_needs_no_credential() {
    let serve = Serve::start(&[]);
    let report = probe(&[&format!("stun:{}", serve.address(V4)), "--json"]).ended(0).result();
    assert_eq!(report["usable"], true, "{report}");
    assert!(report["transports"]["udp"]["mapped"].as_str().is_some_and(|it| it.starts_with("127.0.0.1:")));
    assert!(line(&report, "credentials").is_empty(), "{report}");
}
