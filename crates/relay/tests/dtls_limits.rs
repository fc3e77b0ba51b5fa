//! Resources that DTLS clients use before authentication: none if the address is spoofed, a limited amount
//! otherwise.

use crate::prelude::*;
use crate::support::*;
use turnpike_relay::DtlsStats;

fn dropped(stats: &DtlsStats) -> u64 {
    stats.dropped.iter().sum()
}

#[test]
fn cookie_is_invalid_for_another_port_or_hello() {
    let world = world();
    for kind in [Kind::V12, Kind::V13] {
        let before = world.dtls_stats().dropped(DtlsDrop::BadCookie);
        let (_, _, second) = hellos(&world, kind);
        let thief = UdpSocket::bind((world.dtls().ip(), 0)).unwrap();
        thief.send_to(&second, world.dtls()).unwrap();
        world.wait_for_dtls("the drop is counted", |stats| stats.dropped(DtlsDrop::BadCookie) == before + 1);
        let (client, _, mut second) = hellos(&world, kind);
        second[30] ^= 1;
        client.socket.send(&second).unwrap();
        world.wait_for_dtls("the drop is counted", |stats| stats.dropped(DtlsDrop::BadCookie) == before + 2);
    }
    let stats = world.dtls_stats();
    assert_eq!((stats.half_open, stats.open), (0, 0));
}

#[test]
fn refused_clients_get_no_cookie() {
    let world = world_with(|config| config.clients.deny = vec!["127.0.0.0/8".parse().unwrap()]);
    let mut client = DtlsClient::new(world.dtls(), Kind::V12);
    client.step().unwrap();
    world.wait_for_dtls("counted", |stats| stats.dropped(DtlsDrop::ClientRefused) > 0);
    assert_eq!(world.dtls_stats().cookies, 0);
}

#[test]
fn lost_flights_are_retransmitted() {
    let world = world();
    for kind in [Kind::V12, Kind::V13] {
        // The cookie is lost, so the client retransmits.
        let (mut client, first, _) = hellos(&world, kind);
        client.socket.send(&first).unwrap();
        client.socket.recv(&mut [0; 4096]).unwrap();
        // The server's flight is lost, so one side retransmits.
        let (mut lossy, _, second) = hellos(&world, kind);
        lossy.socket.send(&second).unwrap();
        lossy.socket.set_read_timeout(Some(SOON)).unwrap();
        lossy.socket.recv(&mut [0; 4096]).unwrap();
        lossy.socket.send(&second).unwrap();
        lossy.finish().unwrap();
        lossy.ask(&binding(1));
        client.finish().unwrap();
    }
}

#[test]
fn stalled_handshake_times_out() {
    let world = world_with(|config| config.limits.first_message = Duration::from_millis(300));
    for (number, kind) in [(1, Kind::V12), (2, Kind::V13)] {
        let (client, _, second) = hellos(&world, kind);
        client.socket.send(&second).unwrap();
        world.wait_for_dtls("the handshake times out", |stats| {
            stats.failed(DtlsFailure::Timeout) == number && stats.half_open == 0
        });
    }
}

#[test]
fn idle_association_without_an_allocation_ends() {
    // Longer than a handshake and a request can take on a busy machine.
    let world = world_with(|config| config.limits.idle = Duration::from_millis(3000));
    let kinds = [Kind::V12, Kind::V13];
    let mut allocated = kinds.map(|kind| {
        let mut client = DtlsClient::connect(world.dtls(), kind);
        client.ask(&allocate());
        client
    });
    let mut idle = kinds.map(|kind| DtlsClient::connect(world.dtls(), kind));
    idle.iter_mut().for_each(DtlsClient::hears_farewell);
    world.wait_for_dtls("two clients time out", |stats| stats.ended(DtlsEnd::Idle) == 2 && stats.open == 2);
    for client in &mut allocated {
        client.ask(&refresh(1));
        client.ask(&stun(REFRESH, 2, &[(0x000D, &0_u32.to_be_bytes())]));
    }
    allocated.iter_mut().for_each(DtlsClient::hears_farewell);
    world.wait_for_dtls("the others time out", |stats| stats.ended(DtlsEnd::Idle) == 4 && stats.open == 0);
    wait_for_no_allocation(&world);
}

#[test]
fn only_associations_without_an_allocation_are_evicted() {
    let world = world_with(|config| config.limits.idle_connections = 3);
    let mut allocated = DtlsClient::connect(world.dtls(), Kind::V12);
    allocated.ask(&allocate());
    let mut idle: Vec<DtlsClient> = (0..5).map(|_| DtlsClient::connect(world.dtls(), Kind::V13)).collect();
    world.wait_for_dtls("two associations are evicted", |stats| stats.ended(DtlsEnd::Evicted) == 2);
    for (place, client) in idle.iter_mut().enumerate() {
        if place < 2 {
            client.hears_farewell();
        } else {
            client.ask(&binding(1));
        }
    }
    allocated.ask(&refresh(1));
}

/// If many clients arrive at once, handshakes in progress can finish and other clients wait. Otherwise, each
/// client would evict its predecessor.
#[test]
fn new_clients_do_not_evict_recent_handshakes() {
    let world = world_with(|config| config.limits.half_open_per_network = 2);
    let mut slow = [hellos(&world, Kind::V12), hellos(&world, Kind::V13)];
    for (client, _, second) in &slow {
        client.socket.send(second).unwrap();
    }
    world.wait_for_dtls("two handshakes are in progress", |stats| stats.half_open == 2);
    let (mut third, _, second) = hellos(&world, Kind::V12);
    third.socket.send(&second).unwrap();
    for (client, _, _) in &mut slow {
        client.finish().unwrap();
        client.ask(&binding(1));
    }
    third.finish().unwrap();
    third.ask(&binding(2));
    assert_eq!(world.dtls_stats().failed.iter().sum::<u64>(), 0, "{:?}", world.dtls_stats());
}

/// Prefixes of a ClientHello, every possible first byte, and noise: none of them creates state or gets a
/// reply longer than itself.
#[test]
fn garbage_is_counted_and_leaves_no_state() {
    let world = world();
    let witness = Witness::start(&world);
    let socket = UdpSocket::bind((world.dtls().ip(), 0)).unwrap();
    socket.connect(world.dtls()).unwrap();
    let mut sent = 0;
    let (_, first, second) = hellos(&world, Kind::V13);
    world.wait_for_dtls("the cookie is counted", |stats| stats.cookies == 1);
    let start = world.dtls_stats();
    for hello in [&first, &second] {
        for len in (0..hello.len()).step_by(3) {
            socket.send(&hello[..len]).unwrap();
            sent += 1;
            if sent % 100 == 0 {
                world.wait_for_dtls("datagrams are read", |stats| stats.datagrams >= start.datagrams + sent);
            }
        }
    }
    for first_byte in 0..=255_u8 {
        let mut noise: Vec<u8> =
            (0..200_u32).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[1]).collect();
        noise[0] = first_byte;
        socket.send(&noise).unwrap();
        sent += 1;
    }
    world.wait_for_dtls("all datagrams are read", |stats| stats.datagrams == start.datagrams + sent);
    let stats = world.dtls_stats();
    assert_eq!((stats.half_open, stats.open, stats.cookies), (0, 0, start.cookies), "{stats:?}");
    assert_eq!(dropped(&stats) - dropped(&start) + stats.failed.iter().sum::<u64>(), sent, "{stats:?}");
    witness.lost_nothing();
}

#[test]
fn garbage_does_not_end_associations() {
    let world = world();
    let witness = Witness::start(&world);
    let mut sent = 0;
    for kind in [Kind::V12, Kind::V13] {
        let mut client = DtlsClient::connect(world.dtls(), kind);
        let peer = peer();
        let relayed = client.allocated(&peer);
        for first_byte in 20..=63_u8 {
            for len in [1, 12, 13, 14, 40, 1200] {
                let mut noise = vec![0xFE; len];
                noise[0] = first_byte;
                client.socket.send(&noise).unwrap();
                sent += 1;
            }
        }
        client.send(&channel_data(b"still here"));
        assert_eq!(heard(&peer), b"still here", "{kind:?}");
        peer.send_to(b"so am I", relayed).unwrap();
        assert_eq!(client.receive().payload(), b"so am I");
    }
    world.wait_for_dtls("both associations are open and the noise is counted", |stats| {
        stats.open == 2 && stats.dropped(DtlsDrop::NoEffect) + stats.dropped(DtlsDrop::Malformed) == sent
    });
    witness.lost_nothing();
}

/// RFC 6347 section 4.1.2.7: invalid records are discarded, and the handshake continues.
#[test]
fn garbage_does_not_end_other_handshakes() {
    let world = world();
    let witness = Witness::start(&world);
    for kind in [Kind::V12, Kind::V13] {
        let (mut disturbed, _, second) = hellos(&world, kind);
        let (mut other, _, others) = hellos(&world, kind);
        disturbed.socket.send(&second).unwrap();
        other.socket.send(&others).unwrap();
        for first_byte in 20..=63_u8 {
            let mut noise = vec![0xFE; 200];
            noise[0] = first_byte;
            disturbed.socket.send(&noise).unwrap();
        }
        other.finish().unwrap();
        other.ask(&binding(1));
        disturbed.finish().unwrap();
        disturbed.ask(&binding(2));
    }
    witness.lost_nothing();
}

/// Plaintext alerts, one per datagram, that an attacker who knows a client's address and port could send.
fn forged_alerts() -> Vec<Vec<u8>> {
    let mut forged = Vec::new();
    for (level, description) in [(2, 40), (2, 0), (1, 0), (2, 10), (2, 90), (1, 100)] {
        for (version, sequence) in [(0xFD, 0), (0xFD, 9), (0xFF, 1)] {
            forged.push(vec![21, 0xFE, version, 0, 0, 0, 0, 0, 0, 0, sequence, 0, 2, level, description]);
        }
    }
    forged
}

fn split(mut datagram: &[u8]) -> Vec<&[u8]> {
    let mut records = Vec::new();
    while let [20..=26, ..] = datagram {
        let length = 13 + usize::from(u16::from_be_bytes([datagram[11], datagram[12]]));
        let (record, rest) = datagram.split_at(length);
        records.push(record);
        datagram = rest;
    }
    records.extend((!datagram.is_empty()).then_some(datagram));
    records
}

/// RFC 6347 section 4.1.2.7: unauthenticated alerts need not be trusted.
#[test]
fn forged_alerts_never_end_a_handshake() {
    let world = world();
    let witness = Witness::start(&world);
    for kind in [Kind::V12, Kind::V13] {
        let mut client = DtlsClient::new(world.dtls(), kind);
        // The attacker's datagrams come from the client's address and port, and extra alerts are inserted
        // before and after the client's own records.
        let socket = client.socket.try_clone().unwrap();
        let forge = || forged_alerts().iter().for_each(|alert| _ = socket.send(alert).unwrap());
        let alert = forged_alerts().remove(0);
        let deadline = Instant::now() + SOON;
        forge();
        while !client.connected {
            assert!(Instant::now() < deadline, "{kind:?}: {:?}", world.dtls_stats());
            for said in client.says() {
                for record in split(&said) {
                    // The ClientHello, which the cookie covers, must come first in its datagram.
                    let disturbed = match record {
                        [22, _, _, 0, 0, .., _] if record[13] == 1 => [record, &alert].concat(),
                        _ => [&alert, record, &alert].concat(),
                    };
                    socket.send(&disturbed).unwrap();
                    forge();
                }
            }
            let mut datagram = [0; 1 << 14];
            let heard = socket.recv(&mut datagram);
            client.dtls.handle_timeout(Instant::now()).unwrap();
            if let Ok(len) = heard {
                client.dtls.handle_packet(&datagram[..len]).unwrap();
            }
        }
        client.ask(&binding(1));
    }
    world.wait_for_dtls("handshakes and alerts are counted", |stats| {
        let handshakes = (stats.handshakes_1_2, stats.handshakes_1_3);
        handshakes == (1, 1) && stats.dropped(DtlsDrop::PlainAlert) >= 2 * forged_alerts().len() as u64
    });
    assert_eq!(world.dtls_stats().failed.iter().sum::<u64>(), 0);
    witness.lost_nothing();
}

#[test]
fn plaintext_alert_is_counted_after_the_handshake_timeout() {
    let world = world_with(|config| config.limits.first_message = Duration::from_millis(200));
    let (client, _, second) = hellos(&world, Kind::V12);
    client.socket.send(&second).unwrap();
    // Alert (RFC 5246 section 7.2): fatal, bad_certificate.
    client.socket.send(&[21, 0xFE, 0xFD, 0, 0, 0, 0, 0, 0, 0, 2, 0, 2, 2, 42]).unwrap();
    world.wait_for_dtls("the client gave up", |stats| stats.failed(DtlsFailure::Closed) == 1);
    assert_eq!(world.dtls_stats().failed(DtlsFailure::Timeout), 0);
}

#[test]
fn messages_longer_than_a_record_are_dropped_and_counted() {
    let world = world();
    let mut client = DtlsClient::connect(world.dtls(), Kind::V12);
    let peer = peer();
    let relayed = client.allocated(&peer);
    peer.send_to(&vec![1; 20_000], relayed).unwrap();
    peer.send_to(b"short", relayed).unwrap();
    assert_eq!(client.receive().payload(), b"short");
    world.wait_for_dtls("the long message is counted", |stats| stats.dropped(DtlsDrop::RecordTooLong) == 1);
}

/// ClientHello of DTLS 1.2 with these suites and signature schemes, as written by OpenSSL 3.0.
fn openssl_hello(suites: &[u16], schemes: &[u16]) -> Vec<u8> {
    let body = hello_body([0xFE, 0xFD], &[0, 0], suites, schemes);
    let [.., high, low] = u32::try_from(body.len()).unwrap().to_be_bytes();
    let length = [0, high, low];
    let message = [&[1][..], &length, &[0; 5], &length, &body].concat();
    [&[22, 0xFE, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0][..], &vector(&message)].concat()
}

#[test]
fn hello_without_common_algorithms_gets_handshake_failure() {
    const ANY: &[u16] = &[0x0403, 0x0503, 0x0804, 0x0401];
    let world = world();
    let socket = UdpSocket::bind((world.dtls().ip(), 0)).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let answer = |hello: &[u8]| {
        socket.send_to(hello, world.dtls()).unwrap();
        let mut answer = [0; 100];
        let len = socket.recv(&mut answer).unwrap();
        answer[..len].to_vec()
    };
    let refused = [
        ("RSA certificates only", openssl_hello(&[0xC02F, 0xC030], ANY)),
        ("CBC only", openssl_hello(&[0xC00A, 0xC009], ANY)),
        ("DES and RC4 only", openssl_hello(&[0xC008, 0xC007, 0x000A, 0x0009, 0x0005, 0x0004], ANY)),
        ("RSA signatures only", openssl_hello(&[0xC02B], &[0x0401, 0x0804])),
        ("P-384 signatures only", openssl_hello(&[0xC02B], &[0x0503])),
    ];
    for (what, hello) in &refused {
        let answer = answer(hello);
        // Alert (RFC 5246 section 7.2): fatal, handshake_failure.
        assert_eq!((answer.len(), answer[0], &answer[13..]), (15, 21, &[2, 40][..]), "{what}");
    }
    world.wait_for_dtls("counted", |stats| stats.failed(DtlsFailure::Incompatible) == refused.len() as u64);
    assert_eq!(dropped(&world.dtls_stats()), 0);
    for good in [openssl_hello(&[0xC02F, 0xC02B], ANY), openssl_hello(&[0xCCA9], &[0x0401, 0x0403])] {
        assert_eq!(answer(&good)[13], 3);
    }
}

#[test]
fn unsupported_version_gets_an_alert_and_is_counted() {
    let world = world();
    let (_, mut first, _) = hellos(&world, Kind::V12);
    // Sets client_version (RFC 6347 section 4.2.1) to DTLS 1.0.
    first[26] = 0xFF;
    let socket = UdpSocket::bind((world.dtls().ip(), 0)).unwrap();
    socket.send_to(&first, world.dtls()).unwrap();
    world.wait_for_dtls("the failure is counted", |stats| stats.failed(DtlsFailure::Version) == 1);
    // Alert (RFC 5246 section 7.2): fatal, protocol_version.
    let mut alert = [0; 100];
    socket.set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(socket.recv(&mut alert).unwrap(), 15);
    assert_eq!((alert[0], &alert[13..15]), (21, &[2, 70][..]));
}
