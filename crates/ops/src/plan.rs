//! From settings to what the relay is told: finds what the settings left open (addresses, cores, credentials).

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
    thread,
};

use turnpike_net::Datapath;
use turnpike_relay::{Config, DtlsConfig, DtlsContext, RelayAddress, StreamConfig, TlsContext};
use turnpike_turn::server::{NonceKey, PeerRules, ServerConfig};
use turnpike_wire::channel_data::ChannelRange;

use crate::{
    config::{Settings, StoredKey, User, UserSecret},
    secret::Secret,
};

/// The name of the user that is made up when none is configured.
pub const GENERATED_USER: &str = "turnpike";

/// Everything the relay needs, and what the log should say about it.
#[derive(Clone, Debug)]
pub struct Plan {
    /// For [`turnpike_relay::Relay::start`].
    pub config: Config,
    /// Why this data path.
    pub datapath_reason: String,
    /// Sentences about what was found or left out.
    pub notes: Vec<String>,
}

impl Plan {
    /// Asks the machine for what the settings do not say. Sends nothing.
    #[must_use]
    pub fn new(
        settings: &Settings,
        nonce_key: NonceKey,
        tls: Option<Arc<TlsContext>>,
        dtls: Option<Arc<DtlsContext>>,
    ) -> Self {
        let mut notes = Vec::new();
        let listen = listeners(settings, &mut notes);
        let relay = relay_addresses(settings, &mut notes);
        let (datapath, datapath_reason) = match settings.datapath {
            Some(step) => (step, "as configured".to_owned()),
            None => Datapath::best(),
        };
        let config = Config {
            streams: StreamConfig {
                listen: if settings.tcp { listen.clone() } else { Vec::new() },
                tls_listen: settings.tls_listen.clone(),
                tls_only: settings.tls_only,
                tls,
                proxies: settings.proxy_protocol_from.clone(),
                queue: settings.stream_queue,
                first_message_ms: u64::from(settings.first_message_timeout) * 1000,
                idle_ms: u64::from(settings.idle_timeout) * 1000,
                max_idle: settings.max_idle_connections,
                max_idle_per_address: settings.max_idle_connections_per_address,
            },
            dtls: DtlsConfig {
                listen: if dtls.is_some() { settings.dtls_listen.clone() } else { Vec::new() },
                context: dtls,
                max_half_open: settings.max_half_open,
                max_half_open_per_network: settings.max_half_open_per_network,
                handshake_ms: u64::from(settings.first_message_timeout) * 1000,
                max_idle: settings.max_idle_connections,
                max_idle_per_network: settings.max_idle_connections_per_address,
                idle_ms: u64::from(settings.idle_timeout) * 1000,
            },
            listen,
            workers: settings
                .workers
                .unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from)),
            datapath,
            server: server_config(settings, &relay, nonce_key),
            relay,
            ports: settings.ports.clone(),
            listener_buffer: settings.listener_buffer,
            relay_buffer: settings.relay_buffer,
            max_allocations: settings.max_allocations,
            max_allocations_per_user: settings.max_allocations_per_user,
        };
        Self { config, datapath_reason, notes }
    }

    /// File descriptors that the relay may need: each allocation up to two sockets and its client's connection, each reserved port
    /// and each connection without an allocation one, and some for everything else.
    #[must_use]
    pub fn open_files(&self) -> u64 {
        let config = &self.config;
        let listeners = config.streams.listen.len() + config.streams.tls_listen.len();
        let streams = if listeners == 0 { 0 } else { config.max_allocations + config.streams.max_idle };
        let sockets = (config.listen.len() + config.dtls.listen.len() + listeners) * config.workers
            + 2 * config.max_allocations
            + config.max_reservations()
            + streams;
        sockets as u64 + 64 + 8 * self.config.workers as u64
    }
}

/// The state machine's part of the settings; a reload makes it anew with the same addresses and nonce key.
#[must_use]
pub fn server_config(settings: &Settings, relay: &[RelayAddress], nonce_key: NonceKey) -> ServerConfig {
    ServerConfig {
        realm: settings.realm.clone(),
        software: (!settings.software.is_empty()).then(|| settings.software.clone()),
        authenticate: settings.auth_required,
        nonce_key,
        nonce_lifetime: settings.nonce_lifetime,
        default_lifetime: settings.default_lifetime,
        max_lifetime: settings.max_lifetime,
        max_permissions: settings.max_permissions,
        max_channels: settings.max_channels,
        relay_v4: relay.iter().any(|address| address.bind.is_ipv4()),
        relay_v6: relay.iter().any(|address| address.bind.is_ipv6()),
        peers: PeerRules { allow: settings.allow.clone(), deny: settings.deny.clone(), own: Vec::new() },
        allow_md5: settings.allow_md5,
        // Clients take the strongest algorithm that they are offered, before anybody knows who they are.
        allow_sha256: !settings.allow_md5 || settings.users.iter().all(has_sha256),
        channels: if settings.rfc5766_channels { ChannelRange::Rfc5766 } else { ChannelRange::Rfc8656 },
        // Nobody can find a time-limited name by its hash, and a client that is offered anonymity takes it.
        username_anonymity: settings.secrets.is_empty(),
        ..ServerConfig::default()
    }
}

/// Whether a SHA-256 key of this user is known or can be made.
fn has_sha256(user: &User) -> bool {
    match &user.secret {
        UserSecret::Password(_) => true,
        UserSecret::Keys(keys) => keys.iter().any(|key| matches!(key, StoredKey::Sha256(_))),
    }
}

/// A user with a random password of 128 bits, where settings name nobody who could use the server.
#[must_use]
pub fn generated_user(settings: &Settings) -> Option<User> {
    let nobody = settings.auth_required && settings.users.is_empty() && settings.secrets.is_empty();
    nobody.then(|| User {
        name: GENERATED_USER.to_owned(),
        secret: UserSecret::Password(Secret::new(crate::rest::hex(&rand::random::<[u8; 16]>()))),
    })
}

/// The default listens on both families, and a machine without IPv6 is no reason to fail; an address that somebody
/// asked for is.
fn listeners(settings: &Settings, notes: &mut Vec<String>) -> Vec<SocketAddr> {
    if settings.is_explicit("server.listen") {
        return settings.listen.clone();
    }
    let (usable, unusable): (Vec<_>, Vec<_>) =
        settings.listen.iter().copied().partition(|address| address.is_ipv4() || has_ipv6().is_ok());
    for address in unusable {
        notes.push(format!("not listening on {address}: this machine has no IPv6"));
    }
    usable
}

fn has_ipv6() -> io::Result<()> {
    UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).map(drop)
}

fn relay_addresses(settings: &Settings, notes: &mut Vec<String>) -> Vec<RelayAddress> {
    if !settings.relay_addresses.is_empty() {
        return settings.relay_addresses.clone();
    }
    let mut found: Vec<IpAddr> = DESTINATIONS.iter().copied().filter_map(source_of_route).collect();
    if found.is_empty() {
        found.push(Ipv4Addr::LOCALHOST.into());
        if UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            found.push(Ipv6Addr::LOCALHOST.into());
        }
        notes.push(
            "this machine has no default route: relaying on loopback only; name relay addresses with --relay-ip, and \
             peers on this machine with --allow-peer"
                .to_owned(),
        );
    } else if found.iter().any(is_private) {
        notes.push(
            "a relay address is private: behind a NAT, name the public one with --relay-ip IP=EXTERNAL"
                .to_owned(),
        );
    }
    found.into_iter().map(|bind| RelayAddress { bind, external: None }).collect()
}

/// Documentation addresses (RFC 5737, RFC 3849): they take the default route, and nobody is there.
const DESTINATIONS: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 9),
];

/// The source address the kernel would use: connecting a UDP socket looks the route up and sends nothing.
fn source_of_route(destination: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr =
        if destination.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(destination).ok()?;
    let source = socket.local_addr().ok()?.ip();
    let usable = match source {
        IpAddr::V4(address) => !address.is_unspecified() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unspecified() && !address.is_unicast_link_local(),
    };
    usable.then_some(source)
}

fn is_private(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_private(),
        IpAddr::V6(address) => address.is_unique_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_is_generated_only_when_nobody_could_authenticate() {
        let user = generated_user(&Settings::default()).expect("nobody is configured");
        let UserSecret::Password(password) = &user.secret else { panic!("a password") };
        assert_eq!(password.reveal().len(), 32);
        let again = generated_user(&Settings::default()).expect("nobody is configured");
        assert_ne!(again.secret, user.secret);

        let open = Settings { auth_required: false, ..Settings::default() };
        assert!(generated_user(&open).is_none());
        let with_secret = Settings { secrets: vec![Secret::new("s")], ..Settings::default() };
        assert!(generated_user(&with_secret).is_none());
    }

    #[test]
    fn the_route_to_loopback_starts_on_loopback() {
        let source = source_of_route(SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
        assert_eq!(source, Some(Ipv4Addr::LOCALHOST.into()));
    }

    #[test]
    fn detection_always_finds_an_address() {
        let mut notes = Vec::new();
        assert!(!relay_addresses(&Settings::default(), &mut notes).is_empty());
    }

    #[test]
    fn a_user_known_by_an_md5_key_alone_keeps_sha256_from_being_offered() {
        let keys = |digits: &[usize]| {
            let keys = digits.iter().filter_map(|n| StoredKey::from_hex(&"a".repeat(*n))).collect();
            User { name: "stored".to_owned(), secret: UserSecret::Keys(keys) }
        };
        for (users, allow_md5, offered) in [
            (vec![], true, true),
            (vec![keys(&[32, 64])], true, true),
            (vec![keys(&[32, 64]), keys(&[32])], true, false),
            (vec![keys(&[32])], false, true),
        ] {
            let settings = Settings { users, allow_md5, ..Settings::default() };
            let server = server_config(&settings, &[], NonceKey([0; 32]));
            assert_eq!(server.allow_sha256, offered, "{:?}", settings.users);
        }
    }

    #[test]
    fn families_follow_the_relay_addresses() {
        let relay = [RelayAddress { bind: Ipv6Addr::LOCALHOST.into(), external: None }];
        let config = server_config(&Settings::default(), &relay, NonceKey([0; 32]));
        assert!(!config.relay_v4 && config.relay_v6);
        assert!(config.username_anonymity);
        let timed = Settings { secrets: vec![Secret::new("s")], ..Settings::default() };
        assert!(!server_config(&timed, &relay, NonceKey([0; 32])).username_anonymity);
        assert_eq!((config.realm.as_str(), config.software.as_deref()), ("turnpike", Some("turnpike")));
    }
}
