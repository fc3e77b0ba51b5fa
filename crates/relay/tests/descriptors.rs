//! A relay that has run out of file descriptors: listeners pause and recover, new allocations and connections
//! are refused with a reason, and existing ones continue.

use crate::prelude::*;
use std::fs::File;

use turnpike_testkit::process::take_descriptors;

use crate::support::*;

#[test]
fn worker_without_descriptors_pauses_listeners_and_recovers() {
    alone::with_descriptors(turnpike_testkit::this_test!(), 100, starve);
}

/// Connects with the last descriptor, so that the server has none for its side. Tries again if a listener has
/// just recovered and taken the descriptor.
fn connect_last(to: SocketAddr, taken: &mut Vec<File>) -> TcpStream {
    eventually("a connection is made", || {
        taken.extend(take_descriptors());
        drop(taken.pop());
        let stream = TcpStream::connect_timeout(&to, SOON).ok()?;
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.set_write_timeout(Some(SOON)).unwrap();
        Some(stream)
    })
}

fn starve() {
    let world = start(|config| config.tls = Some(context(&[identity(&["turn.example.org"])])));
    let worker = Thread::named("relay-0");
    let witness = Witness::start(&world);
    // Later requests of these clients will need descriptors, of which none will be left.
    let mut control = world.client();
    let relayed = plain(&control.ask(&stun(ALLOCATE, 1, &[(0x0019, &[6, 0, 0, 0])])).attribute(0x0016));
    control.ask(&permit((Ipv4Addr::LOCALHOST, 9).into()));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let there = xored(listener.local_addr().unwrap());
    let udp: UdpSocket = peer();
    udp.connect(world.udp()).unwrap();

    let mut taken = Vec::new();
    let mut plain_client = connect_last(world.tcp(), &mut taken);
    world.wait_for("the TCP listener is paused", |streams| streams.accept_pauses >= 1);
    let tls_client = connect_last(world.tls(), &mut taken);
    let mut far = connect_last(relayed, &mut taken);
    eventually("the relayed address is paused", || world.relay.snapshots()[0].peers.accept_pauses >= 1);
    assert_eq!(take_descriptors().len(), 0, "no descriptors are left");

    // Polling is level-triggered: a queue that cannot be emptied would wake the worker forever.
    worker.comes_to_rest();

    udp.send(&allocate()).unwrap();
    assert_eq!(Message(heard(&udp)).error(), Some(508));
    eventually("the refusal is counted", || world.relay.snapshots()[0].files_exhausted == 1);
    control.send(&stun(CONNECT, 2, &[(0x0012, &there)]));
    assert_eq!(control.receive().unwrap().error(), Some(508));
    witness.goes_on();

    drop(taken);
    plain_client.write_all(&binding(1)).unwrap();
    assert_eq!(Client::new(plain_client).receive().unwrap().kind(), BINDING | 0x0100);
    let mut tls_client = Client::new(tls_client);
    tls_client.send(&binding(2));
    assert_eq!(tls_client.receive().unwrap().kind(), BINDING | 0x0100);
    far.write_all(b"early").unwrap();
    let attempt = control.receive().expect("a ConnectionAttempt").attribute(0x002A);
    let mut data = connect(world.tcp());
    data.write_all(&stun(0x000B, 7, &[(0x002A, &attempt)])).unwrap();
    let mut header = [0; 20];
    data.read_exact(&mut header).unwrap();
    assert_eq!(header[..2], [0x01, 0x0B]);
    let mut rest = vec![0; usize::from(u16::from_be_bytes([header[2], header[3]])) + 5];
    data.read_exact(&mut rest).unwrap();
    assert!(rest.ends_with(b"early"));
    udp.send(&stun(ALLOCATE, 5, &[(0x0019, &[17, 0, 0, 0])])).unwrap();
    assert_eq!(Message(heard(&udp)).kind(), ALLOCATE | 0x0100);
    control.ask(&stun(CONNECT, 6, &[(0x0012, &there)]));
    witness.lost_nothing();
}
