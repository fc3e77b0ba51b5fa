//! aioice, the Python ICE library (tests/interop/aioice), relays an echo through `serve`, over a channel.

use std::{net::SocketAddr, path::Path, process::Command};

use crate::harness::{Finished, PASSWORD, Program, Serve, USER, V4, eventually, interop_program, skip};

const COUNT: u64 = 120;

/// Runs the echo, or `None` without aioice.
fn echo(server: SocketAddr, password: &str) -> Option<Finished> {
    let python = interop_program("venv/bin/python")?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/aioice/echo.py");
    let (host, port) = (server.ip().to_string(), server.port().to_string());
    let mut command = Command::new(python);
    command.arg(script).args([&host, &port, USER, password, &COUNT.to_string()]);
    Some(Program::run(&mut command))
}

#[test]
fn aioice_relays_an_echo() {
    let serve = Serve::start(&[]);
    let Some(ended) = echo(serve.address(V4), PASSWORD) else {
        return skip("aioice is not installed: ./test interop-aioice installs it");
    };
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    let report = super::report(&ended);
    assert_eq!(report["echoed"], COUNT, "{report}");
    // The peer has seen the relayed transport address and nothing else.
    assert_eq!(report["heard_from"], serde_json::json!([report["relayed"]]), "{report}");
    eventually("each datagram is counted, there and back", || {
        (serve.metrics().sum("turnpike_relayed_datagrams_total", "") == 2 * COUNT).then_some(())
    });
    serve.wait_for_allocations(0);
}

#[test]
fn aioice_with_a_wrong_password_is_refused() {
    let mut serve = Serve::start(&[]);
    let Some(ended) = echo(serve.address(V4), "wrong") else {
        return skip("aioice is not installed: ./test interop-aioice installs it");
    };
    assert_eq!(ended.code, Some(4), "{}", ended.output());
    assert_eq!(super::report(&ended)["refused"], 401);
    assert!(serve.program.line_with("credential refused").contains("wrong key"));
}
