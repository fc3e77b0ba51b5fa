//! Settings and flags of `load tcp`, `load rr` and `load connect`.

use std::{net::SocketAddr, time::Duration};

use clap::Args;
use strum::{Display, EnumString, VariantNames};
use turnpike_client::UnknownName;
use turnpike_measure::OfferedRate;

use crate::{
    LoadError,
    greeting::{MAX_SIZE, StreamMode},
    options::{self, ResultLimits, RunOptions},
    run,
};

#[derive(Clone, Debug)]
pub struct StreamLoadConfig {
    pub target: StreamTarget,
    pub workload: Workload,
    /// Timeout for connecting, for the greeting and, in bulk transfers, for the next byte: 5 s.
    pub timeout: Duration,
}

#[derive(Clone, Debug, Args)]
pub struct StreamTarget {
    /// A `turnpike reflect`, or a forwarder to one: HOST[:PORT], default port 3480
    #[arg(value_name = "HOST:PORT", value_parser = options::reflector)]
    pub server: SocketAddr,

    #[command(flatten)]
    pub run: RunOptions,
}

#[derive(Clone, Copy, Debug)]
pub enum Workload {
    Bulk(BulkLoad),
    Exchange(ExchangeLoad),
    Connect(ConnectLoad),
}

#[derive(Clone, Copy, Debug, Args)]
pub struct BulkLoad {
    /// Streams, one connection each, 1 to 10000; with --bidir, this many in each direction
    #[arg(short = 'P', long = "parallel", visible_alias = "clients", value_name = "N", default_value_t = 1)]
    pub clients: usize,

    /// The reflector sends, the generator receives
    #[arg(short = 'R', long)]
    pub reverse: bool,

    /// Both directions at once, on separate connections
    #[arg(long, conflicts_with = "reverse")]
    pub bidir: bool,

    /// Bytes per write, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 131_072)]
    pub size: usize,

    /// Compare every received byte with the data sent; costs the receiver CPU time
    #[arg(long)]
    pub verify: bool,

    /// Let the kernel discard received bytes instead of copying them, so that both ends use less CPU
    #[arg(long)]
    pub skip_rx_copy: bool,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct ExchangeLoad {
    /// Connections, with one outstanding request each, 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub clients: usize,

    /// Bytes per request, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 32)]
    pub size: usize,

    /// Bytes per response, 1 to 1048576 [default: same as --size]
    #[arg(long, value_name = "B")]
    pub response: Option<usize>,

    /// Requests per second across all connections, open loop, such as 20000 or 20k; "max" sends the next request once the last one has
    /// been answered (closed loop)
    #[arg(long, value_name = "N|max", default_value = "max")]
    pub rate: OfferedRate,

    #[command(flatten)]
    pub limits: ResultLimits,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct ConnectLoad {
    /// Concurrent connections, 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub clients: usize,

    /// Bytes that each connection sends after a 16-byte greeting, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 1)]
    pub size: usize,

    /// Bytes that each connection receives, 1 to 1048576
    #[arg(long, value_name = "B", default_value_t = 1)]
    pub response: usize,

    /// Side that closes first: "server", "client", or "reset" for a client that resets the connection. The side that closes
    /// first keeps the port pair for 60 s (TIME_WAIT, except after a reset), and a client has only 28,000
    /// ports
    #[arg(long, value_name = "WHO", default_value_t = Close::Server)]
    pub close: Close,

    /// Connections per second across all clients, open loop, such as 2000 or 2k; "max" opens the next connection once the last one has
    /// been closed (closed loop)
    #[arg(long, value_name = "N|max", default_value = "max")]
    pub rate: OfferedRate,

    #[command(flatten)]
    pub limits: ResultLimits,
}

/// Side that closes first. That side keeps the address pair for 60 s (TIME_WAIT); a client has 28,000 ports
/// per server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownName, parse_err_fn = UnknownName::of::<Self>)]
pub enum Close {
    #[default]
    Server,
    Client,
    /// The client closes with a reset (SO_LINGER 0), so neither side enters TIME_WAIT.
    Reset,
}

impl StreamLoadConfig {
    /// Maximum connections per run and direction.
    pub(crate) const MAX_CLIENTS: usize = 10_000;

    pub fn new(target: StreamTarget, workload: Workload) -> Self {
        Self { target, workload, timeout: Duration::from_secs(5) }
    }

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
                "--verify needs the bytes that --skip-rx-copy discards".to_owned(),
            ));
        }
        Ok(())
    }

    pub(crate) fn clients(&self) -> usize {
        match self.workload {
            Workload::Bulk(BulkLoad { clients, .. })
            | Workload::Exchange(ExchangeLoad { clients, .. })
            | Workload::Connect(ConnectLoad { clients, .. }) => clients,
        }
    }

    pub(crate) fn connections(&self) -> usize {
        let both = matches!(self.workload, Workload::Bulk(BulkLoad { bidir: true, .. }));
        if both { self.clients() * 2 } else { self.clients() }
    }

    /// Offered rate, and limits on the result. A due request is never lost, because it waits for a free client, which adds to its latency.
    /// Bulk transfers have neither a rate nor losses.
    pub(crate) fn rate_and_limits(&self) -> (OfferedRate, ResultLimits) {
        match self.workload {
            Workload::Bulk(_) => (OfferedRate::Max, ResultLimits::default()),
            Workload::Exchange(ExchangeLoad { rate, limits, .. })
            | Workload::Connect(ConnectLoad { rate, limits, .. }) => (rate, limits),
        }
    }

    pub(crate) fn size(&self) -> usize {
        match self.workload {
            Workload::Bulk(BulkLoad { size, .. })
            | Workload::Exchange(ExchangeLoad { size, .. })
            | Workload::Connect(ConnectLoad { size, .. }) => size,
        }
    }

    pub(crate) fn mode(&self, number: usize) -> StreamMode {
        match self.workload {
            Workload::Bulk(BulkLoad { reverse, bidir, size, verify, skip_rx_copy, .. }) => {
                // Directions alternate, so that each thread has both.
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
            StreamLoadConfig::new(target, workload.map_err(|error| error.to_string())?)
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
