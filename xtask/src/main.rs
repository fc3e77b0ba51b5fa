//! Repository tasks that are too long for a shell line; `cargo xtask --help` lists them.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool: its results go to standard output")]

mod attack;
mod builder;
mod components;
mod debian;
mod differential;
mod document;
mod faults;
mod fuzz;
mod instructions;
mod kernels;
mod links;
mod miri;
mod mutants;
mod numbers;
mod prose;
mod reproducible;
mod requirements;
mod soak;
mod static_build;
mod tables;
mod upgrade_from;

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use clap::{Parser, Subcommand};

/// Any error; no caller distinguishes kinds.
type Failure = Box<dyn std::error::Error>;

/// Exit code for an exceeded limit, as in turnpike itself.
const LIMIT_EXCEEDED: u8 = 3;
/// Exit code if everything that ran passed but something could not run on this machine.
const INCOMPLETE: u8 = 5;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Development tasks of the turnpike repository")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Count the instructions per packet and compare them with benches/budgets.toml (needs valgrind)
    Instructions(instructions::Options),
    /// Fuzz, and record new inputs (fuzz/) and the cost (fuzz/ledger.toml)
    Fuzz(fuzz::Options),
    /// Write the bill of materials of the binary (CycloneDX)
    Components(components::Options),
    /// Inject one fault at a time while clients are on calls, and tabulate the effects
    Faults(faults::Options),
    /// Relay for hours, and check whether any resource use grows
    Soak(soak::Options),
    /// Run attacks on all data paths, and write the tables of docs/dev/reliability.md
    Attack(attack::Options),
    /// Send random sequences to turnpike, coturn and pion, and compare the responses
    Differential(differential::Options),
    /// Boot old and new kernels, relay on each data path, and print a table (needs root or QEMU)
    Kernels(kernels::Options),
    /// Check links between documents, and mentions of documents in code
    Links,
    /// Run under Miri the code that uses `unsafe` but no system calls (needs a nightly toolchain with Miri)
    Miri,
    /// Break one function at a time in wire, turn and fleet, and print changes that no test notices (takes hours)
    Mutants(mutants::Options),
    /// Measure the size and shape of the code: lines, types, public items, circular imports, unsafe blocks
    Numbers(numbers::Options),
    /// Count phrases that make prose hard to read, against the budget in tests/prose.tsv
    Prose(prose::Options),
    /// Compare the measured quality of calls with random impairments with what both ends counted, and print a table
    Quality(tables::QualityOptions),
    /// Check that each RFC requirement has a passing test or a documented reason
    Requirements(requirements::Options),
    /// Build the release binary twice, in different directories, and compare
    Reproducible(reproducible::Options),
    /// Build the static binary of a release, with Debian's compilers if this machine lacks the target
    Static(static_build::Options),
    /// Upgrade under load from the build of an earlier commit to this one, and back
    UpgradeFrom(upgrade_from::Options),
    /// Compare the usage ledger with the load generator across faults, and print a table
    Usage,
}

fn main() -> ExitCode {
    let done = match Arguments::parse().chore {
        Chore::Instructions(options) => instructions::run(&options),
        Chore::Components(options) => components::run(&options),
        Chore::Fuzz(options) => fuzz::run(&options),
        Chore::Faults(options) => faults::run(&options),
        Chore::Soak(options) => soak::run(&options),
        Chore::Attack(options) => attack::run(&options),
        Chore::Differential(options) => differential::run(&options),
        Chore::Kernels(options) => kernels::run(&options),
        Chore::Links => links::run(),
        Chore::Miri => miri::run(),
        Chore::Mutants(options) => mutants::run(&options),
        Chore::Numbers(options) => numbers::run(&options),
        Chore::Prose(options) => prose::run(&options),
        Chore::Reproducible(options) => reproducible::run(&options),
        Chore::Quality(options) => tables::quality(&options),
        Chore::Requirements(options) => requirements::run(&options),
        Chore::Static(options) => static_build::run(&options),
        Chore::UpgradeFrom(options) => upgrade_from::run(&options),
        Chore::Usage => tables::usage(),
    };
    match done {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Reason for skipping a test, from a line of output; the test's name or dots may precede it.
fn why_skipped(line: &str) -> Option<&str> {
    let name = line.strip_prefix("test ").and_then(|line| line.split_once(" ... "));
    name.map_or_else(|| line.trim_start_matches(['.', 'i']), |(_, words)| words).strip_prefix("SKIPPED: ")
}

/// Root of the repository, from any directory below it.
fn repository() -> Result<PathBuf, Failure> {
    // Cargo sets this variable; a copied binary uses the path from its build.
    let manifest =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    Ok(manifest.parent().ok_or("xtask has no parent directory")?.to_owned())
}

fn target(repository: &Path) -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository.join("target"), PathBuf::from)
}

/// The current cargo, in the repository, without the variables that it set for this package: with them, build scripts such as ring's would
/// run again, and their dependents would be recompiled.
fn cargo(repository: &Path) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(repository);
    let of_this_package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_this_package)) {
        command.env_remove(name);
    }
    command
}

/// Tests of the binary. Builds the whole workspace, as ./test does, so that cargo compiles it only once.
fn trials(repository: &Path) -> Command {
    let mut command = cargo(repository);
    command.args(["test", "--quiet", "--workspace", "--locked", "--test", "trials"]);
    command
}

/// Program to test: the given one, or a release build.
fn program(repository: &Path, named: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(program) = named {
        return Ok(program.canonicalize()?);
    }
    let built = cargo(repository)
        .args(["build", "--release", "--locked", "--package=turnpike-cli", "--bin=turnpike"])
        .status()?;
    if !built.success() {
        return Err("the release build failed".into());
    }
    Ok(target(repository).join("release/turnpike").canonicalize()?)
}
