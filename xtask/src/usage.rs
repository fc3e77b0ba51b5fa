//! `cargo xtask usage`: compares the usage ledger with the load generator in each fault, and tabulates the differences. The rows are tests of
//! the binary (crates/cli/tests/end_to_end/usage.rs), run in sequence.

use std::process::{ExitCode, Stdio};

use crate::Failure;

/// Start of the lines in which the tests report their figures.
const ROW: &str = "USAGE: ";

/// Fails if a test fails: a row was not exact. The exit code is 5 if a row could not run here.
pub(crate) fn run() -> Result<ExitCode, Failure> {
    let repository = crate::repository()?;
    let output = crate::cargo(&repository)
        .args(["test", "--quiet", "--workspace", "--locked", "--test", "end_to_end"])
        .args(["--", "usage::", "--nocapture", "--test-threads=1"])
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{:<44} {:>14} {:>14} {:>10}", "fault", "bytes relayed", "in the ledger", "missing");
    for line in said.lines() {
        let Some((_, row)) = line.split_once(ROW) else { continue };
        let mut cells = row.split('|').map(str::trim);
        let mut next = || cells.next().unwrap_or_default();
        println!("{:<44} {:>14} {:>14} {:>10}", next(), next(), next(), next());
    }
    let skipped: Vec<&str> = said.lines().filter_map(crate::why_skipped).collect();
    skipped.iter().for_each(|why| println!("not run here: {why}"));
    if !output.status.success() {
        print!("{said}{}", String::from_utf8_lossy(&output.stderr));
        return Err("a test of the usage ledger failed".into());
    }
    Ok(if skipped.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(crate::INCOMPLETE) })
}
