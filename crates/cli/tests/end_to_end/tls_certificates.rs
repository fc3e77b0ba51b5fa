//! Certificates: unusable ones are refused at startup with the file's name, changed ones are reloaded,
//! and the old ones stay in use if the new ones are unusable.

use crate::prelude::*;
use std::time::{SystemTime, UNIX_EPOCH};

const NAME: &str = "turn.example.org";

fn run(command: &str, flags: &[&str]) -> Finished {
    let arguments = [&[command, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"], flags].concat();
    Program::start(&mut turnpike(&arguments)).wait(SOON)
}

#[test]
fn unusable_certificates_are_named_before_anything_starts() {
    let good = Certificate::new(&[NAME]);
    let other = Certificate::new(&[NAME]);
    let dir = Dir::new();
    let (empty, nowhere) = (dir.file("empty.pem", ""), dir.path().join("nowhere.pem"));
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    for (cert, key, words) in [
        (nowhere.clone(), good.key(), ["nowhere.pem", "cannot be read"]),
        (good.cert(), nowhere, ["nowhere.pem", "cannot be read"]),
        (empty.clone(), good.key(), ["empty.pem", "the file is empty"]),
        (good.cert(), empty, ["empty.pem", "the file is empty"]),
        (good.cert(), other.key(), ["key.pem", "does not belong to the certificate"]),
        (good.key(), good.key(), ["key.pem", "no certificate found"]),
        (good.cert(), good.cert(), ["cert.pem", "no private key found"]),
    ] {
        for command in ["serve", "check-config"] {
            let ended = run(command, &["--tls-cert", &text(&cert), "--tls-key", &text(&key)]);
            assert_eq!(ended.code, Some(2), "{command} {words:?}: {}", ended.output());
            for word in words.iter().chain(&["--tls-cert"]) {
                assert!(ended.stderr.contains(word), "{command}: no {word:?} in {}", ended.stderr);
            }
        }
    }
    assert_eq!(run("check-config", &good.flags()).code, Some(0));
}

/// The server starts anyway: a machine without a battery-backed clock boots with a time in the past, and UDP
/// clients need no certificate.
#[test]
fn expired_certificate_is_served_and_logged_as_an_error() {
    for (certificate, told, checked) in [
        (Certificate::expired(&[NAME]), "has expired (2021-01-01", "the certificate expired"),
        (Certificate::early(&[NAME]), "is valid from 2090-01-01", "not valid yet"),
    ] {
        let mut serve = Serve::start(&certificate.flags());
        let line = serve.program.line_with(told);
        assert!(line.contains("ERROR") && line.contains("this machine's clock reads 20"), "{line}");
        assert_eq!(shown_by(serve.address(V4), NAME), certificate.der());
        assert_eq!(Load::new(serve.address(V4)).with("--mode allocate --rate 20").run().code, Some(0));
        let ended = run("check-config", &certificate.flags()).ended(0);
        assert!(ended.stderr.contains("warning: ") && ended.stderr.contains(checked), "{}", ended.stderr);
    }
}

/// ring generates no RSA keys, so openssl does.
#[test]
fn dtls_with_an_rsa_certificate_is_refused_with_the_remedy() {
    need!(installed("openssl"));
    let dir = Dir::new();
    let [cert, key] =
        ["rsa-cert.pem", "rsa-key.pem"].map(|name| dir.path().join(name).to_str().expect("UTF-8").to_owned());
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=turn.example.org"]);
    Program::run(openssl.args(["-out", &cert, "-keyout", &key])).ended(0);
    let rsa = ["--tls-cert", &cert, "--tls-key", &key];
    for command in ["serve", "check-config"] {
        let ended = run(command, &[&rsa[..], &["--dtls-listen", "127.0.0.1:0"]].concat());
        assert_eq!(ended.code, Some(2), "{command}: {}", ended.output());
        for word in ["--tls-cert", "rsa-cert.pem", "dtls.listen", "ECDSA", "P-256", "openssl ecparam"] {
            assert!(ended.stderr.contains(word), "{command}: no {word:?} in {}", ended.stderr);
        }
    }
    assert_eq!(run("check-config", &rsa).code, Some(0), "TLS accepts the RSA certificate");
    let good = Certificate::new(&[NAME]);
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let file = dir.file(
        "turnpike.toml",
        format!(
            "[tls]\ncert = {cert:?}\nkey = {key:?}\ncertificates = [{{ cert = {:?}, key = {:?} }}]\n[dtls]\nlisten = [\"127.0.0.1:0\"]\n",
            text(&good.cert()),
            text(&good.key())
        ),
    );
    assert_eq!(run("check-config", &["-c", &text(&file)]).code, Some(0));
}

#[test]
fn changed_certificate_is_used_and_an_unusable_one_ignored() {
    let certificate = Certificate::new(&[NAME]);
    let mut serve = Serve::start(&certificate.flags());
    let server = serve.address(V4);
    let first = certificate.der();
    assert_eq!(shown_by(server, NAME), first);

    certificate.renew(&[NAME]);
    let second = certificate.der();
    assert_ne!(second, first);
    let line = serve.program.line_with("certificates loaded");
    assert!(line.contains(&format!("changed=\"{}\"", certificate.cert().display())), "{line}");
    assert_eq!(shown_by(server, NAME), second);

    // Another certificate's key: the log names the file and the reason.
    let key = fs::read(certificate.key()).expect("the test's own file");
    fs::copy(Certificate::new(&[NAME]).key(), certificate.key()).expect("the test's own file");
    serve.program.line_with("does not belong to the certificate");
    serve.program.line_with("certificates not reloaded: the old ones stay in use");
    assert_eq!(shown_by(server, NAME), second);

    let reloads = |what: &str, result: &str, count: u64| {
        let family = format!("turnpike_{what}_reloads_total");
        eventually(&format!("{family} {result} {count}"), || {
            serve.metrics().sum(&family, &format!("result=\"{result}\"")) == count
        });
    };
    reloads("certificate", "loaded", 1);
    reloads("certificate", "failed", 1);
    // SIGHUP also ignores an unusable certificate but applies everything else.
    fs::write(certificate.cert(), "").expect("the test's own file");
    serve.program.signal("HUP");
    reloads("config", "loaded", 1);
    reloads("certificate", "failed", 2);
    eventually("the reason", || {
        serve.program.lines().iter().any(|line| line.contains("cert.pem: the file is empty"))
    });
    assert_eq!(shown_by(server, NAME), second);

    fs::write(certificate.key(), key).expect("the test's own file");
    certificate.renew(&[NAME]);
    serve.program.signal("HUP");
    reloads("config", "loaded", 2);
    reloads("certificate", "loaded", 2);
    eventually("the third certificate", || shown_by(server, NAME) == certificate.der());
}

/// Revoking a user must not depend on valid certificates.
#[test]
fn reload_with_a_bad_certificate_still_revokes_users() {
    let certificate = Certificate::new(&[NAME]);
    let expired = Certificate::expired(&[NAME]);
    let dir = Dir::new();
    let text = |users: &str| {
        format!(
            "[auth]\nusers = [{users}]\n[tls]\ncert = {:?}\nkey = {:?}\n",
            certificate.cert(),
            certificate.key()
        )
    };
    let file = dir.file("turnpike.toml", text(r#""a:one", "b:two", "c:three""#));
    let path = file.to_str().expect("the test's path is UTF-8");
    let serve = Serve::start_bare(&["-c", path, "--relay-ip", "127.0.0.1"]);
    let server = serve.address(V4);
    let first = certificate.der();
    let enters = |user: &str| {
        let load = Load::as_user(server, user).with("--mode allocate --rate 20 --duration 1");
        load.run().code
    };
    let reload = |users: &str, count: u64| {
        fs::write(&file, text(users)).expect("the test's own file");
        serve.program.signal("HUP");
        eventually("the reload is counted", || {
            serve.metrics().sum("turnpike_config_reloads_total", "result=\"loaded\"") == count
        });
    };
    let has_said = |words: &str| serve.program.lines().iter().any(|line| line.contains(words));
    assert_eq!(enters("a:one"), Some(0));

    fs::copy(expired.cert(), certificate.cert()).expect("the test's own file");
    fs::copy(expired.key(), certificate.key()).expect("the test's own file");
    reload(r#""b:two", "c:three""#, 1);
    assert_eq!((enters("a:one"), enters("b:two")), (Some(1), Some(0)));
    assert!(has_said("the certificate expired") && has_said("certificates not reloaded"));

    fs::remove_file(certificate.cert()).expect("the test's own file");
    reload(r#""c:three""#, 2);
    assert_eq!((enters("b:two"), enters("c:three")), (Some(1), Some(0)));
    assert!(has_said("cert.pem: cannot be read"));
    assert_eq!(shown_by(server, NAME), first, "the old certificate stays in use");

    certificate.renew(&[NAME]);
    eventually("the new certificate", || shown_by(server, NAME) == certificate.der());
}

#[test]
fn log_has_tls_listeners_names_and_expiry() {
    let certificate = Certificate::new(&[NAME, "turn.example.net"]);
    let mut serve = Serve::start(&[&certificate.flags()[..], &["--tls-listen", "127.0.0.1:0"]].concat());
    let told = serve.program.line_with("valid until");
    for word in ["certificate ", "cert.pem for turn.example.org, turn.example.net, valid until ", " UTC"] {
        assert!(told.contains(word), "{told}");
    }
    assert!(serve.program.line_with("listening on tcp 127.0.0.1:").ends_with(", also TLS"));
    assert!(serve.program.line_with("listening on tls 127.0.0.1:").ends_with(", also plain TCP"));
    assert!(!serve.program.lines().iter().any(|line| line.contains("expires in")));
    let plain = Serve::start(&[]);
    assert!(!plain.program.lines().iter().any(|line| line.contains("TLS")), "{:?}", plain.program.lines());
}

#[test]
fn upcoming_expiry_is_a_warning_and_a_metric() {
    const DAY: u64 = 86_400;
    let certificate = Certificate::ending_in(&[NAME], Duration::from_secs(10 * DAY + DAY / 2));
    let mut serve = Serve::start(&certificate.flags());
    let told = serve.program.line_with("expires in");
    assert!(told.contains("WARN") && told.contains("cert.pem expires in 10 days"), "{told}");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is after 1970").as_secs();
    let end = |serve: &Serve| serve.metrics().sum("turnpike_certificate_not_after_seconds", "cert.pem");
    assert!((now + 10 * DAY..now + 11 * DAY).contains(&end(&serve)), "{}", end(&serve));

    // Valid long enough to start the server, but expires while the server runs.
    let brief = Certificate::ending_in(&[NAME], Duration::from_secs(12));
    let mut serve = Serve::start(&brief.flags());
    serve.program.line_with("cert.pem expires in ");
    let told = serve.program.line_with("has expired");
    assert!(told.contains("ERROR"), "{told}");
    shown_by(serve.address(V4), NAME);
}

#[test]
fn world_readable_key_is_a_warning_and_encrypted_key_an_error() {
    let certificate = Certificate::new(&[NAME]);
    let mode = |mode| {
        fs::set_permissions(certificate.key(), fs::Permissions::from_mode(mode))
            .expect("the test's own file");
        run("check-config", &certificate.flags())
    };
    let open = mode(0o644).ended(0);
    assert!(open.stderr.contains("key.pem") && open.stderr.contains("chmod o="), "{}", open.stderr);
    assert!(!mode(0o640).stderr.contains("key.pem"));

    let key = fs::read_to_string(certificate.key()).expect("the test's own file");
    let (begin, rest) = key.split_once('\n').expect("PEM has lines");
    let header = "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n";
    fs::write(certificate.key(), format!("{begin}\n{header}{rest}")).expect("the test's own file");
    let encrypted = run("check-config", &certificate.flags());
    assert_eq!(encrypted.code, Some(2));
    assert!(encrypted.stderr.contains("the private key is encrypted"), "{}", encrypted.stderr);
    assert!(encrypted.stderr.contains("openssl pkey"), "{}", encrypted.stderr);
}

/// Associations with the old certificate continue: see `dtls_messages` of crates/relay.
#[test]
fn dtls_uses_a_changed_certificate() {
    let certificate = Certificate::new(&[NAME]);
    let mut serve = Serve::start_secured(&certificate, &["--workers", "2"]);
    let uri = format!("turns:{}?transport=udp", serve.address_of("dtls", V4));
    let dir = Dir::new();
    // Our client trusts exactly the certificate in this file.
    let trusts = |pem: &[u8]| {
        let file = dir.file("trust.pem", pem);
        let trust = file.to_str().expect("UTF-8");
        let probe = ["probe", &uri, "--ca", trust, "--server-name", NAME, "--json"];
        let report = Program::run(&mut turnpike(&probe)).result();
        report["transports"]["dtls"]["certificate"]["verifies"] == true
    };
    let old = fs::read(certificate.cert()).expect("the test's own file");
    assert!(trusts(&old));
    certificate.renew(&[NAME]);
    serve.program.line_with("certificates loaded");
    assert!(trusts(&fs::read(certificate.cert()).expect("the test's own file")) && !trusts(&old));
}
