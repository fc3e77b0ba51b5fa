//! Well-behaved and misbehaving clients that request the health of a stub program over real sockets.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, duplex},
    net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream},
    sync::{Semaphore, watch},
    time::timeout,
};
use turnpike_api::{Drain, Draining, Job, Later, NotReloaded, Process, Program, Reloaded};
use turnpike_config::{AdminAccess, AdminSettings, Settings};

use super::*;
use crate::{
    changes::Changes,
    listen::BoundListener,
    program::{Owner, ServerView},
    routes,
};

const SOON: Duration = Duration::from_secs(60);

/// Short timeouts, so that tests finish quickly. The tests wait for events rather than for fixed times.
const QUICK: ConnectionLimits = ConnectionLimits {
    connections: 4,
    head: Duration::from_secs(1),
    whole: Duration::from_secs(3),
    head_bytes: 8192,
};

pub(crate) struct IdleProgram {
    metrics: String,
    draining: Arc<AtomicBool>,
    loopback: AdminAccess,
    may_reload: watch::Sender<bool>,
    reloaded: Arc<AtomicUsize>,
}

impl Default for IdleProgram {
    fn default() -> Self {
        let metrics = "turnpike_allocations{worker=\"0\"} 5\n# EOF\n".to_owned();
        Self {
            metrics,
            draining: Arc::default(),
            loopback: AdminAccess::Read,
            may_reload: watch::Sender::new(true),
            reloaded: Arc::default(),
        }
    }
}

impl Process for IdleProgram {
    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
    fn reload(&self) -> Later<'_, Result<Reloaded, NotReloaded>> {
        let (mut may_reload, reloaded) = (self.may_reload.subscribe(), Arc::clone(&self.reloaded));
        Box::pin(async move {
            let _ = may_reload.wait_for(|may| *may).await;
            reloaded.fetch_add(1, Ordering::Relaxed);
            Ok(Reloaded::default())
        })
    }
    fn drain(&self, _: Drain) -> Later<'_, Option<Draining>> {
        Box::pin(async { None })
    }
    fn log_level(&self) -> String {
        "info".to_owned()
    }
    fn set_log_level(&self, _: &str) -> Result<(), String> {
        Ok(())
    }
}

impl Program for IdleProgram {
    fn process(&self) -> &dyn Process {
        self
    }
    fn job(&self) -> Job {
        Job::Forward
    }
    fn to_toml(&self) -> String {
        String::new()
    }
    fn open(&self) -> u64 {
        0
    }
    fn metrics(&self) -> String {
        self.metrics.clone()
    }
}

impl Owner for IdleProgram {
    fn settings(&self) -> AdminSettings {
        AdminSettings {
            hosts: vec!["turn.example.org".to_owned()],
            loopback: self.loopback,
            ..Settings::default().admin
        }
    }
    fn server(&self) -> Option<ServerView> {
        None
    }
}

async fn start(program: IdleProgram, limits: ConnectionLimits) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    let router = routes::router(Arc::new(program), Changes::default(), None);
    tokio::spawn(serve(HttpListener::Tcp(listener, None), router, limits, &ADMIN, Arc::default()));
    address
}

/// Returns everything received until the connection is closed or reset.
async fn answer_to(address: SocketAddr, said: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.expect("listening");
    // The server may have closed the connection already.
    let _ = stream.write_all(said).await;
    hear_out(&mut stream).await
}

async fn hear_out(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(length) = timeout(SOON, stream.read(&mut piece)).await.expect("an end") {
        if length == 0 {
            break;
        }
        answer.extend_from_slice(&piece[..length]);
    }
    String::from_utf8(answer).expect("UTF-8")
}

async fn get_page(address: SocketAddr, path: &str) -> String {
    answer_to(address, format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).await
}

fn is_ok(answer: &str) -> bool {
    answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok\n")
}

fn closed_for(wanted: &str) -> u64 {
    ADMIN.by_reason().iter().find(|(reason, _)| *reason == wanted).expect("a reason").1
}

#[tokio::test]
async fn health_turns_from_ok_to_draining() {
    let draining = Arc::new(AtomicBool::new(false));
    let program = IdleProgram { draining: Arc::clone(&draining), ..IdleProgram::default() };
    let page = start(program, ConnectionLimits::of_one(1)).await;
    let answer = get_page(page, "/healthz").await;
    assert!(is_ok(&answer), "{answer}");
    draining.store(true, Ordering::Relaxed);
    let answer = get_page(page, "/healthz").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("draining\n"), "{answer}");
    assert!(answer.contains("retry-after: 1"), "{answer}");
}

#[tokio::test]
async fn front_page_lists_the_other_paths() {
    let answer = get_page(start(IdleProgram::default(), ConnectionLimits::of_one(1)).await, "/").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("/metrics ") && answer.contains("/healthz "), "{answer}");
}

#[tokio::test]
async fn slow_request_is_closed_and_counted() {
    let page = start(IdleProgram::default(), QUICK).await;
    let before = closed_for("no_request");
    let unfinished =
        ["", "G", "GET /metrics HTTP/1.1\r\n", "GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: y\r\n"];
    for said in unfinished {
        let answer = answer_to(page, said.as_bytes()).await;
        assert!(!answer.contains("200 OK"), "{answer}");
    }
    assert!(closed_for("no_request") >= before + unfinished.len() as u64);
    assert!(is_ok(&get_page(page, "/healthz").await));
}

#[tokio::test]
async fn slowly_arriving_headers_are_cut_off() {
    let page = start(IdleProgram::default(), QUICK).await;
    let (mut hears, mut says) = TcpStream::connect(page).await.expect("listening").into_split();
    let trickle = tokio::spawn(async move {
        says.write_all(b"GET / HTTP/1.1\r\nX: ").await.expect("open");
        while says.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let mut answer = Vec::new();
    let _ = timeout(SOON, hears.read_to_end(&mut answer)).await.expect("an end");
    timeout(SOON, trickle).await.expect("disconnected").expect("no panic");
    assert!(!answer.starts_with(b"HTTP/1.1 200"));
}

#[tokio::test]
async fn delayed_body_gets_408() {
    let page = start(IdleProgram { loopback: AdminAccess::Full, ..IdleProgram::default() }, QUICK).await;
    let before = closed_for("no_request");
    let head = "POST /v1/drain HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{";
    let answer = answer_to(page, head.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("application/problem+json"), "{answer}");
    assert!(answer.contains("\"code\":\"timeout\""), "{answer}");
    // Other tests increment the same counter, so its exact value is unknown.
    assert!(closed_for("no_request") > before);
}

#[tokio::test]
async fn unread_response_is_closed_and_counted() {
    let long = IdleProgram { metrics: "x".repeat(64 << 20), ..IdleProgram::default() };
    let page = start(long, QUICK).await;
    let before = closed_for("slow");
    let mut stream = TcpStream::connect(page).await.expect("listening");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.expect("open");
    let counted = async {
        while closed_for("slow") == before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, counted).await.expect("counted");
}

#[tokio::test]
async fn excess_connection_replaces_the_oldest_idle_one() {
    let patient = ConnectionLimits { head: SOON, whole: SOON, ..QUICK };
    let page = start(IdleProgram::default(), patient).await;
    let before = closed_for("crowded");
    let mut idle = Vec::new();
    for _ in 0..3 * patient.connections {
        idle.push(TcpStream::connect(page).await.expect("listening"));
    }
    for _ in 0..10 {
        let answer = get_page(page, "/healthz").await;
        assert!(is_ok(&answer), "{answer}");
    }
    // The oldest connections are closed; of the newest, all but one are still open.
    let (gone, there) = idle.split_at_mut(2 * patient.connections + 1);
    for stream in gone {
        assert_eq!(hear_out(stream).await, "");
    }
    for stream in there {
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.expect("open");
        let answer = hear_out(stream).await;
        assert!(is_ok(&answer), "{answer}");
    }
    assert!(closed_for("crowded") > before + 2 * patient.connections as u64);
}

const RELOAD: &[u8] = b"POST /v1/reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n";

/// A program whose reloads wait for the returned sender, and the number of completed reloads.
fn reloading() -> (IdleProgram, watch::Sender<bool>, Arc<AtomicUsize>) {
    let program = IdleProgram {
        loopback: AdminAccess::Full,
        may_reload: watch::Sender::new(false),
        ..IdleProgram::default()
    };
    let (may_reload, reloaded) = (program.may_reload.clone(), Arc::clone(&program.reloaded));
    (program, may_reload, reloaded)
}

#[tokio::test]
async fn new_connection_gets_503_while_all_are_busy() {
    let (program, may_reload, reloaded) = reloading();
    let patient = ConnectionLimits { head: SOON, whole: SOON, ..QUICK };
    let page = start(program, patient).await;
    let mut working = Vec::new();
    for _ in 0..patient.connections {
        let mut stream = TcpStream::connect(page).await.expect("listening");
        stream.write_all(RELOAD).await.expect("open");
        working.push(stream);
    }
    for _ in 0..3 {
        let answer = get_page(page, "/healthz").await;
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(answer.contains("retry-after: ") && answer.contains("application/problem+json"), "{answer}");
    }
    assert_eq!(reloaded.load(Ordering::Relaxed), 0);
    may_reload.send_replace(true);
    for mut stream in working {
        let answer = hear_out(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    assert!(is_ok(&get_page(page, "/healthz").await));
}

#[tokio::test]
async fn change_outlives_its_timeout_and_keeps_its_slot() {
    let (program, may_reload, reloaded) = reloading();
    let page = start(program, ConnectionLimits { connections: 1, ..QUICK }).await;
    assert_eq!(answer_to(page, RELOAD).await, "", "timed out");
    let answer = get_page(page, "/healthz").await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    may_reload.send_replace(true);
    while reloaded.load(Ordering::Relaxed) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(is_ok(&get_page(page, "/healthz").await));
}

#[tokio::test]
async fn half_closed_client_gets_its_response() {
    let (program, may_reload, _) = reloading();
    let page = start(program, ConnectionLimits::of_one(1)).await;
    let mut stream = TcpStream::connect(page).await.expect("listening");
    stream.write_all(RELOAD).await.expect("open");
    stream.shutdown().await.expect("open");
    // Once this request is answered, the server has seen the end of the stream.
    assert!(is_ok(&get_page(page, "/healthz").await));
    may_reload.send_replace(true);
    let answer = hear_out(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn http_errors_are_problem_details() {
    let page = start(IdleProgram::default(), QUICK).await;
    let long = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    for (said, status) in [
        (&b"GET / HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n"[..], "400"),
        (b"nonsense\r\n\r\n", "400"),
        (long.as_bytes(), "431"),
        (b"GET / HTTP/1.1\r\n", "408"),
        (b"POST /v1/reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n", "401"),
    ] {
        let answer = answer_to(page, said).await;
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(head.contains("content-type: application/problem+json"), "{answer}");
        assert!(head.contains("cache-control: no-store"), "{answer}");
        let problem: Problem = serde_json::from_str(body).expect("a problem");
        assert_eq!(problem.status.to_string(), status);
    }
}

#[tokio::test]
async fn oversized_body_is_refused_by_its_length_header() {
    let program = IdleProgram { loopback: AdminAccess::Full, ..IdleProgram::default() };
    let page = start(program, ConnectionLimits { head: SOON, whole: SOON, ..QUICK }).await;
    let head = b"POST /v1/reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n";
    let answer = answer_to(page, head).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    // A client that sends everything before it reads gets the same response.
    let whole = [&head[..], &[b'x'; 100_000]].concat();
    let answer = answer_to(page, &whole).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

/// A watcher that has received the first event.
async fn watching(page: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(page).await.expect("listening");
    let request = b"GET /v1/live/events HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(request).await.expect("open");
    hear_until(&mut stream, "event: history").await;
    stream
}

async fn hear_until(stream: &mut TcpStream, wanted: &str) {
    let mut heard = String::new();
    let mut piece = [0; 4096];
    while !heard.contains(wanted) {
        let length = timeout(SOON, stream.read(&mut piece)).await.expect("more").expect("open");
        assert!(length > 0, "the stream ended after {heard:?}");
        heard += &String::from_utf8_lossy(&piece[..length]);
    }
}

#[tokio::test]
async fn slot_of_a_disconnected_watcher_is_free_immediately() {
    let page = start(IdleProgram::default(), ConnectionLimits { connections: 9, ..QUICK }).await;
    // Connects the maximum number of watchers repeatedly, without reading in between.
    for _ in 0..5 {
        let mut all = Vec::new();
        for _ in 0..8 {
            all.push(watching(page).await);
        }
        let answer = get_page(page, "/v1/live/events").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after"), "{answer}");
        drop(all);
        // The server handles the closed connections before this one.
        assert!(is_ok(&get_page(page, "/healthz").await));
    }
}

#[tokio::test]
async fn watcher_outlives_the_timeout_and_is_not_evicted() {
    let page = start(IdleProgram::default(), QUICK).await;
    let mut watching = watching(page).await;
    let mut idle = Vec::new();
    for _ in 0..3 * QUICK.connections {
        idle.push(TcpStream::connect(page).await.expect("listening"));
        assert!(is_ok(&get_page(page, "/healthz").await));
    }
    // The fourth event arrives after more than three seconds, the timeout of other responses.
    for _ in 0..4 {
        hear_until(&mut watching, "event: live").await;
    }
}

#[tokio::test]
async fn unknown_host_name_is_refused_with_the_remedy() {
    let page = start(IdleProgram::default(), ConnectionLimits::of_one(1)).await;
    let ask = |host: &str| format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
    let refused = answer_to(page, &ask("evil.example:9641")).await;
    assert!(refused.starts_with("HTTP/1.1 421"), "{refused}");
    assert!(
        refused.contains("evil.example") && refused.contains("hosts in the section [admin]"),
        "{refused}"
    );
    assert!(!refused.contains("turnpike_allocations"), "{refused}");
    for host in [page.to_string(), "localhost".to_owned(), "turn.example.org:9641".to_owned()] {
        let answer = answer_to(page, &ask(&host)).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("turnpike_allocations"), "{answer}");
    }
    // HTTP/1.0 is used in requests written by hand, and by old monitoring programs.
    let old = answer_to(page, b"GET /metrics HTTP/1.0\r\n\r\n").await;
    assert!(old.starts_with("HTTP/1.0 200") && old.contains("turnpike_allocations"), "{old}");
}

/// Each request gets an error or a closed connection, and the interface stays available.
#[tokio::test]
async fn malformed_requests_get_an_error_and_the_interface_stays_up() {
    let page = start(IdleProgram::default(), QUICK).await;
    let head = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n";
    let many: String = (0..200).map(|n| format!("X-{n}: y\r\n")).collect();
    let cases: Vec<(&str, Vec<u8>, Option<&str>)> = vec![
        ("garbage", vec![0xFF; 400], None),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".repeat(20), None),
        ("STUN", [&[0, 1, 0, 0, 0x21, 0x12, 0xA4, 0x42][..], &[7; 12]].concat(), None),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), None),
        ("zeros", vec![0; 1000], None),
        ("a zero in a header", format!("{head}X: a\0b\r\n\r\n").into_bytes(), None),
        ("a zero in the target", b"GET /\0metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), None),
        ("a long header", format!("{head}X: {}\r\n\r\n", "x".repeat(100_000)).into_bytes(), None),
        ("a long target", format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100_000)).into_bytes(), None),
        ("many headers", format!("{head}{many}\r\n").into_bytes(), None),
        ("an unknown method", b"FETCH /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), Some("405")),
        ("no method at all", b"G@T /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), None),
        ("another method", b"DELETE /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), Some("401")),
        ("no version", b"GET /metrics\r\n\r\n".to_vec(), None),
        ("an unknown version", b"GET /metrics HTTP/9.9\r\nHost: localhost\r\n\r\n".to_vec(), None),
        ("no Host", b"GET /metrics HTTP/1.1\r\n\r\n".to_vec(), Some("400")),
        ("two Hosts", format!("{head}Host: localhost\r\n\r\n").into_bytes(), Some("400")),
        ("a header without a colon", format!("{head}nonsense\r\n\r\n").into_bytes(), None),
        ("a space before the colon", format!("{head}Content-Length : 3\r\n\r\nabc").into_bytes(), None),
        (
            "absolute form with an unknown host",
            b"GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            Some("421"),
        ),
        (
            "authority form",
            b"CONNECT evil.example:80 HTTP/1.1\r\nHost: evil.example:80\r\n\r\n".to_vec(),
            None,
        ),
        ("no such page", b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), None),
        ("a body", format!("{head}Content-Length: 5\r\n\r\nhello").into_bytes(), None),
        ("an announced but missing body", format!("{head}Content-Length: 5\r\n\r\n").into_bytes(), None),
        (
            "a huge body length",
            format!("{head}Content-Length: 18446744073709551615\r\n\r\n").into_bytes(),
            None,
        ),
        ("an invalid length", format!("{head}Content-Length: five\r\n\r\n").into_bytes(), None),
        (
            "two lengths",
            format!("{head}Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello").into_bytes(),
            None,
        ),
        (
            "both lengths",
            format!("{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n").into_bytes(),
            None,
        ),
        (
            "a wrong chunk size",
            format!("{head}Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\nx\r\n").into_bytes(),
            None,
        ),
        ("invalid chunks", format!("{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n").into_bytes(), None),
        ("an unknown encoding", format!("{head}Transfer-Encoding: smoke\r\n\r\n").into_bytes(), None),
        (
            "a body that waits for 100-continue",
            format!("{head}Expect: 100-continue\r\nContent-Length: 5\r\n\r\n").into_bytes(),
            None,
        ),
    ];
    for (what, said, expected) in cases {
        let answer = answer_to(page, &said).await;
        let status = answer.split(' ').nth(1).unwrap_or_default();
        match expected {
            Some(expected) => assert_eq!(status, expected, "{what}: {answer:?}"),
            None => assert!(status.is_empty() || status.starts_with(['4', '5']), "{what}: {answer:?}"),
        }
        assert!(!answer.contains("turnpike_allocations"), "{what}: {answer:?}");
        let next = get_page(page, "/healthz").await;
        assert!(is_ok(&next), "after {what}: {next}");
    }
}

/// Only one request per connection is handled: anything after it is ignored.
#[tokio::test]
async fn only_the_first_of_pipelined_requests_is_answered() {
    let page = start(IdleProgram::default(), QUICK).await;
    let one = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let answer = answer_to(page, one.repeat(50).as_bytes()).await;
    assert!(answer.matches("HTTP/1.1 ").count() <= 1, "{answer}");
    assert!(answer.is_empty() || answer.contains("connection: close"), "{answer}");
    assert!(is_ok(&get_page(page, "/healthz").await));
}

/// tokio's clock is paused, and advances when all tasks are idle.
#[tokio::test(start_paused = true)]
async fn stalled_watcher_is_closed_after_ten_seconds() {
    let limits = ConnectionLimits::of_one(1);
    let router = routes::router(Arc::new(IdleProgram::default()), Changes::default(), None);
    let place = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("the only permit");
    let (mut client, server) = duplex(1024);
    let said = b"GET /v1/live/events HTTP/1.1\r\nHost: localhost\r\n\r\n";
    client.write_all(said).await.expect("open");
    let begun = tokio::time::Instant::now();
    let via = Via::Loopback(([127, 0, 0, 1], 50_000).into());
    let before = closed_for("slow");
    speak(&http(limits), server, router, via, limits, RequestProgress::new(place), &ADMIN).await;
    assert!(closed_for("slow") > before);
    // The buffers in between can store about 20 s of events.
    let seconds = begun.elapsed().as_secs();
    assert!((10..35).contains(&seconds), "{seconds} s");
    drop(client);
}

/// Seconds until a client that does not read is disconnected.
async fn patience_with(stream: HttpStream) -> u64 {
    let limits = ConnectionLimits::of_one(1);
    let router = routes::router(Arc::new(IdleProgram::default()), Changes::default(), None);
    let place = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("the only permit");
    let begun = tokio::time::Instant::now();
    let before = closed_for("slow");
    answer(Arc::new(http(limits)), stream, router, limits, RequestProgress::new(place), &ADMIN).await;
    assert!(closed_for("slow") > before);
    begun.elapsed().as_secs()
}

const WATCH: &[u8] = b"GET /v1/live/events HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// The receive buffer is small, because events would take hours to fill the default one.
#[tokio::test(start_paused = true)]
async fn stalled_tcp_watcher_is_closed_after_ten_seconds() {
    let bound = BoundListener::tcp(([127, 0, 0, 1], 0).into(), None, None).expect("loopback");
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a small buffer");
    let mut client = socket.connect(bound.address().expect("bound")).await.expect("listening");
    client.write_all(WATCH).await.expect("open");
    let seconds = patience_with(bound.listener.accept().await.expect("a client")).await;
    assert!((10..120).contains(&seconds), "{seconds} s");
}

#[tokio::test(start_paused = true)]
async fn stalled_unix_watcher_is_closed_after_ten_seconds() {
    let dir = turnpike_testkit::Dir::new();
    let path = dir.at("s");
    let listener = HttpListener::Unix(UnixListener::bind(&path).expect("a short path"));
    let mut client = UnixStream::connect(&path).await.expect("listening");
    client.write_all(WATCH).await.expect("open");
    let seconds = patience_with(listener.accept().await.expect("a client")).await;
    assert!((10..60).contains(&seconds), "{seconds} s");
}
