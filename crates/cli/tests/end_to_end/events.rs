//! Events of the running server, at a webhook and in the stream of the admin interface.

use crate::prelude::*;
use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    pki_types::{PrivateKeyDer, pem::PemObject as _},
};
use std::{
    io::{BufRead, BufReader},
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
};

const SECRET: &str = "0123456789abcdef";
const ALLOCATIONS: &str = "allocation.begin,allocation.end";

/// Accepts every request and passes on its signature and body.
fn receiver() -> (SocketAddr, Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let at = listener.local_addr().expect("bound");
    let (sender, requests) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut input = BufReader::new(stream);
            while let Some(request) = request(&mut input) {
                let answered = input.get_mut().write_all(b"HTTP/1.1 204 No Content\r\n\r\n");
                if answered.is_err() || sender.send(request).is_err() {
                    break;
                }
            }
        }
    });
    (at, requests)
}

fn request(input: &mut impl BufRead) -> Option<(String, Vec<u8>)> {
    let (mut signature, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if input.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim().split_once(": ") {
            Some((name, value)) if name.eq_ignore_ascii_case("turnpike-signature") => {
                value.clone_into(&mut signature);
            }
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = value.parse().ok()?;
            }
            Some(_) => {}
            None if line.trim().is_empty() => break,
            None => {}
        }
    }
    let mut body = vec![0; length];
    input.read_exact(&mut body).ok()?;
    Some((signature, body))
}

fn serve_with(dir: &Dir, at: SocketAddr) -> Serve {
    let state = dir.path().join("state");
    let file = dir.file(
        "turnpike.toml",
        format!(
            "[store]\nstate = {state:?}\n[events]\nallow_private = true\n[[events.webhook]]\n\
             url = \"http://{at}/hook\"\nsecret = \"{SECRET}\"\n"
        ),
    );
    Serve::start(&["--config", file.to_str().expect("UTF-8")])
}

/// Subscribes to events of these types.
pub(crate) fn stream(admin: SocketAddr, types: &str, headers: &str) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(admin).expect("the admin interface listens");
    stream.set_read_timeout(Some(SOON)).expect("a timeout");
    write!(stream, "GET /v1/events?types={types} HTTP/1.1\r\nHost: {admin}\r\n{headers}\r\n")
        .expect("it reads");
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    while line.trim() != ": events" {
        line.clear();
        assert!(lines.read_line(&mut line).expect("a line") > 0, "the stream begins");
    }
    lines
}

/// Id and content of the next event; lines between events are chunk framing.
pub(crate) fn next(stream: &mut BufReader<TcpStream>) -> (u64, Value) {
    let mut id = None;
    loop {
        let mut line = String::new();
        assert!(stream.read_line(&mut line).expect("a line") > 0, "the stream goes on");
        if let Some(number) = line.strip_prefix("id: ") {
            id = number.trim().parse().ok();
        }
        if let Some(data) = line.strip_prefix("data: ") {
            return (id.expect("an id"), serde_json::from_str(data).expect("JSON"));
        }
    }
}

#[test]
fn begin_and_end_of_an_allocation_reach_webhook_and_stream() {
    let dir = Dir::new();
    let (at, requests) = receiver();
    let mut serve = serve_with(&dir, at);
    let mut events = stream(serve.admin(), ALLOCATIONS, "");
    let reflect = Reflect::start(V4, &[]);
    serve.load(&reflect).with("--clients 1 --rate 200 --size 120 --duration 1").run().ended(0);
    let (first, begin) = next(&mut events);
    let (second, end) = next(&mut events);
    assert_eq!(second, first + 1, "without a gap");
    assert_eq!((&begin["type"], &end["type"]), (&json!("allocation.begin"), &json!("allocation.end")));
    for member in ["id", "realm", "user", "client", "server", "relayed"] {
        assert_eq!(begin["data"][member], end["data"][member], "{member}");
    }
    assert_eq!((&end["data"]["user"], &end["data"]["reason"]), (&json!(USER), &json!("deleted")));
    for direction in ["to_peer", "to_client"] {
        let traffic = &end["data"][direction];
        eventually(&format!("the metrics agree: {end}"), || {
            let metrics = serve.metrics();
            let total = |name: &str| metrics.sum(name, &format!("direction=\"{direction}\""));
            traffic["datagrams"] == total("turnpike_relayed_datagrams_total")
                && traffic["bytes"] == total("turnpike_relayed_bytes_total")
        });
        assert!(traffic["datagrams"].as_u64().is_some_and(|datagrams| datagrams > 100), "{end}");
    }
    // A subscriber that returns gets the events that it missed.
    drop(events);
    let mut resumed = stream(serve.admin(), ALLOCATIONS, &format!("Last-Event-ID: {first}\r\n"));
    assert_eq!(next(&mut resumed), (second, end.clone()));
    let received: Vec<Value> = (1..=2)
        .map(|number| {
            let (signature, body) = requests.recv_timeout(SOON).expect("a request");
            assert!(signature.starts_with("t=") && signature.contains(",v1="), "{signature}");
            let event: Value = serde_json::from_slice(&body).expect("JSON");
            assert_eq!(event["sequence"], format!("{number:020}"));
            event
        })
        .collect();
    assert_eq!(received[0]["data"], begin["data"]);
    assert_eq!(received[1]["data"], end["data"]);
    eventually("they are counted", || serve.metrics().sum("turnpike_webhook_events_total", "") == 2);
    serve.program.signal("TERM");
    serve.program.line_with("stopped");
    let last: Vec<Value> = requests
        .try_iter()
        .map(|(_, body)| serde_json::from_slice::<Value>(&body).expect("JSON")["type"].clone())
        .collect();
    assert_eq!(last, ["drain.begin", "drain.end"]);
}

/// Accepts TLS and answers each request; returns the requests' bodies.
fn secure_receiver(certificate: &Certificate) -> (u16, Receiver<Vec<u8>>) {
    let key = PrivateKeyDer::from_pem_file(certificate.key()).expect("a key");
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions of TLS")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der()], key)
        .expect("the key belongs to the certificate");
    let config = Arc::new(config);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let (sender, bodies) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let connection = ServerConnection::new(Arc::clone(&config)).expect("a valid configuration");
            let mut input = BufReader::new(StreamOwned::new(connection, stream));
            while let Some((_, body)) = request(&mut input) {
                let answered = input.get_mut().write_all(b"HTTP/1.1 204 No Content\r\n\r\n");
                if answered.is_err() || sender.send(body).is_err() {
                    break;
                }
            }
        }
    });
    (port, bodies)
}

#[test]
fn https_webhooks_verify_the_receiver() {
    let certificate = Certificate::of_authority(&["localhost"]);
    let other = Certificate::of_authority(&["localhost"]);
    let (port, bodies) = secure_receiver(&certificate);
    let dir = Dir::new();
    let start = |case: &str, name: &str, trusted: &Certificate| {
        let state = dir.path().join(case);
        let file = dir.file(
            &format!("{case}.toml"),
            format!(
                "[store]\nstate = {state:?}\n[events]\nallow_private = true\n[[events.webhook]]\n\
                 url = \"https://{name}:{port}/hook\"\nsecret = \"{SECRET}\"\n"
            ),
        );
        let authority = trusted.authority();
        let serve = Serve::start_in_environment(
            &["--config", file.to_str().expect("UTF-8")],
            &[("SSL_CERT_FILE", &authority)],
        );
        let reflect = Reflect::start(V4, &[]);
        serve.load(&reflect).with("--clients 1 --rate 50 --duration 1").run().ended(0);
        serve
    };
    for (case, name, trusted) in [("name", "127.0.0.1", &certificate), ("authority", "localhost", &other)] {
        let mut serve = start(case, name, trusted);
        let line = serve.program.line_with(&format!("webhook {name}:{port}: "));
        assert!(line.contains("TLS: invalid peer certificate"), "{line}");
        eventually("both events wait", || serve.metrics().sum("turnpike_webhook_waiting", "") == 2);
        assert!(bodies.try_recv().is_err(), "{case}");
    }
    let _serve = start("right", "localhost", &certificate);
    for kind in ["allocation.begin", "allocation.end"] {
        let body = bodies.recv_timeout(SOON).expect("a request");
        let event: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(event["type"], kind);
    }
}

#[test]
fn events_of_a_killed_server_are_delivered_after_its_restart() {
    let dir = Dir::new();
    let closed = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let at = closed.local_addr().expect("bound");
    let serve = serve_with(&dir, at);
    let reflect = Reflect::start(V4, &[]);
    serve.load(&reflect).with("--clients 5 --rate 50 --duration 1").run().ended(0);
    eventually("both events of all five", || serve.metrics().sum("turnpike_webhook_waiting", "") == 10);
    drop(serve);
    drop(closed);
    let listener = TcpListener::bind(at).expect("the port is free again");
    let _serve = serve_with(&dir, at);
    let (stream, _) = listener.accept().expect("a connection");
    stream.set_read_timeout(Some(SOON)).expect("a timeout");
    let mut input = BufReader::new(stream);
    for number in 1..=10 {
        let (_, body) = request(&mut input).expect("a request");
        let event: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(event["sequence"], format!("{number:020}"), "{event}");
        input.get_mut().write_all(b"HTTP/1.1 204 No Content\r\n\r\n").expect("it reads");
    }
}
