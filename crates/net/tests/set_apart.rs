//! Descriptors that are set apart are had by others than this crate's sockets.

use crate::prelude::*;

use turnpike_net::tcp::is_exhaustion;
use turnpike_testkit::{alone, process::take_descriptors};

fn anywhere() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

/// Asks a listener until it says something other than that nobody is there.
fn accept(listener: &TcpListener) -> std::io::Result<TcpSocket> {
    eventually("somebody comes", || listener.accept().map(|come| come.map(|(socket, _)| socket)).transpose())
}

#[test]
fn descriptors_that_are_set_apart_are_left_to_others() {
    // The limit belongs to the process.
    alone::in_own_process(turnpike_testkit::this_test!(), leave);
}

fn leave() {
    const APART: u64 = 5;
    let listener = TcpListener::bind(anywhere(), &ListenOptions::default()).unwrap();
    let mut clients: Vec<TcpStream> =
        (0..3).map(|_| TcpStream::connect(listener.local_addr()).unwrap()).collect();
    // The limit is what it is; most of it is taken by files of no interest.
    assert_eq!(rlimit::set_apart(APART), APART);
    let mut files = take_descriptors();
    files.truncate(files.len() - usize::try_from(APART).unwrap());

    let refused = |result: std::io::Result<()>| is_exhaustion(&result.unwrap_err());
    for _ in 0..2 {
        assert!(refused(UdpSocket::bind(anywhere(), &UdpOptions::default()).map(drop)));
        assert!(refused(TcpListener::bind(anywhere(), &ListenOptions::default()).map(drop)));
        assert!(refused(TcpSocket::connect(listener.local_addr(), &ConnectOptions::default()).map(drop)));
        assert!(refused(accept(&listener).map(drop)));
    }
    // All of them are still there for others.
    assert_eq!(take_descriptors().len() as u64, APART);

    // With room below there are sockets again, and whoever waited was not lost.
    drop(files);
    let sockets: Vec<TcpSocket> = (0..3).map(|_| accept(&listener).unwrap()).collect();
    assert_eq!(sockets.len(), 3);
    clients.iter_mut().for_each(|client| client.write_all(b"still here").unwrap());
    assert!(UdpSocket::bind(anywhere(), &UdpOptions::default()).is_ok());
}
