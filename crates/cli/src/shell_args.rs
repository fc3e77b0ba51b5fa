//! Shell completions and manual pages, generated from the command definitions.

mod manual;

use std::{
    io::{self, Write},
    path::PathBuf,
};

use clap::{Args, Command};
use clap_complete::{Generator, Shell};

#[derive(Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to generate completions for
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

#[derive(Args)]
pub(crate) struct ManArgs {
    /// Write a page for each command to this directory, which is created if missing [default: print turnpike(1) on standard output]
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
}

impl CompletionsArgs {
    pub(crate) fn write(self, mut command: Command, out: &mut dyn Write) -> io::Result<()> {
        command.set_bin_name("turnpike");
        command.build();
        self.shell.try_generate(&command, out)
    }
}

impl ManArgs {
    /// Writes turnpike(1) to `out`, or every page to the directory.
    pub(crate) fn write(self, command: Command, out: &mut dyn Write) -> io::Result<()> {
        match self.directory {
            Some(directory) => manual::write_all(command, &directory),
            None => manual::write(command, out),
        }
    }
}
