//! Chores of the repository that are too long for a shell line: `cargo xtask instructions`.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool: its results go to standard output")]

mod instructions;

use std::process::ExitCode;

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
}

fn main() -> ExitCode {
    let Chore::Instructions(options) = Arguments::parse().chore;
    match instructions::run(&options) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}
