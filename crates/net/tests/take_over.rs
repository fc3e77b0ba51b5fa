//! Sockets taken over by another process keep their state and counters.

use crate::prelude::*;
use std::net::UdpSocket as StdSocket;

use turnpike_net::{SocketFile, UnixListener};
use turnpike_testkit::Dir;

fn again(of: &impl AsFd) -> OwnedFd {
    of.as_fd().try_clone_to_owned().unwrap()
}

#[test]
fn kernel_drops_are_counted_once_across_a_handover() {
    let to = bind(V4, &UdpOptions { recv_buffer: Some(4 << 10), ..UdpOptions::default() });
    let mut sender = Sender::new(Datapath::Mmsg, V4, &UdpOptions::default());
    let route = sender.route(to.local_addr());
    let mut flood = || {
        (0..100).for_each(|_| sender.tx.push_bytes(&route, &[1; 400]));
        sender.flush();
    };
    let drain = |rx: &mut Rx, socket: &UdpSocket| {
        let mut got = receive(rx, &[socket], 1).len() as u64;
        while let Ok(received) = rx.recv(socket)
            && received.count > 0
        {
            got += received.count as u64;
        }
        rx.reset();
        got
    };
    let poke = |socket: &UdpSocket| {
        StdSocket::bind((V4, 0)).unwrap().send_to(b"and now?", socket.local_addr()).unwrap();
    };
    let mut here = Rx::new(Datapath::Mmsg);
    flood();
    let mut got = drain(&mut here, &to);
    poke(&to);
    got += drain(&mut here, &to);
    assert!(here.stats().kernel_drops > 0);
    assert_eq!(here.stats().kernel_drops + got, 101);
    // Causes drops while the socket is in transit.
    flood();
    let there = UdpSocket::take_over(again(&to), to.lend()).unwrap();
    assert_eq!(there.local_addr(), to.local_addr());
    drop(to);
    let mut rx = Rx::new(Datapath::Mmsg);
    let mut got = drain(&mut rx, &there);
    poke(&there);
    got += drain(&mut rx, &there);
    assert_eq!(rx.stats().kernel_drops + got, 101);
}

#[test]
fn lend_restores_the_default_ttl() {
    for ip in [V4, V6] {
        let to = bind(ip, &UdpOptions { ip_header: true, ..UdpOptions::default() });
        let mut sender = Sender::new(Datapath::Mmsg, ip, &UdpOptions::default());
        let route = sender.route(to.local_addr());
        let default = {
            sender.tx.push_bytes(&route, b"plain");
            sender.flush();
            receive(&mut Rx::new(Datapath::Mmsg), &[&to], 1)[0].ttl
        };
        for _ in 0..40 {
            sender.tx.push_bytes(&Route { ttl: 17, ..route }, b"marked");
            sender.flush();
        }
        let marked = receive(&mut Rx::new(Datapath::Mmsg), &[&to], 40);
        assert!(marked.iter().all(|datagram| datagram.ttl == 17));
        let lent = UdpSocket::take_over(again(sender.socket()), sender.socket().lend()).unwrap();
        let mut sockets = Sockets::default();
        let there = Route { socket: sockets.insert(lent), ..route };
        let mut tx = Tx::new(Datapath::Mmsg);
        tx.push_bytes(&there, b"plain");
        tx.flush(&mut sockets, &Rx::new(Datapath::Mmsg));
        // The default TTL also applies to the lender's socket, in case this process keeps it.
        sender.tx.push_bytes(&route, b"plain");
        sender.flush();
        let plain = receive(&mut Rx::new(Datapath::Mmsg), &[&to], 2);
        assert!(plain.iter().all(|datagram| datagram.ttl == default), "{plain:?}, not {default}");
    }
}

#[test]
fn waiting_clients_are_accepted_after_a_handover() {
    let listener = TcpListener::bind((V4, 0).into(), &ListenOptions::default()).unwrap();
    let _waiting = TcpStream::connect(listener.local_addr()).unwrap();
    let there = TcpListener::take_over(again(&listener)).unwrap();
    assert_eq!(there.local_addr(), listener.local_addr());
    drop(listener);
    eventually("the client is accepted", || there.accept().unwrap());

    let dir = Dir::new();
    let path = dir.path().join("s");
    let name = std::os::unix::net::SocketAddr::from_pathname(&path).unwrap();
    let (listener, file) = UnixListener::bind(&name, None).unwrap();
    let _waiting = UnixStream::connect(&path).unwrap();
    let there = UnixListener::take_over(again(&listener)).unwrap();
    let taken = SocketFile::take_over(&name).unwrap();
    drop(listener);
    file.leave();
    eventually("the client is accepted", || there.accept().unwrap());
    assert!(path.exists(), "the socket file was removed");
    drop(taken);
    assert!(!path.exists());
}

#[test]
fn take_over_refuses_other_kinds_of_sockets() {
    let udp = || OwnedFd::from(StdSocket::bind((V4, 0)).unwrap());
    let tcp = TcpListener::bind((V4, 0).into(), &ListenOptions::default()).unwrap();
    assert!(UdpSocket::take_over(again(&tcp), 0).is_err());
    assert!(TcpListener::take_over(udp()).is_err());
    let connected = TcpStream::connect(tcp.local_addr()).unwrap();
    assert!(TcpListener::take_over(connected.into()).is_err(), "not a listening socket");
    assert!(UnixListener::take_over(again(&tcp)).is_err());
    assert!(UdpSocket::take_over(udp(), 0).is_ok());
}
