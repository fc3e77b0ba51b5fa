//! Clients on calls: both ends are the generator's, so that what was lost is known, and each client that hears nothing for a while comes
//! back with another allocation, as calls do.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{Server, or_thorough, within};
use crate::harness::{Load, PASSWORD, Program, SOON, USER};

/// Datagrams that a client of the profile gets a second, less what chance takes of them.
const AUDIO: f64 = 50.0;
const CALL: f64 = 200.0;

pub(super) struct Crowd {
    load: Option<Program>,
    asked: Load,
    peer: String,
    pub(super) clients: u64,
    /// Datagrams a second below which one of them gets none.
    least: f64,
}

impl Crowd {
    /// As many as usual, on loopback.
    pub(super) fn of(server: &Server) -> Self {
        Self::of_user(server, &format!("{USER}:{PASSWORD}"))
    }

    /// The same as another user.
    pub(super) fn of_user(server: &Server, user: &str) -> Self {
        Self::new(server.address, "127.0.0.1:0", "1", user)
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
        let (profile, rate) = or_thorough(("audio", AUDIO), ("call", CALL));
        let clients: u32 = or_thorough(6, 20);
        let asked = Load::as_user(server, user).with(&[
            "--profile",
            profile,
            "--clients",
            &clients.to_string(),
            "--peer",
            peer,
            "--return",
            patience,
            "--warmup",
            "0.2",
            "--duration",
            "600",
        ]);
        let least = rate * (f64::from(clients) - 0.5);
        Self { load: None, asked, peer: peer.to_owned(), clients: clients.into(), least }
    }

    /// Where the peers are.
    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    /// Starts it, and waits until all have what they need.
    pub(super) fn begin(&mut self, server: &Server) {
        let before = server.allocations();
        self.load = Some(self.asked.start());
        within(SOON, "all clients are there", || server.allocations() >= before + self.clients);
        self.flows(server);
    }

    /// Waits until media flows as it should, for all.
    pub(super) fn flows(&self, server: &Server) {
        let mut last = (Instant::now(), server.relayed());
        within(SOON * 3, "media flows for all", || {
            thread::sleep(Duration::from_millis(950));
            let now = (Instant::now(), server.relayed());
            let relayed = u32::try_from(now.1.saturating_sub(last.1)).map_or(0.0, f64::from);
            let rate = relayed / (now.0 - last.0).as_secs_f64();
            last = now;
            rate >= self.least
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
