//! Workers that pause to collect datagrams (`Config::coalesce`), over real sockets: everything arrives in
//! order, and neither streams nor slow senders cause pauses.

use crate::prelude::*;
use crate::support::*;

fn start_coalescing() -> World {
    start_with(|config| config.coalesce = Duration::from_millis(1))
}

fn pauses(world: &World) -> u64 {
    world.relay.snapshots()[0].pauses
}

struct Pair {
    client: std::net::UdpSocket,
    peer: std::net::UdpSocket,
}

fn pair(world: &World) -> Pair {
    let (client, peer) = (self::peer(), self::peer());
    client.connect(world.udp()).unwrap();
    for request in [allocate(), bind(peer.local_addr().unwrap())] {
        client.send(&request).unwrap();
        assert_eq!(Message(heard(&client)).kind() & 0x0110, 0x0100);
    }
    Pair { client, peer }
}

#[test]
fn single_datagrams_are_batched_and_all_arrive() {
    let world = start_coalescing();
    let pairs: Vec<Pair> = (0..40).map(|_| pair(&world)).collect();
    eventually("the worker pauses", || {
        for word in 0..20_u8 {
            for Pair { client, .. } in &pairs {
                client.send(&channel_data(&[word; 20])).unwrap();
            }
        }
        for Pair { peer, .. } in &pairs {
            for word in 0..20_u8 {
                assert_eq!(heard(peer), [word; 20], "in order");
            }
        }
        pauses(&world) > 0
    });
}

#[test]
fn streams_and_rare_datagrams_cause_no_pauses() {
    let world = start_coalescing();
    let mut stream = world.client();
    for id in 0..200 {
        stream.ask(&binding(id));
    }
    // Three datagrams never reach a rate of two per millisecond.
    let Pair { client, peer } = pair(&world);
    client.send(&channel_data(b"alone")).unwrap();
    assert_eq!(heard(&peer), b"alone");
    // A worker publishes counters only after work, so keep sending requests over the stream.
    eventually("the datagram is counted", || {
        stream.ask(&binding(1));
        world.relay.snapshots()[0].turn.to_peer_datagrams == 1
    });
    assert_eq!(pauses(&world), 0);
}
