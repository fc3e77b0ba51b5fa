//! Helpers for the tests of several crates; never linked into turnpike itself. Functions panic if the test must fail, and return an error
//! with the reason if the test cannot run on this machine.
#![forbid(unsafe_code)]

pub mod alone;
pub mod certificates;
pub mod databases;
mod dir;
pub mod fuzz;
mod http_stub;
mod loopback;
pub mod mmdb;
pub mod names;
mod ports;
pub mod process;
pub mod randomness;
pub mod rtp;
pub mod stun;
mod wait;

pub use dir::Dir;
pub use http_stub::HttpStub;
pub use loopback::loopback_keeps_super_packets;
pub use ports::{free_address, free_port};
pub use wait::{PATIENCE, eventually};

/// True if golden files should be rewritten: `TURNPIKE_TEST_GOLDEN=write`.
pub fn writes_golden_files() -> bool {
    std::env::var_os("TURNPIKE_TEST_GOLDEN").is_some_and(|what| what == "write")
}

/// Defines tests that call one function with different arguments.
#[macro_export]
macro_rules! tests {
    ($($(#[$about:meta])* $name:ident: $call:expr;)+) => {
        $($(#[$about])* #[test] fn $name() { $call; })+
    };
}
