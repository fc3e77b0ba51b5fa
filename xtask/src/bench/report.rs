//! Turns the rounds into the table of docs/performance-log.md, the details beside it, and the JSON file.

use std::fmt::Write as _;

use super::{
    finding::{Finding, Traffic},
    rounds,
    stats::{Random, Summary, paired_ratios},
    workload::{Metric, Must, Requirement, Workload},
};

/// All rounds of one workload.
pub(crate) type Results = rounds::Results<Workload, Finding>;

/// A row of the table.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    title: String,
    baseline: String,
    subject: String,
    ratio: String,
    must: String,
    /// `None` where something is missing.
    met: Option<bool>,
}

/// The table of `subject` against `baseline`.
pub(crate) struct Comparison {
    rows: Vec<Row>,
    baseline: String,
    subject: String,
}

impl Comparison {
    pub(crate) fn of(subject: &str, baseline: &str, all: &[Results], seed: u64) -> Self {
        let mut random = Random::from_seed(seed);
        let mut rows = Vec::new();
        for results in all {
            for requirement in &results.workload.requirements {
                rows.push(row(results, *requirement, subject, baseline, all, &mut random));
            }
        }
        Self { rows, baseline: baseline.to_owned(), subject: subject.to_owned() }
    }

    /// The rows of packets per busy second again, by the relay's process time in place of its core's. On a quiet
    /// machine both agree.
    pub(crate) fn by_process_time(subject: &str, baseline: &str, all: &[Results], seed: u64) -> Self {
        let mut random = Random::from_seed(seed);
        let mut rows = Vec::new();
        for results in all {
            let per_second = results
                .workload
                .requirements
                .iter()
                .filter(|requirement| requirement.metric == Metric::PerBusySecond);
            for requirement in per_second {
                let requirement = Requirement { metric: Metric::PerProcessSecond, ..*requirement };
                rows.push(row(results, requirement, subject, baseline, all, &mut random));
            }
        }
        Self { rows, baseline: baseline.to_owned(), subject: subject.to_owned() }
    }

    /// Whether it has any row.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Whether nothing is known to be missed.
    pub(crate) fn all_met(&self) -> bool {
        self.rows.iter().all(|row| row.met != Some(false))
    }

    pub(crate) fn markdown(&self) -> String {
        let mut text = format!(
            "| workload | {} | {} | ratio (min..max; 95 %) | must | verdict |\n| --- | ---: | ---: | ---: | ---: | --- |\n",
            self.baseline, self.subject
        );
        for row in &self.rows {
            let verdict = match row.met {
                Some(true) => "met",
                Some(false) => "**missed**",
                None => "not measured",
            };
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {verdict} |",
                row.title, row.baseline, row.subject, row.ratio, row.must
            );
        }
        text
    }
}

fn row(
    results: &Results,
    requirement: Requirement,
    subject: &str,
    baseline: &str,
    all: &[Results],
    random: &mut Random,
) -> Row {
    let Requirement { metric, must } = requirement;
    let of_subject = results.figures(subject, metric);
    let of_baseline = results.figures(baseline, metric);
    let mut summary = |values: &[f64]| Summary::of(values, random);
    let own = summary(&present(&of_subject));
    let other = summary(&present(&of_baseline));
    let ratio = summary(&paired_ratios(&of_subject, &of_baseline));
    let (must, met) = match must {
        Must::AtLeast(bound) => (format!(">= {bound} x"), ratio.map(|ratio| ratio.median >= bound)),
        Must::AtMost(bound) => (format!("<= {bound} x"), ratio.map(|ratio| ratio.median <= bound)),
        Must::OwnAtMost(bound) => (format!("<= {}", metric.show(bound)), own.map(|own| own.median <= bound)),
        Must::ShareOf(name, share) => {
            let reached = all.iter().find(|results| results.workload.name == name).and_then(|results| {
                let ratios =
                    paired_ratios(&results.figures(subject, metric), &results.figures(baseline, metric));
                summary(&ratios)
            });
            match reached {
                Some(reached) => {
                    let bound = reached.median * share;
                    (format!(">= {bound:.2} x ({share} of {name})"), ratio.map(|ratio| ratio.median >= bound))
                }
                None => (format!(">= {share} of {name}"), None),
            }
        }
    };
    let show =
        |summary: Option<Summary>| summary.map_or("-".to_owned(), |summary| metric.show(summary.median));
    Row {
        title: results.workload.title.to_owned(),
        baseline: show(other),
        subject: show(own),
        ratio: ratio.map_or("-".to_owned(), show_ratio),
        must,
        met,
    }
}

pub(crate) fn show_ratio(ratio: Summary) -> String {
    format!("{:.2} ({:.2}..{:.2}; {:.2}..{:.2})", ratio.median, ratio.min, ratio.max, ratio.low, ratio.high)
}

fn present(figures: &[Option<f64>]) -> Vec<f64> {
    figures.iter().flatten().copied().collect()
}

impl Results {
    /// The subject's figure of each measured round.
    pub(crate) fn figures(&self, subject: &str, metric: Metric) -> Vec<Option<f64>> {
        self.measured().map(|round| round.find(subject)?.figure(metric)).collect()
    }

    fn median_of(&self, subject: &str, figure: impl Fn(&Traffic) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self
            .measured()
            .filter_map(|round| match round.find(subject)? {
                Finding::Traffic(traffic) => figure(traffic),
                Finding::Idle(_) => None,
            })
            .collect();
        Summary::of(&values, &mut Random::from_seed(0)).map(|summary| summary.median)
    }

    /// Rounds in which something makes the figure doubtful.
    fn caveats(&self, subject: &str) -> usize {
        self.measured()
            .filter(|round| match round.find(subject) {
                Some(Finding::Traffic(traffic)) => traffic.foreign_share() > 0.03,
                _ => false,
            })
            .count()
    }
}

/// What stands behind the ratios: medians of each subject under each traffic workload.
pub(crate) fn details(all: &[Results], subjects: &[String]) -> String {
    let mut text = String::from(
        "| workload | subject | offered/s | delivered/s | relay core busy | core us each | process us each | datagrams a receive \
         | datagrams a send | load core busy | loss | p50 us | p99 us | disturbed rounds |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for results in all {
        for subject in subjects {
            let show = |figure: &dyn Fn(&Traffic) -> Option<f64>, scale: f64, digits: usize| {
                results
                    .median_of(subject, figure)
                    .map_or("-".to_owned(), |value| format!("{:.digits$}", value * scale))
            };
            let delivered = |traffic: &Traffic| traffic.delivered() as f64;
            if results.median_of(subject, |traffic| Some(delivered(traffic))).is_none() {
                continue;
            }
            let _ = writeln!(
                text,
                "| {} | {subject} | {} | {} | {} % | {} | {} | {} | {} | {} % | {} % | {} | {} | {} of {} |",
                results.workload.name,
                show(&|t| t.reported(&["send_pps"]), 1.0, 0),
                show(&|t| Some(delivered(t) / t.window.elapsed), 1.0, 0),
                show(&|t| Some(t.busy() / t.window.elapsed), 100.0, 1),
                show(&|t| Some(t.busy() / delivered(t)), 1e6, 3),
                show(&|t| Some(t.window.subject.total() / delivered(t)), 1e6, 3),
                show(
                    &|t| Some(t.window.to_relay.packets as f64 / t.window.to_relay.buffers.max(1) as f64),
                    1.0,
                    1
                ),
                show(&|t| Some(t.segments_per_send()), 1.0, 1),
                show(&|t| Some(t.load_core_share()), 100.0, 0),
                show(&Traffic::loss, 100.0, 3),
                show(&|t| t.reported(&["rtt_us", "p50"]), 1.0, 0),
                show(&|t| t.reported(&["rtt_us", "p99"]), 1.0, 0),
                results.caveats(subject),
                results.measured().count(),
            );
        }
    }
    text
}

/// The generator's packets per second of its processor time, beside the relay's per busy second of its core.
pub(crate) fn generator_table(all: &[Results], subject: &str) -> String {
    let mut text = String::from(
        "| workload | generator, sent + received per core-second | relay, delivered per busy second | ratio | must | verdict |\n\
         | --- | ---: | ---: | ---: | ---: | --- |\n",
    );
    for results in all {
        let generator = results.median_of(subject, Traffic::generator_per_second);
        let relay = results.median_of(subject, |traffic| Some(traffic.per_busy_second()));
        let ratio = results
            .median_of(subject, |traffic| Some(traffic.generator_per_second()? / traffic.per_busy_second()));
        let thousands =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{:.0}k", value / 1e3));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | >= 5 x | {} |",
            results.workload.title,
            thousands(generator),
            thousands(relay),
            ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
            match ratio {
                Some(ratio) if ratio >= 5.0 => "met",
                Some(_) => "**missed**",
                None => "not measured",
            }
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            counters::Memory,
            finding::Idle,
            rounds::Round,
            workload::{Shape, chosen},
        },
        *,
    };

    /// A workload judged by memory, whose figure is easy to set.
    fn results(bytes: &[(u64, u64)], must: Must) -> Results {
        let idle = |bytes: u64| {
            Finding::Idle(Idle {
                allocations: 1,
                before: Memory::default(),
                after: Memory { resident: bytes, proportional: bytes },
                sockets: 1,
                kernel_bytes_per_socket: None,
            })
        };
        let rounds = bytes
            .iter()
            .enumerate()
            .map(|(index, (ours, theirs))| Round {
                warmup: index == 0,
                runs: vec![("coturn".to_owned(), idle(*theirs)), ("turnpike".to_owned(), idle(*ours))],
                void: Vec::new(),
            })
            .collect();
        let workload = Workload {
            name: "memory",
            title: "memory",
            shape: Shape::Idle { allocations: 1 },
            requirements: vec![Requirement { metric: Metric::AllocationBytes, must }],
        };
        Results { workload, rounds }
    }

    fn compare(results: Results) -> Comparison {
        Comparison::of("turnpike", "coturn", &[results], 1)
    }

    #[test]
    fn the_warm_up_round_is_left_out() {
        let table = compare(results(&[(900, 100), (10, 100), (20, 100), (30, 100)], Must::AtMost(0.5)));
        assert!(table.all_met());
        assert!(
            table.markdown().contains("| memory | 100 B | 20 B | 0.20 (0.10..0.30;"),
            "{}",
            table.markdown()
        );
    }

    #[test]
    fn a_missed_bound_is_said() {
        let table = compare(results(&[(1, 1), (60, 100), (70, 100)], Must::AtMost(0.5)));
        assert!(!table.all_met());
        assert!(table.markdown().contains("| <= 0.5 x | **missed** |"), "{}", table.markdown());
    }

    #[test]
    fn a_subject_that_did_not_run_is_not_measured_rather_than_met() {
        let table = Comparison::of("other", "coturn", &[results(&[(1, 1), (1, 1)], Must::AtMost(0.5))], 1);
        assert!(
            table.markdown().contains("| 1 B | - | - | <= 0.5 x | not measured |"),
            "{}",
            table.markdown()
        );
    }

    #[test]
    fn a_share_without_its_workload_is_not_measured() {
        let table = compare(results(&[(1, 1), (1, 1)], Must::ShareOf("flood-1", 0.8)));
        assert_eq!(table.rows[0].met, None);
    }

    #[test]
    fn a_share_is_taken_of_the_other_workloads_ratio() {
        let mut first = results(&[(1, 1), (60, 10)], Must::AtLeast(6.0));
        first.workload.name = "flood-1";
        let second = results(&[(1, 1), (47, 10)], Must::ShareOf("flood-1", 0.8));
        let table = Comparison::of("turnpike", "coturn", &[first, second], 1);
        assert_eq!(table.rows.iter().map(|row| row.met).collect::<Vec<_>>(), [Some(true), Some(false)]);
        assert!(table.rows[1].must.contains("4.80 x"), "{:?}", table.rows[1]);
    }

    #[test]
    fn every_workload_has_a_row() {
        let all: Vec<Results> = chosen(&[])
            .unwrap()
            .into_iter()
            .map(|workload| Results { workload, rounds: Vec::new() })
            .collect();
        let requirements: usize = all.iter().map(|results| results.workload.requirements.len()).sum();
        let table = Comparison::of("turnpike", "coturn", &all, 1);
        assert_eq!(table.markdown().lines().count(), requirements + 2);
    }
}
