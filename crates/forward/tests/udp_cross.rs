//! Rules between UDP and TCP: unframed and framed streams, slow readers, half-close, and closed targets.

use crate::prelude::*;
use crate::udp_common::{PATIENCE, eventually, free_address, rule};

fn cross(protocol: Protocol, target: SocketAddr) -> Rule {
    rule(protocol, LOCALHOST.parse().unwrap(), target)
}

fn frame(datagram: &[u8]) -> Vec<u8> {
    let mut bytes = u16::try_from(datagram.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend_from_slice(datagram);
    bytes
}

fn read_frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut len = [0; 2];
    stream.read_exact(&mut len).unwrap();
    read(stream, usize::from(u16::from_be_bytes(len)))
}

fn read(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

#[test]
fn udp_to_tcp_maps_datagrams_to_writes_and_reads_to_datagrams() {
    for datapath in DATAPATHS {
        let listener = TcpListener::bind(LOCALHOST).unwrap();
        let worker = Worker::start(datapath);
        let target = listener.local_addr().unwrap();
        let client = client(worker.add(KEY, &cross(Protocol::UdpToTcp { framed: false }, target), datapath));
        client.send(b"the first waits for the connection").unwrap();
        let mut stream = accept(&listener);
        assert_eq!(read(&mut stream, 34), b"the first waits for the connection");
        for (number, len) in [1, 1200, 0, 9000, 65_507].into_iter().enumerate() {
            client.send(&payload(1, number, len)).unwrap();
            assert_eq!(read(&mut stream, len), payload(1, number, len));
        }
        for number in 0..50 {
            stream.write_all(&payload(2, number, 700)).unwrap();
            assert_eq!(receive(&client), payload(2, number, 700));
        }
        let counted = worker.snapshot();
        assert_eq!((counted.to_target_datagrams, counted.to_client_datagrams), (6, 50));
        assert_eq!((counted.to_client_bytes, counted.dropped_datagrams), (35_000, 0));
        drop(stream);
        eventually("the session ended", || worker.reasons() == [EndReason::Finished]);
    }
}

#[test]
fn udp_to_tcp_framed_keeps_boundaries_in_both_directions() {
    for datapath in DATAPATHS {
        let listener = TcpListener::bind(LOCALHOST).unwrap();
        let worker = Worker::start(datapath);
        let target = listener.local_addr().unwrap();
        let client = client(worker.add(KEY, &cross(Protocol::UdpToTcp { framed: true }, target), datapath));
        let sizes = [0, 1, 120, 120, 120, 1472, 0, 9000, 65_507, 3];
        for (number, len) in sizes.into_iter().enumerate() {
            client.send(&payload(3, number, len)).unwrap();
        }
        let mut stream = accept(&listener);
        for (number, len) in sizes.into_iter().enumerate() {
            assert_eq!(read_frame(&mut stream), payload(3, number, len));
        }
        // The bytes are split within the length field and within the datagram.
        let mut bytes = Vec::new();
        for (number, len) in sizes.into_iter().enumerate() {
            bytes.extend(frame(&payload(4, number, len)));
        }
        for piece in bytes.chunks(1001) {
            stream.write_all(piece).unwrap();
        }
        for (number, len) in sizes.into_iter().enumerate() {
            assert_eq!(receive(&client), payload(4, number, len));
        }
    }
}

#[test]
fn tcp_to_udp_maps_reads_to_datagrams_and_answers_to_writes() {
    for datapath in DATAPATHS {
        let echo = Echo::start(LOCALHOST);
        let worker = Worker::start(datapath);
        let rule = cross(Protocol::TcpToUdp { framed: false }, echo.address);
        let mut stream = connect(worker.add(KEY, &rule, datapath));
        for (number, len) in [1, 120, 1200, 9000].into_iter().enumerate() {
            stream.write_all(&payload(5, number, len)).unwrap();
            assert_eq!(read(&mut stream, len), payload(5, number, len));
        }
        let counted = worker.snapshot();
        assert_eq!((counted.to_target_bytes, counted.to_client_bytes), (10_321, 10_321));
        drop(stream);
        eventually("the session ended", || {
            worker.advance(Duration::from_secs(6));
            worker.reasons() == [EndReason::Finished]
        });
    }
}

#[test]
fn tcp_to_udp_framed_keeps_boundaries_and_forms_super_packets() {
    for datapath in DATAPATHS {
        let target = UdpSocket::bind(LOCALHOST).unwrap();
        target.set_read_timeout(Some(PATIENCE)).unwrap();
        let worker = Worker::start(datapath);
        let rule = cross(Protocol::TcpToUdp { framed: true }, target.local_addr().unwrap());
        let mut stream = connect(worker.add(KEY, &rule, datapath));
        let equal: Vec<u8> = (0..40).flat_map(|number| frame(&payload(6, number, 1000))).collect();
        stream.write_all(&equal).unwrap();
        for number in 0..40 {
            assert_eq!(receive(&target), payload(6, number, 1000));
        }
        let sent = worker.tx_stats();
        assert_eq!(sent.datagrams, 40);
        assert_eq!(sent.super_packets > 0, datapath == Datapath::Gso);
        stream.write_all(&frame(b"who am I?")).unwrap();
        let (_, session) = target.recv_from(&mut [0; 16]).unwrap();
        for answer in [&b"you"[..], b"", b"of course"] {
            target.send_to(answer, session).unwrap();
        }
        for answer in [&b"you"[..], b"", b"of course"] {
            assert_eq!(read_frame(&mut stream), answer);
        }
    }
}

#[test]
fn each_tcp_client_has_its_own_session() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let at = worker.add(KEY, &cross(Protocol::TcpToUdp { framed: true }, echo.address), Datapath::Gso);
    let mut streams: Vec<TcpStream> = (0..50).map(|_| connect(at)).collect();
    for round in 0..5 {
        for (who, stream) in streams.iter_mut().enumerate() {
            stream.write_all(&frame(&payload(who, round, 100 + who))).unwrap();
        }
        for (who, stream) in streams.iter_mut().enumerate() {
            assert_eq!(read_frame(stream), payload(who, round, 100 + who));
        }
    }
    assert_eq!(worker.active(), 50);
    worker.world.lock().unwrap().most = Some(50);
    let mut late = connect(at);
    assert_eq!(late.read(&mut [0; 1]).unwrap(), 0, "a TCP client beyond the limit is refused");
    assert_eq!((worker.active(), worker.reasons()), (50, vec![EndReason::Limit]));
}

#[test]
fn half_closed_tcp_client_receives_answers() {
    let target = UdpSocket::bind(LOCALHOST).unwrap();
    target.set_read_timeout(Some(PATIENCE)).unwrap();
    let worker = Worker::start(Datapath::Gso);
    let rule = cross(Protocol::TcpToUdp { framed: false }, target.local_addr().unwrap());
    let mut stream = connect(worker.add(KEY, &rule, Datapath::Gso));
    stream.write_all(b"question").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut bytes = [0; 64];
    let (len, session) = target.recv_from(&mut bytes).unwrap();
    assert_eq!(&bytes[..len], b"question");
    let closing = || worker.ask(|engine, tick| engine.next_timeout().unwrap() <= tick.now + 5000);
    eventually("end of stream is read", closing);
    worker.advance(Duration::from_secs(4));
    target.send_to(b"answer", session).unwrap();
    assert_eq!(read(&mut stream, 6), b"answer");
    worker.advance(Duration::from_secs(4));
    assert_eq!(worker.active(), 1);
    worker.advance(Duration::from_secs(2));
    assert_eq!(stream.read(&mut bytes).unwrap(), 0);
    assert_eq!(worker.reasons(), [EndReason::Finished]);
}

#[test]
fn worker_with_a_half_closed_client_sleeps() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let rule = cross(Protocol::TcpToUdp { framed: false }, echo.address);
    let mut stream = connect(worker.add(KEY, &rule, Datapath::Gso));
    stream.write_all(b"x").unwrap();
    assert_eq!(read(&mut stream, 1), b"x");
    stream.shutdown(Shutdown::Write).unwrap();
    // Level-triggered epoll would report the end of stream forever. Once the stream is no longer watched,
    // the next deadline is the linger timeout.
    eventually("the FIN", || worker.ask(|engine, tick| engine.next_timeout().unwrap() <= tick.now + 5000));
    let calls = worker.ask(|engine, _| engine.rx_stats().calls);
    for _ in 0..100 {
        worker.ask(|_, _| ());
    }
    assert_eq!(worker.ask(|engine, _| engine.rx_stats().calls), calls);
    assert_eq!(worker.active(), 1);
}

#[test]
fn queue_for_a_stalled_tcp_target_drops_whole_datagrams_and_recovers() {
    let listener = TcpListener::bind(LOCALHOST).unwrap();
    let worker = Worker::start(Datapath::Gso);
    let target = listener.local_addr().unwrap();
    let client = client(worker.add(KEY, &cross(Protocol::UdpToTcp { framed: true }, target), Datapath::Gso));
    client.send(&payload(0, 0, 4)).unwrap();
    let mut stream = accept(&listener);
    assert_eq!(read_frame(&mut stream), payload(0, 0, 4));
    let mut sent = 1;
    eventually("a datagram is dropped", || {
        for _ in 0..100 {
            client.send(&payload(9, 9, 8000)).unwrap();
            sent += 1;
        }
        // Wait for the counters, so that datagrams are lost only in the queue.
        eventually("the datagrams are counted", || {
            let counted = worker.snapshot();
            counted.to_target_datagrams + counted.dropped_datagrams == sent
        });
        worker.snapshot().dropped_datagrams > 0
    });
    let counted = worker.snapshot();
    for _ in 1..counted.to_target_datagrams {
        assert_eq!(read_frame(&mut stream), payload(9, 9, 8000));
    }
    client.send(b"there is room again").unwrap();
    assert_eq!(read_frame(&mut stream), b"there is room again");
    assert_eq!(worker.active(), 1);
}

#[test]
fn next_target_is_tried_after_a_refused_connect_and_nothing_is_lost() {
    let listener = TcpListener::bind(LOCALHOST).unwrap();
    let absent = free_address();
    let mut rule = cross(Protocol::UdpToTcp { framed: false }, absent);
    let port = listener.local_addr().unwrap().port();
    let ports = PortRange { first: port, last: port };
    rule.targets.push(Endpoint { host: Host::Ip(absent.ip()), ports, weight: 1 });
    let worker = Worker::start(Datapath::Gso);
    let client = client(worker.add(KEY, &rule, Datapath::Gso));
    client.send(b"anybody?").unwrap();
    assert_eq!(read(&mut accept(&listener), 8), b"anybody?");
    assert_eq!(worker.world.lock().unwrap().failures, [absent]);
}

#[test]
fn closed_tcp_target_ends_each_session_until_it_recovers() {
    let absent = free_address();
    let worker = Worker::start(Datapath::Gso);
    let rule = cross(Protocol::UdpToTcp { framed: false }, absent);
    let client = client(worker.add(KEY, &rule, Datapath::Gso));
    client.send(b"anybody?").unwrap();
    eventually("the connect fails", || worker.reasons() == [EndReason::ConnectFailed]);
    assert_eq!(worker.active(), 0);
    let listener = TcpListener::bind(absent).unwrap();
    client.send(b"now").unwrap();
    assert_eq!(read(&mut accept(&listener), 3), b"now");
}

#[test]
fn closed_udp_target_ends_the_connection() {
    let absent = free_address();
    let worker = Worker::start(Datapath::Gso);
    let rule = cross(Protocol::TcpToUdp { framed: false }, absent);
    let mut stream = connect(worker.add(KEY, &rule, Datapath::Gso));
    stream.write_all(b"anybody?").unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(worker.reasons(), [EndReason::ConnectFailed]);
}

#[test]
fn tcp_clients_of_a_removed_rule_may_finish() {
    let echo = Echo::start(LOCALHOST);
    let worker = Worker::start(Datapath::Gso);
    let at = worker.add(KEY, &cross(Protocol::TcpToUdp { framed: true }, echo.address), Datapath::Gso);
    let mut stream = connect(at);
    stream.write_all(&frame(b"before")).unwrap();
    assert_eq!(read_frame(&mut stream), b"before");
    drop(worker.ask(|engine, tick| engine.remove_rule(KEY, tick)));
    assert!(TcpStream::connect(at).is_err(), "the listener is still open");
    stream.write_all(&frame(b"after")).unwrap();
    assert_eq!(read_frame(&mut stream), b"after");
    worker.advance(Duration::from_secs(72));
    assert_eq!(worker.reasons(), [EndReason::Idle]);
    assert_eq!(worker.ask(|engine, _| engine.snapshots().count()), 0);
}
