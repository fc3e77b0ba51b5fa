//! Messages over TCP and TLS: split at any byte, several per segment, padded in both directions. Also tests
//! how connections end.

use crate::prelude::*;
use crate::support::*;
use turnpike_turn::server::DropReason;

fn relays_both_ways<S: Read + Write>(client: &mut Client<S>) {
    let peer = peer();
    let relayed = client.allocated(&peer);
    // Many messages in one write, with every length modulo 4, some longer than a TLS record.
    let lengths = [0, 1, 2, 3, 4, 5, 119, 1200, 1201, 20_000];
    let payload = |len: usize| vec![u8::try_from(len % 251).unwrap(); len];
    let all: Vec<u8> = lengths.iter().flat_map(|len| padded(channel_data(&payload(*len)))).collect();
    client.send(&all);
    for len in lengths {
        assert_eq!(heard(&peer), payload(len), "to the peer, {len} bytes");
    }
    for len in lengths {
        peer.send_to(&payload(len), relayed).unwrap();
    }
    for len in lengths {
        assert_eq!(client.receive().unwrap().payload(), payload(len), "to the client, {len} bytes");
    }
    // Indications: this peer has a permission but no channel.
    let other = support::peer();
    let at = other.local_addr().unwrap();
    client.ask(&permit(at));
    client.send(&stun(SEND, 7, &[(0x0012, &xored(at)), (0x0013, b"indicated")]));
    assert_eq!(heard(&other), b"indicated");
    other.send_to(b"odd", relayed).unwrap();
    let indication = client.receive().unwrap();
    assert_eq!((indication.kind(), indication.attribute(0x0013)), (DATA, b"odd".to_vec()));
    client.ask(&refresh(8));
}

#[test]
fn datagrams_of_every_length_pass_over_tcp() {
    let world = start(|_| {});
    relays_both_ways(&mut world.client());
}

#[test]
fn datagrams_of_every_length_pass_over_tls() {
    let world = start(|config| config.tls = Some(context(&[identity(&["turn.example.org"])])));
    for port in [world.tls(), world.tcp()] {
        let stream = tls_connect(port, "turn.example.org", &tls_config(&[])).unwrap();
        relays_both_ways(&mut Client::new(stream));
    }
    assert_eq!(world.streams().plain, 0);
}

#[test]
fn tls_port_accepts_plain_clients_unless_tls_only() {
    let world = start(|config| config.tls = Some(context(&[identity(&["turn.example.org"])])));
    relays_both_ways(&mut Client::new(connect(world.tls())));
    let strict = start(|config| {
        config.tls = Some(context(&[identity(&["turn.example.org"])]));
        config.tls_only = true;
    });
    let mut refused = Client::new(connect(strict.tls()));
    refused.send(&binding(1));
    refused.ends();
    strict.wait_for_closed(CloseReason::PlainStun, 1);
    strict.client().ask(&binding(1));
}

#[test]
fn closed_connection_ends_its_allocation() {
    let world = start(|config| config.tls = Some(context(&[identity(&["turn.example.org"])])));
    let mut plain = world.client();
    plain.ask(&allocate());
    let mut tls = Client::new(tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap());
    tls.ask(&allocate());
    let mut half = world.client();
    half.ask(&allocate());
    eventually("three allocations exist", || world.allocations() == 3);
    drop(plain);
    eventually("two allocations are left", || world.allocations() == 2);
    tls.stream.conn.send_close_notify();
    tls.stream.flush().unwrap();
    eventually("one allocation is left", || world.allocations() == 1);
    half.send(&[binding(4), refresh(5)].concat());
    half.stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(half.receive().unwrap().kind(), BINDING | 0x0100);
    assert_eq!(half.receive().unwrap().kind(), REFRESH | 0x0100);
    assert_eq!(half.receive(), None);
    eventually("no allocation is left", || world.allocations() == 0);
    let snapshot = &world.relay.snapshots()[0];
    let closed: u64 = snapshot
        .turn
        .counters()
        .filter(|(family, label, _)| {
            *family == "allocations_closed" && *label == Some(("reason", "disconnected"))
        })
        .map(|(_, _, count)| count)
        .sum();
    assert_eq!((closed, snapshot.streams.open), (3, 0));
    world.wait_for_closed(CloseReason::Client, 3);
}

#[test]
fn ended_allocation_keeps_its_connection_open() {
    let world = start(|_| {});
    let mut client = world.client();
    let peer = peer();
    let relayed = client.allocated(&peer);
    client.ask(&stun(REFRESH, 9, &[(0x000D, &[0; 4])]));
    client.ask(&binding(1));
    // No client receives this datagram.
    peer.send_to(b"late", relayed).unwrap();
    client.send(&channel_data(&[1; 4]));
    eventually("the datagram without an allocation is counted", || {
        world.relay.snapshots()[0].turn.dropped(DropReason::NoAllocation) == 1
    });
    client.allocated(&peer);
}
