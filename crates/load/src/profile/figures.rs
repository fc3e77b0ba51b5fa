//! Results per stream and per direction.

use std::time::Duration;

use turnpike_measure::{Direction, Leg, LoadReport, ProfileReport, StreamReport, per_second};

use super::ProfileOptions;
use crate::run::{RunResults, RunTally};

#[derive(Clone, Default)]
pub(crate) struct StreamFigures {
    pub(crate) tally: RunTally,
    /// Sum and number of the flows' jitter estimates, in microseconds.
    pub(crate) jitter: (f64, u64),
}

impl StreamFigures {
    fn merge(&mut self, other: &mut Self) {
        self.tally.merge(&mut other.tally);
        self.jitter.0 += other.jitter.0;
        self.jitter.1 += other.jitter.1;
    }

    fn leg(&self, measured: Duration) -> Leg {
        let Self { tally, jitter } = self;
        Leg {
            sent: tally.sent,
            received: tally.received,
            lost: tally.sent.saturating_sub(tally.received),
            duplicated: tally.duplicated,
            reordered: tally.reordered,
            send_pps: per_second(tally.sent, measured),
            recv_pps: per_second(tally.received, measured),
            recv_bps: per_second(tally.received_bytes * 8, measured),
            latency_us: tally.rtt.percentiles(),
            jitter_us: if jitter.1 == 0 { 0.0 } else { jitter.0 / jitter.1 as f64 },
        }
    }
}

pub(crate) fn gather(found: &mut RunResults) -> Vec<StreamFigures> {
    let mut all: Vec<StreamFigures> = Vec::new();
    for finished in &mut found.finished {
        all.resize_with(all.len().max(finished.streams.len()), StreamFigures::default);
        for (sum, own) in all.iter_mut().zip(&mut finished.streams) {
            sum.merge(own);
        }
    }
    all
}

pub(crate) fn put(
    report: &mut LoadReport,
    shaped: &ProfileOptions,
    mut streams: Vec<StreamFigures>,
    measured: Duration,
) {
    let known = &shaped.profile.streams;
    let mut direction = |wanted: Direction| {
        let mut sum = StreamFigures::default();
        let own = known.iter().zip(&mut streams).filter(|(stream, _)| stream.direction == wanted);
        own.for_each(|(_, figures)| sum.merge(figures));
        sum.leg(measured)
    };
    let (to_peer, to_client) = (direction(Direction::ToPeer), direction(Direction::ToClient));
    report.profile = Some(ProfileReport {
        name: shaped.profile.name.clone(),
        seed: shaped.seed,
        to_peer,
        to_client,
        streams: known
            .iter()
            .zip(&streams)
            .map(|(stream, figures)| StreamReport {
                name: stream.name.clone(),
                direction: stream.direction,
                leg: figures.leg(measured),
            })
            .collect(),
    });
}
