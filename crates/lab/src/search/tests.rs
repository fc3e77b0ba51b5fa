use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// Subject that forwards up to `capacity` per second, with fluctuations and occasional lost bursts.
struct Device {
    rng: ChaCha8Rng,
    capacity: f64,
    wobble: f64,
    hiccup_share: f64,
    hiccup_loss: f64,
}

impl Device {
    fn steady(capacity: f64) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(0), capacity, wobble: 0.0, hiccup_share: 0.0, hiccup_loss: 0.0 }
    }

    fn noisy(capacity: f64, seed: u64) -> Self {
        let rng = ChaCha8Rng::seed_from_u64(seed);
        Self { rng, capacity, wobble: 0.005, hiccup_share: 0.1, hiccup_loss: 0.02 }
    }

    fn run(&mut self, trial: Trial) -> (u64, u64) {
        let sent = trial.rate_pps as f64 * trial.duration_s;
        // The sum of twelve uniform numbers is nearly normal.
        let normal: f64 = (0..12).map(|_| self.rng.random::<f64>()).sum::<f64>() - 6.0;
        let can = self.capacity * (1.0 + self.wobble * normal) * trial.duration_s;
        let mut received = sent.min(can);
        if self.rng.random::<f64>() < self.hiccup_share {
            received *= 1.0 - self.hiccup_loss;
        }
        (pps(sent), pps(received))
    }

    fn search(&mut self, settings: SearchSettings) -> Search {
        let mut search = Search::new(settings);
        while let Some(trial) = search.next() {
            let (sent, received) = self.run(trial);
            search.observe(sent, received);
        }
        search
    }
}

fn truth(capacity: f64, max_loss: f64) -> f64 {
    capacity / (1.0 - max_loss)
}

#[test]
fn the_rate_of_a_steady_device_is_found_within_the_width() {
    for capacity in [1_500.0, 33_333.0, 241_700.0, 1_900_000.0] {
        let search = Device::steady(capacity).search(SearchSettings::default());
        for found in search.found() {
            assert_eq!(found.because, SearchEnd::Narrow, "{found:?}");
            let (lower, upper) = (found.lower_pps.unwrap() as f64, found.upper_pps.unwrap() as f64);
            let truth = truth(capacity, found.max_loss);
            assert!(lower <= truth * 1.001 && truth * 0.999 <= upper, "{capacity}: {found:?}");
            assert!(upper - lower <= 0.01 * upper, "{found:?}");
            assert!(found.delivered_pps.unwrap() <= capacity * 1.001, "{found:?}");
        }
        assert!(search.trials < 90, "{capacity}: {} trials", search.trials);
    }
}

#[test]
fn noise_and_hiccups_hardly_affect_the_result() {
    let mut good = 0;
    for seed in 0..20 {
        let search = Device::noisy(200_000.0, seed).search(SearchSettings::default());
        assert!(search.trials < 200, "{} trials", search.trials);
        let found = search.found();
        good += usize::from(found.iter().all(|found| {
            let truth = truth(200_000.0, found.max_loss);
            let lower = found.lower_pps.unwrap() as f64;
            found.because == SearchEnd::Narrow && (lower / truth - 1.0).abs() < 0.025
        }));
    }
    assert!(good >= 19, "only {good} of 20 searches are within 2.5 %");
}

#[test]
fn plain_bisection_fails_because_of_hiccups() {
    // RFC 2544 lets a single trial decide a rate.
    let mut far_off = 0;
    for seed in 0..20 {
        let mut device = Device::noisy(200_000.0, seed);
        let (mut lower, mut upper) = (1_000_u64, 2_000_000_u64);
        while !narrow(lower, upper, 0.01) {
            let rate = pps((lower as f64 * upper as f64).sqrt());
            let (sent, received) = device.run(Trial { rate_pps: rate, duration_s: 5.0 });
            if received < sent { upper = rate } else { lower = rate }
        }
        far_off += usize::from(((lower as f64) / 200_000.0 - 1.0).abs() > 0.025);
    }
    assert!(far_off >= 5, "only {far_off} of 20 bisections were far off");
}

#[test]
fn a_looser_goal_never_has_a_lower_result() {
    for seed in 100..130 {
        let found = Device::noisy(50_000.0, seed).search(SearchSettings::default()).found();
        for pair in found.windows(2) {
            assert!(pair[0].upper_pps <= pair[1].upper_pps, "{pair:?}");
            assert!(pair[0].lower_pps <= pair[1].lower_pps, "{pair:?}");
        }
    }
}

#[test]
fn a_capacity_above_the_highest_rate_is_reported() {
    for found in Device::steady(1e7).search(SearchSettings::default()).found() {
        assert_eq!(
            (found.because, found.lower_pps, found.upper_pps),
            (SearchEnd::Highest, Some(2_000_000), None)
        );
    }
}

#[test]
fn a_capacity_below_the_lowest_rate_is_reported() {
    let mut device = Device { hiccup_share: 1.0, hiccup_loss: 0.5, ..Device::steady(1e7) };
    let search = device.search(SearchSettings::default());
    for found in search.found() {
        assert_eq!((found.because, found.lower_pps, found.upper_pps), (SearchEnd::Lowest, None, Some(1_000)));
        assert_eq!(found.delivered_pps, None);
    }
    assert!(search.trials < 60, "{} trials", search.trials);
}

#[test]
fn the_rate_is_found_even_if_the_device_collapses_under_overload() {
    // A subject in receive livelock: above its limit, it delivers only a tenth.
    let mut search = Search::new(SearchSettings::default());
    while let Some(trial) = search.next() {
        let rate = if trial.rate_pps > 120_000 { 12_000 } else { trial.rate_pps };
        search.observe(trial.rate_pps * 5, rate * 5);
    }
    for found in search.found() {
        let lower = found.lower_pps.unwrap();
        assert!(found.because == SearchEnd::Narrow && (118_800..=120_000).contains(&lower), "{found:?}");
    }
}

#[test]
fn a_saturated_generator_limits_the_search_and_is_reported() {
    let mut search = Search::new(SearchSettings::default());
    while let Some(trial) = search.next() {
        let made = trial.rate_pps.min(300_000);
        let sent = pps(made as f64 * trial.duration_s);
        search.observe(sent, sent);
    }
    assert!(search.trials < 60, "{} trials", search.trials);
    for found in search.found() {
        assert_eq!(found.because, SearchEnd::Generator, "{found:?}");
        let lower = found.lower_pps.unwrap();
        assert!((280_000..=306_200).contains(&lower), "{found:?}");
    }
}

#[test]
fn a_generator_that_falls_behind_limits_the_search_too() {
    let mut search = Search::new(SearchSettings::default());
    while let Some(trial) = search.next() {
        if trial.rate_pps > 300_000 {
            search.observe_void();
        } else {
            let sent = pps(trial.rate_pps as f64 * trial.duration_s);
            search.observe(sent, sent);
        }
    }
    for found in search.found() {
        let lower = found.lower_pps.unwrap();
        assert!(found.because == SearchEnd::Generator && (297_000..=300_000).contains(&lower), "{found:?}");
    }
    assert!(search.trials < 90, "{} trials", search.trials);
}

#[test]
fn void_trials_are_repeated_and_ignored() {
    let mut search = Search::new(SearchSettings::default());
    let trial = search.next().unwrap();
    search.observe_void();
    assert_eq!(search.next(), Some(trial));
    assert_eq!(search.found()[0].lower_pps, None);
    assert_eq!(search.trials, 1);
}

#[test]
fn a_search_at_its_trial_limit_reports_its_interim_result() {
    let search =
        Device::steady(100_000.0).search(SearchSettings { max_trials: 8, ..SearchSettings::default() });
    assert_eq!(search.trials, 8);
    for found in search.found() {
        assert_eq!(found.because, SearchEnd::Ended);
        assert!(found.lower_pps.unwrap() <= 100_600, "{found:?}");
    }
}

#[test]
fn next_repeats_the_trial_until_it_is_observed() {
    let mut search = Search::new(SearchSettings::default());
    assert_eq!(search.next(), search.next());
    assert!(search.next().is_some());
    let before = search.trials;
    search.observe(2_000_000, 0);
    assert_eq!(search.trials, before + 1);
}

#[test]
fn invalid_settings_finish_immediately() {
    assert!(
        Search::new(SearchSettings { min_pps: 10, max_pps: 5, ..SearchSettings::default() }).next().is_none()
    );
    assert!(Search::new(SearchSettings { goals: Vec::new(), ..SearchSettings::default() }).next().is_none());
}

#[test]
fn the_search_ends_for_arbitrary_results() {
    for seed in 0..50 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut search = Search::new(SearchSettings::default());
        let mut longest = 0.0;
        while let Some(trial) = search.next() {
            assert!(trial.duration_s >= longest, "an earlier phase was resumed");
            longest = trial.duration_s;
            let sent = pps(trial.rate_pps as f64 * trial.duration_s);
            match rng.random_range(0..4) {
                0 => search.observe_void(),
                1 => search.observe(sent, sent),
                _ => search.observe(sent, rng.random_range(0..=sent)),
            }
        }
        assert!(search.trials <= 300 && search.next().is_none());
        assert_eq!(search.found().len(), 3);
    }
}

#[test]
fn late_trials_count_if_lossless_and_are_ignored_if_lossy() {
    // The generator falls behind and catches up with bursts in every trial, so trials that meet a goal count, but losses do not.
    let settings = SearchSettings {
        min_pps: 1_000,
        max_pps: 100_000,
        goals: vec![0.0, 0.01],
        ..SearchSettings::default()
    };
    let mut search = Search::new(settings);
    while let Some(trial) = search.next() {
        let sent = pps(trial.rate_pps as f64 * trial.duration_s);
        let lost = match trial.rate_pps {
            ..20_001 => 0,
            20_001..40_001 => sent / 200,
            _ => sent / 2,
        };
        search.observe_late(sent, sent - lost);
    }
    let [strict, loose] = &search.found()[..] else { panic!("not two goals") };
    for (found, borne) in [(strict, 20_000), (loose, 40_000)] {
        let lower = found.lower_pps.expect("a sustainable rate");
        assert!(lower <= borne && lower as f64 > 0.9 * borne as f64, "{found:?}");
        assert_eq!(found.upper_pps, None, "nothing rules out a higher rate: {found:?}");
        assert_eq!(found.because, SearchEnd::Generator);
    }
}
