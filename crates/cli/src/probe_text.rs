//! Output of a probe, as text or JSON.

use std::{
    fmt,
    io::{self, Write as _},
};

use turnpike_probe::{FindingLevel, ProbeReport};
use turnpike_wire::escape;

use crate::forgive_closed_pipe;

pub(crate) fn show(report: &ProbeReport, json: bool) -> io::Result<()> {
    let shown = if json {
        writeln!(io::stdout(), "{}", escape::json(&serde_json::to_string(report)?))
    } else {
        ProbeText(report)
            .to_string()
            .lines()
            .try_for_each(|line| writeln!(io::stdout(), "{}", escape::line(line)))
    };
    shown.or_else(forgive_closed_pipe)
}

struct ProbeText<'a>(&'a ProbeReport);

impl fmt::Display for ProbeText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        write!(f, "{}", report.server)?;
        if let Some(software) = &report.software {
            write!(f, " ({})", escape::name(software).cut(255))?;
        }
        writeln!(f)?;
        for line in &report.findings {
            writeln!(f, "{:<5} {:<12} {}", line.level, line.area, line.what)?;
            if let Some(remedy) = &line.remedy {
                writeln!(f, "{:<19}-> {remedy}", "")?;
            }
        }
        let count = |level: FindingLevel| report.findings.iter().filter(|line| line.level == level).count();
        let usable = if report.usable { "usable" } else { "not usable" };
        let (bad, warnings) = (count(FindingLevel::Bad), count(FindingLevel::Warn));
        writeln!(f, "{usable}; {bad} bad, {warnings} {}", if warnings == 1 { "warning" } else { "warnings" })
    }
}
