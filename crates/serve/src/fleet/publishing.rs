//! Publishes allocations in Redis the way coturn does, on the channels `turn/realm/REALM/user/NAME/allocation/ID/` followed by
//! `status`, `traffic`, `traffic/peer`, `total_traffic` or `total_traffic/peer`.
//!
//! ```text
//!  workers: begin and end of allocations ──────┐
//!  control thread: all allocations, every 10 s ┴─▶ lines ──▶ PUBLISH; a status is also a key until it expires
//! ```

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{sleep_until, timeout_at},
};
use turnpike_relay::{
    AllocationLog,
    allocations::{AllocationFilter, AllocationSnapshot, Look, SLICE_ALLOCATIONS},
};
use turnpike_turn::server::{AllocationId, Effect};

use super::node::OwnNode;
use turnpike_process::log_queue::BACKLOG;

/// Interval between scans for traffic and refreshes.
const PERIOD: Duration = Duration::from_secs(10);
const LINES: usize = 500;
/// Minimum increase of the expiry that counts as a refresh; a smaller increase is clock noise.
const RENEWED_MS: u64 = 5000;

/// Channel, line, and seconds for which to keep the line as a key: `None` only publishes it, 0 deletes the
/// key.
type PublishedLine = (String, String, Option<u64>);

pub(crate) struct StatusLines {
    sender: mpsc::Sender<PublishedLine>,
    node: Arc<OwnNode>,
    /// Approximate start of the workers' clock.
    began: Instant,
}

pub(crate) struct StatusWriter {
    receiver: mpsc::Receiver<PublishedLine>,
    node: Arc<OwnNode>,
}

pub(super) fn status_lines(node: Arc<OwnNode>) -> (StatusLines, StatusWriter) {
    let (sender, receiver) = mpsc::channel(BACKLOG);
    let lines = StatusLines { sender, node: Arc::clone(&node), began: Instant::now() };
    (lines, StatusWriter { receiver, node })
}

impl AllocationLog for StatusLines {
    fn effect(&self, _: usize, effect: &Effect) {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        for line in lines_of(effect, now_ms) {
            if self.sender.try_send(line).is_err() {
                self.node.tallies.lines_lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

fn lines_of(effect: &Effect, now_ms: u64) -> Vec<PublishedLine> {
    match effect {
        Effect::Opened { id, realm, username, expires_ms, .. } => {
            let lifetime = expires_ms.saturating_sub(now_ms).div_ceil(1000).max(1);
            vec![(place(realm, username, *id, "status"), format!("new lifetime={lifetime}"), Some(lifetime))]
        }
        Effect::Closed { id, realm, username, to_peer, to_client, relayed, .. } => {
            // An allocation without a relayed address has not been published.
            if relayed.iter().flatten().next().is_none() {
                return Vec::new();
            }
            let mut lines = traffic(realm, username, *id, "total_traffic", *to_peer, *to_client);
            lines.push((place(realm, username, *id, "status"), "deleted".to_owned(), Some(0)));
            lines
        }
        _ => Vec::new(),
    }
}

/// Name of coturn's channel, with the unescaped realm and user, and an 18-digit number.
fn place(realm: &str, user: &str, id: AllocationId, what: &str) -> String {
    let digits = u128::from_str_radix(&id.to_string(), 16).unwrap_or_default() % 1_000_000_000_000_000_000;
    format!("turn/realm/{realm}/user/{user}/allocation/{digits:018}/{what}")
}

/// Packets and bytes received from and sent to the client, and the same for the peers on the `/peer` channel.
fn traffic(
    realm: &str,
    user: &str,
    id: AllocationId,
    what: &str,
    to_peer: (u64, u64),
    to_client: (u64, u64),
) -> Vec<PublishedLine> {
    let line = |(received, received_bytes): (u64, u64), (sent, sent_bytes): (u64, u64)| {
        format!("rcvp={received}, rcvb={received_bytes}, sentp={sent}, sentb={sent_bytes}")
    };
    let own = place(realm, user, id, what);
    let twin = format!("{own}/peer");
    vec![(own, line(to_peer, to_client), None), (twin, line(to_client, to_peer), None)]
}

struct PublishedState {
    expires: Instant,
    to_peer: (u64, u64),
    to_client: (u64, u64),
    round: u64,
}

#[derive(Default)]
struct Rounds {
    round: u64,
    allocations: HashMap<AllocationId, PublishedState>,
}

impl Rounds {
    fn see(&mut self, allocation: &AllocationSnapshot, now: Instant) -> Vec<PublishedLine> {
        let AllocationSnapshot { id, realm, username, relayed, to_peer, to_client, .. } = allocation;
        let left_ms = relayed.iter().map(|(_, left_ms)| *left_ms).max().unwrap_or_default();
        let expires = now + Duration::from_millis(left_ms);
        let fresh = PublishedState { expires, to_peer: *to_peer, to_client: *to_client, round: self.round };
        let before = self.allocations.insert(*id, fresh);
        let mut lines = Vec::new();
        if let Some(before) = &before
            && expires > before.expires + Duration::from_millis(RENEWED_MS)
        {
            let lifetime = left_ms.div_ceil(1000).max(1);
            let line = format!("refreshed lifetime={lifetime}");
            lines.push((place(realm, username, *id, "status"), line, Some(lifetime)));
        }
        let (peers, clients) = before.map_or(((0, 0), (0, 0)), |before| (before.to_peer, before.to_client));
        if (peers, clients) != (*to_peer, *to_client) {
            let since = |now: (u64, u64), before: (u64, u64)| {
                (now.0.saturating_sub(before.0), now.1.saturating_sub(before.1))
            };
            let (peers, clients) = (since(*to_peer, peers), since(*to_client, clients));
            lines.extend(traffic(realm, username, *id, "traffic", peers, clients));
        }
        lines
    }

    fn end(&mut self) {
        let round = self.round;
        self.allocations.retain(|_, told| told.round == round);
        self.round += 1;
    }
}

impl StatusWriter {
    pub(crate) async fn run(mut self) {
        let mut rounds = Rounds::default();
        let mut next = tokio::time::Instant::now() + PERIOD;
        loop {
            let mut lines = Vec::new();
            if let Ok(count) = timeout_at(next, self.receiver.recv_many(&mut lines, LINES)).await {
                if count == 0 {
                    return;
                }
                self.publish(&lines).await;
            }
            if next <= tokio::time::Instant::now() {
                self.look_through(&mut rounds).await;
                // If the store is slow, this scans less often instead of delaying the workers' lines.
                next = (next + PERIOD).max(tokio::time::Instant::now() + PERIOD / 2);
            }
        }
    }

    async fn look_through(&self, rounds: &mut Rounds) {
        let Some(workers) = self.node.relay().map(|relay| relay.workers()) else { return };
        let filter = Arc::<AllocationFilter>::default();
        for worker in 0..workers {
            let mut from = Some(0);
            while let Some(slot) = from {
                let look =
                    Look { from: slot, most: SLICE_ALLOCATIONS, filter: Arc::clone(&filter), details: false };
                let (sender, answer) = oneshot::channel();
                match self.node.relay() {
                    Some(relay) => relay.look(worker, look, move |looked| _ = sender.send(looked)),
                    None => return,
                }
                let Ok(looked) = answer.await else { return };
                let now = Instant::now();
                let lines: Vec<PublishedLine> =
                    looked.allocations.iter().flat_map(|allocation| rounds.see(allocation, now)).collect();
                self.publish(&lines).await;
                from = looked.next;
            }
        }
        rounds.end();
    }

    /// Publishes lines, and drops those that cannot be published now: they would soon be outdated.
    async fn publish(&self, lines: &[PublishedLine]) {
        if lines.is_empty() {
            return;
        }
        if self.node.health.is_alone(self.node.now_ms()) || self.node.store.publish(lines).await.is_err() {
            self.node.tallies.lines_lost.fetch_add(lines.len() as u64, Ordering::Relaxed);
            sleep_until(tokio::time::Instant::now() + Duration::from_millis(100)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use turnpike_turn::server::{
        AllocationSlot, Client, ClosedReason, Link, ListenerId, RelayTransport, Transport,
    };

    use super::*;

    const ID: &str = "0000000000000000000000000000002a";

    fn client() -> Client {
        Client {
            listener: ListenerId(0),
            address: ([192, 0, 2, 9], 50_000).into(),
            local: ([192, 0, 2, 1], 3478).into(),
        }
    }

    fn allocation(left_ms: u64, to_peer: (u64, u64), to_client: (u64, u64)) -> AllocationSnapshot {
        AllocationSnapshot {
            id: ID.parse().expect("a name"),
            worker: 0,
            slot: 0,
            realm: "example.org".into(),
            username: "alice".into(),
            identity: None,
            client: client().address,
            server: client().local,
            transport: Transport::Udp,
            relay_transport: RelayTransport::Udp,
            relayed: vec![(([198, 41, 0, 4], 50_000).into(), left_ms)],
            is_mobile: false,
            is_away: false,
            age_ms: 0,
            to_peer,
            to_client,
            permissions: Vec::new(),
            channels: Vec::new(),
            connections: 0,
        }
    }

    fn shown(lines: &[PublishedLine]) -> Vec<String> {
        let prefix = "turn/realm/example.org/user/alice/allocation/000000000000000042/";
        let line = |(channel, line, kept): &PublishedLine| {
            format!("{} {line} {kept:?}", channel.strip_prefix(prefix).expect("coturn's channel"))
        };
        lines.iter().map(line).collect()
    }

    #[test]
    fn an_allocation_is_published_when_it_begins_and_ends() {
        let allocation = AllocationSlot { index: 1, generation: 2 };
        let relayed = [198, 41, 0, 4];
        let opened = Effect::Opened {
            allocation,
            id: ID.parse().expect("a name"),
            client: client(),
            link: Link::default(),
            expires_ms: 605_000,
            realm: "example.org".into(),
            username: "alice".into(),
            relayed: ((relayed, 50_000).into(), None),
        };
        assert_eq!(shown(&lines_of(&opened, 5_000)), ["status new lifetime=600 Some(600)"]);
        let closed = |relayed| Effect::Closed {
            allocation,
            id: ID.parse().expect("a name"),
            client: client(),
            realm: "example.org".into(),
            username: "alice".into(),
            identity: None,
            relayed: [relayed, None],
            transport: Transport::Udp,
            relay_transport: RelayTransport::Udp,
            away: false,
            reason: ClosedReason::Deleted,
            lived_ms: 1,
            to_peer: (10, 1200),
            to_client: (9, 1080),
            reported: None,
        };
        assert_eq!(
            shown(&lines_of(&closed(Some((relayed, 50_000).into())), 6_000)),
            [
                "total_traffic rcvp=10, rcvb=1200, sentp=9, sentb=1080 None",
                "total_traffic/peer rcvp=9, rcvb=1080, sentp=10, sentb=1200 None",
                "status deleted Some(0)",
            ]
        );
        assert!(lines_of(&closed(None), 6_000).is_empty());
    }

    #[test]
    fn traffic_is_counted_since_the_last_round_and_refreshes_appear_once() {
        let (mut rounds, begun) = (Rounds::default(), Instant::now());
        let mut round = |seconds: u64, allocation: &AllocationSnapshot| {
            let lines = rounds.see(allocation, begun + Duration::from_secs(seconds));
            rounds.end();
            shown(&lines)
        };
        assert_eq!(round(0, &allocation(600_000, (0, 0), (0, 0))), Vec::<String>::new());
        assert_eq!(
            round(10, &allocation(590_000, (5, 500), (2, 200))),
            [
                "traffic rcvp=5, rcvb=500, sentp=2, sentb=200 None",
                "traffic/peer rcvp=2, rcvb=200, sentp=5, sentb=500 None",
            ]
        );
        assert_eq!(round(20, &allocation(580_000, (5, 500), (2, 200))), Vec::<String>::new());
        assert_eq!(
            round(30, &allocation(600_000, (5, 500), (2, 200))),
            ["status refreshed lifetime=600 Some(600)"]
        );
        assert_eq!(round(40, &allocation(590_000, (6, 600), (2, 200))).len(), 2);
        rounds.end();
        assert!(rounds.allocations.is_empty(), "an allocation missing from the last scan is forgotten");
    }
}
