//! Settings and flags of `load turn`.

use std::{
    fmt::Display,
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use strum::{Display, EnumString, VariantNames};
use turnpike_client::{Login, ServerUri, UnknownName};
use turnpike_measure::OfferedRate;
use turnpike_net::Datapath;
use turnpike_turn::{Family, client::Relayed, server::Cidr};

use super::PrintedToken;
use crate::{
    ClientTransport, LoadError, TlsOptions,
    options::{self, BurstOptions, ResultLimits, RunOptions, seconds},
    payload::HEADER_LEN,
    profile::ProfileOptions,
    progress::CountKind,
    reflect::DEFAULT_PORT,
    run::RunFrame,
    traffic::echo::EchoPlan,
    udp,
};

/// Settings of `load turn`; see [`TurnLoadConfig::new`] for the defaults.
#[derive(Clone, Debug, Args)]
pub struct TurnLoadConfig {
    /// TURN server: turn:HOST[:PORT][?transport=udp|tcp], turns:… (TLS; with ?transport=udp DTLS), or HOST[:PORT]; default port by DNS records
    /// (NAPTR, SRV), or 3478, with TLS or DTLS 5349. Over udp there may be several; the clients are divided equally among them
    #[arg(value_name = "SERVER", required = true)]
    pub servers: Vec<ServerUri>,

    /// Transport to the server: udp, tcp, tls or dtls [default: that of SERVER, or udp]
    #[arg(long, value_name = "T")]
    pub transport: Option<ClientTransport>,

    /// Relayed transport: "udp" for datagrams, or "tcp" for connections to a `turnpike reflect --tcp` (RFC 6062; over tcp or tls)
    #[arg(long = "relay", value_name = "WHAT", default_value = "udp", value_parser = relayed)]
    pub relayed: Relayed,

    /// Address family of the relayed address, 4 or 6 [default: that of --peer]
    #[arg(long, value_name = "4|6", value_parser = family)]
    pub family: Option<Family>,

    #[command(flatten)]
    pub tls: TlsOptions,

    /// Make a full TLS handshake for each connection instead of resuming sessions (DTLS never resumes)
    #[arg(long)]
    pub no_resumption: bool,

    /// Address of the reflector as seen from the server [default: `turnpike reflect` on the server's machine,
    /// 127.0.0.1:3480 or [::1]:3480]; with --profile, a local address for the peers inside the generator
    /// [default: 127.0.0.1:0 or [::1]:0, any port]
    #[arg(long, value_name = "ADDR:PORT", value_parser = options::resolve)]
    pub peer: Option<SocketAddr>,

    /// Give each client its own peer address, starting with the second address of this prefix, on the port of
    /// --peer [default: 3480]; a reflector that listens on all addresses answers from each address routed to
    /// it (`ip route add local CIDR dev lo`). For servers with shared relay ports
    #[arg(long, value_name = "CIDR", conflicts_with = "profile")]
    pub peer_prefix: Option<Cidr>,

    /// Give each client its own local address, starting with the second address of this prefix (`ip route add
    /// local CIDR dev lo`), and let each thread use one socket for all its clients instead of one per client,
    /// which costs the generator far less CPU time. Over UDP, for --mode packet and bind; the server needs a
    /// route for the prefix to this machine
    #[arg(long, value_name = "CIDR", conflicts_with_all = ["migrate", "reconnect"])]
    pub client_prefix: Option<Cidr>,

    /// Long-term credential; omit it for a server without authentication
    #[arg(long, value_name = "NAME:PASSWORD", env = "TURNPIKE_LOAD_USER", hide_env_values = true)]
    pub user: Option<Login>,

    /// Number of users to rotate through, 1 to 1000000: NAME0, NAME1 and so on, all with the same password; for --mode packet (per
    /// client) and allocate (per allocation)
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub users: usize,

    /// Third-party authorization (RFC 7635) instead of --user: the output of `turnpike credentials
    /// --token-key`, in quotes. Other users of this machine can see it in the process list
    #[arg(
        long,
        value_name = "TOKEN",
        env = "TURNPIKE_LOAD_ACCESS_TOKEN",
        hide_env_values = true,
        conflicts_with = "user"
    )]
    pub access_token: Option<PrintedToken>,

    /// File with the token; "-" is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["access_token", "user"])]
    pub access_token_file: Option<PathBuf>,

    /// Clients, each with its own 5-tuple, 1 to 10000; with --mode allocate or bind, concurrent allocations
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub clients: usize,

    /// Datagrams (with --mode allocate: allocations) per second across all clients, open loop, such as 20000, 20k or 1.5M; "max" for as
    /// many as possible
    #[arg(long, value_name = "PPS|max", default_value = "1000")]
    pub rate: OfferedRate,

    /// Payload bytes per datagram (with --relay tcp: per chunk), 24 to 65000, or 24 to 16000 over DTLS
    #[arg(long, value_name = "B", default_value_t = 120)]
    pub size: usize,

    #[command(flatten)]
    pub bursts: BurstOptions,

    /// Traffic profile. The peers are inside the generator and listen on `peer`; those of thread n use a port that is n higher.
    #[command(flatten)]
    pub profile: Option<ProfileOptions>,

    /// Encapsulation of data to the server: "channel" (ChannelData) or "send" (Send and Data indications)
    #[arg(long, value_name = "HOW", default_value_t = DataVia::Channel)]
    pub via: DataVia,

    /// Kind of load: "packet", traffic through the relay and back; "allocate", allocations that are deleted immediately; "bind", channel
    /// bindings, one at a time per client (with --rate max); "invalid", unauthenticated requests and malformed packets (over udp only)
    #[arg(long, value_name = "MODE", default_value_t = Mode::Packet)]
    pub mode: Mode,

    /// During the measured time, let each client change its socket every SECONDS and move its allocation
    /// (mobility, RFC 8016), 0.1 to 3600; for --mode packet with --relay udp
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with_all = ["profile", "reconnect"])]
    pub migrate: Option<Duration>,

    /// If a client receives nothing for SECONDS, 0.2 to 3600 (plus a per-client delay of up to --reconnect-spread), it drops its
    /// allocation, opens another socket and allocates again at SERVER, as calls do after a fault; the result includes the number of
    /// reconnects and their duration. For --mode packet with --relay udp
    #[arg(long, alias = "return", value_name = "SECONDS", value_parser = seconds)]
    pub reconnect: Option<Duration>,

    /// With --reconnect: clients that notice a fault at the same time reconnect one after the other within
    /// SECONDS, 0 (all at once) up to --reconnect [default: 1, or --reconnect if that is less]
    #[arg(long = "reconnect-spread", value_name = "SECONDS", value_parser = seconds, requires = "reconnect")]
    pub spread: Option<Duration>,

    /// Data path over udp: auto, basic, mmsg or gso
    #[arg(long, value_name = "D", default_value = "auto")]
    pub datapath: Datapath,

    #[command(flatten)]
    pub run: RunOptions,

    #[command(flatten)]
    pub limits: ResultLimits,

    /// Timeout for each server response during setup: 10 s.
    #[arg(skip = Duration::from_secs(10))]
    pub setup_timeout: Duration,

    /// Resolved addresses of `servers`. All clients of one server have adjacent numbers. Clients send in the order of their numbers at a
    /// fixed rate, so each thread sends to one server after the other.
    #[arg(skip)]
    pub addresses: Vec<SocketAddr>,
}

macro_rules! refuse_if {
    ($is_wrong:expr, $($what:tt)*) => {
        if $is_wrong {
            return Err(LoadError::Config(format!($($what)*)));
        }
    };
}

const USERS: RangeInclusive<usize> = 1..=1_000_000;
const MIGRATE: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);
const PATIENCE: RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(3600);

impl TurnLoadConfig {
    /// Maximum payload over DTLS: a record's 2^14 bytes (RFC 6347 section 4.1) minus the largest header.
    pub(crate) const MAX_DTLS_SIZE: usize = 16_000;
    pub fn new(server: SocketAddr) -> Self {
        options::defaults(server)
    }

    pub(super) fn resolved(&self) -> Result<Self, LoadError> {
        let mut found = self.clone();
        let transport = self.transport();
        found.addresses =
            self.servers.iter().map(|server| address_of(server, transport)).collect::<Result<_, _>>()?;
        if let Some(path) = found.access_token_file.take() {
            found.access_token = Some(read_token(&path)?);
        }
        found.validate()?;
        Ok(found)
    }

    pub(crate) fn transport(&self) -> ClientTransport {
        self.transport.or_else(|| Some(self.servers.first()?.transport())).unwrap_or(ClientTransport::Udp)
    }

    /// Name that the server's certificate must contain; `None` if the server was given as an address.
    pub(super) fn host(&self) -> Option<&str> {
        self.servers.first()?.name()
    }

    /// Address of the reflector as seen from the server, or of the peers inside the generator.
    fn peer(&self) -> SocketAddr {
        let host: IpAddr = match self.family {
            Some(Family::V6) => Ipv6Addr::LOCALHOST.into(),
            _ => Ipv4Addr::LOCALHOST.into(),
        };
        let port = if self.profile.is_some() { 0 } else { DEFAULT_PORT };
        let mut peer = self.peer.unwrap_or_else(|| (host, port).into());
        if let Some(prefix) = self.peer_prefix {
            peer.set_ip(prefix.base);
        }
        peer
    }

    fn validate(&self) -> Result<(), LoadError> {
        udp::check(&self.plan(), &self.frame(), self.run.threads)?;
        self.validate_transport()?;
        self.validate_servers()?;
        self.validate_migration()?;
        self.validate_reconnect()?;
        self.validate_peers()?;
        self.validate_clients()?;
        self.validate_profile()?;
        self.validate_users()?;
        refuse_if!(
            self.mode == Mode::Bind && self.rate.pps().is_some(),
            "--mode bind needs --rate max: each client binds the next channel once the last one is bound"
        );
        Ok(())
    }

    fn validate_servers(&self) -> Result<(), LoadError> {
        let (servers, transport) = (self.servers.len(), self.transport());
        if servers == 1 {
            return Ok(());
        }
        refuse_if!(
            transport != ClientTransport::Udp,
            "several servers need --transport udp, not {transport}: run one generator per server"
        );
        refuse_if!(self.mode == Mode::Invalid, "--mode invalid supports one server only");
        refuse_if!(
            self.clients < servers,
            "--clients is {}, fewer than the number of servers ({servers})",
            self.clients
        );
        Ok(())
    }

    pub(super) fn server_of(&self, number: usize) -> SocketAddr {
        let place = number * self.addresses.len() / self.clients;
        self.addresses.get(place).copied().unwrap_or_else(|| (Ipv4Addr::UNSPECIFIED, 0).into())
    }

    fn validate_peers(&self) -> Result<(), LoadError> {
        let Some(prefix) = self.peer_prefix else { return Ok(()) };
        refuse_if!(
            !matches!(self.mode, Mode::Packet | Mode::Bind),
            "--peer-prefix cannot be used with --mode {}: it has no peers",
            self.mode
        );
        let last = u32::try_from(self.clients).ok().and_then(|clients| prefix.nth(clients));
        refuse_if!(
            last.is_none_or(|last| last.is_ipv6() != self.peer().is_ipv6()),
            "--peer-prefix {prefix} has too few addresses for {} clients: give a shorter prefix",
            self.clients
        );
        Ok(())
    }

    fn validate_clients(&self) -> Result<(), LoadError> {
        let Some(prefix) = self.client_prefix else { return Ok(()) };
        let transport = self.transport();
        refuse_if!(
            transport != ClientTransport::Udp,
            "--client-prefix needs --transport udp, not {transport}"
        );
        refuse_if!(
            !matches!(self.mode, Mode::Packet | Mode::Bind),
            "--client-prefix cannot be used with --mode {}: its clients must change their ports",
            self.mode
        );
        let last = u32::try_from(self.clients).ok().and_then(|clients| prefix.nth(clients));
        let mut servers = self.addresses.iter();
        refuse_if!(
            last.is_none_or(|last| servers.any(|server| last.is_ipv6() != server.is_ipv6())),
            "--client-prefix {prefix} has too few addresses of the servers' family for {} clients: give another prefix",
            self.clients
        );
        Ok(())
    }

    pub(super) fn address_of_client(&self, number: usize) -> Option<IpAddr> {
        self.client_prefix?.nth(u32::try_from(number).ok()?.checked_add(1)?)
    }

    pub(super) fn peer_of_client(&self, number: usize) -> SocketAddr {
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        let ip = self.peer_prefix.and_then(|prefix| prefix.nth(number.saturating_add(1)));
        let peer = self.peer();
        SocketAddr::new(ip.unwrap_or(peer.ip()), peer.port())
    }

    fn validate_profile(&self) -> Result<(), LoadError> {
        let Some(shaped) = &self.profile else { return Ok(()) };
        refuse_if!(
            self.mode != Mode::Packet,
            "--profile cannot be used with --mode {}: it generates packets",
            self.mode
        );
        refuse_if!(
            self.relayed == Relayed::Tcp,
            "--profile cannot be used with --relay tcp: it generates packets, not a stream"
        );
        shaped.validate(if self.transport() == ClientTransport::Dtls {
            Self::MAX_DTLS_SIZE
        } else {
            udp::MAX_SIZE
        })
    }

    pub(super) fn peer_of(&self, thread: usize) -> SocketAddr {
        let peer = self.peer();
        let port = match peer.port() {
            0 => 0,
            port => u16::try_from(thread).map_or(port, |thread| port.saturating_add(thread)),
        };
        SocketAddr::new(peer.ip(), port)
    }

    pub(super) fn plan(&self) -> EchoPlan {
        self.bursts.plan(self.clients, self.rate, self.size)
    }

    pub(super) fn frame(&self) -> RunFrame {
        let kind = if self.mode == Mode::Invalid { CountKind::OneWay } else { CountKind::Answered };
        RunFrame::new(&self.run, self.clients, kind)
    }

    fn validate_transport(&self) -> Result<(), LoadError> {
        let (transport, peer) = (self.transport(), self.peer());
        refuse_if!(
            self.mode == Mode::Invalid && transport != ClientTransport::Udp,
            "--mode invalid needs --transport udp, not {transport}"
        );
        refuse_if!(
            self.relayed == Relayed::Tcp && !transport.is_stream(),
            "--relay tcp needs --transport tcp or tls (RFC 6062 section 4.1), not {transport}"
        );
        let is_v6 = self.family.map(|family| family == Family::V6);
        refuse_if!(
            self.mode == Mode::Packet && is_v6.is_some_and(|is_v6| is_v6 != peer.is_ipv6()),
            "--family {} does not match the peer {peer}: choose another with --peer",
            if peer.is_ipv6() { 4 } else { 6 }
        );
        refuse_if!(
            transport == ClientTransport::Dtls && self.size > Self::MAX_DTLS_SIZE,
            "--size is {}, but over DTLS it must be {HEADER_LEN} to {}",
            self.size,
            Self::MAX_DTLS_SIZE
        );
        Ok(())
    }

    fn validate_migration(&self) -> Result<(), LoadError> {
        let Some(interval) = self.migrate else { return Ok(()) };
        refuse_if!(
            self.mode != Mode::Packet,
            "--migrate needs --mode packet: with --mode {}, clients keep no allocation that could move",
            self.mode
        );
        refuse_if!(
            self.relayed == Relayed::Tcp,
            "--migrate cannot be used with --relay tcp: a mobility ticket moves the allocation, but not its data \
             connections (RFC 6062 section 4.3)"
        );
        within("--migrate", interval, MIGRATE)?;
        refuse_if!(
            interval > self.run.duration,
            "--migrate is {} s, longer than --duration ({} s), so some clients would not move",
            interval.as_secs_f64(),
            self.run.duration.as_secs_f64()
        );
        Ok(())
    }

    fn validate_reconnect(&self) -> Result<(), LoadError> {
        let Some(patience) = self.reconnect else { return Ok(()) };
        refuse_if!(self.mode != Mode::Packet, "--reconnect needs --mode packet, not {}", self.mode);
        refuse_if!(
            self.relayed == Relayed::Tcp,
            "--reconnect cannot be used with --relay tcp: a broken stream cannot be resumed"
        );
        within("--reconnect", patience, PATIENCE)?;
        let spread = self.spread.unwrap_or_default();
        refuse_if!(
            spread > patience,
            "--reconnect-spread is {} s, longer than --reconnect ({} s)",
            spread.as_secs_f64(),
            patience.as_secs_f64()
        );
        Ok(())
    }

    fn validate_users(&self) -> Result<(), LoadError> {
        if self.users != 1 {
            refuse_if!(
                !USERS.contains(&self.users),
                "--users is {}, but must be 1 to {}",
                self.users,
                USERS.end()
            );
            refuse_if!(
                !matches!(self.mode, Mode::Packet | Mode::Allocate),
                "--users needs --mode packet or allocate, not {}",
                self.mode
            );
            refuse_if!(self.user.is_none(), "--users needs --user: the common name prefix and password");
        }
        let run = self.run.warmup + self.run.duration;
        let good_for = self.access_token.as_ref().and_then(|token| token.expires_in).unwrap_or(u64::MAX);
        refuse_if!(
            Duration::from_secs(good_for) < run,
            "--access-token is valid for {good_for} s, less than the run takes ({} s with --warmup): create one \
             with a longer --ttl",
            run.as_secs_f64()
        );
        Ok(())
    }

    pub(super) fn address_family(&self) -> Option<Family> {
        self.family.or_else(|| self.peer().is_ipv6().then_some(Family::V6))
    }

    pub(super) fn files_per_client(&self) -> usize {
        if self.relayed == Relayed::Tcp { 2 } else { 1 }
    }
}

fn within(flag: &str, time: Duration, range: RangeInclusive<Duration>) -> Result<(), LoadError> {
    let (least, most) = (range.start().as_secs_f64(), range.end().as_secs_f64());
    refuse_if!(!range.contains(&time), "{flag} is {} s, but must be {least} to {most} s", time.as_secs_f64());
    Ok(())
}

fn address_of(server: &ServerUri, transport: ClientTransport) -> Result<SocketAddr, LoadError> {
    if !server.is_turn() {
        let what = format!("{server} is a STUN server, which does not relay: give a turn: or turns: URI");
        return Err(LoadError::Config(what));
    }
    if !server.allows(transport) {
        return Err(LoadError::Config(format!("--transport {transport} contradicts {server}")));
    }
    let unknown = |source| LoadError::Name { host: server.host.clone(), source };
    let addresses = server.resolve(transport).map_err(unknown)?;
    addresses.first().copied().ok_or_else(|| unknown(io::ErrorKind::NotFound.into()))
}

fn read_token(path: &Path) -> Result<PrintedToken, LoadError> {
    let wrong =
        |what: &dyn Display| LoadError::Config(format!("--access-token-file {}: {what}", path.display()));
    let text =
        if path.as_os_str() == "-" { io::read_to_string(io::stdin()) } else { fs::read_to_string(path) };
    text.map_err(|error| wrong(&error))?.parse().map_err(|error| wrong(&error))
}

fn relayed(text: &str) -> Result<Relayed, &'static str> {
    match text {
        "udp" => Ok(Relayed::Udp),
        "tcp" => Ok(Relayed::Tcp),
        _ => Err("expected udp or tcp"),
    }
}

fn family(text: &str) -> Result<Family, &'static str> {
    match text {
        "4" => Ok(Family::V4),
        "6" => Ok(Family::V6),
        _ => Err("expected 4 or 6"),
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownName, parse_err_fn = UnknownName::of::<Self>)]
pub enum DataVia {
    #[default]
    Channel,
    Send,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownName, parse_err_fn = UnknownName::of::<Self>)]
pub enum Mode {
    #[default]
    Packet,
    /// Authenticated allocations from rotating source ports; each is deleted once it has been granted.
    Allocate,
    /// Channels, which each client binds one after the other. A client with enough channels starts over with a new allocation.
    Bind,
    Invalid,
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;

    fn config(flags: &str) -> Result<TurnLoadConfig, String> {
        let config = options::parse::<TurnLoadConfig>(&format!("127.0.0.1 {flags}"))
            .map_err(|error| error.to_string())?;
        config.resolved().map_err(|error| error.to_string())
    }

    #[test]
    fn clients_are_divided_among_several_servers() {
        let divided = |flags: &str| -> Vec<String> {
            let config = config(flags).expect(flags);
            (0..config.clients).map(|number| config.server_of(number).to_string()).collect()
        };
        let [first, second, third] = ["127.0.0.1:3478", "127.0.0.2:4000", "127.0.0.3:3478"];
        let seven = divided("turn:127.0.0.2:4000 127.0.0.3 --clients 7");
        assert_eq!(seven, [first, first, first, second, second, third, third]);
        assert_eq!(divided("--clients 2"), [first, first]);
    }

    #[test]
    fn impossible_settings_name_the_flag() {
        for (flags, told) in [
            ("--clients 0", "--clients"),
            ("--clients 10001", "--clients"),
            ("--size 23", "--size"),
            ("--size 65001", "--size"),
            ("--burst 0", "--burst"),
            ("--threads 0", "--threads"),
            ("--duration 0", "--duration"),
            ("--rate max --window 8", "--window"),
            ("--mode invalid --transport tcp", "--mode invalid"),
            ("--relay tcp", "--relay tcp"),
            ("--family 5", "expected 4 or 6"),
            ("--family 6 --peer 127.0.0.1:1", "--family 6"),
            ("--via both", "unknown value \"both\": expected channel or send"),
            ("--transport dtls --size 20000", "--size"),
            ("127.0.0.2 127.0.0.3 --clients 2", "fewer than the number of servers (3)"),
            ("127.0.0.2 --clients 2 --transport tcp", "need --transport udp"),
            ("127.0.0.2 --clients 2 --mode invalid", "one server only"),
            ("stun:127.0.0.2", "stun:127.0.0.2 is a STUN server, which does not relay"),
            ("--users 0", "--users"),
            ("--users 2 --user a:b --mode invalid", "--mode packet or allocate"),
            ("--users 2 --mode allocate", "--user:"),
            ("--mode bind", "--rate max"),
            ("--migrate 1 --mode allocate", "--mode allocate"),
            ("--migrate 1 --mode bind", "--mode bind"),
            ("--migrate 1 --mode invalid", "--mode invalid"),
            ("--migrate 1 --relay tcp --transport tcp", "--relay tcp"),
            ("--migrate 0.099", "0.1 to 3600 s"),
            ("--migrate 11", "--duration (10 s)"),
            ("--migrate soon", "expected seconds"),
            ("--reconnect 1 --mode allocate", "--reconnect"),
            ("--reconnect 1 --relay tcp --transport tcp", "--relay tcp"),
            ("--reconnect 1 --migrate 1", "--migrate"),
            ("--reconnect 0.199", "0.2 to 3600 s"),
            ("--reconnect-spread 0.5", "--reconnect <SECONDS>"),
            ("--reconnect 1 --reconnect-spread 1.001", "--reconnect-spread is 1.001 s"),
            ("--profile call --mode allocate", "--mode allocate"),
            ("--profile call --relay tcp --transport tcp", "--relay tcp"),
            ("--profile call --migrate 1", "--migrate"),
            ("--profile call --size 100", "cannot be used with"),
            ("--seed 2", "--profile"),
            ("--profile call --peer-prefix 10.0.0.0/8", "--profile"),
            ("--peer-prefix 10.0.0.0/8 --mode allocate", "--mode allocate"),
            ("--peer-prefix 10.0.0.0/24 --clients 256", "--peer-prefix 10.0.0.0/24"),
            ("--peer-prefix fd00::/64 --clients 0", "--clients"),
            ("--client-prefix 10.0.0.0/8 --transport tcp", "needs --transport udp"),
            ("--client-prefix 10.0.0.0/8 --mode allocate", "--mode allocate"),
            ("--client-prefix 10.0.0.0/8 --migrate 1", "--migrate"),
            ("--client-prefix 10.0.0.0/8 --reconnect 1", "--reconnect"),
            ("--client-prefix 10.0.0.0/24 --clients 256", "--client-prefix 10.0.0.0/24"),
            ("--client-prefix fd00::/64", "--client-prefix fd00::/64"),
        ] {
            let error = config(flags).map(|_| ()).expect_err(flags);
            assert!(error.contains(told), "{flags}: {error}");
        }
        for flags in [
            "",
            "--migrate 1",
            "--reconnect 1",
            "--reconnect 1 --reconnect-spread 0",
            "--reconnect 1 --reconnect-spread 1",
            "--profile call --reconnect 1",
            "--profile call --seed 7",
            "--peer-prefix 10.0.0.0/24 --clients 255",
            "--client-prefix 10.0.0.0/24 --clients 255",
            "--client-prefix 10.0.0.0/24 --profile call",
            "--family 6",
        ] {
            config(flags).expect(flags);
        }
    }

    #[test]
    fn access_tokens_exclude_other_credentials_and_must_outlive_the_run() {
        let token = |seconds: u64| {
            format!("username: north\nmac_key: AQID\naccess_token: BAUG\nexpires_in: {seconds}\n")
        };
        let dir = Dir::new();
        let path = dir.file("token", token(60));
        let file = path.to_str().expect("UTF-8").to_owned();
        let flag = |text: &str| vec!["--access-token".to_owned(), text.to_owned()];
        let of_file = |path: &str| vec!["--access-token-file".to_owned(), path.to_owned()];
        let as_user = || vec!["--user".to_owned(), "a:b".to_owned()];
        let load = |arguments: &[Vec<String>]| -> Result<String, String> {
            let command = TurnLoadConfig::augment_args(clap::Command::new("turn"));
            let words = [vec!["turn".to_owned(), "127.0.0.1".to_owned()], arguments.concat()].concat();
            let matches = command.try_get_matches_from(words).map_err(|error| error.to_string())?;
            let config =
                clap::FromArgMatches::from_arg_matches(&matches).map_err(|error| error.to_string())?;
            let found = TurnLoadConfig::resolved(&config).map_err(|error| error.to_string())?;
            Ok(found.access_token.expect("a token").kid)
        };
        assert_eq!(load(&[flag(&token(11))]), Ok("north".to_owned()));
        assert_eq!(load(&[of_file(&file)]), Ok("north".to_owned()));
        for (arguments, told) in [
            (vec![flag(&token(60)), as_user()], "cannot be used with"),
            (vec![of_file(&file), as_user()], "cannot be used with"),
            (vec![of_file(&file), flag(&token(60))], "cannot be used with"),
            (vec![flag("username: north")], "mac_key is missing"),
            (vec![of_file("/nonexistent/token")], "/nonexistent/token"),
            (vec![flag(&token(10))], "--ttl"),
        ] {
            let error = load(&arguments).expect_err(told);
            assert!(error.contains(told), "{arguments:?}: {error}");
        }
        dir.file("token", "hunter2");
        let error = load(&[of_file(&file)]).expect_err("no token");
        assert!(error.contains(&file) && error.contains("username") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn a_peer_prefix_gives_each_client_its_own_peer() {
        let peers =
            |flags: &str| [0, 1, 300].map(|number| config(flags).unwrap().peer_of_client(number).to_string());
        assert_eq!(
            peers("--peer-prefix 127.5.0.0/16"),
            ["127.5.0.1:3480", "127.5.0.2:3480", "127.5.1.45:3480"]
        );
        assert_eq!(peers("").map(|peer| peer == "127.0.0.1:3480"), [true; 3]);
    }
}
