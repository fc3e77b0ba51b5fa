//! Time-limited credentials are accepted until they expire. Each refused credential has a reason in one log line
//! and one counter; the client only sees a 401.

use crate::prelude::*;

/// Username, realm in the request, reason in the log, `reason` label of the counter.
const REFUSALS: &[(&str, &str, &str, &str)] = &[
    ("mallory", REALM, "no such user", "no_such_user"),
    // 1700000000 is 14 November 2023.
    ("1700000000:bob", REALM, "expired ", "expired"),
    (USER, REALM, "wrong key", "wrong_key"),
    ("4102444800:bob", REALM, "more than ten years ahead", "too_far_ahead"),
    (USER, "elsewhere.example", "wrong realm", "wrong_realm"),
];

#[test]
fn refused_credentials_are_logged_and_counted_with_their_reason() {
    for (username, realm, reason, label) in REFUSALS {
        // A new server for each case, because refusal log lines are rate-limited.
        let mut serve = Serve::start(&["--secret", "north-star"]);
        let stun = stun::Client::new(serve.address(V4));
        let (_, _, challenge) = stun.challenge();
        assert_eq!(challenge.realm, REALM.as_bytes());
        let error = stun.forge(username, realm.as_bytes(), &challenge.nonce);
        assert!(matches!(error, Some(400 | 401)), "{username}: {error:?}");

        let line = serve.program.line_with("credential refused");
        assert!(line.contains(reason) && line.contains(username), "{username}: {line}");
        eventually(&format!("{username} is counted as {label}"), || {
            let metrics = serve.metrics();
            let counted = metrics.sum("turnpike_credentials_refused_total", &format!("reason=\"{label}\""));
            let all = metrics.sum("turnpike_credentials_refused_total", "");
            counted == 1 && all == 1
        });
        assert_eq!(serve.allocations(), 0);
    }
}

#[test]
fn expired_credential_is_logged_with_its_age() {
    let mut serve = Serve::start(&["--secret", "north-star"]);
    let stun = stun::Client::new(serve.address(V4));
    let (_, _, challenge) = stun.challenge();
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
    stun.forge(format!("{}:bob", now - 42), REALM.as_bytes(), &challenge.nonce);
    let line = serve.program.line_with("credential refused");
    // On a slow machine, the request may arrive a few seconds later.
    let seconds = (42..72).find(|seconds| line.contains(&format!("expired {seconds} s ago")));
    assert!(seconds.is_some(), "{line}");
}

/// A client that guesses passwords from its own address is logged without suppressing lines about others.
#[test]
fn password_guessing_does_not_suppress_other_log_lines() {
    let mut serve = Serve::start(&["--workers", "1"]);
    let guesser = stun::Client::from([127, 0, 0, 2].into(), serve.address(V4));
    let (_, _, challenge) = guesser.challenge();
    for _ in 0..500 {
        assert_eq!(guesser.forge("guessed", REALM.as_bytes(), &challenge.nonce), Some(401));
    }
    let honest = stun::Client::new(serve.address(V4));
    let (_, _, challenge) = honest.challenge();
    assert_eq!(honest.forge("honest", REALM.as_bytes(), &challenge.nonce), Some(401));
    let line = serve.program.line_with("honest");
    assert!(line.contains("client=127.0.0.1:"), "{line}");
    // Suppressed lines are counted: some in a later log line, and all of them in a metric.
    let suppressed: u64 = line
        .split_once("suppressed=")
        .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok())
        .expect("a number");
    let told = serve.program.lines().iter().filter(|line| line.contains("guessed")).count();
    assert!((1..200).contains(&told) && suppressed > 300, "{told} lines, then {line}");
    eventually("all refusals are counted", || {
        let metrics = serve.metrics();
        let all = metrics.sum("turnpike_credentials_refused_total", "");
        all == 501
    });
}

#[test]
fn wrong_key_with_another_clients_nonce_is_counted_but_not_logged() {
    let serve = Serve::start(&[]);
    let error = stun::Client::new(serve.address(V4)).forge(USER, REALM.as_bytes(), b"another client's nonce");
    assert_eq!(error, Some(401));
    let counted = || serve.metrics().sum("turnpike_credentials_refused_total", "reason=\"wrong_key\"");
    eventually("the refusal is counted", || counted() == 1);
    assert!(!serve.program.lines().iter().any(|line| line.contains("credential refused")));
}

#[test]
fn server_accepts_output_of_the_credentials_command() {
    let serve = Serve::start(&["--secret", "south-star", "--secret", "north-star"]);
    for secret in ["north-star", "south-star"] {
        let made = Program::run(&mut turnpike(&[
            "credentials",
            "--secret",
            secret,
            "--user",
            "carol",
            "--ttl",
            "60",
        ]))
        .ended(0);
        let value =
            |label| made.stdout.lines().find_map(|line| line.strip_prefix(label)).expect("a labelled line");
        let credential = format!("{}:{}", value("username: "), value("password: "));
        let load = Load::as_user(serve.address(V4), &credential)
            .with("--mode allocate --rate 20 --duration 1")
            .run();
        assert_eq!(load.code, Some(0), "{secret}: {}", load.output());
    }
    assert_eq!(serve.metrics().sum("turnpike_credentials_refused_total", ""), 0);
}

/// The issuer of a time-limited credential chooses its id, which must not use up the quota of a configured user
/// with that name.
#[test]
fn user_and_time_limited_id_with_the_same_name_have_separate_quotas() {
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", "[limits]\nallocations_per_user = 1\n");
    let path = file.to_str().expect("the test's path is UTF-8");
    let serve = Serve::start(&["-c", path, "--user", "a:one", "--secret", "north-star"]);
    let made = Program::run(&mut turnpike(&["credentials", "--secret", "north-star", "--user", "a"]));
    let value =
        |label| made.stdout.lines().find_map(|line| line.strip_prefix(label)).expect("a labelled line");
    let timed = (value("username: "), value("password: "));
    let mut clients = Vec::new();
    for (user, password) in [("a", "one"), timed] {
        for expected in [None, Some(486)] {
            let stun = stun::Client::new(serve.address(V4));
            let (_, _, challenge) = stun.challenge();
            assert_eq!(stun.allocate(user, password, &challenge), expected, "{user}");
            clients.push(stun);
        }
    }
}
