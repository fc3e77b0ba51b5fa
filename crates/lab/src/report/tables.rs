//! The tables of a page. Those with long texts are made of cards where the screen is narrow.

use std::fmt::Write as _;

use super::page::{class, escape};
use crate::metric::{self, Direction};
use crate::record::{Profile, Record, Round, Syscall};
use crate::stats;
use crate::verdict::{Outcome, Verdict};

/// A row of [`cards`].
pub(super) struct Row {
    /// Class of the row; may be empty.
    pub(super) class: &'static str,
    pub(super) cells: Vec<Cell>,
}

/// A cell of [`cards`].
pub(super) struct Cell {
    /// Escaped.
    pub(super) html: String,
    /// Class of the cell; may be empty.
    pub(super) class: &'static str,
}

impl Cell {
    pub(super) fn text(text: &str) -> Self {
        Self { html: escape(text), class: if is_number(text) { "n" } else { "" } }
    }
}

/// A table that falls apart into one card a row on a narrow screen, each cell under its column's name. Empty without rows.
pub(super) fn cards(head: &[&str], rows: &[Row]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut html = "<table class=\"cards\"><thead><tr>".to_owned();
    for cell in head {
        push(&mut html, format_args!("<th>{}</th>", escape(cell)));
    }
    html += "</tr></thead><tbody>\n";
    for row in rows {
        push(&mut html, format_args!("<tr class=\"{}\">", row.class));
        for (cell, name) in row.cells.iter().zip(head) {
            let Cell { html: content, class } = cell;
            push(
                &mut html,
                format_args!("<td class=\"{class}\" data-label=\"{}\">{content}</td>", escape(name)),
            );
        }
        html += "</tr>\n";
    }
    html + "</tbody></table>"
}

/// One row a metric: the verdict stands next to it, where no screen is too narrow for it.
pub(super) fn metrics(record: &Record, judged: &[&Verdict]) -> String {
    let several = record.candidates().count() > 1;
    let rows: Vec<Row> = judged
        .iter()
        .map(|verdict| {
            let median = |subject: &str| {
                stats::median(&record.values(subject, &verdict.metric)).map_or_else(
                    || absent(record, subject, &verdict.metric),
                    |m| metric::show(&verdict.metric, m),
                )
            };
            let about = metric::find(&verdict.metric).map_or("", |metric| metric.about);
            let better = match metric::direction(&verdict.metric) {
                Direction::Higher => "; higher is better",
                Direction::Lower => "; lower is better",
                Direction::Neither => "",
            };
            let subject = if several { format!("{}: ", escape(&verdict.subject)) } else { String::new() };
            let ratio = verdict.estimate.map_or_else(|| "–".to_owned(), |e| format!("{:.3}", e.ratio()));
            let interval = verdict.estimate.filter(|e| e.rounds > 1).map_or_else(
                || "–".to_owned(),
                |e| format!("{:.3} to {:.3}", e.interval().low, e.interval().high),
            );
            let effect = verdict.estimate.map(|e| e.effect_size()).filter(|size| size.is_finite());
            let name = format!(
                "{subject}<strong>{}</strong><br><small>{}{better}</small>",
                escape(&verdict.metric),
                escape(about)
            );
            let mut cells = vec![
                Cell { html: name, class: "" },
                Cell { class: "verdict", ..Cell::text(&in_short(&verdict.outcome)) },
            ];
            let figures = [
                ratio,
                interval,
                median(&verdict.baseline),
                median(&verdict.subject),
                effect.map_or_else(|| "–".to_owned(), |size| format!("{size:.1}")),
                verdict.floor.map_or_else(|| "–".to_owned(), |floor| format!("±{:.1} %", floor.percent())),
            ];
            cells.extend(figures.iter().map(|text| Cell::text(text)));
            Row { class: class(&verdict.outcome), cells }
        })
        .collect();
    let baseline = record.baseline().unwrap_or("baseline");
    let subject = if several { "subject" } else { record.candidates().next().unwrap_or("subject") };
    cards(
        &["metric", "verdict", "ratio", "interval", baseline, subject, "effect / noise", "noise floor"],
        &rows,
    )
}

/// Without the reasons that more rounds would cure: those stand on top, once.
fn in_short(outcome: &Outcome) -> String {
    match outcome {
        Outcome::CannotTell { rounds: Some(rounds), .. } => {
            format!("{}, needs about {rounds} rounds", outcome.word())
        }
        _ => outcome.to_string(),
    }
}

fn absent(record: &Record, subject: &str, metric: &str) -> String {
    let unsupported = record.rounds.iter().any(|r| r.subject == subject && r.not_supported.contains(metric));
    if unsupported { "not supported" } else { "–" }.to_owned()
}

pub(super) fn found(record: &Record) -> String {
    let rows: Vec<Vec<String>> = record
        .sweeps
        .iter()
        .flat_map(|sweep| sweep.found.iter().map(move |found| (sweep, found)))
        .map(|(sweep, found)| {
            let rate = |pps: Option<u64>| pps.map_or_else(|| "–".to_owned(), |pps| pps.to_string());
            vec![
                sweep.subject.clone(),
                format!("{} %", found.max_loss * 100.0),
                rate(found.lower_pps),
                rate(found.upper_pps),
                found.delivered_pps.map_or_else(|| "–".to_owned(), |pps| format!("{pps:.0}")),
                found.because.to_string(),
            ]
        })
        .collect();
    table(&["subject", "loss at most", "keeps it, /s", "does not, /s", "delivered, /s", "because"], &rows)
}

pub(super) fn symbols(profile: &Profile) -> String {
    let rows: Vec<Vec<String>> = profile
        .symbols
        .iter()
        .map(|symbol| {
            let side = if symbol.kernel { "kernel" } else { "user" };
            vec![format!("{:.2} %", symbol.percent), side.to_owned(), symbol.name.clone()]
        })
        .collect();
    format!(
        "<p>{} samples, {:.1} % in the kernel; <a href=\"flame.svg\">flame graph</a>.</p>\n{}",
        profile.samples,
        profile.kernel_percent,
        table(&["samples", "side", "symbol"], &rows)
    )
}

pub(super) fn syscalls(syscalls: &[Syscall]) -> String {
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
    if rows.is_empty() {
        return String::new();
    }
    let note =
        "<p>From a run of its own under a tracer, which slows the subject down; waiting is counted.</p>\n";
    note.to_owned() + &table(&["syscall", "calls", "errors", "seconds", "µs a call"], &rows)
}

pub(super) fn experiment(record: &Record) -> String {
    let experiment = &record.experiment;
    let line = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        line("command", record.command.join(" ")),
        line("workload", experiment.workload.clone()),
        line("deciding metric", experiment.metric.clone()),
        line("rounds wanted", experiment.rounds.to_string()),
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
                "with the generator later than {} µs (p99) or more than {} % of the CPU time stolen",
                experiment.limits.late_p99_us, experiment.limits.steal_percent
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

pub(super) fn environment(record: &Record) -> String {
    let environment = &record.environment;
    let line = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        line("kernel", environment.kernel.clone()),
        line("CPU", format!("{}, {} cores", environment.cpu_model, environment.cores)),
        line("memory", format!("{:.1} GiB", environment.memory_bytes as f64 / f64::from(1 << 30))),
        line(
            "commit",
            match &environment.commit {
                Some(commit) if environment.dirty => format!("{commit}, with changes"),
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

pub(super) fn rounds(record: &Record, rounds: &[Round]) -> String {
    if rounds.is_empty() {
        return String::new();
    }
    let metrics = record.metrics();
    let mut html = "<table><tr><th>round</th><th>place</th><th>subject</th>".to_owned();
    for metric in &metrics {
        push(&mut html, format_args!("<th>{}</th>", escape(metric)));
    }
    html += "<th>remarks</th></tr>\n";
    for round in rounds {
        let class = if round.voided.is_some() { " class=\"void\"" } else { "" };
        push(&mut html, format_args!("<tr{class}>"));
        html += &cell_html(&(round.index + 1).to_string());
        html += &cell_html(&(round.order_in_round + 1).to_string());
        html += &cell_html(&round.subject);
        for &name in &metrics {
            let cell = match round.metrics.get(name) {
                Some(value) => metric::show(name, *value),
                None if round.not_supported.contains(name) => "not supported".to_owned(),
                None => "–".to_owned(),
            };
            html += &cell_html(&cell);
        }
        let void = round.voided.iter().map(|void| format!("void: {void}"));
        let remarks: Vec<String> = void.chain(round.notes.iter().cloned()).collect();
        html += &cell_html(&remarks.join("; "));
        html += "</tr>\n";
    }
    html + "</table>"
}

/// Which builds were measured.
pub(super) fn programs(record: &Record) -> String {
    let rows: Vec<Row> = record
        .programs
        .iter()
        .map(|build| {
            let hash = build.sha256.as_deref().unwrap_or("not known");
            let mut cells: Vec<Cell> = [
                &build.name,
                &build.path,
                build.version.as_deref().unwrap_or("not known"),
                &build.size.to_string(),
                &build.modified,
            ]
            .map(Cell::text)
            .into();
            cells.push(Cell { html: format!("<code>{}</code>", escape(hash)), class: "hash" });
            Row { class: "", cells }
        })
        .collect();
    cards(&["program", "file", "version", "bytes", "modified", "SHA-256"], &rows)
}

/// A table; cells are escaped here. Empty without rows.
pub(super) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut html = "<table><tr>".to_owned();
    for cell in head {
        push(&mut html, format_args!("<th>{}</th>", escape(cell)));
    }
    html += "</tr>\n";
    for row in rows {
        html += "<tr>";
        for cell in row {
            push(&mut html, format_args!("{}", cell_html(cell)));
        }
        html += "</tr>\n";
    }
    html + "</table>"
}

/// A number stands at the right.
fn cell_html(cell: &str) -> String {
    format!("<td{}>{}</td>", if is_number(cell) { " class=\"n\"" } else { "" }, escape(cell))
}

fn is_number(cell: &str) -> bool {
    cell.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '±')
}

fn push(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = text.write_fmt(arguments);
}
