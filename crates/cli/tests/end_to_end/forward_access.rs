//! A denied client is closed at once, counted and logged; a stranger's tries do not fill the log.

use std::{
    io::{ErrorKind, Read},
    net::{SocketAddr, TcpStream},
};

use turnpike_trials::{Forward, SOON, connect, eventually, say, tcp_echo};

/// That the other side closes without a byte, in whatever way.
fn is_closed(address: SocketAddr) {
    let mut stream = match TcpStream::connect_timeout(&address, SOON) {
        Ok(stream) => stream,
        // It may come before connect(2) has returned.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
        Err(error) => panic!("nobody listens at {address}: {error}"),
    };
    stream.set_read_timeout(Some(SOON)).expect("not zero");
    assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)), "a denied client got a byte");
}

#[test]
fn a_denied_client_is_closed_and_counted() {
    let target = tcp_echo();
    let mut forward = Forward::start(&[
        &format!("tcp://127.0.0.1:0={target}?name=denied&deny=127.0.0.?"),
        &format!("tcp://127.0.0.1:0={target}?name=elsewhere&allow=10.*,192.168.0.0/16"),
        &format!("tcp://127.0.0.1:0={target}?name=allowed&allow=127.*"),
    ]);
    for rule in ["denied", "elsewhere"] {
        is_closed(forward.address(&format!("rule {rule}")));
        let label = format!("rule=\"{rule}\",reason=\"denied\"");
        forward.wait_for("turnpike_forward_ended_total", &label, 1);
        let line = forward.program.line_with(&format!("connection refused rule={rule} "));
        assert!(line.contains("client=127.0.0.1:") && line.contains("reason=\"denied\""), "{line}");
        let by = if rule == "denied" { "deny 127.0.0.?" } else { "default: no allow pattern matches" };
        assert!(line.contains(&format!("by=\"{by}\"")), "{line}");
    }
    let allowed = forward.address("rule allowed");
    assert_eq!(say(&mut connect(allowed), "let in"), "let in");
    forward.wait_for("turnpike_forward_ended_total", "rule=\"allowed\",reason=\"denied\"", 0);
}

#[test]
fn a_flood_of_denied_clients_is_counted_and_logged_in_part() {
    let mut forward = Forward::start(&[&format!("tcp://127.0.0.1:0={}?name=a&deny=*", tcp_echo())]);
    let address = forward.address("rule a");
    for _ in 0..200 {
        is_closed(address);
    }
    forward.wait_for("turnpike_forward_ended_total", "rule=\"a\",reason=\"denied\"", 200);
    let refused =
        || forward.program.lines().iter().filter(|line| line.contains("connection refused")).count();
    let lines = eventually("refusals are logged", || Some(refused()).filter(|lines| *lines >= 20));
    assert!(lines < 100, "{lines} lines");
}
