//! pion/turn v4, the Go library (tests/interop/pion), relays an echo through `serve`, by Send and over a channel. It
//! resolves a server's address as IPv4 alone.

use std::process::Command;

use crate::harness::{
    Certificate, Finished, PASSWORD, Program, Serve, USER, V4, eventually, interop_program, skip,
};

const COUNT: u64 = 120;
const MISSING: &str = "the pion helper is not built: ./test interop-pion builds it";

/// Runs the echo, or `None` without the helper.
fn echo(serve: &Serve, password: &str, more: &[&str]) -> Option<Finished> {
    let mut command = Command::new(interop_program("pion-echo")?);
    command.args(["-server", &serve.address(V4).to_string(), "-user", USER, "-password", password]);
    command.args(["-count", &COUNT.to_string()]).args(more);
    Some(Program::run(&mut command))
}

fn relays_an_echo(over: &str) {
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let serve = Serve::start(&certificate.flags());
    let authority = certificate.authority();
    let ca = authority.to_str().expect("our own path is UTF-8");
    let Some(ended) = echo(&serve, PASSWORD, &["-transport", over, "-ca", ca]) else {
        return skip(MISSING);
    };
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    let report = super::report(&ended);
    assert_eq!(report["echoed"], COUNT, "{report}");
    assert_eq!(report["mapped"], report["local"], "no NAT stands between: {report}");
    assert_eq!(report["protocol"].as_str(), (over == "tls").then_some("stun.turn"), "{report}");
    // The peer has seen the relayed transport address and nothing else.
    assert_eq!(report["heard_from"], serde_json::json!([report["relayed"]]), "{report}");
    eventually("each datagram is counted, there and back", || {
        (serve.metrics().sum("turnpike_relayed_datagrams_total", "") == 2 * COUNT).then_some(())
    });
    let metrics = serve.metrics();
    let connections = ["turnpike_connections_plain_total", "turnpike_tls_handshakes_total"]
        .map(|name| metrics.sum(name, ""));
    assert_eq!(connections, [u64::from(over == "tcp"), u64::from(over == "tls")], "{}", metrics.text());
    serve.wait_for_allocations(0);
}

#[test]
fn pion_relays_an_echo() {
    relays_an_echo("udp");
}

#[test]
fn pion_relays_an_echo_over_tcp() {
    relays_an_echo("tcp");
}

#[test]
fn pion_relays_an_echo_over_tls() {
    relays_an_echo("tls");
}

#[test]
fn pion_with_a_wrong_password_is_refused() {
    for over in ["udp", "tcp"] {
        let mut serve = Serve::start(&[]);
        let Some(ended) = echo(&serve, "wrong", &["-transport", over]) else { return skip(MISSING) };
        assert_eq!(ended.code, Some(4), "{}", ended.output());
        let report = super::report(&ended);
        assert!(report["refused"].as_str().is_some_and(|text| text.contains("401")), "{report}");
        assert!(serve.program.line_with("credential refused").contains("wrong key"));
    }
}
