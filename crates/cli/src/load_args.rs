//! Flags of `turnpike load turn` and `turnpike reflect`, and what all generators' flags share.

use std::{
    fmt::Display,
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs},
    num::ParseFloatError,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, Subcommand};
use turnpike_client::{ServerUri, TlsOptions, Transport};
use turnpike_config::restapi_credentials;
use turnpike_load::{
    LoadError, Profile, Rate, Shaped, reflect,
    turn::{AccessToken, Cidr, Config, Family, Mode, Relayed, Via},
};
use turnpike_net::{Datapath, ZonedIp, socket_address};

use crate::load_forward_args::{
    LOAD_CONNECT, LOAD_CONNECT_EXAMPLES, LOAD_RR, LOAD_RR_EXAMPLES, LOAD_TCP, LOAD_TCP_EXAMPLES, LOAD_UDP,
    LOAD_UDP_EXAMPLES, LoadConnectArgs, LoadRrArgs, LoadTcpArgs, LoadUdpArgs,
};

/// Generators.
#[derive(Subcommand)]
pub(crate) enum LoadCommand {
    /// Drive traffic, allocations or invalid packets through a TURN server and measure what comes back
    #[command(long_about = LOAD_TURN, after_help = LOAD_TURN_EXAMPLES)]
    Turn(Box<LoadTurnArgs>),
    /// Bulk over TCP, through a forwarder or straight
    #[command(long_about = LOAD_TCP, after_help = LOAD_TCP_EXAMPLES)]
    Tcp(LoadTcpArgs),
    /// Requests and responses over open TCP connections
    #[command(long_about = LOAD_RR, after_help = LOAD_RR_EXAMPLES)]
    Rr(LoadRrArgs),
    /// TCP connections opened and closed
    #[command(long_about = LOAD_CONNECT, after_help = LOAD_CONNECT_EXAMPLES)]
    Connect(LoadConnectArgs),
    /// Datagrams there and back
    #[command(long_about = LOAD_UDP, after_help = LOAD_UDP_EXAMPLES)]
    Udp(LoadUdpArgs),
}

/// Flags of `load turn`.
#[derive(Args)]
pub(crate) struct LoadTurnArgs {
    /// The TURN server: turn:HOST[:PORT][?transport=udp|tcp], turns:… (TLS; with ?transport=udp DTLS), or HOST[:PORT]; port
    /// 3478 by default, 5349 with TLS or DTLS. Over udp there may be several, each of which has as many of the clients
    #[arg(value_name = "SERVER", required = true)]
    servers: Vec<ServerUri>,

    /// How clients reach the server: udp, tcp, tls or dtls [default: as SERVER says, udp]
    #[arg(long, value_name = "T")]
    transport: Option<Transport>,

    /// What is relayed: "udp" datagrams, or "tcp" connections to a `turnpike reflect --tcp` (RFC 6062; over tcp or tls)
    #[arg(long, value_name = "WHAT", default_value = "udp", value_parser = relayed)]
    relay: Relayed,

    /// Family of the relayed address, 4 or 6 [default: that of --peer]
    #[arg(long, value_name = "4|6")]
    family: Option<Family>,

    #[command(flatten)]
    trust: TrustArgs,

    /// Make a full TLS handshake for each connection, instead of resuming sessions; over DTLS none is resumed anyway
    #[arg(long)]
    no_resumption: bool,

    /// The reflector as the server reaches it [default: `turnpike reflect` beside the server, 127.0.0.1:3480 or [::1]:3480]; with
    /// --profile, an address of this machine for the generator's own peers [default: 127.0.0.1:0 or [::1]:0, any port]
    #[arg(long, value_name = "ADDR:PORT", value_parser = resolve)]
    peer: Option<SocketAddr>,

    /// Give each client a peer address of its own, from the second address of this prefix on, at the port of --peer [default: 3480]; a
    /// reflector that listens on all addresses answers from each that is routed to it (`ip route add local CIDR dev lo`). For servers
    /// whose clients share relay ports
    #[arg(long, value_name = "CIDR", conflicts_with = "profile")]
    peer_prefix: Option<Cidr>,

    /// Give each client an address of this machine of its own, from the second address of this prefix on (`ip route add local CIDR dev lo`),
    /// and each thread one socket for all its clients, in place of a socket for each: the generator then takes far less of its core. Over UDP,
    /// for --mode packet and bind; the server needs a route for the prefix that leads here
    #[arg(long, value_name = "CIDR", conflicts_with_all = ["migrate", "patience"])]
    client_prefix: Option<Cidr>,

    /// Long-term credential; leave it out for a server without authentication
    #[arg(long, value_name = "NAME:PASSWORD", env = "TURNPIKE_LOAD_USER", hide_env_values = true, value_parser = user)]
    user: Option<(String, String)>,

    /// Have so many users take turns, NAME0, NAME1 and so on, all with the password, 1 to 1000000; for --mode packet (clients in turn)
    /// and allocate (allocations in turn)
    #[arg(long, value_name = "N", default_value_t = 1)]
    users: usize,

    /// Third-party authorization (RFC 7635) in place of --user: all that `turnpike credentials --token-key` prints, in quotes. Other
    /// users of this machine can see it in the process list
    #[arg(
        long,
        value_name = "TOKEN",
        env = "TURNPIKE_LOAD_ACCESS_TOKEN",
        hide_env_values = true,
        conflicts_with = "user"
    )]
    access_token: Option<AccessToken>,

    /// File with the same; "-" is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["access_token", "user"])]
    access_token_file: Option<PathBuf>,

    /// Clients, each with its own 5-tuple, 1 to 10000; with --mode allocate or bind, allocations under way at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    clients: usize,

    /// Datagrams (with --mode allocate: allocations) a second over all clients, open loop, such as 20000, 20k or 1.5M;
    /// "max" for as many as the machine can
    #[arg(long, value_name = "PPS|max", default_value = "1000")]
    rate: Rate,

    /// Payload of a datagram in bytes, 24 to 65000, over DTLS 24 to 16000; with --relay tcp, of a piece
    #[arg(long, value_name = "B", default_value_t = 120)]
    size: usize,

    #[command(flatten)]
    bursts: BurstArgs,

    #[command(flatten)]
    shape: ShapeArgs,

    /// How data reaches the server: "channel" (ChannelData) or "send" (Send and Data indications)
    #[arg(long, value_name = "HOW", default_value_t = Via::Channel)]
    via: Via,

    /// What is generated: "packet" traffic through the relay and back, "allocate" allocations, each deleted at once, "bind" channels,
    /// one after the other by each client (with --rate max), "invalid" unauthenticated requests and malformed packets (over udp only)
    #[arg(long, value_name = "MODE", default_value_t = Mode::Packet)]
    mode: Mode,

    /// In the measured time, have each client change its socket every SECONDS and take its allocation along (mobility, RFC 8016),
    /// 0.1 to 3600; for --mode packet with --relay udp
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    migrate: Option<Duration>,

    /// Have a client that has heard nothing for SECONDS, 0.2 to 3600 (and up to --reconnect-spread more, each another time), give its
    /// allocation up, take another socket and ask SERVER for another, as calls do after a fault; the result tells how many did so, and how
    /// long it took. For --mode packet with --relay udp
    #[arg(long = "reconnect", alias = "return", value_name = "SECONDS", value_parser = seconds)]
    patience: Option<Duration>,

    /// With --reconnect: those who notice at once come back one after the other within SECONDS, 0 (all at once) to as long as --reconnect
    /// [default: 1, or as long as --reconnect where that is less]
    #[arg(long = "reconnect-spread", value_name = "SECONDS", value_parser = seconds, requires = "patience")]
    spread: Option<Duration>,

    /// How datagrams enter and leave over udp: auto, basic, mmsg or gso
    #[arg(long, value_name = "D", default_value = "auto")]
    datapath: Datapath,

    #[command(flatten)]
    time: TimeArgs,

    #[command(flatten)]
    limits: LimitArgs,
}

/// How long, by how many threads, and where the result goes.
#[derive(Args)]
pub(crate) struct TimeArgs {
    /// Measured time in seconds, above 0
    #[arg(long, value_name = "S", default_value = "10", value_parser = seconds)]
    pub(crate) duration: Duration,

    /// Seconds of traffic before it that are not counted
    #[arg(long, value_name = "S", default_value = "1", value_parser = seconds)]
    pub(crate) warmup: Duration,

    /// Threads, 1 to 1024 [default: one per core, no more than clients]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,

    /// Write the result as one JSON object to FILE, "-" for standard output
    #[arg(long, value_name = "FILE|-")]
    pub(crate) json: Option<PathBuf>,
}

/// Limits that make the exit code 3.
#[derive(Args)]
pub(crate) struct LimitArgs {
    /// Exit with 3 when more than PCT percent are lost, 0 to 100
    #[arg(long, value_name = "PCT", value_parser = percent)]
    pub(crate) max_loss: Option<f64>,

    /// Exit with 3 when the 99th percentile of the latency is above US microseconds
    #[arg(long, value_name = "US")]
    pub(crate) max_p99: Option<u64>,
}

/// How datagrams of one client follow each other.
#[derive(Args)]
pub(crate) struct BurstArgs {
    /// Datagrams that a client sends back to back, 1 to 64 [default: 1 at a fixed rate, 32 at "max"]
    #[arg(long, value_name = "N")]
    pub(crate) burst: Option<usize>,

    /// At rate "max": datagrams that one client may have under way, at least a burst; bursts for which there is room may leave together
    /// [default: no bound, a flood]
    #[arg(long, value_name = "N")]
    pub(crate) window: Option<u64>,
}

/// Traffic in the shape of what people do.
#[derive(Args)]
pub(crate) struct ShapeArgs {
    /// In place of --rate, --size, --burst and --window: each client has the streams of audio, call, sfu, screen, vpn, or of a TOML
    /// file, in both directions, to peers of the generator's own; docs/load.md says how such a file looks
    #[arg(long, value_name = "NAME|FILE", conflicts_with_all = ["rate", "size", "burst", "window"])]
    profile: Option<Profile>,

    /// Where the numbers of --profile begin: runs of one seed send the same packets at the same times
    #[arg(long, value_name = "N", default_value_t = 1, requires = "profile")]
    seed: u64,
}

impl ShapeArgs {
    pub(crate) fn into_shaped(self) -> Option<Shaped> {
        let seed = self.seed;
        self.profile.map(|profile| Shaped { profile, seed })
    }
}

/// Whom to believe.
#[derive(Args)]
pub(crate) struct TrustArgs {
    /// PEM file with the certificate authorities to trust, or with the server's own certificate [default: those of this
    /// machine]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Take any certificate: for tests
    #[arg(long, conflicts_with = "ca")]
    insecure: bool,

    /// The name that the certificate must have, and that TLS asks for (SNI; DTLS does not) [default: the host of SERVER]
    #[arg(long, value_name = "NAME")]
    server_name: Option<String>,
}

impl TrustArgs {
    pub(crate) fn into_options(self, resumption: bool) -> TlsOptions {
        TlsOptions { ca: self.ca, insecure: self.insecure, server_name: self.server_name, resumption }
    }
}

impl LoadTurnArgs {
    /// What to run, and where the JSON goes. Resolves the server's name.
    pub(crate) fn into_config(self) -> Result<(Config, Option<PathBuf>), LoadError> {
        let [first, ..] = &self.servers[..] else {
            return Err(LoadError::Config("name a server".to_owned()));
        };
        let transport = self.transport.unwrap_or_else(|| first.transport());
        let host = first.name().map(str::to_owned);
        let addresses = self.servers.iter().map(|server| address_of(server, transport));
        let mut addresses = addresses.collect::<Result<Vec<_>, _>>()?.into_iter();
        let reflector: IpAddr = match self.family {
            Some(Family::V6) => Ipv6Addr::LOCALHOST.into(),
            _ => Ipv4Addr::LOCALHOST.into(),
        };
        let profile = self.shape.into_shaped();
        // The generator's own peers are where there is room.
        let port = if profile.is_some() { 0 } else { reflect::DEFAULT_PORT };
        let access_token = match self.access_token_file {
            Some(path) => Some(read_token(&path)?),
            None => self.access_token,
        };
        let (user, password) = self.user.unwrap_or_default();
        let mut peer = self.peer.unwrap_or_else(|| (reflector, port).into());
        if let Some(prefix) = self.peer_prefix {
            peer.set_ip(prefix.base);
        }
        let default = Config::default();
        let config = Config {
            server: addresses.next().unwrap_or(default.server),
            also: addresses.collect(),
            host,
            transport,
            tls: self.trust.into_options(!self.no_resumption),
            relayed: self.relay,
            family: self.family,
            peer,
            peer_prefix: self.peer_prefix,
            client_prefix: self.client_prefix,
            profile,
            user,
            password,
            users: self.users,
            access_token,
            clients: self.clients,
            via: self.via,
            rate: self.rate,
            size: self.size,
            burst: self.bursts.burst,
            window: self.bursts.window,
            duration: self.time.duration,
            warmup: self.time.warmup,
            mode: self.mode,
            migrate: self.migrate,
            patience: self.patience,
            spread: self.spread,
            threads: self.time.threads,
            datapath: self.datapath,
            max_loss: self.limits.max_loss,
            max_p99: self.limits.max_p99,
            ..default
        };
        Ok((config, self.time.json))
    }
}

/// Where a TURN server is reached over this transport.
fn address_of(server: &ServerUri, transport: Transport) -> Result<SocketAddr, LoadError> {
    if !server.is_turn() {
        let what = format!("{server} names a STUN server, which relays nothing: name one as turn: or turns:");
        return Err(LoadError::Config(what));
    }
    if !server.allows(transport) {
        return Err(LoadError::Config(format!("--transport {transport} does not go with {server}")));
    }
    let unknown = |source| LoadError::Name { host: server.host.clone(), source };
    let addresses = server.resolve(transport).map_err(unknown)?;
    addresses.first().copied().ok_or_else(|| unknown(io::ErrorKind::NotFound.into()))
}

/// Flags of `reflect`.
#[derive(Args)]
pub(crate) struct ReflectArgs {
    /// UDP address to reflect on; repeat for several [default, without --tcp too: port 3480 of all addresses, IPv6 where
    /// there is any]
    #[arg(long, value_name = "ADDR:PORT", value_parser = socket_address)]
    listen: Vec<SocketAddr>,

    /// TCP address to serve load tcp, rr and connect on, and an echo to any other client; repeat for several [default,
    /// without --listen too: as for UDP]
    #[arg(long, value_name = "ADDR:PORT", value_parser = socket_address)]
    tcp: Vec<SocketAddr>,

    /// Threads, 1 to 1024, for UDP and as many for TCP [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: Option<u16>,

    /// How datagrams enter and leave: auto, basic, mmsg or gso; kernel: sent back in the kernel where they come by Ethernet, as auto elsewhere
    /// (as for `serve`: CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON; netfilter does not see them)
    #[arg(long, value_name = "D", default_value = "auto", value_parser = reflecting)]
    datapath: Reflecting,
}

/// The kernel, or a step of the ladder.
#[derive(Clone, Copy)]
enum Reflecting {
    Kernel,
    Step(Datapath),
}

fn reflecting(text: &str) -> Result<Reflecting, String> {
    match text {
        "kernel" => Ok(Reflecting::Kernel),
        step => step
            .parse()
            .map(Reflecting::Step)
            .map_err(|_| "expected auto, basic, mmsg, gso or kernel".to_owned()),
    }
}

impl ReflectArgs {
    pub(crate) fn into_config(self) -> reflect::Config {
        let default = reflect::Config::default();
        let (datapath, in_kernel) = match self.datapath {
            Reflecting::Kernel => (default.datapath, true),
            Reflecting::Step(step) => (step, false),
        };
        reflect::Config {
            listen: self.listen,
            tcp: self.tcp,
            workers: self.workers.map_or(default.workers, usize::from),
            datapath,
            in_kernel,
            ..default
        }
    }
}

/// A file that holds what `turnpike credentials` printed.
fn read_token(path: &Path) -> Result<AccessToken, LoadError> {
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

fn resolve(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = socket_address(text) {
        return Ok(address);
    }
    let mut found = text.to_socket_addrs().map_err(|error| format!("expected ADDR:PORT: {error}"))?;
    found.next().ok_or_else(|| "the name has no address".to_owned())
}

/// HOST or HOST:PORT, the port being the reflector's by default.
pub(crate) fn server(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = socket_address(text) {
        return Ok(address);
    }
    let found = match text.parse::<ZonedIp>() {
        Ok(address) => return Ok(address.at(reflect::DEFAULT_PORT)),
        Err(_) if text.contains(':') => text.to_socket_addrs(),
        Err(_) => (text, reflect::DEFAULT_PORT).to_socket_addrs(),
    };
    let mut found = found.map_err(|error| format!("expected HOST or HOST:PORT: {error}"))?;
    found.next().ok_or_else(|| "the name has no address".to_owned())
}

pub(crate) fn user(text: &str) -> Result<(String, String), &'static str> {
    // A time-limited name holds a colon itself; its password, being base64, holds none.
    let parts = text
        .rsplit_once(':')
        .filter(|(name, _)| name.contains(':') && restapi_credentials::parse(name).is_some())
        .or_else(|| text.split_once(':'));
    match parts {
        None => Err("there is no colon, and so no password: expected NAME:PASSWORD"),
        Some(("", _)) => Err("there is no name in front of the colon: expected NAME:PASSWORD"),
        Some((_, "")) => Err("the password behind the colon is empty: expected NAME:PASSWORD"),
        Some((name, password)) => Ok((name.to_owned(), password.to_owned())),
    }
}

/// Seconds, of which a clock can have so many more.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    const MOST: u64 = 365 * 86_400;
    let seconds: f64 = text.parse().map_err(|error: ParseFloatError| format!("expected seconds: {error}"))?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| *duration <= Duration::from_secs(MOST))
        .ok_or_else(|| format!("expected seconds, 0 to {MOST} (a year)"))
}

pub(crate) fn percent(text: &str) -> Result<f64, &'static str> {
    text.parse()
        .ok()
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or("expected a number from 0 to 100")
}

const LOAD_TURN: &str = "\
Drive traffic, allocations or invalid packets through a TURN server and measure what comes back.

Each client allocates, binds, and sends datagrams through the server to a reflector, which sends them back. Round trips count \
from the moment a datagram was due, so that a stall hides nothing; where the generator itself was late, the result says so. A \
progress line appears on standard error each second.

The JSON result is one object: sent, received, lost, duplicated, reordered, send_pps, recv_pps, recv_bps, \
rtt_us {min,p50,p90,p99,p999,max}, jitter_us, late_us {p50,p99,max}, clients, size, rate, duration_s, datapath, transport, relay, errors {}. \
Over TLS and DTLS also full_handshakes and resumed_handshakes.

Over TCP and TLS a message that waits for a slow server is still under way; one that finds no room any more counts as not sent, and \
as error send_would_block. With --relay tcp each client has a connection to the peer of its own; what comes back on it is cut into \
pieces of --size bytes, and sent_bytes and received_bytes are told; a piece that is not what was sent is an error garbled.

With --profile each client has a call, a conference or the like, with a peer of the generator's own that sends by itself, and is no \
echo. Latency is of one way then, from when a packet was due until it arrived, and loss is told by direction and by stream \
(profile {name, seed, to_peer, to_client, streams []}); rtt_us is that latency of both directions. See docs/load.md.

With --migrate each client opens a new socket from time to time, closes the old one at once, as where a phone changes networks, and \
sends a Refresh with its mobility ticket from the new one (RFC 8016); the clients take turns. What is on its way to the old socket is lost \
and counts as lost; what is due until the server has answered waits for that, and its round trip shows it. The result tells migrations_done, migrations_failed and \
migration_ms_p50, _p99 and _max: from opening the socket, handshakes included, to the server's answer.

With --reconnect a client that hears nothing for so long asks for an allocation anew, from another socket and at the first server, again \
and again, as calls do (ICE) when the server was restarted or the path has changed. What it would have sent meanwhile counts as sent and \
lost, and as error no_allocation. The result tells sessions_lost (allocations given up), returns_done and returns_failed, \
reconnect_ms_p50, _p90, _p99 and _max (from the last that a client heard until it has another allocation), lost_within_ms (from when the \
first gave its allocation up until the last did), lost_of_others (of the lost datagrams, those of clients that never had to come back), clients_silent (those who heard nothing at the end), and pause_ms_p50, _p99 \
and _max: of the longest silence that each client had in the measured time. Silence while the generator itself stood still does not count.

A client that the server sends to another one (300 Try Alternate, RFC 8489 section 10) goes there, over the same transport and with the \
same credentials, over at most five servers and to none twice; the result tells redirects.";

const LOAD_TURN_EXAMPLES: &str = "\
Examples (with `turnpike reflect` and `turnpike serve --user a:b --allow-peer 127.0.0.0/8 --relay-ip 127.0.0.1` running):
  turnpike load turn 127.0.0.1 --user a:b
  turnpike load turn turn:127.0.0.1:3478 --user a:b --clients 64 --burst 4 --rate 200k --max-loss 0.1
  turnpike load turn 127.0.0.1 --user a:b --rate max --size 1200 --json -
  turnpike load turn 127.0.0.1 --user a:b --mode allocate --clients 100 --rate max
  turnpike load turn turns:127.0.0.1 --ca cert.pem --server-name turn.example.org --user a:b
  turnpike load turn 127.0.0.1 --user a:b --clients 50 --migrate 2
  turnpike load turn 127.0.0.1 --user a:b --clients 200 --profile call --max-loss 0.1
  turnpike load turn 127.0.0.1 --user a:b --clients 200 --profile call --reconnect 2 --duration 60        (and restart the server)
  turnpike credentials --token-key-file KEY --user KID --server-name NAME | turnpike load turn 127.0.0.1 --access-token-file -
  turnpike load turn turn:127.0.0.1?transport=tcp --relay tcp --user a:b --rate max      (with `turnpike reflect --tcp 127.0.0.1:3480`)

Exit codes: 0 done, 1 failed, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn load_turn(arguments: &[&str]) -> Result<Config, String> {
        let command = LoadTurnArgs::augment_args(clap::Command::new("turn"));
        let matches = command.try_get_matches_from([&["turn", "127.0.0.1"], arguments].concat());
        let args = matches.and_then(|matches| LoadTurnArgs::from_arg_matches(&matches));
        args.map_err(|error| error.to_string())?
            .into_config()
            .map(|(config, _)| config)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn an_access_token_is_pasted_or_read_and_stands_alone() {
        const PRINTED: &str = "username: north\nmac_key: AQID\naccess_token: BAUG\nexpires_in: 60\n";
        let kid = |config: Config| config.access_token.map(|token| token.kid);
        let north = Ok(Some("north".to_owned()));
        assert_eq!(load_turn(&["--access-token", PRINTED]).map(kid), north);
        let dir = turnpike_testkit::Dir::new();
        let path = dir.file("token", PRINTED);
        let file = path.to_str().expect("UTF-8");
        assert_eq!(load_turn(&["--access-token-file", file]).map(kid), north);
        for (arguments, told) in [
            (&["--access-token", PRINTED, "--user", "a:b"][..], "cannot be used with"),
            (&["--access-token-file", file, "--user", "a:b"], "cannot be used with"),
            (&["--access-token-file", file, "--access-token", PRINTED], "cannot be used with"),
            (&["--access-token", "username: north"], "mac_key is missing"),
            (&["--access-token-file", "/nonexistent/token"], "/nonexistent/token"),
        ] {
            let error = load_turn(arguments).map(|_| ()).expect_err("refused");
            assert!(error.contains(told), "{arguments:?}: {error}");
        }
        dir.file("token", "hunter2");
        let error = load_turn(&["--access-token-file", file]).map(|_| ()).expect_err("no token");
        assert!(error.contains(file) && error.contains("username") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn several_servers_share_the_clients() {
        let also = |arguments: &[&str]| load_turn(arguments).map(|config| (config.server, config.also));
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let two = Ok((at("127.0.0.1:3478"), vec![at("127.0.0.2:4000")]));
        assert_eq!(also(&["turn:127.0.0.2:4000", "--clients", "2"]), two);
        assert_eq!(also(&["--clients", "2"]), Ok((at("127.0.0.1:3478"), vec![])));
        let refused = also(&["stun:127.0.0.2"]).expect_err("a STUN server");
        assert!(refused.contains("stun:127.0.0.2") && refused.contains("relays nothing"), "{refused}");
    }

    #[test]
    fn clients_move_when_asked_to() {
        assert_eq!(load_turn(&[]).map(|config| config.migrate), Ok(None));
        let half = Ok(Some(Duration::from_millis(500)));
        assert_eq!(load_turn(&["--migrate", "0.5"]).map(|config| config.migrate), half);
        assert!(load_turn(&["--migrate", "soon"]).is_err());
        assert_eq!(load_turn(&["--reconnect", "0.5"]).map(|config| config.patience), half);
        let spread =
            load_turn(&["--reconnect", "0.5", "--reconnect-spread", "0"]).map(|config| config.spread);
        assert_eq!(spread, Ok(Some(Duration::ZERO)));
        let alone = load_turn(&["--reconnect-spread", "0.5"]).map(|_| ()).expect_err("refused");
        assert!(alone.contains("--reconnect <SECONDS>"), "{alone}");
    }

    #[test]
    fn credentials_split_where_they_must() {
        let pair = |name: &str, password: &str| Ok((name.to_owned(), password.to_owned()));
        assert_eq!(user("a:b"), pair("a", "b"));
        assert_eq!(user("a:b:c"), pair("a", "b:c"));
        assert_eq!(user("1700000000:alice:c2VjcmV0"), pair("1700000000:alice", "c2VjcmV0"));
        assert_eq!(user("alice:1700000000:c2VjcmV0"), pair("alice:1700000000", "c2VjcmV0"));
        assert_eq!(user(":1700000000:c2VjcmV0"), pair(":1700000000", "c2VjcmV0"));
        assert_eq!(user("1700000000:pw"), pair("1700000000", "pw"));
        for (text, why) in
            [("a", "no colon"), (":b", "no name"), ("a:", "password behind the colon is empty")]
        {
            assert!(user(text).is_err_and(|error| error.contains(why)), "{text}");
        }
    }

    #[test]
    fn a_server_has_the_reflectors_port_unless_it_says_otherwise() {
        for (text, expected) in [
            ("127.0.0.1", "127.0.0.1:3480"),
            ("127.0.0.1:9000", "127.0.0.1:9000"),
            ("::1", "[::1]:3480"),
            ("[::1]:9000", "[::1]:9000"),
        ] {
            assert_eq!(server(text).map(|address| address.to_string()), Ok(expected.to_owned()));
        }
        assert!(server("127.0.0.1:port").is_err() && server("").is_err());
    }

    #[test]
    fn times_and_percentages_have_a_range() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds("31536000"), Ok(Duration::from_secs(31_536_000)));
        for text in ["-1", "NaN", "inf", "1e30", "1e19", "31536001"] {
            assert!(seconds(text).is_err_and(|error| error.contains("expected seconds")), "{text}");
        }
        assert_eq!(percent("0.1"), Ok(0.1));
        assert!(percent("101").is_err() && percent("NaN").is_err());
    }
}
