//! Certificates: refused at start with the file's name, loaded anew when they change, kept when the new ones are no good.

use std::{fs, path::Path, process::Command};

use super::harness::{
    Certificate, Dir, Finished, Load, Program, Reflect, SOON, Serve, V4, installed, shown_by, skip, turnpike,
};

const NAME: &str = "turn.example.org";

fn run(command: &str, flags: &[&str]) -> Finished {
    let arguments = [&[command, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"], flags].concat();
    Program::start(&mut turnpike(&arguments)).wait(SOON)
}

#[test]
fn certificates_that_cannot_be_used_are_named_before_anything_starts() {
    let good = Certificate::new(&[NAME]);
    let other = Certificate::new(&[NAME]);
    let expired = Certificate::expired(&[NAME]);
    let dir = Dir::new();
    let (empty, nowhere) = (dir.file("empty.pem", ""), dir.path().join("nowhere.pem"));
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    for (cert, key, words) in [
        (nowhere.clone(), good.key(), ["nowhere.pem", "cannot be read"]),
        (good.cert(), nowhere, ["nowhere.pem", "cannot be read"]),
        (empty.clone(), good.key(), ["empty.pem", "the file is empty"]),
        (good.cert(), empty, ["empty.pem", "the file is empty"]),
        (good.cert(), other.key(), ["key.pem", "does not belong to the certificate"]),
        (good.key(), good.key(), ["key.pem", "no certificate in it"]),
        (good.cert(), good.cert(), ["cert.pem", "no private key in it"]),
        (expired.cert(), expired.key(), ["cert.pem", "the certificate expired"]),
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

/// ring makes no RSA keys, so openssl does.
#[test]
fn dtls_with_an_rsa_certificate_is_refused_with_the_remedy() {
    if installed("openssl").is_none() {
        return skip("openssl is not installed");
    }
    let dir = Dir::new();
    let [cert, key] =
        ["rsa-cert.pem", "rsa-key.pem"].map(|name| dir.path().join(name).to_str().expect("UTF-8").to_owned());
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=turn.example.org"]);
    let made = Program::run(openssl.args(["-out", &cert, "-keyout", &key]));
    assert_eq!(made.code, Some(0), "{}", made.output());
    let rsa = ["--tls-cert", &cert, "--tls-key", &key];
    for command in ["serve", "check-config"] {
        let ended = run(command, &[&rsa[..], &["--dtls-listen", "127.0.0.1:0"]].concat());
        assert_eq!(ended.code, Some(2), "{command}: {}", ended.output());
        for word in ["--tls-cert", "rsa-cert.pem", "dtls.listen", "ECDSA", "P-256", "openssl ecparam"] {
            assert!(ended.stderr.contains(word), "{command}: no {word:?} in {}", ended.stderr);
        }
    }
    assert_eq!(run("check-config", &rsa).code, Some(0), "TLS takes it");
    // Beside an ECDSA certificate it may stay.
    let good = Certificate::new(&[NAME]);
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let file = dir.file(
        "turnpike.toml",
        &format!(
            "[tls]\ncert = {cert:?}\nkey = {key:?}\ncertificates = [{{ cert = {:?}, key = {:?} }}]\n[dtls]\nlisten = [\"127.0.0.1:0\"]\n",
            text(&good.cert()),
            text(&good.key())
        ),
    );
    assert_eq!(run("check-config", &["-c", &text(&file)]).code, Some(0));
}

#[test]
fn a_certificate_that_changes_is_shown_and_a_bad_one_keeps_the_old() {
    let certificate = Certificate::new(&[NAME]);
    let mut serve = Serve::start(&certificate.flags());
    let server = serve.address(V4);
    let first = certificate.der();
    assert_eq!(shown_by(server, NAME), first);

    // By itself, when the files change.
    certificate.renew(&[NAME]);
    let second = certificate.der();
    assert_ne!(second, first);
    serve.program.line_with("certificates loaded");
    assert_eq!(shown_by(server, NAME), second);

    // The key of another: both the file and the reason are named.
    let key = fs::read(certificate.key()).expect("our own file");
    fs::copy(Certificate::new(&[NAME]).key(), certificate.key()).expect("our own file");
    serve.program.line_with("does not belong to the certificate");
    serve.program.line_with("certificates not reloaded: the old ones stay in force");
    assert_eq!(shown_by(server, NAME), second);

    // A broken one does not get through by SIGHUP either.
    fs::write(certificate.cert(), "").expect("our own file");
    serve.program.signal("HUP");
    serve.program.line_with("cert.pem: the file is empty");
    serve.program.line_with("configuration not reloaded");
    assert_eq!(shown_by(server, NAME), second);

    // And a good one does.
    fs::write(certificate.key(), key).expect("our own file");
    certificate.renew(&[NAME]);
    serve.program.signal("HUP");
    serve.program.line_with("configuration reloaded");
    super::harness::eventually("the third certificate", || {
        (shown_by(server, NAME) == certificate.der()).then_some(())
    });
}

/// The same by DTLS: who is connected stays so, who comes sees the new one.
#[test]
fn dtls_shows_a_certificate_that_changes_and_keeps_its_clients() {
    let certificate = Certificate::new(&[NAME]);
    let old = fs::read(certificate.cert()).expect("our own file");
    let mut serve = Serve::start_secured(&certificate, &["--workers", "2"]);
    let server = serve.address_of("dtls", V4);
    let dir = Dir::new();
    // Our client trusts the very certificate that is in this file, and none besides.
    let trusts = |pem: &[u8]| {
        let file = dir.file("trust.pem", std::str::from_utf8(pem).expect("PEM is ASCII"));
        let uri = format!("turns:{server}?transport=udp");
        let trust = file.to_str().expect("UTF-8");
        let run =
            Program::run(&mut turnpike(&["probe", &uri, "--ca", trust, "--server-name", NAME, "--json"]));
        let report = run.result();
        let facts = &report["transports"]["dtls"];
        assert_eq!(facts["reachable"], true, "{report}");
        facts["certificate"]["verifies"] == true
    };
    assert!(trusts(&old));

    // Packets flow by the old one all the while.
    let reflect = Reflect::start(V4, &[]);
    let trust = dir.file("old.pem", std::str::from_utf8(&old).expect("PEM is ASCII"));
    let flow = Load::new(server)
        .to(reflect.address)
        .with(&["--transport", "dtls", "--ca", trust.to_str().expect("UTF-8"), "--server-name", NAME])
        .with(&["--clients", "8", "--rate", "200", "--duration", "6"])
        .start();
    serve.wait_for_allocations(8);

    // By itself, when the files change.
    certificate.renew(&[NAME]);
    let second = fs::read(certificate.cert()).expect("our own file");
    serve.program.line_with("certificates loaded");
    assert!(trusts(&second) && !trusts(&old));

    // A broken one keeps the old by SIGHUP, and a good one takes its place.
    fs::write(certificate.cert(), "").expect("our own file");
    serve.program.signal("HUP");
    serve.program.line_with("configuration not reloaded");
    assert!(trusts(&second));
    certificate.renew(&[NAME]);
    let third = fs::read(certificate.cert()).expect("our own file");
    serve.program.signal("HUP");
    serve.program.line_with("configuration reloaded");
    super::harness::eventually("the third certificate", || trusts(&third).then_some(()));
    assert!(!trusts(&second));

    let run = flow.wait(SOON * 2);
    assert_eq!(run.code, Some(0), "{}", run.output());
    let result = run.result();
    assert!(result["received"].as_u64() > Some(0), "{result}");
    assert!(result["lost"].as_u64() <= Some(20), "{result}");
    assert_eq!(result["errors"]["connection_lost"], serde_json::Value::Null, "{result}");
    serve.wait_for_allocations(0);
}
