//! Behaviour of the UDP engine when descriptors run out: listeners pause and resume, datagrams are
//! dropped, and sessions continue.

use crate::prelude::*;

use crate::udp_common::{PATIENCE, THREAD, eventually, rule};

#[test]
fn worker_recovers_once_descriptors_are_free() {
    alone::with_descriptors(turnpike_testkit::this_test!(), 80, starve);
}

fn starve() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let thread = Thread::named(THREAD);
    let listen = LOCALHOST.parse().unwrap();
    let streams = rule(Protocol::TcpToUdp { framed: false }, listen, echo.address);
    let streams = worker.add(RuleKey(1), &streams, Datapath::Gso);
    let datagrams = worker.add(RuleKey(2), &rule(Protocol::Udp, listen, echo.address), Datapath::Gso);
    let (old, new) = (client(datagrams), client(datagrams));
    expect_echo(&old, b"old");

    // Two connections are served; a third gets no descriptor and waits in the kernel's queue.
    let mut served: Vec<TcpStream> = (0..2).map(|_| stream(streams)).collect();
    served.iter_mut().for_each(|stream| assert_eq!(echoed(stream), Some(*b"x")));
    let mut taken = take_descriptors();
    drop(taken.pop());
    let mut waiting = stream(streams);
    // Polling is level-triggered: a queue that cannot be emptied would wake the worker forever.
    thread.comes_to_rest();
    // Known clients are still served without descriptors; datagrams of new ones are dropped.
    new.send(b"new").unwrap();
    let dropped = |worker: &Worker| -> u64 {
        worker.ask(|engine, _| engine.snapshots().map(|(_, counted)| counted.dropped_datagrams).sum())
    };
    eventually("the datagram is dropped", || dropped(&worker) == 1);
    expect_echo(&old, b"old");
    served.iter_mut().for_each(|stream| assert_eq!(echoed(stream), Some(*b"x")));
    assert_eq!(worker.active(), 3);

    // One descriptor is enough for the connection but not for its target socket, so the client is refused and
    // reported.
    drop(taken.pop());
    worker.advance(Duration::from_millis(200));
    assert_eq!(echoed(&mut waiting), None);
    eventually("the client is reported", || worker.reasons() == [EndReason::ConnectFailed]);

    // Ended sessions make room for new ones.
    drop((served, waiting));
    drop(taken);
    assert_eq!(echoed(&mut stream(streams)), Some(*b"x"));
    expect_echo(&new, b"new");
}

fn stream(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Echo of one byte; `None` at the end of the stream.
fn echoed(stream: &mut TcpStream) -> Option<[u8; 1]> {
    let mut byte = [0];
    stream.write_all(b"x").ok()?;
    stream.read_exact(&mut byte).ok().map(|()| byte)
}
