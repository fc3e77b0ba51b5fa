//! Settings shared by several generators. Each is both a flag of `turnpike load` and a field of the run's
//! configuration.

use std::{
    net::{SocketAddr, ToSocketAddrs as _},
    num::ParseFloatError,
    path::PathBuf,
    time::Duration,
};

use clap::{Args, Command};
use turnpike_measure::OfferedRate;
use turnpike_wire::address::{ZonedIp, socket_address};

use crate::{reflect::DEFAULT_PORT, traffic::echo::EchoPlan};

#[derive(Clone, Debug, Args)]
pub struct RunOptions {
    /// Measured time in seconds, above 0
    #[arg(long, value_name = "S", default_value = "10", value_parser = seconds)]
    pub duration: Duration,

    /// Seconds of uncounted traffic before the measurement
    #[arg(long, value_name = "S", default_value = "1", value_parser = seconds)]
    pub warmup: Duration,

    /// Threads, 1 to 1024 [default: one per core, at most one per client]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Write the result as one JSON object to FILE, "-" for standard output
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, Args)]
pub struct ResultLimits {
    /// Exit with code 3 if more than PCT percent are lost, 0 to 100
    #[arg(long, value_name = "PCT", value_parser = percent)]
    pub max_loss: Option<f64>,

    /// Exit with code 3 if the 99th percentile of the latency is above US microseconds
    #[arg(long, value_name = "US")]
    pub max_p99: Option<u64>,
}

#[derive(Clone, Copy, Debug, Args)]
pub struct BurstOptions {
    /// Datagrams that a client sends back to back, 1 to 64 [default: 1 at a fixed rate, 32 at "max"]
    #[arg(long, value_name = "N")]
    pub burst: Option<usize>,

    /// With rate "max": maximum datagrams in flight per client, at least one burst; bursts that fit may be
    /// sent together [default: unlimited, a flood]
    #[arg(long, value_name = "N")]
    pub window: Option<u64>,
}

impl BurstOptions {
    pub(crate) fn plan(self, clients: usize, rate: OfferedRate, size: usize) -> EchoPlan {
        const FLOOD: usize = 32;
        let burst = self.burst.unwrap_or(if rate == OfferedRate::Max { FLOOD } else { 1 });
        EchoPlan { clients, rate, size, burst, window: self.window }
    }
}

/// Parses flags separated by spaces; other settings keep their defaults.
pub fn parse<A: Args>(flags: &str) -> Result<A, clap::Error> {
    let command = A::augment_args(Command::new("load").no_binary_name(true).args_override_self(true));
    A::from_arg_matches(&command.try_get_matches_from(flags.split_whitespace())?)
}

pub(crate) fn defaults<A: Args>(server: SocketAddr) -> A {
    parse(&server.to_string()).unwrap_or_else(|error| unreachable!("an address alone is valid: {error}"))
}

/// Parses a number of seconds; at most a year.
pub fn seconds(text: &str) -> Result<Duration, String> {
    const MOST: u64 = 365 * 86_400;
    let seconds: f64 = text.parse().map_err(|error: ParseFloatError| format!("expected seconds: {error}"))?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| *duration <= Duration::from_secs(MOST))
        .ok_or_else(|| format!("expected seconds, 0 to {MOST} (a year)"))
}

fn percent(text: &str) -> Result<f64, &'static str> {
    text.parse()
        .ok()
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or("expected a number from 0 to 100")
}

/// Parses HOST or HOST:PORT; the default port is the reflector's.
pub(crate) fn reflector(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse::<ZonedIp>() {
        return Ok(address.at(DEFAULT_PORT));
    }
    let text = if text.contains(':') { text.to_owned() } else { format!("{text}:{DEFAULT_PORT}") };
    resolve(&text).map_err(|error| error.replace("ADDR:PORT", "HOST or HOST:PORT"))
}

pub(crate) fn resolve(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = socket_address(text) {
        return Ok(address);
    }
    let mut found = text.to_socket_addrs().map_err(|error| format!("expected ADDR:PORT: {error}"))?;
    found.next().ok_or_else(|| "the name does not resolve to an address".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_port_is_that_of_the_reflector() {
        for (text, expected) in [
            ("127.0.0.1", "127.0.0.1:3480"),
            ("127.0.0.1:9000", "127.0.0.1:9000"),
            ("::1", "[::1]:3480"),
            ("[::1]:9000", "[::1]:9000"),
        ] {
            assert_eq!(reflector(text).map(|address| address.to_string()), Ok(expected.to_owned()));
        }
        assert!(reflector("127.0.0.1:port").is_err() && reflector("").is_err());
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
