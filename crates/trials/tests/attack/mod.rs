//! What an attacker gets out of a server: nothing, with a credential or without one, by any way in and on any data path. Every test prints
//! rows of the tables in docs/dev/reliability.md, which `cargo xtask attack` collects.

mod access;
mod floods;
mod kept;
mod matrix;
mod newcomers;
mod peers;
mod strangers;
mod users;
mod wire;
mod witness;

use std::{
    env,
    fmt::Display,
    net::{IpAddr, SocketAddr},
};

use turnpike_trials::links::{Links, PEER, SERVER, Server, on_links};
use turnpike_trials::{Metrics, Program, Serve, V4, installed, skip};

/// By which clients come.
const TRANSPORTS: [&str; 4] = ["udp", "tcp", "tls", "dtls"];

/// Set by `cargo xtask attack`: as much as the tables say, and not only what each run of all tests has time for.
fn is_thorough() -> bool {
    env::var_os("TURNPIKE_TEST_ATTACK").is_some()
}

/// A row of one of the tables.
fn row(table: &str, cells: &[&dyn Display]) {
    let cells: Vec<String> = cells.iter().map(ToString::to_string).collect();
    println!("ATTACK {table} | {} |", cells.join(" | "));
}

/// Runs `body` by each data path that the kernel has, on links; without time for all, by the first. Says which it cannot.
fn by_each_in_the_kernel(test: &str, body: impl Fn(&Links, &str)) {
    on_links(test, |links| {
        body(links, "kernel");
        if is_thorough() {
            if let Err(why) = installed("ethtool") {
                return skip(&format!("data paths xdp and xdp-generic: {why}"));
            }
            links.behave_as_cards();
            body(links, "xdp");
            body(links, "xdp-generic");
        }
    });
}

/// A server, wherever it runs.
trait Asked {
    /// Where peers of witnesses are.
    const PEER: IpAddr;

    fn program(&mut self) -> &mut Program;

    fn metrics(&self) -> Metrics;

    /// Where it listens by `udp`, `tcp`, `tls` or `dtls`.
    fn at(&self, transport: &str) -> SocketAddr;

    /// Flows in the kernel, where it relays.
    fn flows(&self) -> Option<u64>;
}

impl Asked for Serve {
    /// An address that no attacker asks for.
    const PEER: IpAddr = witness::PEER;

    fn program(&mut self) -> &mut Program {
        &mut self.program
    }

    fn metrics(&self) -> Metrics {
        Self::metrics(self)
    }

    fn at(&self, transport: &str) -> SocketAddr {
        self.address_of(transport, V4)
    }

    fn flows(&self) -> Option<u64> {
        None
    }
}

impl Asked for Server<'_> {
    const PEER: IpAddr = PEER[0];

    fn program(&mut self) -> &mut Program {
        &mut self.program
    }

    fn metrics(&self) -> Metrics {
        Self::metrics(self)
    }

    fn at(&self, _transport: &str) -> SocketAddr {
        SocketAddr::new(SERVER[0], 3478)
    }

    fn flows(&self) -> Option<u64> {
        Some(self.metrics().sum("turnpike_kernel_flows", ""))
    }
}
