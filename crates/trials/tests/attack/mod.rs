//! Attacks on a server, with and without a credential, over every transport and data path; none may succeed. Every test prints rows for the
//! tables in docs/dev/reliability.md, which `cargo xtask attack` collects.

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

const TRANSPORTS: [&str; 4] = ["udp", "tcp", "tls", "dtls"];

/// True if `cargo xtask attack` runs the tests in full for the tables, not just a quick version.
fn is_thorough() -> bool {
    env::var_os("TURNPIKE_TEST_ATTACK").is_some()
}

fn row(table: &str, cells: &[&dyn Display]) {
    let cells: Vec<String> = cells.iter().map(ToString::to_string).collect();
    println!("ATTACK {table} | {} |", cells.join(" | "));
}

/// Runs `body` on links for each kernel data path, or only for the first one in a quick run. Data paths that are not supported here are
/// printed.
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

trait Asked {
    const PEER: IpAddr;

    fn program(&mut self) -> &mut Program;

    fn metrics(&self) -> Metrics;

    fn at(&self, transport: &str) -> SocketAddr;

    fn flows(&self) -> Option<u64>;
}

impl Asked for Serve {
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
