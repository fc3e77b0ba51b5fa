//! DTLS 1.2 and 1.3 clients: handshakes, messages, closing, certificates.

use crate::prelude::*;
use std::process::{Child, Command, Stdio};

use crate::support::{dtls::context, *};
use dimpl::ProtocolVersion;
use turnpike_relay::DtlsError;

#[test]
fn both_versions_allocate_and_relay_by_channel_in_both_directions() {
    let world = world();
    for (kind, version) in [
        (Kind::V12, ProtocolVersion::DTLS1_2),
        (Kind::V13, ProtocolVersion::DTLS1_3),
        (Kind::Auto, ProtocolVersion::DTLS1_3),
    ] {
        let mut client = DtlsClient::connect(world.dtls(), kind);
        assert_eq!(client.version(), Some(version), "{kind:?}");
        let peer = peer();
        let relayed = client.allocated(&peer);
        for len in [0, 1, 3, 120, 1400, 9000] {
            let payload = vec![u8::try_from(len % 251).unwrap(); len];
            client.send(&channel_data(&payload));
            assert_eq!(heard(&peer), payload, "{kind:?}");
            peer.send_to(&payload, relayed).unwrap();
            assert_eq!(client.receive().payload(), payload, "{kind:?}");
        }
    }
    world.wait_for_dtls("handshakes are counted by version", |stats| {
        (stats.handshakes_1_2, stats.handshakes_1_3, stats.open) == (1, 2, 3)
    });
    assert_eq!(world.dtls_stats().failed.iter().sum::<u64>(), 0);
}

#[test]
fn close_notify_ends_the_allocation_in_both_versions() {
    let world = world();
    for kind in [Kind::V12, Kind::V13] {
        let mut client = DtlsClient::connect(world.dtls(), kind);
        client.allocated(&peer());
        eventually("an allocation exists", || world.allocations() == 1);
        client.close();
        wait_for_no_allocation(&world);
    }
    world.wait_for_dtls("both clients left", |stats| stats.ended(DtlsEnd::Client) == 2 && stats.open == 0);
}

#[test]
fn new_handshake_from_the_same_port_replaces_the_association() {
    let world = world();
    for (number, kinds) in
        [(1, [Kind::V12, Kind::V12]), (2, [Kind::V13, Kind::V12]), (3, [Kind::V12, Kind::V13])]
    {
        let mut first = DtlsClient::connect(world.dtls(), kinds[0]);
        first.allocated(&peer());
        let mut second = DtlsClient::on(first.socket.try_clone().unwrap(), kinds[1]);
        second.finish().unwrap();
        second.ask(&binding(9));
        wait_for_no_allocation(&world);
        world.wait_for_dtls("the association is replaced", |stats| stats.ended(DtlsEnd::Replaced) == number);
    }
}

#[test]
fn plain_stun_on_a_dtls_port_is_dropped_and_counted() {
    let world = world();
    let socket = UdpSocket::bind((world.dtls().ip(), 0)).unwrap();
    socket.send_to(&binding(1), world.dtls()).unwrap();
    world.wait_for_dtls("the datagram is counted", |stats| stats.dropped(DtlsDrop::NotDtls) == 1);
    socket.set_nonblocking(true).unwrap();
    assert!(socket.recv(&mut [0; 100]).is_err());
}

#[test]
fn one_port_serves_plain_udp_and_dtls() {
    let any = ([127, 0, 0, 1], 0).into();
    let world = start_with(|config| {
        config.dtls.context = Some(context(&[identity(&["dtls.example"])]));
        config.dtls.listen = vec![any];
    });
    let udp = world.relay.listeners().udp[0];
    assert_eq!(world.dtls(), udp);
    let plain = peer();
    plain.connect(udp).unwrap();
    let mut client = DtlsClient::connect(udp, Kind::Auto);
    for round in 0..3 {
        plain.send(&binding(round)).unwrap();
        assert_eq!(Message(heard(&plain)).kind(), BINDING | 0x0100);
        client.ask(&binding(round));
    }
    let mut both = DtlsClient::on(plain.try_clone().unwrap(), Kind::V12);
    both.finish().unwrap();
    both.ask(&binding(7));
    plain.send(&allocate()).unwrap();
    let mut buffer = [0; 1500];
    let deadline = Instant::now() + SOON;
    let len = loop {
        if let Ok(len) = plain.recv(&mut buffer) {
            break len;
        }
        assert!(Instant::now() < deadline);
    };
    assert_eq!(Message(buffer[..len].to_vec()).kind(), ALLOCATE | 0x0100);
    both.ask(&allocate());
    eventually("two allocations exist", || world.allocations() == 2);
    let (other, far) = (self::peer(), self::peer());
    other.connect(udp).unwrap();
    for request in [allocate(), bind(far.local_addr().unwrap())] {
        other.send(&request).unwrap();
        heard(&other);
    }
    other.send(&channel_data(b"plain")).unwrap();
    assert_eq!(heard(&far), b"plain");
    both.ask(&binding(8));
    assert_eq!(world.dtls_stats().dropped.iter().sum::<u64>(), 0);
}

#[test]
fn new_certificates_apply_to_new_clients_only() {
    let (old, new) = (identity(&["old.example"]), identity(&["new.example"]));
    let context = context(&[old]);
    let world = start_with(|config| config.dtls.context = Some(Arc::clone(&context)));
    let mut client = DtlsClient::connect(world.dtls(), Kind::V12);
    client.ask(&allocate());
    context.replace(&[new]).unwrap();
    for kind in [Kind::V12, Kind::V13] {
        let shown = DtlsClient::connect(world.dtls(), kind).shown;
        let shown = rustls::pki_types::CertificateDer::from(shown);
        let parsed = webpki::EndEntityCert::try_from(&shown).unwrap();
        assert_eq!(parsed.valid_dns_names().collect::<Vec<_>>(), ["new.example"], "{kind:?}");
    }
    client.ask(&refresh(1));
}

#[test]
fn p384_works_and_unsupported_keys_are_reported() {
    let of = |algorithm| {
        let key = KeyPair::generate_for(algorithm).unwrap();
        identity_of(&Certificate::of_key(&key, &["a.example"], |_| ()))
    };
    let (p384, ed25519) = (of(&rcgen::PKCS_ECDSA_P384_SHA384), of(&rcgen::PKCS_ED25519));
    assert!(p384.can_dtls() && !ed25519.can_dtls());
    let refused = turnpike_relay::DtlsContext::new(std::slice::from_ref(&ed25519), SOON);
    assert!(matches!(refused, Err(DtlsError::NoCertificate)));
    let context = context(&[ed25519.clone(), p384]);
    assert!(matches!(context.replace(&[ed25519]), Err(DtlsError::NoCertificate)));
    let world = start_with(|config| config.dtls.context = Some(context));
    for kind in [Kind::V12, Kind::V13] {
        DtlsClient::connect(world.dtls(), kind).ask(&binding(1));
    }
}

#[test]
fn stopping_the_relay_sends_close_notify() {
    let world = world();
    let mut clients = [Kind::V12, Kind::V13].map(|kind| DtlsClient::connect(world.dtls(), kind));
    world.relay.stop();
    for client in &mut clients {
        client.hears_farewell();
    }
}

struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Splits a ClientHello into fragments of `size` bytes, one per datagram (RFC 6347 section 4.2.3).
fn fragments(hello: &[u8], size: usize) -> Vec<Vec<u8>> {
    let (header, body) = (&hello[..25], &hello[25..]);
    let bytes = |number: usize| u32::try_from(number).unwrap().to_be_bytes();
    let fragment = |(place, piece): (usize, &[u8])| {
        let message = [&header[13..19], &bytes(place * size)[1..], &bytes(piece.len())[1..], piece].concat();
        let sequence = header[10] + u8::try_from(place).unwrap();
        [&header[..10], &[sequence], &bytes(message.len())[2..], &message].concat()
    };
    body.chunks(size).enumerate().map(fragment).collect()
}

#[test]
fn fragmented_hello_is_joined_after_its_cookie_is_verified() {
    let world = world();
    for size in [70, 80, 100] {
        let (mut client, first, second) = hellos(&world, Kind::V12);
        // A first fragment without a cookie gets one in reply, and so does each retransmission.
        let probe = UdpSocket::bind((world.dtls().ip(), 0)).unwrap();
        probe.set_read_timeout(Some(SOON)).unwrap();
        for _ in 0..2 {
            probe.send_to(&fragments(&first, size)[0], world.dtls()).unwrap();
            let mut answer = [0; 100];
            assert_eq!((probe.recv(&mut answer).unwrap(), answer[13]), (60, 3));
        }
        let pieces = fragments(&second, size);
        assert!(pieces.len() > 1);
        // A repeated or premature fragment changes nothing.
        for piece in [&pieces[..1], &pieces[pieces.len() - 1..], &pieces[..]].concat() {
            client.socket.send(&piece).unwrap();
        }
        client.finish().unwrap();
        client.ask(&binding(1));
    }
    world.wait_for_dtls("all handshakes end", |stats| (stats.handshakes_1_2, stats.half_open) == (3, 0));

    // Without a valid cookie, nothing is stored.
    let (client, _, second) = hellos(&world, Kind::V12);
    let forger = UdpSocket::bind((world.dtls().ip(), 0)).unwrap();
    for piece in fragments(&second, 100) {
        forger.send_to(&piece, world.dtls()).unwrap();
    }
    world.wait_for_dtls("the bad cookie is counted", |stats| stats.dropped(DtlsDrop::BadCookie) == 1);
    drop(client);
}

/// OpenSSL fragments the ClientHello that contains the cookie if the MTU is small. The minimum MTU is 228 or
/// 256, depending on the version.
#[test]
fn openssl_connects_with_any_mtu() {
    for mtu in ["256", "300", "1500"] {
        let world = world();
        let child = Command::new("openssl")
            .args(["s_client", "-dtls1_2", "-mtu", mtu, "-quiet", "-no_ign_eof"])
            .args(["-servername", "dtls.example", "-connect", &world.dtls().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let Ok(mut child) = child.map(Program) else {
            return turnpike_testkit::alone::skip("openssl is not installed");
        };
        child.0.stdin.as_mut().unwrap().write_all(&binding(5)).unwrap();
        // Reads from a pipe cannot time out, so a thread is needed.
        let mut stdout = child.0.stdout.take().unwrap();
        let (heard, hears) = mpsc::channel();
        thread::spawn(move || {
            let mut answer = [0; 20];
            stdout.read_exact(&mut answer).map(|()| heard.send(answer))
        });
        let answer = hears.recv_timeout(SOON);
        let answer = answer.unwrap_or_else(|_| panic!("MTU {mtu}: no answer, {:?}", world.dtls_stats()));
        assert_eq!(Message(answer.to_vec()).kind(), BINDING | 0x0100);
        drop(child.0.stdin.take());
        world.wait_for_dtls("openssl closes", |stats| stats.ended(DtlsEnd::Client) == 1);
        eventually("openssl exits", || child.0.try_wait().unwrap());
        assert_eq!(world.dtls_stats().handshakes_1_2, 1);
    }
}
