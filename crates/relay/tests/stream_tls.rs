//! TLS: certificates, protocols, and clients that do not speak TLS.

use crate::prelude::*;

use crate::support::*;
use rustls::{
    CipherSuite,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use strum::VariantArray as _;
use turnpike_relay::{CertificateError, Identity, TlsContext};
use turnpike_testkit::certificates::{ENCRYPTED_KEYS, PLAIN_KEY, believing_client, believing_client_of};
use turnpike_tls::KeyExchangeGroup;

fn world(names: &[&[&str]]) -> World {
    let identities: Vec<Identity> = names.iter().map(|names| identity(names)).collect();
    start(|config| config.tls = Some(context(&identities)))
}

fn shown(server: SocketAddr, name: &str) -> Vec<String> {
    let stream = tls_connect(server, name, &tls_config(&[])).unwrap();
    names_of(&stream.conn.peer_certificates().unwrap()[0])
}

fn names_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    let parsed = webpki::EndEntityCert::try_from(certificate).unwrap();
    parsed.valid_dns_names().map(str::to_owned).collect()
}

#[test]
fn server_name_selects_the_exact_then_wildcard_then_default_certificate() {
    let world = world(&[&["default.example"], &["*.example.org"], &["turn.example.org", "turn.example.net"]]);
    for (name, expected) in [
        ("turn.example.org", "turn.example.org"),
        ("TURN.example.net", "turn.example.org"),
        ("other.example.org", "*.example.org"),
        ("two.labels.example.org", "default.example"),
        ("example.org", "default.example"),
        ("unknown.example", "default.example"),
        // No server name: RFC 6066 section 3 excludes addresses.
        ("127.0.0.1", "default.example"),
    ] {
        assert_eq!(shown(world.tls(), name)[0], expected, "{name}");
    }
}

#[test]
fn client_gets_the_certificate_that_it_can_verify() {
    let world = {
        let key = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let ed25519 = identity_of(&Certificate::of_key(&key, &["both.example"], |_| ()));
        start(|config| config.tls = Some(context(&[ed25519, identity(&["both.example", "second"])])))
    };
    assert_eq!(
        shown(world.tls(), "both.example"),
        ["both.example"],
        "the first certificate, which this client can verify"
    );
    // Uses OpenSSL, because rustls cannot easily disable algorithms.
    let Ok(output) = std::process::Command::new("openssl")
        .args(["s_client", "-connect", &world.tls().to_string(), "-servername", "both.example", "-showcerts"])
        .args(["-sigalgs", "ECDSA+SHA256"])
        .stdin(std::process::Stdio::null())
        .output()
    else {
        return turnpike_testkit::alone::skip("openssl is not installed");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    // OpenSSL 4 writes signature algorithms in lower case.
    assert!(text.to_lowercase().contains("ecdsa"), "{text}");
}

#[test]
fn new_certificates_apply_to_new_tls_clients_only() {
    let tls = context(&[identity(&["old.example"])]);
    let world = start(|config| config.tls = Some(Arc::clone(&tls)));
    let stream = tls_connect(world.tls(), "any.example", &tls_config(&[])).unwrap();
    let mut client = Client::new(stream);
    client.ask(&allocate());
    tls.replace(&[identity(&["new.example"])]);
    assert_eq!(shown(world.tls(), "any.example"), ["new.example"]);
    client.ask(&refresh(1));
}

fn negotiated(world: &World, protocols: &[&str]) -> Option<Vec<u8>> {
    let stream = tls_connect(world.tls(), "a.example", &tls_config(protocols)).unwrap();
    stream.conn.alpn_protocol().map(<[u8]>::to_vec)
}

#[test]
fn alpn_accepts_turn_and_discovery_and_refuses_others() {
    let world = world(&[&["a.example"]]);
    assert_eq!(negotiated(&world, &[]), None);
    assert_eq!(negotiated(&world, &["stun.nat-discovery"]).unwrap(), b"stun.nat-discovery");
    assert_eq!(negotiated(&world, &["http/1.1", "stun.nat-discovery", "stun.turn"]).unwrap(), b"stun.turn");
    assert!(tls_connect(world.tls(), "a.example", &tls_config(&["http/1.1", "h2"])).is_err());
    world.wait_for_failed(HandshakeFailure::Alpn, 1);
    world.wait_for_closed(CloseReason::Handshake, 1);
}

fn challenge_of(tls: &TlsContext, server_name: &str, names: &[&str]) {
    let shown = Certificate::new(names);
    let chain = CertificateDer::from_pem_slice(shown.pem.as_bytes()).unwrap();
    tls.show_challenge(server_name, chain, PrivateKeyDer::from_pem_slice(shown.key.as_bytes()).unwrap())
        .unwrap();
}

#[test]
fn authority_gets_the_challenge_certificate_and_is_disconnected() {
    let tls = context(&[identity(&["turn.example"])]);
    let world = start(|config| config.tls = Some(Arc::clone(&tls)));
    let ask = |name: &str, version, protocols: &[&str]| {
        let mut config = Arc::unwrap_or_clone(tls_config_of(version));
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        tls_connect(world.tls(), name, &Arc::new(config))
    };
    challenge_of(&tls, "Turn.example", &["challenge.example"]);
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let mut stream = ask("turn.example", version, &["acme-tls/1"]).unwrap();
        assert_eq!(stream.conn.alpn_protocol(), Some(&b"acme-tls/1"[..]));
        assert_eq!(names_of(&stream.conn.peer_certificates().unwrap()[0]), ["challenge.example"]);
        assert_eq!(stream.read(&mut [0; 16]).unwrap(), 0, "closed with close_notify");
        let client = ask("turn.example", version, &["stun.turn", "acme-tls/1"]).unwrap();
        assert_eq!(names_of(&client.conn.peer_certificates().unwrap()[0]), ["turn.example"]);
        assert!(ask("other.example", version, &["acme-tls/1"]).is_err(), "no challenge for this name");
    }
    world.wait_for_closed(CloseReason::Challenge, 2);
    tls.hide_challenge("turn.example");
    assert!(ask("turn.example", &rustls::version::TLS13, &["acme-tls/1"]).is_err());
    assert_eq!(shown(world.tls(), "turn.example"), ["turn.example"]);
}

#[test]
fn pending_challenges_are_bounded() {
    let tls = context(&[]);
    for number in 0..128 {
        challenge_of(&tls, &format!("{number}.example"), &["a.example"]);
    }
    let shown = Certificate::new(&["a.example"]);
    let chain = CertificateDer::from_pem_slice(shown.pem.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(shown.key.as_bytes()).unwrap();
    assert!(tls.show_challenge("one-more.example", chain, key).is_err());
}

#[test]
fn without_a_certificate_tls_is_refused_until_one_arrives() {
    let tls = context(&[]);
    let world = start(|config| config.tls = Some(Arc::clone(&tls)));
    assert!(tls_connect(world.tls(), "turn.example", &tls_config(&[])).is_err());
    Client::new(connect(world.tcp())).ask(&binding(1));
    tls.replace(&[identity(&["turn.example"])]);
    assert_eq!(shown(world.tls(), "turn.example"), ["turn.example"]);
}

fn kind(world: &World, config: &Arc<ClientConfig>) -> HandshakeKind {
    let mut client = Client::new(tls_connect(world.tls(), "a.example", config).unwrap());
    // Tickets arrive after the handshake.
    client.ask(&binding(1));
    client.stream.conn.handshake_kind().unwrap()
}

#[test]
fn sessions_are_resumed_in_both_versions() {
    let world = world(&[&["a.example"]]);
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let config = tls_config_of(version);
        assert_eq!(kind(&world, &config), HandshakeKind::Full);
        assert_eq!(kind(&world, &config), HandshakeKind::Resumed);
    }
    let streams = world.relay.snapshots();
    eventually("two handshakes of each kind are counted", || {
        let streams = world.streams();
        streams.handshakes_full == 2 && streams.handshakes_resumed == 2
    });
    drop(streams);
}

#[test]
fn key_exchange_is_post_quantum_if_the_client_offers_it() {
    let world = world(&[&["a.example"]]);
    let group = |groups: &[usize], version| {
        let mut provider = turnpike_tls::provider();
        provider.kx_groups = groups.iter().map(|place| provider.kx_groups[*place]).collect();
        let config = Arc::new(believing_client_of(provider, &[version]));
        let group = |_| {
            let mut client = Client::new(tls_connect(world.tls(), "a.example", &config).unwrap());
            client.ask(&binding(1));
            KeyExchangeGroup::of(&client.stream.conn)
        };
        // The second connection resumes the first one's session.
        [1, 2].map(group)
    };
    use KeyExchangeGroup as Group;
    let (tls13, tls12) = (&rustls::version::TLS13, &rustls::version::TLS12);
    assert_eq!(group(&[0, 1, 2, 3], tls13), [Some(Group::X25519MlKem768); 2]);
    assert_eq!(group(&[0], tls13), [Some(Group::X25519MlKem768); 2]);
    assert_eq!(group(&[1, 0], tls13), [Some(Group::X25519); 2]);
    assert_eq!(group(&[3], tls13), [Some(Group::Secp384r1); 2]);
    assert_eq!(group(&[0, 2], tls12), [Some(Group::Secp256r1), None]);
    world.wait_for("all key exchanges are counted", |streams| {
        Group::VARIANTS.iter().map(|group| streams.by_group(*group)).eq([4, 2, 1, 2])
    });
}

fn client_of(
    version: &'static rustls::SupportedProtocolVersion,
    certificate: Option<&Certificate>,
) -> Arc<rustls::ClientConfig> {
    let mut config = believing_client(&[version]);
    if let Some(Certificate { pem, key, .. }) = certificate {
        let chain = vec![CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let provider = turnpike_tls::provider();
        let certified = rustls::sign::CertifiedKey::from_der(chain, key, &provider).unwrap();
        config.client_auth_cert_resolver = Arc::new(rustls::sign::SingleCertAndKey::from(certified));
    }
    Arc::new(config)
}

fn authorities(pem: &str) -> rustls::RootCertStore {
    let mut store = rustls::RootCertStore::empty();
    store.add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
    store
}

/// True if the server answers a request of this client.
fn is_served(world: &World, config: &Arc<rustls::ClientConfig>) -> bool {
    let Ok(mut stream) = tls_connect(world.tls(), "a.example", config) else { return false };
    // TLS 1.3 clients learn of a refusal only now.
    stream.write_all(&binding(1)).is_ok() && matches!(stream.read(&mut [0; 512]), Ok(1..))
}

#[test]
fn clients_need_a_certificate_from_the_current_authorities() {
    let tls = context(&[identity(&["a.example"])]);
    let world = start(|config| config.tls = Some(Arc::clone(&tls)));
    let [(ours, our_authority), (theirs, their_authority)] =
        [(); 2].map(|()| Certificate::of_client("phone"));
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let failed = world.streams().failed(HandshakeFailure::ClientCertificate);
        let challenges = world.streams().closed(CloseReason::Challenge);
        let [none, ours, theirs] =
            [None, Some(&ours), Some(&theirs)].map(|certificate| client_of(version, certificate));
        let served = || [&none, &ours, &theirs].map(|config| is_served(&world, config));
        assert_eq!(served(), [true; 3], "not required yet; each client now has a ticket");
        tls.require_client_certificates(Some(authorities(&our_authority))).unwrap();
        assert_eq!(served(), [false, true, false]);
        tls.require_client_certificates(Some(authorities(&their_authority))).unwrap();
        assert_eq!(served(), [false, false, true]);
        // A certificate authority that validates a name has no certificate.
        challenge_of(&tls, "turn.example", &["challenge.example"]);
        assert_eq!(served(), [false, false, true]);
        let mut config = Arc::unwrap_or_clone(tls_config_of(version));
        config.alpn_protocols = vec![b"acme-tls/1".to_vec()];
        let stream = tls_connect(world.tls(), "turn.example", &Arc::new(config)).unwrap();
        assert_eq!(names_of(&stream.conn.peer_certificates().unwrap()[0]), ["challenge.example"]);
        // A TLS 1.3 client finishes before the server does.
        world.wait_for_closed(CloseReason::Challenge, challenges + 1);
        tls.hide_challenge("turn.example");
        world.wait_for_failed(HandshakeFailure::ClientCertificate, failed + 6);
        tls.require_client_certificates(None).unwrap();
        assert_eq!(served(), [true; 3]);
    }
}

#[test]
fn tickets_and_the_first_reply_are_sent_together() {
    let world = world(&[&["a.example"]]);
    let mut sock = connect(world.tls());
    let name = ServerName::try_from("a.example").unwrap();
    let mut tls = ClientConnection::new(tls_config(&[]), name).unwrap();
    while tls.wants_write() {
        tls.write_tls(&mut sock).unwrap();
    }
    while tls.is_handshaking() {
        tls.read_tls(&mut sock).unwrap();
        tls.process_new_packets().unwrap();
    }
    // The client has not sent its Finished message yet.
    tls.writer().write_all(&binding(1)).unwrap();
    let mut both = Vec::new();
    while tls.wants_write() {
        tls.write_tls(&mut both).unwrap();
    }
    sock.write_all(&both).unwrap();
    let mut client = Client::new(StreamOwned::new(tls, sock));
    assert_eq!(client.receive().unwrap().kind(), BINDING | 0x0100);
    world.wait_for("the reply is sent", |streams| streams.writes >= 2);
    assert_eq!(world.streams().writes, 2, "one write for the handshake, one for everything after it");
}

#[test]
fn closed_connection_gets_no_further_writes() {
    let world = world(&[&["a.example"]]);
    let mut client = Client::new(tls_connect(world.tls(), "a.example", &tls_config(&[])).unwrap());
    client.ask(&binding(1));
    world.wait_for("the reply is sent", |streams| streams.sent == 1);
    let before = world.streams().writes;
    TcpSocket::from(OwnedFd::from(client.stream.sock)).reset();
    world.wait_for_closed(CloseReason::Broken, 1);
    assert_eq!(world.streams().writes, before);
}

#[test]
fn garbage_instead_of_a_handshake_is_counted() {
    let world = world(&[&["a.example"]]);
    let mut other = Client::new(tls_connect(world.tls(), "a.example", &tls_config(&[])).unwrap());
    other.ask(&allocate());
    let record = |kind: u8, body: &[u8]| {
        let len = u16::try_from(body.len()).unwrap().to_be_bytes();
        [&[kind, 3, 1], &len[..], body].concat()
    };
    for (count, bytes) in (1..).zip([
        record(0x16, &[0xFF; 100]),
        record(0x16, &[1, 0, 0, 2, 0xFF, 0xFF]),
        [0x16; 3000].to_vec(),
    ]) {
        for port in [world.tls(), world.tcp()] {
            let mut stream = connect(port);
            stream.write_all(&bytes).unwrap();
            Client::new(stream).ends();
        }
        world.wait_for_closed(CloseReason::Handshake, 2 * count);
    }
    // A plaintext application data record: its first byte is valid for neither a TLS handshake nor STUN.
    let mut stream = connect(world.tls());
    stream.write_all(&record(0x17, &[0; 40])).unwrap();
    Client::new(stream).ends();
    other.ask(&refresh(1));
    assert_eq!(world.streams().handshakes_full, 1);
}

#[test]
fn garbage_after_a_handshake_is_counted() {
    let world = world(&[&["a.example"]]);
    let mut client = Client::new(tls_connect(world.tls(), "a.example", &tls_config(&[])).unwrap());
    client.ask(&binding(1));
    client.stream.sock.write_all(&[0x17, 3, 3, 0, 32]).unwrap();
    client.stream.sock.write_all(&[0xEE; 32]).unwrap();
    world.wait_for_closed(CloseReason::Tls, 1);
    let mut client = Client::new(tls_connect(world.tls(), "a.example", &tls_config(&[])).unwrap());
    client.send(&[0xFF; 20]);
    client.ends();
    world.wait_for_closed(CloseReason::NotStun, 1);
}

#[test]
fn endless_hello_is_cut_off() {
    let world = world(&[&["a.example"]]);
    let mut stream = connect(world.tls());
    // A handshake message of 16 MiB in records of 16 KiB.
    let mut record = vec![0x16, 3, 1, 0x40, 0];
    record.extend([1, 0xFF, 0xFF, 0xFF]);
    record.resize(5 + 0x4000, 0);
    let mut sent = 0;
    while sent < 64 {
        if stream.write_all(&record).is_err() {
            break;
        }
        record[5..9].fill(0);
        sent += 1;
    }
    Client::new(stream).ends();
    world.wait_for_closed(CloseReason::Handshake, 1);
}

#[test]
fn encrypted_keys_need_their_password() {
    let certificate = Certificate::of_key(&KeyPair::from_pem(PLAIN_KEY).unwrap(), &["a.example"], |_| ());
    let read = |key: &str, password: Option<&str>| {
        Identity::from_encrypted_pem(certificate.pem.as_bytes(), key.as_bytes(), password).map(drop)
    };
    for key in ENCRYPTED_KEYS {
        assert_eq!(read(key, Some("horse")), Ok(()));
        assert_eq!(read(&format!("A key:\r\n{}\n# end", key.replace('\n', "\r\n")), Some("horse")), Ok(()));
        assert_eq!(read(key, None), Err(CertificateError::EncryptedKey));
        let wrong = read(key, Some("hose"));
        assert!(matches!(&wrong, Err(CertificateError::KeyPassword(_))), "{wrong:?}");
        let cut = read(&key[..key.len() / 2], Some("horse"));
        assert!(matches!(&cut, Err(CertificateError::KeyPem(_))), "{cut:?}");
    }
    assert_eq!(read(PLAIN_KEY, Some("horse")), Ok(()));
}

#[test]
fn unusable_certificates_are_refused_with_a_reason() {
    let [Certificate { pem: cert, key }, other] = [(); 2].map(|()| Certificate::new(&["a.example"]));
    let other = other.key;
    let read = |cert: &str, key: &str, at: u64| {
        Identity::from_pem(cert.as_bytes(), key.as_bytes()).and_then(|it| it.check_time(at)).err()
    };
    assert_eq!(read(&cert, &key, now()), None);
    assert_eq!(read("", &key, now()), Some(CertificateError::NoCertificate));
    assert_eq!(read(&key, &key, now()), Some(CertificateError::NoCertificate));
    assert_eq!(read(&cert, "", now()), Some(CertificateError::NoKey));
    assert_eq!(read(&cert, &cert, now()), Some(CertificateError::NoKey));
    assert_eq!(read(&cert, &other, now()), Some(CertificateError::Mismatch));
    let broken = cert.replacen("-----\n", "-----\n!!!", 1);
    assert!(matches!(read(&broken, &key, now()), Some(CertificateError::CertificatePem(_))));
    let encrypted = key.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
    assert_eq!(read(&cert, &encrypted, now()), Some(CertificateError::EncryptedKey));
    let begin = "-----BEGIN PRIVATE KEY-----";
    let header = format!("{begin}\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\n");
    let old_style = key.replace(&format!("{begin}\n"), &header).replace(&format!("{begin}\r\n"), &header);
    assert_eq!(read(&cert, &old_style, now()), Some(CertificateError::EncryptedKey));
    // Error messages must be readable: no Debug output, no lists of bytes.
    let relabelled = key.replace("PRIVATE KEY", "CERTIFICATE");
    for (cert, key, words) in [
        (&cert[..cert.len() / 2], &key[..], "END CERTIFICATE----- is missing"),
        (&cert, &key[..key.len() / 2], "END PRIVATE KEY----- is missing"),
        (&broken, &key, "not Base64"),
        (&relabelled, &key, "not valid DER"),
    ] {
        let text = read(cert, key, now()).unwrap().to_string();
        assert!(text.contains(words), "{text}");
        assert!(!text.contains('[') && !text.contains('('), "{text}");
    }
    let year = |year| rcgen::date_time_ymd(year, 1, 1);
    let old = Certificate::with(&["a.example"], |params| {
        (params.not_before, params.not_after) = (year(2020), year(2021));
    });
    assert!(matches!(read(&old.pem, &old.key, now()), Some(CertificateError::Expired(_))));
    let year_2019 = 1_560_000_000;
    assert!(matches!(read(&old.pem, &old.key, year_2019), Some(CertificateError::NotYetValid(_))));
    assert_eq!(read(&old.pem, &old.key, 1_600_000_000), None, "valid at that time");
    let then = Identity::from_pem(old.pem.as_bytes(), old.key.as_bytes()).unwrap();
    assert_eq!((then.not_before(), then.not_after()), (1_577_836_800, 1_609_459_200));
}

#[test]
fn aes_128_is_preferred_in_both_versions() {
    let world = world(&[&["a.example"]]);
    for (version, suite) in [
        (&rustls::version::TLS13, CipherSuite::TLS13_AES_128_GCM_SHA256),
        (&rustls::version::TLS12, CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256),
    ] {
        let stream = tls_connect(world.tls(), "a.example", &tls_config_of(version)).unwrap();
        assert_eq!(stream.conn.negotiated_cipher_suite().unwrap().suite(), suite);
    }
}

/// RFC 8489 section 6.2.3.
#[test]
fn tls_1_2_uses_ecdhe_rsa_with_an_rsa_certificate() {
    // rcgen cannot create RSA keys.
    let made = std::process::Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a.example"])
        .args(["-addext", "subjectAltName=DNS:a.example", "-keyout", "-"])
        .stdin(std::process::Stdio::null())
        .output();
    let Ok(made) = made else { return turnpike_testkit::alone::skip("openssl is not installed") };
    let identity = Identity::from_pem(&made.stdout, &made.stdout).unwrap();
    let world = start(|config| config.tls = Some(context(&[identity])));
    let config = tls_config_of(&rustls::version::TLS12);
    let stream = tls_connect(world.tls(), "a.example", &config).unwrap();
    let suite = stream.conn.negotiated_cipher_suite().unwrap().suite();
    assert_eq!(suite, CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256);
}

/// RFC 8489 section 6.2.3.
#[test]
fn suites_with_known_weaknesses_are_refused() {
    let world = world(&[&["a.example"]]);
    let answer = |suites: &[u16]| {
        let body = hello_body([3, 3], &[0], suites, &[0x0403, 0x0804, 0x0401]);
        let [.., high, low] = u32::try_from(body.len()).unwrap().to_be_bytes();
        let record = [&[22, 3, 1][..], &vector(&[&[1, 0, high, low][..], &body].concat())].concat();
        let mut stream = connect(world.tls());
        stream.write_all(&record).unwrap();
        let mut answer = [0; 7];
        stream.read_exact(&mut answer).unwrap();
        answer
    };
    // DES, triple DES, RC4, no encryption and CBC, each with ECDHE and ECDSA where such a suite exists.
    for suites in
        [&[0x0009, 0x000A, 0xC008][..], &[0x0004, 0x0005, 0xC007], &[0x0001, 0xC006], &[0xC009, 0xC023]]
    {
        // Alert (RFC 5246 section 7.2): fatal, handshake_failure.
        assert_eq!(answer(suites), [21, 3, 3, 0, 2, 2, 40], "{suites:04x?}");
    }
    assert_eq!(answer(&[0x000A, 0xC02B])[0], 22, "a ServerHello");
}
