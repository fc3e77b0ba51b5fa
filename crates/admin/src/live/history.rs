//! Ring buffer of the last minutes, with one point per second.

use std::{collections::VecDeque, time::Instant};

use turnpike_api::{History, Live, refused, total};

/// Maximum number of points: ten minutes.
const MOST: usize = 600;
/// Seconds between two points.
const STEP_S: f64 = 1.0;

/// Values in the order of [`Minutes::history`].
type Point = [Option<f64>; 9];

#[derive(Default)]
pub(super) struct Minutes {
    points: VecDeque<Point>,
    /// Time of the last point.
    last: Option<(Instant, String)>,
}

impl Minutes {
    /// Adds a point, and empty points for missed seconds, for example after a suspend.
    pub(super) fn push(&mut self, at: Instant, live: &Live) {
        let missed = self.last.as_ref().map_or(0.0, |(last, _)| (at - *last).as_secs_f64() / STEP_S - 1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "bounded, and not negative"
        )]
        let missed = missed.round().clamp(0.0, MOST as f64) as usize;
        for _ in 0..missed {
            self.add([None; 9]);
        }
        self.add(point(live));
        self.last = Some((at, live.at.clone()));
    }

    fn add(&mut self, point: Point) {
        // Grows by the exact amount, because a ring buffer eventually uses its whole capacity.
        self.points.reserve_exact(MOST - self.points.len().min(MOST));
        if self.points.len() >= MOST {
            self.points.pop_front();
        }
        self.points.push_back(point);
    }

    pub(super) fn history(&self) -> History {
        let column = |index: usize| self.points.iter().map(|point| point[index]).collect();
        History {
            ends_at: self.last.as_ref().map(|(_, at)| at.clone()),
            step_s: STEP_S,
            open: column(0),
            to_peer_bps: column(1),
            to_client_bps: column(2),
            to_peer_pps: column(3),
            to_client_pps: column(4),
            dropped: column(5),
            refused: column(6),
            load: column(7),
            event_loop_us: column(8),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "for a graph")]
fn point(live: &Live) -> Point {
    let open = Some(live.status.open as f64);
    let Some(server) = &live.server else {
        let sum = |rate: fn(&turnpike_api::LiveRule) -> f64| Some(total(live.rules.iter().map(rate)));
        let ends = live.rules.iter().flat_map(|rule| &rule.ends);
        let dropped = total(ends.filter(|end| end.kind == "datagram").map(|end| end.rate));
        return [
            open,
            sum(|rule| rule.to_target.bytes * 8.0),
            sum(|rule| rule.to_client.bytes * 8.0),
            sum(|rule| rule.to_target.datagrams),
            sum(|rule| rule.to_client.datagrams),
            Some(dropped),
            None,
            None,
            None,
        ];
    };
    let load = server.workers.iter().filter_map(|worker| worker.load).reduce(f64::max);
    let event_loop = server.workers.iter().filter_map(|worker| worker.event_loop_us).max();
    [
        open,
        Some(server.to_peer.bytes * 8.0),
        Some(server.to_client.bytes * 8.0),
        Some(server.to_peer.datagrams),
        Some(server.to_client.datagrams),
        Some(total(server.drops.iter().map(|reason| reason.rate))),
        Some(refused(&server.refusals)),
        load,
        event_loop.map(|us| us as f64),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use turnpike_api::{Job, Status};

    fn live(open: u64) -> Live {
        Live {
            at: format!("at {open}"),
            interval_s: 1.0,
            status: Status {
                job: Job::Forward,
                version: String::new(),
                pid: 1,
                started_at: String::new(),
                uptime_s: 0,
                draining: false,
                open,
                datapath: None,
                relays: Vec::new(),
                node: None,
                sandbox: None,
            },
            cores: None,
            server: None,
            rules: Vec::new(),
        }
    }

    #[test]
    fn oldest_point_is_dropped_and_a_pause_is_a_gap() {
        let start = Instant::now();
        let mut minutes = Minutes::default();
        assert_eq!((minutes.history().ends_at, minutes.history().open.len()), (None, 0));
        for second in 0..700 {
            minutes.push(start + Duration::from_millis(1000 * second + 20 * (second % 3)), &live(second));
        }
        let history = minutes.history();
        assert_eq!((history.open.len(), history.refused.len()), (MOST, MOST));
        assert_eq!((history.open[0], history.open[MOST - 1]), (Some(100.0), Some(699.0)));
        assert_eq!(history.ends_at.as_deref(), Some("at 699"));
        assert_eq!(minutes.points.capacity(), MOST, "the capacity is exact");
        minutes.push(start + Duration::from_secs(710), &live(1));
        let open = minutes.history().open;
        assert_eq!((open[MOST - 1], open[MOST - 12]), (Some(1.0), Some(699.0)));
        assert!(open[MOST - 11..MOST - 1].iter().all(Option::is_none));
        minutes.push(start + Duration::from_secs(1 << 40), &live(2));
        let open = minutes.history().open;
        assert_eq!(open.iter().flatten().collect::<Vec<_>>(), [&2.0], "the gap is bounded");
    }
}
