//! Clients on calls: both ends are the generator's, so that what was lost is known, and each client that hears nothing for a while comes
//! back with another allocation, as calls do.

use std::net::SocketAddr;

use serde_json::Value;

use super::{Server, or_thorough, within};
use crate::harness::{Load, PASSWORD, Program, SOON, USER};

/// Silence after which a client comes back, in seconds: more than a busy machine makes by itself.
const PATIENCE: &str = "2";

pub(super) struct Crowd {
    load: Option<Program>,
    asked: Load,
    peer: String,
    pub(super) clients: u32,
}

impl Crowd {
    /// As many as usual, on loopback.
    pub(super) fn of(server: &Server) -> Self {
        Self::of_user(server, &format!("{USER}:{PASSWORD}"))
    }

    /// The same as another user.
    pub(super) fn of_user(server: &Server, user: &str) -> Self {
        Self::new(server.address, "127.0.0.1:0", PATIENCE, user)
    }

    /// The same that wait so many seconds before they come back.
    pub(super) fn patient(server: &Server, seconds: &str) -> Self {
        Self::at(server.address, "127.0.0.1:0", seconds)
    }

    /// To the server by this address, with peers at another one.
    pub(super) fn at(server: SocketAddr, peer: &str, patience: &str) -> Self {
        Self::new(server, peer, patience, &format!("{USER}:{PASSWORD}"))
    }

    fn new(server: SocketAddr, peer: &str, patience: &str, user: &str) -> Self {
        let profile = or_thorough("audio", "call");
        let clients: u32 = or_thorough(6, 20);
        let asked = Load::as_user(server, user).with(&[
            "--profile",
            profile,
            "--clients",
            &clients.to_string(),
            "--peer",
            peer,
            "--reconnect",
            patience,
            "--warmup",
            "0.2",
            "--duration",
            "600",
        ]);
        Self { load: None, asked, peer: peer.to_owned(), clients }
    }

    /// Where the peers are.
    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    /// Starts it, and waits until all have what they need.
    pub(super) fn begin(&mut self, server: &Server) {
        let before = server.allocations();
        self.load = Some(self.asked.start());
        within(SOON, "all clients are there", || server.allocations() >= before + u64::from(self.clients));
        self.flows();
    }

    /// Waits until media flows as it should, for all: by what the clients and their peers say each second.
    pub(super) fn flows(&self) {
        let load = self.load.as_ref().expect("it has begun");
        let seconds = || load.lines().iter().filter_map(|line| Second::of(line)).collect::<Vec<_>>();
        let begun = seconds().len();
        // Were one of them silent, it would be less; the second that had begun counts for nothing.
        let whole = 1.0 - 0.5 / f64::from(self.clients);
        within(SOON * 3, "media flows for all", || {
            seconds()
                .iter()
                .skip(begun + 1)
                .any(|second| second.sent > 0.0 && second.received >= second.sent * whole)
        });
    }

    /// Ends it: what it has seen. Nobody may be silent at the end.
    pub(super) fn end(&mut self) -> Value {
        let load = self.load.take().expect("it has begun");
        load.signal("INT");
        let run = load.wait(SOON);
        let result = run.result();
        assert_eq!(result["clients_silent"], 0, "{}", run.output());
        result
    }
}

/// What was sent and received in a second, by both ends.
pub(super) struct Second {
    pub(super) sent: f64,
    pub(super) received: f64,
}

impl Second {
    /// A line such as `  12.0 s  sent 1,200/s  received 1,199/s  loss 0.08 %  p50 ...`.
    pub(super) fn of(line: &str) -> Option<Self> {
        let rate = |label: &str| {
            let (_, rest) = line.split_once(label)?;
            rest.split_once("/s")?.0.replace(',', "").parse().ok()
        };
        Some(Self { sent: rate(" sent ")?, received: rate(" received ")? })
    }
}
