//! A credential store that responds asynchronously: only the client concerned has to wait.

use crate::prelude::*;
use crate::support::*;
use turnpike_relay::PendingLookup;
use turnpike_turn::{
    client::{Client, Config},
    random::Seed,
    server::{CredentialCheck, CredentialQuery, LookupResult, OwnedUser, StoreFailure, User, Users},
};
use turnpike_wire::integrity::{Key, KeyAlgorithm};

struct Remote(Mutex<mpsc::Sender<(CredentialQuery, PendingLookup)>>);

impl Users for Remote {
    fn check(
        &self,
        _: User<'_>,
        _: &str,
        _: KeyAlgorithm,
        _: u64,
        _: &mut dyn FnMut(&Key) -> bool,
    ) -> CredentialCheck {
        CredentialCheck::NeedsLookup
    }
}

impl CredentialStore for Remote {
    fn look_up(&self, query: CredentialQuery, lookup: PendingLookup) {
        self.0.lock().unwrap().send((query, lookup)).unwrap();
    }
}

struct Asking {
    socket: UdpSocket,
    client: Client,
    started: Instant,
}

impl Asking {
    fn new(server: SocketAddr) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(server).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let config = Config::new("alice", "wonderland");
        let client = Client::new(Arc::new(config), Seed(rand::random()));
        Self { socket, client, started: Instant::now() }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap()
    }

    fn step(&mut self) {
        while let Some(message) = self.client.poll_transmit().map(<[u8]>::to_vec) {
            self.socket.send(&message).unwrap();
        }
        let mut buffer = [0; 2048];
        if let Ok(len) = self.socket.recv(&mut buffer) {
            let now = self.now();
            self.client.handle_datagram(now, &buffer[..len]);
        }
        let now = self.now();
        if self.client.poll_timeout().is_some_and(|due| due <= now) {
            self.client.handle_timeout(now);
        }
    }

    fn until<T>(&mut self, mut done: impl FnMut(&mut Client) -> Option<T>) -> T {
        let deadline = Instant::now() + SOON;
        loop {
            self.step();
            if let Some(found) = done(&mut self.client) {
                return found;
            }
            assert!(Instant::now() < deadline, "the event did not happen");
        }
    }
}

fn found(query: &CredentialQuery) -> LookupResult {
    let hash = turnpike_wire::integrity::userhash("alice", &query.realm);
    assert!([OwnedUser::Name("alice".into()), OwnedUser::Hash(hash)].contains(&query.user));
    let key = Key::long_term(query.algorithm, "alice", &query.realm, b"wonderland");
    LookupResult::Keys { username: "alice".into(), identity: "alice".into(), keys: vec![(key, None)] }
}

#[test]
fn pending_lookup_delays_only_its_client() {
    let (questions, asked) = mpsc::channel();
    let world = start_with_store(Arc::new(Remote(Mutex::new(questions))), |config| {
        config.server.authenticate = true;
        config.server.store_failure = StoreFailure::Drop;
    });
    let mut alice = Asking::new(world.udp());
    alice.client.allocate(0).unwrap();
    // The store drops the query, so the client retransmits.
    drop(alice.until(|_| asked.try_recv().ok()));
    world.wait_for_counter("dropped_datagrams", "lookup_over", 1);
    let (query, lookup) = alice.until(|_| asked.try_recv().ok());
    // The only worker serves other clients in the meantime, and the waiting client has no allocation.
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    other.set_read_timeout(Some(SOON)).unwrap();
    other.send_to(&[&[0, 1, 0, 0, 0x21, 0x12, 0xA4, 0x42][..], &[7; 12]].concat(), world.udp()).unwrap();
    let mut reply = [0; 64];
    let len = other.recv(&mut reply).unwrap();
    assert_eq!((len, &reply[..2]), (32, &[1, 1][..]));
    assert_eq!(world.allocations(), 0);
    std::thread::spawn(move || lookup.finish(found(&query))).join().unwrap();
    alice.until(|client| {
        let event = client.poll_event()?;
        assert!(!matches!(event, Event::Failed { .. }), "{event:?}");
        client.allocation().map(|_| ())
    });
    world.wait_for_counter("successes", "allocate", 1);
    assert!(asked.try_recv().is_err(), "the store was asked more than once");
}

#[test]
fn unavailable_store_is_reported_to_the_client() {
    let (questions, asked) = mpsc::channel();
    let world = start_with_store(Arc::new(Remote(Mutex::new(questions))), |config| {
        config.server.authenticate = true;
    });
    let mut alice = Asking::new(world.udp());
    alice.client.allocate(0).unwrap();
    drop(alice.until(|_| asked.try_recv().ok()));
    world.wait_for_counter("error_responses", "500", 1);
    alice.until(|client| matches!(client.poll_event()?, Event::Failed { .. }).then_some(()));
    assert_eq!(world.allocations(), 0);
}
