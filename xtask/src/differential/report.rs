//! Text output of counts and findings.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
};

use super::{
    Compared, KEPT, Unknown, Unknowns,
    compare::Difference,
    known::{TABLE, known},
    servers::Name,
    step::Sequence,
};
use crate::INCOMPLETE;

#[derive(Default)]
pub(super) struct Report {
    sequences: u64,
    steps: usize,
    /// Known differences, by the other server and their row in the table.
    known: BTreeMap<(Name, usize), u64>,
    pub(super) unknown: Unknowns,
    pub(super) fleeting: u64,
    /// Unknown differences, each with its shortest sequence.
    pub(super) faults: Vec<String>,
    pub(super) skipped: BTreeSet<String>,
    /// Servers that exited, and other errors during the run.
    pub(super) ended: Vec<String>,
}

impl Report {
    pub(super) fn add(&mut self, sequence: &Sequence, compared: Compared) {
        self.sequences += 1;
        self.steps += sequence.steps.len();
        self.skipped.extend(compared.failed);
        for difference in compared.found {
            if let Some(row) = known(sequence, &difference) {
                *self.known.entry((difference.who, row)).or_default() += 1;
                continue;
            }
            let kept = self.unknown.entry(signature(sequence, &difference)).or_insert_with(|| Unknown {
                difference,
                sequences: Vec::new(),
                count: 0,
            });
            kept.count += 1;
            if kept.sequences.len() < KEPT {
                kept.sequences.push(sequence.clone());
            }
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.sequences += other.sequences;
        self.steps += other.steps;
        other.known.into_iter().for_each(|(key, count)| *self.known.entry(key).or_default() += count);
        for (signature, unknown) in other.unknown {
            match self.unknown.get_mut(&signature) {
                Some(kept) => {
                    kept.count += unknown.count;
                    kept.sequences.extend(unknown.sequences);
                    kept.sequences.truncate(KEPT);
                }
                None => _ = self.unknown.insert(signature, unknown),
            }
        }
        self.fleeting += other.fleeting;
        self.faults.extend(other.faults);
        self.skipped.extend(other.skipped);
        self.ended.extend(other.ended);
    }

    pub(super) fn print(&self, title: &str) {
        println!("\n{title} (sequences: {}, steps: {})", self.sequences, self.steps);
        for ((who, row), count) in &self.known {
            let row = &TABLE[*row];
            println!("  {count:6}  {who}: {} ({})", row.what, row.why);
        }
        if self.fleeting > 0 {
            println!("  {:6}  did not recur when run alone", self.fleeting);
        }
        self.faults.iter().for_each(|fault| println!("\n  UNKNOWN {fault}"));
    }

    pub(super) fn finish(&self) -> ExitCode {
        println!(
            "\nsequences: {}, steps: {}, unknown differences: {}",
            self.sequences,
            self.steps,
            self.faults.len()
        );
        self.skipped.iter().for_each(|what| println!("skipped: {what}"));
        self.ended.iter().for_each(|what| println!("error: {what}"));
        if !self.faults.is_empty() || !self.ended.is_empty() {
            ExitCode::FAILURE
        } else if !self.skipped.is_empty() {
            ExitCode::from(INCOMPLETE)
        } else {
            ExitCode::SUCCESS
        }
    }
}

/// Description that is the same for equivalent differences.
pub(super) fn signature(sequence: &Sequence, difference: &Difference) -> String {
    format!("{}: {}: {}", difference.who, sequence.steps[difference.at].label(), difference.what)
}

pub(super) fn fault(unknown: &Unknown, shortest: &Sequence) -> String {
    let Unknown { difference, sequences, count } = unknown;
    format!("(seen {count}x) {}\n{shortest}", signature(&sequences[0], difference))
}
