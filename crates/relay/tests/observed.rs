//! Figures of a running relay: current counters, clients per listener, refused clients.

use crate::prelude::*;
use crate::support::*;
use turnpike_relay::TurnedAway;

fn probe(relay: &Relay, worker: usize) -> Duration {
    let (sender, answer) = mpsc::channel();
    relay.probe(worker, move |waited| sender.send(waited).unwrap());
    answer.recv_timeout(SOON).expect("an answer")
}

fn allocated(world: &World) -> UdpSocket {
    let client = peer();
    client.connect(world.udp()).unwrap();
    client.send(&allocate()).unwrap();
    assert_eq!(Message(heard(&client)).kind(), ALLOCATE | 0x0100);
    client
}

#[test]
fn probed_counters_are_current() {
    let world = support::start_workers(1);
    let mut clients = Vec::new();
    for count in 1..=20 {
        clients.push(allocated(&world));
        probe(&world.relay, 0);
        assert_eq!(world.relay.snapshots()[0].allocations, count);
    }
    let (sender, answer) = mpsc::channel::<Duration>();
    world.relay.probe(1, move |waited| sender.send(waited).unwrap());
    assert!(answer.recv_timeout(SOON).is_err(), "no such worker");
}

#[test]
fn clients_are_counted_by_listener() {
    let world = support::start_workers(2);
    let _udp = [allocated(&world), allocated(&world)];
    let mut tcp = world.client();
    assert_eq!(tcp.ask(&allocate()).kind(), ALLOCATE | 0x0100);
    let stream = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
    let mut tls = Client::new(stream);
    assert_eq!(tls.ask(&allocate()).kind(), ALLOCATE | 0x0100);
    (0..2).for_each(|worker| _ = probe(&world.relay, worker));
    let snapshots = world.relay.snapshots();
    let counted = world.relay.by_listener(&snapshots);
    let of = |transport, address| {
        let found = counted.iter().filter(|it| (it.transport, it.address) == (transport, address));
        found.map(|it| it.allocations).sum::<u64>()
    };
    assert_eq!(of(Transport::Udp, world.udp()), 2);
    assert_eq!(of(Transport::Tcp, world.tcp()), 1);
    assert_eq!(of(Transport::Tls, world.tls()), 1);
    assert_eq!(counted.iter().map(|it| it.allocations).sum::<u64>(), 4);
}

#[derive(Clone, Default)]
struct Door(Arc<Mutex<Vec<TurnedAway>>>);

impl AllocationLog for Door {
    fn effect(&self, _: usize, _: &Effect) {}
    fn turned_away(&self, _: usize, turned: &TurnedAway) {
        self.0.lock().unwrap().push(turned.clone());
    }
}

#[test]
fn refused_clients_are_reported_with_a_reason() {
    let door = Door::default();
    let world = support::start_heard_by(Arc::new(door.clone()), Arc::new(()), |config| {
        config.streams.tls = Some(context(&[identity(&["turn.example.org"])]));
        config.streams.tls_only = true;
    });
    let told = |stage: &str, reason: &str| {
        eventually(&format!("{stage} {reason}"), || {
            let told = door.0.lock().unwrap();
            told.iter().find(|it| (it.stage, it.reason) == (stage, reason)).cloned()
        })
    };
    let mut plain = connect(world.tls());
    plain.write_all(&allocate()).unwrap();
    let turned = told("connection", "plain_stun");
    assert_eq!((turned.client, turned.transport), (plain.local_addr().unwrap(), Transport::Tcp));
    let mut strange = connect(world.tcp());
    strange.write_all(&[0x80; 20]).unwrap();
    assert_eq!(told("connection", "not_stun").client, strange.local_addr().unwrap());
    let mut garbage = connect(world.tls());
    garbage.write_all(&[0x16, 3, 1, 0, 5, 1, 2, 3, 4, 5]).unwrap();
    let of_tls = eventually("a failed handshake is reported", || {
        let told = door.0.lock().unwrap();
        told.iter().find(|it| it.stage == "tls_handshake").cloned()
    });
    assert_eq!((of_tls.client, of_tls.transport), (garbage.local_addr().unwrap(), Transport::Tls));
    // The log includes the user if there is an allocation.
    let stream = tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap();
    let mut known = Client::new(stream);
    known.ask(&allocate());
    known.send(&[0x80; 20]);
    known.ends();
    let named = eventually("the user is reported", || {
        let told = door.0.lock().unwrap();
        told.iter().find(|it| it.reason == "not_stun" && it.user.is_some()).cloned()
    });
    assert_eq!(named.transport, Transport::Tls);
    assert_eq!(&*named.user.unwrap().0, "turnpike", "the realm");
    // A client that closes normally is not logged.
    let count = door.0.lock().unwrap().len();
    let mut client = world.client();
    client.ask(&allocate());
    drop(client);
    eventually("the allocation has ended", || world.relay.snapshots()[0].allocations == 0);
    probe(&world.relay, 0);
    assert_eq!(door.0.lock().unwrap().len(), count);
}
