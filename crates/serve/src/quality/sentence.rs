//! Troubles of an allocation as an English sentence.

use std::fmt::Write as _;

use jiff::Timestamp;
use turnpike_api::{FlowDirection, Leg, QualityProblem};

use super::{
    networks::NetworkKey,
    trouble::{Measure, Trouble},
};

/// Seconds for which the time of day is unambiguous.
const DAY: u64 = 86_400;

/// Trouble and its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finding {
    pub(super) leg: Leg,
    /// `None` for the round trip.
    pub(super) direction: Option<FlowDirection>,
    pub(super) measure: Measure,
    pub(super) trouble: Trouble,
}

impl Finding {
    /// Multiple of the threshold.
    pub(super) fn severity(&self) -> f64 {
        self.trouble.value / self.measure.threshold()
    }

    fn write(&self, now: u64, text: &mut String) {
        let Self { trouble: Trouble { since, value }, .. } = *self;
        let place = self.direction.map_or("round trip", FlowDirection::name);
        let figure = match self.measure {
            Measure::Loss => format!("{:.1} % loss", value * 100.0),
            Measure::Jitter => format!("{value:.0} ms jitter"),
            Measure::RoundTrip => format!("{value:.0} ms"),
        };
        let format = if now.saturating_sub(since) < DAY { "%H:%M UTC" } else { "%Y-%m-%d %H:%M UTC" };
        let since = timestamp(since).strftime(format);
        _ = write!(text, "{place} of the {}: {figure} since {since}", self.leg.name());
    }
}

/// `others`: numbers of other clients in the network, troubled ones and all. `None` without findings.
pub(super) fn problem(
    findings: &[Finding],
    now: u64,
    others: (usize, usize),
    network: &NetworkKey,
) -> Option<QualityProblem> {
    let worst = findings.first()?;
    let mut sentence = String::new();
    for finding in findings {
        if !sentence.is_empty() {
            sentence.push_str("; ");
        }
        finding.write(now, &mut sentence);
    }
    if findings.iter().any(|finding| finding.leg == Leg::Client) {
        _ = match others {
            (_, 0) => Ok(()),
            (0, 1) => write!(sentence, "; the other client in {network} is not affected"),
            (0, all) => write!(sentence, "; none of the {all} other clients in {network} is affected"),
            (1, 1) => write!(sentence, "; the other client in {network} is affected too"),
            (troubled, all) => {
                let verb = if troubled == 1 { "is" } else { "are" };
                write!(sentence, "; {troubled} of {all} other clients in {network} {verb} affected too")
            }
        };
    }
    let since = timestamp(worst.trouble.since).to_string();
    Some(QualityProblem { leg: worst.leg, direction: worst.direction, since, sentence })
}

fn timestamp(unix: u64) -> Timestamp {
    i64::try_from(unix).ok().and_then(|unix| Timestamp::from_second(unix).ok()).unwrap_or_default()
}
