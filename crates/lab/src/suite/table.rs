//! Table of a suite: one line for each figure that has thresholds. A row without thresholds has one line, for the deciding metric.

use std::{fmt::Write as _, iter};

use super::journal::SuiteJournal;
use crate::{
    builds, metric,
    record::RunRecord,
    report, stats,
    thresholds::{ThresholdKind, ThresholdOutcome, hardest_results},
};

#[derive(Default)]
pub(crate) struct SuiteTable {
    subjects: Vec<String>,
    lines: Vec<SuiteLine>,
    origin: Vec<String>,
    pub(crate) missed: usize,
    undecided: usize,
    met: usize,
    missed_aims: usize,
}

struct SuiteLine {
    title: String,
    figure: String,
    medians: Vec<String>,
    ratio: String,
    threshold: String,
    verdict: String,
}

impl SuiteTable {
    pub(crate) fn of(journal: &SuiteJournal) -> Self {
        let records: Vec<Option<RunRecord>> =
            journal.rows.iter().map(|entry| journal.record(entry)).collect();
        let mut table = Self::default();
        for subject in records.iter().flatten().flat_map(|record| &record.experiment.subjects) {
            if !table.subjects.contains(&subject.name) {
                table.subjects.push(subject.name.clone());
            }
        }
        for (entry, record) in journal.rows.iter().zip(&records) {
            match record {
                Some(record) => table.add(&entry.title, record),
                None => {
                    let verdict = entry.failed.as_ref().map_or_else(
                        || "not yet measured".to_owned(),
                        |why| shortened(&format!("not measured: {}", why.replace('\n', "; "))),
                    );
                    table.push(&entry.title, &RunRecord::default(), "–", (dash(), dash(), verdict));
                }
            }
        }
        table.origin = origin(&records.iter().flatten().collect::<Vec<_>>());
        table
    }

    fn add(&mut self, title: &str, record: &RunRecord) {
        let thresholds = hardest_results(record);
        for held in &thresholds {
            match (&held.outcome, held.kind) {
                (ThresholdOutcome::Met, _) => self.met += 1,
                (ThresholdOutcome::Missed, ThresholdKind::Must) => self.missed += 1,
                (ThresholdOutcome::Missed, ThresholdKind::Aim) => self.missed_aims += 1,
                (ThresholdOutcome::Undecided(_), _) => self.undecided += 1,
            }
            let whom = match (&held.against, &held.threshold.against) {
                (None, _) => format!(" of {}", held.subject),
                (Some(against), None) if record.experiment.subjects.len() > 2 => {
                    format!(" every other, here {against}")
                }
                (Some(against), _) => format!(" {against}"),
            };
            let told = match &held.outcome {
                ThresholdOutcome::Missed => "**missed**".to_owned(),
                other => shortened(&other.to_string()),
            };
            let figure = held.figure_in_words().unwrap_or_else(dash);
            let threshold = format!("{} {}{whom}", held.kind, held.threshold);
            // Thresholds for the same figure share a line.
            let same = |line: &&mut SuiteLine| {
                line.title == title && line.figure == held.threshold.metric && line.ratio == figure
            };
            match self.lines.iter_mut().find(same) {
                Some(line) => {
                    line.threshold += &format!("; {threshold}");
                    // If several thresholds are undecided for the same reason, that reason is shown only once.
                    if line.verdict != told
                        || matches!(held.outcome, ThresholdOutcome::Met | ThresholdOutcome::Missed)
                    {
                        line.verdict += &format!("; {told}");
                    }
                }
                None => self.push(title, record, &held.threshold.metric, (figure, threshold, told)),
            }
        }
        if !thresholds.is_empty() {
            return;
        }
        match report::verdicts(record).last() {
            Some(verdict) => {
                let ratio = verdict.estimate.map_or_else(dash, |estimate| {
                    let interval = estimate.interval();
                    format!("{:.3} ({:.3} to {:.3})", estimate.ratio(), interval.low, interval.high)
                });
                let told = format!("{} against {}: {}", verdict.subject, verdict.baseline, verdict.outcome);
                self.push(title, record, &verdict.metric, (ratio, dash(), shortened(&told)));
            }
            None => {
                self.push(title, record, &record.experiment.metric, (dash(), dash(), "measured".to_owned()));
            }
        }
    }

    fn push(
        &mut self,
        title: &str,
        record: &RunRecord,
        name: &str,
        (ratio, threshold, verdict): (String, String, String),
    ) {
        let median = |subject: &String| {
            stats::median(&record.values(subject, name)).map_or_else(dash, |value| metric::show(name, value))
        };
        self.lines.push(SuiteLine {
            title: title.to_owned(),
            figure: name.to_owned(),
            medians: self.subjects.iter().map(median).collect(),
            ratio,
            threshold,
            verdict,
        });
    }

    /// Markdown table with aligned columns, and the origin of the figures.
    pub(crate) fn markdown(&self) -> String {
        let rows: Vec<Vec<String>> =
            iter::once(self.head()).chain(self.lines.iter().map(SuiteLine::cells)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
        let mut text = String::new();
        for (number, row) in rows.iter().enumerate() {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            let _ = writeln!(text, "| {} |", cells.collect::<Vec<_>>().join(" | "));
            if number == 0 {
                let rule = widths.iter().map(|width| "-".repeat(*width));
                let _ = writeln!(text, "| {} |", rule.collect::<Vec<_>>().join(" | "));
            }
        }
        for sentence in &self.origin {
            let _ = write!(text, "\n{sentence}\n");
        }
        text
    }

    pub(crate) fn totals(&self) -> String {
        let missed = self.missed + self.missed_aims;
        format!("thresholds: {} met, {missed} missed, {} undecided", self.met, self.undecided)
    }

    fn head(&self) -> Vec<String> {
        let last = ["value or ratio (95 % interval)", "threshold", "verdict"];
        let subjects = self.subjects.iter().map(String::as_str);
        ["row", "figure"].into_iter().chain(subjects).chain(last).map(str::to_owned).collect()
    }
}

impl SuiteLine {
    fn cells(&self) -> Vec<String> {
        let first = [&self.title, &self.figure];
        let last = [&self.ratio, &self.threshold, &self.verdict];
        first.into_iter().chain(&self.medians).chain(last).map(|cell| cell.replace('|', "\\|")).collect()
    }
}

fn origin(records: &[&RunRecord]) -> Vec<String> {
    let Some(first) = records.first() else { return Vec::new() };
    let (machine, asked) = (&first.environment, &first.experiment);
    let commit = machine.commit.as_ref().map_or_else(String::new, |commit| {
        format!(", commit {commit}{}", if machine.dirty { " with uncommitted changes" } else { "" })
    });
    let idle = Some(&machine.idle).filter(|idle| idle.contains("polls"));
    let idle = idle.map_or_else(String::new, |idle| format!(" (idle: {idle})"));
    let mut sentences = vec![format!(
        "{}{commit}; Linux {}, {} × {}{idle}; {} rounds of {} s, seed {}.",
        first.started,
        machine.kernel,
        machine.cores,
        machine.cpu_model,
        asked.rounds,
        asked.duration_s,
        first.seed
    )];
    let mut programs = Vec::new();
    for build in records.iter().flat_map(|record| &record.programs).filter(|build| build.word == 0) {
        // Names of subjects are arbitrary, so only the version identifies the program.
        let hash = || build.short_hash().map(|hash| format!("SHA-256 {hash}"));
        let version = build.version.clone().or_else(hash).unwrap_or_else(|| "of unknown version".to_owned());
        let told = format!("{} ({version})", build.name);
        if build.name != builds::WORKLOAD && !programs.contains(&told) {
            programs.push(told);
        }
    }
    sentences.push(format!("Programs: {}.", programs.join(", ")));
    let mut notes: Vec<&String> = Vec::new();
    let told = |note: &&String| {
        ["a file changed during", "the generator limited"].iter().any(|head| note.starts_with(head))
            || note.contains("is skipped: ")
    };
    for note in records.iter().flat_map(|record| &record.environment.notes).filter(told) {
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    sentences.extend(notes.into_iter().map(|note| format!("{note}.")));
    sentences
}

fn shortened(text: &str) -> String {
    const MOST: usize = 120;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", text[..end].trim_end()),
        None => text.to_owned(),
    }
}

fn dash() -> String {
    "–".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Threshold, tests::record};

    fn table() -> SuiteTable {
        let mut table = SuiteTable {
            subjects: vec!["old".to_owned(), "new".to_owned()],
            origin: vec!["Somewhere.".to_owned()],
            ..SuiteTable::default()
        };
        let mut judged = record("packets_per_busy_s", &[(100.0, 100.1, 150.0); 8]);
        let threshold = |limit| Threshold {
            metric: "packets_per_busy_s".to_owned(),
            at_least: Some(limit),
            ..Threshold::default()
        };
        judged.experiment.must = vec![threshold(1.2), threshold(2.0)];
        judged.experiment.aim = vec![threshold(3.0)];
        table.add("many | thin", &judged);
        table.add("few", &record("packets_per_busy_s", &[(100.0, 100.1, 150.0); 8]));
        table
    }

    #[test]
    fn figures_with_thresholds_get_lines_and_other_rows_get_verdicts() {
        let text = table().markdown();
        let lines: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            [&lines[0], &lines[2]],
            [
                "| row | figure | old | new | value or ratio (95 % interval) | threshold | verdict |",
                "| many \\| thin | packets_per_busy_s | 100.0 /s | 150.0 /s | 1.500 (1.500 to 1.500) | must ≥ 1.2 × old; must ≥ 2 × old; aim ≥ 3 × old | met; **missed**; **missed** |",
            ]
        );
        assert!(lines[1].starts_with("| ---") && text.lines().take(4).all(|line| line.ends_with(" |")));
        assert!(lines[3].ends_with("| – | new against old: faster |"), "{}", lines[3]);
        assert_eq!(lines[5], "Somewhere.");
    }

    #[test]
    fn only_a_missed_must_fails_the_suite() {
        let table = table();
        assert_eq!((table.met, table.missed, table.undecided), (1, 1, 0));
        assert_eq!(table.totals(), "thresholds: 1 met, 2 missed, 0 undecided");
    }
}
