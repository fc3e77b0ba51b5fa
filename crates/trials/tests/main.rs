//! Fault, attack and soak tests of the real binary. `cargo xtask faults`, `attack`, `soak` and `upgrade-from` run them in full and write
//! the tables in docs/dev/reliability.md and docs/dev/fleet-faults.md; `./test` runs those that are not ignored.
#![forbid(unsafe_code)]
// Cargo builds this only with `--test`; the attribute makes clippy treat the helpers as test code.
#![cfg(test)]

mod attack;
mod faults;
mod soak;
mod upgrade_from;
