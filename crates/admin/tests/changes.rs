//! Changes run to completion, and each is in the audit log.

use crate::prelude::*;
use std::{io::Write as _, os::unix::net::UnixStream, thread};

use crate::support::exchange;

fn user(name: &str) -> String {
    json!({ "name": name, "password": "pw" }).to_string()
}

fn users(running: &Running, prefix: &str) -> BTreeSet<String> {
    let page = running.get("/v1/users?limit=1000").ok();
    let names =
        page["users"].as_array().unwrap().iter().map(|user| user["name"].as_str().unwrap().to_owned());
    names.filter(|name| name.starts_with(prefix)).collect()
}

#[test]
fn change_of_a_disconnected_client_is_audited_and_announced() {
    log::keep();
    let running = Running::server(1);
    let bearer = format!("Bearer {FULL}");
    let names: BTreeSet<String> = (0..30).map(|number| format!("leaver-{number:02}")).collect();
    for (number, name) in names.iter().enumerate() {
        let body = user(name);
        // The first pause is zero.
        let pause = Duration::from_micros(100 * (number as u64 / 2 % 6));
        if number % 2 == 0 {
            let mut stream = UnixStream::connect(running.dir.path("a.sock")).unwrap();
            stream.write_all(&request("POST", "/v1/users", "localhost", &[], Some(&body))).unwrap();
            thread::sleep(pause);
        } else {
            let mut stream = TcpStream::connect(running.tcp[0]).unwrap();
            let headers = [("Authorization", bearer.as_str())];
            let host = running.tcp[0].to_string();
            stream.write_all(&request("POST", "/v1/users", &host, &headers, Some(&body))).unwrap();
            thread::sleep(pause);
        }
    }
    eventually("all users exist", || users(&running, "leaver-") == names);
    for name in &names {
        eventually("an audit line", || log::lines_with(&["POST /v1/users", "added user", name]).len() == 1);
        let notice = format!("revoked {name} of turnpike");
        eventually("a notice to the fleet", || running.member().told.lock().unwrap().contains(&notice));
    }
}

#[test]
fn burst_of_changes_is_answered_and_audited() {
    log::keep();
    let running = Running::server(1);
    let host = running.tcp[0].to_string();
    let bearer = format!("Bearer {FULL}");
    let answers: Vec<_> = thread::scope(|scope| {
        let ask = |number: usize| {
            let (host, bearer) = (host.clone(), bearer.clone());
            let to = running.tcp[0];
            scope.spawn(move || {
                let name = format!("burst-{number:02}");
                let headers = [("Authorization", bearer.as_str())];
                let bytes = request("POST", "/v1/users", &host, &headers, Some(&user(&name)));
                (name, exchange(&mut TcpStream::connect(to).unwrap(), &bytes))
            })
        };
        let asked: Vec<_> = (0..64).map(ask).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    let mut added = BTreeSet::new();
    for (name, answer) in answers {
        if answer.status == 503 {
            assert_eq!(answer.problem(503), "busy");
            assert!(!answer.header("retry-after").is_empty());
        } else {
            assert_eq!(answer.status, 201, "{answer:?}");
            assert_eq!(log::lines_with(&["POST /v1/users", "added user", &name]).len(), 1, "{name}");
            added.insert(name);
        }
    }
    assert!(!added.is_empty());
    assert_eq!(users(&running, "burst-"), added);
}

#[test]
fn audit_log_names_tokens_by_position_and_has_refused_changes() {
    log::keep();
    let running = Running::server(1);
    let change = |token: &str, level: &str| {
        let bearer = format!("Bearer {token}");
        let headers = [("Authorization", bearer.as_str())];
        let body = json!({ "level": level }).to_string();
        let host = running.tcp[0].to_string();
        running.say_tcp(&request("PUT", "/v1/log", &host, &headers, Some(&body))).status
    };
    assert_eq!(change(FULL, "info,audited=debug"), 200);
    let done = log::lines_with(&["turnpike::audit", "PUT /v1/log", "audited=debug"]);
    assert!(done.len() == 1 && done[0].contains(" with token 1 of admin.tokens"), "{done:?}");
    assert!(!done[0].contains(FULL));
    assert_eq!(change(FULL, "no level at all=="), 400);
    let port = running.tcp[0].port();
    assert_eq!(change(READ, "info"), 403);
    assert_eq!(change("wrong-0123456789abcdef", "info"), 401);
    let refused = |code: &str| log::lines_with(&["WARN", "turnpike::audit", "admin request refused", code]);
    eventually("lines", || !refused("read_only").is_empty() && !refused("wrong_token").is_empty());
    assert!(refused("wrong_token").iter().all(|line| !line.contains("wrong-0123456789abcdef")), "{port}");
    let bearer = format!("Bearer {READ}");
    let reader = [("Authorization", bearer.as_str())];
    assert_eq!(running.ask_tcp("GET", "/v1/secrets", &reader).status, 403);
    let secrets = || log::lines_with(&["turnpike::audit", "admin request refused", "GET /v1/secrets"]);
    eventually("a line", || secrets().len() == 1 && secrets()[0].contains("read_only"));
    // Repeated refusals are not all logged.
    for _ in 0..40 {
        change(READ, "info");
    }
    assert!(refused("read_only").len() < 30, "{:?}", refused("read_only"));
}

/// Runs eight concurrent clients; returns the numbers of successes and of conflicts.
fn race(running: &Running, path: &str, body: impl Fn(usize) -> serde_json::Value) -> (usize, usize) {
    let statuses: Vec<u16> = thread::scope(|scope| {
        let ask = |number: usize| {
            let body = body(number).to_string();
            scope.spawn(move || running.ask("POST", path, Some(&body)).status)
        };
        let asked: Vec<_> = (0..8).map(ask).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    let count = |wanted: u16| statuses.iter().filter(|status| **status == wanted).count();
    (count(201), count(409))
}

#[test]
fn exactly_one_of_concurrent_clients_adds_a_name() {
    let running = Running::server(1);
    // The stores' test `races` runs more rounds.
    for round in 0..20 {
        let name = format!("race-{round}");
        let key = |number: usize| json!({ "name": name, "sha256": format!("{number:064x}"), "max_ttl": 60 + number });
        assert_eq!(race(&running, "/v1/keys", key), (1, 7), "{name}");
        let user =
            |number: usize| json!({ "name": name, "password": format!("pw{number}"), "only_new": true });
        assert_eq!(race(&running, "/v1/users", user), (1, 7), "{name}");
        let secret = |_| json!({ "secret": name, "only_new": true });
        assert_eq!(race(&running, "/v1/secrets", secret), (1, 7), "{name}");
        let realm = |number: usize| json!({ "name": name, "max_allocations": number + 1, "only_new": true });
        assert_eq!(race(&running, "/v1/realms", realm), (1, 7), "{name}");
    }
}

#[test]
fn concurrent_rotations_leave_one_signing_secret() {
    let running = Running::server(1);
    for _ in 0..20 {
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(running.ask("POST", "/v1/secrets/rotation", None).status, 200));
            }
        });
        let secrets = running.get("/v1/secrets").ok();
        let all = secrets["secrets"].as_array().unwrap();
        assert_eq!(all.iter().filter(|secret| secret["until"].is_null()).count(), 1, "{all:?}");
        assert_eq!(all.iter().filter(|secret| secret["signs"] == true).count(), 1, "{all:?}");
    }
}
