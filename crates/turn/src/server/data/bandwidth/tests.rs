use proptest::prelude::*;

use super::{limit::PATIENCE_MS, *};

const SECOND: u64 = 1000;

fn worker(pools: &Pools) -> (Leases, Pools) {
    (Leases::default(), pools.clone())
}

fn limited(
    (leases, pools): &mut (Leases, Pools),
    [own, user, total]: [Option<u64>; 3],
    burst_ms: u32,
    now_ms: u64,
) -> Limited {
    let mut member = |rate: Option<u64>, name: &str| {
        Some(PoolMember::new(leases.get(pools, name, Limit::new(rate?, burst_ms, LEAST_POOL), now_ms)))
    };
    let own = own.map(|rate| {
        let limit = Limit::new(rate, burst_ms, LEAST_BURST);
        (limit, [RateBucket { tokens: limit.burst, filled_ms: now_ms }; 2])
    });
    Limited { own, members: [member(user, "user"), None, member(total, "")], ..Limited::default() }
}

fn excess(passed: &[(u64, usize)], rate: u64) -> f64 {
    let (mut most, mut sum, mut last) = (0_f64, 0_f64, 0);
    for (now_ms, bytes) in passed {
        let brought = rate as f64 / 8000.0 * (now_ms - last) as f64;
        sum = (sum - brought).max(0.0) + *bytes as f64;
        most = most.max(sum);
        last = *now_ms;
    }
    most
}

fn total(passed: &[(u64, usize)]) -> f64 {
    passed.iter().map(|(_, bytes)| *bytes as f64).sum()
}

struct Sequence(u64);

impl Sequence {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

struct Flow {
    limited: Limited,
    bytes_per_ms: f64,
    size: usize,
    due: f64,
    passed: Vec<(u64, usize)>,
    dropped: u64,
}

impl Flow {
    fn new(limited: Limited, bits_per_second: u64, size: usize) -> Self {
        let bytes_per_ms = bits_per_second as f64 / 8000.0;
        Self { limited, bytes_per_ms, size, due: 0.0, passed: Vec::new(), dropped: 0 }
    }

    fn tick(&mut self, now_ms: u64) {
        self.due += self.bytes_per_ms;
        while self.due >= self.size as f64 {
            self.due -= self.size as f64;
            match self.limited.admit(Way::ToPeer, self.size, now_ms) {
                Ok(()) => self.passed.push((now_ms, self.size)),
                Err(_) => self.dropped += 1,
            }
        }
    }

    fn since(&self, from_ms: u64) -> f64 {
        total(&self.passed.iter().copied().filter(|(now_ms, _)| *now_ms >= from_ms).collect::<Vec<_>>())
    }
}

fn run(flows: &mut [Flow], from_ms: u64, until_ms: u64) {
    for now_ms in from_ms..until_ms {
        // Rotate the order, so that no flow is always first.
        let first = usize::try_from(now_ms).unwrap() % flows.len();
        for index in 0..flows.len() {
            let index = (first + index) % flows.len();
            flows[index].tick(now_ms);
        }
    }
}

fn is_near(found: f64, wanted: f64, share: f64) -> bool {
    (found - wanted).abs() <= wanted * share
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_bucket_keeps_its_rate_and_its_burst(
        rate in 20_000_u64..10_000_000_000,
        burst_ms in 20_u32..1000,
        a_second in 500_u64..4000,
        step in 1_u64..40,
        seed in any::<u64>(),
    ) {
        let mut limited = limited(&mut worker(&Pools::default()), [Some(rate), None, None], burst_ms, 0);
        let (mut sequence, mut passed, mut now_ms) = (Sequence(seed), Vec::new(), 0);
        let longest = (rate / 8 / a_second).clamp(20, 60_000);
        let step = step.min(u64::from(burst_ms) / 2);
        while now_ms < 10 * SECOND {
            now_ms += 1 + sequence.next(step);
            // After three refusals, fewer tokens are left than the longest datagram needs.
            let mut refused = 0;
            while refused < 3 {
                let bytes = usize::try_from(1 + sequence.next(longest)).unwrap();
                match limited.admit(Way::ToPeer, bytes, now_ms) {
                    Ok(()) => passed.push((now_ms, bytes)),
                    Err(held_up) => {
                        prop_assert_eq!(held_up.level, RateLevel::Allocation);
                        prop_assert!(held_up.until_ms > now_ms);
                        refused += 1;
                    }
                }
            }
        }
        let burst = (rate as f64 / 8000.0 * f64::from(burst_ms)).max(2048.0);
        prop_assert!(excess(&passed, rate) <= burst + 1.0, "{} of {burst}", excess(&passed, rate));
        let brought = rate as f64 / 8000.0 * now_ms as f64;
        let (sum, least) = (total(&passed), brought * 0.99 - longest as f64);
        prop_assert!(sum >= least && sum <= brought + burst + 1.0, "{sum} of {brought}");
    }

    #[test]
    fn a_pool_keeps_its_rate_and_its_burst_across_all_workers(
        rate in 1_000_000_u64..2_000_000_000,
        burst_ms in 50_u32..1000,
        workers in 1_usize..8,
        size in 100_usize..1500,
    ) {
        let pools = Pools::default();
        let mut views: Vec<_> = (0..workers).map(|_| worker(&pools)).collect();
        // Each flow offers the full rate, in datagrams large enough to limit the test's run time.
        let size = size.max(usize::try_from(rate / 8 / 20_000).unwrap());
        let mut flows: Vec<Flow> = views
            .iter_mut()
            .map(|view| Flow::new(limited(view, [None, None, Some(rate)], burst_ms, 0), rate, size))
            .collect();
        run(&mut flows, 1, 4 * SECOND);
        let mut passed: Vec<_> = flows.iter().flat_map(|flow| flow.passed.iter().copied()).collect();
        passed.sort_unstable();
        let burst = (rate as f64 / 8000.0 * f64::from(burst_ms)).max(65_536.0);
        let slice = (rate as f64 / 8000.0 * 2.0).max(2048.0).max(size as f64);
        let most = burst + 2.0 * slice * workers as f64;
        prop_assert!(excess(&passed, rate) <= most + 1.0, "{} of {most}", excess(&passed, rate));
        let brought = rate as f64 / 8000.0 * (4 * SECOND) as f64;
        prop_assert!(total(&passed) <= brought + most);
        if workers > 1 {
            prop_assert!(total(&passed) >= brought * 0.99, "{} of {brought}", total(&passed));
        }
    }

    #[test]
    fn a_clock_jump_yields_at_most_one_burst(
        jumps in prop::collection::vec((any::<bool>(), 0_u64..1 << 50), 1..50),
    ) {
        const RATE: u64 = 8_000_000;
        let mut view = worker(&Pools::default());
        let mut limited = limited(&mut view, [Some(RATE), Some(RATE), Some(RATE)], 100, 0);
        let burst = 100_000;
        let mut now_ms = 0_u64;
        for (ahead, by) in jumps {
            now_ms = if ahead { now_ms.saturating_add(by) } else { now_ms.saturating_sub(by) };
            let passed = (0..1000).filter(|_| limited.admit(Way::ToClient, 1000, now_ms).is_ok()).count();
            prop_assert!(passed * 1000 <= burst + 1000, "{passed}");
        }
    }

    /// For streams, only bytes that were taken and not returned count.
    #[test]
    fn stream_bytes_are_counted_exactly(
        rate in 100_000_u64..1_000_000_000,
        is_own in any::<bool>(),
        asks in prop::collection::vec((1_u64..4_000_000, 0_u64..100, 0_u64..30), 10..200),
    ) {
        let mut view = worker(&Pools::default());
        let own = is_own.then_some(rate);
        let mut limited = limited(&mut view, [own, Some(rate), Some(rate)], 100, 0);
        let (mut now_ms, mut passed) = (0, Vec::new());
        for (want, used, later) in asks {
            now_ms += later;
            match limited.take(Way::ToPeer, want, now_ms) {
                Ok(granted) => {
                    prop_assert!(granted > 0 && granted <= want);
                    let moved = granted * used / 100;
                    limited.give_back(Way::ToPeer, granted - moved);
                    passed.push((now_ms, usize::try_from(moved).unwrap()));
                }
                Err(held_up) => prop_assert!(held_up.until_ms > now_ms && held_up.until_ms <= now_ms + PATIENCE_MS),
            }
        }
        let burst = (rate as f64 / 8000.0 * 100.0).max(65_536.0);
        let slice = (rate as f64 / 8000.0 * 2.0).max(2048.0);
        let most = burst + 2.0 * slice + 1.0;
        prop_assert!(excess(&passed, rate) <= most, "{} of {most}", excess(&passed, rate));
    }
}

#[test]
fn a_datagram_above_the_burst_passes_and_the_next_one_waits() {
    let mut limited = limited(&mut worker(&Pools::default()), [Some(80_000), None, None], 10, 1);
    let passed = (1..=10_001).filter(|now_ms| limited.admit(Way::ToPeer, 60_000, *now_ms).is_ok()).count();
    // The limit allows 2,048 bytes at first and 10,000 per second, so one datagram passes immediately and
    // another after a debt of 60,000 bytes is paid off.
    assert_eq!(passed, 2);
    assert!(limited.admit(Way::ToClient, 60_000, 10_001).is_ok(), "the other direction has its own bucket");
}

#[test]
fn flows_get_equal_shares_regardless_of_offered_load() {
    const RATE: u64 = 80_000_000;
    // Two workers; the first flow offers 20 times its share, the others 1.5 to 4 times.
    for count in [2, 3, 10, 40] {
        let pools = Pools::default();
        let mut views = [worker(&pools), worker(&pools)];
        let part = RATE / count;
        let mut flows: Vec<Flow> = (0..count)
            .map(|index| {
                let offered = if index == 0 { 20 * part } else { part * 3 / 2 + part * (index % 6) / 2 };
                let size = [1200, 300, 800][usize::try_from(index % 3).unwrap()];
                let view = &mut views[usize::try_from(index % 2).unwrap()];
                Flow::new(limited(view, [None, Some(RATE), None], 250, 0), offered, size)
            })
            .collect();
        run(&mut flows, 1, 8 * SECOND);
        let whole = RATE as f64 / 8.0 * 7.0;
        let sum: f64 = flows.iter().map(|flow| flow.since(SECOND)).sum();
        assert!(is_near(sum, whole, 0.02), "{count}: {sum} of {whole}");
        for (index, flow) in flows.iter().enumerate() {
            let (got, part) = (flow.since(SECOND), whole / count as f64);
            assert!(is_near(got, part, 0.1), "{index} of {count}: {got} of {part}");
        }
    }
}

#[test]
fn small_flows_lose_nothing_and_leave_the_rest_to_others() {
    const RATE: u64 = 80_000_000;
    let pools = Pools::default();
    let mut views = [worker(&pools), worker(&pools)];
    let mut flow = |index: usize, offered: u64, size: usize| {
        Flow::new(limited(&mut views[index % 2], [None, None, Some(RATE)], 250, 0), offered, size)
    };
    // Forty calls of 64 kbit/s, two flows of 10 Mbit/s, and two floods.
    let mut flows: Vec<Flow> = (0..40).map(|index| flow(index, 64_000, 160)).collect();
    flows.extend((0..2).map(|index| flow(index, 10_000_000, 1000)));
    flows.extend([flow(0, 400_000_000, 1200), flow(1, 1_000_000_000, 1200)]);
    run(&mut flows, 1, 2 * SECOND);
    flows.iter_mut().for_each(|flow| flow.dropped = 0);
    run(&mut flows, 2 * SECOND, 10 * SECOND);
    for (index, flow) in flows[..42].iter().enumerate() {
        assert_eq!(flow.dropped, 0, "{index}");
    }
    let left = (RATE as f64 - 40.0 * 64_000.0 - 20_000_000.0) / 8.0 * 8.0;
    for flow in &flows[42..] {
        let got = flow.since(2 * SECOND);
        assert!(is_near(got, left / 2.0, 0.1), "{got} of {}", left / 2.0);
    }
}

#[test]
fn a_flow_that_starts_late_gets_its_share_within_a_second() {
    const RATE: u64 = 40_000_000;
    let mut view = worker(&Pools::default());
    let mut flow = || Flow::new(limited(&mut view, [None, Some(RATE), None], 250, 0), 4 * RATE, 1000);
    let mut flows = vec![flow(), flow()];
    run(&mut flows[..1], 1, 5 * SECOND);
    assert!(
        is_near(flows[0].since(SECOND), RATE as f64 / 8.0 * 4.0, 0.02),
        "a single flow gets the full rate"
    );
    run(&mut flows, 5 * SECOND, 10 * SECOND);
    for flow in &flows {
        assert!(is_near(flow.since(6 * SECOND), RATE as f64 / 16.0 * 4.0, 0.1));
    }
    run(&mut flows[..1], 10 * SECOND, 15 * SECOND);
    assert!(is_near(flows[0].since(11 * SECOND), RATE as f64 / 8.0 * 4.0, 0.02), "a single flow again");
}

#[test]
fn the_lowest_limit_applies_and_limits_checked_later_are_not_charged() {
    for (limits, refused) in [
        ([Some(1_000_000), Some(10_000_000), Some(10_000_000)], RateLevel::Allocation),
        ([Some(20_000_000), Some(8_000_000), Some(30_000_000)], RateLevel::User),
    ] {
        let mut limited = limited(&mut worker(&Pools::default()), limits, 100, 0);
        let mut levels = (0..1000).filter_map(|_| limited.admit(Way::ToPeer, 1000, 0).err());
        assert_eq!(levels.next().map(|held_up| held_up.level), Some(refused), "{limits:?}");
    }
    let mut other = worker(&Pools::default());
    let mut limited = limited(&mut other, [Some(10_000_000), None, Some(8_000_000)], 1000, 0);
    while limited.admit(Way::ToPeer, 1000, 0).is_ok() {}
    let had = limited.own.map(|(_, buckets)| buckets[0].tokens);
    assert_eq!(limited.admit(Way::ToPeer, 1000, 0).map_err(|held_up| held_up.level), Err(RateLevel::Total));
    assert_eq!(limited.own.map(|(_, buckets)| buckets[0].tokens), had, "a refusal takes no tokens");
}

#[test]
fn a_pool_is_dropped_only_once_it_is_full() {
    let pools = Pools::default();
    let (mut leases, _) = worker(&pools);
    let limit = Limit::new(8_000_000, 1000, LEAST_POOL);
    let mut use_up = |name: &str, now_ms| {
        let mut member = PoolMember::new(leases.get(&pools, name, limit, now_ms));
        let mut passed = 0;
        while member.admits(Way::ToPeer, 1000 * BYTE, now_ms) {
            member.spend(Way::ToPeer, 1000 * BYTE);
            passed += 1;
        }
        passed
    };
    assert_eq!(use_up("alice", 0), 1000);
    assert_eq!(use_up("alice", 0), 0, "another allocation gains nothing");
    assert_eq!(use_up("alice", 100), 100);
    for user in 0..200 {
        assert_eq!(use_up(&user.to_string(), 100), 1000);
    }
    assert!(pools.count() > 200, "no pool is full yet");
    for user in 200..500 {
        use_up(&user.to_string(), 10_000 + user * 10_000);
    }
    assert!(pools.count() < 200, "{} of 501", pools.count());
    assert_eq!(leases.count(), 0);
}
