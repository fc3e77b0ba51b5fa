//! `cargo xtask miri`: runs tests of `net` and `offload` under Miri, which detects undefined behaviour that a CPU tolerates. Tests with
//! system calls that Miri does not support are left out. Skipped unless a nightly toolchain with Miri is installed.

use std::process::{Command, ExitCode};

use crate::Failure;

/// Crates, and those of their tests that use only system calls supported by Miri and finish within hours.
const PURE: [(&str, &[&str]); 2] = [
    (
        "turnpike-net",
        &[
            "sys::",
            "buffer_is_split_at_the_segment_size",
            "empty_datagram_counts_as_one",
            "bytes_outside_the_arena_have_no_span",
            "join_fills_the_gap_and_a_full_arena_offers_no_room",
            "send::tests::a_full_device_queue",
            "send::tests::a_large_segment",
            "send::tests::a_message_is_no_longer",
            "send::tests::adjacent_datagrams",
            "send::tests::an_interrupted_call",
            "send::tests::empty_datagrams",
            "send::tests::other_sockets",
        ],
    ),
    ("turnpike-offload", &["layout::", "slots::", "drained::"]),
];

pub(crate) fn run() -> Result<ExitCode, Failure> {
    let version = Command::new("cargo").args(["+nightly", "miri", "--version"]).output();
    let Some(version) = version.ok().filter(|output| output.status.success()) else {
        println!(
            "skipped: there is no nightly toolchain with Miri (rustup toolchain install nightly --component miri,rust-src)"
        );
        return Ok(ExitCode::SUCCESS);
    };
    println!("{}", String::from_utf8_lossy(&version.stdout).trim());
    for (package, tests) in PURE {
        let mut command = Command::new("cargo");
        // Remove cargo's own variables, which refer to the current toolchain.
        for variable in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS"] {
            command.env_remove(variable);
        }
        command
            .args(["+nightly", "miri", "test", "--locked", "--package", package, "--lib", "--"])
            .args(tests);
        command.env("MIRIFLAGS", "-Zmiri-strict-provenance");
        if !command.status()?.success() {
            return Err(format!(
                "Miri found a problem in {package}, or one of its tests makes a system call"
            )
            .into());
        }
    }
    Ok(ExitCode::SUCCESS)
}
