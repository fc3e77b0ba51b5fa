//! WebRTC libraries for Node (tests/interop/node): two peer connections that can only connect through `serve`, with a data channel.

use crate::prelude::*;

const COUNT: u64 = 49;

/// Runs the echo if the libraries are installed. `target/interop/node-command` links to the Node that `./test` found.
fn echo(
    library: &str,
    serve: &Serve,
    family: IpAddr,
    over: &str,
    certificate: &Certificate,
) -> Result<Finished, String> {
    let node = interop_program("interop-node", "node-command")?;
    let libraries = interop_program("interop-node", "node-modules/installed.json")?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/node/echo.mjs");
    let (scheme, transport) = if over == "tls" { ("turns", "tcp") } else { ("turn", over) };
    let uri = format!("{scheme}:{}?transport={transport}", serve.address(family));
    let mut command = Command::new(node);
    command.arg(script).args([library, &uri, USER, PASSWORD, &COUNT.to_string()]);
    command.current_dir(libraries.with_file_name("")).env("NODE_EXTRA_CA_CERTS", certificate.authority());
    Ok(Program::run(&mut command))
}

fn relays_an_echo(library: &str, over: &str, family: IpAddr) {
    need!(loopback_of(family));
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let serve = Serve::start(&certificate.flags());
    let ended = need!(echo(library, &serve, family, over, &certificate));
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.output(), serve.metrics().text());
    let report = super::report(&ended);
    assert_eq!(report["echoed"], COUNT, "{report}");
    assert_eq!(report["candidates"], serde_json::json!(["relay"]), "{report}");
    let metrics = serve.metrics();
    for direction in ["to_peer", "to_client"] {
        let relayed = metrics.sum("turnpike_relayed_datagrams_total", &format!("direction=\"{direction}\""));
        // All candidates are relayed ones, but libjuice may discover the other end's socket (a peer-reflexive candidate) and
        // continue without the relay.
        let least = if library == "node-datachannel" { 1 } else { COUNT };
        assert!(relayed >= least, "{direction}: {relayed} of {COUNT}\n{}", metrics.text());
    }
    let connections = ["turnpike_connections_plain_total", "turnpike_tls_handshakes_total"]
        .map(|name| metrics.sum(name, ""));
    let two_if = |what| if over == what { 2 } else { 0 };
    assert_eq!(connections, [two_if("tcp"), two_if("tls")], "{}", metrics.text());
    if over != "udp" {
        // Over UDP an allocation may outlive a program that exits early; over TCP it ends with the connection.
        serve.wait_for_allocations(0);
    }
}

#[test]
fn werift_relays_an_echo_over_udp() {
    relays_an_echo("werift", "udp", V4);
    relays_an_echo("werift", "udp", V6);
}

#[test]
fn werift_relays_an_echo_over_tcp() {
    relays_an_echo("werift", "tcp", V4);
    relays_an_echo("werift", "tcp", V6);
}

/// IPv4 only: Node 24 does not match an IPv6 address in a certificate, and not every machine has a name for ::1.
#[test]
fn werift_relays_an_echo_over_tls() {
    relays_an_echo("werift", "tls", V4);
}

/// UDP and IPv4 only: libjuice supports no other transport, and no IPv6 address in a URI.
#[test]
fn node_datachannel_relays_an_echo_over_udp() {
    relays_an_echo("node-datachannel", "udp", V4);
}

/// Twilio's library only needs another URL, and its credential is good for an allocation.
#[test]
fn twilio_library_gets_a_credential() {
    let node = need!(interop_program("interop-node", "node-command"));
    let libraries = need!(interop_program("interop-node", "node-modules/installed.json"));
    let dir = Dir::new();
    let state = dir.at("state").display().to_string();
    let run = |arguments: &[&str]| {
        let ended = Program::run(&mut turnpike(&[arguments, &["--json", "--state", &state]].concat()));
        assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.output());
        ended.result()
    };
    run(&["secret", "rotate", REALM]);
    let key = run(&["key", "add", "shop"])["key"].as_str().expect("a key").to_owned();
    let api = format!("127.0.0.1:{}", free_port(V4));
    let file = dir.file("turnpike.toml", format!("[credentials]\nlisten = [\"{api}\"]\n"));
    let file = file.to_str().expect("the test's path is UTF-8");
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let serve = Serve::start_secured(&certificate, &["--state", &state, "-c", file]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/node/twilio.mjs");
    let mut command = Command::new(node);
    command.arg(script).args([&format!("http://{api}"), &key]).current_dir(libraries.with_file_name(""));
    let token = super::report(&Program::run(&mut command).ended(0));
    assert_eq!(token["ttl"], "600", "{token}");
    let server = token["iceServers"].as_array().and_then(|all| {
        all.iter().find(|server| server["urls"].as_str().is_some_and(|uri| uri.ends_with("transport=udp")))
    });
    let server = server.unwrap_or_else(|| panic!("no TURN server over UDP: {token}"));
    assert_eq!((&server["username"], &server["credential"]), (&token["username"], &token["password"]));
    let [username, password] = ["username", "password"].map(|field| token[field].as_str().expect("a text"));
    let login = format!("{username}:{password}");
    let probed = Program::run(&mut turnpike(&[
        "probe",
        &format!("turn:{}", serve.address(V4)),
        "--user",
        &login,
        "--insecure",
        "--json",
    ]));
    assert_eq!(probed.result()["credentials_accepted"], true, "{}", probed.output());
}

/// Runs the page's own function over the corpus of names and every character known to this Node.
#[test]
fn page_escapes_names_like_log_lines() {
    const SCRIPT: &str = "
        const [source, corpus] = process.argv.slice(1);
        const { named } = await import('data:text/javascript,' + encodeURIComponent(source));
        const names = JSON.parse(corpus);
        for (let at = 0; at < 0x110000; at += 1) {
          const character = at >= 0xd800 && at < 0xe000 ? '' : String.fromCodePoint(at);
          if (!/\\p{Cn}/u.test(character)) names.push('a' + character + 'b');
        }
        console.log(JSON.stringify(names.map((name) => [name, named(name)])));";
    let node = need!(interop_program("interop-node", "node-command"));
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../admin/src/web/format.js");
    let corpus: Vec<&str> = CORPUS.iter().map(|(name, _)| *name).collect();
    let output = Command::new(node)
        .args([
            "--input-type=module",
            "-e",
            SCRIPT,
            &fs::read_to_string(page).expect("the page's script is readable"),
        ])
        .arg(serde_json::to_string(&corpus).expect("texts"))
        .output()
        .expect("Node runs");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let shown: Vec<(String, String)> = serde_json::from_slice(&output.stdout).expect(&told);
    assert!(shown.len() > 250_000, "{}", shown.len());
    for (name, shown) in shown {
        assert_eq!(shown, escape::name(&name).to_string(), "{name:?}");
    }
}
