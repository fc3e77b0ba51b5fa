//! Settings of `load tcp`, `load rr` and `load connect`, which are their flags.

use std::{net::SocketAddr, time::Duration};

use clap::Args;
use strum::{Display, EnumString, VariantNames};
use turnpike_client::UnknownName;
use turnpike_measure::Rate;

use crate::{
    LoadError,
    greeting::{MAX_SIZE, StreamMode},
    options::{self, ResultLimits, RunOptions},
    run,
};

/// Settings of a TCP run.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where it goes, and for how long.
    pub target: StreamTarget,
    /// What is done.
    pub workload: Workload,
    /// How long anything may take that must happen: an answer to a connection attempt or a greeting, and in bulk the next
    /// byte. 5 s.
    pub timeout: Duration,
}

/// Where the connections go, and for how long.
#[derive(Clone, Debug, Args)]
pub struct StreamTarget {
    /// A `turnpike reflect`, or a forwarder to one: HOST[:PORT], port 3480 by default
    #[arg(value_name = "HOST:PORT", value_parser = options::reflector)]
    pub server: SocketAddr,

    /// How long, and by how many threads.
    #[command(flatten)]
    pub run: RunOptions,
}

/// What is done with connections.
#[derive(Clone, Copy, Debug)]
pub enum Workload {
    /// As many bytes as go.
    Bulk(BulkLoad),
    /// Requests and responses on open connections, one outstanding on each.
    Exchange(ExchangeLoad),
    /// A connection for each request and response.
    Connect(ConnectLoad),
}

/// Flags of `load tcp`.
#[derive(Clone, Copy, Debug, Args)]
pub struct BulkLoad {
    /// Streams, each a connection of its own, 1 to 10000; with --bidir as many each way
    #[arg(short = 'P', long = "parallel", visible_alias = "clients", value_name = "N", default_value_t = 1)]
    pub clients: usize,

    /// The reflector sends, the generator receives
    #[arg(short = 'R', long)]
    pub reverse: bool,

    /// Both directions at once, on connections of their own
    #[arg(long, conflicts_with = "reverse")]
    pub bidir: bool,

    /// Bytes of a write, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 131_072)]
    pub size: usize,

    /// Compare every byte that arrives with what was sent; costs the receiver CPU
    #[arg(long)]
    pub verify: bool,

    /// Receivers let the kernel throw the bytes away instead of copying them, so that the far ends cost less CPU
    #[arg(long)]
    pub skip_rx_copy: bool,
}

/// Flags of `load rr`.
#[derive(Clone, Copy, Debug, Args)]
pub struct ExchangeLoad {
    /// Connections, with one request outstanding on each, 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub clients: usize,

    /// Bytes of a request, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 32)]
    pub size: usize,

    /// Bytes of its response, 1 to 1048576 [default: as --size]
    #[arg(long, value_name = "B")]
    pub response: Option<usize>,

    /// Requests a second over all connections, open loop, such as 20000 or 20k; "max" sends each as soon as the last is
    /// answered (closed loop)
    #[arg(long, value_name = "N|max", default_value = "max")]
    pub rate: Rate,

    /// Limits of the result.
    #[command(flatten)]
    pub limits: ResultLimits,
}

/// Flags of `load connect`.
#[derive(Clone, Copy, Debug, Args)]
pub struct ConnectLoad {
    /// Connections at once, 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub clients: usize,

    /// Bytes that each sends, after a greeting of 16, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 1)]
    pub size: usize,

    /// Bytes that each receives, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 1)]
    pub response: usize,

    /// Who closes first: "server", "client", or the client by "reset". Whoever does keeps the port pair for 60 s after
    /// (TIME_WAIT, but for a reset), and a client has 28,000
    #[arg(long, value_name = "WHO", default_value_t = Close::Server)]
    pub close: Close,

    /// Connections a second over all clients, open loop, such as 2000 or 2k; "max" opens each as soon as the last is
    /// closed (closed loop)
    #[arg(long, value_name = "N|max", default_value = "max")]
    pub rate: Rate,

    /// Limits of the result.
    #[command(flatten)]
    pub limits: ResultLimits,
}

/// Who closes a connection of `load connect` first. The first to close keeps the address pair for 60 s (TIME_WAIT), and a
/// client, or a forwarder that passes on what it sees, has only 28,000 local ports for one server address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownName, parse_err_fn = UnknownName::of::<Self>)]
pub enum Close {
    /// The server: lasts as long as one likes.
    #[default]
    Server,
    /// The client.
    Client,
    /// The client, with a reset (SO_LINGER 0), which leaves nothing behind.
    Reset,
}

impl Config {
    /// The most connections of one run, each way.
    pub(crate) const MAX_CLIENTS: usize = 10_000;

    /// `workload` at `target`.
    pub fn new(target: StreamTarget, workload: Workload) -> Self {
        Self { target, workload, timeout: Duration::from_secs(5) }
    }

    /// Says what is impossible about these settings.
    pub(crate) fn validate(&self) -> Result<(), LoadError> {
        let (clients, response) = match self.workload {
            Workload::Bulk(_) => ("--parallel", 1),
            Workload::Exchange(exchange) => ("--clients", exchange.response()),
            Workload::Connect(connect) => ("--clients", connect.response),
        };
        let numbers = [
            (clients, self.clients(), 1..=Self::MAX_CLIENTS),
            ("--size", self.size(), 1..=MAX_SIZE),
            ("--response", response, 1..=MAX_SIZE),
        ];
        run::check(&numbers, self.target.run.threads, self.target.run.duration)?;
        if let Workload::Bulk(BulkLoad { verify: true, skip_rx_copy: true, .. }) = self.workload {
            return Err(LoadError::Config(
                "--verify looks at bytes that --skip-rx-copy throws away".to_owned(),
            ));
        }
        Ok(())
    }

    /// Connections at a time; in bulk, streams each way.
    pub(crate) fn clients(&self) -> usize {
        match self.workload {
            Workload::Bulk(BulkLoad { clients, .. })
            | Workload::Exchange(ExchangeLoad { clients, .. })
            | Workload::Connect(ConnectLoad { clients, .. }) => clients,
        }
    }

    /// Connections at a time, both ways together.
    pub(crate) fn connections(&self) -> usize {
        let both = matches!(self.workload, Workload::Bulk(BulkLoad { bidir: true, .. }));
        if both { self.clients() * 2 } else { self.clients() }
    }

    /// Offered load: what is due waits for nothing but a free client, and the wait counts. Bulk takes what it gets, and loses nothing.
    pub(crate) fn rate_and_limits(&self) -> (Rate, ResultLimits) {
        match self.workload {
            Workload::Bulk(_) => (Rate::Max, ResultLimits::default()),
            Workload::Exchange(ExchangeLoad { rate, limits, .. })
            | Workload::Connect(ConnectLoad { rate, limits, .. }) => (rate, limits),
        }
    }

    /// Bytes of a write or a request.
    pub(crate) fn size(&self) -> usize {
        match self.workload {
            Workload::Bulk(BulkLoad { size, .. })
            | Workload::Exchange(ExchangeLoad { size, .. })
            | Workload::Connect(ConnectLoad { size, .. }) => size,
        }
    }

    /// What connection `number` of the run asks the reflector for.
    pub(crate) fn mode(&self, number: usize) -> StreamMode {
        match self.workload {
            Workload::Bulk(BulkLoad { reverse, bidir, size, verify, skip_rx_copy, .. }) => {
                // Every other one, so that each thread has both kinds.
                let to_server = if bidir { number.is_multiple_of(2) } else { !reverse };
                if to_server {
                    StreamMode::Sink { verify, discard: skip_rx_copy }
                } else {
                    StreamMode::Source { block: size }
                }
            }
            Workload::Exchange(exchange) => {
                StreamMode::Exchange { request: exchange.size, response: exchange.response() }
            }
            Workload::Connect(ConnectLoad { size, response, close, .. }) => {
                StreamMode::Connect { request: size, response, client_closes: close != Close::Server }
            }
        }
    }
}

impl ExchangeLoad {
    /// Bytes of a response.
    pub(crate) fn response(&self) -> usize {
        self.response.unwrap_or(self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_settings_name_the_flag() {
        let bulk = |flags: &str| options::parse(flags).map(Workload::Bulk);
        let exchange = |flags: &str| options::parse(flags).map(Workload::Exchange);
        let connect = |flags: &str| options::parse(flags).map(Workload::Connect);
        let check = |run: &str, workload: Result<Workload, clap::Error>| {
            let target = options::parse(&format!("127.0.0.1 {run}")).expect(run);
            Config::new(target, workload.map_err(|error| error.to_string())?)
                .validate()
                .map_err(|error| error.to_string())
        };
        for (run, workload, told) in [
            ("", bulk("-P 0"), "--parallel"),
            ("", exchange("--clients 10001"), "--clients"),
            ("", bulk("--size 0"), "--size"),
            ("", bulk("--size 1048577"), "--size"),
            ("", bulk("--verify --skip-rx-copy"), "--verify"),
            ("", bulk("--rate 1"), "--rate"),
            ("", bulk("--reverse --bidir"), "--bidir"),
            ("", exchange("--size 0"), "--size"),
            ("", exchange("--response 0"), "--response"),
            ("", connect("--close nobody"), "server, client or reset"),
            ("--threads 0", connect(""), "--threads"),
            ("--duration 0", exchange(""), "--duration"),
        ] {
            let error = check(run, workload).expect_err(told);
            assert!(error.contains(told), "{told}: {error}");
        }
        assert_eq!(check("", bulk("--verify")), Ok(()));
        assert_eq!(check("", exchange("--size 1 --response 1048576")), Ok(()));
    }
}
