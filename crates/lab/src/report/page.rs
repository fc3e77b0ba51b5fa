//! HTML page for one record: first the verdict, then its basis, then details.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::plots::{self, Curve, Ratio};
use super::{other_verdicts, tables, verdicts};
use crate::advice::advice;
use crate::metric::{self, Preference};
use crate::record::RunRecord;
use crate::verdict::MetricVerdict;

const STYLE: &str = include_str!("style.css");

const RATIOS: &str = "Median of the paired ratios, as a number and a dot, with its interval; the grey band is the difference \
between two runs of the baseline. ↑: higher is better, ↓: lower is better. Green is significantly better, orange significantly worse, \
grey inconclusive. The scale is logarithmic.";

pub(crate) fn page(record: &RunRecord) -> String {
    let experiment = &record.experiment;
    let deciding = verdicts(record);
    let body = html! {
        h1 { (experiment.name) }
        p { (record.started) " · " (record.id) }
        @if record.interrupted {
            p { strong { "Interrupted" } ": the figures cover the rounds completed by then." }
        }
        @for verdict in &deciding {
            p class={ "verdict " (tables::class(&verdict.outcome)) } { (verdict.to_string()) }
        }
        @for advice in advice(record, &deciding) {
            div.advice {
                p { (advice.what) }
                ul { @for text in &advice.tries { li { (text) } } }
            }
        }
        @if deciding.is_empty() && record.sweeps.is_empty() {
            p.verdict { "Only one subject: nothing to compare." }
        }
        (section("Thresholds", &tables::thresholds(record)))
        (figures(record, deciding))
        @for (subject, profile) in &record.profiles {
            (section(&format!("Hottest symbols of {subject}"), &tables::symbols(profile)))
        }
        @for (subject, syscalls) in &record.syscalls {
            (section(&format!("Syscalls of {subject}"), &tables::syscalls(syscalls)))
        }
        (section("Experiment", &tables::experiment(record)))
        (section("Programs", &tables::programs(record)))
        (section("Environment", &tables::environment(record)))
        (folded("Raw rounds", &tables::rounds(record, &record.rounds)))
        (folded("Raw rounds of the baseline compared with itself", &tables::rounds(record, &record.aa)))
    };
    document(&experiment.name, &body)
}

fn figures(record: &RunRecord, deciding: Vec<MetricVerdict>) -> Markup {
    let metric = &record.experiment.metric;
    let judged: Vec<MetricVerdict> = record
        .candidates()
        .zip(deciding)
        .flat_map(|(subject, first)| std::iter::once(first).chain(other_verdicts(record, subject)))
        .collect();
    let is_telling = |verdict: &&MetricVerdict| {
        metric::direction(&verdict.metric) != Preference::Neither || verdict.metric == *metric
    };
    let (telling, counters): (Vec<&MetricVerdict>, Vec<&MetricVerdict>) = judged.iter().partition(is_telling);
    let ratios = plots::ratios(&ratio_rows(record, &telling));
    let rounds = plots::rounds(record, metric);
    let curve = |curve| PreEscaped(plots::sweeps(record, curve));
    html! {
        @if !ratios.is_empty() {
            (section("Ratios", &html! { p { (RATIOS) } (PreEscaped(ratios)) }))
        }
        (section("Metrics", &tables::metrics(record, &telling)))
        (folded("Counters", &tables::metrics(record, &counters)))
        @if !rounds.is_empty() {
            (section(
                &format!("Rounds: {metric}"),
                &html! { (plots::rounds_legend(record, metric)) (PreEscaped(rounds)) },
            ))
        }
        (section("Highest rates", &tables::found(record)))
        (section("Delivered vs. offered rate", &curve(Curve::Delivered)))
        (section("Loss vs. offered rate", &curve(Curve::Loss)))
        (section("p99 latency vs. offered rate", &curve(Curve::LatencyP99)))
    }
}

fn document(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                title { (title) }
                meta name="viewport" content="width=device-width";
                style { (PreEscaped(STYLE)) }
            }
            body { (body) }
        }
    };
    page.into_string()
}

fn section(title: &str, content: &Markup) -> Markup {
    html! {
        @if !content.0.is_empty() {
            h2 { (title) }
            div.wide { (content) }
        }
    }
}

fn folded(title: &str, content: &Markup) -> Markup {
    html! {
        @if !content.0.is_empty() {
            details {
                summary { (title) }
                div.wide { (content) }
            }
        }
    }
}

fn ratio_rows(record: &RunRecord, judged: &[&MetricVerdict]) -> Vec<Ratio> {
    let several = record.candidates().count() > 1;
    judged
        .iter()
        .filter_map(|verdict| {
            let subject = if several { format!("{}: ", verdict.subject) } else { String::new() };
            let better = match metric::direction(&verdict.metric) {
                Preference::Higher => " ↑",
                Preference::Lower => " ↓",
                Preference::Neither => "",
            };
            Ratio::of(format!("{subject}{}{better}", verdict.metric), verdict)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invalid_rounds::VoidReason;
    use crate::record::tests::record;
    use crate::record::{CpuProfile, LatencySummary, Sweep, SweepPoint, Symbol, Syscall};
    use crate::search::{FoundRate, SearchEnd};

    fn full() -> RunRecord {
        let mut record = record("packets_per_cpu_s", &[(100.0, 101.0, 152.0); 8]);
        for (i, round) in record.rounds.iter_mut().enumerate() {
            round
                .metrics
                .insert("cpu_us_per_packet".to_owned(), if round.subject == "old" { 3.0 } else { 2.0 });
            round.metrics.insert("loss_percent".to_owned(), 0.0);
            round.not_supported.insert("cycles".to_owned());
            let p50 = 40.0 + i as f64;
            round.latency =
                Some(LatencySummary { min: 9.0, p50, p90: 60.0, p99: 90.0, p999: 200.0, max: 900.0 });
        }
        let point = |offered: f64, delivered: f64| SweepPoint {
            rate_pps: 0,
            offered_pps: offered,
            delivered_pps: delivered,
            loss_percent: (1.0 - delivered / offered) * 100.0,
            duration_s: 5.0,
            latency: Some(LatencySummary { p99: offered / 1000.0, ..LatencySummary::default() }),
        };
        let found = FoundRate {
            max_loss: 0.005,
            lower_pps: Some(241_700),
            upper_pps: Some(243_000),
            delivered_pps: Some(241_000.0),
            because: SearchEnd::Narrow,
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
        record.profiles.insert(
            "new".to_owned(),
            CpuProfile { samples: 4321, kernel_percent: 80.0, symbols: vec![symbol] },
        );
        record
    }

    #[test]
    fn the_page_shows_syscalls_and_hot_symbols() {
        let html = page(&full());
        for text in [
            "Syscalls of new",
            "data-label=\"syscall\">sendmmsg</td>",
            "data-label=\"µs per call\">500.00</td>",
            "4321 samples, 80.0 % in the kernel",
            ">kernel</td>",
            ">udp_sendmsg&lt;T&gt;</td>",
        ] {
            assert!(html.contains(text), "{text} is missing");
        }
    }

    fn plots(html: &str) -> usize {
        html.matches("<svg").count()
    }

    #[test]
    fn the_verdict_comes_first() {
        let html = page(&full());
        let verdict = html.find("new against old: faster").expect("the verdict");
        for later in ["<svg", "<table", "Environment", "Raw rounds"] {
            assert!(html.find(later).expect(later) > verdict, "{later} comes before the verdict");
        }
    }

    #[test]
    fn all_plots_and_tables_are_present() {
        let html = page(&full());
        assert_eq!(plots(&html), 5);
        assert_eq!(html.matches("</svg>").count(), 5);
        for text in ["241700", "narrow enough", "6.12.1", "Test CPU", "gso on", "0123456789abcdef", "42"] {
            assert!(html.contains(text), "{text} is missing");
        }
        assert_eq!(html.matches("<td class=\"n\">7</td>").count(), 3);
    }

    #[test]
    fn the_page_loads_no_external_resources() {
        let html = page(&full()).replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        for foreign in ["http:", "https:", "<script", "<link", "src=", "@import", "url("] {
            assert!(!html.contains(foreign), "the page contains {foreign}");
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
        assert!(html.contains("&lt;b&gt;&amp;&quot;new'"));
    }

    #[test]
    fn void_and_unsupported_runs_are_marked() {
        let mut record = full();
        record.rounds[1].voided = Some(VoidReason::SubjectFailed { how: "ended by signal 11".to_owned() });
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
    fn a_record_without_rounds_gives_a_page_without_plots() {
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
    fn metric_rows_have_a_verdict_and_labelled_cells() {
        let html = page(&full());
        let row = html
            .split("<tr")
            .find(|row| row.contains("<strong>cpu_us_per_packet</strong>"))
            .expect("the metric has a row");
        let labels: Vec<&str> =
            row.split("data-label=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert_eq!(
            labels,
            ["metric", "verdict", "ratio", "interval", "old", "new", "effect / noise", "noise floor"]
        );
        assert!(row.starts_with(" class=\"\">") && row.contains("lower is better"), "{row}");
        assert!(row.contains("data-label=\"ratio\">0.667<"), "{row}");
        assert!(row.contains("<td class=\"verdict\" data-label=\"verdict\">cannot tell"), "{row}");
        let deciding = html
            .split("<tr")
            .find(|row| row.contains("<strong>packets_per_cpu_s</strong>"))
            .expect("the deciding metric has a row");
        assert!(deciding.starts_with(" class=\"faster\">"), "{deciding}");
        assert!(deciding.contains("<td class=\"verdict\" data-label=\"verdict\">faster</td>"), "{deciding}");
        // The table header also contains these words, but narrow screens hide it.
        assert!(html.contains("<thead><tr><th>metric</th><th>verdict</th>"));
    }

    #[test]
    fn hollow_dots_are_explained_in_the_legend() {
        let mut record = full();
        assert!(!page(&record).contains("○"));
        record.rounds[1].voided = Some(VoidReason::CpuStolen { percent: 3.0, limit_percent: 1.0 });
        let html = page(&record);
        assert!(html.contains("○</i> void, not counted"), "no legend");
        assert!(html.contains("</i> old</span>") && html.contains("</i> new</span>"));
    }

    #[test]
    fn the_page_has_advice_on_void_runs() {
        let mut record = full();
        assert!(!page(&record).contains("class=\"advice\""));
        for round in &mut record.rounds {
            round.voided = Some(VoidReason::GeneratorLate { p99_us: 4_000.0, limit_us: 1_000.0 });
        }
        let html = page(&record);
        assert!(html.contains("class=\"advice\"") && html.contains("--max-late-us 5000"), "{html}");
    }

    #[test]
    fn the_page_shows_thresholds_with_their_outcome() {
        let mut record = full();
        assert!(!page(&record).contains("<h2>Thresholds</h2>"));
        let threshold = |limit| crate::record::Threshold {
            metric: "packets_per_cpu_s".to_owned(),
            at_least: Some(limit),
            ..crate::record::Threshold::default()
        };
        (record.experiment.must, record.experiment.aim) = (vec![threshold(1.2)], vec![threshold(2.0)]);
        let html = page(&record);
        for text in [">met<", ">missed<", "must ≥ 1.2 × old", "aim ≥ 2 × old"] {
            assert!(html.contains(text), "{text} is missing");
        }
    }

    #[test]
    fn the_page_lists_the_measured_builds() {
        let mut record = full();
        assert!(!page(&record).contains("SHA-256"));
        record.programs.push(crate::record::BuildFile {
            name: "new".to_owned(),
            path: "/opt/<new>".to_owned(),
            sha256: Some("0f".repeat(32)),
            ..crate::record::BuildFile::default()
        });
        let html = page(&record);
        assert!(html.contains(&"0f".repeat(32)) && html.contains("/opt/&lt;new&gt;"));
    }

    #[test]
    fn the_report_is_written_next_to_the_record() {
        let dir = turnpike_testkit::Dir::new();
        let record = full();
        record.save(dir.path()).unwrap();
        crate::report::save(dir.path(), &record).unwrap();
        assert_eq!(std::fs::read_to_string(dir.at("report.html")).unwrap(), page(&record));
        assert!(dir.at("record.json").exists());
    }
}
