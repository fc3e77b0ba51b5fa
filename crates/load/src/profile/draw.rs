//! Pseudo-random numbers that depend only on the seed, not on the machine or the number of threads.

#[derive(Clone, Copy, Debug)]
pub(super) struct Draw(u64);

impl Draw {
    pub(super) fn new(seed: u64, flow: u32, burst: u64) -> Self {
        let mut draw = Self(seed ^ mix(u64::from(flow) << 40 ^ burst));
        draw.next();
        draw
    }

    /// SplitMix64 (Steele, Lea and Flood 2014).
    #[inline]
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Uniformly distributed below `bound`, with a bias of at most 2^-32.
    #[inline]
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        ((self.next() >> 32) * bound.min(1 << 32)) >> 32
    }

    #[inline]
    pub(super) fn from(&mut self, range: Range) -> u32 {
        let span = u64::from(range.most - range.least) + 1;
        range.least + u32::try_from(self.below(span)).unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) least: u32,
    pub(super) most: u32,
}

impl Range {
    #[cfg(test)]
    pub(super) const fn new(least: u32, most: u32) -> Self {
        Self { least, most }
    }

    pub(super) const fn just(value: u32) -> Self {
        Self { least: value, most: value }
    }

    pub(super) fn mean(self) -> f64 {
        (f64::from(self.least) + f64::from(self.most)) / 2.0
    }
}

#[inline]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_in_every_build() {
        let mut draw = Draw::new(1, 2, 3);
        let drawn: Vec<_> = (0..4).map(|_| draw.from(Range::new(80, 160))).collect();
        let mut again = Draw::new(1, 2, 3);
        assert!((0..4).all(|index| again.from(Range::new(80, 160)) == drawn[index]));
        let mut other = Draw::new(2, 2, 3);
        assert_ne!((0..4).map(|_| other.from(Range::new(80, 160))).collect::<Vec<_>>(), drawn);
    }

    #[test]
    fn draws_from_a_range_are_uniform() {
        let mut counts = [0_u32; 5];
        for burst in 0..10_000 {
            counts[Draw::new(7, 1, burst).from(Range::new(10, 14)) as usize - 10] += 1;
        }
        assert!(counts.iter().all(|count| (1_800..=2_200).contains(count)), "{counts:?}");
        assert_eq!(Draw::new(7, 1, 1).from(Range::just(9)), 9);
    }
}
