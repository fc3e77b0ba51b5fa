//! The Go library pion/turn (tests/interop/pion): v4 relays an echo through `serve` over Send and a channel, v4 and v5 relay TCP.
//! pion resolves a server's name to IPv4 only.

use crate::prelude::*;

const COUNT: u64 = 120;

fn echo(serve: &Serve, password: &str, more: &[&str]) -> Result<Finished, String> {
    let mut command = Command::new(interop_program("interop-pion", "pion-echo")?);
    command.args(["-server", &serve.address(V4).to_string(), "-user", USER, "-password", password]);
    command.args(["-count", &COUNT.to_string()]).args(more);
    Ok(Program::run(&mut command))
}

fn relays_an_echo(over: &str) {
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let serve = Serve::start(&certificate.flags());
    let authority = certificate.authority();
    let ca = authority.to_str().expect("the test's path is UTF-8");
    let ended = need!(echo(&serve, PASSWORD, &["-transport", over, "-ca", ca])).ended(0);
    let report = super::report(&ended);
    assert_eq!(report["echoed"], COUNT, "{report}");
    assert_eq!(report["mapped"], report["local"], "the path has no NAT: {report}");
    assert_eq!(report["protocol"].as_str(), (over == "tls").then_some("stun.turn"), "{report}");
    assert_eq!(report["heard_from"], serde_json::json!([report["relayed"]]), "{report}");
    eventually("every datagram is counted in both directions", || {
        serve.metrics().sum("turnpike_relayed_datagrams_total", "") == 2 * COUNT
    });
    let metrics = serve.metrics();
    let connections = ["turnpike_connections_plain_total", "turnpike_tls_handshakes_total"]
        .map(|name| metrics.sum(name, ""));
    assert_eq!(connections, [u64::from(over == "tcp"), u64::from(over == "tls")], "{}", metrics.text());
    serve.wait_for_allocations(0);
}

tests! {
    pion_relays_an_echo: relays_an_echo("udp");
    pion_relays_an_echo_over_tcp: relays_an_echo("tcp");
    pion_relays_an_echo_over_tls: relays_an_echo("tls");
}

/// Each data connection uses the nonce of the control connection, on any worker.
fn relays_tcp_both_ways(version: &str) {
    const EACH_WAY: u64 = 6;
    let serve = Serve::start(&["--workers", "3"]);
    let program = need!(interop_program("interop-pion", "pion-tcp"));
    let mut command = Command::new(program);
    command.args(["-server", &serve.address(V4).to_string(), "-user", USER, "-password", PASSWORD]);
    command.args(["-version", version, "-count", &EACH_WAY.to_string()]);
    let ended = Program::run(&mut command).ended(0);
    let report = super::report(&ended);
    assert_eq!([&report["connected"], &report["accepted"]], [EACH_WAY; 2], "{report}");
    assert_eq!(report["heard_from"], serde_json::json!([report["relayed"]]), "{report}");
    let metrics = serve.metrics();
    assert_eq!(metrics.sum("turnpike_error_responses_total", "code=\"438\""), 0, "{}", metrics.text());
    serve.wait_for_allocations(0);
}

#[test]
fn pion_4_connects_to_tcp_peers_and_accepts_them() {
    relays_tcp_both_ways("4");
}

#[test]
fn pion_5_connects_to_tcp_peers_and_accepts_them() {
    relays_tcp_both_ways("5");
}

#[test]
fn pion_with_a_wrong_password_is_refused() {
    for over in ["udp", "tcp"] {
        let mut serve = Serve::start(&[]);
        let ended = need!(echo(&serve, "wrong", &["-transport", over])).ended(4);
        let report = super::report(&ended);
        assert!(report["refused"].as_str().is_some_and(|text| text.contains("401")), "{report}");
        assert!(serve.program.line_with("credential refused").contains("wrong key"));
    }
}
