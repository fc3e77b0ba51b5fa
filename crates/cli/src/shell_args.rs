//! What a packager installs beside the program, made from the definitions of its commands: completions and manual pages.

mod manual;

use std::{
    io::{self, Write},
    path::PathBuf,
};

use clap::{Args, CommandFactory};
use clap_complete::{Generator, Shell};

use crate::args::Cli;

/// Flags of `completions`.
#[derive(Args)]
pub(crate) struct CompletionsArgs {
    /// Shell that shall complete commands and flags
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Flags of `man`.
#[derive(Args)]
pub(crate) struct ManArgs {
    /// Directory to write the pages of all commands to, one file each; made where it is missing [default: the page turnpike(1), on
    /// standard output]
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
}

impl CompletionsArgs {
    /// Writes the script.
    pub(crate) fn write(self, out: &mut dyn Write) -> io::Result<()> {
        let mut command = Cli::command();
        command.set_bin_name("turnpike");
        command.build();
        self.shell.try_generate(&command, out)
    }
}

impl ManArgs {
    /// Writes one page to `out`, or all of them to the directory.
    pub(crate) fn write(self, out: &mut dyn Write) -> io::Result<()> {
        match self.directory {
            Some(directory) => manual::write_all(Cli::command(), &directory),
            None => manual::write(Cli::command(), out),
        }
    }
}
