//! Tables of a page. On narrow screens, tables with long text turn into cards.

use maud::{Markup, html};

use crate::metric::{self, Preference};
use crate::record::{CpuProfile, Round, RunRecord, Syscall};
use crate::stats;
use crate::thresholds::{ThresholdOutcome, evaluate};
use crate::verdict::{Conclusion, MetricVerdict};

pub(super) struct TableRow {
    pub(super) class: &'static str,
    pub(super) cells: Vec<Cell>,
}

pub(super) struct Cell {
    pub(super) html: Markup,
    pub(super) class: &'static str,
}

impl TableRow {
    pub(super) fn of(class: &'static str, texts: &[String]) -> Self {
        let mut cells: Vec<Cell> = texts.iter().map(|text| Cell::text(text)).collect();
        cells[1].class = "verdict";
        Self { class, cells }
    }
}

impl Cell {
    pub(super) fn text(text: &str) -> Self {
        Self { html: html! { (text) }, class: number(text).unwrap_or_default() }
    }
}

/// Table that turns into one card per row on a narrow screen.
pub(super) fn cards(head: &[&str], rows: &[TableRow]) -> Markup {
    html! {
        @if !rows.is_empty() {
            table.cards {
                thead { tr { @for cell in head { th { (cell) } } } }
                tbody {
                    @for row in rows {
                        tr class=(row.class) {
                            @for (cell, name) in row.cells.iter().zip(head) {
                                td class=(cell.class) data-label=(name) { (cell.html) }
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
    cards(
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
    let ratio = verdict.estimate.map_or_else(dash, |e| format!("{:.3}", e.ratio()));
    let interval = verdict
        .estimate
        .filter(|e| e.rounds > 1)
        .map_or_else(dash, |e| format!("{:.3} to {:.3}", e.interval().low, e.interval().high));
    let effect = verdict.estimate.map(|e| e.effect_size()).filter(|size| size.is_finite());
    let figures = [
        ratio,
        interval,
        median(&verdict.baseline),
        median(&verdict.subject),
        effect.map_or_else(dash, |size| format!("{size:.1}")),
        verdict.floor.map_or_else(dash, |floor| format!("±{:.1} %", floor.percent())),
    ];
    let mut cells = vec![
        Cell { html: title, class: "" },
        Cell { class: "verdict", ..Cell::text(&in_short(&verdict.outcome)) },
    ];
    cells.extend(figures.iter().map(|text| Cell::text(text)));
    TableRow { class: class(&verdict.outcome), cells }
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
            let figure = held.figure_in_words().unwrap_or_else(dash);
            let whom = held.against.clone().unwrap_or_else(|| format!("of {}", held.subject));
            let texts = [
                held.threshold.metric.clone(),
                held.outcome.to_string(),
                figure,
                format!("{} {} {whom}", held.kind, held.threshold),
            ];
            TableRow::of(class, &texts)
        })
        .collect();
    cards(&["metric", "verdict", "figure", "threshold"], &rows)
}

pub(super) fn found(record: &RunRecord) -> Markup {
    let rows: Vec<Vec<String>> = record
        .sweeps
        .iter()
        .flat_map(|sweep| sweep.found.iter().map(move |found| (sweep, found)))
        .map(|(sweep, found)| {
            let rate = |pps: Option<u64>| pps.map_or_else(dash, |pps| pps.to_string());
            vec![
                sweep.subject.clone(),
                format!("{} %", found.max_loss * 100.0),
                rate(found.lower_pps),
                rate(found.upper_pps),
                found.delivered_pps.map_or_else(dash, |pps| format!("{pps:.0}")),
                found.because.to_string(),
            ]
        })
        .collect();
    table(
        &["subject", "loss at most", "met at, /s", "missed at, /s", "delivered, /s", "end of search"],
        &rows,
    )
}

pub(super) fn symbols(profile: &CpuProfile) -> Markup {
    let rows: Vec<Vec<String>> = profile
        .symbols
        .iter()
        .map(|symbol| {
            let side = if symbol.kernel { "kernel" } else { "user" };
            vec![format!("{:.2} %", symbol.percent), side.to_owned(), symbol.name.clone()]
        })
        .collect();
    html! {
        p {
            (profile.samples) " samples, " (format!("{:.1}", profile.kernel_percent)) " % in the kernel; "
            a href="flame.svg" { "flame graph" } "."
        }
        (table(&["samples", "side", "symbol"], &rows))
    }
}

pub(super) fn syscalls(syscalls: &[Syscall]) -> Markup {
    let rows: Vec<Vec<String>> = syscalls
        .iter()
        .map(|row| {
            vec![
                row.name.clone(),
                row.calls.to_string(),
                row.errors.to_string(),
                format!("{:.6}", row.seconds),
                format!("{:.2}", row.us_per_call()),
            ]
        })
        .collect();
    html! {
        @if !rows.is_empty() {
            p { "From a separate run under a tracer, which slows the subject down; waiting time is included." }
            (table(&["syscall", "calls", "errors", "seconds", "µs per call"], &rows))
        }
    }
}

pub(super) fn experiment(record: &RunRecord) -> Markup {
    let experiment = &record.experiment;
    let line = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        line("command", record.command.join(" ")),
        line("workload", experiment.workload.clone()),
        line("deciding metric", experiment.metric.clone()),
        line("requested rounds", experiment.rounds.to_string()),
        line(
            "duration of a run",
            format!("{} s after {} s of warm-up", experiment.duration_s, experiment.warmup_s),
        ),
        line("seed", record.seed.to_string()),
        line(
            "rules",
            format!(
                "at least {} rounds, resolution {} %, noise floor {}, at most {} % of the rounds void",
                experiment.rules.min_rounds,
                experiment.rules.resolution * 100.0,
                if experiment.rules.need_noise_floor { "needed" } else { "not needed" },
                experiment.rules.max_voided * 100.0
            ),
        ),
        line(
            "a run is void",
            format!(
                "if the generator falls behind by more than {} µs (p99), more than {} % of CPU time is stolen, or other processes use more than {} % \
                 of the subject's cores",
                experiment.limits.late_p99_us,
                experiment.limits.steal_percent,
                experiment.limits.foreign_percent
            ),
        ),
    ];
    for (i, subject) in experiment.subjects.iter().enumerate() {
        let role = if i == 0 { "baseline" } else { "subject" };
        let cpus = subject.cpus.as_ref().map_or_else(String::new, |cpus| format!(" (CPUs {cpus})"));
        rows.push(line(role, format!("{}: {}{cpus}", subject.name, subject.command.join(" "))));
    }
    table(&["", ""], &rows)
}

pub(super) fn environment(record: &RunRecord) -> Markup {
    let environment = &record.environment;
    let line = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        line("kernel", environment.kernel.clone()),
        line("CPU", format!("{}, {} cores", environment.cpu_model, environment.cores)),
        line("idle CPUs", environment.idle.clone()),
        line("memory", format!("{:.1} GiB", environment.memory_bytes as f64 / f64::from(1 << 30))),
        line(
            "commit",
            match &environment.commit {
                Some(commit) if environment.dirty => format!("{commit}, with uncommitted changes"),
                Some(commit) => commit.clone(),
                None => "none".to_owned(),
            },
        ),
    ];
    for (interface, features) in &environment.offloads {
        let list: Vec<String> =
            features.iter().map(|(name, on)| format!("{name} {}", if *on { "on" } else { "off" })).collect();
        rows.push(line(&format!("offloads of {interface}"), list.join(", ")));
    }
    rows.extend(environment.tools.iter().map(|(tool, version)| line(tool, version.clone())));
    rows.extend(environment.notes.iter().map(|note| line("note", note.clone())));
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
                    tr class=[round.voided.as_ref().map(|_| "void")] { (cells(&row(round))) }
                }
            }
        }
    }
}

pub(super) fn programs(record: &RunRecord) -> Markup {
    let rows: Vec<TableRow> = record
        .programs
        .iter()
        .map(|build| {
            let mut cells: Vec<Cell> = [
                &build.name,
                &build.path,
                build.version.as_deref().unwrap_or("unknown"),
                &build.size.to_string(),
                &build.modified,
            ]
            .map(Cell::text)
            .into();
            let hash = html! { code { (build.sha256.as_deref().unwrap_or("unknown")) } };
            cells.push(Cell { html: hash, class: "hash" });
            TableRow { class: "", cells }
        })
        .collect();
    cards(&["program", "file", "version", "bytes", "modified", "SHA-256"], &rows)
}

pub(super) fn table(head: &[&str], rows: &[Vec<String>]) -> Markup {
    html! {
        @if !rows.is_empty() {
            table {
                tr { @for cell in head { th { (cell) } } }
                @for row in rows { tr { (cells(row)) } }
            }
        }
    }
}

fn cells(row: &[String]) -> Markup {
    html! { @for cell in row { td class=[number(cell)] { (cell) } } }
}

fn number(cell: &str) -> Option<&'static str> {
    cell.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '±').then_some("n")
}

fn dash() -> String {
    "–".to_owned()
}
