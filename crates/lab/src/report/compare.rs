//! Several records side by side, and whether they may be compared at all.
//!
//! Ratios to a baseline measured in the same run travel between days; absolute figures do so only on the same machine,
//! kernel and question. So the ratios stand first, and what forbids the comparison stands above them.

use std::fmt;

use maud::{PreEscaped, html};

use super::page::{class, document, section};
use super::plots::{self, Ratio};
use super::tables::{Cell, Row, cards, table};
use super::verdicts;
use crate::comparable::{Difference, comparable};
use crate::metric;
use crate::record::Record;
use crate::stats;
use crate::verdict::MetricVerdict;

/// Several records, the first of which the others are held against.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// One for each record.
    pub entries: Vec<Entry>,
}

/// One record in a comparison.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The record's id.
    pub id: String,
    /// When it began.
    pub started: String,
    /// Its commit, a `+` behind it for a changed tree.
    pub commit: String,
    /// In what it differs from the first record.
    pub differences: Vec<Difference>,
    /// Its deciding verdicts.
    pub verdicts: Vec<MetricVerdict>,
    /// Median of the baseline in the deciding metric: what the machine gave on that day.
    pub baseline: Option<f64>,
    metric: String,
}

/// Holds all records against the first.
pub fn compare(records: &[Record]) -> Comparison {
    let entry = |record: &Record| {
        let metric = record.experiment.metric.clone();
        let commit = record.environment.commit.as_deref().unwrap_or("–").chars().take(9).collect::<String>();
        Entry {
            id: record.id.clone(),
            started: record.started.clone(),
            commit: if record.environment.dirty { commit + "+" } else { commit },
            differences: comparable(&records[0], record),
            verdicts: verdicts(record),
            baseline: record.baseline().and_then(|name| stats::median(&record.values(name, &metric))),
            metric,
        }
    };
    Comparison { entries: records.iter().map(entry).collect() }
}

impl Entry {
    /// Whether its figures may be held against those of the first record.
    pub fn is_comparable(&self) -> bool {
        !self.differences.iter().any(|difference| difference.forbids)
    }

    fn baseline_text(&self) -> String {
        self.baseline.map_or_else(|| "–".to_owned(), |value| metric::show(&self.metric, value))
    }
}

impl Comparison {
    /// Whether all records may be compared.
    pub fn is_comparable(&self) -> bool {
        self.entries.iter().all(Entry::is_comparable)
    }

    /// As HTML.
    pub fn page(&self) -> String {
        let answer = if self.is_comparable() { "comparable" } else { "not comparable" };
        let differences: Vec<Vec<String>> = self
            .entries
            .iter()
            .flat_map(|entry| entry.differences.iter().map(move |difference| (entry, difference)))
            .map(|(entry, d)| {
                let weight = if d.forbids { "forbids the comparison" } else { "to know" };
                vec![entry.id.clone(), d.what.clone(), d.first.clone(), d.second.clone(), weight.to_owned()]
            })
            .collect();
        let of_each = || {
            self.entries.iter().flat_map(|entry| entry.verdicts.iter().map(move |verdict| (entry, verdict)))
        };
        let ratios: Vec<Ratio> = of_each()
            .filter_map(|(entry, verdict)| {
                let mark = if entry.is_comparable() { "" } else { " (not comparable)" };
                Ratio::of(format!("{} {}{mark}", entry.date(), verdict.subject), verdict)
            })
            .collect();
        let rows: Vec<Row> = of_each().map(|(entry, verdict)| entry.row(verdict)).collect();
        let head =
            ["record", "verdict", "metric", "ratio", "interval", "baseline", "subject", "started", "commit"];
        let body = html! {
            h1 { "Comparison" }
            p.verdict { "These records are " (answer) "." }
            (section(
                "Differences from the first",
                &table(&["record", "what", "first", "this", ""], &differences),
            ))
            (section("Ratios", &PreEscaped(plots::ratios(&ratios))))
            (section("Records", &cards(&head, &rows)))
            p { "A ratio is that of the subject to the baseline of the same record." }
        };
        document("Comparison", &body)
    }
}

impl Entry {
    fn row(&self, verdict: &MetricVerdict) -> Row {
        let (ratio, interval) = verdict.estimate.map_or_else(Default::default, |e| {
            (format!("{:.3}", e.ratio()), format!("{:.3} to {:.3}", e.interval().low, e.interval().high))
        });
        let texts = [
            self.id.clone(),
            verdict.outcome.to_string(),
            verdict.metric.clone(),
            ratio,
            interval,
            self.baseline_text(),
            verdict.subject.clone(),
            self.started.clone(),
            self.commit.clone(),
        ];
        let mut cells: Vec<Cell> = texts.iter().map(|text| Cell::text(text)).collect();
        cells[1].class = "verdict";
        Row { class: class(&verdict.outcome), cells }
    }

    fn date(&self) -> &str {
        self.started.get(..10).unwrap_or(&self.started)
    }
}

impl fmt::Display for Comparison {
    /// For a terminal: whether comparable, why not, and a line for each verdict.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in &self.entries {
            let mark = if entry.is_comparable() { "" } else { ", NOT COMPARABLE with the first" };
            writeln!(
                f,
                "{} {} commit {}, baseline {}{mark}",
                entry.date(),
                entry.id,
                entry.commit,
                entry.baseline_text()
            )?;
            for difference in &entry.differences {
                writeln!(f, "    {} {difference}", if difference.forbids { "!" } else { "-" })?;
            }
            for verdict in &entry.verdicts {
                writeln!(f, "    {verdict}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::record;

    fn two_days() -> [Record; 2] {
        let first = record("packets_per_cpu_s", &[(100.0, 101.0, 150.0); 8]);
        let mut second = record("packets_per_cpu_s", &[(90.0, 91.0, 150.0); 8]);
        second.id = "next".to_owned();
        second.started = "2026-11-21T09:00:00Z".to_owned();
        [first, second]
    }

    #[test]
    fn records_of_two_days_on_one_machine_are_comparable() {
        let comparison = compare(&two_days());
        assert!(comparison.is_comparable());
        let text = comparison.to_string();
        assert!(
            text.contains("1.500 times") && text.contains("1.667 times") && !text.contains("NOT"),
            "{text}"
        );
        let html = comparison.page();
        assert!(html.contains("These records are comparable") && html.contains("<svg"), "{html}");
    }

    #[test]
    fn another_kernel_is_said_to_forbid_the_comparison() {
        let mut records = two_days();
        records[1].environment.kernel = "6.1.0".to_owned();
        let comparison = compare(&records);
        assert!(!comparison.is_comparable());
        assert!(comparison.entries[0].is_comparable() && !comparison.entries[1].is_comparable());
        let text = comparison.to_string();
        assert!(text.contains("NOT COMPARABLE") && text.contains("! kernel: 6.12.1 and 6.1.0"), "{text}");
        let html = comparison.page();
        assert!(html.contains("not comparable") && html.contains("forbids the comparison"), "{html}");
    }

    #[test]
    fn nothing_compared_is_an_empty_page() {
        assert!(compare(&[]).page().contains("comparable"));
    }
}
