//! SIGTERM: no new connections, existing ones go on until they end or the deadline is over; a second signal ends at once.

use std::{
    io::Read,
    net::TcpStream,
    time::{Duration, Instant},
};

use super::harness::{Dir, Forward, SOON, connect, eventually, say, tcp_echo};

fn start() -> (Forward, std::net::SocketAddr) {
    let mut forward = Forward::start(&[&format!("tcp://127.0.0.1:0={}?name=a", tcp_echo())]);
    let address = forward.address("rule a");
    (forward, address)
}

fn drain(forward: &Forward, address: std::net::SocketAddr) {
    forward.program.signal("TERM");
    eventually("/healthz says that it drains", || (forward.health() == Some(503)).then_some(()));
    eventually("the listener is closed", || TcpStream::connect(address).is_err().then_some(()));
}

#[test]
fn existing_connections_go_on_and_it_ends_with_the_last() {
    let (forward, address) = start();
    let mut stream = connect(address);
    assert_eq!(say(&mut stream, "before"), "before");
    drain(&forward, address);
    assert_eq!(say(&mut stream, "while draining"), "while draining");
    drop(stream);
    let Forward { program, .. } = forward;
    let ended = program.wait(SOON);
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    assert!(ended.stderr.contains("reason=\"finished\""), "{}", ended.stderr);
}

#[test]
fn without_connections_it_ends_at_once() {
    let (forward, _) = start();
    forward.program.signal("TERM");
    let Forward { program, .. } = forward;
    assert_eq!(program.wait(Duration::from_secs(10)).code, Some(0));
}

#[test]
fn a_second_signal_ends_the_connections() {
    let (forward, address) = start();
    let mut stream = connect(address);
    assert_eq!(say(&mut stream, "before"), "before");
    drain(&forward, address);
    let began = Instant::now();
    forward.program.signal("TERM");
    let Forward { program, .. } = forward;
    let ended = program.wait(SOON);
    // The deadline of the first signal is 30 s.
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    assert!(ended.stderr.contains("ended with its rule or with the forwarder"), "{}", ended.stderr);
    assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
}

#[test]
fn the_deadline_ends_the_connections() {
    let dir = Dir::new();
    dir.file(
        "f.toml",
        &format!(
            "[shutdown]\ndeadline = 1\n[[rule]]\nname = \"a\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{}\"\n",
            tcp_echo()
        ),
    );
    let mut forward = Forward::start_in(dir, &["-c", "f.toml"]);
    let address = forward.address("rule a");
    let mut stream = connect(address);
    assert_eq!(say(&mut stream, "before"), "before");
    let began = Instant::now();
    forward.program.signal("TERM");
    let Forward { program, .. } = forward;
    let ended = program.wait(SOON);
    assert!(began.elapsed() > Duration::from_millis(900), "{:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert_eq!(ended.code, Some(0), "{}", ended.output());
}
