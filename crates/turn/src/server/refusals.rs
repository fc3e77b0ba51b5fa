//! How often a refused credential may become an effect, and so a log line: a token bucket.

/// Effects a second, on average.
const RATE: u64 = 20;
/// Effects at once.
const BURST: u64 = 50;
/// One token, in milliseconds.
const COST_MS: u64 = 1000 / RATE;

#[derive(Default)]
pub(super) struct Refusals {
    /// The bucket as a time: it is full when this lies in the past, empty when `BURST` costs ahead.
    drained_ms: u64,
    suppressed: u64,
}

impl Refusals {
    /// `Some(how many were suppressed since the last)` if this one may become an effect.
    pub(super) fn admit(&mut self, now_ms: u64) -> Option<u64> {
        let drained_ms = self.drained_ms.max(now_ms) + COST_MS;
        if drained_ms > now_ms + BURST * COST_MS {
            self.suppressed += 1;
            return None;
        }
        self.drained_ms = drained_ms;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifty_at_once_then_twenty_a_second_and_the_rest_is_counted() {
        let mut refusals = Refusals::default();
        let mut admitted =
            |now_ms, tries| (0..tries).filter_map(|_| refusals.admit(now_ms)).collect::<Vec<_>>();
        assert_eq!(admitted(5000, 1000), vec![0; 50]);
        let later = admitted(6000, 1000);
        assert_eq!(later.len(), 20);
        assert_eq!(later[0], 950);
        assert_eq!(later[1..], [0; 19]);
    }
}
