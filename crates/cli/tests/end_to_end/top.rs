//! `turnpike top` against a real server, and why a client was refused, from the client's packet to the words.

use crate::prelude::*;

fn top(serve: &Serve, more: &[&str]) -> Finished {
    let admin = serve.admin().to_string();
    let arguments = [&["top", "--admin", &admin], more].concat();
    Program::run(&mut turnpike(&arguments))
}

#[test]
fn top_shows_what_a_server_relays() {
    let serve = Serve::start(&["--workers", "2"]);
    let reflect = Reflect::start(V4, &[]);
    let _load = serve.load(&reflect).with("--clients 5 --rate 500 --duration 600").start();
    serve.wait_for_allocations(5);
    eventually("the rates of a second in which it relayed", || {
        let json: Value =
            serde_json::from_str(&top(&serve, &["--once", "--json"]).stdout).expect("a line of JSON");
        let relayed = json["server"]["to_peer"]["datagrams"].as_f64()?;
        let talkers = json["server"]["talkers"]["talkers"].as_array().map_or(0, Vec::len);
        (relayed > 100.0 && talkers == 5).then_some(())
    });
    let ended = top(&serve, &["--once"]).ended(0);
    for part in ["sessions 5 ", "WORKER", "Top talkers", "alice", REALM] {
        assert!(ended.stdout.contains(part), "{part} in {}", ended.stdout);
    }
    assert!(!ended.stdout.contains('\u{1b}'), "no escapes where there is no terminal");
}

#[test]
fn top_needs_a_terminal_or_a_word_that_it_needs_none() {
    let serve = Serve::start(&[]);
    top(&serve, &[]).ended(1).says("--once or --json");
    top(&serve, &["--interval", "0"]).ended(2);
}

#[test]
fn a_client_that_is_refused_is_found_with_the_reason_and_a_remedy() {
    let serve = Serve::start(&[]);
    let stun = stun::Client::new(serve.address(V4));
    let (_, _, challenge) = stun.challenge();
    for _ in 0..3 {
        assert_eq!(stun.forge("mallory", REALM.as_bytes(), &challenge.nonce), Some(401));
    }
    let found = eventually("it is remembered", || {
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
