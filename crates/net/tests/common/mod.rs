//! Helpers for tests with real sockets: waiting with a deadline, and network namespaces.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Instant,
};

use turnpike_net::{ArenaSpan, Datapath, Poller, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket};
pub(crate) use turnpike_testkit::{PATIENCE, alone, eventually};

pub(crate) const DATAPATHS: [Datapath; 3] = [Datapath::Basic, Datapath::Mmsg, Datapath::Gso];
pub(crate) const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub(crate) const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Datagram {
    /// Index of the socket that received the datagram.
    pub(crate) at: usize,
    pub(crate) from: SocketAddr,
    pub(crate) local: Option<IpAddr>,
    pub(crate) tos: u8,
    pub(crate) ttl: u8,
    pub(crate) bytes: Vec<u8>,
}

/// Receives on all sockets until there are `want` datagrams.
pub(crate) fn receive(rx: &mut Rx, sockets: &[&UdpSocket], want: usize) -> Vec<Datagram> {
    let mut poller = Poller::new().unwrap();
    for (token, socket) in sockets.iter().enumerate() {
        poller.add(socket, token as u64).unwrap();
    }
    let mut datagrams = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while datagrams.len() < want {
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "received {} of {want} datagrams", datagrams.len());
        let ready: Vec<_> = poller.wait(Some(left)).unwrap().iter().map(|e| e.token as usize).collect();
        for at in ready {
            if !rx.has_room() {
                rx.reset();
            }
            let received = rx.recv(sockets[at]).unwrap();
            for buffer in rx.buffers(received) {
                assert_eq!(buffer.datagrams().count(), buffer.count());
                datagrams.extend(buffer.datagrams().map(|bytes| Datagram {
                    at,
                    from: buffer.from,
                    local: buffer.local,
                    tos: buffer.tos,
                    ttl: buffer.ttl,
                    bytes: bytes.to_vec(),
                }));
            }
        }
        rx.reset();
    }
    datagrams
}

pub(crate) fn wait_for_input(socket: &UdpSocket) {
    let mut poller = Poller::new().unwrap();
    poller.add(socket, 0).unwrap();
    let events = poller.wait(Some(PATIENCE)).unwrap();
    assert!(events.iter().any(|e| e.readable), "timed out without input");
}

pub(crate) fn wait_for_error(socket: &UdpSocket) {
    let mut poller = Poller::new().unwrap();
    poller.add(socket, 0).unwrap();
    let events = poller.wait(Some(PATIENCE)).unwrap();
    assert!(events.iter().any(|e| e.error), "timed out without an error");
}

pub(crate) fn bind(ip: IpAddr, options: &UdpOptions) -> UdpSocket {
    UdpSocket::bind(SocketAddr::new(ip, 0), options).unwrap()
}

pub(crate) struct Sender {
    pub(crate) sockets: Sockets,
    pub(crate) id: SocketId,
    pub(crate) tx: Tx,
    rx: Rx,
}

impl Sender {
    pub(crate) fn new(datapath: Datapath, ip: IpAddr, options: &UdpOptions) -> Self {
        let mut sockets = Sockets::default();
        let id = sockets.insert(bind(ip, options));
        Self { sockets, id, tx: Tx::new(datapath), rx: Rx::new(datapath) }
    }

    pub(crate) fn socket(&self) -> &UdpSocket {
        self.sockets.get(self.id).unwrap()
    }

    pub(crate) fn route(&self, to: SocketAddr) -> Route {
        Route { socket: self.id, to: Some(to), from: None, tos: 0, ttl: 0, dont_fragment: false }
    }

    pub(crate) fn flush(&mut self) {
        self.tx.flush(&mut self.sockets, &self.rx);
    }
}

pub(crate) fn filled_arena(datapath: Datapath, len: usize) -> (Rx, ArenaSpan) {
    let socket = bind(V4, &UdpOptions::default());
    let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    std::net::UdpSocket::bind((V4, 0)).unwrap().send_to(&bytes, socket.local_addr()).unwrap();
    let mut rx = Rx::new(datapath);
    wait_for_input(&socket);
    let received = rx.recv(&socket).unwrap();
    let span = rx.span(rx.buffers(received).next().unwrap().bytes);
    assert_eq!(span.len as usize, len);
    (rx, span)
}

/// Waits until datagrams to this local address arrive: the kernel sets up routes to new addresses in the
/// background.
pub(crate) fn wait_until_reachable(ip: IpAddr) {
    let socket = std::net::UdpSocket::bind((ip, 0)).unwrap();
    socket.set_nonblocking(true).unwrap();
    let address = socket.local_addr().unwrap();
    eventually("the address is reachable", || {
        socket.send_to(b"?", address).is_ok() && socket.recv(&mut [0; 1]).is_ok()
    });
}

/// Runs `body` in its own network namespace, after the ip(8) commands of `setup`.
pub(crate) fn in_namespace(test: &str, setup: &[&str], body: impl FnOnce()) {
    alone::in_network_namespace(test, || {
        for line in setup {
            alone::run("ip", &line.split(' ').collect::<Vec<_>>());
        }
        body();
    });
}
