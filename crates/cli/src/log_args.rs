//! Log flags, shared by `serve` and `forward`.

use clap::{ArgAction, Args};
use turnpike_config::Flags;

const LOG: &str = "Logging";

#[derive(Args)]
pub(crate) struct LogArgs {
    /// Log level, or directives [default: info]
    ///
    /// off, error, warn, info, debug, trace, or directives such as "info,turnpike::allocation=off,turnpike::forward=off" (no lines for
    /// allocations and connections)
    #[arg(long, value_name = "LEVEL", help_heading = LOG)]
    log: Option<String>,

    /// Log more: -v is --log debug, -vv is --log trace
    #[arg(short, long, help_heading = LOG, action = ArgAction::Count, conflicts_with_all = ["log", "quiet"])]
    verbose: u8,

    /// Log less: -q is --log warn, -qq error, -qqq off
    #[arg(short, long, help_heading = LOG, action = ArgAction::Count, conflicts_with = "log")]
    quiet: u8,

    /// Log format: text, json or journald [default: text]
    ///
    /// text has colours on a terminal unless NO_COLOR is set; json prints one object a line; journald adds priorities for systemd's
    /// journal
    #[arg(long, value_name = "FORMAT", help_heading = LOG)]
    log_format: Option<String>,
}

impl LogArgs {
    /// Adds the log flags to the configuration flags.
    pub(crate) fn put(self, flags: &mut Flags) {
        let (flag, level) = match (self.verbose, self.quiet) {
            (1, _) => ("-v", Some("debug")),
            (2.., _) => ("-v", Some("trace")),
            (0, 1) => ("-q", Some("warn")),
            (0, 2) => ("-q", Some("error")),
            (0, 3..) => ("-q", Some("off")),
            (0, 0) => ("--log", self.log.as_deref()),
        };
        flags.set("log.level", flag, level.map(str::to_owned));
        flags.set("log.format", "--log-format", self.log_format);
    }
}
