//! The Python ICE library aioice (tests/interop/aioice) relays an echo through `serve` over a channel.

use crate::prelude::*;

const COUNT: u64 = 120;

fn echo(
    serve: &Serve,
    family: IpAddr,
    over: &str,
    trusted: Option<PathBuf>,
    password: &str,
) -> Result<Finished, String> {
    Ok(Program::run(&mut command(serve, family, over, trusted, password)?))
}

fn command(
    serve: &Serve,
    family: IpAddr,
    over: &str,
    trusted: Option<PathBuf>,
    password: &str,
) -> Result<Command, String> {
    let python = interop_program("interop-aioice", "venv/bin/python")?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/aioice/echo.py");
    let server = serve.address(family);
    let (host, port) = (server.ip().to_string(), server.port().to_string());
    let mut command = Command::new(python);
    command.arg(script).args([&host, &port, USER, password, &COUNT.to_string(), over]);
    match trusted {
        Some(file) => command.env("SSL_CERT_FILE", file),
        None => command.env_remove("SSL_CERT_FILE"),
    };
    Ok(command)
}

fn relays_an_echo(over: &str, family: IpAddr) {
    need!(loopback_of(family));
    let certificate = Certificate::of_authority(&["127.0.0.1", "::1"]);
    let serve = Serve::start(&certificate.flags());
    let ended = need!(echo(&serve, family, over, Some(certificate.authority()), PASSWORD)).ended(0);
    let report = super::report(&ended);
    assert_eq!(report["echoed"], COUNT, "{report}");
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

#[test]
fn aioice_relays_an_echo() {
    relays_an_echo("udp", V4);
}

#[test]
fn aioice_relays_an_echo_over_tcp() {
    relays_an_echo("tcp", V4);
    relays_an_echo("tcp", V6);
}

#[test]
fn aioice_relays_an_echo_over_tls() {
    relays_an_echo("tls", V4);
    relays_an_echo("tls", V6);
}

/// Binds a channel with an expired nonce, and deletes its allocation.
#[test]
fn aioice_retries_with_the_nonce_of_a_438() {
    for over in ["udp", "tcp"] {
        let serve = Serve::start(&[]);
        let ended = Program::run(need!(command(&serve, V4, over, None, PASSWORD)).env("STALE", "1")).ended(0);
        assert_eq!(super::report(&ended)["echoed"], COUNT, "{}", ended.output());
        let stale = || serve.metrics().sum("turnpike_error_responses_total", "code=\"438\"");
        eventually("the 438 is counted", || stale() == 1);
        serve.wait_for_allocations(0);
    }
}

#[test]
fn aioice_with_a_wrong_password_is_refused() {
    for over in ["udp", "tcp"] {
        let mut serve = Serve::start(&[]);
        let ended = need!(echo(&serve, V4, over, None, "wrong")).ended(4);
        assert_eq!(super::report(&ended)["refused"], 401);
        assert!(serve.program.line_with("credential refused").contains("wrong key"));
    }
}

#[test]
fn aioice_with_an_untrusted_certificate_disconnects() {
    let [certificate, other] = [(), ()].map(|()| Certificate::of_authority(&["127.0.0.1"]));
    let serve = Serve::start(&certificate.flags());
    need!(echo(&serve, V4, "tls", Some(other.authority()), PASSWORD)).ended(5);
    // asyncio closes the socket before OpenSSL sends its alert.
    eventually("the failed handshake is counted", || {
        let metrics = serve.metrics();
        let failed = metrics.sum("turnpike_tls_handshakes_failed_total", "");
        failed == 1 && metrics.sum("turnpike_connections", "") == 0
    });
}
