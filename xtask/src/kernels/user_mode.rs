//! Runs tests for a different architecture on this machine's kernel: QEMU emulates the CPU and passes system calls through.

use std::{fs::File, process::Command};

use super::{machine::Root, programs::Tests, report::Report};
use crate::Failure;

pub(super) const EMULATOR: (&str, &str) = ("qemu-aarch64", "qemu-user");

/// Crates whose tests do not depend on the kernel version.
pub(super) const CRATES: [&str; 2] = ["wire", "turn"];

pub(super) fn run(tests: &[Tests], root: &Root, log: &mut File, report: &mut Report) -> Result<(), Failure> {
    for Tests { name, program, dir } in tests {
        report.take(&format!("@@ tests {name}"));
        let mut emulator = Command::new("timeout");
        emulator.args(["1500", EMULATOR.0, "-L"]).arg(&root.folder).arg(program);
        emulator.args(["--color", "never", "--show-output"]).current_dir(dir);
        // Emulated tests take ten times as long.
        emulator.env("PROPTEST_CASES", "16").env("RUST_BACKTRACE", "0");
        let status = report.read(&mut emulator, log)?;
        report.take(&format!("@@ exit {name} {}", status.code().unwrap_or(-1)));
    }
    Ok(())
}
