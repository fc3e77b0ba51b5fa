//! The `turnpike` program: arguments in, exit codes out. Everything else happens in the crates below.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command line program prints its results")]

mod args;
mod credentials_args;
mod serve_args;

use std::{io, process::ExitCode};

use clap::Parser;
use turnpike_ops::serve::{self, ServeError};

use crate::{
    args::{Cli, Command},
    credentials_args::CredentialsArgs,
};

/// Something did not work.
const FAILED: u8 = 1;
/// Wrong flags or configuration; clap exits with the same.
const BAD_USAGE: u8 = 2;

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Serve(args) => run_server(args),
        Command::CheckConfig(args) => check_config(args),
        Command::Credentials(args) => print_credentials(args),
    }
}

fn run_server(args: serve_args::ServeArgs) -> ExitCode {
    match serve::serve(&args.into_sources(), &mut io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ServeError::Config(errors)) => fail(BAD_USAGE, &errors),
        Err(error) => fail(FAILED, &error),
    }
}

fn check_config(args: serve_args::ServeArgs) -> ExitCode {
    match args.into_sources().load() {
        Ok(loaded) => {
            for warning in &loaded.warnings {
                eprintln!("warning: {warning}");
            }
            println!("ok\n\n{}", loaded.settings.to_toml().trim_end());
            ExitCode::SUCCESS
        }
        Err(errors) => fail(BAD_USAGE, &errors),
    }
}

fn print_credentials(args: CredentialsArgs) -> ExitCode {
    match args.make() {
        Ok(lines) => {
            println!("{lines}");
            ExitCode::SUCCESS
        }
        Err(error) => fail(FAILED, &error),
    }
}

/// One line per mistake, each told from which program it comes.
fn fail(code: u8, error: &dyn std::fmt::Display) -> ExitCode {
    for line in error.to_string().lines() {
        eprintln!("turnpike: {line}");
    }
    ExitCode::from(code)
}
