//! `cargo xtask usage` and `cargo xtask quality`: tables of what tests of the binary report (crates/cli/tests/end_to_end).

use std::process::{ExitCode, Stdio};

use clap::Args;

use crate::Failure;

#[derive(Args)]
pub(crate) struct QualityOptions {
    /// Calls with random impairments
    #[arg(long, value_name = "N", default_value_t = 100)]
    cases: u32,

    /// Determines the impairments
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

struct Table {
    /// Tests that report the rows.
    tests: &'static str,
    /// Start of the lines with rows.
    row: &'static str,
    /// Titles and widths of the columns; numbers are on the right.
    columns: &'static [(&'static str, usize)],
    failure: &'static str,
}

/// Compares the usage ledger with the load generator in each fault.
pub(crate) fn usage() -> Result<ExitCode, Failure> {
    let table = Table {
        tests: "usage::",
        row: "USAGE: ",
        columns: &[("fault", 44), ("bytes relayed", 14), ("in the ledger", 14), ("missing", 10)],
        failure: "a test of the usage ledger failed",
    };
    table.run(&[])
}

/// Compares the measured quality of calls with what both ends counted.
pub(crate) fn quality(options: &QualityOptions) -> Result<ExitCode, Failure> {
    let table = Table {
        tests: "media_quality::truth",
        row: "QUALITY: ",
        columns: &[
            ("call", 20),
            ("impaired", 16),
            ("impairment", 14),
            ("truth", 22),
            ("measured", 9),
            ("named", 16),
            ("verdict", 7),
        ],
        failure: "a call was measured wrongly",
    };
    let settings = [
        ("TURNPIKE_QUALITY_CASES", options.cases.to_string()),
        ("TURNPIKE_QUALITY_SEED", options.seed.to_string()),
    ];
    table.run(&settings)
}

impl Table {
    /// Fails if a test fails. The exit code is 5 if a test could not run here.
    fn run(&self, settings: &[(&str, String)]) -> Result<ExitCode, Failure> {
        let repository = crate::repository()?;
        let output = crate::cargo(&repository)
            .args(["test", "--quiet", "--workspace", "--locked", "--test", "end_to_end"])
            .args(["--", self.tests, "--nocapture", "--test-threads=1"])
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let titles: Vec<&str> = self.columns.iter().map(|(title, _)| *title).collect();
        println!("{}", self.line(&titles));
        let rows: Vec<&str> =
            said.lines().filter_map(|line| line.split_once(self.row)).map(|(_, row)| row).collect();
        for row in &rows {
            println!("{}", self.line(&row.split('|').map(str::trim).collect::<Vec<_>>()));
        }
        let skipped: Vec<&str> = said.lines().filter_map(crate::why_skipped).collect();
        skipped.iter().for_each(|why| println!("not run here: {why}"));
        if !output.status.success() {
            print!("{said}{}", String::from_utf8_lossy(&output.stderr));
            return Err(self.failure.into());
        }
        println!("rows: {}, all right", rows.len());
        Ok(if skipped.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(crate::INCOMPLETE) })
    }

    fn line(&self, cells: &[&str]) -> String {
        let cells = self.columns.iter().enumerate().map(|(at, (_, width))| {
            let cell = cells.get(at).copied().unwrap_or_default();
            if at == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ")
    }
}
