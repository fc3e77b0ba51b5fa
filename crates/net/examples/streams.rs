//! Experiment: a bare TCP forwarder of thin connections, with epoll or with io_uring. What does a small
//! request with its response cost?
//!
//! ```text
//! streams --listen 10.77.1.1:5201 --to 10.77.2.2:5201 --variant epoll|io-uring [--seconds 10]
//! ```
//!
//! Single-threaded. Each message is read and written as a whole; a connection is closed when either end
//! closes it. epoll needs at worst a wait, a read and a write per message; io_uring needs one call for all of
//! them.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "developer tool; panics show the location")]

mod bare;
#[path = "bare/ring.rs"]
mod ring;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::FromRawFd as _,
    time::Duration,
};

use bare::Run;
use ring::{ACCEPT, Completion, RECV, Request, Ring, SEND};
use turnpike_net::Poller;

/// Maximum message length.
const SLOT: usize = 16 << 10;
const LISTENER: u64 = u64::MAX - 7;

/// Client and target connection, with the bytes that have not been passed on yet.
struct Pair {
    ends: [TcpStream; 2],
    buffers: [Vec<u8>; 2],
    /// Per buffer: bytes still to send, and bytes sent.
    left: [(usize, usize); 2],
}

fn pair(client: TcpStream, to: SocketAddr) -> Pair {
    let ends = [client, TcpStream::connect(to).unwrap()];
    ends.iter().for_each(|end| end.set_nodelay(true).unwrap());
    Pair { ends, buffers: [vec![0; SLOT], vec![0; SLOT]], left: [(0, 0); 2] }
}

fn token(index: usize, end: usize) -> u64 {
    (index * 2 + end) as u64
}

fn by_epoll(run: &Run, listener: &TcpListener, to: SocketAddr) -> u64 {
    let mut poller = Poller::new().unwrap();
    poller.add(listener, LISTENER).unwrap();
    let (mut pairs, mut moved): (Vec<Option<Pair>>, u64) = (Vec::new(), 0);
    while run.goes_on() {
        let events = poller.wait(Some(Duration::from_millis(100))).unwrap().to_vec();
        for event in events {
            if event.token == LISTENER {
                let (client, _) = listener.accept().unwrap();
                let pair = pair(client, to);
                for end in 0..2 {
                    poller.add(&pair.ends[end], token(pairs.len(), end)).unwrap();
                }
                pairs.push(Some(pair));
                continue;
            }
            let at = usize::try_from(event.token).unwrap();
            let Some(Pair { ends: [client, target], buffers, .. }) = &mut pairs[at / 2] else { continue };
            let (from, into) = if at % 2 == 0 { (client, target) } else { (target, client) };
            let buffer = &mut buffers[at % 2];
            // Messages are small; a write that would block closes the pair.
            let done = from.read(buffer).and_then(|len| into.write_all(&buffer[..len]).map(|()| len));
            match done {
                Ok(1..) => moved += 1,
                Ok(0) | Err(_) => pairs[at / 2] = None,
            }
        }
    }
    moved
}

/// Requests the next receive from one end, or the next send to the other.
fn ask(ring: &mut Ring, pairs: &mut [Option<Pair>], at: usize) {
    let Some(pair) = &mut pairs[at / 2] else { return };
    let (left, sent) = pair.left[at % 2];
    let buffer = &mut pair.buffers[at % 2];
    let (opcode, end, bytes) = match left {
        0 => (RECV, at % 2, &mut buffer[..]),
        left => (SEND, 1 - at % 2, &mut buffer[sent..sent + left]),
    };
    ring.push(Request::new(opcode, &pair.ends[end], bytes, at as u64));
}

fn by_io_uring(run: &Run, listener: &TcpListener, to: SocketAddr) -> u64 {
    let mut ring = Ring::new(4096).unwrap();
    let (mut pairs, mut moved): (Vec<Option<Pair>>, u64) = (Vec::new(), 0);
    let accept = Request::new(ACCEPT, listener, &mut [], LISTENER);
    ring.push(accept);
    while run.goes_on() {
        ring.wait(Duration::from_millis(100), |ring, Completion { user_data, result, .. }| {
            if user_data == LISTENER {
                // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
                let client = unsafe { TcpStream::from_raw_fd(result) };
                pairs.push(Some(pair(client, to)));
                for end in 0..2 {
                    let at = usize::try_from(token(pairs.len() - 1, end)).unwrap();
                    ask(ring, &mut pairs, at);
                }
                return ring.push(accept);
            }
            let at = usize::try_from(user_data).unwrap();
            let Some(pair) = &mut pairs[at / 2] else { return };
            let Ok(len @ 1..) = usize::try_from(result) else {
                // Close both ends; the memory stays until pending requests have completed.
                pair.ends.iter().for_each(|end| _ = end.shutdown(std::net::Shutdown::Both));
                return;
            };
            let (left, sent) = &mut pair.left[at % 2];
            if *left == 0 {
                (*left, *sent) = (len, 0);
            } else {
                (*left, *sent) = (*left - len, *sent + len);
                moved += u64::from(*left == 0);
            }
            ask(ring, &mut pairs, at);
        });
    }
    moved
}

fn main() {
    let run = Run::start(&["listen", "to", "variant"]);
    let (listen, to): (SocketAddr, SocketAddr) = (run.need("listen"), run.need("to"));
    let listener = TcpListener::bind(listen).unwrap();
    let variant: String = run.get("variant", "epoll".to_owned());
    let moved = match &*variant {
        "epoll" => by_epoll(&run, &listener, to),
        "io-uring" => by_io_uring(&run, &listener, to),
        other => panic!("--variant {other}"),
    };
    run.report("streams", &variant, moved, &[]);
}
