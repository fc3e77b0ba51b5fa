//! Captures of allocations: rights and bounds. Tests of the whole program check their content.

use crate::prelude::*;

const CAPTURE: &str = "capture-token-0123456";

fn path(running: &Running, query: &str) -> String {
    let list = running.get("/v1/allocations").ok();
    let id = list["allocations"][0]["id"].as_str().expect("an id").to_owned();
    format!("/v1/allocations/{id}/capture{query}")
}

#[test]
fn capture_needs_the_socket_or_a_token_of_its_own() {
    let running = Running::server(1);
    running.program.settings().admin.capture_tokens = vec![Secret::new(CAPTURE)];
    let _client = running.allocated();
    let path = path(&running, "?seconds=1");
    for (token, code) in [(FULL, "no_capture"), (READ, "no_capture"), ("wrong-token-0123456", "wrong_token")]
    {
        let bearer = format!("Bearer {token}");
        let answer = running.ask_tcp("GET", &path, &[("Authorization", &bearer)]);
        assert_eq!(answer.problem(if code == "no_capture" { 403 } else { 401 }), code, "{token}");
    }
    let bearer = format!("Bearer {CAPTURE}");
    let answer = running.ask_tcp("GET", &path, &[("Authorization", &bearer)]);
    assert_eq!((answer.status, answer.header("content-type")), (200, "application/x-pcapng"));
    assert_eq!(running.get(&path).status, 200);
    let answer = running.ask_tcp("POST", "/v1/reload", &[("Authorization", &bearer)]);
    assert_eq!(answer.problem(403), "read_only");
}

#[test]
fn capture_has_bounds() {
    let running = Running::server(1);
    let _client = running.allocated();
    for query in
        ["?count=0", "?count=1000001", "?seconds=0", "?seconds=3601", "?snap=65536", "?snap=-1", "?size=1"]
    {
        assert_eq!(running.get(&path(&running, query)).problem(400), "bad_request", "{query}");
    }
    let absent = format!("/v1/allocations/{}/capture", "0".repeat(32));
    assert_eq!(running.get(&absent).problem(404), "no_such_allocation");
}
