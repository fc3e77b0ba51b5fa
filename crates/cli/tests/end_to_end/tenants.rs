//! Several tenants behind one listener, selected by server name (SNI), by listener, and by the realm in requests.

use crate::prelude::*;
use std::{
    process::Child,
    sync::mpsc::{self, Receiver},
};

const A: &str = "a.example";
const B: &str = "b.example";

/// Two realms, each with a server name, a certificate and a user, and a default realm.
struct Tenants {
    program: Program,
    address: SocketAddr,
    certificates: [Certificate; 3],
    trust: String,
    config: std::path::PathBuf,
    _dir: Dir,
}

impl Tenants {
    fn start(more: &[&str]) -> Self {
        let dir = Dir::new();
        let certificates = [&["other.example", "127.0.0.1"][..], &[A], &[B]].map(Certificate::new);
        let pem = certificates.iter().map(|own| fs::read_to_string(own.cert()).expect("the test's own file"));
        let trust = dir.file("trust.pem", pem.collect::<String>()).display().to_string();
        let config = dir.file("turnpike.toml", Self::text(&certificates, "ann"));
        let path = config.to_str().expect("the test's path is UTF-8");
        let arguments = ["serve", "-c", path, "--listen", "127.0.0.1:0", "--dtls-listen", "127.0.0.1:0"];
        let relay = ["--relay-ip", "127.0.0.1", "--allow-peer", "127.0.0.0/8", "--admin", "off"];
        let mut program = Program::start(&mut turnpike(&[&arguments[..], &relay, more].concat()));
        let label = "listening on udp ";
        let address = address_after(&program.line_with(label), label);
        program.line_with("data path");
        Self { program, address, certificates, trust, config, _dir: dir }
    }

    fn text([other, a, b]: &[Certificate; 3], user_of_a: &str) -> String {
        let files = |own: &Certificate| format!("cert = {:?}, key = {:?}", own.cert(), own.key());
        format!(
            "[server]\nrealm = \"other\"\n[auth]\nusers = [\"otto:x\"]\n\
             [tls]\ncert = {:?}\nkey = {:?}\ncertificates = [{{ {} }}, {{ {} }}]\n\
             [[realm]]\nname = \"realm-a\"\nserver_names = [\"{A}\"]\nusers = [\"{user_of_a}:x\"]\n\
             [[realm]]\nname = \"realm-b\"\nserver_names = [\"{B}\"]\nusers = [\"bea:x\"]\n",
            other.cert(),
            other.key(),
            files(a),
            files(b),
        )
    }

    /// Probes over TLS with this server name; returns the exit code, the realm and the certificate's first name.
    fn probe(&self, name: &str, user: &str) -> (Option<i32>, String, String) {
        let uri = format!("turns:{}?transport=tcp", self.address);
        let run = Program::run(&mut turnpike(&[
            "probe",
            &uri,
            "--user",
            user,
            "--ca",
            &self.trust,
            "--server-name",
            name,
            "--json",
        ]));
        let report = run.result();
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let shown = &report["transports"]["tls"]["certificate"]["names"][0];
        (run.code, text(&report["realm"]), text(shown))
    }

    fn load(&self, name: &str, user: &str) -> Finished {
        let reflect = Reflect::start(V4, &[]);
        Load::as_user(self.address, user)
            .to(reflect.address)
            .with_words(&["--transport", "tls", "--ca", &self.trust, "--server-name", name])
            .with("--clients 2 --rate 100 --duration 0.5")
            .run()
    }
}

#[test]
fn server_name_selects_certificate_realm_and_users() {
    let mut tenants = Tenants::start(&["--workers", "2"]);
    for (name, certificate) in [(A, 1), (B, 2), ("other.example", 0)] {
        assert_eq!(shown_by(tenants.address, name), tenants.certificates[certificate].der(), "{name}");
    }
    for (name, user, code, realm) in [
        (A, "ann:x", 0, "realm-a"),
        (B, "bea:x", 0, "realm-b"),
        ("other.example", "otto:x", 0, "other"),
        (A, "bea:x", 1, "realm-a"),
        (B, "ann:x", 1, "realm-b"),
        (A, "otto:x", 1, "realm-a"),
        ("other.example", "ann:x", 1, "other"),
    ] {
        let found = tenants.probe(name, user);
        assert_eq!(found, (Some(code), realm.to_owned(), name.to_owned()), "{name} as {user}");
    }
    let run = tenants.load(A, "ann:x").ended(0);
    assert!(run.result()["received"].as_u64() > Some(0), "{}", run.output());
    assert!(tenants.program.line_with("allocation ended").contains("realm=\"realm-"));
    tenants.load(B, "ann:x").ended(1).says("refused user");
    let plain = stun::Client::new(tenants.address);
    assert_eq!(plain.challenge().2.realm, b"other");

    // A reload changes only the user of a realm.
    fs::write(&tenants.config, Tenants::text(&tenants.certificates, "alma")).expect("the test's own file");
    tenants.program.signal("HUP");
    tenants.program.line_with("configuration reloaded");
    eventually("the new user is accepted", || tenants.probe(A, "alma:x").0 == Some(0));
    assert_eq!(tenants.probe(A, "ann:x").0, Some(1));
    assert_eq!(tenants.probe(B, "bea:x").0, Some(0));
}

/// dimpl's clients send no server name; openssl's do.
#[test]
fn dtls_server_name_selects_certificate_and_realm() {
    need!(installed("openssl"));
    let mut tenants = Tenants::start(&["--workers", "2"]);
    for (name, certificate, realm, user) in
        [(A, 1, "realm-a", "ann"), (B, 2, "realm-b", "bea"), ("other.example", 0, "other", "otto")]
    {
        let own = tenants.certificates[certificate].cert();
        let mut openssl = Openssl::start(tenants.address, name, &own);
        let refused = openssl.ask(&stun::allocate_request(None));
        assert_eq!(refused.error(), Some(401), "{name}");
        let challenge = refused.challenge();
        assert_eq!(challenge.realm, realm.as_bytes(), "{name}");
        for nobody in ["ann", "bea", "otto"].into_iter().filter(|other| *other != user) {
            let refused = openssl.ask(&stun::allocate_request(Some((nobody, "x", &challenge))));
            assert_eq!(refused.error(), Some(401), "{nobody} at {name}");
        }
        let granted = openssl.ask(&stun::allocate_request(Some((user, "x", &challenge))));
        assert_eq!(granted.error(), None, "{user} at {name}");
        // The close_notify ends the allocation, which is logged under the realm of the server name.
        openssl.end();
        tenants.program.line_with(&format!("allocation ended realm=\"{realm}\" user=\"{user}\""));
    }

    let text = Tenants::text(&tenants.certificates, "ann");
    let more = "[[realm]]\nname = \"realm-c\"\nserver_names = [\"other.example\"]\nusers = [\"cat:x\"]\n";
    fs::write(&tenants.config, text + more).expect("the test's own file");
    tenants.program.signal("HUP");
    tenants.program.line_with("configuration reloaded");
    let own = tenants.certificates[0].cert();
    eventually("the new realm is served", || {
        let refused =
            Openssl::start(tenants.address, "other.example", &own).ask(&stun::allocate_request(None));
        refused.challenge().realm == b"realm-c"
    });
}

struct Openssl {
    child: Child,
    answers: Receiver<Vec<u8>>,
}

impl Openssl {
    fn start(server: SocketAddr, name: &str, trust: &Path) -> Self {
        let mut command = Command::new("openssl");
        command.args([
            "s_client",
            "-dtls",
            "-quiet",
            "-no_ign_eof",
            "-connect",
            &server.to_string(),
            "-servername",
            name,
        ]);
        command.args(["-verify_return_error", "-verify_hostname", name, "-CAfile"]).arg(trust);
        let stderr = Stdio::null();
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr).spawn();
        let mut stdout = child.as_mut().ok().and_then(|child| child.stdout.take()).expect("openssl runs");
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(len @ 1..) = stdout.read(&mut buffer) {
                if sender.send(buffer[..len].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child: child.expect("openssl runs"), answers }
    }

    /// Sends a request and returns the response; each fits in one record.
    fn ask(&mut self, request: &[u8]) -> stun::Message {
        let stdin = self.child.stdin.as_mut().expect("piped");
        stdin.write_all(request).and_then(|()| stdin.flush()).expect("openssl reads");
        let answer = self.answers.recv_timeout(SOON).expect("an answer, and a certificate that verifies");
        stun::Message::stun(&answer)
    }

    /// Closes standard input, after which openssl sends its close_notify.
    fn end(mut self) {
        drop(self.child.stdin.take());
        eventually("openssl ends", || self.child.try_wait().expect("the test's own child"));
    }
}

impl Drop for Openssl {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
