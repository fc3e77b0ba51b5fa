//! Helpers that tests of several crates share; the product links none of them. A function panics where its test fails,
//! and returns an error that says why the machine cannot run the test.
#![forbid(unsafe_code)]

pub mod alone;
pub mod certificates;
pub mod databases;
mod dir;
pub mod fuzz;
mod loopback;
pub mod names;
mod ports;
pub mod process;
pub mod randomness;
pub mod stun;
mod wait;

pub use dir::Dir;
pub use loopback::loopback_keeps_super_packets;
pub use ports::{free_address, free_port};
pub use wait::{PATIENCE, eventually};

/// True if golden files are to be written: `TURNPIKE_TEST_GOLDEN=write`.
pub fn writes_golden_files() -> bool {
    std::env::var_os("TURNPIKE_TEST_GOLDEN").is_some_and(|what| what == "write")
}

/// Tests that differ in what they are called with.
#[macro_export]
macro_rules! tests {
    ($($(#[$about:meta])* $name:ident: $call:expr;)+) => {
        $($(#[$about])* #[test] fn $name() { $call; })+
    };
}
