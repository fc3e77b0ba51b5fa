//! Captures of allocations: rights and bounds. Tests of the whole program check their content.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use crate::prelude::*;

const CAPTURE: &str = "capture-token-0123456";

fn whole(mut stream: impl Read + Write, request: &[u8]) -> Vec<u8> {
    stream.write_all(request).unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).unwrap();
    response
}

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
    for (token, code, status) in
        [(FULL, "no_capture", 403), (READ, "no_capture", 403), ("wrong-token-0123456", "wrong_token", 401)]
    {
        let bearer = format!("Bearer {token}");
        let answer = running.ask_tcp("GET", &path, &[("Authorization", &bearer)]);
        assert_eq!(answer.problem(status), code, "{token}");
    }
    let bearer = format!("Bearer {CAPTURE}");
    let tcp = TcpStream::connect(running.tcp[0]).unwrap();
    let host = running.tcp[0].to_string();
    let with_token = request("GET", &path, &host, &[("Authorization", &bearer)], None);
    let socket = UnixStream::connect(running.dir.path("a.sock")).unwrap();
    for response in [whole(tcp, &with_token), whole(socket, &request("GET", &path, "localhost", &[], None))] {
        let text = String::from_utf8_lossy(&response);
        assert!(text.starts_with("HTTP/1.1 200 OK\r\ncontent-type: application/x-pcapng\r\n"), "{text}");
        // A section header and the end of the last chunk.
        let section = [0x0a, 0x0d, 0x0d, 0x0a];
        assert!(
            response.windows(4).any(|bytes| bytes == section) && text.ends_with("\r\n0\r\n\r\n"),
            "{text}"
        );
    }
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
