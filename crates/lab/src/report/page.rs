//! The page of one record: the verdict on top, then what it rests on, then everything else.

use std::fmt::Write as _;

use super::plots::{self, Curve, Ratio};
use super::{other_verdicts, verdicts};
use crate::metric::{self, Direction};
use crate::record::{Profile, Record, Round, Syscall};
use crate::stats;
use crate::verdict::{Outcome, Verdict};

const STYLE: &str = "
body { font: 15px/1.45 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; margin: .5rem 0 } th, td { border: 1px solid #ccc; padding: .15rem .5rem; text-align: left }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums } tr.void { color: #999 }
p.verdict { font-size: 1.1rem; padding: .6rem .9rem; border-left: .4rem solid #999; background: #f5f5f5 }
p.faster { border-color: #009e73 } p.slower { border-color: #d55e00 } p.none { border-color: #0072b2 }
div.wide { overflow-x: auto } svg { max-width: 100%; height: auto } details { margin-top: 1rem } summary { font-size: 1.15rem; font-weight: bold; cursor: pointer } code { overflow-wrap: anywhere }";

/// How to read the plot of ratios.
const RATIOS: &str = "<p>Median of the paired ratios with its interval; the grey band is what the baseline differs from \
itself. ↑: higher is better, ↓: lower is better. Green is shown to be better, orange to be worse, grey is not shown.</p>";

/// The whole report of a record, as HTML.
#[must_use]
pub fn page(record: &Record) -> String {
    let mut body = String::new();
    let experiment = &record.experiment;
    push(&mut body, format_args!("<h1>{}</h1>\n", escape(&experiment.name)));
    push(&mut body, format_args!("<p>{} · {}</p>\n", escape(&record.started), escape(&record.id)));
    if record.interrupted {
        body += "<p><strong>Interrupted</strong>: the figures rest on the rounds done until then.</p>\n";
    }

    let deciding = verdicts(record);
    for verdict in &deciding {
        let class = class(&verdict.outcome);
        push(&mut body, format_args!("<p class=\"verdict {class}\">{}</p>\n", escape(&verdict.to_string())));
    }
    if deciding.is_empty() && record.sweeps.is_empty() {
        body += "<p class=\"verdict\">Only one subject: nothing to compare.</p>\n";
    }

    let judged: Vec<Verdict> = record
        .candidates()
        .zip(deciding)
        .flat_map(|(subject, first)| std::iter::once(first).chain(other_verdicts(record, subject)))
        .collect();
    let is_telling = |verdict: &&Verdict| {
        metric::direction(&verdict.metric) != Direction::Neither || verdict.metric == experiment.metric
    };
    let (telling, counters): (Vec<&Verdict>, Vec<&Verdict>) = judged.iter().partition(is_telling);
    let ratios = plots::ratios(&ratio_rows(record, &telling));
    if !ratios.is_empty() {
        section(&mut body, "Ratios", &format!("{RATIOS}\n{ratios}"));
    }
    section(&mut body, "Metrics", &metrics_table(record, &telling));
    folded(&mut body, "Counters", &metrics_table(record, &counters));
    let title = format!("Rounds: {}", experiment.metric);
    section(&mut body, &title, &plots::rounds(record, &experiment.metric));
    section(&mut body, "Latency", &plots::latency(record));
    section(&mut body, "Highest rates", &found_table(record));
    section(&mut body, "Delivered over offered", &plots::sweeps(record, Curve::Delivered));
    section(&mut body, "Loss over offered", &plots::sweeps(record, Curve::Loss));
    section(&mut body, "Latency p99 over offered", &plots::sweeps(record, Curve::LatencyP99));
    for (subject, profile) in &record.profiles {
        section(&mut body, &format!("Hottest symbols of {subject}"), &symbols_table(profile));
    }
    for (subject, syscalls) in &record.syscalls {
        section(&mut body, &format!("Syscalls of {subject}"), &syscalls_table(syscalls));
    }
    section(&mut body, "Experiment", &experiment_table(record));
    section(&mut body, "Environment", &environment_table(record));
    folded(&mut body, "Raw rounds", &rounds_table(record, &record.rounds));
    folded(&mut body, "Raw rounds of the baseline against itself", &rounds_table(record, &record.aa));
    document(&experiment.name, &body)
}

/// A page around a body.
pub(super) fn document(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )
}

/// A heading and what stands under it; nothing when that is nothing.
pub(super) fn section(body: &mut String, title: &str, content: &str) {
    if !content.is_empty() {
        push(body, format_args!("<h2>{}</h2>\n<div class=\"wide\">{content}</div>\n", escape(title)));
    }
}

/// The same, shown only when asked for.
fn folded(body: &mut String, title: &str, content: &str) {
    if !content.is_empty() {
        push(
            body,
            format_args!(
                "<details><summary>{}</summary>\n<div class=\"wide\">{content}</div></details>\n",
                escape(title)
            ),
        );
    }
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
    let numeric = cell.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '±');
    format!("<td{}>{}</td>", if numeric { " class=\"n\"" } else { "" }, escape(cell))
}

/// What a browser must not take for markup.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\'', "&#39;")
}

fn push(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = text.write_fmt(arguments);
}

pub(super) fn class(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Faster => "faster",
        Outcome::Slower => "slower",
        Outcome::NoDifference => "none",
        _ => "",
    }
}

fn ratio_rows(record: &Record, judged: &[&Verdict]) -> Vec<Ratio> {
    let several = record.candidates().count() > 1;
    judged
        .iter()
        .filter_map(|verdict| {
            let subject = if several { format!("{}: ", verdict.subject) } else { String::new() };
            let better = match metric::direction(&verdict.metric) {
                Direction::Higher => " ↑",
                Direction::Lower => " ↓",
                Direction::Neither => "",
            };
            Ratio::of(format!("{subject}{}{better}", verdict.metric), verdict)
        })
        .collect()
}

fn metrics_table(record: &Record, judged: &[&Verdict]) -> String {
    let rows: Vec<Vec<String>> = judged
        .iter()
        .map(|verdict| {
            let median = |subject: &str| {
                stats::median(&record.values(subject, &verdict.metric)).map_or_else(
                    || absent(record, subject, &verdict.metric),
                    |m| metric::show(&verdict.metric, m),
                )
            };
            let (ratio, interval) = verdict.estimate.map_or_else(
                || ("–".to_owned(), "–".to_owned()),
                |e| {
                    (
                        format!("{:.3}", e.ratio()),
                        format!("{:.3} to {:.3}", e.interval().low, e.interval().high),
                    )
                },
            );
            let effect = verdict.estimate.map(|e| e.effect_size()).filter(|size| size.is_finite());
            vec![
                verdict.metric.clone(),
                metric::find(&verdict.metric).map_or("", |metric| metric.about).to_owned(),
                match metric::direction(&verdict.metric) {
                    Direction::Higher => "higher",
                    Direction::Lower => "lower",
                    Direction::Neither => "–",
                }
                .to_owned(),
                median(&verdict.baseline),
                verdict.subject.clone(),
                median(&verdict.subject),
                ratio,
                interval,
                effect.map_or_else(|| "–".to_owned(), |size| format!("{size:.1}")),
                verdict.floor.map_or_else(|| "–".to_owned(), |floor| format!("±{:.1} %", floor.percent())),
                in_short(&verdict.outcome),
            ]
        })
        .collect();
    let baseline = record.baseline().unwrap_or("baseline");
    let head = [
        "metric",
        "what",
        "better",
        baseline,
        "subject",
        "its median",
        "ratio",
        "interval",
        "effect / noise",
        "noise floor",
        "verdict",
    ];
    table(&head, &rows)
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

fn found_table(record: &Record) -> String {
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

fn symbols_table(profile: &Profile) -> String {
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

fn syscalls_table(syscalls: &[Syscall]) -> String {
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

fn experiment_table(record: &Record) -> String {
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

fn environment_table(record: &Record) -> String {
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

fn rounds_table(record: &Record, rounds: &[Round]) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::{Dir, record};
    use crate::record::{Latency, Sweep, SweepPoint, Symbol};
    use crate::search::{Because, Found};
    use crate::void::Void;

    fn full() -> Record {
        let mut record = record("packets_per_cpu_s", &[(100.0, 101.0, 152.0); 8]);
        for (i, round) in record.rounds.iter_mut().enumerate() {
            round
                .metrics
                .insert("cpu_us_per_packet".to_owned(), if round.subject == "old" { 3.0 } else { 2.0 });
            round.metrics.insert("loss_percent".to_owned(), 0.0);
            round.not_supported.insert("cycles".to_owned());
            let p50 = 40.0 + i as f64;
            round.latency = Some(Latency {
                min: 9.0,
                p50,
                p90: 60.0,
                p99: 90.0,
                p999: 200.0,
                max: 900.0,
                histogram: Vec::new(),
            });
        }
        let point = |offered: f64, delivered: f64| SweepPoint {
            offered_pps: offered,
            delivered_pps: delivered,
            loss_percent: (1.0 - delivered / offered) * 100.0,
            duration_s: 5.0,
            latency: Some(Latency { p99: offered / 1000.0, ..Latency::default() }),
        };
        let found = Found {
            max_loss: 0.005,
            lower_pps: Some(241_700),
            upper_pps: Some(243_000),
            delivered_pps: Some(241_000.0),
            because: Because::Narrow,
        };
        for subject in ["old", "new"] {
            record.sweeps.push(Sweep {
                subject: subject.to_owned(),
                round: None,
                points: vec![point(1e5, 1e5), point(3e5, 2.4e5), point(2e5, 2e5)],
                found: vec![found.clone()],
            });
        }
        record.syscalls.insert(
            "new".to_owned(),
            vec![Syscall { name: "sendmmsg".to_owned(), calls: 1234, errors: 9, seconds: 0.617 }],
        );
        let symbol = Symbol { name: "udp_sendmsg<T>".to_owned(), kernel: true, percent: 12.5 };
        record
            .profiles
            .insert("new".to_owned(), Profile { samples: 4321, kernel_percent: 80.0, symbols: vec![symbol] });
        record
    }

    #[test]
    fn syscalls_and_hot_symbols_stand_in_the_page() {
        let html = page(&full());
        for text in [
            "Syscalls of new",
            "<td>sendmmsg</td><td class=\"n\">1234</td><td class=\"n\">9</td>",
            "<td class=\"n\">500.00</td>",
            "4321 samples, 80.0 % in the kernel",
            "<td>kernel</td><td>udp_sendmsg&lt;T&gt;</td>",
        ] {
            assert!(html.contains(text), "{text} is missing");
        }
    }

    fn plots(html: &str) -> usize {
        html.matches("<svg").count()
    }

    #[test]
    fn the_verdict_stands_before_everything_else() {
        let html = page(&full());
        let verdict = html.find("new against old: faster").expect("the verdict");
        for later in ["<svg", "<table", "Environment", "Raw rounds"] {
            assert!(html.find(later).expect(later) > verdict, "{later} stands before the verdict");
        }
    }

    #[test]
    fn all_six_plots_and_all_tables_are_there() {
        let html = page(&full());
        assert_eq!(plots(&html), 6);
        assert_eq!(html.matches("</svg>").count(), 6);
        for text in [
            "241700",
            "as narrow as wanted",
            "6.12.1",
            "Test CPU",
            "gso on",
            "0123456789abcdef",
            "p99.9",
            "42",
        ] {
            assert!(html.contains(text), "{text} is missing");
        }
        // Round 7: both subjects, and the baseline against itself.
        assert_eq!(html.matches("<td class=\"n\">7</td>").count(), 3);
    }

    #[test]
    fn nothing_is_loaded_from_elsewhere() {
        let html = page(&full()).replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        for foreign in ["http:", "https:", "<script", "<link", "src=", "@import", "url("] {
            assert!(!html.contains(foreign), "{foreign} in the page");
        }
    }

    #[test]
    fn markup_in_names_stays_text() {
        let mut record = full();
        record.experiment.subjects[1].name = "<b>&\"new'".to_owned();
        for round in record.rounds.iter_mut().filter(|round| round.subject == "new") {
            round.subject = "<b>&\"new'".to_owned();
        }
        record.experiment.workload = "</table><script>alert(1)</script>".to_owned();
        let html = page(&record);
        assert!(!html.contains("<b>") && !html.contains("<script"));
        assert!(html.contains("&lt;b&gt;&amp;&quot;new&#39;"));
    }

    #[test]
    fn void_and_unsupported_runs_are_shown_as_such() {
        let mut record = full();
        record.rounds[1].voided = Some(Void::SubjectFailed { how: "ended by signal 11".to_owned() });
        record.rounds[3].metrics.remove("loss_percent");
        record.rounds[3].not_supported.insert("loss_percent".to_owned());
        record.interrupted = true;
        let html = page(&record);
        assert!(html.contains("void: the subject failed: ended by signal 11"));
        assert!(html.contains("<td>not supported</td>"));
        assert!(html.contains("cannot tell: new failed in 1 run"));
        assert!(html.contains("Interrupted"));
    }

    #[test]
    fn a_record_without_rounds_makes_a_page_without_plots() {
        let html = page(&record("packets_per_cpu_s", &[]));
        assert_eq!(plots(&html), 0);
        assert!(html.contains("cannot tell"));
    }

    #[test]
    fn constant_zero_and_single_values_can_be_plotted() {
        for values in [vec![(0.0, 0.0, 0.0); 3], vec![(5.0, 5.0, 5.0)]] {
            assert!(plots(&page(&record("loss_percent", &values))) >= 1);
        }
    }

    #[test]
    fn the_report_stands_beside_the_record() {
        let dir = Dir::new("report");
        let record = full();
        record.save(&dir.0).unwrap();
        crate::report::save(&dir.0, &record).unwrap();
        assert_eq!(std::fs::read_to_string(dir.0.join("report.html")).unwrap(), page(&record));
        assert!(dir.0.join("record.json").exists());
    }
}
