//! Well-behaved client on the worker under attack. It exchanges one datagram at a time over UDP and TCP and
//! detects every loss.

use std::{
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    CHANNEL_BIND, Message, SOON, World, allocate, bind, channel_data, eventually, heard, padded, peer, plain,
};

/// Pause between two rounds: a few hundred rounds per second resemble a normal client; more would be a load
/// test.
const PACE: Duration = Duration::from_millis(2);

pub(crate) struct Witness {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<Duration>,
}

impl Witness {
    pub(crate) fn start(world: &World) -> Self {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (over, counted) = (Arc::clone(&stop), Arc::clone(&rounds));
        let far = peer();
        let udp = peer();
        udp.connect(world.udp()).unwrap();
        udp.send(&allocate()).unwrap();
        let udp_relayed = plain(&Message(heard(&udp)).attribute(0x0016));
        udp.send(&bind(far.local_addr().unwrap())).unwrap();
        assert_eq!(Message(heard(&udp)).kind(), CHANNEL_BIND | 0x0100);
        let mut tcp = world.client();
        let tcp_relayed = tcp.allocated(&far);
        let thread = thread::spawn(move || {
            let mut slowest = Duration::ZERO;
            while !over.load(Ordering::Relaxed) {
                let round = counted.load(Ordering::Relaxed);
                let began = Instant::now();
                let (there, back) = (format!("there {round}"), format!("and back {round}"));
                udp.send(&channel_data(there.as_bytes())).unwrap();
                assert_eq!(arrives(&far, "from UDP"), there.as_bytes());
                far.send_to(back.as_bytes(), udp_relayed).unwrap();
                assert_eq!(Message(arrives(&udp, "to UDP")).payload(), back.as_bytes());
                tcp.send(&padded(channel_data(there.as_bytes())));
                assert_eq!(arrives(&far, "from TCP"), there.as_bytes());
                far.send_to(back.as_bytes(), tcp_relayed).unwrap();
                assert_eq!(tcp.receive().expect("the connection is open").payload(), back.as_bytes());
                slowest = slowest.max(began.elapsed());
                counted.store(round + 1, Ordering::Relaxed);
                thread::sleep(PACE);
            }
            slowest
        });
        let witness = Self { stop, rounds, thread };
        witness.goes_on();
        witness
    }

    pub(crate) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    pub(crate) fn goes_on(&self) {
        let wanted = self.rounds() + 5;
        eventually("the witness continues", || self.rounds() >= wanted || self.thread.is_finished());
    }

    /// Stops after some more rounds and checks that nothing was lost in either direction.
    pub(crate) fn lost_nothing(self) {
        self.goes_on();
        self.stop.store(true, Ordering::Relaxed);
        let slowest = self.thread.join().expect("the witness lost a message");
        println!("{} rounds of two clients, the slowest {slowest:?}", self.rounds.load(Ordering::Relaxed));
    }
}

fn arrives(socket: &UdpSocket, which: &str) -> Vec<u8> {
    let mut buffer = vec![0; 2048];
    match socket.recv(&mut buffer) {
        Ok(len) => {
            buffer.truncate(len);
            buffer
        }
        Err(error) => panic!("{which}: nothing received within {SOON:?}: {error}"),
    }
}
