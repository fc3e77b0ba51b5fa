//! Messages and descriptors between processes.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read as _, Write as _},
    net::UdpSocket,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::{UnixDatagram, UnixStream},
    },
    thread,
    time::Duration,
};

use turnpike_testkit::{PATIENCE, alone::in_own_process};
use turnpike_worker::Channel;

fn pair() -> (Channel, Channel) {
    let (one, other) = Channel::pair().unwrap();
    [&one, &other].into_iter().for_each(|end| end.set_patience(PATIENCE).unwrap());
    (one, other)
}

#[test]
fn messages_of_all_lengths_arrive_whole_and_in_order() {
    let (here, there) = pair();
    let lengths = [0, 1, 32 << 10, (32 << 10) + 1, 3_000_000];
    let sent = move |length: usize| (0..length).map(|at| (at * 7 % 251) as u8).collect::<Vec<_>>();
    let sender = thread::spawn(move || {
        lengths.into_iter().for_each(|length| here.send(&sent(length), &[]).unwrap());
    });
    for length in lengths {
        let message = there.receive().unwrap();
        assert!(*message.bytes == sent(length) && message.descriptors.is_empty(), "{length}");
    }
    sender.join().unwrap();
    assert_eq!(there.receive().unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(there.send(b"x", &[]).unwrap_err().kind(), ErrorKind::BrokenPipe);
}

#[test]
fn many_descriptors_arrive_in_order() {
    let (here, there) = pair();
    // Far ends of socket pairs; number n is written to the n-th.
    let (near, far): (Vec<UnixStream>, Vec<UnixStream>) =
        (0..300).map(|_| UnixStream::pair().unwrap()).unzip();
    let descriptors: Vec<BorrowedFd<'_>> = far.iter().map(AsFd::as_fd).collect();
    here.send(b"three hundred", &descriptors).unwrap();
    here.send(b"", &descriptors[..1]).unwrap();
    drop(far);
    let message = there.receive().unwrap();
    assert_eq!((&**message.bytes, message.descriptors.len()), (&b"three hundred"[..], 300));
    for (number, (mut near, far)) in near.into_iter().zip(message.descriptors).enumerate() {
        UnixStream::from(far).write_all(&number.to_ne_bytes()).unwrap();
        let mut said = [0; 8];
        near.read_exact(&mut said).unwrap();
        assert_eq!(usize::from_ne_bytes(said), number);
    }
    assert_eq!(there.receive().unwrap().descriptors.len(), 1);
}

#[test]
fn passed_socket_keeps_datagrams_queued_in_transit() {
    let (here, there) = pair();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    here.send(b"", &[socket.as_fd()]).unwrap();
    drop(socket);
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.send_to(b"on its way", address).unwrap();
    let message = there.receive().unwrap();
    let socket = UdpSocket::from(message.descriptors[0].try_clone().unwrap());
    let mut buffer = [0; 64];
    let len = socket.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..len], b"on its way");
}

#[test]
fn malformed_messages_are_errors_and_missing_ones_time_out() {
    let (here, there) = pair();
    there.set_patience(Duration::from_millis(1)).unwrap();
    assert!(!there.is_ready(Duration::from_millis(1)).unwrap());
    assert_eq!(there.receive().unwrap_err().kind(), ErrorKind::TimedOut);
    // A datagram socket on the same descriptor bypasses the framing.
    let raw = UnixDatagram::from(here.as_fd().try_clone_to_owned().unwrap());
    for garbage in [&b"x"[..], b"garbage without any meaning", &[0xFF; 9], &[0, 0, 0, 9, 0, 0, 0, 0, b'x']] {
        raw.send(garbage).unwrap();
        assert!(there.is_ready(PATIENCE).unwrap());
        assert_eq!(there.receive().unwrap_err().kind(), ErrorKind::InvalidData, "{garbage:?}");
    }
    here.send(b"and it goes on", &[]).unwrap();
    assert_eq!(**there.receive().unwrap().bytes, *b"and it goes on");
    drop((here, raw));
    assert!(there.is_ready(PATIENCE).unwrap(), "end of stream counts as ready");
    let (stream, _other) = UnixStream::pair().unwrap();
    for foreign in [OwnedFd::from(stream), UdpSocket::bind("127.0.0.1:0").unwrap().into()] {
        assert_eq!(Channel::try_from(foreign).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}

#[test]
fn stdin_that_is_not_a_channel_is_left_alone() {
    in_own_process(turnpike_testkit::this_test!(), || {
        assert_eq!(Channel::from_stdin().unwrap_err().kind(), ErrorKind::InvalidInput);
    });
}

#[test]
fn value_of_another_type_is_an_error() {
    let (here, there) = pair();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let value = BTreeMap::from([("one".to_owned(), 1), ("two".to_owned(), 2)]);
    here.send_value(&value, &[socket.as_fd()]).unwrap();
    let (found, descriptors) = there.receive_value::<BTreeMap<String, u8>>().unwrap();
    assert_eq!((found, descriptors.len()), (value.clone(), 1));
    here.send_value(&value, &[]).unwrap();
    let error = there.receive_value::<Vec<u8>>().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    assert!(error.to_string().contains("version"), "{error}");
}
