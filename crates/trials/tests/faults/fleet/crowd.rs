//! Clients over UDP, TCP and TLS through the balancer, each with a username of its own. A client that receives no data for a while creates
//! a new allocation through the balancer.

use serde_json::Value;

use super::{
    network::{FLEET, Network, PEERS},
    service::PASSWORD,
    visitors::STRANGERS,
};
use crate::faults::{crowd::Second, or_thorough, within};
use turnpike_trials::{Load, Program, SOON};

/// Datagrams per second of each client, in each direction.
const RATE: u32 = 2;

fn parts() -> [(&'static str, String, u32); 3] {
    let [udp, streams] = or_thorough([48, 6], [800, 100]);
    [
        ("udp", format!("turn:{FLEET}"), udp),
        ("tcp", format!("turn:{FLEET}?transport=tcp"), streams),
        ("tls", format!("turns:{FLEET}?transport=tcp"), streams),
    ]
}

pub(super) fn clients() -> u32 {
    parts().iter().map(|(_, _, count)| count).sum()
}

pub(super) fn newcomers() -> u32 {
    clients() / 5
}

pub(super) fn users() -> Vec<(&'static str, u32)> {
    let own = parts().into_iter().map(|(name, _, count)| (name, count));
    own.chain([("new", newcomers()), ("late", newcomers()), ("known", 1), ("stranger", STRANGERS)]).collect()
}

pub(super) struct Crowd(Vec<(&'static str, u32, Program)>);

pub(super) struct Seen {
    pub(super) transport: &'static str,
    result: Value,
}

impl Seen {
    #[expect(clippy::cast_possible_truncation, reason = "a count")]
    pub(super) fn count(&self, name: &str) -> u64 {
        self.result[name].as_f64().map_or(0, |value| value as u64)
    }

    pub(super) fn seconds(&self, name: &str) -> f64 {
        self.result[name].as_f64().unwrap_or_default() / 1e3
    }
}

impl Crowd {
    pub(super) fn begin(network: &Network, patience: &str) -> Self {
        let start = |(name, server, count): (&'static str, String, u32)| {
            let load = load(&server, name, count).with(&format!("--reconnect {patience} --insecure"));
            (name, count, load.start_in(&network.clients))
        };
        Self(parts().into_iter().map(start).collect())
    }

    pub(super) fn more(network: &Network, name: &'static str) -> Self {
        let load = load(&format!("turn:{FLEET}"), name, newcomers()).with("--reconnect 5");
        Self(vec![(name, newcomers(), load.start_in(&network.clients))])
    }

    pub(super) fn flows(&self) {
        for (name, count, load) in &self.0 {
            let seconds = || load.lines().iter().filter_map(|line| Second::of(line)).collect::<Vec<_>>();
            let begun = seconds().len();
            let all = 1.0 - 0.5 / f64::from(*count);
            within(SOON * 2, &format!("all clients over {name} receive data"), || {
                let is_whole = |second: &Second| second.sent > 0.0 && second.received >= second.sent * all;
                seconds().iter().skip(begun + 1).any(is_whole)
            });
        }
    }

    /// Ends the clients; asserts that none was silent at the end.
    pub(super) fn end(self) -> Vec<Seen> {
        self.0.iter().for_each(|(_, _, load)| load.signal("INT"));
        let ended = |(transport, _, load): (&'static str, u32, Program)| {
            let run = load.wait(SOON);
            let result = run.result();
            assert_eq!(result["clients_silent"], 0, "{}", run.output());
            Seen { transport, result }
        };
        self.0.into_iter().map(ended).collect()
    }
}

fn load(server: &str, name: &str, count: u32) -> Load {
    let (clients, rate) = (count.to_string(), (count * RATE).to_string());
    Load::at_as(server, &format!("{name}:{PASSWORD}"))
        .to(PEERS)
        .with(&format!("--users {clients} --clients {clients} --rate {rate} --warmup 0.5 --duration 600"))
}
