//! Text output of a load generator; scripts should use `--json`.

use std::fmt;

use turnpike_load::{Direction, Leg, LoadReport};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Messages,
    Bytes,
}

pub(crate) struct Summary<'a> {
    pub(crate) report: &'a LoadReport,
    pub(crate) unit: Unit,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report;
        match self.unit {
            Unit::Messages if report.profile.is_some() => shaped(report, f)?,
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

fn messages(report: &LoadReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    counts(report, f)?;
    latency(report, "round trip", f)?;
    write!(
        f,
        "clients {}, {} bytes, rate {}, {} s, data path {}",
        report.clients, report.size, report.rate, report.duration_s, report.datapath
    )
}

/// Formats the traffic of a profile: totals, then each direction, then each stream.
fn shaped(report: &LoadReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Some(profile) = &report.profile else { return Ok(()) };
    counts(report, f)?;
    latency(report, "latency (one way)", f)?;
    write!(
        f,
        "profile {}, seed {}, clients {}, {} bytes on average, {:.0} packets/s, {} s, data path {}",
        profile.name,
        profile.seed,
        report.clients,
        report.size,
        report.rate.pps().unwrap_or_default(),
        report.duration_s,
        report.datapath
    )?;
    let names = profile.streams.iter().map(|stream| stream.name.chars().count() + 2);
    let width = names.max().unwrap_or_default().max("to client".len());
    for (title, direction, leg) in [
        ("to peer", Direction::ToPeer, &profile.to_peer),
        ("to client", Direction::ToClient, &profile.to_client),
    ] {
        line(title, width, leg, f)?;
        for stream in profile.streams.iter().filter(|stream| stream.direction == direction) {
            line(&format!("  {}", stream.name), width, &stream.leg, f)?;
        }
    }
    Ok(())
}

fn line(title: &str, width: usize, leg: &Leg, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(
        f,
        "\n{title:<width$}  sent {:>8}  received {:>8}  lost {:>7.3} %  {:>9.3} Mbit/s  p50 {} us  p99 {} us  max {} us  jitter {:.0} us",
        leg.sent,
        leg.received,
        leg.loss_percent(),
        leg.recv_bps / 1e6,
        leg.latency_us.p50,
        leg.latency_us.p99,
        leg.latency_us.max,
        leg.jitter_us
    )
}

fn counts(report: &LoadReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
    )
}

fn latency(report: &LoadReport, what: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let rtt = &report.rtt_us;
    writeln!(
        f,
        "{what} in us: min {} p50 {} p90 {} p99 {} p99.9 {} max {}; jitter {:.0}; generator delay p99 {}",
        rtt.min, rtt.p50, rtt.p90, rtt.p99, rtt.p999, rtt.max, report.jitter_us, report.late_us.p99
    )
}

fn bytes(report: &LoadReport, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "{:.3} Gbit/s; sent {} bytes, received {}, lost {}",
        report.recv_bps / 1e9,
        report.sent,
        report.received,
        report.lost
    )?;
    write!(f, "streams {}, writes of {} bytes, {} s", report.clients, report.size, report.duration_s)
}
