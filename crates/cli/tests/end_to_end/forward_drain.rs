//! SIGTERM: no new connections; existing ones continue until they end or the deadline passes; a second
//! signal makes the forwarder exit immediately.

use crate::prelude::*;

/// Starts a forwarder with a rule `a` to a TCP or UDP echo, and with this shutdown deadline in seconds.
fn start(protocol: &str, deadline: u32) -> (Forward, SocketAddr) {
    let target = if protocol == "udp" { udp_echo() } else { tcp_echo() };
    let dir = Dir::new();
    dir.file(
        "f.toml",
        format!(
            "[shutdown]\ndeadline = {deadline}\n[[rule]]\nname = \"a\"\nprotocol = \"{protocol}\"\n\
             listen = \"127.0.0.1:0\"\ntarget = \"{target}\"\n"
        ),
    );
    let mut forward = Forward::start_in(dir, &["-c", "f.toml"]);
    let address = forward.address("rule a");
    (forward, address)
}

const EVER: u32 = 86_400;

fn drain(forward: &Forward, address: SocketAddr) {
    forward.program.signal("TERM");
    eventually("/healthz reports draining", || forward.health() == Some(503));
    eventually("the listener is closed", || TcpStream::connect(address).is_err());
}

#[test]
fn existing_connections_continue_until_the_last_ends() {
    let (forward, address) = start("tcp", EVER);
    let mut stream = connect(address);
    assert_eq!(say(&mut stream, "before"), "before");
    drain(&forward, address);
    assert_eq!(say(&mut stream, "while draining"), "while draining");
    drop(stream);
    let Forward { program, .. } = forward;
    program.wait(SOON).ended(0).says("reason=\"finished\"");
}

#[test]
fn forwarder_without_connections_exits_immediately() {
    let (forward, _) = start("tcp", EVER);
    forward.program.signal("TERM");
    let Forward { program, .. } = forward;
    assert_eq!(program.wait(SOON).code, Some(0));
}

#[test]
fn second_signal_ends_the_connections() {
    let (forward, address) = start("tcp", EVER);
    let mut stream = connect(address);
    assert_eq!(say(&mut stream, "before"), "before");
    drain(&forward, address);
    forward.program.signal("TERM");
    let Forward { program, .. } = forward;
    program.wait(SOON).ended(0).says("the rule was removed or the forwarder stopped");
    assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
}

#[test]
fn deadline_ends_the_connections() {
    let (forward, address) = start("tcp", 1);
    let mut stream = connect(address);
    assert_eq!(say(&mut stream, "before"), "before");
    forward.program.signal("TERM");
    let Forward { program, .. } = forward;
    program.wait(SOON).ended(0).says("ending the connections still open");
}

fn named(name: &'static str) -> SocketAddr {
    let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    let address = socket.local_addr().expect("the socket is bound");
    thread::spawn(move || {
        while let Ok((_, client)) = socket.recv_from(&mut [0; 64]) {
            let _ = socket.send_to(name.as_bytes(), client);
        }
    });
    address
}

fn udp_client(address: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    socket.connect(address).expect("loopback is reachable");
    // One datagram may be lost while workers close their sockets.
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("not zero");
    socket
}

fn ask(socket: &UdpSocket) -> String {
    let mut name = [0; 64];
    let len = eventually("an answer", || {
        socket.send(b"who?").expect("loopback accepts a datagram");
        socket.recv(&mut name).ok()
    });
    String::from_utf8_lossy(&name[..len]).into_owned()
}

/// UDP has no end marker; if the drain waited for the session, only the idle timeout of 72 seconds would end
/// it.
#[test]
fn idle_udp_session_does_not_delay_the_exit() {
    let (forward, address) = start("udp", EVER);
    assert_eq!(say_udp(address, "hello"), "hello");
    forward.program.signal("TERM");
    let Forward { program, .. } = forward;
    let ended = program.wait(SOON).ended(0);
    assert!(!ended.stderr.contains("ending the connections still open"), "{}", ended.stderr);
}

#[test]
fn next_forwarder_binds_the_udp_port_while_the_old_one_drains() {
    let port = free_port(V4);
    let rule = |target: SocketAddr| format!("udp://127.0.0.1:{port}={target}?name=a");
    let first = Forward::start(&[&rule(named("first")), "--workers", "2"]);
    let at = SocketAddr::from(([127, 0, 0, 1], port));
    let quiet = udp_client(at);
    assert_eq!(ask(&quiet), "first");
    let talking = udp_client(at);
    (0..10).for_each(|_| assert_eq!(ask(&talking), "first"));
    first.program.signal("TERM");
    eventually("/healthz reports draining", || first.health() == Some(503));

    let mut second = Forward::start(&[&rule(named("second"))]);
    second.program.line_with("listening on udp");
    assert_eq!(ask(&udp_client(at)), "second");
    (0..100).for_each(|_| assert_eq!(ask(&talking), "first"));
    let Forward { program, .. } = first;
    program.wait(SOON).ended(0);
    for client in [talking, quiet] {
        // The first process's last answers may still be unread.
        eventually("the next process serves the client", || ask(&client) == "second");
    }
}

#[test]
fn taken_udp_port_is_reported() {
    let mut forward = Forward::start(&[&format!("udp://127.0.0.1:0={}?name=a", udp_echo())]);
    let at = forward.address("rule a");
    assert_eq!(say_udp(at, "hello"), "hello");
    let mut other = turnpike_trials::Program::start(&mut turnpike_trials::turnpike(&[
        "forward",
        &format!("udp://{at}=127.0.0.1:9"),
        "--admin",
        "off",
    ]));
    other.line_with("another program or listener has this port");
    assert_eq!(other.wait(SOON).code, Some(1));
}
