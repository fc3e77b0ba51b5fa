//! Random numbers derived from the caller's seed, so that a run can be repeated.

use std::fmt;

use rand_chacha::{
    ChaCha12Rng,
    rand_core::{RngCore as _, SeedableRng as _},
};

/// Seed, which must be unpredictable and different for each state machine.
pub struct Seed(pub [u8; 32]);

impl fmt::Debug for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seed(..)")
    }
}

pub(crate) struct Random(ChaCha12Rng);

impl Random {
    pub(crate) fn new(Seed(seed): Seed) -> Self {
        Self(ChaCha12Rng::from_seed(seed))
    }

    pub(crate) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.fill_bytes(&mut bytes);
        bytes
    }

    pub(crate) fn u32(&mut self) -> u32 {
        self.0.next_u32()
    }

    pub(crate) fn u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    pub(crate) fn fork(&mut self) -> Self {
        Self::new(Seed(self.bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_yields_one_sequence_and_is_never_printed() {
        let draw = |seed| {
            let mut random = Random::new(Seed([seed; 32]));
            (random.u32(), random.u64(), random.bytes::<12>(), random.fork().u64())
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!(!format!("{:?}", Seed([213; 32])).contains("213"));
    }
}
