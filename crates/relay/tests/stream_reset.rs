//! Clients that reset their connection and immediately reconnect from the same port.

use crate::prelude::*;
use socket2::{Domain, Socket, Type};

use crate::support::*;

const NAME: &str = "turn.example.org";
const ROUNDS: usize = 100;

fn connect_from(local: SocketAddr, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.set_linger(Some(Duration::ZERO)).unwrap();
    socket.bind(&local.into()).unwrap();
    socket.connect(&to.into()).unwrap();
    let stream: TcpStream = socket.into();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

#[test]
fn each_reconnect_after_a_reset_gets_its_allocation() {
    let world = start(|config| config.tls = Some(context(&[identity(&[NAME])])));
    let mut local: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
    for _ in 0..ROUNDS {
        let stream = connect_from(local, world.tcp());
        local = stream.local_addr().unwrap();
        Client::new(stream).ask(&allocate());
    }
    let config = tls_config(&[]);
    let mut local: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
    for _ in 0..ROUNDS {
        let stream = connect_from(local, world.tls());
        local = stream.local_addr().unwrap();
        let tls = ClientConnection::new(config.clone(), ServerName::try_from(NAME).unwrap()).unwrap();
        Client::new(StreamOwned::new(tls, stream)).ask(&allocate());
    }
    assert_eq!(world.streams().closed(CloseReason::Duplicate), 0);
    eventually("the allocations of reset connections end", || world.allocations() == 0);
}
