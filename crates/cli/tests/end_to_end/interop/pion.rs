//! pion/turn v4, the Go library (tests/interop/pion), relays an echo through `serve`, by Send and over a channel.

use std::{net::SocketAddr, process::Command};

use crate::harness::{Finished, PASSWORD, Program, Serve, USER, V4, eventually, interop_program, skip};

const COUNT: u64 = 120;

/// Runs the echo, or `None` without the helper.
fn echo(server: SocketAddr, password: &str) -> Option<Finished> {
    let mut command = Command::new(interop_program("pion-echo")?);
    command.args(["-server", &server.to_string(), "-user", USER, "-password", password]);
    command.args(["-count", &COUNT.to_string()]);
    Some(Program::run(&mut command))
}

#[test]
fn pion_relays_an_echo() {
    let serve = Serve::start(&[]);
    let Some(ended) = echo(serve.address(V4), PASSWORD) else {
        return skip("the pion helper is not built: ./test interop-pion builds it");
    };
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    let report = super::report(&ended);
    assert_eq!(report["echoed"], COUNT, "{report}");
    assert_eq!(report["mapped"], report["local"], "no NAT stands between: {report}");
    // The peer has seen the relayed transport address and nothing else.
    assert_eq!(report["heard_from"], serde_json::json!([report["relayed"]]), "{report}");
    eventually("each datagram is counted, there and back", || {
        (serve.metrics().sum("turnpike_relayed_datagrams_total", "") == 2 * COUNT).then_some(())
    });
    serve.wait_for_allocations(0);
}

#[test]
fn pion_with_a_wrong_password_is_refused() {
    let mut serve = Serve::start(&[]);
    let Some(ended) = echo(serve.address(V4), "wrong") else {
        return skip("the pion helper is not built: ./test interop-pion builds it");
    };
    assert_eq!(ended.code, Some(4), "{}", ended.output());
    let report = super::report(&ended);
    assert!(report["refused"].as_str().is_some_and(|text| text.contains("401")), "{report}");
    assert!(serve.program.line_with("credential refused").contains("wrong key"));
}
