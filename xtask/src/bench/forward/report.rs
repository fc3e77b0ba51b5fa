//! The tables of a benchmark of forwarders: ours against each peer, and the medians behind it.

use std::fmt::Write as _;

use super::{
    super::{
        report::show_ratio,
        rounds,
        stats::{Random, Summary, paired_ratios},
    },
    finding::{Finding, Traffic, show_cost, show_rate},
    subject::{OURS, Subject},
    workload::{Against, Figure, Metric, Must, Workload},
};

/// All rounds of one workload.
pub(crate) type Results = rounds::Results<Workload, Finding>;

/// A figure of ours against one peer.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    title: String,
    peer: String,
    theirs: String,
    ours: String,
    ratio: String,
    must: String,
    /// `None` where nothing is demanded, or something is missing.
    met: Option<bool>,
}

/// Ours against every peer.
pub(crate) struct Comparison(Vec<Row>);

impl Comparison {
    pub(crate) fn of(all: &[Results], subjects: &[Subject], seed: u64) -> Self {
        let mut random = Random::from_seed(seed);
        let mut rows = Vec::new();
        for results in all {
            let shape = results.workload.shape;
            let peers: Vec<&str> = subjects
                .iter()
                .filter(|subject| subject.is_peer() && subject.refusal(shape).is_none())
                .map(|subject| subject.name.as_str())
                .collect();
            for figure in &results.workload.figures {
                let best = best(results, &peers, figure.metric);
                rows.extend(peers.iter().map(|peer| row(results, figure, peer, best, &mut random)));
            }
        }
        Self(rows)
    }

    /// Whether nothing is known to be missed.
    pub(crate) fn all_met(&self) -> bool {
        self.0.iter().all(|row| row.met != Some(false))
    }

    pub(crate) fn markdown(&self) -> String {
        let mut text = String::from(
            "| workload | peer | theirs | turnpike | ratio (min..max; 95 %) | must | verdict |\n\
             | --- | --- | ---: | ---: | ---: | ---: | --- |\n",
        );
        for row in &self.0 {
            let verdict = match row.met {
                Some(true) => "met",
                Some(false) => "**missed**",
                None if row.must.is_empty() => "",
                None => "not measured",
            };
            let Row { title, peer, theirs, ours, ratio, must, .. } = row;
            let _ = writeln!(text, "| {title} | {peer} | {theirs} | {ours} | {ratio} | {must} | {verdict} |");
        }
        text
    }
}

fn row(results: &Results, figure: &Figure, peer: &str, best: Option<&str>, random: &mut Random) -> Row {
    let metric = figure.metric;
    let (ours, theirs) = (figures(results, OURS, metric), figures(results, peer, metric));
    let mut summary = |values: &[f64]| Summary::of(values, random);
    let median = |summary: Option<Summary>| summary.map_or("-".to_owned(), |found| metric.show(found.median));
    let shown_theirs = median(summary(&present(&theirs)));
    let shown_ours = median(summary(&present(&ours)));
    let ratio = summary(&paired_ratios(&ours, &theirs));
    let musts: Vec<&Must> = figure
        .musts
        .iter()
        .filter(|must| match must.against {
            Against::Best => best == Some(peer),
            Against::Every => true,
            Against::Peer(name) => name == peer,
        })
        .collect();
    let shown_musts: Vec<String> = musts
        .iter()
        .map(|must| match must.against {
            Against::Best => format!("{} (the best)", must.bound.show()),
            Against::Every | Against::Peer(_) => must.bound.show(),
        })
        .collect();
    let met = match ratio {
        Some(ratio) if !musts.is_empty() => Some(musts.iter().all(|must| must.bound.holds(ratio.median))),
        _ => None,
    };
    Row {
        title: format!("{}: {}", results.workload.title, metric.title()),
        peer: peer.to_owned(),
        theirs: shown_theirs,
        ours: shown_ours,
        ratio: ratio.map_or("-".to_owned(), show_ratio),
        must: shown_musts.join(", "),
        met,
    }
}

/// The peer with the best median of a figure.
fn best<'a>(results: &Results, peers: &[&'a str], metric: Metric) -> Option<&'a str> {
    let mut medians: Vec<(&str, f64)> = peers
        .iter()
        .filter_map(|peer| Some((*peer, median(&present(&figures(results, peer, metric)))?)))
        .collect();
    medians.sort_by(|(_, one), (_, other)| one.total_cmp(other));
    let best = if metric.less_is_better() { medians.first() } else { medians.last() };
    best.map(|(peer, _)| *peer)
}

/// The subject's figure of each measured round.
fn figures(results: &Results, subject: &str, metric: Metric) -> Vec<Option<f64>> {
    results.measured().map(|round| round.find(subject)?.figure(metric)).collect()
}

fn present(figures: &[Option<f64>]) -> Vec<f64> {
    figures.iter().flatten().copied().collect()
}

fn median(values: &[f64]) -> Option<f64> {
    Summary::of(values, &mut Random::from_seed(0)).map(|summary| summary.median)
}

/// What stands behind the ratios: medians of each subject under each workload of traffic, references included.
pub(crate) fn details(all: &[Results], subjects: &[Subject]) -> String {
    let mut text = String::from(
        "| workload | subject | delivered | forwarder's core busy | core | process | ksoftirqd | load core busy | bytes a buffer \
         to the server | p50 us | p99 us | disturbed rounds |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for results in all {
        let shape = results.workload.shape;
        for subject in subjects {
            let runs: Vec<&Traffic> = results
                .measured()
                .filter_map(|round| match round.find(&subject.name)? {
                    Finding::Traffic(traffic) => Some(&**traffic),
                    Finding::Idle(_) => None,
                })
                .collect();
            if runs.is_empty() {
                continue;
            }
            let of = |figure: &dyn Fn(&Traffic) -> Option<f64>, show: &dyn Fn(f64) -> String| {
                let values: Vec<f64> = runs.iter().filter_map(|traffic| figure(traffic)).collect();
                median(&values).map_or("-".to_owned(), show)
            };
            let percent = |value: f64| format!("{:.1} %", value * 100.0);
            let whole = |value: f64| format!("{value:.0}");
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} of {} |",
                results.workload.name,
                subject.name,
                of(&|t| t.delivered_per_second(), &|rate| show_rate(shape, rate)),
                of(&|t| Some(t.window.busy() / t.window.elapsed), &percent),
                of(&|t| t.core_cost(), &|cost| show_cost(shape, cost)),
                of(&|t| t.process_cost(), &|cost| show_cost(shape, cost)),
                of(&|t| Some(t.ksoftirqd_share()), &percent),
                of(&|t| Some(t.window.load_core_share()), &percent),
                of(&|t| Some(t.window.to_peer.octets as f64 / t.window.to_peer.buffers as f64), &whole),
                of(&|t| t.latency("p50"), &whole),
                of(&|t| t.latency("p99"), &whole),
                runs.iter().filter(|traffic| traffic.foreign_share() > 0.03).count(),
                runs.len(),
            );
        }
    }
    text
}

/// Who is not in the tables and why: programs that are not there, workloads they cannot do, trials that failed. Empty where
/// all ran.
pub(crate) fn gaps(all: &[Results], subjects: &[Subject], missing: &[(String, String)]) -> String {
    let mut text = String::new();
    for (peer, reason) in missing {
        let _ = writeln!(text, "- {peer}: left out of everything: {reason}");
    }
    for results in all {
        for subject in subjects.iter().filter(|subject| subject.is_missed()) {
            if let Some(reason) = subject.refusal(results.workload.shape) {
                let _ = writeln!(text, "- {}: not in {}: {reason}", subject.name, results.workload.name);
            }
        }
        let mut void: Vec<&(String, String)> = results.void().collect();
        void.sort();
        let mut rest = &void[..];
        while let Some((subject, reason)) = rest.first() {
            let count = rest.iter().take_while(|other| other.0 == *subject).count();
            rest = &rest[count..];
            let trials = if count == 1 { "a void trial" } else { "void trials, first" };
            let _ = writeln!(text, "- {subject}: {count} {trials} in {}: {reason}", results.workload.name);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            super::{counters::Memory, rounds::Round},
            finding::Idle,
            subject::{Peer, Program},
            workload::chosen,
        },
        *,
    };

    const HAPROXY: &str = "haproxy";

    fn subjects() -> Vec<Subject> {
        let peer = |peer: Peer| Subject::new(peer.name(), Program::Peer(peer, "/x".into()));
        let ours = Subject::new(OURS, Program::Turnpike("/x".into()));
        vec![ours, peer(Peer::Oxidinetd), peer(Peer::Haproxy), Subject::new("direct", Program::Direct)]
    }

    /// A workload judged by memory, whose figure is easy to set: bytes of ours, oxidinetd and HAProxy a round.
    fn results(bytes: &[[u64; 3]], musts: &[Must]) -> Results {
        let idle = |bytes: u64| {
            let after = Memory { resident: bytes, proportional: bytes };
            Finding::Idle(Idle { connections: 1, before: Memory::default(), after, sockets: 2 })
        };
        let rounds = bytes.iter().enumerate().map(|(index, row)| Round {
            warmup: index == 0,
            runs: [OURS, "oxidinetd", HAPROXY].map(str::to_owned).into_iter().zip(row.map(idle)).collect(),
            void: Vec::new(),
        });
        let mut workload = chosen(&["idle-5000".to_owned()]).unwrap().remove(0);
        workload.figures[0].musts = musts.to_vec();
        Results { rounds: rounds.collect(), workload }
    }

    fn compare(bytes: &[[u64; 3]], musts: &[Must]) -> Comparison {
        Comparison::of(&[results(bytes, musts)], &subjects(), 1)
    }

    fn must(against: Against, bound: super::super::workload::Bound) -> Must {
        Must { against, bound }
    }

    use super::super::workload::Bound;

    #[test]
    fn a_bound_against_the_best_stands_in_the_best_ones_row_only() {
        let best = must(Against::Best, Bound::AtMost(0.5));
        let table = compare(&[[9, 9, 9], [40, 100, 50], [40, 100, 60]], &[best]);
        let rows: Vec<_> = table.0.iter().map(|row| (row.peer.as_str(), row.met)).collect();
        assert_eq!(rows, [("oxidinetd", None), (HAPROXY, Some(false))]);
        assert!(table.0[1].must.contains("<= 0.5 x (the best)"), "{:?}", table.0[1]);
        assert!(!table.all_met());
    }

    #[test]
    fn a_bound_against_one_peer_and_the_best_may_meet_in_one_row() {
        let musts =
            [must(Against::Best, Bound::Below(1.0)), must(Against::Peer(HAPROXY), Bound::AtMost(0.5))];
        let table = compare(&[[9, 9, 9], [40, 100, 50]], &musts);
        assert_eq!(table.0[1].met, Some(false), "below 1, yet above a half");
        assert_eq!(table.0[1].must, "< 1 x (the best), <= 0.5 x");
    }

    #[test]
    fn the_warm_up_round_is_left_out_and_ratios_are_paired() {
        let table = compare(&[[900, 1, 1], [10, 100, 1], [20, 100, 1], [30, 100, 1]], &[]);
        assert_eq!((table.0[0].theirs.as_str(), table.0[0].ours.as_str()), ("100 B", "20 B"));
        assert!(table.0[0].ratio.starts_with("0.20 (0.10..0.30;"), "{:?}", table.0[0]);
        assert_eq!(table.0[0].met, None);
    }

    #[test]
    fn nothing_measured_is_not_met() {
        let table = compare(&[[1, 1, 1]], &[must(Against::Every, Bound::Below(1.0))]);
        assert!(table.0.iter().all(|row| row.met.is_none() && row.ratio == "-"));
        assert!(table.markdown().contains("| < 1 x | not measured |"), "{}", table.markdown());
    }

    #[test]
    fn gaps_name_the_missing_the_unable_and_the_void() {
        let mut results = results(&[[1, 1, 1]], &[]);
        results.workload = chosen(&["udp-1".to_owned()]).unwrap().remove(0);
        results.rounds[0].void = vec![
            ("oxidinetd".to_owned(), "no luck".to_owned()),
            ("oxidinetd".to_owned(), "no luck".to_owned()),
        ];
        let text = gaps(&[results], &subjects(), &[("nginx".to_owned(), "not installed".to_owned())]);
        assert!(text.contains("- nginx: left out of everything: not installed"), "{text}");
        assert!(text.contains("- haproxy: not in udp-1: HAProxy forwards no UDP"), "{text}");
        assert!(text.contains("- oxidinetd: 2 void trials, first in udp-1: no luck"), "{text}");
        assert!(!text.contains("direct"), "{text}");
    }

    #[test]
    fn every_workload_has_its_rows() {
        let all: Vec<Results> = chosen(&[])
            .unwrap()
            .into_iter()
            .map(|workload| Results { workload, rounds: Vec::new() })
            .collect();
        let table = Comparison::of(&all, &subjects(), 1);
        // Both peers in TCP's 11 figures, only oxidinetd in UDP's 4.
        assert_eq!(table.0.len(), 2 * 11 + 4);
        assert!(table.all_met());
    }
}
