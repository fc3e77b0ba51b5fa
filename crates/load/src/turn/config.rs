//! What a run is told.

use std::{
    iter,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    time::Duration,
};

use strum::{Display, EnumString, VariantNames};
use turnpike_client::UnknownName;
use turnpike_measure::Rate;
use turnpike_net::Datapath;
use turnpike_turn::{client::Relayed, server::Cidr};

use super::AccessToken;
use crate::{
    LoadError, TlsOptions, Transport,
    payload::HEADER_LEN,
    profile::Shaped,
    progress::Kind,
    run::{self, Frame},
    traffic::echo::Plan,
    udp,
};

/// Settings of `load turn`. [`Config::default`] holds the documented defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// The TURN server. Default 127.0.0.1:3478.
    pub server: SocketAddr,
    /// Further servers, over UDP: each has as many of the clients. In their order those of one server stand together, and at a fixed rate
    /// clients send in their order, so that each thread's load goes from server to server. Default none.
    pub also: Vec<SocketAddr>,
    /// The server's name, as its certificate has it; `None` where it was named by address.
    pub host: Option<String>,
    /// How clients reach it. Default UDP.
    pub transport: Transport,
    /// How its certificate is judged.
    pub tls: TlsOptions,
    /// What is relayed: datagrams, or TCP connections (RFC 6062; over TCP or TLS only). Default datagrams.
    pub relayed: Relayed,
    /// Family of the relayed address. Default: the peer's.
    pub family: Option<Family>,
    /// The reflector, as the server reaches it. Default 127.0.0.1:3480.
    pub peer: SocketAddr,
    /// In place of the address of `peer`: each client has one of its own, from the second address of this prefix on, all of them the
    /// reflector's. For servers whose clients share relay ports. Default none.
    pub peer_prefix: Option<Cidr>,
    /// Over UDP, in [`Mode::Packet`] and [`Mode::Bind`], in place of a socket for each client: one for each thread, by which each client sends from an
    /// address of its own, from the second address of this prefix on, all of them this machine's. So one call sends what is due of many
    /// clients. Default none.
    pub client_prefix: Option<Cidr>,
    /// Long-term username; empty for a server without authentication.
    pub user: String,
    /// Its password.
    pub password: String,
    /// In [`Mode::Packet`] and [`Mode::Allocate`]: so many users take turns, `user` with a number behind it from 0 on, all of this
    /// password. Default 1, who is `user` alone.
    pub users: usize,
    /// In place of both: third-party authorization (RFC 7635). Default none.
    pub access_token: Option<AccessToken>,
    /// Clients, each with its own 5-tuple: 1 to 10,000. In [`Mode::Allocate`]: allocations under way at a time. Default 1.
    pub clients: usize,
    /// How data reaches the server. Default channel.
    pub via: Via,
    /// Offered load over all clients: datagrams, or in [`Mode::Allocate`] allocations, a second. Default 1,000.
    pub rate: Rate,
    /// Payload in bytes, 24 to 65,000. Default 120.
    pub size: usize,
    /// Datagrams of one client back to back, 1 to 64. Default: 1 at a fixed rate, 32 at [`Rate::Max`].
    pub burst: Option<usize>,
    /// At [`Rate::Max`]: datagrams that one client may have under way. Default: no bound, a flood.
    pub window: Option<u64>,
    /// Measured time. Default 10 s.
    pub duration: Duration,
    /// Traffic before it that is not counted. Default 1 s.
    pub warmup: Duration,
    /// What is generated. Default packets.
    pub mode: Mode,
    /// In place of `rate`, `size`, `burst` and `window`, for [`Mode::Packet`]: what each client sends, and gets from a peer of the
    /// generator's own, which listens at `peer` (thread n at the n-th port from there). Default none.
    pub profile: Option<Shaped>,
    /// In the measured time, each client changes its socket so often and takes its allocation along (RFC 8016), 0.1 s to 1 h. Default
    /// never.
    pub migrate: Option<Duration>,
    /// In [`Mode::Packet`]: a client that has heard nothing for so long, 0.2 s to 1 h (and up to `spread` more, each another time), has lost
    /// its allocation: it takes another socket and asks the first server for a new one, and so on. Default never.
    pub patience: Option<Duration>,
    /// With `patience`: within so long those come back who notice at once, 0 s to `patience`. Default: 1 s, or `patience` where that is less.
    pub spread: Option<Duration>,
    /// Threads. Default: one per core that this process may use, but no more than clients.
    pub threads: Option<usize>,
    /// Step of the ladder. Default: the best.
    pub datapath: Datapath,
    /// Loss in percent above which the outcome says that a limit was exceeded.
    pub max_loss: Option<f64>,
    /// p99 of the round trip in microseconds above which it does.
    pub max_p99: Option<u64>,
    /// How long the server may take to answer anything while clients are set up. Default 10 s.
    pub setup_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            server: SocketAddr::from(([127, 0, 0, 1], 3478)),
            also: Vec::new(),
            host: None,
            transport: Transport::Udp,
            tls: TlsOptions::default(),
            relayed: Relayed::Udp,
            family: None,
            peer: SocketAddr::from(([127, 0, 0, 1], crate::reflect::DEFAULT_PORT)),
            peer_prefix: None,
            client_prefix: None,
            user: String::new(),
            password: String::new(),
            users: 1,
            access_token: None,
            clients: 1,
            via: Via::Channel,
            rate: Rate::Pps(1_000.0),
            size: 120,
            burst: None,
            window: None,
            duration: Duration::from_secs(10),
            warmup: Duration::from_secs(1),
            mode: Mode::Packet,
            profile: None,
            migrate: None,
            patience: None,
            spread: None,
            threads: None,
            datapath: Datapath::best().0,
            max_loss: None,
            max_p99: None,
            setup_timeout: Duration::from_secs(10),
        }
    }
}

impl Config {
    /// The longest payload over DTLS: a record's 2^14 bytes (RFC 6347 section 4.1) less the longest header.
    pub const MAX_DTLS_SIZE: usize = 16_000;
    /// How many may take turns.
    pub const USERS: RangeInclusive<usize> = 1..=1_000_000;
    /// How often clients may change their socket: a Refresh that was lost is sent again after half a second.
    pub const MIGRATE: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);
    /// After which silence clients may come back.
    pub const PATIENCE: RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(3600);
    /// Within which those come back who notice at once, where nothing else is said.
    pub const SPREAD: Duration = Duration::from_secs(1);

    /// Says what is impossible about these settings.
    ///
    /// # Errors
    /// With the flag that is to be changed.
    pub fn validate(&self) -> Result<(), LoadError> {
        udp::check(&self.plan(), &self.frame(), self.threads)?;
        self.validate_transport()?;
        self.validate_servers()?;
        self.validate_migration()?;
        self.validate_return()?;
        self.validate_peers()?;
        self.validate_clients()?;
        self.validate_profile()?;
        self.validate_users()?;
        self.validate_token()?;
        if self.mode == Mode::Bind && self.rate.pps().is_some() {
            return Err(LoadError::Config(
                "--mode bind needs --rate max: each client binds its next channel when it has the last"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    fn validate_servers(&self) -> Result<(), LoadError> {
        let refused = |what: String| Err(LoadError::Config(what));
        if self.also.is_empty() {
            return Ok(());
        }
        if self.transport != Transport::Udp {
            return refused(format!(
                "several servers are for --transport udp, not for {}: run one generator for each",
                self.transport
            ));
        }
        if self.mode == Mode::Invalid {
            return refused("--mode invalid takes one server".to_owned());
        }
        let servers = self.also.len() + 1;
        if self.clients < servers {
            return refused(format!("--clients is {}, fewer than the servers ({servers})", self.clients));
        }
        Ok(())
    }

    /// The server of the client of this number in the run.
    pub(super) fn server_of(&self, number: usize) -> SocketAddr {
        let place = number * (self.also.len() + 1) / self.clients;
        place.checked_sub(1).and_then(|place| self.also.get(place)).copied().unwrap_or(self.server)
    }

    fn validate_peers(&self) -> Result<(), LoadError> {
        let Some(prefix) = self.peer_prefix else { return Ok(()) };
        let refused = |what: String| Err(LoadError::Config(what));
        if !matches!(self.mode, Mode::Packet | Mode::Bind) {
            return refused(format!(
                "--peer-prefix does not go with --mode {}: there are no peers",
                self.mode
            ));
        }
        if self.profile.is_some() {
            return refused(
                "--peer-prefix does not go with --profile: its peers are the generator's own, on one address"
                    .to_owned(),
            );
        }
        let last = u32::try_from(self.clients).ok().and_then(|clients| prefix.nth(clients));
        if last.is_none_or(|last| last.is_ipv6() != self.peer.is_ipv6()) {
            return refused(format!(
                "--peer-prefix {prefix} has no address for each of {} clients: give a shorter one",
                self.clients
            ));
        }
        Ok(())
    }

    fn validate_clients(&self) -> Result<(), LoadError> {
        let Some(prefix) = self.client_prefix else { return Ok(()) };
        let refused = |what: String| Err(LoadError::Config(what));
        if self.transport != Transport::Udp {
            return refused(format!("--client-prefix is for --transport udp, not for {}", self.transport));
        }
        if !matches!(self.mode, Mode::Packet | Mode::Bind) {
            return refused(format!(
                "--client-prefix does not go with --mode {}: each of its clients needs other ports",
                self.mode
            ));
        }
        for (flag, is_given) in
            [("--migrate", self.migrate.is_some()), ("--reconnect", self.patience.is_some())]
        {
            if is_given {
                return refused(format!(
                    "--client-prefix does not go with {flag}: clients that move need a socket each"
                ));
            }
        }
        let last = u32::try_from(self.clients).ok().and_then(|clients| prefix.nth(clients));
        let mut servers = iter::once(&self.server).chain(&self.also);
        if last.is_none_or(|last| servers.any(|server| last.is_ipv6() != server.is_ipv6())) {
            return refused(format!(
                "--client-prefix {prefix} has no address of the servers' family for each of {} clients: give a shorter one, or another",
                self.clients
            ));
        }
        Ok(())
    }

    /// Where the client of this number in the run sends from, if all share a socket.
    pub(super) fn address_of_client(&self, number: usize) -> Option<IpAddr> {
        self.client_prefix?.nth(u32::try_from(number).ok()?.checked_add(1)?)
    }

    /// Whom the client of this number in the run sends to.
    pub(super) fn peer_of_client(&self, number: usize) -> SocketAddr {
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        let ip = self.peer_prefix.and_then(|prefix| prefix.nth(number.saturating_add(1)));
        SocketAddr::new(ip.unwrap_or(self.peer.ip()), self.peer.port())
    }

    fn validate_profile(&self) -> Result<(), LoadError> {
        let Some(shaped) = &self.profile else { return Ok(()) };
        let refused = |flag: &str, why: &str| {
            Err(LoadError::Config(format!("--profile does not go with {flag}: {why}")))
        };
        if self.mode != Mode::Packet {
            return refused(&format!("--mode {}", self.mode), "a profile is of packets");
        }
        if self.relayed == Relayed::Tcp {
            return refused("--relay tcp", "a profile is of packets, and a stream has none");
        }
        if self.migrate.is_some() {
            return refused(
                "--migrate",
                "what a call does without an answer of the server is not told by its figures",
            );
        }
        shaped.validate(if self.transport == Transport::Dtls { Self::MAX_DTLS_SIZE } else { udp::MAX_SIZE })
    }

    /// Where the peers of a thread's clients listen.
    pub(super) fn peer_of(&self, thread: usize) -> SocketAddr {
        let port = match self.peer.port() {
            0 => 0,
            port => u16::try_from(thread).map_or(port, |thread| port.saturating_add(thread)),
        };
        SocketAddr::new(self.peer.ip(), port)
    }

    /// What each client sends.
    pub(super) fn plan(&self) -> Plan {
        let Self { clients, rate, size, burst, window, .. } = *self;
        Plan { clients, rate, size, burst: udp::default_burst(burst, rate), window }
    }

    pub(super) fn frame(&self) -> Frame {
        Frame {
            clients: self.clients,
            threads: run::threads(self.threads, self.clients),
            warmup: self.warmup,
            duration: self.duration,
            kind: if self.mode == Mode::Invalid { Kind::OneWay } else { Kind::Answered },
        }
    }

    fn validate_transport(&self) -> Result<(), LoadError> {
        let refused = |what: String| Err(LoadError::Config(what));
        if self.mode == Mode::Invalid && self.transport != Transport::Udp {
            return refused(format!("--mode invalid is for --transport udp, not for {}", self.transport));
        }
        if self.relayed == Relayed::Tcp && !self.transport.is_stream() {
            return refused(format!(
                "--relay tcp needs --transport tcp or tls (RFC 6062 section 4.1), not {}",
                self.transport
            ));
        }
        if let (Mode::Packet, Some(family)) = (self.mode, self.family)
            && (family == Family::V6) != self.peer.is_ipv6()
        {
            return refused(format!(
                "--family {family} does not go with the peer {}: name another with --peer",
                self.peer
            ));
        }
        // A record holds less than a datagram may.
        if self.transport == Transport::Dtls && self.size > Self::MAX_DTLS_SIZE {
            return refused(format!(
                "--size is {}, but over DTLS must be {HEADER_LEN} to {}",
                self.size,
                Self::MAX_DTLS_SIZE
            ));
        }
        Ok(())
    }

    fn validate_migration(&self) -> Result<(), LoadError> {
        let refused = |what: String| Err(LoadError::Config(what));
        let Some(interval) = self.migrate else { return Ok(()) };
        if self.mode != Mode::Packet {
            return refused(format!(
                "--migrate is for --mode packet: with --mode {} no client keeps an allocation that could move",
                self.mode
            ));
        }
        if self.relayed == Relayed::Tcp {
            return refused(
                "--migrate does not go with --relay tcp: a ticket moves the allocation, not the connections that carry \
                 the peers' bytes (RFC 6062 section 4.3)"
                    .to_owned(),
            );
        }
        if !Self::MIGRATE.contains(&interval) {
            return refused(format!(
                "--migrate is {} s, but must be {} to {} s",
                interval.as_secs_f64(),
                Self::MIGRATE.start().as_secs_f64(),
                Self::MIGRATE.end().as_secs_f64()
            ));
        }
        if interval > self.duration {
            return refused(format!(
                "--migrate is {} s, longer than --duration ({} s), so that not every client would move",
                interval.as_secs_f64(),
                self.duration.as_secs_f64()
            ));
        }
        Ok(())
    }

    fn validate_return(&self) -> Result<(), LoadError> {
        let refused = |what: String| Err(LoadError::Config(what));
        let Some(patience) = self.patience else {
            return match self.spread {
                Some(_) => refused(
                    "--reconnect-spread needs --reconnect: without it no client comes back".to_owned(),
                ),
                None => Ok(()),
            };
        };
        if self.mode != Mode::Packet {
            return refused(format!("--reconnect is for --mode packet, not for {}", self.mode));
        }
        if self.relayed == Relayed::Tcp {
            return refused(
                "--reconnect does not go with --relay tcp: a stream that was cut is not one again".to_owned(),
            );
        }
        if self.migrate.is_some() {
            return refused(
                "--reconnect does not go with --migrate: a client either takes its allocation along or asks for another"
                    .to_owned(),
            );
        }
        if !Self::PATIENCE.contains(&patience) {
            return refused(format!(
                "--reconnect is {} s, but must be {} to {} s",
                patience.as_secs_f64(),
                Self::PATIENCE.start().as_secs_f64(),
                Self::PATIENCE.end().as_secs_f64()
            ));
        }
        if let Some(spread) = self.spread.filter(|spread| *spread > patience) {
            return refused(format!(
                "--reconnect-spread is {} s, longer than --reconnect ({} s)",
                spread.as_secs_f64(),
                patience.as_secs_f64()
            ));
        }
        Ok(())
    }

    fn validate_users(&self) -> Result<(), LoadError> {
        let refused = |what: String| Err(LoadError::Config(what));
        if self.users == 1 {
            return Ok(());
        }
        if !Self::USERS.contains(&self.users) {
            return refused(format!("--users is {}, but must be 1 to {}", self.users, Self::USERS.end()));
        }
        if !matches!(self.mode, Mode::Packet | Mode::Allocate) {
            return refused(format!("--users is for --mode packet and allocate, not for {}", self.mode));
        }
        if self.user.is_empty() {
            return refused(
                "--users needs --user: the name before their numbers, and their password".to_owned(),
            );
        }
        Ok(())
    }

    fn validate_token(&self) -> Result<(), LoadError> {
        let refused = |what: String| Err(LoadError::Config(what));
        let Some(token) = &self.access_token else { return Ok(()) };
        if !self.user.is_empty() {
            return refused("--access-token stands in place of --user: give one of them".to_owned());
        }
        let run = self.warmup + self.duration;
        if let Some(seconds) = token.expires_in.filter(|seconds| Duration::from_secs(*seconds) < run) {
            return refused(format!(
                "--access-token is good for {seconds} s, less than the run takes ({} s with --warmup): make one with a \
                 longer --ttl",
                run.as_secs_f64()
            ));
        }
        Ok(())
    }

    /// REQUESTED-ADDRESS-FAMILY of an allocation; IPv4 is what a server gives unasked.
    pub(super) fn address_family(&self) -> Option<turnpike_turn::Family> {
        match self.family {
            Some(Family::V4) => Some(turnpike_turn::Family::V4),
            Some(Family::V6) => Some(turnpike_turn::Family::V6),
            None => self.peer.is_ipv6().then_some(turnpike_turn::Family::V6),
        }
    }

    /// Connections or sockets of one client.
    pub(super) fn files_per_client(&self) -> usize {
        if self.relayed == Relayed::Tcp { 2 } else { 1 }
    }
}

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(parse_err_ty = UnknownName, parse_err_fn = UnknownName::of::<Self>)]
pub enum Family {
    /// IPv4.
    #[strum(serialize = "4")]
    V4,
    /// IPv6.
    #[strum(serialize = "6")]
    V6,
}

/// How data reaches the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownName, parse_err_fn = UnknownName::of::<Self>)]
pub enum Via {
    /// ChannelData on a bound channel.
    #[default]
    Channel,
    /// Send and Data indications.
    Send,
}

/// What is generated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownName, parse_err_fn = UnknownName::of::<Self>)]
pub enum Mode {
    /// Traffic through the relay to the reflector and back.
    #[default]
    Packet,
    /// Authenticated allocations, deleted as soon as they are granted, from rotating source ports.
    Allocate,
    /// Channels, bound one after the other by each client, until its allocation has enough and it begins anew.
    Bind,
    /// Unauthenticated requests, malformed and truncated messages, random bytes.
    Invalid,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_divided_among_several_servers() {
        let server = |last: u8| SocketAddr::from(([192, 0, 2, last], 3478));
        let config =
            Config { server: server(1), also: vec![server(2), server(3)], clients: 7, ..Config::default() };
        assert!(config.validate().is_ok());
        let divided: Vec<SocketAddr> = (0..7).map(|number| config.server_of(number)).collect();
        assert_eq!(divided, [1, 1, 1, 2, 2, 3, 3].map(server));
        assert!(
            (0..5).all(|number| Config { clients: 5, also: Vec::new(), ..config.clone() }.server_of(number)
                == server(1))
        );
        let refused = |config: Config| config.validate().expect_err("refused").to_string();
        assert!(refused(Config { clients: 2, ..config.clone() }).contains("fewer than the servers (3)"));
        let tcp = Config { transport: Transport::Tcp, ..config.clone() };
        assert!(refused(tcp).contains("for --transport udp"));
        assert!(refused(Config { mode: Mode::Invalid, ..config }).contains("takes one server"));
    }

    fn token(expires_in: u64) -> Option<AccessToken> {
        let text = format!("username: k mac_key: AAAA access_token: AAAA expires_in: {expires_in}");
        Some(text.parse().expect("a token"))
    }

    #[test]
    fn impossible_settings_name_the_flag() {
        let base = Config::default;
        let shaped = || {
            let profile = "call".parse().expect("a profile of ours");
            Config { profile: Some(Shaped { profile, seed: 1 }), ..base() }
        };
        let moving = || Config { migrate: Some(Duration::from_secs(1)), ..base() };
        let coming_back = || Config { patience: Some(Duration::from_secs(1)), ..base() };
        for (config, flag) in [
            (Config { clients: 0, ..base() }, "--clients"),
            (Config { clients: 10_001, ..base() }, "--clients"),
            (Config { size: 23, ..base() }, "--size"),
            (Config { size: 65_001, ..base() }, "--size"),
            (Config { burst: Some(0), ..base() }, "--burst"),
            (Config { threads: Some(0), ..base() }, "--threads"),
            (Config { duration: Duration::ZERO, ..base() }, "--duration"),
            (Config { rate: Rate::Max, window: Some(8), ..base() }, "--window"),
            (Config { mode: Mode::Invalid, transport: Transport::Tcp, ..base() }, "--mode invalid"),
            (Config { relayed: Relayed::Tcp, ..base() }, "--relay tcp"),
            (Config { family: Some(Family::V6), ..base() }, "--family 6"),
            (Config { transport: Transport::Dtls, size: 20_000, ..base() }, "--size"),
            (Config { users: 0, ..base() }, "--users"),
            (
                Config { users: 2, user: "a".to_owned(), mode: Mode::Invalid, ..base() },
                "--mode packet and allocate",
            ),
            (Config { users: 2, mode: Mode::Allocate, ..base() }, "--user:"),
            (Config { mode: Mode::Allocate, ..moving() }, "--mode allocate"),
            (Config { mode: Mode::Bind, ..base() }, "--rate max"),
            (Config { mode: Mode::Bind, ..moving() }, "--mode bind"),
            (Config { mode: Mode::Invalid, ..moving() }, "--mode invalid"),
            (Config { relayed: Relayed::Tcp, transport: Transport::Tcp, ..moving() }, "--relay tcp"),
            (Config { migrate: Some(Duration::from_millis(99)), ..base() }, "0.1 to 3600 s"),
            (Config { migrate: Some(Duration::from_secs(11)), ..base() }, "--duration (10 s)"),
            (Config { mode: Mode::Allocate, ..coming_back() }, "--reconnect"),
            (Config { relayed: Relayed::Tcp, transport: Transport::Tcp, ..coming_back() }, "--relay tcp"),
            (Config { migrate: Some(Duration::from_secs(1)), ..coming_back() }, "--migrate"),
            (Config { patience: Some(Duration::from_millis(199)), ..base() }, "0.2 to 3600 s"),
            (Config { spread: Some(Duration::ZERO), ..base() }, "--reconnect-spread needs --reconnect"),
            (
                Config { spread: Some(Duration::from_millis(1_001)), ..coming_back() },
                "--reconnect-spread is 1.001 s",
            ),
            (Config { access_token: token(60), user: "a".to_owned(), ..base() }, "--user"),
            (Config { access_token: token(10), ..base() }, "--ttl"),
            (Config { mode: Mode::Allocate, ..shaped() }, "--mode allocate"),
            (Config { relayed: Relayed::Tcp, transport: Transport::Tcp, ..shaped() }, "--relay tcp"),
            (Config { migrate: Some(Duration::from_secs(1)), ..shaped() }, "--migrate"),
            (Config { peer_prefix: prefix("10.0.0.0/8"), ..shaped() }, "--profile"),
            (Config { peer_prefix: prefix("10.0.0.0/8"), mode: Mode::Allocate, ..base() }, "--mode allocate"),
            (
                Config { peer_prefix: prefix("10.0.0.0/24"), clients: 256, ..base() },
                "--peer-prefix 10.0.0.0/24",
            ),
            (Config { peer_prefix: prefix("fd00::/64"), ..base() }, "--peer-prefix fd00::/64"),
            (
                Config { client_prefix: prefix("10.0.0.0/8"), transport: Transport::Tcp, ..base() },
                "--transport udp",
            ),
            (
                Config { client_prefix: prefix("10.0.0.0/8"), mode: Mode::Allocate, ..base() },
                "--mode allocate",
            ),
            (Config { client_prefix: prefix("10.0.0.0/8"), ..moving() }, "--migrate"),
            (Config { client_prefix: prefix("10.0.0.0/8"), ..coming_back() }, "--reconnect"),
            (
                Config { client_prefix: prefix("10.0.0.0/24"), clients: 256, ..base() },
                "--client-prefix 10.0.0.0/24",
            ),
            (Config { client_prefix: prefix("fd00::/64"), ..base() }, "--client-prefix fd00::/64"),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(flag), "{flag}: {error}");
        }
        base().validate().unwrap();
        moving().validate().unwrap();
        coming_back().validate().unwrap();
        Config { spread: Some(Duration::ZERO), ..coming_back() }.validate().unwrap();
        Config { spread: Some(Duration::from_secs(1)), ..coming_back() }.validate().unwrap();
        Config { patience: Some(Duration::from_secs(1)), ..shaped() }.validate().unwrap();
        shaped().validate().unwrap();
        Config { access_token: token(11), ..base() }.validate().unwrap();
        Config { peer_prefix: prefix("10.0.0.0/24"), clients: 255, ..base() }.validate().unwrap();
        Config { client_prefix: prefix("10.0.0.0/24"), clients: 255, ..base() }.validate().unwrap();
        Config { client_prefix: prefix("10.0.0.0/24"), ..shaped() }.validate().unwrap();
    }

    fn prefix(text: &str) -> Option<Cidr> {
        Some(text.parse().expect("a prefix"))
    }

    #[test]
    fn each_client_has_a_peer_of_its_own_in_a_prefix() {
        let config = Config { peer_prefix: prefix("127.5.0.0/16"), ..Config::default() };
        let peers = [0, 1, 300].map(|number| config.peer_of_client(number).to_string());
        assert_eq!(peers, ["127.5.0.1:3480", "127.5.0.2:3480", "127.5.1.45:3480"]);
        assert_eq!(Config::default().peer_of_client(300), Config::default().peer);
    }

    #[test]
    fn unknown_names_are_answered_with_the_known_ones() {
        let told = |error: UnknownName| error.to_string();
        assert_eq!(
            "both".parse::<Via>().map_err(told),
            Err("unknown value \"both\": expected channel or send".to_owned())
        );
        assert_eq!(
            "5".parse::<Family>().map_err(told),
            Err("unknown value \"5\": expected 4 or 6".to_owned())
        );
        assert_eq!(("6".parse(), Mode::Allocate.to_string()), (Ok(Family::V6), "allocate".to_owned()));
    }
}
