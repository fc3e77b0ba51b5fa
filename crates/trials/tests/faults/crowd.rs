//! Clients on calls: the generator runs both ends and detects every loss, and a client that receives nothing creates a new allocation, as
//! in real calls.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::{Server, or_thorough, within};
use turnpike_trials::{Load, PASSWORD, Program, SOON, USER};

/// Seconds without data after which a client reconnects; a busy machine alone never causes such a long gap.
const PATIENCE: &str = "2";

pub(super) struct Crowd {
    parts: Vec<Part>,
    peer: String,
    pub(super) clients: u32,
}

struct Part {
    transport: &'static str,
    profile: &'static str,
    clients: u32,
    asked: Load,
    load: Option<Program>,
}

impl Crowd {
    pub(super) fn of(server: &Server) -> Self {
        Self::of_user(server, &format!("{USER}:{PASSWORD}"))
    }

    pub(super) fn of_user(server: &Server, user: &str) -> Self {
        Self::usual(server.address, "127.0.0.1:0", PATIENCE, user)
    }

    pub(super) fn patient(server: &Server, seconds: &str) -> Self {
        Self::at(server.address, "127.0.0.1:0", seconds)
    }

    pub(super) fn at(server: SocketAddr, peer: &str, patience: &str) -> Self {
        Self::usual(server, peer, patience, &format!("{USER}:{PASSWORD}"))
    }

    /// Clients that only send voice, as single datagrams.
    pub(super) fn thin(server: SocketAddr, peer: &str, patience: &str) -> Self {
        let part = Part::new(
            server,
            peer,
            patience,
            &format!("{USER}:{PASSWORD}"),
            ("udp", "audio", or_thorough(6, 40)),
        );
        Self::new(vec![part], peer)
    }

    /// The default number of clients, with a third over each of TCP, TLS and DTLS.
    pub(super) fn secured(server: &Server) -> Self {
        let (peer, user) = ("127.0.0.1:0", format!("{USER}:{PASSWORD}"));
        let part = |transport| {
            let kind = (transport, or_thorough("audio", "call"), or_thorough(2, 7));
            Part::new(server.address, peer, PATIENCE, &user, kind)
        };
        Self::new(["tcp", "tls", "dtls"].map(part).into(), peer)
    }

    fn usual(server: SocketAddr, peer: &str, patience: &str, user: &str) -> Self {
        let kind = ("udp", or_thorough("audio", "call"), or_thorough(6, 20));
        Self::new(vec![Part::new(server, peer, patience, user, kind)], peer)
    }

    fn new(parts: Vec<Part>, peer: &str) -> Self {
        let clients = parts.iter().map(|part| part.clients).sum();
        Self { parts, peer: peer.to_owned(), clients }
    }

    pub(super) fn begin(&mut self, server: &Server) {
        let before = server.allocations();
        self.parts.iter_mut().for_each(|part| part.load = Some(part.asked.start()));
        within(SOON, "all clients are connected", || {
            server.allocations() >= before + u64::from(self.clients)
        });
        self.flows();
    }

    /// Waits until media flows for every client, from the per-second reports of both ends.
    pub(super) fn flows(&self) {
        for part in &self.parts {
            let load = part.load.as_ref().expect("the clients were started");
            let seconds = || load.lines().iter().filter_map(|line| Second::of(line)).collect::<Vec<_>>();
            let begun = seconds().len();
            // A single client that receives nothing lowers the ratio below this; the first, partial second is ignored.
            let whole = 1.0 - 0.5 / f64::from(part.clients);
            within(SOON * 3, "media flows for all clients", || {
                seconds()
                    .iter()
                    .skip(begun + 1)
                    .any(|second| second.sent > 0.0 && second.received >= second.sent * whole)
            });
        }
    }

    /// Ends the clients and returns the results; asserts that no client was silent at the end.
    pub(super) fn end(&mut self) -> Value {
        let loads = self
            .parts
            .iter_mut()
            .map(|part| (part.transport, part.load.take().expect("the clients were started")));
        let loads: Vec<_> = loads.collect();
        loads.iter().for_each(|(_, load)| load.signal("INT"));
        let seen = loads.into_iter().map(|(transport, load)| {
            let run = load.wait(SOON);
            let result = run.result();
            assert_eq!(result["clients_silent"], 0, "{}", run.output());
            assert_eq!(result["transport"], transport, "{}", run.output());
            result
        });
        together(seen.collect())
    }

    pub(super) fn control_calls(&self, server: &Server) -> Vec<Load> {
        let call = |part: &Part| {
            let load = Load::as_user(server.address, &format!("{USER}:{PASSWORD}"))
                .with_words(&[
                    "--profile",
                    part.profile,
                    "--clients",
                    "2",
                    "--duration",
                    or_thorough("1", "3"),
                ])
                .with_words(&["--max-loss", "0", "--warmup", "0.2", "--peer", &self.peer]);
            by(load, part.transport)
        };
        self.parts.iter().map(call).collect()
    }
}

impl Part {
    fn new(
        server: SocketAddr,
        peer: &str,
        patience: &str,
        user: &str,
        (transport, profile, clients): (&'static str, &'static str, u32),
    ) -> Self {
        let asked = Load::as_user(server, user).with(&format!("--profile {profile} --clients {clients} --peer {peer} --reconnect {patience} --warmup 0.2 --duration 600"));
        Self { transport, profile, clients, asked: by(asked, transport), load: None }
    }
}

fn by(load: Load, transport: &str) -> Load {
    let load = load.with(&format!("--transport {transport}"));
    if matches!(transport, "tls" | "dtls") { load.with("--insecure") } else { load }
}

fn together(mut parts: Vec<Value>) -> Value {
    const COUNTS: [&str; 5] = ["sent", "lost", "duplicated", "reordered", "returns_done"];
    if parts.len() == 1 {
        return parts.swap_remove(0);
    }
    let mut all = json!({});
    for name in COUNTS {
        let counts = parts.iter().map(|part| part[name].as_u64().expect("every result has the field"));
        all[name] = counts.sum::<u64>().into();
    }
    for name in ["pause_ms_p50", "pause_ms_max"] {
        let times = parts.iter().map(|part| part[name].as_f64().expect("every result has the field"));
        all[name] = times.fold(0.0, f64::max).into();
    }
    all["parts"] = parts.into();
    all
}

/// Numbers of datagrams that both ends together sent and received in a second.
pub(super) struct Second {
    pub(super) sent: f64,
    pub(super) received: f64,
}

impl Second {
    /// Parses a line such as `  12.0 s  sent 1,200/s  received 1,199/s  loss 0.08 %  p50 ...`.
    pub(super) fn of(line: &str) -> Option<Self> {
        let rate = |label: &str| {
            let (_, rest) = line.split_once(label)?;
            rest.split_once("/s")?.0.replace(',', "").parse().ok()
        };
        Some(Self { sent: rate(" sent ")?, received: rate(" received ")? })
    }
}
