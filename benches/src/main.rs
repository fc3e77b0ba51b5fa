//! Runs each case of [`codec`] and [`route`] [`CALLS`] times under valgrind, for `cargo xtask instructions`, which compares the counts with
//! `budgets.toml`. Without valgrind it only checks that each case does what its name suggests.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool: its results go to standard output")]

mod codec;
mod route;

use std::hint::black_box;

/// Calls per case: enough that the counts of a randomly seeded hash table approach their mean.
const CALLS: u32 = 2000;

fn main() {
    let mut bench = Bench;
    codec::cases(&mut bench);
    route::cases(&mut bench);
}

/// Runs the cases one after the other.
struct Bench;

impl Bench {
    /// Counts `call`; the use of its result prevents the optimiser from removing the call. Prints the case's name and number of calls, in
    /// the order of valgrind's dumps.
    fn case<T>(&mut self, name: &str, mut call: impl FnMut() -> T) {
        let mut body = || {
            black_box(call());
        };
        // One-time work (CPU detection, symbol lookup, memory growth) is not part of a packet's cost.
        body();
        turnpike_counted_region(CALLS, &mut body);
        println!("{name} {CALLS}");
    }
}

/// The only function that valgrind counts, with a dump after each return; xtask knows its name. It is not inlined and is called through a
/// pointer, so that there is only one copy and each case has the same few instructions of overhead.
#[inline(never)]
fn turnpike_counted_region(calls: u32, body: &mut dyn FnMut()) {
    for _ in 0..calls {
        body();
    }
}
