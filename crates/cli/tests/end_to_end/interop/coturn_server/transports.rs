//! `load turn` and `probe` over TCP, TLS and DTLS, with TCP relaying, against Debian's `turnserver`.

use crate::prelude::*;

/// A turnserver with every transport, on loopback in both families; two IPv4 addresses, for RFC 5780.
struct Turnserver {
    plain: u16,
    secure: u16,
    certificate: PathBuf,
    _program: Program,
    dir: Dir,
}

impl Turnserver {
    fn start() -> Result<Self, String> {
        Self::start_with(&[])
    }

    fn start_with(more: &[&str]) -> Result<Self, String> {
        installed("turnserver")?;
        let dir = Dir::new();
        let names = ["turn.example.org", "127.0.0.1", "::1"].map(str::to_owned);
        let made = rcgen::generate_simple_self_signed(names).expect("valid names");
        let certificate = dir.file("cert.pem", made.cert.pem());
        let key = dir.file("key.pem", made.signing_key.serialize_pem());
        let file = |name: &str| dir.path().join(name).display().to_string();
        let (plain, secure) = (free_pair(), free_pair());
        let mut command = Command::new("turnserver");
        command.args(["-n", "--no-cli", "--no-stdout-log", "--simple-log"]);
        command.args(["--log-file", &file("log"), "--pidfile", &file("pid"), "--userdb", &file("db")]);
        command.args(["-p", &plain.to_string(), "--tls-listening-port", &secure.to_string()]);
        command.args(["--cert", &certificate.display().to_string(), "--pkey", &key.display().to_string()]);
        command.args(["-L", "127.0.0.1", "-L", "127.0.0.2", "-E", "127.0.0.1"]);
        if has_ipv6() {
            command.args(["-L", "::1", "-E", "::1"]);
        }
        command.args(["--lt-cred-mech", "-r", REALM, "-u", &format!("{USER}:{PASSWORD}")]);
        command.args(["--allow-loopback-peers", "--mobility", "-m", "1"]);
        command.args(more);
        let program = Program::start(command.current_dir(dir.path()));
        let stun = stun::Client::new((V4, plain).into());
        eventually("turnserver answers", || stun.is_answered());
        Ok(Self { plain, secure, certificate, _program: program, dir })
    }

    /// Contents of turnserver's log file, to whose name it adds a date.
    fn log(&self) -> String {
        let files = fs::read_dir(self.dir.path()).expect("the directory is readable").flatten();
        let logs = files.filter(|file| file.file_name().to_string_lossy().starts_with("log"));
        logs.filter_map(|file| fs::read_to_string(file.path()).ok()).collect()
    }

    fn address(&self, transport: &str, family: std::net::IpAddr) -> SocketAddr {
        let port = if matches!(transport, "tls" | "dtls") { self.secure } else { self.plain };
        (family, port).into()
    }

    fn load(&self, transport: &str, family: std::net::IpAddr) -> Load {
        let trust = self.certificate.display().to_string();
        Load::new(self.address(transport, family)).with(&format!("--transport {transport} --ca {trust}"))
    }

    fn probe(&self, uri: &str, more: &[&str]) -> Finished {
        let user = format!("{USER}:{PASSWORD}");
        let trust = self.certificate.display().to_string();
        let mut arguments = vec!["probe", uri, "--user", &user, "--ca", &trust, "--json"];
        arguments.extend(more);
        Program::run(&mut turnpike(&arguments))
    }
}

/// Two consecutive free ports for TCP and UDP: turnserver also uses the next port, for RFC 5780.
fn free_pair() -> u16 {
    eventually("two free ports in a row", || {
        let port = free_port(V4);
        let next = port.checked_add(1)?;
        let free = |port: u16| {
            let address = (Ipv4Addr::UNSPECIFIED, port);
            TcpListener::bind(address).is_ok() && UdpSocket::bind(address).is_ok()
        };
        (free(port) && free(next)).then_some(port)
    })
}

fn relays_all(transport: &str, family: std::net::IpAddr, via: &str) {
    need!(loopback_of(family));
    let server = need!(Turnserver::start());
    let reflect = Reflect::start(family, &[]);
    let result = server
        .load(transport, family)
        .to(reflect.address)
        // An odd size, because ChannelData is padded over streams.
        .with(&format!("--via {via} --clients 4 --rate 200 --size 121 --duration 2"))
        .run()
        .ended(0)
        .result();
    assert!(result["sent"].as_u64() >= Some(100), "{result}");
    assert_eq!(result["datapath"], transport, "{result}");
    // A datagram may be lost; a stream loses nothing while the server keeps up.
    let lost = result["lost"].as_u64().expect("a count");
    assert!(if transport == "dtls" { lost <= 20 } else { lost == 0 }, "{result}");
}

tests! {
    load_by_channel_over_tcp: relays_all("tcp", V4, "channel");
    load_by_send_over_tcp: relays_all("tcp", V4, "send");
    load_by_channel_over_tls: relays_all("tls", V4, "channel");
    load_by_send_over_tls_and_ipv6: relays_all("tls", V6, "send");
    load_by_channel_over_dtls: relays_all("dtls", V4, "channel");
}

#[test]
fn allocations_over_tls_resume_sessions_by_default() {
    let server = need!(Turnserver::start());
    let handshakes = |more: &[&str]| {
        let result = server
            .load("tls", V4)
            // On a busy machine a warm-up would delay the measured requests.
            .with("--mode allocate --clients 2 --rate 100 --duration 1 --warmup 0")
            .with_words(more)
            .run()
            .ended(0)
            .result();
        assert!(result["received"].as_u64() > Some(4), "{result}");
        let count = |key: &str| result[key].as_f64().unwrap_or_else(|| panic!("no {key} in {result}"));
        (count("full_handshakes"), count("resumed_handshakes"))
    };
    let (full, resumed) = handshakes(&[]);
    assert!(resumed > full, "{full} full, {resumed} resumed");
    let (full, resumed) = handshakes(&["--no-resumption"]);
    assert!(full > 4.0 && resumed == 0.0, "{full} full, {resumed} resumed");
}

#[test]
fn tcp_is_relayed_to_a_tcp_reflector() {
    let server = need!(Turnserver::start());
    let mut reflect =
        Program::start(&mut turnpike(&["reflect", "--tcp", "127.0.0.1:0", "--listen", "127.0.0.1:0"]));
    let line = reflect.line_with("listening on tcp ");
    let peer: SocketAddr =
        line.trim_start_matches("listening on tcp ").parse().expect("the line ends with an address");
    for transport in ["tcp", "tls"] {
        let result = server
            .load(transport, V4)
            .to(peer)
            .with("--relay tcp --clients 3 --rate 300 --size 1000 --duration 1")
            .run()
            .ended(0)
            .result();
        assert!(result["sent"].as_u64() >= Some(100), "{result}");
        assert_eq!(result["received"], result["sent"], "{result}");
        assert_eq!(result["reordered"], 0, "{result}");
        let bytes = result["sent"].as_u64().expect("a count") as f64 * 1_000.0;
        assert_eq!(result["received_bytes"].as_f64(), Some(bytes), "{result}");
        assert_eq!(result["errors"]["garbled"], Value::Null, "{result}");
    }
}

#[test]
fn untrusted_or_misnamed_certificate_error_has_a_remedy() {
    let server = need!(Turnserver::start());
    let reflect = Reflect::start(V4, &[]);
    for transport in ["tls", "dtls"] {
        let run = Load::new(server.address(transport, V4))
            .to(reflect.address)
            .with(&format!("--transport {transport} --duration 1"))
            .run()
            .ended(1);
        assert!(run.stderr.contains("certificate") && run.stderr.contains("--ca"), "{}", run.output());
        server
            .load(transport, V4)
            .with("--server-name example.net --duration 1")
            .run()
            .ended(1)
            .says("example.net");
    }
}

#[test]
fn closed_port_and_wrong_password_are_reported_over_tcp() {
    let server = need!(Turnserver::start());
    Load::new((V4, free_pair()).into())
        .with("--transport tcp --duration 1")
        .run()
        .ended(1)
        .says("refused the connection");
    Load::as_user(server.address("tcp", V4), &format!("{USER}:wrong"))
        .with("--transport tcp --duration 1")
        .run()
        .ended(1)
        .says("refused user");
}

#[test]
fn probe_reports_coturns_features_over_every_transport() {
    let server = need!(Turnserver::start());
    let plain = server.probe(&format!("turn:127.0.0.1:{}", server.plain), &["--fail-on", "bad"]);
    assert_eq!(plain.code, Some(3), "{}", plain.output());
    let report: Value = plain.result();
    for transport in ["udp", "tcp"] {
        let facts = &report["transports"][transport];
        assert_eq!(facts["reachable"], true, "{report}");
        assert!(facts["rtt_us"]["median"].as_u64().is_some(), "{report}");
    }
    assert_eq!(report["usable"], true, "{report}");
    assert_eq!(report["credentials_accepted"], true, "{report}");
    assert_eq!(report["realm"], REALM, "{report}");
    assert!(report["software"].as_str().is_some_and(|name| name.starts_with("Coturn")), "{report}");
    for feature in ["even_port", "mobility", "tcp_relaying", "nat_discovery"] {
        assert_eq!(report["features"][feature], true, "{feature} in {report}");
    }
    assert_eq!(report["features"]["sha256"], false, "{report}");
    assert_eq!(report["nat"]["mapping"], "none", "{report}");
    let peers = report["peers"].as_array().expect("a list");
    let allowed =
        |peer: &str| peers.iter().find(|facts| facts["peer"] == peer).map(|facts| &facts["allowed"]);
    assert_eq!(allowed("127.0.0.1"), Some(&Value::Bool(true)), "{report}");

    let report = server.probe(&format!("turns:127.0.0.1:{}", server.secure), &[]).ended(0).result();
    for transport in ["tls", "dtls"] {
        let facts = &report["transports"][transport];
        assert_eq!(facts["reachable"], true, "{report}");
        assert_eq!(facts["certificate"]["verifies"], true, "{report}");
        assert_eq!(facts["certificate"]["names"][0], "turn.example.org", "{report}");
    }

    let distrusted =
        Program::run(&mut turnpike(&["probe", &format!("turns:127.0.0.1:{}", server.secure), "--json"]))
            .ended(1);
    assert_eq!(distrusted.result()["transports"]["tls"]["certificate"]["verifies"], false);
}

/// Leftover allocations would count against the user's quota for ten minutes.
#[test]
fn probe_deletes_its_allocations() {
    let server = need!(Turnserver::start_with(&["-v"]));
    server.probe(&format!("turn:127.0.0.1:{}", server.plain), &[]).ended(0);
    eventually("as many deletions as allocations", || {
        let log = server.log();
        let count = |what: &str| log.matches(&format!("incoming packet {what} processed, success")).count();
        count("ALLOCATE") >= 5 && count("REFRESH") == count("ALLOCATE")
    });
}
