//! What a TCP run is told.

use std::{net::SocketAddr, time::Duration};

use strum::{Display, EnumString, VariantNames};
use turnpike_client::UnknownName;
use turnpike_measure::Rate;

use crate::{
    LoadError,
    greeting::{MAX_SIZE, Mode},
    reflect::DEFAULT_PORT,
    run,
};

/// Settings of `load tcp`, `load rr` and `load connect`. [`Config::new`] holds the documented defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// The reflector, or a forwarder to it. Default 127.0.0.1:3480.
    pub server: SocketAddr,
    /// What is done.
    pub workload: Workload,
    /// Connections at a time, 1 to 10,000; in bulk, streams each way. Default 1.
    pub clients: usize,
    /// Requests, or connections, a second over all clients; open loop: what is due waits for nothing but a free client, and
    /// the wait counts. Default [`Rate::Max`], a closed loop. Bulk knows only that.
    pub rate: Rate,
    /// Measured time. Default 10 s.
    pub duration: Duration,
    /// Traffic before it that is not counted. Default 1 s.
    pub warmup: Duration,
    /// Threads. Default: one per core that this process may use, but no more than connections.
    pub threads: Option<usize>,
    /// Loss in percent above which the outcome says that a limit was exceeded. Bulk loses nothing, or fails.
    pub max_loss: Option<f64>,
    /// p99 of request or connection in microseconds above which it does.
    pub max_p99: Option<u64>,
    /// How long anything may take that must happen: an answer to a connection attempt or a greeting, and in bulk the next
    /// byte. Default 5 s.
    pub timeout: Duration,
}

/// What is done with connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// As many bytes as go.
    Bulk {
        /// Which way.
        direction: Direction,
        /// Bytes of a write, 1 to 1 MiB.
        block: usize,
        /// Compare every byte with what was sent.
        verify: bool,
        /// Receivers let the kernel throw bytes away instead of copying them: less CPU for what is not measured.
        skip_rx_copy: bool,
    },
    /// Requests and responses on open connections, one outstanding on each.
    Exchange {
        /// Bytes of a request, 1 to 1 MiB.
        request: usize,
        /// Bytes of its response, 1 to 1 MiB.
        response: usize,
    },
    /// A connection for each request and response.
    Connect {
        /// Bytes of the request, 1 to 1 MiB; a greeting of 16 bytes goes before it.
        request: usize,
        /// Bytes of the response, 1 to 1 MiB.
        response: usize,
        /// How it ends.
        close: Close,
    },
}

/// Where bulk goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// From the generator to the reflector.
    #[default]
    ToServer,
    /// The other way.
    ToClient,
    /// Both, on connections of their own.
    Both,
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
    pub const MAX_CLIENTS: usize = 10_000;
    /// The longest request, response or block.
    pub const MAX_SIZE: usize = MAX_SIZE;

    /// The defaults, for one workload.
    pub fn new(workload: Workload) -> Self {
        Self {
            server: SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)),
            workload,
            clients: 1,
            rate: Rate::Max,
            duration: Duration::from_secs(10),
            warmup: Duration::from_secs(1),
            threads: None,
            max_loss: None,
            max_p99: None,
            timeout: Duration::from_secs(5),
        }
    }

    /// Says what is impossible about these settings.
    ///
    /// # Errors
    /// With the first flag that is out of range.
    pub fn validate(&self) -> Result<(), LoadError> {
        let (clients, second) = match self.workload {
            Workload::Bulk { .. } => ("--parallel", 1),
            Workload::Exchange { response, .. } | Workload::Connect { response, .. } => {
                ("--clients", response)
            }
        };
        let numbers = [
            (clients, self.clients, 1..=Self::MAX_CLIENTS),
            ("--size", self.size(), 1..=MAX_SIZE),
            ("--response", second, 1..=MAX_SIZE),
        ];
        run::check(&numbers, self.threads, self.duration)?;
        if let Workload::Bulk { verify: true, skip_rx_copy: true, .. } = self.workload {
            return Err(LoadError::Config(
                "--verify looks at bytes that --skip-rx-copy throws away".to_owned(),
            ));
        }
        if let (Workload::Bulk { .. }, Rate::Pps(_)) = (self.workload, self.rate) {
            return Err(LoadError::Config("bulk has no --rate: it takes what it gets".to_owned()));
        }
        Ok(())
    }

    /// Connections at a time.
    pub fn connections(&self) -> usize {
        let both = matches!(self.workload, Workload::Bulk { direction: Direction::Both, .. });
        if both { self.clients * 2 } else { self.clients }
    }

    /// Threads to start.
    pub fn threads(&self) -> usize {
        run::threads(self.threads, self.connections())
    }

    /// Bytes of a write or a request.
    pub(crate) fn size(&self) -> usize {
        match self.workload {
            Workload::Bulk { block, .. } => block,
            Workload::Exchange { request, .. } | Workload::Connect { request, .. } => request,
        }
    }

    /// What connection `number` of the run asks the reflector for.
    pub(crate) fn mode(&self, number: usize) -> Mode {
        match self.workload {
            Workload::Bulk { direction, block, verify, skip_rx_copy } => {
                // Every other one, so that each thread has both kinds.
                let to_server = match direction {
                    Direction::ToServer => true,
                    Direction::ToClient => false,
                    Direction::Both => number.is_multiple_of(2),
                };
                if to_server { Mode::Sink { verify, discard: skip_rx_copy } } else { Mode::Source { block } }
            }
            Workload::Exchange { request, response } => Mode::Exchange { request, response },
            Workload::Connect { request, response, close } => {
                Mode::Connect { request, response, client_closes: close != Close::Server }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_settings_name_the_flag() {
        let bulk = |block, verify, skip_rx_copy| {
            Config::new(Workload::Bulk { direction: Direction::Both, block, verify, skip_rx_copy })
        };
        let rr = |request, response| Config::new(Workload::Exchange { request, response });
        for (config, flag) in [
            (Config { clients: 0, ..bulk(1, false, false) }, "--parallel"),
            (Config { clients: 10_001, ..rr(1, 1) }, "--clients"),
            (bulk(0, false, false), "--size"),
            (bulk(MAX_SIZE + 1, false, false), "--size"),
            (bulk(1, true, true), "--verify"),
            (Config { rate: Rate::Pps(1.0), ..bulk(1, false, false) }, "--rate"),
            (rr(0, 1), "--size"),
            (rr(1, 0), "--response"),
            (Config { threads: Some(0), ..rr(1, 1) }, "--threads"),
            (Config { duration: Duration::ZERO, ..rr(1, 1) }, "--duration"),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(flag), "{flag}: {error}");
        }
        bulk(1, true, false).validate().unwrap();
        rr(1, MAX_SIZE).validate().unwrap();
    }
}
