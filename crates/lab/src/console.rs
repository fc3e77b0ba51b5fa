//! Console output: progress on standard error, results on standard output.

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

pub(crate) struct Console {
    since: Instant,
    terminal: bool,
}

impl Console {
    pub(crate) fn new() -> Self {
        Self { since: Instant::now(), terminal: std::io::stderr().is_terminal() }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    pub(crate) fn progress(&self, line: &str) {
        // Errors are ignored, because standard error may be closed.
        let _ = if self.terminal {
            write!(std::io::stderr(), "\r\x1b[K{line}")
        } else {
            writeln!(std::io::stderr(), "{line}")
        };
    }

    pub(crate) fn note(&self, text: &str) {
        let clear = if self.terminal { "\r\x1b[K" } else { "" };
        let _ = writeln!(std::io::stderr(), "{clear}{text}");
    }

    pub(crate) fn done(&self) {
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

pub(crate) fn result(text: &str) {
    // Errors are ignored, because the pipe may be closed (`| head`).
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
}
