//! A degradable path between clients and server: a user-space router that, like a NAT, has one port towards the server for each client.
//! Unlike netem, it needs no privileges and runs on every kernel.

use std::{
    collections::HashMap,
    io,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use turnpike_trials::V4;

/// Maximum delay of a reordered datagram if no other datagram follows.
const LATEST: Duration = Duration::from_millis(50);

pub(super) struct Path {
    pub(super) address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    front: UdpSocket,
    server: SocketAddr,
    ways: Mutex<HashMap<SocketAddr, Arc<Way>>>,
    ends: AtomicBool,
    lost: AtomicU32,
    doubled: AtomicU32,
    late: AtomicU32,
    chance: AtomicU64,
    passed: AtomicU64,
    worsened: AtomicU64,
}

struct Way {
    client: SocketAddr,
    socket: UdpSocket,
    /// Datagrams held back in each direction, to be sent after the next one.
    up: Mutex<Option<Vec<u8>>>,
    down: Mutex<Option<Vec<u8>>>,
}

impl Path {
    pub(super) fn to(server: SocketAddr) -> Self {
        let front = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
        front.set_read_timeout(Some(LATEST)).expect("the timeout is not zero");
        let address = front.local_addr().expect("the socket is bound");
        let shared = Arc::new(Shared {
            front,
            server,
            ways: Mutex::default(),
            ends: AtomicBool::new(false),
            lost: AtomicU32::new(0),
            doubled: AtomicU32::new(0),
            late: AtomicU32::new(0),
            chance: AtomicU64::new(1),
            passed: AtomicU64::new(0),
            worsened: AtomicU64::new(0),
        });
        let upwards = Arc::clone(&shared);
        thread::spawn(move || upwards.carry_up());
        Self { address, shared }
    }

    /// Sets the percentages of lost, duplicated and reordered datagrams in both directions.
    pub(super) fn worsen(&self, lost: u32, doubled: u32, late: u32) {
        self.shared.lost.store(lost, Relaxed);
        self.shared.doubled.store(doubled, Relaxed);
        self.shared.late.store(late, Relaxed);
    }

    /// Gives every client a new port towards the server; datagrams sent to the old ports are lost.
    pub(super) fn rebind(&self) {
        self.shared.ways().clear();
    }

    pub(super) fn passed(&self) -> u64 {
        self.shared.passed.load(Relaxed)
    }

    pub(super) fn worsened(&self) -> u64 {
        self.shared.worsened.load(Relaxed)
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        self.shared.ends.store(true, Relaxed);
    }
}

impl Shared {
    fn ways(&self) -> std::sync::MutexGuard<'_, HashMap<SocketAddr, Arc<Way>>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry_up(self: &Arc<Self>) {
        let mut buffer = [0; 65_535];
        while !self.ends.load(Relaxed) {
            match self.front.recv_from(&mut buffer) {
                Ok((len, client)) => {
                    let way = self.way(client);
                    self.pass(&way.up, &buffer[..len], |bytes| way.socket.send(bytes));
                }
                Err(_) => {
                    for way in self.ways().values() {
                        release(&way.up, |bytes| way.socket.send(bytes));
                    }
                }
            }
        }
    }

    fn way(self: &Arc<Self>, client: SocketAddr) -> Arc<Way> {
        let mut ways = self.ways();
        let way = ways.entry(client).or_insert_with(|| {
            let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
            socket.connect(self.server).expect("loopback has a route");
            socket.set_read_timeout(Some(LATEST)).expect("the timeout is not zero");
            let way = Arc::new(Way { client, socket, up: Mutex::default(), down: Mutex::default() });
            let (shared, downwards) = (Arc::clone(self), Arc::clone(&way));
            thread::spawn(move || shared.carry_down(&downwards));
            way
        });
        Arc::clone(way)
    }

    fn carry_down(&self, way: &Arc<Way>) {
        let mut buffer = [0; 65_535];
        let back = |bytes: &[u8]| self.front.send_to(bytes, way.client);
        while !self.ends.load(Relaxed)
            && self.ways().get(&way.client).is_some_and(|own| Arc::ptr_eq(own, way))
        {
            match way.socket.recv(&mut buffer) {
                Ok(len) => self.pass(&way.down, &buffer[..len], back),
                Err(_) => release(&way.down, back),
            }
        }
    }

    fn pass(&self, held: &Mutex<Option<Vec<u8>>>, bytes: &[u8], send: impl Fn(&[u8]) -> io::Result<usize>) {
        self.passed.fetch_add(1, Relaxed);
        if self.happens(&self.lost) {
            return;
        }
        let mut place = held.lock().unwrap_or_else(PoisonError::into_inner);
        if place.is_none() && self.happens(&self.late) {
            *place = Some(bytes.to_vec());
            return;
        }
        let before = place.take();
        drop(place);
        let copies = if self.happens(&self.doubled) { 2 } else { 1 };
        for bytes in std::iter::repeat_n(bytes, copies).chain(before.as_deref()) {
            // A failed send counts as a loss.
            let _ = send(bytes);
        }
    }

    fn happens(&self, in_a_hundred: &AtomicU32) -> bool {
        let share = in_a_hundred.load(Relaxed);
        if share == 0 {
            return false;
        }
        // Linear congruential generator; two threads may get the same value, which does no harm.
        let next = self
            .chance
            .load(Relaxed)
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.chance.store(next, Relaxed);
        let happens = (next >> 33) % 100 < u64::from(share);
        self.worsened.fetch_add(happens.into(), Relaxed);
        happens
    }
}

fn release(held: &Mutex<Option<Vec<u8>>>, send: impl Fn(&[u8]) -> io::Result<usize>) {
    let kept = held.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(bytes) = kept {
        let _ = send(&bytes);
    }
}
