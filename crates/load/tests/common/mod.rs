//! In-process relay on loopback with one user.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use turnpike_load::{
    ClientTransport, LoadError, LoadReport, StopHandle,
    options::parse,
    reflect::{self, Reflector},
    turn::{RunOutcome, TurnLoadConfig, run},
};
use turnpike_net::Datapath;
use turnpike_relay::{CredentialStore, DtlsContext, Identity, Relay, RelayAddress, TlsContext};
use turnpike_testkit::certificates;
pub(crate) use turnpike_testkit::{Dir, eventually, free_address};
use turnpike_turn::server::{AllocationLimits, CredentialCheck, PeerRules, ServerConfig, User, Users};
use turnpike_wire::integrity::{Key, KeyAlgorithm, userhash};

pub(crate) const USER: &str = "alice";
pub(crate) const PASSWORD: &str = "wonderland";

struct OneUser;

impl CredentialStore for OneUser {}

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
        if !known {
            return CredentialCheck::NoSuchUser;
        }
        if verify(&Key::long_term(algorithm, USER, realm, PASSWORD.as_bytes())) {
            return CredentialCheck::Accepted {
                username: USER.into(),
                identity: USER.into(),
                until_unix: None,
            };
        }
        CredentialCheck::WrongKey { username: USER.into() }
    }
}

pub(crate) struct Wishes {
    pub(crate) max_allocations_per_user: usize,
    pub(crate) allow_loopback: bool,
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
    relay_with(wishes, |_| {})
}

pub(crate) fn relay_with(wishes: &Wishes, change: impl FnOnce(&mut turnpike_relay::Config)) -> Relay {
    relay_of(wishes, Arc::new(OneUser), change)
}

pub(crate) fn relay_of(
    wishes: &Wishes,
    users: Arc<dyn CredentialStore>,
    change: impl FnOnce(&mut turnpike_relay::Config),
) -> Relay {
    let mut peers = PeerRules::default();
    if wishes.allow_loopback {
        peers.allow = ["127.0.0.0/8", "::1/128"].map(|range| range.parse().unwrap()).into();
    }
    let mut config = turnpike_relay::Config {
        listen: vec![SocketAddr::new(wishes.address, 0)],
        datapath: wishes.datapath,
        relay: vec![RelayAddress { bind: wishes.address, external: None }],
        listener_buffer: 4 << 20,
        limits: AllocationLimits {
            allocations: 20_000,
            allocations_per_user: wishes.max_allocations_per_user,
            ..AllocationLimits::default()
        },
        server: ServerConfig {
            nonce_keys: turnpike_turn::server::NonceKey([7; 32]).into(),
            relay_v4: wishes.address.is_ipv4(),
            relay_v6: wishes.address.is_ipv6(),
            peers,
            ..ServerConfig::default()
        },
        ..turnpike_relay::Config::default()
    };
    change(&mut config);
    Relay::start(&config, users, Arc::new(())).unwrap()
}

pub(crate) struct Certificate {
    pub(crate) identity: Identity,
    pub(crate) pem: String,
}

pub(crate) fn certificate(name: &str) -> Certificate {
    let certificates::Certificate { pem, key } = certificates::Certificate::new(&[name]);
    let identity = Identity::from_pem(pem.as_bytes(), key.as_bytes()).unwrap();
    Certificate { identity, pem }
}

/// Adds TCP listeners and, if there is a certificate, TLS and DTLS listeners.
pub(crate) fn listen_to_all(config: &mut turnpike_relay::Config, certificate: Option<&Certificate>) {
    let any = loopback(0);
    config.streams.listen = vec![any];
    if let Some(Certificate { identity, .. }) = certificate {
        let identities = std::slice::from_ref(identity);
        config.streams.tls_listen = vec![any];
        config.streams.tls = Some(Arc::new(TlsContext::new(identities).unwrap()));
        config.dtls.listen = vec![any];
        config.dtls.context = Some(Arc::new(DtlsContext::new(identities, Duration::from_secs(10)).unwrap()));
    }
}

pub(crate) fn listener(relay: &Relay, transport: ClientTransport) -> SocketAddr {
    let listeners = relay.listeners();
    match transport {
        ClientTransport::Udp => listeners.udp[0],
        ClientTransport::Tcp => listeners.tcp[0],
        ClientTransport::Tls => listeners.tls[0],
        ClientTransport::Dtls => listeners.dtls[0],
    }
}

/// A counter of the state machine, summed over all workers.
pub(crate) fn counter(relay: &Relay, family: &str, label: &str) -> u64 {
    let counts = |(name, with, value): (&str, Option<(&str, &str)>, u64)| {
        (name == family && with.map_or("", |with| with.1) == label).then_some(value)
    };
    relay.snapshots().iter().flat_map(|worker| worker.turn.counters().filter_map(counts)).sum()
}

pub(crate) fn wait_for_counter(relay: &Relay, family: &str, label: &str, value: u64) {
    eventually(&format!("{family} {label} is {value}"), || counter(relay, family, label) >= value);
    assert_eq!(counter(relay, family, label), value, "{family} {label}");
}

pub(crate) fn wait_until_empty(relay: &Relay) {
    eventually("no allocation remains", || relay.snapshots().iter().all(|worker| worker.allocations == 0));
}

pub(crate) fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

pub(crate) fn reflector() -> Reflector {
    reflector_on(Ipv4Addr::LOCALHOST.into())
}

pub(crate) fn reflector_on(address: IpAddr) -> Reflector {
    let listen = vec![SocketAddr::new(address, 0)];
    let config = reflect::ReflectConfig { listen, workers: Some(1), ..reflect::ReflectConfig::default() };
    Reflector::start(&config).unwrap()
}

/// Short run at a low rate, since tests share the machine; `flags` override the defaults below.
pub(crate) fn load(relay: &Relay, reflector: &Reflector, flags: &str) -> TurnLoadConfig {
    let (server, peer) = (relay.listeners().udp[0], reflector.listeners()[0]);
    let usual =
        format!("{server} --peer {peer} --user {USER}:{PASSWORD} --rate 2000 --warmup 0.2 --duration 1");
    let mut config: TurnLoadConfig = parse(&format!("{usual} {flags}")).unwrap();
    if let Some(transport) = config.transport {
        config.servers[0] = listener(relay, transport).into();
    }
    config
}

pub(crate) fn quiet(config: &TurnLoadConfig) -> Result<RunOutcome, LoadError> {
    run(config, &StopHandle::default(), |_| {})
}

pub(crate) fn measured(relay: &Relay, reflector: &Reflector, flags: &str) -> LoadReport {
    quiet(&load(relay, reflector, flags)).unwrap().report
}

pub(crate) fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}
