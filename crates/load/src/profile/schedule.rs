//! Due times of the bursts of all flows.
//!
//! All flows of a stream have the same interval, and each has a fixed random offset within it, so their bursts repeat in the same order in
//! every interval. No queue is therefore needed to find the next burst, and due times do not drift.

use super::{Draw, Profile};

pub(super) struct Bursts {
    rotations: Vec<FlowRotation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Burst {
    pub(super) stream: usize,
    pub(super) client: usize,
    pub(super) flow: usize,
    pub(super) number: u64,
    pub(super) due_ns: u64,
}

struct FlowRotation {
    stream: usize,
    start_ns: u64,
    interval_ns: f64,
    places: Vec<BurstPlace>,
    next: usize,
    round: u64,
    due_ns: u64,
}

struct BurstPlace {
    offset_ns: u64,
    client: usize,
    flow: usize,
}

impl BurstPlace {
    #[expect(clippy::cast_possible_truncation, reason = "below the interval, which is at most 10 s")]
    fn draw(seed: u64, flow: u32, interval_ns: f64) -> u64 {
        const WHOLE: u64 = 1 << 32;
        let part = Draw::new(seed, flow, u64::MAX).below(WHOLE) as f64 / WHOLE as f64;
        (part * interval_ns) as u64
    }
}

impl Bursts {
    /// `first` is the number of the first client within the run.
    pub(super) fn new(profile: &Profile, seed: u64, (count, first): (usize, usize), start_ns: u64) -> Self {
        let rotation = |stream: usize| {
            let interval_ns = 1e9 / profile.streams[stream].bursts_per_second;
            let flows = || (0..profile.flows()).filter(|flow| profile.flows[*flow] == stream);
            let place = |client: usize, flow: usize| BurstPlace {
                offset_ns: BurstPlace::draw(seed, profile.flow_number(first + client, flow), interval_ns),
                client,
                flow,
            };
            let of_client = |client: usize| flows().map(move |flow| (client, flow));
            let mut places: Vec<_> =
                (0..count).flat_map(of_client).map(|(client, flow)| place(client, flow)).collect();
            places.sort_by_key(|place| (place.offset_ns, place.client, place.flow));
            let due_ns = places.first().map_or(u64::MAX, |place| start_ns + place.offset_ns);
            FlowRotation { stream, start_ns, interval_ns, places, next: 0, round: 0, due_ns }
        };
        Self { rotations: (0..profile.streams.len()).map(rotation).collect() }
    }

    #[inline]
    pub(super) fn due(&self) -> u64 {
        self.rotations.iter().map(|rotation| rotation.due_ns).min().unwrap_or(u64::MAX)
    }

    #[inline]
    pub(super) fn take(&mut self) -> Option<Burst> {
        let rotation = self.rotations.iter_mut().min_by_key(|rotation| rotation.due_ns)?;
        let place = rotation.places.get(rotation.next)?;
        let burst = Burst {
            stream: rotation.stream,
            client: place.client,
            flow: place.flow,
            number: rotation.round,
            due_ns: rotation.due_ns,
        };
        rotation.advance();
        Some(burst)
    }
}

impl FlowRotation {
    #[inline]
    fn advance(&mut self) {
        self.next += 1;
        if self.next == self.places.len() {
            self.next = 0;
            self.round += 1;
        }
        #[expect(clippy::cast_possible_truncation, reason = "exact up to 2^53 ns, 104 days")]
        let round_ns = (self.round as f64 * self.interval_ns) as u64;
        self.due_ns = (self.start_ns + self.places[self.next].offset_ns).saturating_add(round_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        Profile::open("call").expect("a built-in profile")
    }

    fn bursts(seed: u64, share: (usize, usize), end_ns: u64) -> Vec<(usize, Burst)> {
        let mut bursts = Bursts::new(&profile(), seed, share, 1_000);
        let mut taken = Vec::new();
        while bursts.due() < end_ns {
            let burst = bursts.take().expect("a burst is due");
            taken.push((share.1 + burst.client, burst));
        }
        taken
    }

    #[test]
    fn bursts_are_due_in_order_and_at_their_rates() {
        let second = bursts(1, (10, 0), 1_000 + 3_000_000_000);
        assert!(second.windows(2).all(|pair| pair[0].1.due_ns <= pair[1].1.due_ns));
        for (index, stream) in profile().streams.iter().enumerate() {
            let found = second.iter().filter(|(_, burst)| burst.stream == index).count() as f64;
            let wanted = stream.bursts_per_second * 3.0 * 10.0;
            assert!((found - wanted).abs() <= 10.0, "{}: {found} of {wanted} bursts", stream.name);
        }
        let numbers: Vec<u64> = second
            .iter()
            .filter(|(client, burst)| (*client, burst.flow) == (3, 0))
            .map(|(_, burst)| burst.number)
            .collect();
        assert!(numbers.iter().copied().eq(0..numbers.len() as u64), "{numbers:?}");
    }

    #[test]
    fn due_times_depend_on_the_seed_and_not_on_the_threads() {
        let end = 1_000 + 500_000_000;
        let sorted = |mut all: Vec<(usize, Burst)>| {
            all.sort_by_key(|(client, burst)| (burst.due_ns, burst.stream, *client, burst.flow));
            all.into_iter()
                .map(|(client, burst)| (client, burst.flow, burst.number, burst.due_ns))
                .collect::<Vec<_>>()
        };
        let alone = sorted(bursts(5, (7, 0), end));
        let two = sorted([bursts(5, (4, 0), end), bursts(5, (3, 4), end)].concat());
        assert_eq!(alone, two);
        assert_ne!(alone, sorted(bursts(6, (7, 0), end)));
    }
}
