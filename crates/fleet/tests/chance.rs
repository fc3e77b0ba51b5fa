//! Pseudo-random numbers, the same in every run.

pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// splitmix64.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    pub(crate) fn dice(&mut self) -> [u64; 3] {
        [self.next(), self.next(), self.next()]
    }

    /// Random fraction from 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "a fraction has 53 bits")]
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(crate) fn below(&mut self, most: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(most).unwrap()).unwrap()
    }

    /// Approximately Poisson-distributed: the variance is the mean.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "small, and never below zero"
    )]
    pub(crate) fn about(&mut self, mean: f64) -> u32 {
        // Twelve fractions add up to 6 with a variance of 1.
        let normal: f64 = (0..12).map(|_| self.fraction()).sum::<f64>() - 6.0;
        (mean + normal * mean.sqrt() + self.fraction()).max(0.0) as u32
    }
}
