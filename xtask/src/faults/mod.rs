//! `cargo xtask faults`: injects one fault at a time while clients are on calls, and tabulates the effects. The rows are tests of the
//! binary (crates/trials/tests/faults), run in sequence with the release build. Rows of fleet faults have a table of their own.

mod fleet;
mod table;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
};

use clap::Args;

use crate::Failure;

/// Everything recovered, but rows are void because the machine was busy.
const VOID: u8 = 4;

const MODULE: &str = "faults::";
const FLEET: &str = "faults::fleet::";

#[derive(Args)]
pub(crate) struct Options {
    /// Run only rows whose names contain one of these texts [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Write the rows into the tables of docs/dev/reliability.md, keeping rows that did not run, and of docs/dev/fleet-faults.md, all of
    /// whose rows must run; nothing is written if a row is broken, void or skipped
    #[arg(long)]
    write: bool,

    /// List the rows without running them
    #[arg(long)]
    list: bool,

    /// Program to test [default: a release build of this repository]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Runs the fault tests, one per row. Fails if a row is broken; the exit code is 3 if a figure exceeds its limit, 4 if a row must be
/// repeated on an idle machine, and 5 if a row could not run here.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let repository = crate::repository()?;
    let all = rows(&repository)?;
    let wanted = |name: &&String| {
        options.names.is_empty() || options.names.iter().any(|part| name.contains(part.as_str()))
    };
    let chosen: Vec<&String> = all.iter().filter(wanted).collect();
    if options.list || chosen.is_empty() {
        all.iter().for_each(|name| println!("{}", short(name)));
        let none = format!("no such row: {}", options.names.join(" or "));
        return if options.list { Ok(ExitCode::SUCCESS) } else { Err(none.into()) };
    }
    let is_of_fleet = |name: &&String| name.starts_with(FLEET);
    let of_fleet = chosen.iter().copied().filter(is_of_fleet).count();
    if options.write && of_fleet > 0 && of_fleet < all.iter().filter(is_of_fleet).count() {
        return Err(
            "the table of fleet faults needs all of its rows: cargo xtask faults fleet --write".into()
        );
    }
    let program = crate::program(&repository, options.program.as_deref())?;
    let found = crate::target(&repository).join("faults");
    fs::create_dir_all(&found)?;
    let mut table = table::Table::default();
    for (number, name) in chosen.iter().enumerate() {
        eprintln!("{}/{} {} ...", number + 1, chosen.len(), short(name));
        let row = found.join(format!("{}.json", short(name)));
        if row.exists() {
            fs::remove_file(&row)?;
        }
        let output = crate::trials(&repository)
            .args(["--", "--exact", name, "--include-ignored", "--nocapture", "--test-threads=1"])
            .env("TURNPIKE_TEST_ROWS", &found)
            .env("TURNPIKE_TEST_PROGRAM", &program)
            .stdin(Stdio::null())
            .output()?;
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        fs::write(found.join(format!("{}.log", short(name))), &said)?;
        table.add(short(name), output.status.success(), &row, &said)?;
    }
    print!("{}", table.markdown());
    println!("Logs are in {}", found.display());
    if options.write {
        match table.is_in_part() {
            None => table.write(&repository, &all.iter().map(|name| short(name)).collect::<Vec<_>>())?,
            Some(why) => println!("{why}"),
        }
    }
    if let skipped @ [_, ..] = &table.skipped()[..] {
        println!("{} of {} rows could not run here: {}", skipped.len(), chosen.len(), skipped.join(", "));
    }
    Ok(ExitCode::from(table.code()))
}

fn short(name: &str) -> &str {
    name.rsplit("::").next().unwrap_or(name)
}

/// Names of all rows; modules named `tests` are unit tests of the tools.
fn rows(repository: &Path) -> Result<Vec<String>, Failure> {
    let output = crate::trials(repository).args(["--", "--list"]).stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err("the tests cannot be built".into());
    }
    let said = String::from_utf8_lossy(&output.stdout);
    let names = said.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names
        .filter(|name| name.starts_with(MODULE) && !name.contains("::tests::"))
        .map(str::to_owned)
        .collect())
}
