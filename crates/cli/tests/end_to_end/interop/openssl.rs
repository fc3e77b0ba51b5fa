//! `openssl s_client` against `serve`: ALPN (RFC 7443), certificates by server name, TLS versions, session resumption.

use crate::prelude::*;

const NAME: &str = "turn.example.org";

fn s_client(server: SocketAddr, more: &[&str]) -> Finished {
    let mut command = Command::new("openssl");
    command.args(["s_client", "-connect", &server.to_string()]).args(more);
    Program::run(&mut command)
}

fn wait_for(serve: &Serve, name: &str, label: &str, wanted: u64) {
    eventually(&format!("{name}{{{label}}} is {wanted}"), || serve.metrics().sum(name, label) == wanted);
}

fn pem(text: &str) -> String {
    let (_, rest) =
        text.split_once("-----BEGIN CERTIFICATE-----").unwrap_or_else(|| panic!("no certificate in {text}"));
    let (body, _) = rest.split_once("-----END").unwrap_or_else(|| panic!("half a certificate in {text}"));
    body.split_whitespace().collect()
}

fn pem_of(file: &Path) -> String {
    pem(&fs::read_to_string(file).expect("the test's own file"))
}

#[test]
fn turn_is_preferred_among_the_protocols_of_rfc_7443() {
    need!(installed("openssl"));
    let certificate = Certificate::of_authority(&[NAME, "127.0.0.1"]);
    let authority = certificate.authority();
    let authority = authority.to_str().expect("the test's path is UTF-8");
    let serve = Serve::start(&certificate.flags());
    for version in ["-tls1_2", "-tls1_3"] {
        for (offered, chosen) in [
            ("stun.turn", "stun.turn"),
            ("stun.nat-discovery", "stun.nat-discovery"),
            ("stun.nat-discovery,stun.turn", "stun.turn"),
            ("http/1.1,stun.turn", "stun.turn"),
        ] {
            let ended = s_client(
                serve.address(V4),
                &[
                    version,
                    "-alpn",
                    offered,
                    "-CAfile",
                    authority,
                    "-verify_return_error",
                    "-verify_ip",
                    "127.0.0.1",
                ],
            );
            assert_eq!(ended.code, Some(0), "{version} {offered}: {}", ended.output());
            assert!(ended.output().contains("Verification: OK"), "{}", ended.output());
            let line = format!("ALPN protocol: {chosen}");
            assert!(
                ended.stdout.lines().any(|found| found == line),
                "{version} {offered}: {}",
                ended.output()
            );
        }
        // Most clients offer no protocol.
        let ended = s_client(serve.address(V4), &[version]).ended(0);
        assert!(ended.stdout.contains("No ALPN negotiated"), "{}", ended.output());
    }
    wait_for(&serve, "turnpike_tls_handshakes_total", "kind=\"full\"", 10);
    wait_for(&serve, "turnpike_connections", "", 0);
}

#[test]
fn unknown_protocols_are_refused_with_the_right_alert() {
    need!(installed("openssl"));
    let serve = Serve::start(&Certificate::new(&[NAME]).flags());
    for (count, version) in [(1, "-tls1_2"), (2, "-tls1_3")] {
        let ended = s_client(serve.address(V4), &[version, "-alpn", "http/1.1,h2"]).ended(1);
        // RFC 7301 section 3.2: no_application_protocol is 120.
        assert!(ended.output().contains("alert number 120"), "{}", ended.output());
        wait_for(&serve, "turnpike_tls_handshakes_failed_total", "reason=\"alpn\"", count);
    }
    assert_eq!(serve.metrics().sum("turnpike_tls_handshakes_total", ""), 0);
}

#[test]
fn versions_before_1_2_are_refused() {
    need!(installed("openssl"));
    let serve = Serve::start(&Certificate::new(&[NAME]).flags());
    for (count, version) in [(1, "-tls1"), (2, "-tls1_1")] {
        // Security level 0: OpenSSL would not offer these versions otherwise.
        let ended = s_client(serve.address(V4), &[version, "-cipher", "DEFAULT@SECLEVEL=0"]).ended(1);
        assert!(ended.output().contains("alert"), "{}", ended.output());
        wait_for(&serve, "turnpike_tls_handshakes_failed_total", "reason=\"incompatible\"", count);
    }
}

#[test]
fn server_name_selects_the_certificate() {
    need!(installed("openssl"));
    let [default, other, wild] =
        [&[NAME][..], &["turn.example.net"], &["*.example.com"]].map(Certificate::new);
    let dir = Dir::new();
    let path = |path: &Path| path.to_str().expect("the test's path is UTF-8").to_owned();
    let more = [&other, &wild]
        .map(|more| format!("{{ cert = {:?}, key = {:?} }}", path(&more.cert()), path(&more.key())))
        .join(", ");
    let config = dir.file(
        "turnpike.toml",
        format!(
            "[tls]\ncert = {:?}\nkey = {:?}\ncertificates = [{more}]\n",
            path(&default.cert()),
            path(&default.key())
        ),
    );
    let serve = Serve::start(&["-c", &path(&config)]);
    for (name, expected) in [
        (NAME, &default),
        ("turn.example.net", &other),
        ("TURN.example.net", &other),
        ("a.example.com", &wild),
        ("a.b.example.com", &default),
        ("elsewhere.example", &default),
    ] {
        let ended = s_client(serve.address(V4), &["-servername", name]);
        assert_eq!(pem(&ended.stdout), pem_of(&expected.cert()), "{name}: {}", ended.output());
    }
    let ended = s_client(serve.address(V4), &["-noservername"]);
    assert_eq!(pem(&ended.stdout), pem_of(&default.cert()), "{}", ended.output());
}

#[test]
fn sessions_are_resumed() {
    need!(installed("openssl"));
    let serve = Serve::start(&Certificate::new(&[NAME]).flags());
    // Connects once, and five more times with the ticket.
    let ended = s_client(serve.address(V4), &["-tls1_2", "-reconnect"]).ended(0);
    assert_eq!(
        ended.stdout.lines().filter(|line| line.starts_with("Reused, ")).count(),
        5,
        "{}",
        ended.output()
    );
    wait_for(&serve, "turnpike_tls_handshakes_total", "kind=\"full\"", 1);
    wait_for(&serve, "turnpike_tls_handshakes_total", "kind=\"resumed\"", 5);
}
