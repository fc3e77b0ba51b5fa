//! 437 (Allocation Mismatch): a client whose port still has an old allocation switches to another port.

use std::{
    collections::HashMap,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use crate::common::{Wishes, listener, load, loopback, reflector, relay_with};
use turnpike_load::{
    ClientTransport, StopHandle,
    turn::{TurnLoadConfig, run},
};

const CLIENTS: usize = 4;
const ALLOCATE: [u8; 2] = [0x00, 0x03];

/// Proxy that responds with 437 to the first client ports that it sees.
struct Forgetful {
    address: SocketAddr,
    refused: Arc<AtomicUsize>,
    ends: Arc<AtomicBool>,
}

impl Forgetful {
    fn new(server: SocketAddr, taken: usize) -> Self {
        let socket = UdpSocket::bind(loopback(0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let address = socket.local_addr().unwrap();
        let (refused, ends) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, over) = (Arc::clone(&refused), Arc::clone(&ends));
        thread::spawn(move || pass_on(&socket, server, taken, &counted, &over));
        Self { address, refused, ends }
    }
}

impl Drop for Forgetful {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

fn pass_on(
    socket: &UdpSocket,
    server: SocketAddr,
    taken: usize,
    refused: &AtomicUsize,
    ends: &Arc<AtomicBool>,
) {
    // `None` for a taken port.
    let mut clients: HashMap<SocketAddr, Option<UdpSocket>> = HashMap::new();
    let mut buffer = [0; 2048];
    while !ends.load(Ordering::Relaxed) {
        let Ok((len, from)) = socket.recv_from(&mut buffer) else { continue };
        let message = &buffer[..len];
        let known = clients.len();
        let way = clients.entry(from).or_insert_with(|| {
            if known < taken {
                refused.fetch_add(1, Ordering::Relaxed);
                return None;
            }
            let way = UdpSocket::bind(loopback(0)).unwrap();
            way.connect(server).unwrap();
            way.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            answer(way.try_clone().unwrap(), socket.try_clone().unwrap(), from, Arc::clone(ends));
            Some(way)
        });
        match way {
            Some(way) => _ = way.send(message),
            None if message.starts_with(&ALLOCATE) => {
                let mut error = vec![0x01, 0x13, 0, 8];
                error.extend_from_slice(&message[4..20]);
                error.extend_from_slice(&[0x00, 0x09, 0, 4, 0, 0, 4, 37]);
                _ = socket.send_to(&error, from);
            }
            None => {}
        }
    }
}

fn answer(way: UdpSocket, socket: UdpSocket, to: SocketAddr, ends: Arc<AtomicBool>) {
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while !ends.load(Ordering::Relaxed) {
            if let Ok(len) = way.recv(&mut buffer) {
                let _ = socket.send_to(&buffer[..len], to);
            }
        }
    });
}

#[test]
fn a_client_with_a_taken_port_tries_a_few_others() {
    let relay = relay_with(&Wishes::default(), |_| {});
    let reflector = reflector();
    let load_over = |address: SocketAddr| TurnLoadConfig {
        servers: vec![address.into()],
        ..load(&relay, &reflector, &format!("--clients {CLIENTS} --threads 1 --rate 200"))
    };
    let some = Forgetful::new(listener(&relay, ClientTransport::Udp), 2 * CLIENTS);
    let report = run(&load_over(some.address), &StopHandle::default(), |_| {}).unwrap().report;
    assert_eq!(some.refused.load(Ordering::Relaxed), 2 * CLIENTS);
    assert!(report.sent > 0 && report.received > 0, "{report:?}");

    let all = Forgetful::new(listener(&relay, ClientTransport::Udp), usize::MAX);
    let error = run(&load_over(all.address), &StopHandle::default(), |_| {}).unwrap_err().to_string();
    assert!(error.contains("437") && error.contains("ones tried after it"), "{error}");
    let tried = all.refused.load(Ordering::Relaxed);
    assert!((6..=6 * CLIENTS).contains(&tried), "{tried} ports");
}
