//! Measurements at several offered rates: a sweep over given rates, and the search for the highest
//! sustainable one. The subject is started once for all trials of a round, whose first run is discarded.

use super::{
    result::WorkloadResult,
    run_failure::RunFailure,
    session::SubjectSession,
    stage::{MeasuredWindow, RunStage},
};
use crate::{
    error::LabError,
    experiment::ServiceSpec,
    invalid_rounds::VoidReason,
    metric,
    record::{Round, RunRecord, Sweep, SweepPoint},
    request::RunRequest,
    search::{RatePlan, Search, SearchEnd, SearchSettings, Trial},
};

const CLIENTS: &str = "clients";

fn metric_of(goal: f64, variable: &str) -> String {
    // Rounded, because 0.001 * 100 is not exactly 0.1 in floating point. Four decimal places suffice for any goal.
    let percent = (goal * 1e6).round() / 1e4;
    let unit = if variable == CLIENTS { CLIENTS } else { "pps" };
    format!("find_max_{percent}_{unit}")
}

/// Expected duration of a subject's trials, in seconds.
const EXPECTED: f64 = 60.0;
/// Number of consecutive void trials after which a high rate cannot be the cause, because the rate has fallen to a 32nd of the first one.
const HOPELESS: u32 = 18;

/// Percentages of the highest rate at which latency (the first three), cost (100 %) and overload (200 %) are measured.
const SHARES: [u32; 5] = [30, 60, 80, WHOLE, OVERLOAD];
const WHOLE: u32 = 100;
const OVERLOAD: u32 = 200;

pub(super) fn run(
    request: &RunRequest,
    stage: &RunStage,
    plan: &RatePlan,
    rounds: u32,
) -> Result<RunRecord, LabError> {
    let variable = &stage.experiment.workload.rate;
    if stage.variables.get(variable).is_none() {
        stage.remove_directory();
        return Err(LabError::usage(format!(
            "the workload has no rate variable {{{variable}}}: define it under [vars], or set workload.rate, as in experiments/relay-rate.toml"
        )));
    }
    let mut record = stage.record(request)?;
    record.experiment.rounds = rounds;
    if let RatePlan::FindMax(settings) = plan {
        // The middle goal decides, because zero loss depends on luck and the loosest goal is only a rough guide.
        record.experiment.metric = settings
            .goals
            .get(1)
            .or(settings.goals.first())
            .map_or_else(String::new, |goal| metric_of(*goal, variable));
    }
    let experiment = &stage.experiment;
    let aa = experiment.aa && rounds >= experiment.rules.min_rounds;
    let outcome = stage.run_rounds(&mut record, aa, EXPECTED, |service, round, record| {
        let mut sweep = Sweep { subject: service.name.clone(), round: Some(round.index), ..Sweep::default() };
        let done = stage.offer(plan, service, &mut sweep, round);
        for found in &sweep.found {
            let rate = found.lower_pps.map(|rate| (metric_of(found.max_loss, variable), rate as f64));
            round.metrics.extend(rate);
        }
        if !sweep.points.is_empty() {
            record.sweeps.push(sweep);
        }
        done
    });
    let ends = ended_by_the_generator(&record);
    record.environment.notes.extend(ends);
    let is_measured = !record.sweeps.is_empty();
    stage.keep(&mut record, is_measured)?;
    outcome.map(|()| record)
}

impl RunStage {
    fn offer(
        &self,
        plan: &RatePlan,
        service: &ServiceSpec,
        sweep: &mut Sweep,
        round: &mut Round,
    ) -> Result<(), RunFailure> {
        let mut session = self.start(service)?;
        session.discard_first()?;
        match plan {
            RatePlan::Sweep(rates) => {
                for rate in rates {
                    let trial = Trial { rate_pps: *rate, duration_s: self.experiment.duration };
                    let (point, _) = self.trial(&mut session, trial, &mut Round::default())?;
                    sweep.points.push(point);
                }
                Ok(())
            }
            RatePlan::FindMax(settings) => {
                let mut search = Search::new(settings.clone());
                let searched = self.search(&mut session, settings, &mut search, sweep);
                // Recorded even if the search was interrupted; such results are marked.
                sweep.found = search.found();
                searched?;
                self.shares(&mut session, sweep, round)
            }
        }
    }

    fn search(
        &self,
        session: &mut SubjectSession<'_>,
        settings: &SearchSettings,
        search: &mut Search,
        sweep: &mut Sweep,
    ) -> Result<(), RunFailure> {
        let mut voids = 0;
        while let Some(trial) = search.next() {
            let (point, void) = self.trial(session, trial, &mut Round::default())?;
            let (sent, received) = counts(&point, trial, &self.experiment.workload.rate);
            let p99 = point.latency.as_ref().map_or(0.0, |latency| latency.p99);
            // Datagrams that arrive too late are useless in a call and count as lost.
            let received = if settings.max_p99_us.is_some_and(|most| p99 > most) { 0 } else { received };
            let late = matches!(void, Some(VoidReason::GeneratorLate { .. }));
            // If the generator fell behind but the loss meets the loosest goal, the result is valid.
            let lost = sent.saturating_sub(received) as f64 > settings.loosest() * sent as f64;
            voids = if void.is_some() && (lost || !late) { voids + 1 } else { 0 };
            if late && voids < HOPELESS {
                search.observe_late(sent, received);
                sweep.points.push(point);
            } else if void.is_some() {
                if voids >= HOPELESS {
                    return Err(RunFailure::Other(format!(
                        "{voids} consecutive trials at different rates were void ({}): reduce other load on the machine, pin the programs \
                         to separate CPUs, or raise the limits (--max-late-us, --max-steal, or [limits] in the file)",
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

    fn shares(
        &self,
        session: &mut SubjectSession<'_>,
        sweep: &mut Sweep,
        round: &mut Round,
    ) -> Result<(), RunFailure> {
        let Some(highest) = sweep.found.iter().find_map(|found| found.lower_pps) else { return Ok(()) };
        let mut delivered_pps = None;
        for percent in SHARES {
            let rate_pps = share_of(highest, percent);
            let trial = Trial { rate_pps, duration_s: self.experiment.duration };
            let mut one = Round::default();
            let (point, void) = self.trial(session, trial, &mut one)?;
            match percent {
                WHOLE => {
                    let late = matches!(void, Some(VoidReason::GeneratorLate { .. }));
                    delivered_pps = void.is_none().then_some(point.delivered_pps);
                    let counts = |name: &str| void.is_none() || late && metric::survives_lateness(name);
                    round.metrics.extend(one.metrics.into_iter().filter(|(name, _)| counts(name)));
                }
                // The figure is meaningful only if the generator reached twice the highest rate.
                OVERLOAD if void.is_none() => {
                    let share = delivered_pps.map(|whole| point.delivered_pps / whole);
                    round.metrics.extend(share.map(|share| (metric::OVERLOAD_SHARE.to_owned(), share)));
                }
                _ => {}
            }
            if percent >= WHOLE {
                continue;
            }
            if let Some(latency) = &point.latency {
                self.console.note(&format!(
                    "{}: at {percent} % ({rate_pps}/s) latency p50 {:.0} us, p99 {:.0} us, p99.9 {:.0} us",
                    session.subject, latency.p50, latency.p99, latency.p999
                ));
            }
            sweep.points.push(point);
        }
        Ok(())
    }

    fn trial(
        &self,
        session: &mut SubjectSession<'_>,
        trial: Trial,
        round: &mut Round,
    ) -> Result<(SweepPoint, Option<VoidReason>), RunFailure> {
        let experiment = &self.experiment;
        let window = MeasuredWindow { warmup: experiment.warmup, duration: trial.duration_s };
        let rate = trial.rate_pps.to_string();
        let outcome =
            session.measure(window, |variables| variables.set(&experiment.workload.rate, &rate), round)?;
        let point = point(&outcome, trial).ok_or_else(|| {
            RunFailure::Fatal(LabError::usage(
                "the workload does not report what it sent and received: searches and sweeps need format = \"turnpike\" or \
                 \"iperf3\" over UDP",
            ))
        })?;
        let void = experiment.limits.check(&round.metrics);
        let verdict = match &void {
            Some(void) => format!("{:.3} % lost, but {void}", point.loss_percent),
            None => format!("{:.3} % lost", point.loss_percent),
        };
        let (name, rate) = (&session.subject, trial.rate_pps);
        self.console.note(&format!("{name}: {rate}/s for {} s: {verdict}", trial.duration_s));
        Ok((point, void))
    }
}

fn point(outcome: &WorkloadResult, trial: Trial) -> Option<SweepPoint> {
    let (sent, received) = (outcome.sent? as f64, outcome.received? as f64);
    let offered = outcome.metrics.get("offered_pps").copied().unwrap_or(trial.rate_pps as f64);
    let kept = if sent > 0.0 { (received / sent).min(1.0) } else { 0.0 };
    Some(SweepPoint {
        rate_pps: trial.rate_pps,
        offered_pps: offered,
        delivered_pps: outcome.metrics.get(metric::DELIVERED_PPS).copied().unwrap_or(offered * kept),
        loss_percent: (1.0 - kept) * 100.0,
        duration_s: trial.duration_s,
        latency: outcome.latency.clone(),
    })
}

/// Number of datagrams sent and received, scaled to the length of the trial, since the workload ran a little longer. A loss is never
/// rounded to zero.
#[expect(clippy::cast_possible_truncation, reason = "rates times seconds: positive, far below 2^53")]
fn counts(point: &SweepPoint, trial: Trial, variable: &str) -> (u64, u64) {
    // A few clients send many datagrams, so rounding to whole clients would count a single lost datagram as a lost client.
    let rate = if variable == CLIENTS { trial.rate_pps as f64 * 1e6 } else { point.offered_pps };
    let sent = (rate * trial.duration_s).round().max(0.0) as u64;
    let lost = (sent as f64 * point.loss_percent / 100.0).ceil() as u64;
    (sent, sent.saturating_sub(lost))
}

fn ended_by_the_generator(record: &RunRecord) -> Vec<String> {
    let of_subject = |name: &str| {
        let sweeps = || record.sweeps.iter().filter(|sweep| sweep.subject == name);
        let ended = sweeps()
            .filter(|sweep| sweep.found.iter().any(|found| found.because == SearchEnd::Generator))
            .count();
        (ended > 0).then(|| {
            format!(
                "the generator limited {ended} of {} searches for {name}: the true maximum may be higher",
                sweeps().count()
            )
        })
    };
    record.experiment.subjects.iter().filter_map(|subject| of_subject(&subject.name)).collect()
}

fn share_of(highest: u64, percent: u32) -> u64 {
    (highest * u64::from(percent) / 100).max(1)
}

pub(crate) fn describe(sweep: &Sweep) -> String {
    let mut text = format!("{}\n", sweep.subject);
    for found in &sweep.found {
        let rate = |rate: Option<u64>| rate.map_or_else(|| "no rate".to_owned(), |rate| format!("{rate}/s"));
        let fails = found.upper_pps.map_or_else(String::new, |rate| format!(", missed at {rate}/s"));
        text += &format!(
            "  loss <= {} %: met at {}{fails} ({})\n",
            (found.max_loss * 1e6).round() / 1e4,
            rate(found.lower_pps),
            found.because
        );
    }
    // Lists only the trials below the highest rate; those at 100 % and above are reported as metrics.
    let shares = sweep.points.len().saturating_sub(SHARES.iter().filter(|percent| **percent < WHOLE).count());
    let highest = sweep.found.iter().find_map(|found| found.lower_pps);
    let is_share = |highest: u64| sweep.points[shares].rate_pps == share_of(highest, SHARES[0]);
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
    fn search_metrics_are_listed() {
        for goal in SearchSettings::default().goals {
            for name in [metric_of(goal, "rate"), metric_of(goal, CLIENTS)] {
                assert!(metric::find(&name).is_some(), "{name}");
            }
        }
    }

    #[test]
    fn scaling_keeps_a_single_lost_datagram() {
        let point = SweepPoint { offered_pps: 1000.0, loss_percent: 100.0 / 6000.0, ..SweepPoint::default() };
        let trial = |rate_pps, duration_s| Trial { rate_pps, duration_s };
        assert_eq!(counts(&point, trial(1000, 1.0), "rate"), (1000, 999));
        let whole = SweepPoint { offered_pps: 1000.0, ..SweepPoint::default() };
        assert_eq!(counts(&whole, trial(1000, 5.0), "rate"), (5000, 5000));
        assert_eq!(counts(&point, trial(10, 5.0), CLIENTS), (50_000_000, 50_000_000 - 8_334));
    }

    #[test]
    fn trials_of_an_interrupted_search_are_not_listed() {
        let point = |rate_pps| SweepPoint { rate_pps, offered_pps: rate_pps as f64, ..SweepPoint::default() };
        let found = crate::search::FoundRate {
            max_loss: 0.0,
            lower_pps: Some(1000),
            upper_pps: None,
            delivered_pps: None,
            because: crate::search::SearchEnd::Highest,
        };
        let trials = vec![point(1000), point(1000), point(900)];
        let mut sweep = Sweep { points: trials, found: vec![found], ..Sweep::default() };
        assert!(!describe(&sweep).contains("offered"), "{}", describe(&sweep));
        sweep.points.extend([point(300), point(600), point(800)]);
        assert_eq!(describe(&sweep).matches("offered").count(), 3);
    }

    #[test]
    fn a_workload_without_counts_has_no_point() {
        let trial = Trial { rate_pps: 10, duration_s: 1.0 };
        assert!(point(&WorkloadResult::default(), trial).is_none());
        let counted = WorkloadResult { sent: Some(200), received: Some(199), ..WorkloadResult::default() };
        assert!((point(&counted, trial).unwrap().loss_percent - 0.5).abs() < 1e-9);
    }
}
