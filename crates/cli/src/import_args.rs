//! Flags of `turnpike import`.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use clap::Subcommand;
use turnpike_config::{
    Mistakes,
    import::{Imported, coturn},
};

/// Subcommands of `turnpike import`.
#[derive(Subcommand)]
pub(crate) enum ImportCommand {
    /// Translate a turnserver.conf of coturn; what has no translation is told with its line and what to do instead
    #[command(after_help = COTURN_EXAMPLES)]
    Coturn {
        /// The file, often /etc/turnserver.conf
        file: PathBuf,
        /// Where the translation goes, readable by nobody else [default: standard output]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

const COTURN_EXAMPLES: &str = "\
Examples:
  turnpike import coturn /etc/turnserver.conf
  turnpike import coturn /etc/turnserver.conf -o /etc/turnpike.toml && turnpike check-config -c /etc/turnpike.toml";

impl ImportCommand {
    pub(crate) fn run(&self) -> Result<Imported, Mistakes> {
        match self {
            Self::Coturn { file, .. } => coturn::import(file),
        }
    }

    pub(crate) fn output(&self) -> Option<&Path> {
        match self {
            Self::Coturn { output, .. } => output.as_deref(),
        }
    }
}

/// A new file for this user alone; one that is there is left as it is.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(text.as_bytes())
}
