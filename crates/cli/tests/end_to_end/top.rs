//! `turnpike top` against a real server. The tests follow the reason for a refusal from the client's
//! packet to the displayed text.

use crate::prelude::*;

fn top(serve: &Serve, more: &[&str]) -> Finished {
    let admin = serve.admin().to_string();
    let arguments = [&["top", "--admin", &admin], more].concat();
    Program::run(&mut turnpike(&arguments))
}

#[test]
fn top_shows_the_relayed_traffic() {
    let serve = Serve::start(&["--workers", "2"]);
    let reflect = Reflect::start(V4, &[]);
    let _load = serve.load(&reflect).with("--clients 5 --rate 500 --duration 600").start();
    serve.wait_for_allocations(5);
    eventually("the rates of a second with traffic", || {
        let json: Value =
            serde_json::from_str(&top(&serve, &["--once", "--json"]).stdout).expect("a line of JSON");
        let relayed = json["server"]["to_peer"]["datagrams"].as_f64()?;
        let talkers = json["server"]["talkers"]["talkers"].as_array().map_or(0, Vec::len);
        (relayed > 100.0 && talkers == 5).then_some(())
    });
    let ended = top(&serve, &["--once"]).ended(0);
    for part in ["allocations 5 ", "WORKER", "Top talkers", "alice", REALM] {
        assert!(ended.stdout.contains(part), "no {part} in {}", ended.stdout);
    }
    assert!(!ended.stdout.contains('\u{1b}'), "escape sequences without a terminal");
}

#[test]
fn top_without_a_terminal_needs_once_or_json() {
    let serve = Serve::start(&[]);
    top(&serve, &[]).ended(1).says("--once or --json");
    top(&serve, &["--interval", "0"]).ended(2);
}

#[test]
fn top_shows_refused_clients_with_reason_and_remedy() {
    let serve = Serve::start(&[]);
    let stun = stun::Client::new(serve.address(V4));
    let (_, _, challenge) = stun.challenge();
    for _ in 0..3 {
        assert_eq!(stun.forge("mallory", REALM.as_bytes(), &challenge.nonce), Some(401));
    }
    let found = eventually("the refusal is recorded", || {
        let (status, text) = turnpike_trials::fetch(serve.admin(), "/v1/refusals?client=127.0.0.1").ok()?;
        assert_eq!(status, 200, "{text}");
        let found: Value = serde_json::from_str(&text).expect("JSON");
        (found["refusals"][0]["count"] == 3).then(|| found["refusals"][0].clone())
    });
    assert_eq!((&found["user"], &found["code"]), (&"mallory".into(), &401.into()));
    assert_eq!(found["reason"], "no such user");
    assert!(found["remedy"].as_str().is_some_and(|remedy| remedy.ends_with('.')), "{found}");
    let (_, text) = turnpike_trials::fetch(serve.admin(), "/v1/refusals?user=somebody").expect("an answer");
    assert_eq!(text, "{\"refusals\":[]}");
}
