//! What the log says of UDP sessions that strangers can make in any number: bounded, and still true.

use std::net::UdpSocket;

use turnpike_trials::{Forward, V4, eventually, say_udp, udp_echo};

fn lines_with(forward: &Forward, text: &str) -> Vec<String> {
    forward.program.lines().into_iter().filter(|line| line.contains(text)).collect()
}

#[test]
fn a_udp_target_where_nobody_listens_is_told_once_by_its_address() {
    let dead = UdpSocket::bind((V4, 0)).expect("a free port").local_addr().expect("it is bound");
    let mut forward = Forward::start(&[&format!("udp://127.0.0.1:0={dead}?name=a")]);
    let at = forward.address("rule a");
    let client = UdpSocket::bind((V4, 0)).expect("a free port");
    eventually("many sessions are refused", || {
        client.send_to(b"x", at).expect("loopback takes a datagram");
        (forward.metrics().sum("turnpike_forward_ended_total", "rule=\"a\",reason=\"connect_failed\"") >= 30)
            .then_some(())
    });
    let told = forward.program.line_with("target unreachable");
    assert!(
        told.contains("WARN") && told.contains(&dead.to_string()) && told.contains("suppressed=0"),
        "{told}"
    );
    // The log is behind by less than a line of something else.
    let dropped = "turnpike_forward_dropped_datagrams_total";
    assert_eq!(forward.metrics().sum(dropped, "rule=\"a\""), 0);
    forward.program.signal("TERM");
    forward.program.line_with("stopped");
    assert_eq!(lines_with(&forward, "unreachable").len(), 1);
    assert!(lines_with(&forward, "connection ended").is_empty());
}

#[test]
fn a_session_that_gives_way_is_told_with_what_it_has_moved_and_not_as_refused() {
    // A worker can end its own sessions only.
    let target = udp_echo();
    let rule = format!("udp://127.0.0.1:0={target}?name=a&max_connections=1");
    let mut forward = Forward::start(&["--workers", "1", &rule]);
    let at = forward.address("rule a");
    assert_eq!(say_udp(at, "first"), "first");
    assert_eq!(say_udp(at, "second"), "second");
    let told = forward.program.line_with("session evicted");
    for text in [
        "to_target_bytes=5",
        "to_client_bytes=5",
        "client=127.0.0.1:",
        &format!("to={target}"),
        "longest idle when a limit",
    ] {
        assert!(told.contains(text), "{text} in {told}");
    }
    forward.wait_for("turnpike_forward_ended_total", "rule=\"a\",reason=\"evicted\"", 1);
    forward.wait_for("turnpike_forward_ended_total", "rule=\"a\",reason=\"limit\"", 0);
    assert!(lines_with(&forward, "connection refused").is_empty());
}
