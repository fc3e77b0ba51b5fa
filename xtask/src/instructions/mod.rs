//! `cargo xtask instructions`: counts the instructions per packet and compares them with the budgets in
//! `benches/budgets.toml`. CONTRIBUTING.md describes its use, docs/dev/benchmarks.md the method.

mod budgets;
mod callgrind;

use std::{
    env,
    path::Path,
    process::{Command, ExitCode},
};

use clap::Args;

use self::budgets::{Budgets, Origin};
use crate::{Failure, LIMIT_EXCEEDED};

#[derive(Args)]
pub(crate) struct Options {
    /// Use the current counts as the new budgets
    #[arg(long)]
    update: bool,
}

/// Builds, counts and compares. If the budgets were made with a different compiler, the comparison is
/// skipped, which is reported but is not a failure.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let repository = crate::repository()?;
    let file = repository.join("benches/budgets.toml");
    let here = compiler()?;
    let budgets = if options.update && !file.exists() { None } else { Some(Budgets::load(&file)?) };
    if let Some(why) = budgets.as_ref().and_then(|budgets| budgets.made_elsewhere(&here))
        && !options.update
    {
        println!("SKIPPED: {why}");
        return Ok(ExitCode::SUCCESS);
    }

    let target = crate::target(&repository);
    build(&repository)?;
    let program = target.join("release/examples/instructions").canonicalize()?;
    let counts = callgrind::count(&program, &target.join("instructions"))?;
    let comparison = budgets::compare(budgets.as_ref(), &counts);
    print!("{}", comparison.table());

    if options.update {
        Budgets::of(here, budgets.as_ref(), &counts).save(&file)?;
        println!("\nThe new budgets are in {}: give the reason in the commit message.", file.display());
        return Ok(ExitCode::SUCCESS);
    }
    println!("\n{}", comparison.summary());
    Ok(if comparison.is_kept() { ExitCode::SUCCESS } else { ExitCode::from(LIMIT_EXCEEDED) })
}

fn compiler() -> Result<Origin, Failure> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("-vV").output().map_err(|error| format!("rustc: {error}"))?;
    Origin::of_rustc(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| "`rustc -vV` does not print a version".into())
}

fn build(repository: &Path) -> Result<(), Failure> {
    let built = crate::cargo(repository)
        .args(["build", "--release", "--locked", "--package=turnpike-benches", "--example=instructions"])
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()?;
    if built.success() { Ok(()) } else { Err("the release build of turnpike-benches failed".into()) }
}
