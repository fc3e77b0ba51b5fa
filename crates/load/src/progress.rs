//! Progress of a run, once per second, and its display.

use std::{
    fmt,
    io::{self, Write},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunPhase {
    Setup { ready: usize, clients: usize },
    Warmup,
    Measuring,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountKind {
    /// Number of datagrams or requests, each of which gets one reply; a missing reply counts as a loss.
    Answered,
    /// Number of messages, most of which get no reply.
    OneWay,
    /// Number of bytes in streams, which have no round-trip time.
    Bytes,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ProgressInterval {
    pub phase: RunPhase,
    pub elapsed: Duration,
    pub length: Duration,
    /// Number of messages or, with [`CountKind::Bytes`], of bytes.
    pub sent: u64,
    pub received: u64,
    /// Messages that got no reply although a later one did.
    pub lost: u64,
    /// Messages without a reply so far: in flight, or lost although no later reply has shown this yet.
    pub outstanding: u64,
    pub kind: CountKind,
    pub p50_us: u64,
    /// 99th percentile of the latency in microseconds.
    pub p99_us: u64,
}

impl ProgressInterval {
    /// Loss in percent of the packets sent in this interval, at most 100.
    pub fn loss_percent(&self) -> f64 {
        if self.sent == 0 { 0.0 } else { (self.lost as f64 * 100.0 / self.sent as f64).min(100.0) }
    }
}

impl fmt::Display for ProgressInterval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:6.1} s  ", self.elapsed.as_secs_f64())?;
        let label = match self.phase {
            RunPhase::Setup { ready, clients } => return write!(f, "{ready} of {clients} clients ready"),
            RunPhase::Warmup => "  (warm-up)",
            RunPhase::Measuring => "",
        };
        if self.kind == CountKind::Bytes {
            let gbits = |bytes| turnpike_measure::per_second(bytes, self.length) * 8.0 / 1e9;
            let (sent, received) = (gbits(self.sent), gbits(self.received));
            return write!(f, "sent {sent:.3} Gbit/s  received {received:.3} Gbit/s{label}");
        }
        let rate = |count| Thousands(turnpike_measure::per_second(count, self.length));
        write!(f, "sent {}/s  received {}/s", rate(self.sent), rate(self.received))?;
        if self.kind == CountKind::Answered {
            write!(
                f,
                "  loss {:.2} %  outstanding {}",
                self.loss_percent(),
                Thousands(self.outstanding as f64)
            )?;
        }
        write!(f, "  p50 {} us  p99 {} us{label}", self.p50_us, self.p99_us)
    }
}

struct Thousands(f64);

impl fmt::Display for Thousands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{:.0}", self.0);
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                f.write_str(",")?;
            }
            write!(f, "{digit}")?;
        }
        Ok(())
    }
}

/// Prints intervals to stderr: on a terminal in a single line that is updated, otherwise one line per
/// interval.
pub struct ProgressDisplay {
    bar: Option<ProgressBar>,
}

impl ProgressDisplay {
    pub fn new(terminal: bool) -> Self {
        let bar = terminal.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(ProgressStyle::default_spinner());
            bar
        });
        Self { bar }
    }

    pub fn show(&self, interval: &ProgressInterval) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(interval.to_string());
                bar.tick();
            }
            // `eprintln!` would panic if the reading end of stderr has been closed.
            None => _ = writeln!(io::stderr(), "{interval}"),
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_progress_line_has_rates_loss_outstanding_and_percentiles() {
        let mut interval = ProgressInterval {
            phase: RunPhase::Warmup,
            elapsed: Duration::from_millis(3_100),
            length: Duration::from_millis(500),
            sent: 1_000_000,
            received: 990_000,
            lost: 1_000,
            outstanding: 9_000,
            kind: CountKind::Answered,
            p50_us: 84,
            p99_us: 142,
        };
        let line = interval.to_string();
        assert_eq!(
            line,
            "   3.1 s  sent 2,000,000/s  received 1,980,000/s  loss 0.10 %  outstanding 9,000  p50 84 us  p99 142 us  (warm-up)"
        );
        interval.kind = CountKind::OneWay;
        assert!(!interval.to_string().contains("loss") && !interval.to_string().contains("outstanding"));
        interval.kind = CountKind::Bytes;
        assert_eq!(interval.to_string(), "   3.1 s  sent 0.016 Gbit/s  received 0.016 Gbit/s  (warm-up)");
        interval.phase = RunPhase::Setup { ready: 12, clients: 1_000 };
        assert_eq!(interval.to_string(), "   3.1 s  12 of 1000 clients ready");
        assert_eq!(ProgressInterval { sent: 0, ..interval }.loss_percent(), 0.0);
    }

    #[test]
    fn thousands_are_grouped() {
        for (value, text) in [(0.0, "0"), (999.0, "999"), (1_000.0, "1,000"), (1_234_567.4, "1,234,567")] {
            assert_eq!(Thousands(value).to_string(), text);
        }
    }
}
