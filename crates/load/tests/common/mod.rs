//! A relay of this process on loopback, with one user.
#![allow(clippy::unwrap_used, reason = "a test helper says by panicking what went wrong")]
#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use turnpike_load::{
    Rate,
    reflect::{self, Reflector},
    turn::Config,
};
use turnpike_net::Datapath;
use turnpike_relay::{CredentialStore, Relay, RelayAddress, SessionLog};
use turnpike_turn::server::{Effect, Lookup, PeerRules, ServerConfig, User};
use turnpike_wire::integrity::{Key, KeyAlgorithm, userhash};

pub(crate) const USER: &str = "alice";
pub(crate) const PASSWORD: &str = "wonderland";

struct OneUser;

impl CredentialStore for OneUser {
    fn check(
        &self,
        user: User<'_>,
        realm: &str,
        algorithm: KeyAlgorithm,
        _unix: u64,
        verify: &mut dyn FnMut(&Key) -> bool,
    ) -> Lookup {
        let known = match user {
            User::Name(name) => name == USER,
            User::Hash(hash) => *hash == userhash(USER, realm),
        };
        if !known {
            return Lookup::NoSuchUser;
        }
        if verify(&Key::long_term(algorithm, USER, realm, PASSWORD.as_bytes())) {
            return Lookup::Accepted { username: USER.into(), identity: USER.into() };
        }
        Lookup::WrongKey { username: USER.into() }
    }
}

struct Silent;
impl SessionLog for Silent {
    fn effect(&self, _worker: usize, _effect: &Effect) {}
}

/// What a test may want to be different.
pub(crate) struct Wishes {
    pub(crate) max_allocations_per_user: usize,
    pub(crate) allow_loopback: bool,
    /// Where the relay listens and relays.
    pub(crate) address: IpAddr,
    pub(crate) datapath: Datapath,
}

impl Default for Wishes {
    fn default() -> Self {
        Self {
            max_allocations_per_user: 10_000,
            allow_loopback: true,
            address: Ipv4Addr::LOCALHOST.into(),
            datapath: Datapath::best().0,
        }
    }
}

pub(crate) fn relay(wishes: &Wishes) -> Relay {
    let mut peers = PeerRules::default();
    if wishes.allow_loopback {
        peers.allow = ["127.0.0.0/8", "::1/128"].map(|range| range.parse().unwrap()).into();
    }
    let config = turnpike_relay::Config {
        busy_poll: Duration::ZERO,
        listen: vec![SocketAddr::new(wishes.address, 0)],
        streams: turnpike_relay::StreamConfig::default(),
        dtls: turnpike_relay::DtlsConfig::default(),
        workers: 1,
        datapath: wishes.datapath,
        relay: vec![RelayAddress { bind: wishes.address, external: None }],
        ports: 49152..=65535,
        listener_buffer: 4 << 20,
        relay_buffer: 256 << 10,
        max_allocations: 20_000,
        max_allocations_per_user: wishes.max_allocations_per_user,
        realm_limits: Vec::new(),
        server: ServerConfig {
            nonce_key: turnpike_turn::server::NonceKey([7; 32]),
            relay_v4: wishes.address.is_ipv4(),
            relay_v6: wishes.address.is_ipv6(),
            peers,
            ..ServerConfig::default()
        },
    };
    Relay::start(&config, Arc::new(OneUser), Arc::new(Silent)).unwrap()
}

pub(crate) fn reflector() -> Reflector {
    reflector_on(Ipv4Addr::LOCALHOST.into())
}

pub(crate) fn reflector_on(address: IpAddr) -> Reflector {
    let listen = vec![SocketAddr::new(address, 0)];
    let config = reflect::Config { listen, workers: 1, ..reflect::Config::default() };
    Reflector::start(&config).unwrap()
}

/// A short run at a low rate: tests share the machine.
pub(crate) fn load(relay: &Relay, reflector: &Reflector) -> Config {
    Config {
        server: relay.listeners().udp[0],
        peer: reflector.listeners()[0],
        user: USER.to_owned(),
        password: PASSWORD.to_owned(),
        rate: Rate::Pps(2_000.0),
        warmup: Duration::from_millis(200),
        duration: Duration::from_secs(1),
        ..Config::default()
    }
}

pub(crate) fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}
