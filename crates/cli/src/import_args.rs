//! Flags of `turnpike import`.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use clap::Subcommand;
use turnpike_config::{Mistake, Mistakes, settings_of};
use turnpike_convert::{Imported, coturn};

#[derive(Subcommand)]
pub(crate) enum ImportCommand {
    /// Translate coturn's turnserver.conf, its command line, or both
    ///
    /// Options without a translation are listed on standard error, with their line and the alternative
    #[command(after_help = COTURN_EXAMPLES)]
    Coturn {
        /// Configuration file, usually /etc/turnserver.conf; may be omitted if arguments are given
        #[arg(required_unless_present = "arguments")]
        file: Option<PathBuf>,
        /// Write the translation to FILE, readable only by this user; "-" is standard output [default:
        /// standard output]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Arguments of coturn's command line, as in a compose file or unit
        #[arg(last = true, value_name = "ARGUMENT")]
        arguments: Vec<String>,
    },
}

const COTURN_EXAMPLES: &str = "\
Examples:
  turnpike import coturn /etc/turnserver.conf
  turnpike import coturn /etc/turnserver.conf -o /etc/turnpike.toml && turnpike check-config -c /etc/turnpike.toml
  turnpike import coturn -- -n --lt-cred-mech --realm=example.org --user=alice:wonderland";

impl ImportCommand {
    pub(crate) fn run(&self) -> Result<Imported, Mistakes> {
        match self {
            Self::Coturn { file, arguments, .. } => {
                coturn::import(file.as_deref(), arguments, turnpike_serve::can_dtls, mistakes)
            }
        }
    }

    pub(crate) fn output(&self) -> Option<&Path> {
        match self {
            Self::Coturn { output, .. } => output.as_deref().filter(|path| *path != Path::new("-")),
        }
    }
}

fn mistakes(toml: &str) -> Vec<Mistake> {
    settings_of(toml).err().map_or_else(Vec::new, |mistakes| mistakes.0)
}

/// Creates the file with mode 0600; fails if it exists.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(text.as_bytes())
}
