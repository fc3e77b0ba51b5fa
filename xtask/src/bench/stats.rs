//! Medians, paired ratios and their bootstrap intervals; and the seeded order of runs.

/// Resamples of a bootstrap: enough that its 95 % bounds no longer move in the second digit.
const RESAMPLES: usize = 4000;

/// A median with its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// 95 % bootstrap interval of the median.
    pub(crate) low: f64,
    /// Its upper bound.
    pub(crate) high: f64,
}

impl Summary {
    /// Summarises finite values; `None` if there are none.
    pub(crate) fn of(values: &[f64], random: &mut Random) -> Option<Self> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        if sorted.is_empty() {
            return None;
        }
        sorted.sort_by(f64::total_cmp);
        let mut medians: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let mut resample: Vec<f64> =
                    (0..sorted.len()).map(|_| sorted[random.below(sorted.len())]).collect();
                resample.sort_by(f64::total_cmp);
                median_of_sorted(&resample)
            })
            .collect();
        medians.sort_by(f64::total_cmp);
        Some(Self {
            median: median_of_sorted(&sorted),
            min: sorted[0],
            max: sorted[sorted.len() - 1],
            low: medians[RESAMPLES / 40],
            high: medians[RESAMPLES - 1 - RESAMPLES / 40],
        })
    }
}

/// The quotient of each round: both runs of a round saw the same state of the machine.
pub(crate) fn paired_ratios(subject: &[Option<f64>], baseline: &[Option<f64>]) -> Vec<f64> {
    subject
        .iter()
        .zip(baseline)
        .filter_map(|(subject, baseline)| {
            let (subject, baseline) = ((*subject)?, (*baseline)?);
            (baseline > 0.0).then(|| subject / baseline)
        })
        .collect()
}

fn median_of_sorted(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) }
}

/// SplitMix64: a seed printed with a report gives the same order of runs again.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn from_seed(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0 and tiny beside 2^64, so that the modulo's bias does not matter.
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap_or(0)
    }

    /// Fisher-Yates.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(values: &[f64]) -> Option<Summary> {
        Summary::of(values, &mut Random::from_seed(1))
    }

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        let summary = summary(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((summary.median, summary.min, summary.max), (2.5, 1.0, 4.0));
    }

    #[test]
    fn an_outlier_moves_the_maximum_but_not_the_median() {
        let summary = summary(&[2.0, 2.0, 90.0, 2.1, 1.9]).unwrap();
        assert_eq!((summary.median, summary.max), (2.0, 90.0));
    }

    #[test]
    fn the_interval_holds_the_median_and_stays_within_the_range() {
        let summary = summary(&[1.0, 1.2, 0.9, 1.1, 1.05, 1.3]).unwrap();
        assert!(summary.min <= summary.low && summary.low <= summary.median);
        assert!(summary.median <= summary.high && summary.high <= summary.max);
        assert!(summary.low < summary.high);
    }

    #[test]
    fn nothing_measured_is_no_summary() {
        assert_eq!(summary(&[]), None);
        assert_eq!(summary(&[f64::NAN]), None);
    }

    #[test]
    fn ratios_pair_by_round_and_skip_rounds_without_both() {
        let ratios = paired_ratios(
            &[Some(6.0), None, Some(8.0), Some(1.0)],
            &[Some(2.0), Some(1.0), Some(2.0), Some(0.0)],
        );
        assert_eq!(ratios, [3.0, 4.0]);
    }

    #[test]
    fn a_shuffle_is_a_permutation_that_its_seed_repeats() {
        let shuffled = |seed| {
            let mut items: Vec<u32> = (0..20).collect();
            Random::from_seed(seed).shuffle(&mut items);
            items
        };
        assert_eq!(shuffled(7), shuffled(7));
        assert_ne!(shuffled(7), shuffled(8));
        let mut sorted = shuffled(7);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn both_orders_of_a_pair_occur() {
        let mut random = Random::from_seed(3);
        let mut first = [0, 0];
        for _ in 0..100 {
            let mut pair = [0, 1];
            random.shuffle(&mut pair);
            first[pair[0]] += 1;
        }
        assert!(first.iter().all(|count| *count > 25), "{first:?}");
    }
}
