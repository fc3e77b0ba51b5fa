//! Flags of the generators for forwarders: `turnpike load tcp`, `rr`, `connect` and `udp`.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use turnpike_load::{
    Rate,
    stream::{self, Close, Direction, Workload},
    udp,
};
use turnpike_net::{Datapath, socket_address};

use crate::load_args::{BurstArgs, LimitArgs, ShapeArgs, TimeArgs, server};

/// Where, how long, and where the result goes.
#[derive(Args)]
pub(crate) struct RunArgs {
    /// A `turnpike reflect`, or a forwarder to one: HOST[:PORT], port 3480 by default
    #[arg(value_name = "HOST:PORT", value_parser = server)]
    server: SocketAddr,

    #[command(flatten)]
    time: TimeArgs,
}

/// Flags of `load tcp`.
#[derive(Args)]
pub(crate) struct LoadTcpArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Streams, each a connection of its own, 1 to 10000; with --bidir as many each way
    #[arg(short = 'P', long, visible_alias = "clients", value_name = "N", default_value_t = 1)]
    parallel: usize,

    /// The reflector sends, the generator receives
    #[arg(short = 'R', long)]
    reverse: bool,

    /// Both directions at once, on connections of their own
    #[arg(long, conflicts_with = "reverse")]
    bidir: bool,

    /// Bytes of a write, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 131_072)]
    size: usize,

    /// Compare every byte that arrives with what was sent; costs the receiver CPU
    #[arg(long)]
    verify: bool,

    /// Receivers let the kernel throw the bytes away instead of copying them, so that the far ends cost less CPU
    #[arg(long)]
    skip_rx_copy: bool,
}

impl LoadTcpArgs {
    pub(crate) fn into_config(self) -> (stream::Config, Option<PathBuf>) {
        let direction = match (self.reverse, self.bidir) {
            (_, true) => Direction::Both,
            (true, false) => Direction::ToClient,
            (false, false) => Direction::ToServer,
        };
        let workload = Workload::Bulk {
            direction,
            block: self.size,
            verify: self.verify,
            skip_rx_copy: self.skip_rx_copy,
        };
        stream_config(
            self.run,
            workload,
            self.parallel,
            Rate::Max,
            LimitArgs { max_loss: None, max_p99: None },
        )
    }
}

/// Flags of `load rr`.
#[derive(Args)]
pub(crate) struct LoadRrArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Connections, with one request outstanding on each, 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 1)]
    clients: usize,

    /// Bytes of a request, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 32)]
    size: usize,

    /// Bytes of its response, 1 to 1048576 [default: as --size]
    #[arg(long, value_name = "B")]
    response: Option<usize>,

    /// Requests a second over all connections, open loop, such as 20000 or 20k; "max" sends each as soon as the last is
    /// answered (closed loop)
    #[arg(long, value_name = "N|max", default_value = "max")]
    rate: Rate,

    #[command(flatten)]
    limits: LimitArgs,
}

impl LoadRrArgs {
    pub(crate) fn into_config(self) -> (stream::Config, Option<PathBuf>) {
        let response = self.response.unwrap_or(self.size);
        let workload = Workload::Exchange { request: self.size, response };
        stream_config(self.run, workload, self.clients, self.rate, self.limits)
    }
}

/// Flags of `load connect`.
#[derive(Args)]
pub(crate) struct LoadConnectArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Connections at once, 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 1)]
    clients: usize,

    /// Bytes that each sends, after a greeting of 16, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 1)]
    size: usize,

    /// Bytes that each receives, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 1)]
    response: usize,

    /// Who closes first: "server", "client", or the client by "reset". Whoever does keeps the port pair for 60 s after
    /// (TIME_WAIT, but for a reset), and a client has 28,000
    #[arg(long, value_name = "WHO", default_value_t = Close::Server)]
    close: Close,

    /// Connections a second over all clients, open loop, such as 2000 or 2k; "max" opens each as soon as the last is
    /// closed (closed loop)
    #[arg(long, value_name = "N|max", default_value = "max")]
    rate: Rate,

    #[command(flatten)]
    limits: LimitArgs,
}

impl LoadConnectArgs {
    pub(crate) fn into_config(self) -> (stream::Config, Option<PathBuf>) {
        let workload = Workload::Connect { request: self.size, response: self.response, close: self.close };
        stream_config(self.run, workload, self.clients, self.rate, self.limits)
    }
}

/// Flags of `load udp`.
#[derive(Args)]
pub(crate) struct LoadUdpArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Flows, each from a port of its own, 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 1)]
    clients: usize,

    /// Datagrams a second over all flows, open loop, such as 20000, 20k or 1.5M; "max" for as many as the machine can
    #[arg(long, value_name = "PPS|max", default_value = "1000")]
    rate: Rate,

    /// Payload of a datagram in bytes, 24 to 65000
    #[arg(long, value_name = "B", default_value_t = 120)]
    size: usize,

    #[command(flatten)]
    bursts: BurstArgs,

    #[command(flatten)]
    shape: ShapeArgs,

    /// With --profile: where the generator's own peers listen, an address of this machine to which the forwarder leads
    /// [default: SERVER itself, with nothing between]
    #[arg(long, value_name = "ADDR:PORT", requires = "profile", value_parser = socket_address)]
    peer: Option<SocketAddr>,

    /// How datagrams enter and leave: auto, basic, mmsg or gso
    #[arg(long, value_name = "D", default_value = "auto")]
    datapath: Datapath,

    #[command(flatten)]
    limits: LimitArgs,
}

impl LoadUdpArgs {
    pub(crate) fn into_config(self) -> (udp::Config, Option<PathBuf>) {
        let config = udp::Config {
            server: self.run.server,
            clients: self.clients,
            rate: self.rate,
            size: self.size,
            burst: self.bursts.burst,
            window: self.bursts.window,
            duration: self.run.time.duration,
            warmup: self.run.time.warmup,
            threads: self.run.time.threads,
            datapath: self.datapath,
            profile: self.shape.into_shaped(),
            peer: self.peer,
            max_loss: self.limits.max_loss,
            max_p99: self.limits.max_p99,
            ..udp::Config::default()
        };
        (config, self.run.time.json)
    }
}

fn stream_config(
    run: RunArgs,
    workload: Workload,
    clients: usize,
    rate: Rate,
    limits: LimitArgs,
) -> (stream::Config, Option<PathBuf>) {
    let config = stream::Config {
        server: run.server,
        clients,
        rate,
        duration: run.time.duration,
        warmup: run.time.warmup,
        threads: run.time.threads,
        max_loss: limits.max_loss,
        max_p99: limits.max_p99,
        ..stream::Config::new(workload)
    };
    (config, run.time.json)
}

pub(crate) const LOAD_TCP: &str = "\
Send bytes over TCP to `turnpike reflect`, or from it, straight or through a forwarder, as fast as they go.

Every byte is accounted for: if one is missing, the run fails. What the receiving side saw arrive within the measured time is \
recv_bps. A progress line appears on standard error each second.

The JSON result is that of all generators, with sent, received, send_pps and recv_pps in bytes, and to_server_bps, to_client_bps \
and generator_cpu_s besides.";

pub(crate) const LOAD_TCP_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running there, or behind the forwarder):
  turnpike load tcp 127.0.0.1
  turnpike load tcp 10.0.0.1:9000 -P 8 --duration 5 --json -
  turnpike load tcp 10.0.0.1:9000 --bidir --verify

Exit codes: 0 done, 1 failed, 2 bad usage.";

pub(crate) const LOAD_RR: &str = "\
Send requests over open TCP connections to `turnpike reflect`, straight or through a forwarder, and measure how long each response \
takes.

At rate \"max\" the loop is closed: a stall delays requests instead of counting against each of them. With a rate, latency counts \
from the moment a request was due, and requests that found no free connection to the end are told.

The JSON result is that of all generators, with transactions_per_s and generator_cpu_s besides.";

pub(crate) const LOAD_RR_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running there, or behind the forwarder):
  turnpike load rr 127.0.0.1
  turnpike load rr 10.0.0.1:9000 --clients 64 --size 32
  turnpike load rr 10.0.0.1:9000 --clients 64 --rate 20k --max-p99 500

Exit codes: 0 done, 1 failed, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";

pub(crate) const LOAD_CONNECT: &str = "\
Open TCP connections to `turnpike reflect`, straight or through a forwarder: connect, send a byte, receive a byte, close.

Latency is from the connect, or with a rate from the moment it was due, to the last byte received. A connection that fails is \
counted by its reason; when none has succeeded for 1.5 s the run fails.

The JSON result is that of all generators, with connections_per_s and generator_cpu_s besides.";

pub(crate) const LOAD_CONNECT_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running there, or behind the forwarder):
  turnpike load connect 127.0.0.1
  turnpike load connect 10.0.0.1:9000 --clients 32 --duration 5
  turnpike load connect 10.0.0.1:9000 --clients 32 --rate 2k --max-loss 0

Exit codes: 0 done, 1 failed, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";

pub(crate) const LOAD_UDP: &str = "\
Send datagrams to `turnpike reflect`, straight or through a forwarder, and measure what comes back.

As `load turn`, without TURN: round trips count from the moment a datagram was due, and where the generator itself was late, the \
result says so.

With --profile each client has a call, a conference or the like with a peer of the generator's own instead, in one thread: what is \
measured is latency and loss of each direction and stream. See docs/load.md.";

pub(crate) const LOAD_UDP_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running there, or behind the forwarder):
  turnpike load udp 127.0.0.1
  turnpike load udp 10.0.0.1:9000 --clients 64 --rate 100k --max-loss 0.1
  turnpike load udp 10.0.0.1:9000 --rate max --size 1200 --json -
  turnpike load udp 10.0.0.1:9000 --peer 10.0.0.9:9001 --clients 100 --profile vpn    (the forwarder leads to 10.0.0.9:9001)

Exit codes: 0 done, 1 failed, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";
