//! Experiment: several threads relay one hot flow through shared sockets. Does a second core help, and how
//! much reordering does it cause?
//!
//! ```text
//! spread --listen 10.77.1.1:5201 --to 10.77.2.2:5201 --workers 2 [--batch 32] [--seconds 10]
//! ```
//!
//! All threads wait on two sockets, one towards the client and one towards the target; the kernel wakes one
//! of them per event (EPOLLEXCLUSIVE). `turnpike load udp --clients 1` counts reordered datagrams.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "developer tool; panics show the location")]

mod bare;

use std::{
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    os::fd::AsRawFd,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use bare::Run;
use turnpike_net::{Interest, Poller};

/// Maximum datagram length.
const SLOT: usize = 2048;
const LISTENER: u64 = 0;
const UPSTREAM: u64 = 1;

struct Flow {
    listener: UdpSocket,
    upstream: UdpSocket,
    /// Most recent client: address and port, 0 if none. Each generator run uses a different port.
    client: AtomicU64,
    relayed: AtomicU64,
}

impl Flow {
    #[expect(clippy::cast_possible_truncation, reason = "32 bits, and 16 below them")]
    fn client(&self) -> Option<SocketAddr> {
        let client = self.client.load(Ordering::Relaxed);
        let address = SocketAddrV4::new(Ipv4Addr::from_bits((client >> 16) as u32), client as u16);
        (client != 0).then_some(address.into())
    }
}

/// Buffers of one receive call and the following send call.
struct Batch {
    bytes: Vec<u8>,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    names: Vec<libc::sockaddr_in>,
}

impl Batch {
    fn new(size: usize) -> Self {
        let mut bytes = vec![0; size * SLOT];
        let iovecs = bytes
            .chunks_mut(SLOT)
            .map(|slot| libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: SLOT });
        let iovecs = iovecs.collect();
        // SAFETY: zero is a valid value for every member of both.
        let (header, name) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        Self { bytes, iovecs, headers: vec![header; size], names: vec![name; size] }
    }

    /// Returns the number of datagrams.
    fn receive(&mut self, from: &UdpSocket) -> usize {
        for (at, header) in self.headers.iter_mut().enumerate() {
            self.iovecs[at].iov_len = SLOT;
            header.msg_hdr.msg_iov = &raw mut self.iovecs[at];
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_name = (&raw mut self.names[at]).cast();
            header.msg_hdr.msg_namelen = 16;
        }
        let count = u32::try_from(self.headers.len()).unwrap();
        let (fd, headers) = (from.as_raw_fd(), self.headers.as_mut_ptr());
        // SAFETY: each header points to one iovec and one name of this batch, which live as long as it does.
        let got = unsafe { libc::recvmmsg(fd, headers, count, libc::MSG_DONTWAIT, std::ptr::null_mut()) };
        usize::try_from(got).unwrap_or(0)
    }

    /// Sends the first `count` datagrams to this address, or to the connected one.
    fn send(&mut self, count: usize, by: &UdpSocket, to: Option<SocketAddr>) -> u64 {
        for at in 0..count {
            self.iovecs[at].iov_len = self.headers[at].msg_len as usize;
            let header = &mut self.headers[at].msg_hdr;
            match to {
                Some(SocketAddr::V4(to)) => {
                    self.names[at].sin_family = libc::AF_INET as libc::sa_family_t;
                    self.names[at].sin_port = to.port().to_be();
                    self.names[at].sin_addr.s_addr = u32::from_ne_bytes(to.ip().octets());
                    header.msg_namelen = 16;
                }
                _ => (header.msg_name, header.msg_namelen) = (std::ptr::null_mut(), 0),
            }
        }
        let (fd, headers) = (by.as_raw_fd(), self.headers.as_mut_ptr());
        let count = u32::try_from(count).unwrap();
        // SAFETY: as above, for `count` headers.
        let sent = unsafe { libc::sendmmsg(fd, headers, count, libc::MSG_DONTWAIT) };
        u64::try_from(sent).unwrap_or(0)
    }
}

fn work(flow: &Flow, run: &Run, batch: usize) {
    let mut poller = Poller::new().unwrap();
    poller.add_with(&flow.listener, LISTENER, Interest::Exclusive).unwrap();
    poller.add_with(&flow.upstream, UPSTREAM, Interest::Exclusive).unwrap();
    let mut batch = Batch::new(batch);
    while run.goes_on() {
        let events = poller.wait(Some(Duration::from_millis(100))).unwrap().to_vec();
        for event in events {
            let (from, by) = match event.token {
                LISTENER => (&flow.listener, &flow.upstream),
                _ => (&flow.upstream, &flow.listener),
            };
            let count = batch.receive(from);
            if count == 0 {
                continue;
            }
            let name = batch.names[0];
            let to = if event.token == LISTENER {
                let ip = u64::from(u32::from_be(name.sin_addr.s_addr));
                flow.client.store(ip << 16 | u64::from(u16::from_be(name.sin_port)), Ordering::Relaxed);
                None
            } else {
                flow.client()
            };
            let sent = batch.send(count, by, to);
            flow.relayed.fetch_add(sent, Ordering::Relaxed);
        }
    }
    assert_eq!(batch.bytes.len(), batch.iovecs.len() * SLOT);
}

fn main() {
    let run = Run::start(&["listen", "to", "workers", "batch"]);
    let (listen, to): (SocketAddr, SocketAddr) = (run.need("listen"), run.need("to"));
    let (workers, batch): (usize, usize) = (run.get("workers", 1), run.get("batch", 32));
    let flow = Flow {
        listener: UdpSocket::bind(listen).unwrap(),
        upstream: UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap(),
        client: AtomicU64::new(0),
        relayed: AtomicU64::new(0),
    };
    flow.upstream.connect(to).unwrap();
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| work(&flow, &run, batch));
        }
    });
    run.report("spread", &format!("{workers} workers"), flow.relayed.load(Ordering::Relaxed), &[]);
}
