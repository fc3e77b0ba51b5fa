//! Memory under floods of handshakes: what the first ones need, many more of them need no more.

use crate::prelude::*;
use crate::support::*;

/// Nobody knows an address by a ClientHello: it might be anybody's. Loopback has no spoofed addresses, but to the server each
/// source port is another client, and none of these ever answers.
#[test]
fn a_flood_of_first_hellos_leaves_nothing_behind() {
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
            world.wait_for_dtls("each gets a cookie", |stats| stats.cookies >= before + 200);
        }
    };
    let (of_first, of_others) = (grown(|| flood(10)), grown(|| flood(40)));
    assert!(of_others <= of_first, "{of_others} bytes after {of_first}");
    let stats = world.dtls_stats();
    assert_eq!((stats.half_open, stats.open, stats.failed.iter().sum::<u64>()), (0, 0, 0), "{stats:?}");
    // A genuine client still connects.
    DtlsClient::connect(world.dtls(), Kind::V13).allocated(&peer());
    witness.lost_nothing();
}

#[test]
fn two_thousand_half_open_handshakes_take_the_memory_of_the_bound() {
    alone::in_own_process(turnpike_testkit::this_test!(), half_open);
}

fn half_open() {
    let world = world_with(|config| {
        config.limits.half_open = 200;
        config.limits.half_open_per_network = 150;
    });
    let witness = Witness::start(&world);
    let mut honest = DtlsClient::connect(world.dtls(), Kind::V13);
    honest.allocated(&peer());
    let attack = |count: u64| {
        for number in 0..count {
            let kind = if number % 2 == 0 { Kind::V12 } else { Kind::V13 };
            let (client, _, second) = hellos(&world, kind);
            client.socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            // A network whose places are all taken waits until the oldest of them can give way.
            let mut answered = || {
                client.socket.send(&second).unwrap();
                client.socket.recv(&mut [0; 4096]).is_ok().then_some(())
            };
            eventually("an answer", &mut answered);
        }
    };
    let (of_first, of_others) = (grown(|| attack(400)), grown(|| attack(1600)));
    assert!(of_others <= of_first, "{of_others} bytes after {of_first}");
    // Those that did not give way took the same port again and replaced themselves.
    world.wait_for_dtls("all but the youngest are gone", |stats| {
        stats.half_open <= 150 && stats.ended(DtlsEnd::Handshake) >= 1_850
    });
    let evicted = world.dtls_stats().failed(DtlsFailure::Evicted);
    // On a slow machine more of them time out first.
    assert!(evicted > 1_000, "{evicted} evicted");
    honest.ask(&refresh(1));
    witness.lost_nothing();
}
