//! Allocations with the most traffic: compares two passes over all allocations, slice by slice. Runs only
//! while watched, because each worker spends a few microseconds per thousand allocations.

use std::{
    cmp::Reverse,
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{sync::oneshot, time::sleep};
use turnpike_api::{NetworkInfo, Talker, Talkers};
use turnpike_relay::allocations::{AllocationFilter, AllocationSnapshot, AllocationTraffic, Look, Looked};
use turnpike_turn::server::AllocationId;

use super::{Feed, reading::rate};

/// Interval between comparisons, and the shorter interval before the first.
const PAUSE: Duration = Duration::from_secs(5);
const FIRST: Duration = Duration::from_secs(1);
const MOST: usize = 20;

struct Pass {
    at: Instant,
    /// Traffic of each allocation, with the number of its worker.
    traffic: HashMap<AllocationId, (usize, AllocationTraffic)>,
}

/// Keeps comparing passes for as long as the runtime exists.
pub(super) async fn compare(feed: Arc<Feed>) {
    let mut before: Option<Pass> = None;
    loop {
        sleep(if feed.talkers().is_some() { PAUSE } else { FIRST }).await;
        if !feed.is_watched() {
            before = None;
            feed.set_talkers(None);
            continue;
        }
        let now = pass(&feed).await;
        if let (Some(before), Some(now)) = (&before, &now) {
            let talkers = rank(&feed, before, now).await;
            feed.set_talkers(Some(talkers));
        }
        before = now;
    }
}

/// Reads the traffic of all allocations; `None` if there is no server.
async fn pass(feed: &Feed) -> Option<Pass> {
    let at = Instant::now();
    let mut traffic = HashMap::new();
    let workers = feed.program.server()?.relay.workers();
    for worker in 0..workers {
        let mut from = Some(0);
        while let Some(slot) = from {
            let (sender, answer) = oneshot::channel();
            let told = move |traffic, next| _ = sender.send((traffic, next));
            feed.program.server()?.relay.traffic(worker, slot, told);
            let (found, next): (Vec<AllocationTraffic>, _) = answer.await.ok()?;
            traffic.extend(found.into_iter().map(|allocation| (allocation.id, (worker, allocation))));
            from = next;
        }
    }
    Some(Pass { at, traffic })
}

/// Bytes relayed between the two passes, in both directions.
fn relayed(before: &Pass, allocation: &AllocationTraffic) -> u64 {
    let (to_peer, to_client) = since(before, allocation);
    to_peer.1 + to_client.1
}

fn since(before: &Pass, allocation: &AllocationTraffic) -> ((u64, u64), (u64, u64)) {
    let less =
        |now: (u64, u64), then: (u64, u64)| (now.0.saturating_sub(then.0), now.1.saturating_sub(then.1));
    match before.traffic.get(&allocation.id) {
        Some((_, then)) => {
            (less(allocation.to_peer, then.to_peer), less(allocation.to_client, then.to_client))
        }
        None => (allocation.to_peer, allocation.to_client),
    }
}

async fn rank(feed: &Feed, before: &Pass, now: &Pass) -> Talkers {
    let active =
        now.traffic.values().map(|(worker, allocation)| (relayed(before, allocation), *worker, *allocation));
    let mut active: Vec<(u64, usize, AllocationTraffic)> = active.filter(|(bytes, ..)| *bytes > 0).collect();
    let count = active.len() as u64;
    if active.len() > MOST {
        active.select_nth_unstable_by_key(MOST, |(bytes, ..)| Reverse(*bytes));
        active.truncate(MOST);
    }
    active.sort_unstable_by_key(|(bytes, ..)| Reverse(*bytes));
    let interval_s = (now.at - before.at).as_secs_f64();
    let mut talkers = Vec::with_capacity(active.len());
    for (_, worker, traffic) in active {
        // An allocation that has ended or moved is omitted.
        let Some(allocation) = find(feed, worker, &traffic).await else { continue };
        let (to_peer, to_client) = since(before, &traffic);
        let server = feed.program.server();
        let network = server.as_ref().map(|server| server.network(allocation.client.ip()));
        let quality_problem = server.and_then(|server| server.quality_problem(allocation.id));
        talkers.push(Talker {
            id: allocation.id.to_string(),
            realm: allocation.realm.to_string(),
            user: allocation.username.into_string(),
            client: allocation.client.to_string(),
            network: network.and_then(NetworkInfo::of),
            transport: <&str>::from(allocation.transport).to_owned(),
            to_peer: rate(to_peer, interval_s),
            to_client: rate(to_client, interval_s),
            quality_problem,
        });
    }
    Talkers { interval_s, active: count, talkers }
}

async fn find(feed: &Feed, worker: usize, traffic: &AllocationTraffic) -> Option<AllocationSnapshot> {
    let filter = Arc::new(AllocationFilter { id: Some(traffic.id), ..AllocationFilter::default() });
    let (sender, answer) = oneshot::channel();
    let look = Look { from: traffic.slot, most: 1, filter, details: false };
    feed.program.server()?.relay.look(worker, look, move |looked: Looked| _ = sender.send(looked));
    answer.await.ok()?.allocations.pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass_of(traffic: &[(&str, u64, u64)]) -> Pass {
        let allocation = |(id, to_peer, to_client): &(&str, u64, u64)| {
            let id: AllocationId = id.repeat(32).parse().unwrap();
            (id, (0, AllocationTraffic { id, slot: 0, to_peer: (1, *to_peer), to_client: (2, *to_client) }))
        };
        Pass { at: Instant::now(), traffic: traffic.iter().map(allocation).collect() }
    }

    #[test]
    fn relayed_traffic_is_the_difference_between_two_passes() {
        let before = pass_of(&[("1", 100, 1000), ("2", 5, 5)]);
        let now = pass_of(&[("1", 150, 1300), ("2", 5, 5), ("3", 7, 8)]);
        let of = |id: &str| {
            let id: AllocationId = id.repeat(32).parse().unwrap();
            relayed(&before, &now.traffic[&id].1)
        };
        assert_eq!([of("1"), of("2"), of("3")], [350, 0, 15]);
    }
}
