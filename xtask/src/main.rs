//! Chores of the repository that are too long for a shell line: `cargo xtask instructions`, `cargo xtask fuzz`.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool: its results go to standard output")]

mod fuzz;
mod instructions;

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
    /// Fuzz, and remember what was found (fuzz/) and spent (fuzz/ledger.toml)
    Fuzz(fuzz::Options),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().chore {
        Chore::Instructions(options) => instructions::run(&options),
        Chore::Fuzz(options) => fuzz::run(&options),
    };
    match done {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the repository, wherever below it the command was typed.
fn repository() -> Result<PathBuf, Failure> {
    // Cargo runs us with this set; a copied binary falls back to where it was built.
    let manifest =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    Ok(manifest.parent().ok_or("xtask has no parent directory")?.to_owned())
}
