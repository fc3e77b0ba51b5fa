//! `turnpike serve` as its operator meets it: start lines, admin page, signals, reload, clear refusals. On loopback.

mod support;

use std::{
    fs,
    io::{Read, Write},
    net::{TcpStream, UdpSocket},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use support::{PATIENCE, Server};

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the admin page listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    answer
}

/// A Binding request (RFC 8489 section 5) and the type of the answer.
fn binding(server: &str) -> u16 {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let request = *b"\x00\x01\x00\x00\x21\x12\xa4\x42turnpike-tst";
    socket.send_to(&request, server).expect("sent");
    let mut answer = [0; 1500];
    let (length, _) = socket.recv_from(&mut answer).expect("an answer");
    assert!(length >= 20 && answer[8..20] == request[8..20], "an answer to this request");
    u16::from_be_bytes([answer[0], answer[1]])
}

struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("turnpike-{name}-{}.toml", std::process::id()));
        fs::write(&path, text).expect("a temporary file");
        Self(path)
    }

    fn path(&self) -> &str {
        Path::to_str(&self.0).expect("UTF-8")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn a_server_serves_shows_itself_and_stops_when_told() {
    let mut server = Server::serve(&["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    let listener = server.wait_for("listening on udp ");
    server.wait_for("relaying on 127.0.0.1");
    server.wait_for("data path ");
    let admin = server.wait_for("admin page on http://").trim_end_matches('/').to_owned();

    assert_eq!(binding(&listener), 0x0101);
    let health = get(&admin, "/healthz");
    assert!(health.starts_with("HTTP/1.1 200") && health.ends_with("ok\n"), "{health}");

    // Snapshots are up to 100 ms old.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let metrics = get(&admin, "/metrics");
        assert!(metrics.contains("turnpike_allocations{worker=\"0\"} 0\n"), "{metrics}");
        if metrics.contains("turnpike_requests_total{worker=\"0\",method=\"binding\"} 1\n") {
            break;
        }
        assert!(Instant::now() < deadline, "{metrics}");
        thread::sleep(Duration::from_millis(20));
    }

    server.signal("TERM");
    let status = server.wait_for_exit();
    assert_eq!(status.code(), Some(0), "{}", server.seen);
    assert!(server.seen.contains("draining") && server.seen.contains("stopped"), "{}", server.seen);
    let printed = server.stdout();
    assert_eq!(printed.matches("user turnpike password ").count(), 1, "{printed}");
    let password = printed.split(' ').skip_while(|word| *word != "password").nth(1).expect("a password");
    assert_eq!(password.len(), 32, "{printed}");
    assert!(!server.seen.contains(password), "the log holds the password");
}

#[test]
fn a_reload_takes_a_good_file_and_refuses_a_bad_one() {
    let file = File::new("reload", "[auth]\nusers = [\"a:one\"]\n");
    let mut server = Server::serve(&["-c", file.path(), "--listen", "127.0.0.1:0", "--admin", "off"]);
    let listener = server.wait_for("listening on udp ");
    server.wait_for("no admin page");

    fs::write(&file.0, "[auth]\nusrs = []\n").expect("writable");
    server.signal("HUP");
    server.wait_for("auth.usrs: unknown key");
    server.wait_for("configuration not reloaded: the old one stays in force");

    fs::write(&file.0, "[auth]\nusers = [\"a:two\", \"b:x\"]\n[relay]\nports = \"50000-50999\"\n")
        .expect("writable");
    server.signal("HUP");
    server.wait_for("relay.ports has changed, but takes effect only after a restart");
    server.wait_for("configuration reloaded");
    assert_eq!(binding(&listener), 0x0101);

    server.signal("INT");
    assert_eq!(server.wait_for_exit().code(), Some(0), "{}", server.seen);
    assert_eq!(server.stdout(), "");
}

/// A server with one session that lasts, the program that holds it, and the admin address.
fn busy_server(arguments: &[&str]) -> (Server, Server, String) {
    let fixed =
        ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--allow-peer", "127.0.0.0/8", "--user", "a:b"];
    let mut server = Server::serve(&[&fixed[..], &["--log", "debug"], arguments].concat());
    let listener = server.wait_for("listening on udp ");
    let admin = server.wait_for("admin page on http://").trim_end_matches('/').to_owned();
    let peer = UdpSocket::bind("127.0.0.1:0").expect("loopback").local_addr().expect("bound").to_string();
    let client =
        Server::start(&["load", "turn", &listener, "--user", "a:b", "--peer", &peer, "--duration", "60"]);
    server.wait_for("session opened");
    (server, client, admin)
}

#[test]
fn a_drain_waits_for_sessions_until_a_second_signal() {
    let (mut server, _client, admin) = busy_server(&[]);
    server.signal("TERM");
    server.wait_for("draining: no new allocations");
    let health = get(&admin, "/healthz");
    assert!(health.starts_with("HTTP/1.1 503") && health.ends_with("draining\n"), "{health}");
    server.signal("TERM");
    assert_eq!(server.wait_for_exit().code(), Some(0), "{}", server.seen);
    assert!(server.seen.contains("second signal: stopping at once"), "{}", server.seen);
    assert!(server.seen.contains("reason=\"server stopped\""), "{}", server.seen);
}

#[test]
fn a_drain_ends_at_its_deadline() {
    let file = File::new("deadline", "[shutdown]\ndeadline = 1\n");
    let (mut server, _client, _) = busy_server(&["-c", file.path()]);
    let start = Instant::now();
    server.signal("TERM");
    assert_eq!(server.wait_for_exit().code(), Some(0), "{}", server.seen);
    assert!(start.elapsed() >= Duration::from_secs(1), "{}", server.seen);
    assert!(server.seen.contains("sessions still open are ended"), "{}", server.seen);
}

#[test]
fn a_port_in_use_is_one_sentence_with_a_remedy() {
    let taken = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let address = taken.local_addr().expect("bound").to_string();
    let mut server = Server::serve(&["--listen", &address, "--admin", "off", "--user", "a:b"]);
    assert_eq!(server.wait_for_exit().code(), Some(1), "{}", server.seen);
    let last = server.seen.lines().last().unwrap_or_default();
    assert!(last.starts_with(&format!("turnpike: cannot listen on udp {address}: ")), "{}", server.seen);
    assert!(last.contains("--listen"), "{last}");
}

#[test]
fn an_admin_address_that_was_asked_for_must_be_free() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = taken.local_addr().expect("bound").to_string();
    let mut server = Server::serve(&["--listen", "127.0.0.1:0", "--admin", &address, "--user", "a:b"]);
    assert_eq!(server.wait_for_exit().code(), Some(1), "{}", server.seen);
    let last = server.seen.lines().last().unwrap_or_default();
    assert!(last.starts_with(&format!("turnpike: cannot serve the admin page on tcp {address}: ")), "{last}");
    assert!(last.contains("--admin"), "{last}");
}
