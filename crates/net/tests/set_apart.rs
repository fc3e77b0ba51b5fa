//! Sockets of this crate never use reserved descriptors.

use crate::prelude::*;

use turnpike_net::is_exhaustion;
use turnpike_testkit::{alone, process::take_descriptors};

fn anywhere() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn accept(listener: &TcpListener) -> std::io::Result<TcpSocket> {
    eventually("a connection", || listener.accept().map(|come| come.map(|(socket, _)| socket)).transpose())
}

#[test]
fn reserved_descriptors_stay_free_of_sockets() {
    // The limit is process-wide.
    alone::in_own_process(turnpike_testkit::this_test!(), leave);
}

fn leave() {
    const APART: u64 = 5;
    let listener = TcpListener::bind(anywhere(), &ListenOptions::default()).unwrap();
    let mut clients: Vec<TcpStream> =
        (0..3).map(|_| TcpStream::connect(listener.local_addr()).unwrap()).collect();
    // Files use up the rest of the limit.
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
    // The reserve is still available to code outside this crate.
    assert_eq!(take_descriptors().len() as u64, APART);

    // Once descriptors below the reserve are free, sockets can be opened again, and waiting clients were not
    // lost.
    drop(files);
    let sockets: Vec<TcpSocket> = (0..3).map(|_| accept(&listener).unwrap()).collect();
    assert_eq!(sockets.len(), 3);
    clients.iter_mut().for_each(|client| client.write_all(b"still here").unwrap());
    assert!(UdpSocket::bind(anywhere(), &UdpOptions::default()).is_ok());
}
