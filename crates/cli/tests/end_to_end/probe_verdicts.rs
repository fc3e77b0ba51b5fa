//! Verdicts of `turnpike probe` in ambiguous cases: a full server, redirects, an unverified certificate, services that are not
//! STUN servers; and the result of `load turn`.

use crate::prelude::*;

const NAME: &str = "turn.example.org";

fn probe(uri: &str, more: &[&str]) -> Finished {
    probe_as(&format!("{USER}:{PASSWORD}"), uri, more)
}

fn probe_as(user: &str, uri: &str, more: &[&str]) -> Finished {
    Program::run(&mut turnpike(&[&["probe", uri, "--user", user, "--json"], more].concat()))
}

fn lines(report: &Value, area: &str) -> Vec<String> {
    let lines = report["findings"].as_array().expect("a list of lines");
    let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
    let of_area = lines.iter().filter(|line| line["area"] == area);
    of_area.map(|line| format!("{}: {}", text(line, "level"), text(line, "what"))).collect()
}

fn serve(file: &str, more: &[&str]) -> Serve {
    let dir = Dir::new();
    let path = dir.file("turnpike.toml", file);
    Serve::start(&[&["-c", path.to_str().expect("UTF-8")], more].concat())
}

/// The server has room for three permissions, and the probe requests them for twelve peers, so the request for the fourth
/// allowed peer is refused.
#[test]
fn full_server_is_not_mistaken_for_a_refusing_one() {
    let private = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"];
    let allowed: Vec<_> = private.iter().flat_map(|range| ["--allow-peer", range]).collect();
    let serve = serve("[limits]\npermissions = 3\nchannels = 3\n", &allowed);
    let report = probe(&format!("turn:{}?transport=udp", serve.address(V4)), &[]).ended(0).result();
    let peers = report["peers"].as_array().expect("a list");
    for (peer, expected) in [
        ("127.0.0.1", true),
        ("127.255.255.254", true),
        ("10.0.0.1", true),
        ("172.16.0.1", true),
        ("192.168.0.1", true),
        ("169.254.169.254", false),
        ("100.64.0.1", false),
    ] {
        let facts = peers.iter().find(|facts| facts["peer"] == peer).expect("requested");
        assert_eq!(facts["allowed"], expected, "{peer}: {report}");
    }
    let told = lines(&report, "peers");
    let private = "warn: lets users send to 10.0.0.1 (private), 172.16.0.1 (private), 192.168.0.1 (private)";
    assert!(told.iter().any(|line| line == private), "{told:?}");
    serve.wait_for_allocations(0);
}

#[test]
fn redirect_is_not_reported_as_a_refused_credential() {
    let file =
        "[[alternate]]\naddress = \"127.0.0.1:4478\"\ndomain = \"turn2.example.org\"\nwhen = \"always\"\n";
    let certificate = Certificate::new(&[NAME, "127.0.0.1"]);
    let serve = serve(file, &certificate.flags());
    let ca = certificate.cert().display().to_string();
    let uri = format!("turn:{}?transport=udp", serve.address(V4));
    // The name is for clients that verify a certificate.
    for (uri, to) in [
        (uri.clone(), "127.0.0.1:4478 (300"),
        (format!("turns:{}?transport=tcp", serve.address(V4)), "127.0.0.1:4478, turn2.example.org (300"),
    ] {
        let report = probe(&uri, &["--ca", &ca, "--fail-on", "warn"]).ended(0).result();
        assert_eq!(report["credentials_accepted"], true, "{report}");
        assert_eq!(report["usable"], true, "{report}");
        let told = lines(&report, "credentials");
        assert!(told[0].starts_with("ok: accepts"), "{told:?}");
        assert!(told[1].starts_with(&format!("note: redirects clients to {to}")), "{told:?}");
    }
    let wrong = probe_as("alice:looking-glass", &uri, &[]).ended(1);
    assert_eq!(wrong.result()["credentials_accepted"], false, "{}", wrong.output());
}

#[test]
fn insecure_makes_a_server_usable_but_its_certificate_stays_bad() {
    let certificate = Certificate::new(&[NAME, "127.0.0.1"]);
    // Loopback peers are denied, so that only the certificate is bad.
    let user = format!("{USER}:{PASSWORD}");
    let plain = ["--realm", REALM, "--user", &user, "--relay-ip", "127.0.0.1"];
    let serve = Serve::start_bare(&[&plain[..], &certificate.flags()].concat());
    let uri = format!("turns:{}?transport=tcp", serve.address(V4));
    let insecure = probe(&uri, &["--insecure"]).ended(0);
    let report = insecure.result();
    assert_eq!(report["usable"], true, "{report}");
    assert_eq!(report["transports"]["tls"]["certificate"]["verifies"], false, "{report}");
    let told = lines(&report, "certificate");
    assert!(told.iter().any(|line| line.starts_with("bad: tls: ")), "{told:?}");
    assert_eq!(probe(&uri, &["--insecure", "--fail-on", "bad"]).code, Some(3));
    // Without a credential, the 401 is the only possible answer.
    Program::run(&mut turnpike(&["probe", &uri, "--insecure"])).ended(0);
    assert_eq!(probe(&uri, &[]).code, Some(1));
    let ca = certificate.cert().display().to_string();
    let trusted = probe(&uri, &["--ca", &ca, "--fail-on", "bad"]).ended(0);
    assert_eq!(trusted.result()["transports"]["tls"]["certificate"]["verifies"], true);
}

#[test]
fn probe_finds_tls_on_the_port_of_the_name() {
    let certificate = Certificate::new(&[NAME, "127.0.0.1"]);
    let serve = Serve::start(&certificate.flags());
    let address = serve.address(V4);
    let ca = certificate.cert().display().to_string();
    let report = probe(&format!("turn:{address}?transport=tcp"), &["--ca", &ca]).ended(0).result();
    let facts = &report["transports"]["tls"];
    assert_eq!(facts["reachable"], true, "{report}");
    assert_eq!(facts["address"], address.to_string(), "{report}");
    assert_eq!(facts["certificate"]["verifies"], true, "{report}");

    let plain = Serve::start(&[]);
    let address = plain.address(V4);
    let report = probe(&format!("turn:{address}?transport=tcp"), &[]).result();
    let failure = report["transports"]["tls"]["failure"].as_str().expect("a reason").to_owned();
    assert!(failure.contains(&format!("; on port {}: ", address.port())), "{failure}");
    assert!(lines(&report, "tls")[0].starts_with("note: 127.0.0.1:5349: "), "{report}");
}

fn banner(words: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind((V4, 0)).expect("loopback");
    let address = listener.local_addr().expect("bound");
    // This thread and those that it starts end with the test's process.
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // Reads first: closing with unread bytes causes a reset, which may overtake the data.
            let _ = stream.read(&mut [0; 512]);
            let _ = stream.write_all(words);
        }
    });
    address
}

fn responder(answer: fn(&[u8]) -> Vec<u8>) -> SocketAddr {
    let socket = UdpSocket::bind((V4, 0)).expect("loopback");
    let address = socket.local_addr().expect("bound");
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&answer(&buffer[..length]), from);
        }
    });
    address
}

#[test]
fn non_stun_answer_is_not_reported_as_silence() {
    let echo = responder(<[u8]>::to_vec);
    let garbage = responder(|_| b"HTTP/1.1 400 Bad Request".to_vec());
    let web = banner(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    let bare = responder(|request| [&[1, 0x11, 0, 0], &request[4..20]].concat());
    for (address, transport, word) in [
        (echo, "udp", "an echo service"),
        (garbage, "udp", "does not speak STUN"),
        (web, "tcp", "a web server answers (HTTP/1.1 400 Bad Request)"),
        (bare, "udp", "an error without a code"),
    ] {
        let report =
            probe(&format!("turn:{address}?transport={transport}"), &["--timeout", "2"]).ended(1).result();
        let failure = report["transports"][transport]["failure"].as_str().unwrap_or_default();
        assert!(failure.contains(word), "{word}: {report}");
    }
}

#[test]
fn invalid_flags_are_bad_usage() {
    for (arguments, word) in [
        (&["probe", "turn:127.0.0.1", "--timeout", "1e19"][..], "--timeout"),
        (&["load", "turn", "127.0.0.1", "--duration", "1e19"], "--duration"),
        (&["load", "turn", "127.0.0.1", "--warmup", "1e19"], "--warmup"),
        (&["load", "turn", "stun:127.0.0.1"], "STUN server"),
        (&["probe", "turns:127.0.0.1:1", "--ca", "/nowhere/ca.pem"], "--ca"),
        (&["probe", "turn:127.0.0.1:1", "--ca", "/nowhere/ca.pem"], "--ca"),
        (&["probe", "turns:127.0.0.1:1", "--server-name", "a b"], "--server-name"),
    ] {
        let run = Program::start(&mut turnpike(arguments)).wait(SOON);
        assert_eq!(run.code, Some(2), "{arguments:?}: {}", run.output());
        assert!(run.stderr.contains(word), "{arguments:?}: {}", run.output());
        assert!(!run.stderr.contains("panicked"), "{arguments:?}: {}", run.output());
    }
}

#[test]
fn load_result_names_the_transport_and_has_integer_counts() {
    let certificate = Certificate::new(&[NAME, "127.0.0.1"]);
    let serve = Serve::start(&certificate.flags());
    let reflect = Reflect::start(V4, &[]);
    let ca = certificate.cert().display().to_string();
    let run = serve
        .load(&reflect)
        .with(&format!("--transport tls --ca {ca} --clients 2 --duration 1 --rate 100"))
        .run();
    let result = run.result();
    assert_eq!((&result["transport"], &result["relay"]), (&"tls".into(), &"udp".into()), "{result}");
    let counts = ["full_handshakes", "resumed_handshakes"].map(|name| result[name].as_u64());
    assert!(matches!(counts, [Some(full), Some(resumed)] if full + resumed == 2), "{result}");
}
