//! Statistical tests for unpredictable values: identifiers, tokens, cookies. They detect broken generators (constant, counting, biased,
//! with a short period), but not predictable ones, which no statistical test can detect.
//!
//! A good generator exceeds the threshold of a comparison less than once in 10^13 times. One call makes a few hundred comparisons, so the
//! probability of a false alarm is below 10^-9.

use std::collections::HashSet;

/// Minimum number of samples; on average, each value of a byte occurs 16 times.
pub const SAMPLES: usize = 4096;

/// Threshold in standard deviations of the normal distribution; the two-sided probability is 8e-14.
const FAR: f64 = 7.5;

/// Tests samples of equal length. Only bits that are set in `mask` must be random. If there are at least 56 of them, no sample may repeat.
pub fn judge(samples: &[Vec<u8>], mask: &[u8]) -> Result<(), String> {
    assert!(samples.len() >= SAMPLES, "{} samples", samples.len());
    let masked: Vec<Vec<u8>> = samples
        .iter()
        .map(|sample| {
            assert_eq!(sample.len(), mask.len());
            sample.iter().zip(mask).map(|(byte, mask)| byte & mask).collect()
        })
        .collect();
    let random_bits: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
    assert!(random_bits > 0, "the mask has no bits set");
    // 4096 good samples of 56 bits contain a duplicate once in 10^10 cases.
    if random_bits >= 56 {
        no_repetition(&masked)?;
    }
    balanced(&masked, mask, "a sample")?;
    // Differences between consecutive samples reveal a counter: its low bits are balanced but change each time, and its high bits are
    // constant.
    let changes: Vec<Vec<u8>> = masked
        .windows(2)
        .map(|pair| pair[0].iter().zip(&pair[1]).map(|(one, other)| one ^ other).collect())
        .collect();
    balanced(&changes, mask, "the difference between one sample and the next")?;
    for at in (0..mask.len()).filter(|at| mask[*at] == 0xFF) {
        even(masked.iter().map(|sample| sample[at]), at)?;
    }
    Ok(())
}

fn no_repetition(samples: &[Vec<u8>]) -> Result<(), String> {
    let mut seen = HashSet::with_capacity(samples.len());
    match samples.iter().position(|sample| !seen.insert(sample)) {
        None => Ok(()),
        Some(at) => Err(format!("sample {at} repeats: {:02x?}", samples[at])),
    }
}

/// Monobit tests of all bits together and of each bit.
fn balanced(samples: &[Vec<u8>], mask: &[u8], what: &str) -> Result<(), String> {
    let (mut all, mut ones_of_all) = (0_u32, 0_u32);
    for (at, byte) in mask.iter().enumerate() {
        for bit in (0..8).map(|bit| 1_u8 << bit).filter(|bit| byte & bit != 0) {
            let ones = count(samples.iter().filter(|sample| sample[at] & bit != 0).count());
            let of = count(samples.len());
            far_from_half(ones, of).map_err(|far| format!("bit {bit:#04x} of byte {at} of {what}: {far}"))?;
            all += of;
            ones_of_all += ones;
        }
    }
    far_from_half(ones_of_all, all).map_err(|far| format!("all bits of {what}: {far}"))
}

fn far_from_half(ones: u32, of: u32) -> Result<(), String> {
    let deviations = (f64::from(ones) * 2.0 - f64::from(of)) / f64::from(of).sqrt();
    if deviations.abs() > FAR {
        return Err(format!("{ones} of {of} bits are ones, {deviations:.1} standard deviations from half"));
    }
    Ok(())
}

/// Two-sided chi-square test of a byte's 256 values. It is two-sided because the bytes of a counter are more even than chance.
fn even(bytes: impl Iterator<Item = u8>, at: usize) -> Result<(), String> {
    let mut counts = [0_u32; 256];
    bytes.for_each(|byte| counts[usize::from(byte)] += 1);
    let expected = f64::from(counts.iter().sum::<u32>()) / 256.0;
    let chi_square: f64 = counts.iter().map(|count| (f64::from(*count) - expected).powi(2) / expected).sum();
    // Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is approximately normal.
    let spread = 2.0 / (9.0 * 255.0);
    let deviations = ((chi_square / 255.0).cbrt() - (1.0 - spread)) / spread.sqrt();
    if deviations.abs() > FAR {
        return Err(format!(
            "byte {at}: chi-square {chi_square:.0} with 255 degrees of freedom, {deviations:.1} standard deviations from the mean"
        ));
    }
    Ok(())
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Generator = Box<dyn FnMut(u64) -> [u8; 8]>;

    fn samples(mut next: impl FnMut(u64) -> [u8; 8]) -> Vec<Vec<u8>> {
        (0..SAMPLES as u64).map(|number| next(number).to_vec()).collect()
    }

    fn verdict(next: impl FnMut(u64) -> [u8; 8]) -> Result<(), String> {
        judge(&samples(next), &[0xFF; 8])
    }

    #[test]
    fn a_good_generator_passes_with_any_mask() {
        for mask in [[0xFF; 8], [0x3F, 0xFF, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0x80]] {
            assert_eq!(judge(&samples(|_| rand::random()), &mask), Ok(()));
        }
    }

    #[test]
    fn broken_generators_are_found() {
        let broken: [(&str, Generator); 10] = [
            ("a constant", Box::new(|_| [0x5A; 8])),
            ("a counter", Box::new(|number| number.to_be_bytes())),
            (
                "a counter that starts anywhere",
                Box::new(|number| (0x0123_4567_89AB_CDEF + number).to_le_bytes()),
            ),
            ("a counter repeated in every byte", Box::new(|number| [number.to_be_bytes()[7]; 8])),
            (
                "a clock next to random bytes",
                Box::new(|number| {
                    let [a, b, c, d] = (1_700_000_000 + u32::try_from(number).unwrap() / 100).to_be_bytes();
                    let [e, f, g, h] = rand::random();
                    [a, b, c, d, e, f, g, h]
                }),
            ),
            ("text", Box::new(|_| rand::random::<[u8; 8]>().map(|byte| b'a' + byte % 26))),
            (
                "one bit that is always set",
                Box::new(|_| {
                    let mut bytes: [u8; 8] = rand::random();
                    bytes[3] |= 4;
                    bytes
                }),
            ),
            (
                "six of ten bits set",
                Box::new(|_| {
                    std::array::from_fn(|_| {
                        (0..8).fold(0, |byte, _| byte << 1 | u8::from(rand::random_range(0..10) < 6))
                    })
                }),
            ),
            (
                "a missing value",
                Box::new(|_| {
                    rand::random::<[u8; 8]>().map(|byte| if byte < 128 { 255 - byte } else { byte })
                }),
            ),
            (
                "every value twice",
                Box::new({
                    let mut last = [0; 8];
                    move |number| {
                        if number % 2 == 0 {
                            last = rand::random();
                        }
                        last
                    }
                }),
            ),
        ];
        for (what, next) in broken {
            let found = verdict(next);
            assert!(found.is_err(), "{what}");
        }
    }

    /// Samples like those of a generator with a short period, or with an identical seed after each start.
    #[test]
    fn a_repeated_sample_is_found() {
        let mut all = samples(|_| rand::random());
        let last = all.len() - 1;
        all[last] = all[7].clone();
        let found = judge(&all, &[0xFF; 8]).unwrap_err();
        assert!(found.contains("repeats"), "{found}");
    }

    #[test]
    fn flaws_in_unmasked_bits_are_ignored() {
        let version = |_| {
            let mut bytes: [u8; 8] = rand::random();
            bytes[0] = 4;
            bytes
        };
        assert!(verdict(version).is_err());
        assert_eq!(judge(&samples(version), &[0, 255, 255, 255, 255, 255, 255, 255]), Ok(()));
    }

    /// According to tables, chi-square with 255 degrees of freedom exceeds 330.5 one time in a thousand, which corresponds to 3.09
    /// standard deviations of the normal distribution.
    #[test]
    fn chi_square_approximation_agrees_with_the_table() {
        let spread: f64 = 2.0 / (9.0 * 255.0);
        let deviations = ((330.52_f64 / 255.0).cbrt() - (1.0 - spread)) / spread.sqrt();
        assert!((deviations - 3.09).abs() < 0.02, "{deviations}");
    }
}
