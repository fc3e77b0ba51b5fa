//! The client against the server, in memory and virtual time.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use turnpike_turn::{
    client::{self, Event, Incoming},
    random::Seed,
    server::{
        AllocationSlot, Client as ServerClient, CredentialCheck, Effect, Family, ListenerId, OpenRequest,
        OpenResult, PeerRules, QuotaRefusal, Quotas, Redirects, RelayId, Restrictions, Server, ServerConfig,
        User, UserRef, Users, Verdict,
    },
    time::Now,
};
use turnpike_wire::{
    frame,
    indication::MAX_HEADER_LEN,
    integrity::{Key, KeyAlgorithm, userhash},
};

const USER: &str = "alice";
const PASSWORD: &str = "wonderland";

struct OneUser;

impl Users for OneUser {
    fn check(
        &self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        _unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> CredentialCheck {
        let known = match user {
            User::Name(name) => name == USER,
            User::Hash(hash) => *hash == userhash(USER, realm),
        };
        match known {
            false => CredentialCheck::NoSuchUser,
            true if verify(&Key::long_term(algorithm, USER, realm, PASSWORD.as_bytes())) => {
                CredentialCheck::Accepted { username: USER.into(), identity: USER.into(), until_unix: None }
            }
            true => CredentialCheck::WrongKey { username: USER.into() },
        }
    }
}

impl Quotas for OneUser {
    fn acquire(&self, _user: UserRef<'_>, _prefix: IpAddr) -> Result<(), QuotaRefusal> {
        Ok(())
    }
    fn release(&self, _user: UserRef<'_>, _prefix: IpAddr) {}
}

impl Restrictions for OneUser {}

impl Redirects for OneUser {}

fn peer() -> SocketAddr {
    "192.0.2.9:7000".parse().unwrap()
}

fn relayed() -> SocketAddr {
    "203.0.113.5:50000".parse().unwrap()
}

struct Bench {
    client: client::Client,
    server: Server<OneUser>,
    now: u64,
    allocation: Option<AllocationSlot>,
    at_peer: Vec<Vec<u8>>,
}

impl Bench {
    fn new(client: client::Config) -> Self {
        let mut peers = PeerRules::default();
        // The documentation range is refused by default.
        peers.allow.push("192.0.2.0/24".parse().unwrap());
        let config = ServerConfig {
            nonce_keys: turnpike_turn::server::NonceKey([3; 32]).into(),
            nonce_lifetime: 600,
            peers,
            ..ServerConfig::default()
        };
        Self {
            client: client::Client::new(Arc::new(client), Seed([9; 32])),
            server: Server::new(Arc::new(config), OneUser, Seed([5; 32])),
            now: 0,
            allocation: None,
            at_peer: Vec::new(),
        }
    }

    fn time(&self) -> Now {
        Now { ms: self.now, unix: 1_700_000_000 + self.now / 1_000 }
    }

    fn five_tuple() -> ServerClient {
        ServerClient {
            listener: ListenerId(0),
            address: "198.51.100.7:40000".parse().unwrap(),
            local: "203.0.113.1:3478".parse().unwrap(),
        }
    }

    fn deliver(&mut self, datagram: &[u8]) {
        let now = self.time();
        let mut reply = match self.server.from_client(now, &Self::five_tuple().into(), datagram) {
            Verdict::Reply { bytes, .. } => Some(bytes.to_vec()),
            Verdict::ToPeer { payload, peer: to, .. } => {
                assert_eq!(to, peer());
                self.at_peer.push(payload.to_vec());
                None
            }
            Verdict::ToClient { .. } => panic!("a client's datagram was sent back to the client"),
            Verdict::Wait { otherwise, .. } => panic!("waits without limits: {otherwise:?}"),
            Verdict::Drop(Some(reason)) => panic!("dropped: {reason:?}"),
            Verdict::Drop(None) => None,
        };
        while let Some(effect) = self.server.poll_effect() {
            let Effect::Open(OpenRequest { allocation, .. }) = effect else { continue };
            self.allocation = Some(allocation);
            match self.server.opened(now, allocation, OpenResult::Opened { relayed: relayed() }, None) {
                Verdict::Reply { bytes, .. } => reply = Some(bytes.to_vec()),
                _ => panic!("no response although the relay opened"),
            }
        }
        if let Some(reply) = reply {
            assert_eq!(self.client.handle_datagram(self.now, &reply), Incoming::Control);
        }
    }

    fn settle(&mut self) -> Vec<Event> {
        while let Some(datagram) = self.client.poll_transmit().map(<[u8]>::to_vec) {
            self.deliver(&datagram);
        }
        std::iter::from_fn(|| self.client.poll_event()).collect()
    }

    fn send(&mut self, payload: &[u8]) {
        let mut header = [0; MAX_HEADER_LEN];
        let len = self.client.send_header(peer(), u16::try_from(payload.len()).unwrap(), &mut header);
        let mut datagram = header[..len].to_vec();
        datagram.extend(payload);
        if len > 4 {
            datagram.resize(datagram.len() + usize::from(frame::padding(payload.len())), 0);
        }
        self.deliver(&datagram);
    }

    fn peer_sends(&mut self, payload: &[u8]) -> Vec<u8> {
        let relay = RelayId { allocation: self.allocation.unwrap(), family: Family::V4 };
        let now = self.time();
        match self.server.data.from_peer(now, relay, peer(), payload) {
            Verdict::ToClient { header, payload, padding, .. } => {
                let mut datagram = header.as_slice().to_vec();
                datagram.extend(payload);
                datagram.resize(datagram.len() + usize::from(padding), 0);
                datagram
            }
            _ => panic!("dropped although the peer has a permission"),
        }
    }
}

fn session(config: client::Config) -> Bench {
    let mut bench = Bench::new(config);
    bench.client.allocate(0).unwrap();
    let events = bench.settle();
    assert!(
        matches!(&events[..], [Event::Allocated(allocation)] if allocation.relayed == relayed()),
        "{events:?}"
    );
    bench
}

fn configurations() -> [client::Config; 3] {
    let base = client::Config::new(USER, PASSWORD);
    [
        client::Config { password_algorithms: false, ..base.clone() },
        client::Config { fingerprint: true, software: Some("test".to_owned()), ..base.clone() },
        base,
    ]
}

#[test]
fn data_flows_both_ways_with_a_permission_and_over_a_channel() {
    for config in configurations() {
        let mut bench = session(config);
        bench.client.permit(0, peer().ip()).unwrap();
        assert_eq!(bench.settle(), [Event::Permitted(peer().ip())]);
        bench.send(b"by Send indication");
        let datagram = bench.peer_sends(b"by Data indication");
        let data = Incoming::Data { peer: peer(), channel: None, payload: &b"by Data indication"[..] };
        assert_eq!(bench.client.handle_datagram(0, &datagram), data);

        let number = bench.client.bind_channel(0, peer()).unwrap();
        assert_eq!(bench.settle(), [Event::Bound(number, peer())]);
        bench.send(b"by channel");
        let datagram = bench.peer_sends(b"and back");
        let data = Incoming::Data { peer: peer(), channel: Some(number), payload: &b"and back"[..] };
        assert_eq!(bench.client.handle_datagram(0, &datagram), data);
        assert_eq!(bench.at_peer, [&b"by Send indication"[..], b"by channel"]);
    }
}

#[test]
fn a_session_lasts_for_hours_across_stale_nonces() {
    for config in configurations() {
        let mut bench = session(config);
        let number = bench.client.bind_channel(0, peer()).unwrap();
        assert_eq!(bench.settle(), [Event::Bound(number, peer())]);
        let hours = 3 * 3_600_000;
        while bench.now < hours {
            bench.now = bench.client.poll_timeout().unwrap();
            bench.client.handle_timeout(bench.now);
            let now = bench.time();
            bench.server.handle_timeout(now);
            let events = bench.settle();
            assert!(!events.is_empty(), "something was due at {}", bench.now);
            for event in events {
                assert!(matches!(event, Event::Refreshed { .. } | Event::Bound(..)), "{event:?}");
            }
            assert_eq!(bench.server.allocations(), 1);
        }
        bench.send(b"still there");
        assert_eq!(bench.at_peer, [b"still there"]);
        bench.client.delete(bench.now).unwrap();
        assert_eq!(bench.settle(), [Event::Deleted]);
        assert_eq!(bench.server.allocations(), 0);
    }
}

#[test]
fn a_wrong_password_is_refused() {
    for config in configurations() {
        let config = client::Config { password: "looking-glass".to_owned(), ..config };
        let mut bench = Bench::new(config);
        bench.client.allocate(0).unwrap();
        let events = bench.settle();
        assert!(
            matches!(&events[..], [Event::Failed { failure: client::Failure::Credentials { .. }, .. }]),
            "{events:?}"
        );
        assert_eq!(bench.server.allocations(), 0);
    }
}

#[test]
fn binding_returns_the_mapped_address() {
    let mut bench = Bench::new(client::Config::default());
    bench.client.binding(0).unwrap();
    assert_eq!(bench.settle(), [Event::Mapped(Bench::five_tuple().address)]);
}
