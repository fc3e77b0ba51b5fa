//! The flags about log lines, which `serve` and `forward` have alike.

use clap::{ArgAction, Args};
use turnpike_config::Flags;

/// What is logged, and how it looks.
#[derive(Args)]
pub(crate) struct LogArgs {
    /// off, error, warn, info, debug, trace, or directives such as "info,turnpike::session=off,turnpike::forward=off" (no line per
    /// session, none per connection) [default: info]
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,

    /// More log lines: -v is --log debug, -vv is --log trace
    #[arg(short, long, action = ArgAction::Count, conflicts_with_all = ["log", "quiet"])]
    verbose: u8,

    /// Fewer log lines: -q is --log warn, -qq is --log error, -qqq is --log off
    #[arg(short, long, action = ArgAction::Count, conflicts_with = "log")]
    quiet: u8,

    /// How log lines look: text (in colours on a terminal, unless NO_COLOR is set), json, one object a line, or journald, with priorities
    /// for systemd's journal [default: text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
}

impl LogArgs {
    /// Adds them to the flags that set configuration.
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
