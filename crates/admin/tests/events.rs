//! Events for applications as a stream that can be resumed.

use crate::prelude::*;
use std::io::{BufRead, BufReader, Write};

use crate::support::SOON;

struct Stream {
    head: String,
    lines: BufReader<TcpStream>,
}

impl Stream {
    fn open(running: &Running, query: &str, headers: &[(&str, &str)]) -> Self {
        let mut stream = Self::connect(running, query, headers);
        // The comment shows that the subscription exists.
        while !stream.head.contains(": events\n") {
            assert!(stream.lines.read_line(&mut stream.head).unwrap() > 0, "no stream: {}", stream.head);
        }
        stream
    }

    fn connect(running: &Running, query: &str, headers: &[(&str, &str)]) -> Self {
        let address: SocketAddr = running.tcp[0];
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let path = format!("/v1/events{query}");
        stream.write_all(&request("GET", &path, &address.to_string(), headers, None)).unwrap();
        let mut lines = BufReader::new(stream);
        let mut head = String::new();
        while !head.contains("\r\n\r\n") {
            assert!(lines.read_line(&mut head).unwrap() > 0, "no answer: {head:?}");
        }
        Self { head: head.to_ascii_lowercase(), lines }
    }

    /// Id, type and data of the next event, or `None` at the end of the stream.
    fn next(&mut self) -> Option<(u64, String, Value)> {
        let (mut id, mut kind) = (0, String::new());
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(text) = line.strip_prefix("id: ") {
                id = text.trim().parse().unwrap();
            } else if let Some(text) = line.strip_prefix("event: ") {
                text.trim().clone_into(&mut kind);
            } else if let Some(text) = line.strip_prefix("data: ") {
                let event: Value = serde_json::from_str(text).unwrap();
                assert_eq!(event["type"], *kind);
                return Some((id, kind, event["data"].clone()));
            }
        }
    }
}

#[test]
fn stream_resumes_after_the_last_event_without_gap_or_repetition() {
    let running = Running::server(1);
    let mut stream = Stream::open(&running, "", &[]);
    assert!(stream.head.contains("content-type: text/event-stream\r\n"), "{}", stream.head);
    let name = "al\"ice\n\u{1}";
    running.program.events.emit("quota", &json!({ "user": name }));
    running.program.events.emit("refusal", &json!(1));
    let (first, kind, data) = stream.next().unwrap();
    assert_eq!((&*kind, &data["user"]), ("quota", &json!(name)));
    let (second, _, data) = stream.next().unwrap();
    assert_eq!((second, data), (first + 1, json!(1)));
    drop(stream);
    running.program.events.emit("drain.begin", &json!(2));
    let last = first.to_string();
    let mut again = Stream::open(&running, "", &[("Last-Event-ID", &last)]);
    assert_eq!(again.next().unwrap(), (second, "refusal".to_owned(), json!(1)));
    assert_eq!(again.next().unwrap(), (second + 1, "drain.begin".to_owned(), json!(2)));
    let mut unknown = Stream::open(&running, "", &[("Last-Event-ID", "7")]);
    assert_eq!(unknown.next().unwrap().1, "lost");
    assert_eq!(unknown.next().unwrap().0, first, "all that is left");
}

#[test]
fn stream_ends_after_the_requested_count_of_the_requested_types() {
    let running = Running::server(1);
    let mut stream = Stream::open(&running, "?count=2&types=quota,node.left", &[]);
    for kind in ["quota", "refusal", "node.joined", "node.left", "quota"] {
        running.program.events.emit(kind, &json!({}));
    }
    let kinds: Vec<String> = std::iter::from_fn(|| stream.next()).map(|(_, kind, _)| kind).collect();
    assert_eq!(kinds, ["quota", "node.left"]);
    for bad in ["?types=quotas", "?count=-1", "?kinds=quota"] {
        assert_eq!(running.get(&format!("/v1/events{bad}")).problem(400), "bad_request", "{bad}");
    }
    let answer = running.ask_tcp("GET", "/v1/events", &[("Last-Event-ID", "seven")]);
    assert_eq!(answer.problem(400), "bad_request");
    assert_eq!(Running::start(None, |_, _| ()).get("/v1/events").problem(404), "no_server");
}

#[test]
fn subscribers_are_limited_and_slots_are_reused() {
    let running = Running::server(1);
    let mut open: Vec<Stream> = (0..8).map(|_| Stream::open(&running, "", &[])).collect();
    assert_eq!(running.get("/v1/events").problem(503), "too_many_watchers");
    open.pop();
    eventually("a slot is free", || Stream::connect(&running, "", &[]).head.starts_with("http/1.1 200"));
}
