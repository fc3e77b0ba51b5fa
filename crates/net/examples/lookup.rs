//! Experiment: one socket receives for all relay ports through a BPF program (sk_lookup). How much do shared
//! receive calls save?
//!
//! ```text
//! lookup --listen 10.77.1.1:5201 --to 10.77.2.2:5201 --variant own|lookup [--first 20000] [--flows 2000] [--seconds 10]
//! ```
//!
//! The program works like the example `sockets`, but with a relay port per client. With `own`, each socket
//! receives for itself. With `lookup`, one socket receives for all of them and distinguishes them by
//! destination port (IP_RECVORIGDSTADDR); the other sockets only send, because a source port belongs to a
//! socket. Needs CAP_NET_ADMIN and CAP_BPF.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "developer tool; panics show the location")]

mod bare;
#[path = "bare/lookup.rs"]
mod program;

use std::{
    collections::HashMap,
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket as Plain},
    os::fd::AsRawFd,
    time::Duration,
};

use bare::Run;
use program::Lookup;
use turnpike_net::{Datapath, Poller, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket};

/// Token of the socket that receives for all ports.
const ALL: u64 = 1 << 40;
const BATCH: usize = 64;
const SLOT: usize = 2048;

struct Relay {
    sockets: Sockets,
    listener: SocketId,
    poller: Poller,
    rx: Rx,
    tx: Tx,
    clients: HashMap<SocketAddr, SocketId>,
    /// Clients by relay port, and by the ID of its socket.
    by_port: HashMap<u16, SocketAddr>,
    by_socket: HashMap<u32, SocketAddr>,
}

fn open(sockets: &mut Sockets, address: SocketAddr, buffer: usize) -> SocketId {
    let (recv_buffer, send_buffer) = (Some(buffer), Some(buffer));
    let options = UdpOptions { gro: true, recv_buffer, send_buffer, ..UdpOptions::default() };
    sockets.insert(UdpSocket::bind(address, &options).unwrap())
}

impl Relay {
    fn route(&self, socket: SocketId, to: SocketAddr) -> Route {
        Route { socket, to: Some(to), from: None, tos: 0, ttl: 0, dont_fragment: false }
    }

    /// Relays datagrams from clients or, if each relay port receives for itself, from the target.
    fn receive(&mut self, from: SocketId, to: SocketAddr, next: &mut u16, watches: bool) {
        let Ok(received) = self.rx.recv(self.sockets.get(from).unwrap()) else { return };
        for index in received.first..received.first + received.count {
            let came_from = self.rx.buffer(index).unwrap().from;
            let route = if from != self.listener {
                self.route(self.listener, self.by_socket[&from.0])
            } else if let Some(socket) = self.clients.get(&came_from) {
                self.route(*socket, to)
            } else {
                let socket = open(&mut self.sockets, (Ipv4Addr::UNSPECIFIED, *next).into(), 256 << 10);
                if watches {
                    self.poller.add(self.sockets.get(socket).unwrap(), socket.0.into()).unwrap();
                }
                self.clients.insert(came_from, socket);
                self.by_port.insert(*next, came_from);
                self.by_socket.insert(socket.0, came_from);
                *next += 1;
                self.route(socket, to)
            };
            for datagram in self.rx.buffer(index).unwrap().datagrams() {
                self.tx.push(&route, &[], self.rx.span(datagram), 0);
            }
        }
    }
}

/// Receive buffers of one call, with the destination port of each datagram.
struct All {
    socket: Plain,
    bytes: Vec<u8>,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    controls: Vec<[u64; 8]>,
}

impl All {
    fn new(port: u16) -> Self {
        let socket = Plain::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
        socket.set_nonblocking(true).unwrap();
        for (level, name, value) in
            [(libc::SOL_IP, libc::IP_RECVORIGDSTADDR, 1), (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 8 << 20)]
        {
            let size = libc::socklen_t::try_from(size_of_val(&value)).unwrap();
            let at = (&raw const value).cast();
            // SAFETY: the pointer and size describe `value`.
            let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, at, size) };
            assert_eq!(set, 0, "option {name}: {}", io::Error::last_os_error());
        }
        let mut bytes = vec![0; BATCH * SLOT];
        let slots = bytes.chunks_mut(SLOT);
        let iovecs =
            slots.map(|slot| libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: SLOT }).collect();
        // SAFETY: zero is a valid value for every member of `mmsghdr`.
        let header = unsafe { std::mem::zeroed() };
        Self { socket, bytes, iovecs, headers: vec![header; BATCH], controls: vec![[0; 8]; BATCH] }
    }

    fn receive(&mut self, mut each: impl FnMut(u16, &[u8])) {
        for (at, header) in self.headers.iter_mut().enumerate() {
            (header.msg_hdr.msg_iov, header.msg_hdr.msg_iovlen) = (&raw mut self.iovecs[at], 1);
            header.msg_hdr.msg_control = self.controls[at].as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = size_of_val(&self.controls[at]);
        }
        let (fd, headers, count) = (self.socket.as_raw_fd(), self.headers.as_mut_ptr(), BATCH as u32);
        // SAFETY: each header points to one iovec and one control buffer, which live as long as `self`.
        let got = unsafe { libc::recvmmsg(fd, headers, count, libc::MSG_DONTWAIT, std::ptr::null_mut()) };
        for at in 0..usize::try_from(got).unwrap_or(0) {
            // SAFETY: the kernel has filled in the header.
            let first = unsafe { libc::CMSG_FIRSTHDR(&raw const self.headers[at].msg_hdr) };
            if first.is_null() {
                continue;
            }
            // SAFETY: the only requested control message holds a `sockaddr_in`.
            let to = unsafe { *libc::CMSG_DATA(first).cast::<libc::sockaddr_in>() };
            let len = self.headers[at].msg_len as usize;
            each(u16::from_be(to.sin_port), &self.bytes[at * SLOT..][..len]);
        }
    }
}

fn main() {
    let run = Run::start(&["listen", "to", "variant", "first", "flows"]);
    let (to, first, flows): (SocketAddr, u16, u16) =
        (run.need("to"), run.get("first", 20_000), run.get("flows", 2_000));
    let variant: String = run.need("variant");
    assert!(["own", "lookup"].contains(&&*variant), "--variant {variant}");
    let mut sockets = Sockets::default();
    let listener = open(&mut sockets, run.need("listen"), 8 << 20);
    let (poller, step) = (Poller::new().unwrap(), Datapath::best().0);
    poller.add(sockets.get(listener).unwrap(), listener.0.into()).unwrap();
    let mut all = (variant == "lookup").then(|| All::new(first - 1));
    let held = all.as_ref().map(|all| Lookup::attach(&all.socket, (first, first + flows)).unwrap());
    if let Some(all) = &all {
        poller.add(&all.socket, ALL).unwrap();
    }
    let (clients, by_port, by_socket) = Default::default();
    let (rx, tx) = (Rx::new(step), Tx::new(step));
    let mut relay = Relay { sockets, listener, poller, rx, tx, clients, by_port, by_socket };
    let mut next = first;
    while run.goes_on() {
        for event in relay.poller.wait(Some(Duration::from_millis(100))).unwrap().to_vec() {
            if let (ALL, Some(all)) = (event.token, &mut all) {
                let Relay { tx, by_port, .. } = &mut relay;
                all.receive(|port, bytes| {
                    let Some(to) = by_port.get(&port).copied() else { return };
                    let route = Route {
                        socket: listener,
                        to: Some(to),
                        from: None,
                        tos: 0,
                        ttl: 0,
                        dont_fragment: false,
                    };
                    tx.push_bytes(&route, bytes);
                });
                continue;
            }
            if !relay.rx.has_room() {
                relay.tx.flush(&mut relay.sockets, &relay.rx);
                relay.rx.reset();
            }
            relay.receive(SocketId(u32::try_from(event.token).unwrap()), to, &mut next, held.is_none());
        }
        relay.tx.flush(&mut relay.sockets, &relay.rx);
        relay.rx.reset();
    }
    run.report("lookup", &variant, relay.tx.stats().datagrams, &[]);
}
