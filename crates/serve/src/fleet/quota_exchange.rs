//! Quota exchange with the store: reports usage and receives grants, a few hundred buckets at a time.
//! Requests do not wait for it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use turnpike_fleet::{Backoff, exchange_period_ms};
use turnpike_stores::Exchanged;

use super::node::OwnNode;

const MOST: usize = 500;
const LEAST: usize = 50;
/// Maximum number of buckets that all nodes together may exchange at the same time.
const AT_ONCE: usize = 100_000;
/// Maximum number of buckets that all nodes together may exchange per second.
const A_SECOND: u64 = 200_000;
const SOON_MS: u64 = 20;

pub(super) async fn keep_exchanging(node: Arc<OwnNode>) {
    let mut backoff = Backoff::default();
    while !node.is_over() {
        let pause = exchange(&node, &mut backoff).await;
        sleep(Duration::from_millis(pause)).await;
    }
}

/// Returns the pause before the next exchange in milliseconds.
async fn exchange(node: &OwnNode, backoff: &mut Backoff) -> u64 {
    let nodes = node.nodes();
    let period = exchange_period_ms(usize::try_from(nodes).unwrap_or(usize::MAX));
    let number = node.number();
    let _alone = node.exchanging.lock().await;
    // Usage reported before this node's old record is cleared would be cleared with that record.
    if number == 0 || node.is_quiet() || node.rests() || node.recovery.is_to_clear() {
        return period;
    }
    let most = most(nodes);
    let asks = node.quotas.asks(most, node.terms());
    if asks.is_empty() {
        return period;
    }
    let begun = Instant::now();
    let answer = node.store.exchange(number, nodes, node.recovery.era(), &asks).await;
    node.tallies.exchanged(begun.elapsed().as_micros(), answer.is_ok());
    match answer {
        Ok(Exchanged { era, grants }) => {
            node.answered();
            backoff.reset();
            node.hear_era(era);
            let grants = grants.unwrap_or_default();
            let lost = node.quotas.lost();
            node.quotas.granted(&grants, node.terms());
            if lost > 0 && node.quotas.lost() == 0 {
                node.recovery.speak_soon();
            }
            // If the answer has fewer entries, the remaining buckets stay pending.
            node.quotas.unheard(asks.get(grants.len()..).unwrap_or_default());
            if asks.len() == most { soon(most, nodes) } else { period }
        }
        Err(error) => {
            node.quotas.unheard(&asks);
            node.failed(&error);
            backoff.next_ms(rand::random())
        }
    }
}

/// Maximum number of buckets per exchange: fewer in large fleets, where many nodes may have changes at once.
fn most(nodes: u32) -> usize {
    (AT_ONCE / usize::try_from(nodes.max(1)).unwrap_or(1)).clamp(LEAST, MOST)
}

/// Pause before the next exchange if more buckets remain, in milliseconds.
fn soon(most: usize, nodes: u32) -> u64 {
    (most as u64 * u64::from(nodes) * 1000 / A_SECOND).max(SOON_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_fleets_exchange_fewer_buckets_at_a_time() {
        assert_eq!([1, 200, 1000, 4000].map(most), [500, 500, 100, 50]);
        let pauses = [1, 10, 200, 1000, 4000].map(|nodes| soon(most(nodes), nodes));
        assert_eq!(pauses, [20, 25, 500, 500, 1000]);
    }
}
