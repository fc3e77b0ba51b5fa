//! Runs each case of [`codec`] and [`route`] [`CALLS`] times under valgrind's eyes, for `cargo xtask instructions`, which
//! compares the counts with `budgets.toml`. Without valgrind it only checks that each case does what its name says.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool: its results go to standard output")]

mod codec;
mod route;

use std::hint::black_box;

/// Calls per case: enough that the counts of a hash table with a random seed come near their mean.
const CALLS: u32 = 2000;

fn main() {
    let mut bench = Bench;
    codec::cases(&mut bench);
    route::cases(&mut bench);
}

/// What the cases are handed to, one after the other.
struct Bench;

impl Bench {
    /// Counts `call`, which gives a value so that it cannot be optimised away. Prints the case's name and number of
    /// calls, in the order in which valgrind dumps its counters.
    fn case<T>(&mut self, name: &str, mut call: impl FnMut() -> T) {
        let mut body = || {
            black_box(call());
        };
        // Whatever happens only once (features of the CPU, symbols of shared libraries, memory grown) is no cost of a packet.
        body();
        turnpike_counted_region(CALLS, &mut body);
        println!("{name} {CALLS}");
    }
}

/// The only function in which valgrind counts, and after each return from which it dumps: named in xtask. One copy, not
/// inlined, called through a pointer, so that each case is measured with the same few instructions of frame.
#[inline(never)]
fn turnpike_counted_region(calls: u32, body: &mut dyn FnMut()) {
    for _ in 0..calls {
        body();
    }
}
