//! Chores of the repository that are too long for a shell line: `cargo xtask instructions`, `cargo xtask attack`.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool: its results go to standard output")]

mod attack;
mod instructions;
mod miri;
mod reproducible;

use std::{env, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

/// An error for a person to read; nothing here is recovered from by kind.
type Failure = Box<dyn std::error::Error>;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of the turnpike repository")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Count the instructions of one packet, against the budgets of benches/budgets.toml (needs valgrind)
    Instructions(instructions::Options),
    /// Ask a server what attackers would, on all data paths, and write the tables of docs/reliability.md
    Attack(attack::Options),
    /// Run the parts with `unsafe` that call no kernel under Miri (needs a nightly with it)
    Miri,
    /// Build the binary of a release twice, in different directories, and compare
    Reproducible(reproducible::Options),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().chore {
        Chore::Instructions(options) => instructions::run(&options),
        Chore::Attack(options) => attack::run(&options),
        Chore::Miri => miri::run(),
        Chore::Reproducible(options) => reproducible::run(&options),
    };
    match done {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Of the repository.
fn root() -> Result<PathBuf, Failure> {
    // Cargo runs us with this set; a copied binary falls back to where it was built.
    let manifest =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    Ok(manifest.parent().ok_or("xtask has no parent directory")?.to_owned())
}
