//! Listeners: a socket for this user only, and TLS for other machines.

use crate::prelude::*;
use std::{io::ErrorKind, net::TcpListener, os::unix::net::UnixListener};

use rustls::{
    ClientConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::{CertifiedKey, SingleCertAndKey},
};
use turnpike_admin::{AdminInterface, ListenError};
use turnpike_api::Job;
use turnpike_config::AdminSettings;

fn listen(settings: &AdminSettings, explicit: bool) -> Result<usize, ListenError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _guard = runtime.enter();
    AdminInterface::listen(Job::Serve, settings, explicit, Vec::new())
        .map(|interface| interface.addresses().len())
}

fn on(listen: Vec<AdminAddress>) -> AdminSettings {
    AdminSettings { listen, ..Settings::default().admin }
}

#[test]
fn socket_file_is_private_and_removed_at_exit() {
    let mut running = Running::server(1);
    let path = running.dir.path("a.sock");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(running.get("/livez").status, 200);
    running.stop();
    assert!(!path.exists());
}

#[test]
fn stale_socket_file_is_replaced_but_not_a_live_one() {
    let dir = Dir::new();
    let settings = on(vec![dir.socket("a.sock")]);
    drop(UnixListener::bind(dir.path("a.sock")).unwrap());
    assert!(dir.path("a.sock").exists());
    listen(&settings, true).expect("no program");
    let _living = UnixListener::bind(dir.path("a.sock")).unwrap();
    let error = listen(&settings, true).expect_err("a live program").to_string();
    assert!(error.contains("a.sock") && error.contains("--admin"), "{error}");
    fs::write(dir.path("b.sock"), "precious").unwrap();
    listen(&on(vec![dir.socket("b.sock")]), true).expect_err("a file that is not a socket");
    assert_eq!(fs::read_to_string(dir.path("b.sock")).unwrap(), "precious");
}

#[test]
fn explicit_addresses_are_mandatory_and_defaults_optional() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = AdminAddress::Tcp(taken.local_addr().unwrap());
    let any = AdminAddress::Tcp((Ipv4Addr::LOCALHOST, 0).into());
    let settings = on(vec![address, any]);
    let error = listen(&settings, true).expect_err("in use").to_string();
    assert!(
        error.contains(&taken.local_addr().unwrap().to_string()) && error.contains("--admin off"),
        "{error}"
    );
    assert_eq!(listen(&settings, false).expect("one usable address"), 1);
    assert_eq!(listen(&on(Vec::new()), true).expect("nowhere"), 0);
}

struct Secured {
    running: Running,
    at: SocketAddr,
    full: Certificate,
    read: Certificate,
}

/// A local address other than loopback stands in for all other addresses.
fn secured() -> Secured {
    let own = Certificate::new(&["admin.example.org"]);
    let (full, full_ca) = Certificate::of_client("operator");
    let (read, read_ca) = Certificate::of_client("looker");
    let running = Running::start(Some(1), |settings, dir| {
        settings.listen = vec![dir.socket("a.sock"), AdminAddress::Tcp((Ipv4Addr::UNSPECIFIED, 0).into())];
        settings.tls_cert = Some(dir.file("own.pem", &own.pem));
        settings.tls_key = Some(dir.file("own.key", &own.key));
        settings.client_ca = Some(dir.file("full-ca.pem", &full_ca));
        settings.read_client_ca = Some(dir.file("read-ca.pem", &read_ca));
        settings.tokens = vec![Secret::new(FULL)];
        settings.read_tokens = vec![Secret::new(READ)];
    });
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, running.tcp[0].port()));
    Secured { running, at, full, read }
}

fn client(certificate: Option<&Certificate>) -> Arc<ClientConfig> {
    let mut config = believing_client(rustls::ALL_VERSIONS);
    if let Some(Certificate { pem, key }) = certificate {
        let chain = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>().unwrap();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let key = CertifiedKey::from_der(chain, key, &ring::default_provider()).unwrap();
        config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(key));
    }
    Arc::new(config)
}

#[test]
fn tls_needs_a_client_certificate_or_token() {
    let Secured { running: _running, at, full, read } = secured();
    let host = at.to_string();
    let status = |certificate: Option<&Certificate>, token: Option<&str>, change: bool| {
        let token = token.map(|token| format!("Bearer {token}"));
        let headers: Vec<(&str, &str)> =
            token.iter().map(|token| ("Authorization", token.as_str())).collect();
        let body = change.then_some("{\"level\":\"info\"}");
        let (method, path) = if change { ("PUT", "/v1/log") } else { ("GET", "/v1/status") };
        exchange_tls(at, &client(certificate), &request(method, path, &host, &headers, body)).unwrap().status
    };
    for (certificate, token, look, change) in [
        (None, None, 401, 401),
        (None, Some(FULL), 200, 200),
        (None, Some(READ), 200, 403),
        (Some(&full), None, 200, 200),
        (Some(&read), None, 200, 401),
        (Some(&read), Some(FULL), 200, 200),
    ] {
        let who = (certificate.is_some(), token);
        assert_eq!(status(certificate, token, false), look, "{who:?}");
        assert_eq!(status(certificate, token, true), change, "{who:?}");
    }
    let live = exchange_tls(at, &client(None), &request("GET", "/livez", &host, &[], None)).unwrap();
    assert_eq!(live.status, 200);
}

#[test]
fn unknown_client_certificate_or_plain_http_is_closed() {
    let Secured { running, at, .. } = secured();
    let (stranger, _) = Certificate::of_client("operator");
    let get = request("GET", "/v1/status", &at.to_string(), &[], None);
    exchange_tls(at, &client(Some(&stranger)), &get).expect_err("an unknown CA");
    let plain = {
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect(at).unwrap();
        stream.write_all(&get).unwrap();
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        answer
    };
    assert!(!plain.starts_with(b"HTTP"), "{plain:?}");
    let text = running.get("/metrics").body;
    let line =
        text.lines().find(|line| line.starts_with("turnpike_admin_connections_closed_total{reason=\"tls\"}"));
    assert!(!line.expect("the counter").ends_with(" 0"), "{line:?}");
}

#[test]
fn renewed_certificate_is_used_unless_broken() {
    let Secured { running, at, .. } = secured();
    let shown = || {
        let mut stream = std::net::TcpStream::connect(at).unwrap();
        let name = "admin.example.org".try_into().unwrap();
        let mut connection = rustls::ClientConnection::new(client(None), name).unwrap();
        while connection.is_handshaking() {
            connection.complete_io(&mut stream).unwrap();
        }
        connection.peer_certificates().unwrap()[0].to_vec()
    };
    let before = shown();
    fs::write(running.dir.path("own.pem"), "broken").unwrap();
    assert_eq!(shown(), before);
    let renewed = Certificate::new(&["admin.example.org"]);
    fs::write(running.dir.path("own.key"), &renewed.key).unwrap();
    fs::write(running.dir.path("own.pem"), &renewed.pem).unwrap();
    let now = shown();
    assert_ne!(now, before);
    assert_eq!(now, CertificateDer::from_pem_slice(renewed.pem.as_bytes()).unwrap().to_vec());
}

#[test]
fn stopping_program_accepts_no_more_connections() {
    let running = Running::server(1);
    let socket = running.dir.path("a.sock");
    assert!(std::net::TcpStream::connect(running.tcp[0]).is_ok() && socket.exists());
    running.close();
    let is_refused = |at: SocketAddr| std::net::TcpStream::connect(at).is_err();
    turnpike_testkit::eventually("the listeners are closed", || {
        is_refused(running.tcp[0]) && is_refused(running.applications[0]) && !socket.exists()
    });
}

#[test]
fn unusable_files_are_named() {
    let dir = Dir::new();
    let own = Certificate::new(&["admin.example.org"]);
    let mut settings = on(vec![AdminAddress::Tcp((Ipv4Addr::UNSPECIFIED, 0).into())]);
    settings.tls_cert = Some(dir.path("own.pem"));
    settings.tls_key = Some(dir.file("own.key", &own.key));
    let told = |settings: &AdminSettings, wanted: &str| {
        let error = listen(settings, true).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{error}");
    };
    told(&settings, "own.pem: cannot be read");
    dir.file("own.pem", &own.pem);
    settings.client_ca = Some(dir.path("ca.pem"));
    told(&settings, "ca.pem: cannot be read");
    dir.file("ca.pem", "no PEM");
    told(&settings, "ca.pem: no certificate found");
    dir.file("ca.pem", &own.pem);
    assert_eq!(listen(&settings, true).expect("usable files"), 1);
}
