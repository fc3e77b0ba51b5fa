//! Fuzz targets that also run as ordinary tests. The test feeds the target its seeds and the inputs of `fuzz/NAME/` (`captured.hex`
//! from real clients, `found.hex` and `faults.hex` from fuzzing, one input in hex per line). `cargo xtask fuzz` runs the same test with
//! coverage counters and fuzzes it for a given time.

use std::{
    env, fs,
    panic::{AssertUnwindSafe, RefUnwindSafe, catch_unwind, resume_unwind},
    path::Path,
    time::Duration,
};

/// Environment variable that `cargo xtask fuzz` sets to fuzz the target.
const FUZZ: &str = "TURNPIKE_FUZZ";
/// Environment variable that `cargo xtask fuzz` sets to a file: the target writes its seeds into that file and exits.
const SEEDS: &str = "TURNPIKE_FUZZ_SEEDS";

pub const FILES: [&str; 3] = ["captured.hex", "found.hex", "faults.hex"];

/// Runs a target: `check` panics on an input that reveals a bug. `seeds` are a few good inputs that cover a lot of code.
pub fn target(name: &str, seeds: impl FnOnce() -> Vec<Vec<u8>>, check: impl Fn(&[u8]) + RefUnwindSafe) {
    if let Some(file) = env::var_os(SEEDS) {
        fs::write(&file, lines(&seeds())).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    } else if env::var_os(FUZZ).is_some() {
        // Inputs are not shrunk here, because libFuzzer does this afterwards.
        bolero::check!().with_shrink_time(Duration::ZERO).for_each(|input: &[u8]| check(input));
    } else {
        replay(name, &seeds(), check);
    }
}

/// Inputs from real clients for the target with this name, in their original order.
pub fn captured(name: &str) -> Vec<Vec<u8>> {
    remembered(name, FILES[0])
}

/// Structured input of a target. Yields zeros once the bytes run out, so that any input is valid.
#[derive(Clone, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Next byte modulo `most`.
    pub fn below(&mut self, most: u8) -> u8 {
        self.byte() % most
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.array())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.array())
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.up_to(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    /// Takes as many bytes as the next byte indicates, or fewer at the end of the input.
    pub fn bytes(&mut self) -> &'a [u8] {
        let length = self.byte();
        self.up_to(length.into())
    }

    /// Takes as many bytes as the next two bytes indicate, or fewer at the end of the input.
    pub fn long_bytes(&mut self) -> &'a [u8] {
        let length = self.u16();
        self.up_to(length.into())
    }

    pub fn choice<'t, T>(&mut self, among: &'t [T]) -> &'t T {
        assert!(among.len() <= 256, "the choice is made by one byte");
        &among[usize::from(self.byte()) % among.len()]
    }

    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn up_to(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

#[expect(clippy::print_stdout, reason = "libtest shows the line if the test fails")]
fn replay(name: &str, seeds: &[Vec<u8>], check: impl Fn(&[u8]) + RefUnwindSafe) {
    assert!(!seeds.is_empty(), "{name} has no seeds");
    let remembered = FILES.map(|file| (file, remembered(name, file)));
    let files = remembered.iter().map(|(file, inputs)| (*file, inputs.as_slice()));
    for (from, inputs) in [("seed", seeds)].into_iter().chain(files) {
        for (number, input) in inputs.iter().enumerate() {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(input))) {
                println!("{name}, {from} {}: {}", number + 1, hex::encode(input));
                resume_unwind(panic);
            }
        }
    }
}

fn remembered(name: &str, file: &str) -> Vec<Vec<u8>> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz")).join(name).join(file);
    let text = fs::read_to_string(&path).unwrap_or_default();
    let inputs = text.lines().filter(|line| !line.starts_with('#'));
    inputs
        .map(|line| hex::decode(line).unwrap_or_else(|error| panic!("{}: {line}: {error}", path.display())))
        .collect()
}

fn lines(inputs: &[Vec<u8>]) -> String {
    inputs.iter().map(|input| hex::encode(input) + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_yields_zeros_after_the_end() {
        let mut input = Input::new(&[1, 2, 3, 7, 9, 9]);
        assert_eq!((input.u16(), input.below(2), input.bytes()), (0x0102, 1, &[9, 9][..]));
        assert!(input.is_empty());
        assert_eq!((input.u32(), input.bytes(), *input.choice(&[5, 6])), (0, &[][..], 5));
        assert_eq!(Input::new(&[0, 2, 8, 8, 8]).long_bytes(), [8, 8]);
    }

    #[test]
    fn a_failing_input_fails_the_test() {
        let seeds = || vec![vec![1], vec![2]];
        let replayed = |bad: u8| catch_unwind(|| target("none", seeds, |input| assert_ne!(input, [bad])));
        assert!(replayed(2).is_err());
        assert!(replayed(3).is_ok());
    }
}
