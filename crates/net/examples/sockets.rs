//! Experiment: a bare UDP relay with one socket for all clients and one per client towards the target. The
//! variants differ in the sockets towards the target.
//!
//! ```text
//! sockets --listen 10.77.1.1:5201 --to 10.77.2.2:5201 --variant plain|connected|busy-poll [--us 50] [--seconds 10]
//! ```
//!
//! - `plain`: the sockets towards the target are bound, like relay sockets.
//! - `connected`: they are connected, so that the kernel caches their route and drops datagrams from other
//!   sources.
//! - `busy-poll`: like `plain`, but the process polls the device itself for some microseconds
//!   (SO_PREFER_BUSY_POLL, EPIOCSPARAMS of Linux 6.9), in place of threaded NAPI.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "developer tool; panics show the location")]

mod bare;

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    time::Duration,
};

use bare::Run;
use turnpike_net::{Datapath, Event, Poller, Route, Rx, SocketId, Sockets, Tx, UdpOptions, UdpSocket};

/// From asm-generic/socket.h, and from linux/eventpoll.h: `_IOW(0x8A, 0x01, struct epoll_params)`.
const SO_BUSY_POLL: libc::c_int = 46;
const SO_PREFER_BUSY_POLL: libc::c_int = 69;
const SO_BUSY_POLL_BUDGET: libc::c_int = 70;
const EPIOCSPARAMS: libc::c_ulong = 0x4008_8A01;

/// `struct epoll_params`.
#[repr(C)]
struct EpollParams {
    busy_poll_usecs: u32,
    busy_poll_budget: u16,
    prefer_busy_poll: u8,
    pad: u8,
}

struct Relay {
    to: SocketAddr,
    is_connected: bool,
    /// Microseconds of busy polling; 0 disables it.
    busy: u32,
    sockets: Sockets,
    listener: SocketId,
    poller: Poller,
    rx: Rx,
    tx: Tx,
    clients: HashMap<SocketAddr, SocketId>,
    /// Clients by the ID of the socket towards the target.
    back: HashMap<u32, SocketAddr>,
}

impl Relay {
    fn new(run: &Run, variant: &str) -> Self {
        let busy = if variant == "busy-poll" { run.get("us", 50) } else { 0 };
        let poller = Poller::new().unwrap();
        if busy > 0 {
            let wanted =
                EpollParams { busy_poll_usecs: busy, busy_poll_budget: 64, prefer_busy_poll: 1, pad: 0 };
            // SAFETY: the pointer is to a live `epoll_params`, which the kernel only reads.
            let set = unsafe { libc::ioctl(poller.as_fd().as_raw_fd(), EPIOCSPARAMS, &raw const wanted) };
            assert_eq!(set, 0, "EPIOCSPARAMS: {}", std::io::Error::last_os_error());
        }
        let mut relay = Self {
            to: run.need("to"),
            is_connected: variant == "connected",
            busy,
            sockets: Sockets::default(),
            listener: SocketId(0),
            poller,
            rx: Rx::new(Datapath::best().0),
            tx: Tx::new(Datapath::best().0),
            clients: HashMap::new(),
            back: HashMap::new(),
        };
        relay.listener = relay.open(run.need("listen"), 8 << 20);
        relay
    }

    fn open(&mut self, address: SocketAddr, buffer: usize) -> SocketId {
        let (recv_buffer, send_buffer) = (Some(buffer), Some(buffer));
        let options = UdpOptions { gro: true, recv_buffer, send_buffer, ..UdpOptions::default() };
        let busy = self.busy;
        let socket = UdpSocket::bind(address, &options).unwrap();
        if busy > 0 {
            let set = |name, value| set_option(socket.as_fd(), name, value).unwrap();
            set(SO_PREFER_BUSY_POLL, 1);
            set(SO_BUSY_POLL_BUDGET, 64);
            set(SO_BUSY_POLL, busy.cast_signed());
        }
        let id = self.sockets.insert(socket);
        self.poller.add(self.sockets.get(id).unwrap(), id.0.into()).unwrap();
        id
    }

    fn socket_of(&mut self, client: SocketAddr) -> SocketId {
        if let Some(known) = self.clients.get(&client) {
            return *known;
        }
        let id = self.open((Ipv4Addr::UNSPECIFIED, 0).into(), 256 << 10);
        if self.is_connected {
            self.sockets.get(id).unwrap().connect(self.to).unwrap();
        }
        self.clients.insert(client, id);
        self.back.insert(id.0, client);
        id
    }

    fn serve(&mut self, event: &Event) {
        let from = SocketId(u32::try_from(event.token).unwrap());
        let Ok(received) = self.rx.recv(self.sockets.get(from).unwrap()) else { return };
        for index in received.first..received.first + received.count {
            let client = self.rx.buffer(index).unwrap().from;
            let (socket, to) = if from == self.listener {
                (self.socket_of(client), (!self.is_connected).then_some(self.to))
            } else {
                (self.listener, Some(self.back[&from.0]))
            };
            let route = Route { socket, to, from: None, tos: 0, ttl: 0, dont_fragment: false };
            for datagram in self.rx.buffer(index).unwrap().datagrams() {
                self.tx.push(&route, &[], self.rx.span(datagram), 0);
            }
        }
    }
}

fn set_option(fd: BorrowedFd<'_>, name: libc::c_int, value: libc::c_int) -> std::io::Result<()> {
    let size = libc::socklen_t::try_from(size_of_val(&value)).unwrap();
    let at = (&raw const value).cast();
    // SAFETY: the pointer and size describe `value`.
    match unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, at, size) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn main() {
    let run = Run::start(&["listen", "to", "variant", "us"]);
    let variant: String = run.need("variant");
    assert!(["plain", "connected", "busy-poll"].contains(&&*variant), "--variant {variant}");
    let mut relay = Relay::new(&run, &variant);
    let mut wakeups = 0_u32;
    while run.goes_on() {
        let events = relay.poller.wait(Some(Duration::from_millis(100))).unwrap().to_vec();
        wakeups += 1;
        for event in &events {
            if !relay.rx.has_room() {
                relay.tx.flush(&mut relay.sockets, &relay.rx);
                relay.rx.reset();
            }
            relay.serve(event);
        }
        relay.tx.flush(&mut relay.sockets, &relay.rx);
        relay.rx.reset();
    }
    run.report("sockets", &variant, relay.tx.stats().datagrams, &[("wakeups", wakeups.into())]);
}
