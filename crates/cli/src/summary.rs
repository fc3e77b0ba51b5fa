//! A generator's result for people; scripts take `--json`.

use std::fmt;

use turnpike_load::Report;

/// What a report counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Datagrams or requests, with a round trip each.
    Messages,
    /// Bytes of streams.
    Bytes,
}

/// Shows a report in a few lines.
pub(crate) struct Summary<'a> {
    pub(crate) report: &'a Report,
    pub(crate) unit: Unit,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report;
        match self.unit {
            Unit::Messages => messages(report, f)?,
            Unit::Bytes => bytes(report, f)?,
        }
        for (name, value) in &report.extra {
            if value.fract() == 0.0 {
                write!(f, "\n{name}: {value}")?;
            } else {
                write!(f, "\n{name}: {value:.3}")?;
            }
        }
        for (name, count) in &report.errors {
            write!(f, "\nerror {name}: {count}")?;
        }
        for note in &report.notes {
            write!(f, "\nnote: {note}")?;
        }
        Ok(())
    }
}

fn messages(report: &Report, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "sent {} ({:.0}/s), received {} ({:.0}/s), lost {} ({:.3} %), duplicated {}, reordered {}",
        report.sent,
        report.send_pps,
        report.received,
        report.recv_pps,
        report.lost,
        report.loss_percent(),
        report.duplicated,
        report.reordered
    )?;
    let rtt = &report.rtt_us;
    writeln!(
        f,
        "round trip in us: min {} p50 {} p90 {} p99 {} p99.9 {} max {}; jitter {:.0}; generator late by p99 {}",
        rtt.min, rtt.p50, rtt.p90, rtt.p99, rtt.p999, rtt.max, report.jitter_us, report.late_us.p99
    )?;
    write!(
        f,
        "{} clients, {} bytes, rate {}, {} s, data path {}",
        report.clients, report.size, report.rate, report.duration_s, report.datapath
    )
}

fn bytes(report: &Report, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "{:.3} Gbit/s; sent {} bytes, received {}, lost {}",
        report.recv_bps / 1e9,
        report.sent,
        report.received,
        report.lost
    )?;
    write!(f, "{} streams, writes of {} bytes, {} s", report.clients, report.size, report.duration_s)
}
