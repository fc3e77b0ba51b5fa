//! What came of each row, as a table.

use std::{fmt::Write as _, fs, path::Path};

use serde::Deserialize;
use serde_json::Value;

use crate::Failure;

#[derive(Default)]
pub(super) struct Table {
    rows: Vec<(String, Outcome)>,
}

enum Outcome {
    /// It healed.
    Healed(Box<Row>),
    /// It did not, or what was expected of it did not come; its last words.
    Broken(String),
    /// It could not be tried here.
    Skipped(String),
}

/// What a test has written.
#[derive(Deserialize)]
struct Row {
    what: String,
    clients: u64,
    sent: Option<u64>,
    lost: Option<u64>,
    duplicated: Option<u64>,
    reordered: Option<u64>,
    pause_ms_p50: Option<f64>,
    pause_ms_max: Option<f64>,
    returns: Option<u64>,
    log: Vec<String>,
    notes: Vec<String>,
    limits: Vec<Limit>,
    before: Value,
    after: Value,
}

#[derive(Deserialize)]
struct Limit {
    what: String,
    value: f64,
    most: f64,
}

impl Limit {
    fn is_exceeded(&self) -> bool {
        self.value > self.most
    }
}

impl Table {
    /// Takes what a row has left: its file, and what it has said.
    pub(super) fn add(&mut self, name: &str, passed: bool, file: &Path, said: &str) -> Result<(), Failure> {
        let skipped = said.lines().find_map(|line| line.strip_prefix("SKIPPED: "));
        let outcome = match (passed, skipped) {
            (true, Some(why)) => Outcome::Skipped(why.to_owned()),
            // A test of the harness, and no row.
            (true, None) if !file.exists() => return Ok(()),
            (true, None) => Outcome::Healed(serde_json::from_str(&fs::read_to_string(file)?)?),
            (false, _) => {
                let mut after = said.lines().skip_while(|line| !line.contains("panicked at")).skip(1);
                Outcome::Broken(after.next().unwrap_or("it failed").to_owned())
            }
        };
        self.rows.push((name.to_owned(), outcome));
        Ok(())
    }

    pub(super) fn is_broken(&self) -> bool {
        self.rows.iter().any(|(_, outcome)| matches!(outcome, Outcome::Broken(_)))
    }

    pub(super) fn is_exceeded(&self) -> bool {
        let exceeded = |row: &Row| row.limits.iter().any(Limit::is_exceeded);
        self.rows.iter().any(|(_, outcome)| matches!(outcome, Outcome::Healed(row) if exceeded(row)))
    }

    /// For people at a terminal.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for (name, outcome) in &self.rows {
            match outcome {
                Outcome::Healed(row) => {
                    let _ = writeln!(text, "\n{name}: {}", row.what);
                    for (title, words) in [
                        ("clients", row.seen()),
                        ("log", row.log()),
                        ("known", row.notes.join("; ")),
                        ("limits", row.limits()),
                        ("healed", row.healed()),
                    ] {
                        if !words.is_empty() {
                            let _ = writeln!(text, "  {title:<8} {words}");
                        }
                    }
                }
                Outcome::Broken(why) => _ = writeln!(text, "\n{name}: BROKEN: {why}"),
                Outcome::Skipped(why) => _ = writeln!(text, "\n{name}: skipped: {why}"),
            }
        }
        text.push('\n');
        text
    }

    /// For docs/reliability.md.
    pub(super) fn markdown(&self) -> String {
        let mut text = String::from(
            "| `cargo xtask faults` | what happens | what the clients saw | what the log said, and what is to be known | afterwards |\n\
             | --- | --- | --- | --- | --- |\n",
        );
        for (name, outcome) in &self.rows {
            let cells = match outcome {
                Outcome::Healed(row) => {
                    let told: Vec<String> = [row.log(), row.notes.join("; "), row.limits()]
                        .into_iter()
                        .filter(|words| !words.is_empty())
                        .collect();
                    [row.what.clone(), row.seen(), told.join("; "), row.healed()]
                }
                Outcome::Broken(why) => ["", "", why, "**broken**"].map(str::to_owned),
                Outcome::Skipped(why) => ["", "", why, "skipped"].map(str::to_owned),
            };
            let cells = cells.map(|cell| cell.replace('|', "\\|"));
            let _ = writeln!(text, "| `{name}` | {} |", cells.join(" | "));
        }
        text
    }
}

impl Row {
    fn seen(&self) -> String {
        let mut seen = match (self.sent, self.lost) {
            (Some(sent), Some(0)) => format!("{} clients: nothing lost of {sent} datagrams", self.clients),
            (Some(sent), Some(lost)) => format!("{} clients: {lost} of {sent} datagrams lost", self.clients),
            _ => return String::new(),
        };
        for (count, word) in [(self.duplicated, "came twice"), (self.reordered, "came late")] {
            if let Some(count @ 1..) = count {
                let _ = write!(seen, ", {count} {word}");
            }
        }
        if let (Some(median), Some(longest)) = (self.pause_ms_p50, self.pause_ms_max) {
            let _ = write!(
                seen,
                "; without media for {:.2} s (median), {:.2} s (longest)",
                median / 1e3,
                longest / 1e3
            );
        }
        if let Some(returns @ 1..) = self.returns {
            let _ = write!(seen, "; {returns} times a client asked for another allocation");
        }
        seen
    }

    /// The first few of its kinds.
    fn log(&self) -> String {
        const MOST: usize = 4;
        let mut said: Vec<String> = self.log.iter().take(MOST).map(|line| format!("\"{line}\"")).collect();
        if self.log.len() > MOST {
            said.push(format!("and {} more kinds", self.log.len() - MOST));
        }
        said.join("; ")
    }

    fn limits(&self) -> String {
        let told = |limit: &Limit| {
            let verdict = if limit.is_exceeded() { "ABOVE" } else { "within" };
            format!("{}: {:.2}, {verdict} {}", limit.what, limit.value, limit.most)
        };
        self.limits.iter().map(told).collect::<Vec<_>>().join("; ")
    }

    /// What the server had before and has afterwards.
    fn healed(&self) -> String {
        let figure = |of: &Value, name: &str| of[name].as_u64().unwrap_or_default();
        let mut told = String::from("whole");
        for (name, unit, divisor) in
            [("sessions", "sessions", 1), ("descriptors", "descriptors", 1), ("memory", "MB", 1 << 20)]
        {
            let _ = write!(
                told,
                ", {} -> {} {unit}",
                figure(&self.before, name) / divisor,
                figure(&self.after, name) / divisor
            );
        }
        told
    }
}
