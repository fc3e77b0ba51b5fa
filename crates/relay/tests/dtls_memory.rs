//! Memory use during floods of handshakes: later handshakes need no more memory than the first ones.

use crate::prelude::*;
use crate::support::*;

/// A first ClientHello may have a spoofed address. There is no spoofing on loopback, but each source port
/// looks like a different client to the server, and these clients never reply.
#[test]
fn flood_of_first_hellos_leaves_no_state() {
    alone::in_own_process(turnpike_testkit::this_test!(), flood);
}

fn flood() {
    let world = world();
    let witness = Witness::start(&world);
    let (_, hello_13, _) = hellos(&world, Kind::V13);
    let (_, hello_12, _) = hellos(&world, Kind::V12);
    let flood = |rounds: u64| {
        let sockets: Vec<UdpSocket> =
            (0..200).map(|_| UdpSocket::bind((world.dtls().ip(), 0)).unwrap()).collect();
        for _ in 0..rounds {
            let before = world.dtls_stats().cookies;
            for (place, socket) in sockets.iter().enumerate() {
                let hello = if place % 2 == 0 { &hello_12 } else { &hello_13 };
                socket.send_to(hello, world.dtls()).unwrap();
            }
            world.wait_for_dtls("each ClientHello gets a cookie", |stats| stats.cookies >= before + 200);
        }
    };
    settles(|| flood(10));
    let stats = world.dtls_stats();
    assert_eq!((stats.half_open, stats.open, stats.failed.iter().sum::<u64>()), (0, 0, 0), "{stats:?}");
    DtlsClient::connect(world.dtls(), Kind::V13).allocated(&peer());
    witness.lost_nothing();
}

#[test]
fn half_open_handshakes_use_bounded_memory() {
    alone::in_own_process(turnpike_testkit::this_test!(), half_open);
}

fn half_open() {
    let world = world_with(|config| {
        config.limits.half_open = 200;
        config.limits.half_open_per_network = 150;
        // On a slow machine, handshakes would otherwise time out before they are evicted.
        config.limits.first_message = Duration::from_secs(600);
    });
    let witness = Witness::start(&world);
    let mut honest = DtlsClient::connect(world.dtls(), Kind::V13);
    honest.allocated(&peer());
    let attack = |count: u64| {
        for number in 0..count {
            let kind = if number % 2 == 0 { Kind::V12 } else { Kind::V13 };
            let (client, _, second) = hellos(&world, kind);
            client.socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            // While all slots of a network are taken, retry until the oldest can be evicted.
            let mut answered = || {
                client.socket.send(&second).unwrap();
                client.socket.recv(&mut [0; 4096]).is_ok().then_some(())
            };
            eventually("the client is answered", &mut answered);
        }
    };
    let mut begun = 1600;
    attack(begun);
    settles(|| {
        attack(200);
        begun += 200;
    });
    // Handshakes that were not evicted have been replaced because their port was reused, or have failed after
    // too many retransmissions on a slow machine.
    world.wait_for_dtls("all but the most recent handshakes are gone", |stats| {
        stats.half_open <= 150 && stats.ended(DtlsEnd::Handshake) >= begun - 150
    });
    let evicted = world.dtls_stats().failed(DtlsFailure::Evicted);
    assert!(evicted > 0, "none of {begun} handshakes was evicted");
    honest.ask(&refresh(1));
    witness.lost_nothing();
}
