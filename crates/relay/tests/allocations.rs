//! Listing, querying and ending allocations while the workers relay data.

use crate::prelude::*;
use std::sync::mpsc::{self, Receiver};

use crate::support::{ALLOCATE, REFRESH};
use turnpike_relay::allocations::{
    AllocationFilter, AllocationSnapshot, ListenerTraffic, Look, Looked, SLICE_ALLOCATIONS,
};
use turnpike_turn::server::ClosedReason;

fn look(world: &World, worker: usize, look: Look) -> Looked {
    let (sender, answer) = mpsc::channel();
    world.relay.look(worker, look, move |looked| sender.send(looked).unwrap());
    answer.recv_timeout(SOON).expect("an answer")
}

fn list(world: &World, workers: usize, most: usize, filter: AllocationFilter) -> Vec<AllocationSnapshot> {
    let filter = Arc::new(filter);
    let mut found = Vec::new();
    for worker in 0..workers {
        let mut from = Some(0);
        while let Some(slot) = from {
            let asked = Look { from: slot, most, filter: Arc::clone(&filter), details: false };
            let looked = look(world, worker, asked);
            assert!(looked.allocations.len() <= most);
            assert!(looked.next.is_none_or(|next| next > slot), "slots are in ascending order");
            found.extend(looked.allocations);
            from = looked.next;
        }
    }
    found
}

fn all(world: &World, workers: usize) -> Vec<AllocationSnapshot> {
    list(world, workers, SLICE_ALLOCATIONS, AllocationFilter::default())
}

fn allocated(world: &World) -> (UdpSocket, SocketAddr) {
    let client = peer();
    client.connect(world.udp()).unwrap();
    client.send(&allocate()).unwrap();
    let answer = Message(heard(&client));
    assert_eq!(answer.kind(), ALLOCATE | 0x0100);
    (client, plain(&answer.attribute(0x0016)))
}

fn end(world: &World, allocation: &AllocationSnapshot) -> bool {
    let (sender, answer) = mpsc::channel();
    world.relay.end(
        (allocation.worker, allocation.slot),
        allocation.id,
        ClosedReason::Administrator,
        move |ended| {
            sender.send(ended).unwrap();
        },
    );
    answer.recv_timeout(SOON).expect("an answer")
}

#[test]
fn traffic_is_counted_by_listener() {
    let world = support::start_workers(1);
    let (client, relayed) = allocated(&world);
    let peer = peer();
    client.send(&bind(peer.local_addr().unwrap())).unwrap();
    heard(&client);
    client.send(&channel_data(b"seven b")).unwrap();
    heard(&peer);
    peer.send_to(b"x", relayed).unwrap();
    heard(&client);
    let mut streams = [world.client(), world.client()];
    streams.iter_mut().for_each(|client| _ = client.allocated(&peer));
    let (sender, answer) = mpsc::channel();
    world.relay.tally(0, 0, move |tally| sender.send(tally).unwrap());
    let tally = answer.recv_timeout(SOON).expect("an answer");
    assert_eq!(tally.next, None);
    let found: Vec<_> =
        world.relay.listening(&tally).into_iter().map(|it| (it.transport, it.traffic)).collect();
    let udp = ListenerTraffic { allocations: 1, to_peer: (1, 7), to_client: (1, 1) };
    let tcp = ListenerTraffic { allocations: 2, ..ListenerTraffic::default() };
    let none = ListenerTraffic::default();
    assert_eq!(found, [(Transport::Udp, udp), (Transport::Tcp, tcp), (Transport::Tls, none)]);
}

#[test]
fn ending_an_allocation_does_not_affect_the_next_one_in_its_slot() {
    let world = support::start_workers(1);
    let (client, relayed) = allocated(&world);
    let allocation = all(&world, 1).remove(0);
    assert!(end(&world, &allocation));
    assert!(!end(&world, &allocation), "the allocation is gone");
    client.send(&refresh(9)).unwrap();
    assert_eq!(Message(heard(&client)).kind(), REFRESH | 0x0110, "437");
    world.wait_for_counter("allocations_closed", "administrator", 1);
    UdpSocket::bind(relayed).expect("the allocation's port is free");
    client.send(&stun(ALLOCATE, 44, &[(0x0019, &[17, 0, 0, 0])])).unwrap();
    assert_eq!(Message(heard(&client)).kind(), ALLOCATE | 0x0100);
    let next = all(&world, 1).remove(0);
    assert_eq!(next.slot, allocation.slot);
    assert_ne!(next.id, allocation.id);
    assert!(!end(&world, &allocation));
    let left: Vec<_> = all(&world, 1).iter().map(|allocation| allocation.id).collect();
    assert_eq!(left, [next.id]);
}

#[test]
fn ending_a_tcp_allocation_keeps_its_connection_open() {
    let world = support::start_workers(1);
    let mut client: Client<_> = world.client();
    client.allocated(&peer());
    assert!(end(&world, &all(&world, 1)[0]));
    client.send(&refresh(9));
    assert_eq!(client.receive().expect("the connection is open").kind(), REFRESH | 0x0110);
}

#[test]
fn query_to_a_missing_worker_is_dropped() {
    let world = support::start_workers(1);
    let (sender, answer): (_, Receiver<Looked>) = mpsc::channel();
    let asked = Look { from: 0, most: 1, filter: Arc::default(), details: false };
    world.relay.look(1, asked.clone(), move |looked| sender.send(looked).unwrap());
    assert!(answer.recv_timeout(SOON).is_err());
    assert_eq!(look(&world, 0, Look { from: u32::MAX, ..asked }).next, None);
}

#[derive(Clone, Default)]
struct Order(Arc<Mutex<Vec<&'static str>>>);

impl Order {
    fn note(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }
}

impl AllocationLog for Order {
    fn effect(&self, _: usize, effect: &Effect) {
        if matches!(effect, Effect::Opened { .. }) {
            self.note("opened");
        }
    }
}

#[test]
fn packets_are_served_between_two_slices() {
    const QUESTIONS: usize = 1000;
    let order = Order::default();
    let world = support::start_heard_by(Arc::new(order.clone()), Arc::new(()), |_| {});
    let asked = Look { from: 0, most: SLICE_ALLOCATIONS, filter: Arc::default(), details: false };
    // The first query blocks the worker until all other queries and a datagram are waiting.
    let (go, wait) = mpsc::channel::<()>();
    world.relay.look(0, asked.clone(), move |_| wait.recv_timeout(SOON).unwrap());
    for _ in 0..QUESTIONS {
        let order = order.clone();
        world.relay.look(0, asked.clone(), move |_| order.note("looked"));
    }
    let client = peer();
    client.send_to(&allocate(), world.udp()).unwrap();
    go.send(()).unwrap();
    eventually("all queries are answered", || order.0.lock().unwrap().len() > QUESTIONS);
    let order = order.0.lock().unwrap();
    let at = order.iter().position(|what| *what == "opened").expect("the allocation exists");
    assert!(at <= 2, "the packet was served after {at} slices");
}
