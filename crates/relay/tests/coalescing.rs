//! Pauses before the wait (`Config::coalesce`) over real sockets: all arrives in order, streams know nothing of them, and who sends little
//! has none.

use crate::prelude::*;
use crate::support::*;

fn start_coalescing() -> World {
    start_with(|config| config.coalesce = Duration::from_millis(1))
}

fn pauses(world: &World) -> u64 {
    world.relay.snapshots()[0].pauses
}

/// A client over UDP with a channel to a peer.
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
fn many_lone_datagrams_are_gathered_and_all_arrive() {
    let world = start_coalescing();
    let pairs: Vec<Pair> = (0..40).map(|_| pair(&world)).collect();
    // At a pace that a busy machine may not keep at once.
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
fn requests_on_a_stream_and_a_few_datagrams_are_served_without_a_pause() {
    let world = start_coalescing();
    let mut stream = world.client();
    for id in 0..200 {
        stream.ask(&binding(id));
    }
    // Three datagrams are too few to expect two in a millisecond.
    let Pair { client, peer } = pair(&world);
    client.send(&channel_data(b"alone")).unwrap();
    assert_eq!(heard(&peer), b"alone");
    // Counters are published when there was something to do: the stream is asked again until they are.
    eventually("it is counted", || {
        stream.ask(&binding(1));
        world.relay.snapshots()[0].turn.to_peer_datagrams == 1
    });
    assert_eq!(pauses(&world), 0);
}
