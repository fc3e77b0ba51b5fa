//! Tables of a page, which turn into one card per row on a narrow screen.

use maud::{Markup, html};

use crate::metric::{self, Preference};
use crate::record::{CpuProfile, Round, RunRecord, Syscall};
use crate::stats;
use crate::thresholds::{ThresholdOutcome, evaluate};
use crate::verdict::{Conclusion, MetricVerdict};

struct TableRow {
    class: &'static str,
    /// Content and class of each cell.
    cells: Vec<(Markup, &'static str)>,
}

impl TableRow {
    /// Row whose second cell contains a verdict.
    fn judged(class: &'static str, texts: &[String]) -> Self {
        let mut row = Self::of(texts);
        row.cells[1].1 = "verdict";
        Self { class, ..row }
    }

    fn of(texts: &[impl AsRef<str>]) -> Self {
        let cell = |text: &str| (html! { (text) }, number(text).unwrap_or_default());
        Self { class: "", cells: texts.iter().map(|text| cell(text.as_ref())).collect() }
    }
}

fn table(head: &[&str], rows: &[TableRow]) -> Markup {
    html! {
        @if !rows.is_empty() {
            table.cards {
                @if head.iter().any(|name| !name.is_empty()) {
                    thead { tr { @for name in head { th { (name) } } } }
                }
                tbody {
                    @for row in rows {
                        tr class=(row.class) {
                            @for ((cell, class), name) in row.cells.iter().zip(head) {
                                td class=(class) data-label=(name) { (cell) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Shows the verdict next to the name, so that narrow screens show it too.
pub(super) fn metrics(record: &RunRecord, judged: &[&MetricVerdict]) -> Markup {
    let several = record.candidates().count() > 1;
    let rows: Vec<TableRow> = judged.iter().map(|verdict| metric_row(record, verdict, several)).collect();
    let baseline = record.baseline().unwrap_or("baseline");
    let subject = if several { "subject" } else { record.candidates().next().unwrap_or("subject") };
    table(
        &["metric", "verdict", "ratio", "interval", baseline, subject, "effect / noise", "noise floor"],
        &rows,
    )
}

fn metric_row(record: &RunRecord, verdict: &MetricVerdict, several: bool) -> TableRow {
    let name = &verdict.metric;
    let median = |subject: &str| {
        stats::median(&record.values(subject, name))
            .map_or_else(|| absent(record, subject, name), |value| metric::show(name, value))
    };
    let better = match metric::direction(name) {
        Preference::Higher => "; higher is better",
        Preference::Lower => "; lower is better",
        Preference::Neither => "",
    };
    let title = html! {
        @if several { (verdict.subject) ": " }
        strong { (name) }
        br;
        small { (metric::find(name).map_or("", |metric| metric.about)) (better) }
    };
    let interval = verdict.estimate.filter(|e| e.rounds > 1).map(|e| e.interval());
    let effect = verdict.estimate.map(|e| e.effect_size()).filter(|size| size.is_finite());
    let texts = [
        String::new(),
        in_short(&verdict.outcome),
        verdict.estimate.map_or_else(dash, |e| format!("{:.3}", e.ratio())),
        interval.map_or_else(dash, |interval| format!("{:.3} to {:.3}", interval.low, interval.high)),
        median(&verdict.baseline),
        median(&verdict.subject),
        effect.map_or_else(dash, |size| format!("{size:.1}")),
        verdict.floor.map_or_else(dash, |floor| format!("±{:.1} %", floor.percent())),
    ];
    let mut row = TableRow::judged(class(&verdict.outcome), &texts);
    row.cells[0].0 = title;
    row
}

pub(super) fn class(outcome: &Conclusion) -> &'static str {
    match outcome {
        Conclusion::Faster => "faster",
        Conclusion::Slower => "slower",
        Conclusion::NoDifference => "none",
        _ => "",
    }
}

/// Verdict without the reasons that more rounds would resolve, because those are shown once at the top of the page.
fn in_short(outcome: &Conclusion) -> String {
    match outcome {
        Conclusion::CannotTell { rounds: Some(rounds), .. } => {
            format!("{}, needs about {rounds} rounds", outcome.word())
        }
        _ => outcome.to_string(),
    }
}

fn absent(record: &RunRecord, subject: &str, metric: &str) -> String {
    let unsupported = record.rounds.iter().any(|r| r.subject == subject && r.not_supported.contains(metric));
    if unsupported { "not supported".to_owned() } else { dash() }
}

pub(super) fn thresholds(record: &RunRecord) -> Markup {
    let rows: Vec<TableRow> = evaluate(record)
        .iter()
        .map(|held| {
            let class = match held.outcome {
                ThresholdOutcome::Met => "faster",
                ThresholdOutcome::Missed => "slower",
                ThresholdOutcome::Undecided(_) => "",
            };
            let whom = held.against.clone().unwrap_or_else(|| format!("of {}", held.subject));
            let texts = [
                held.threshold.metric.clone(),
                held.outcome.to_string(),
                held.figure_in_words().unwrap_or_else(dash),
                format!("{} {} {whom}", held.kind, held.threshold),
            ];
            TableRow::judged(class, &texts)
        })
        .collect();
    table(&["metric", "verdict", "figure", "threshold"], &rows)
}

pub(super) fn found(record: &RunRecord) -> Markup {
    let found = record.sweeps.iter().flat_map(|sweep| sweep.found.iter().map(move |found| (sweep, found)));
    let rate = |pps: Option<u64>| pps.map_or_else(dash, |pps| pps.to_string());
    let rows = found.map(|(sweep, found)| {
        TableRow::of(&[
            sweep.subject.clone(),
            format!("{} %", found.max_loss * 100.0),
            rate(found.lower_pps),
            rate(found.upper_pps),
            found.delivered_pps.map_or_else(dash, |pps| format!("{pps:.0}")),
            found.because.to_string(),
        ])
    });
    let head = ["subject", "loss at most", "met at, /s", "missed at, /s", "delivered, /s", "end of search"];
    table(&head, &rows.collect::<Vec<_>>())
}

pub(super) fn symbols(profile: &CpuProfile) -> Markup {
    let rows = profile.symbols.iter().map(|symbol| {
        let side = if symbol.kernel { "kernel" } else { "user" };
        TableRow::of(&[&format!("{:.2} %", symbol.percent), side, &symbol.name])
    });
    html! {
        p {
            (profile.samples) " samples, " (format!("{:.1}", profile.kernel_percent)) " % in the kernel; "
            a href="flame.svg" { "flame graph" } "."
        }
        (table(&["samples", "side", "symbol"], &rows.collect::<Vec<_>>()))
    }
}

pub(super) fn syscalls(syscalls: &[Syscall]) -> Markup {
    let rows = syscalls.iter().map(|row| {
        TableRow::of(&[
            row.name.clone(),
            row.calls.to_string(),
            row.errors.to_string(),
            format!("{:.6}", row.seconds),
            format!("{:.2}", row.us_per_call()),
        ])
    });
    html! {
        p { "From a separate run under a tracer, which slows the subject down; waiting time is included." }
        (table(&["syscall", "calls", "errors", "seconds", "µs per call"], &rows.collect::<Vec<_>>()))
    }
}

pub(super) fn experiment(record: &RunRecord) -> Markup {
    let experiment = &record.experiment;
    let (rules, limits) = (experiment.rules, experiment.limits);
    let mut rows = vec![
        ["command", &record.command.join(" ")],
        ["workload", &experiment.workload],
        ["deciding metric", &experiment.metric],
        ["requested rounds", &experiment.rounds.to_string()],
        [
            "duration of a run",
            &format!("{} s after {} s of warm-up", experiment.duration_s, experiment.warmup_s),
        ],
        ["seed", &record.seed.to_string()],
        [
            "rules",
            &format!(
                "at least {} rounds, resolution {} %, noise floor {}, at most {} % of the rounds void",
                rules.min_rounds,
                rules.resolution * 100.0,
                if rules.need_noise_floor { "needed" } else { "not needed" },
                rules.max_voided * 100.0
            ),
        ],
        [
            "a run is void",
            &format!(
                "if the generator falls behind by more than {} µs (p99), more than {} % of CPU time is stolen, or other processes use more than {} % \
                 of the subject's cores",
                limits.late_p99_us, limits.steal_percent, limits.foreign_percent
            ),
        ],
    ]
    .into_iter()
    .map(|cells| TableRow::of(&cells))
    .collect::<Vec<_>>();
    for (i, subject) in experiment.subjects.iter().enumerate() {
        let role = if i == 0 { "baseline" } else { "subject" };
        let cpus = subject.cpus.as_ref().map_or_else(String::new, |cpus| format!(" (CPUs {cpus})"));
        rows.push(TableRow::of(&[role, &format!("{}: {}{cpus}", subject.name, subject.command.join(" "))]));
    }
    table(&["", ""], &rows)
}

pub(super) fn environment(record: &RunRecord) -> Markup {
    let environment = &record.environment;
    let memory = format!("{:.1} GiB", environment.memory_bytes as f64 / f64::from(1 << 30));
    let commit = environment.commit.as_deref().unwrap_or("none");
    let changes = if environment.dirty { ", with uncommitted changes" } else { "" };
    let mut rows = vec![
        TableRow::of(&["kernel", &environment.kernel]),
        TableRow::of(&["CPU", &format!("{}, {} cores", environment.cpu_model, environment.cores)]),
        TableRow::of(&["idle CPUs", &environment.idle]),
        TableRow::of(&["memory", &memory]),
        TableRow::of(&["commit", &format!("{commit}{changes}")]),
    ];
    for (interface, features) in &environment.offloads {
        let state = |(name, on): (&String, &bool)| format!("{name} {}", if *on { "on" } else { "off" });
        let list: Vec<String> = features.iter().map(state).collect();
        rows.push(TableRow::of(&[format!("offloads of {interface}"), list.join(", ")]));
    }
    rows.extend(environment.tools.iter().map(|(tool, version)| TableRow::of(&[tool, version])));
    rows.extend(environment.notes.iter().map(|note| TableRow::of(&["note", note])));
    table(&["", ""], &rows)
}

pub(super) fn rounds(record: &RunRecord, rounds: &[Round]) -> Markup {
    let metrics = record.metrics();
    let row = |round: &Round| {
        let mut cells = vec![
            (round.index + 1).to_string(),
            (round.order_in_round + 1).to_string(),
            round.subject.clone(),
        ];
        cells.extend(metrics.iter().map(|name| match round.metrics.get(*name) {
            Some(value) => metric::show(name, *value),
            None if round.not_supported.contains(*name) => "not supported".to_owned(),
            None => dash(),
        }));
        let void = round.voided.iter().map(|void| format!("void: {void}"));
        cells.push(void.chain(round.notes.iter().cloned()).collect::<Vec<_>>().join("; "));
        cells
    };
    html! {
        @if !rounds.is_empty() {
            table {
                tr {
                    th { "round" } th { "place" } th { "subject" }
                    @for metric in &metrics { th { (metric) } }
                    th { "remarks" }
                }
                @for round in rounds {
                    tr class=[round.voided.as_ref().map(|_| "void")] {
                        @for cell in row(round) { td class=[number(&cell)] { (cell) } }
                    }
                }
            }
        }
    }
}

pub(super) fn programs(record: &RunRecord) -> Markup {
    let rows = record.programs.iter().map(|build| {
        let mut row = TableRow::of(&[
            &build.name,
            &build.path,
            build.version.as_deref().unwrap_or("unknown"),
            &build.size.to_string(),
            &build.modified,
        ]);
        let hash = html! { code { (build.sha256.as_deref().unwrap_or("unknown")) } };
        row.cells.push((hash, "hash"));
        row
    });
    let head = ["program", "file", "version", "bytes", "modified", "SHA-256"];
    table(&head, &rows.collect::<Vec<_>>())
}

fn number(cell: &str) -> Option<&'static str> {
    cell.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '±').then_some("n")
}

fn dash() -> String {
    "–".to_owned()
}
