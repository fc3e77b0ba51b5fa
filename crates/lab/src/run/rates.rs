//! What a subject does at several offered rates: a sweep over given ones, and the search for the highest that it bears.
//! One start of the subject serves all trials of a round, and its first run is thrown away as ever.

use serde::{Deserialize, Serialize};

use super::{
    compare::{Stage, note_changes},
    halt::Halt,
    result::Outcome,
    session::{Bench, Session, Window},
};
use crate::{
    error::LabError,
    experiment::Service,
    metric, order,
    record::{Record, Round, Sweep, SweepPoint},
    request::Request,
    say::Screen,
    search::{Search, Settings, Trial},
    void::Void,
};

/// The metric that a search gives, for a loss goal as a ratio: `find_max_0.1_pps`.
fn metric_of(goal: f64) -> String {
    // 0.001 * 100 is not 0.1 in binary; four digits are more than any goal has.
    let percent = (goal * 1e6).round() / 1e4;
    format!("find_max_{percent}_pps")
}

/// Void trials in a row that are no matter of the rate: six rates given up, the last a 32nd of the first.
const HOPELESS: u32 = 18;

/// Percent of the highest rate at which latency is measured.
const LATENCY_AT: [u32; 3] = [30, 60, 80];

/// What to do with each subject in each round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Plan {
    /// Offer each of these rates, datagrams a second.
    Sweep(Vec<u64>),
    /// Search the highest.
    FindMax(Settings),
}

/// Carries out `plan` for all subjects, `rounds` times.
pub(crate) fn run(
    request: &Request,
    stage: &Stage,
    screen: &Screen,
    plan: &Plan,
    rounds: u32,
) -> Result<Record, LabError> {
    let variable = &stage.experiment.workload.rate;
    if stage.variables.get(variable).is_none() {
        stage.leave_nothing();
        return Err(LabError::usage(format!(
            "the workload has no variable {{{variable}}} to set the rate by: give it one under [vars], or name it with workload.rate, as experiments/relay-rate.toml does"
        )));
    }
    let mut record = stage.record(request)?;
    record.experiment.rounds = rounds;
    if let Plan::FindMax(settings) = plan {
        // The middle goal decides: none is a matter of luck, and the loosest is for orientation.
        record.experiment.metric = settings
            .goals
            .get(1)
            .or(settings.goals.first())
            .map_or_else(String::new, |goal| metric_of(*goal));
    }
    let outcome = Rates { stage, bench: stage.bench(), screen, plan }.run(&mut record, rounds);
    if record.sweeps.is_empty() {
        stage.leave_nothing();
    } else {
        note_changes(&mut record, screen);
        record.save(&stage.directory).map_err(|error| LabError::failed(error.to_string()))?;
    }
    screen.done();
    outcome.map(|()| record)
}

struct Rates<'a> {
    stage: &'a Stage,
    bench: Bench<'a>,
    screen: &'a Screen,
    plan: &'a Plan,
}

impl Rates<'_> {
    fn run(&self, record: &mut Record, rounds: u32) -> Result<(), LabError> {
        let subjects = &self.stage.experiment.subject;
        let enough = rounds >= self.stage.experiment.rules.min_rounds;
        let runs = subjects.len() + usize::from(enough && self.stage.experiment.aa);
        self.screen.note(&format!("{}: seed {}", record.id, record.seed));
        for (index, order) in (0..rounds).zip(order::plan(record.seed, runs, rounds)) {
            for (place, run) in (0..).zip(order) {
                let again = run == subjects.len();
                let service = &subjects[if again { 0 } else { run }];
                let mut round = Round::new(index, &service.name, place);
                let mut sweep =
                    Sweep { subject: service.name.clone(), round: Some(index), ..Sweep::default() };
                let done = self.one(service, &mut sweep);
                for found in &sweep.found {
                    let rate = found.lower_pps.map(|rate| (metric_of(found.max_loss), rate as f64));
                    round.metrics.extend(rate);
                }
                let halted = done.err();
                round.voided = halted.as_ref().and_then(Halt::void);
                if !sweep.points.is_empty() {
                    record.sweeps.push(sweep);
                }
                match halted {
                    None | Some(Halt::Subject(_) | Halt::Other(_)) => {}
                    Some(Halt::NotReady(_)) if service.optional => {}
                    Some(Halt::Interrupted) => {
                        record.interrupted = true;
                        self.screen.note("interrupted: what was measured is kept");
                        return Ok(());
                    }
                    Some(halt) => return Err(halt.into_error()),
                }
                if let Some(void) = &round.voided {
                    self.screen.note(&format!("{}: void, {void}", service.name));
                }
                if again {
                    record.aa.push(round);
                } else {
                    record.rounds.push(round);
                }
                record.save(&self.stage.directory).map_err(|error| LabError::failed(error.to_string()))?;
            }
        }
        Ok(())
    }

    fn one(&self, service: &Service, sweep: &mut Sweep) -> Result<(), Halt> {
        let mut session = self.bench.start(service)?;
        session.discard_first()?;
        match self.plan {
            Plan::Sweep(rates) => {
                for rate in rates {
                    let trial = Trial { rate_pps: *rate, duration_s: self.stage.experiment.duration };
                    let (point, _) = self.trial(&mut session, service, trial)?;
                    sweep.points.push(point);
                }
                Ok(())
            }
            Plan::FindMax(settings) => {
                let mut search = Search::new(settings.clone());
                let searched = self.search(&mut session, service, settings, &mut search, sweep);
                // Also of a search that was ended early: it says so.
                sweep.found = search.found();
                searched?;
                self.latencies(&mut session, service, sweep)
            }
        }
    }

    fn search(
        &self,
        session: &mut Session<'_>,
        service: &Service,
        settings: &Settings,
        search: &mut Search,
        sweep: &mut Sweep,
    ) -> Result<(), Halt> {
        let mut voids = 0;
        while let Some(trial) = search.next() {
            let (point, void) = self.trial(session, service, trial)?;
            let (sent, received) = counts(&point, trial.duration_s);
            let late = matches!(void, Some(Void::GeneratorLate { .. }));
            // Late and yet not lossy is a result.
            let lost = sent.saturating_sub(received) as f64 > settings.loosest() * sent as f64;
            voids = if void.is_some() && (lost || !late) { voids + 1 } else { 0 };
            if late && voids < HOPELESS {
                search.observe_late(sent, received);
                sweep.points.push(point);
            } else if void.is_some() {
                if voids >= HOPELESS {
                    return Err(Halt::Other(format!(
                        "{voids} trials in a row are void, at whatever rate ({}): quieten the machine, pin the programs \
                         to CPUs of their own, or allow more (--max-late-us, --max-steal, or [limits] in the file)",
                        void.map_or_else(String::new, |void| void.to_string())
                    )));
                }
                search.observe_void();
            } else {
                search.observe(sent, received);
                sweep.points.push(point);
            }
        }
        Ok(())
    }

    /// At shares of the highest rate, for the full duration.
    fn latencies(&self, session: &mut Session<'_>, service: &Service, sweep: &mut Sweep) -> Result<(), Halt> {
        let Some(highest) = sweep.found.iter().find_map(|found| found.lower_pps) else { return Ok(()) };
        for percent in LATENCY_AT {
            let rate_pps = (highest * u64::from(percent) / 100).max(1);
            let trial = Trial { rate_pps, duration_s: self.stage.experiment.duration };
            let (point, _) = self.trial(session, service, trial)?;
            if let Some(latency) = &point.latency {
                self.screen.note(&format!(
                    "{}: at {percent} % ({rate_pps}/s) latency p50 {:.0} us, p99 {:.0} us, p99.9 {:.0} us",
                    service.name, latency.p50, latency.p99, latency.p999
                ));
            }
            sweep.points.push(point);
        }
        Ok(())
    }

    /// One trial, and why it is void, if it is.
    fn trial(
        &self,
        session: &mut Session<'_>,
        service: &Service,
        trial: Trial,
    ) -> Result<(SweepPoint, Option<Void>), Halt> {
        let experiment = &self.stage.experiment;
        let mut round = Round::new(0, &service.name, 0);
        let window = Window { warmup: experiment.warmup, duration: trial.duration_s };
        let rate = trial.rate_pps.to_string();
        let outcome = session.measure(
            window,
            |variables| variables.set(&experiment.workload.rate, &rate),
            &mut round,
        )?;
        let point = point(&outcome, trial).ok_or_else(|| {
            Halt::Fatal(LabError::usage(
                "the workload does not say what it sent and received: only one that does (format = \"turnpike\" or \
                 \"iperf3\" over UDP) can be searched or swept",
            ))
        })?;
        let void = experiment.limits.check(&round);
        let verdict = match &void {
            Some(void) => format!("{:.3} % lost, but {void}", point.loss_percent),
            None => format!("{:.3} % lost", point.loss_percent),
        };
        self.screen
            .note(&format!("{}: {}/s for {} s: {verdict}", service.name, trial.rate_pps, trial.duration_s));
        Ok((point, void))
    }
}

/// By the workload's own account: both ends of the same datagrams.
fn point(outcome: &Outcome, trial: Trial) -> Option<SweepPoint> {
    let (sent, received) = (outcome.sent? as f64, outcome.received? as f64);
    let offered = outcome.metrics.get("offered_pps").copied().unwrap_or(trial.rate_pps as f64);
    let kept = if sent > 0.0 { (received / sent).min(1.0) } else { 0.0 };
    Some(SweepPoint {
        offered_pps: offered,
        delivered_pps: outcome.metrics.get(metric::DELIVERED_PPS).copied().unwrap_or(offered * kept),
        loss_percent: (1.0 - kept) * 100.0,
        duration_s: trial.duration_s,
        latency: outcome.latency.clone(),
    })
}

/// Datagrams sent and received in a trial of that length. The workload ran a little longer, so its counts are scaled;
/// a loss never rounds away.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates times seconds: positive, far below 2^53"
)]
fn counts(point: &SweepPoint, duration: f64) -> (u64, u64) {
    let sent = (point.offered_pps * duration).round().max(0.0) as u64;
    let lost = (sent as f64 * point.loss_percent / 100.0).ceil() as u64;
    (sent, sent.saturating_sub(lost))
}

/// What a search or a sweep of one subject found, as lines.
pub(crate) fn describe(sweep: &Sweep) -> String {
    let mut text = format!("{}\n", sweep.subject);
    for found in &sweep.found {
        let rate = |rate: Option<u64>| rate.map_or_else(|| "no rate".to_owned(), |rate| format!("{rate}/s"));
        let fails = found.upper_pps.map_or_else(String::new, |rate| format!(", {rate}/s does not"));
        text += &format!(
            "  loss <= {} %: {} holds{fails} ({})\n",
            (found.max_loss * 1e6).round() / 1e4,
            rate(found.lower_pps),
            found.because
        );
    }
    // Of a search only what was measured at shares of the rate found: its trials are steps on the way, and one that was
    // interrupted has nothing else.
    let shares = sweep.points.len().saturating_sub(LATENCY_AT.len());
    let highest = sweep.found.iter().find_map(|found| found.lower_pps).map(|rate| rate as f64);
    let is_share =
        |rate: f64| (sweep.points[shares].offered_pps / rate * 100.0 - f64::from(LATENCY_AT[0])).abs() < 5.0;
    let trials = match highest {
        _ if sweep.found.is_empty() => 0,
        Some(rate) if shares < sweep.points.len() && is_share(rate) => shares,
        _ => sweep.points.len(),
    };
    for point in &sweep.points[trials..] {
        let latency = point.latency.as_ref().map_or_else(String::new, |latency| {
            format!(", latency p50 {:.0} us, p99 {:.0} us", latency.p50, latency.p99)
        });
        text += &format!(
            "  {:>10.0}/s offered, {:>10.0}/s delivered, {:.3} % lost{latency}\n",
            point.offered_pps, point.delivered_pps, point.loss_percent
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metric_names_are_those_that_are_listed() {
        for goal in Settings::default().goals {
            assert!(metric::find(&metric_of(goal)).is_some(), "{}", metric_of(goal));
        }
    }

    #[test]
    fn a_single_lost_datagram_is_a_loss_after_scaling() {
        let point = SweepPoint { offered_pps: 1000.0, loss_percent: 100.0 / 6000.0, ..SweepPoint::default() };
        assert_eq!(counts(&point, 1.0), (1000, 999));
        let whole = SweepPoint { offered_pps: 1000.0, ..SweepPoint::default() };
        assert_eq!(counts(&whole, 5.0), (5000, 5000));
    }

    #[test]
    fn the_trials_of_an_interrupted_search_are_no_latencies() {
        let point = |offered_pps| SweepPoint { offered_pps, ..SweepPoint::default() };
        let found = crate::search::Found {
            max_loss: 0.0,
            lower_pps: Some(1000),
            upper_pps: None,
            delivered_pps: None,
            because: crate::search::Because::Highest,
        };
        let trials = vec![point(1000.0), point(1000.0), point(900.0)];
        let mut sweep = Sweep { points: trials, found: vec![found], ..Sweep::default() };
        assert!(!describe(&sweep).contains("offered"), "{}", describe(&sweep));
        sweep.points.extend([point(300.0), point(600.0), point(800.0)]);
        assert_eq!(describe(&sweep).matches("offered").count(), 3);
    }

    #[test]
    fn a_workload_that_counts_nothing_has_no_point() {
        let trial = Trial { rate_pps: 10, duration_s: 1.0 };
        assert!(point(&Outcome::default(), trial).is_none());
        let counted = Outcome { sent: Some(200), received: Some(199), ..Outcome::default() };
        assert!((point(&counted, trial).unwrap().loss_percent - 0.5).abs() < 1e-9);
    }
}
