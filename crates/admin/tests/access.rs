//! Read access, full access, and refusal of requests that only an attacker would send.

use crate::prelude::*;

fn bearer(token: &str) -> (String, String) {
    ("Authorization".to_owned(), format!("Bearer {token}"))
}

fn try_out(running: &Running, change: bool, token: Option<&str>) -> Answer {
    let token = token.map(bearer);
    let headers: Vec<(&str, &str)> =
        token.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    if change {
        let host = running.tcp[0].to_string();
        return running.say_tcp(&request("PUT", "/v1/log", &host, &headers, Some("{\"level\":\"info\"}")));
    }
    running.ask_tcp("GET", "/v1/status", &headers)
}

#[test]
fn unix_socket_has_full_access_and_loopback_the_configured_access() {
    let running = Running::server(1);
    assert_eq!(running.ask("PUT", "/v1/log", Some("{\"level\":\"info\"}")).status, 200);
    for (access, look, change) in
        [(AdminAccess::Full, 200, 200), (AdminAccess::Read, 200, 401), (AdminAccess::None, 401, 401)]
    {
        running.program.settings().admin.loopback = access;
        assert_eq!(try_out(&running, false, None).status, look, "{access:?}");
        assert_eq!(try_out(&running, true, None).status, change, "{access:?}");
        for path in ["/livez", "/readyz", "/healthz"] {
            assert_eq!(running.ask_tcp("GET", path, &[]).status, 200, "{access:?} {path}");
        }
        assert_eq!(running.ask_tcp("GET", "/metrics", &[]).status, look, "{access:?}");
    }
}

#[test]
fn token_has_the_access_of_its_list() {
    let running = Running::server(1);
    running.program.settings().admin.loopback = AdminAccess::None;
    for (token, look, change) in [(FULL, 200, 200), (READ, 200, 403)] {
        assert_eq!(try_out(&running, false, Some(token)).status, look, "{token}");
        assert_eq!(try_out(&running, true, Some(token)).status, change, "{token}");
    }
    assert_eq!(try_out(&running, true, Some(READ)).problem(403), "read_only");
    let absent = try_out(&running, false, None);
    assert_eq!(absent.problem(401), "no_token");
    assert!(absent.header("www-authenticate").starts_with("Bearer "));
    running.program.settings().admin.tokens = vec![Secret::new("another-token-of-today")];
    assert_eq!(try_out(&running, true, Some("another-token-of-today")).status, 200);
    assert_eq!(try_out(&running, true, Some(FULL)).problem(401), "wrong_token");
}

#[test]
fn wrong_token_is_refused_even_if_none_is_needed() {
    let running = Running::server(1);
    let counted = || -> u64 {
        let text = running.get("/metrics").body;
        let line = text.lines().find_map(|line| line.strip_prefix("turnpike_admin_wrong_tokens_total "));
        line.expect("the counter").parse().unwrap()
    };
    let before = counted();
    for wrong in ["x", &FULL[1..], &format!("{FULL}x"), &FULL.to_ascii_uppercase()] {
        let answer = try_out(&running, false, Some(wrong));
        assert_eq!(answer.problem(401), "wrong_token", "{wrong}");
        assert!(!answer.body.contains(wrong), "{answer:?}");
    }
    assert!(counted() >= before + 4);
    for malformed in ["Bearer", "Basic YTpi", FULL, ""] {
        let answer = running.ask_tcp("GET", "/v1/status", &[("Authorization", malformed)]);
        assert_eq!(answer.problem(400), "bad_request", "{malformed}");
    }
    assert_eq!(
        running.ask_tcp("GET", "/v1/status", &[("authorization", &format!("bearer {READ}"))]).status,
        200
    );
}

#[test]
fn page_of_another_origin_can_neither_change_nor_read() {
    let running = Running::server(1);
    running.program.settings().admin.loopback = AdminAccess::Full;
    let own = format!("http://{}", running.tcp[0]);
    for (headers, is_own) in [
        (vec![], true),
        (vec![("Origin", own.as_str())], true),
        (vec![("Sec-Fetch-Site", "same-origin")], true),
        (vec![("Sec-Fetch-Site", "none")], true),
        (vec![("Origin", "http://evil.example")], false),
        (vec![("Origin", "http://127.0.0.1:1")], false),
        (vec![("Origin", "http://127.0.0.1")], false),
        (vec![("Origin", "null")], false),
        (vec![("Origin", "")], false),
        (vec![("Sec-Fetch-Site", "cross-site")], false),
        (vec![("Sec-Fetch-Site", "same-site")], false),
        (vec![("Origin", own.as_str()), ("Sec-Fetch-Site", "cross-site")], false),
    ] {
        for (method, path) in [("POST", "/v1/reload"), ("GET", "/v1/status"), ("GET", "/livez")] {
            let answer = running.ask_tcp(method, path, &headers);
            if is_own {
                assert_eq!(answer.status, 200, "{method} {path} {headers:?}");
            } else {
                assert_eq!(answer.problem(403), "foreign_origin", "{method} {path} {headers:?}");
            }
        }
    }
    // Foreign origins are refused over the Unix socket too, in case a proxy is in front of it.
    let mut stream = std::os::unix::net::UnixStream::connect(running.dir.path("a.sock")).unwrap();
    let foreign = request("POST", "/v1/reload", "localhost", &[("Origin", "http://evil.example")], None);
    assert_eq!(crate::support::exchange(&mut stream, &foreign).problem(403), "foreign_origin");
}

#[test]
fn unknown_host_name_is_refused_over_tcp() {
    let running = Running::server(1);
    let ask = |host: &str| running.say_tcp(&request("GET", "/v1/status", host, &[], None));
    assert_eq!(ask("rebound.example").problem(421), "unknown_host");
    assert_eq!(ask("localhost").status, 200);
    running.program.settings().admin.hosts = vec!["rebound.example".to_owned()];
    assert_eq!(ask("rebound.example:9641").status, 200);
}

#[test]
fn long_or_non_json_body_is_refused() {
    let running = Running::server(1);
    let ask = |kind: &str, body: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(running.dir.path("a.sock")).unwrap();
        let bytes = request("PUT", "/v1/log", "localhost", &[("Content-Type", kind)], Some(body));
        crate::support::exchange(&mut stream, &bytes)
    };
    let good = "{\"level\":\"info\"}";
    for kind in ["application/json", "application/json; charset=utf-8", "Application/JSON"] {
        assert_eq!(ask(kind, good).status, 200, "{kind}");
    }
    for kind in ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"] {
        assert_eq!(ask(kind, good).problem(415), "not_json", "{kind}");
    }
    let long = format!("{{\"level\":\"{}\"}}", "x".repeat(5000));
    assert_eq!(ask("application/json", &long).problem(413), "body");
    for bad in ["{", "{\"level\":", "\u{0}", "null", &"[".repeat(4000)] {
        assert_eq!(ask("application/json", bad).problem(400), "bad_request", "{bad}");
    }
    for (method, path) in
        [("GET", "/v1/status"), ("DELETE", "/v1/allocations/00000000000000000000000000000000")]
    {
        assert_eq!(running.ask(method, path, Some("{}")).problem(413), "body", "{method}");
    }
}

#[test]
fn unknown_paths_and_methods_get_problem_details() {
    let running = Running::server(1);
    for path in ["/v1", "/v2/allocations", "/v1/allocations/", "/v1/allocations/a/b", "/metrics/x"] {
        assert_eq!(running.get(path).problem(404), "no_such_path", "{path}");
    }
    for (method, path) in
        [("POST", "/v1/allocations"), ("DELETE", "/metrics"), ("PUT", "/v1/reload"), ("GET", "/v1/reload")]
    {
        let answer = running.ask(method, path, None);
        assert_eq!(answer.problem(405), "no_such_method", "{method} {path}");
        assert!(!answer.header("allow").is_empty());
    }
    assert_eq!(running.ask("HEAD", "/v1/status", None).body, "");
}

#[test]
fn responses_are_not_cacheable() {
    let running = Running::server(1);
    for path in ["/v1/allocations", "/livez", "/metrics", "/nowhere"] {
        let answer = running.get(path);
        assert_eq!(answer.header("cache-control"), "no-store", "{path}");
        assert_eq!(answer.header("x-content-type-options"), "nosniff", "{path}");
    }
}
