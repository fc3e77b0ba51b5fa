//! Results of the fault tests (rows), as tables.

use std::{fmt::Write as _, fs, path::Path};

use serde::Deserialize;
use serde_json::Value;

use super::{VOID, fleet};
use crate::{
    Failure, INCOMPLETE, LIMIT_EXCEEDED,
    document::{lines_of, with_table},
    why_skipped,
};

const DOCUMENT: &str = "docs/dev/reliability.md";
const BY: &str = "cargo xtask faults --write";
const OF_FORWARDER: &str = "forward: ";
const TABLES: [&str; 2] = ["faults", "faults of the forwarder"];

const HEAD: &str = "\
| row | fault | lost/sent | longest gap, s | new allocations | notes | MB |\n\
| --- | --- | --- | --- | ---: | --- | --- |\n";

#[derive(Default)]
pub(super) struct Table {
    rows: Vec<(String, Outcome)>,
}

enum Outcome {
    Healed(Box<Row>),
    /// The server did not recover, or an assertion failed; contains the end of the test's output.
    Broken(String),
    Skipped(String),
}

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
    notes: Vec<String>,
    limits: Vec<Limit>,
    #[serde(default)]
    void: Vec<String>,
    #[serde(default)]
    before: Value,
    #[serde(default)]
    after: Value,
    /// Set for fleet faults. Of the fields above, only `clients`, `notes` and `limits` are then used.
    fleet: Option<fleet::Figures>,
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
    pub(super) fn add(&mut self, name: &str, passed: bool, file: &Path, said: &str) -> Result<(), Failure> {
        let outcome = match (passed, said.lines().find_map(why_skipped)) {
            (true, Some(why)) => Outcome::Skipped(why.to_owned()),
            (true, None) if !file.exists() => Outcome::Broken("the test passed but wrote no row".to_owned()),
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
        let exceeded = |row: &Row| row.void.is_empty() && row.limits.iter().any(Limit::is_exceeded);
        self.rows.iter().any(|(_, outcome)| matches!(outcome, Outcome::Healed(row) if exceeded(row)))
    }

    pub(super) fn is_void(&self) -> bool {
        self.rows.iter().any(|(_, outcome)| matches!(outcome, Outcome::Healed(row) if !row.void.is_empty()))
    }

    pub(super) fn skipped(&self) -> Vec<&str> {
        let is_skipped = |(_, outcome): &&(String, Outcome)| matches!(outcome, Outcome::Skipped(_));
        self.rows.iter().filter(is_skipped).map(|(name, _)| name.as_str()).collect()
    }

    /// Exit code; 0 if every row ran, recovered and is within its limits.
    pub(super) fn code(&self) -> u8 {
        if self.is_broken() {
            1
        } else if self.is_exceeded() {
            LIMIT_EXCEEDED
        } else if self.is_void() {
            VOID
        } else if !self.skipped().is_empty() {
            INCOMPLETE
        } else {
            0
        }
    }

    pub(super) fn is_in_part(&self) -> Option<&'static str> {
        let has_all =
            !self.is_void() && self.rows.iter().all(|(_, outcome)| matches!(outcome, Outcome::Healed(_)));
        (!has_all).then_some("a row is broken or void, or was skipped, so no table is written")
    }

    /// Writes the rows into their documents. Either all rows of fleet faults must have run, or none of them. Existing rows that did not
    /// run this time stay unchanged if they are in `all`.
    pub(super) fn write(&self, repository: &Path, all: &[&str]) -> Result<(), Failure> {
        let of_fleets = self.of_fleets();
        if !of_fleets.is_empty() {
            let file = repository.join(fleet::DOCUMENT);
            let document = fs::read_to_string(&file)?;
            fs::write(
                file,
                with_table(&document, "faults", "cargo xtask faults fleet --write", &of_fleets)?,
            )?;
        }
        let file = repository.join(DOCUMENT);
        let before = fs::read_to_string(&file)?;
        let after = self.within(&before, all)?;
        if after != before {
            fs::write(file, after)?;
        }
        Ok(())
    }

    /// The document with the new rows, all in the order of `all`.
    fn within(&self, document: &str, all: &[&str]) -> Result<String, Failure> {
        let mut document = document.to_owned();
        for (table, of_forwarder) in TABLES.into_iter().zip([false, true]) {
            let found = self.others().filter(|(_, outcome)| outcome.is_of_forwarder() == of_forwarder);
            let found: Vec<_> = found.map(|(name, outcome)| (name.as_str(), outcome.row(name))).collect();
            if found.is_empty() {
                continue;
            }
            let kept = lines_of(&document, table, BY);
            let rows = all.iter().filter_map(|name| {
                let new = found.iter().find(|(found, _)| found == name).map(|(_, row)| row.clone());
                new.or_else(|| {
                    let begin = format!("| `{name}` |");
                    kept.iter().find(|line| line.starts_with(&begin)).map(|line| format!("{line}\n"))
                })
            });
            let rows = HEAD.to_owned() + &rows.collect::<String>();
            document = with_table(&document, table, BY, &rows)?;
        }
        Ok(document)
    }

    fn others(&self) -> impl Iterator<Item = &(String, Outcome)> {
        self.rows
            .iter()
            .filter(|(_, outcome)| !matches!(outcome, Outcome::Healed(row) if row.fleet.is_some()))
    }

    fn of_fleets(&self) -> String {
        let mut text = String::new();
        for (name, outcome) in &self.rows {
            if let Outcome::Healed(row) = outcome
                && let Some(figures) = &row.fleet
            {
                text.push_str(if text.is_empty() { fleet::HEAD } else { "" });
                let told = [row.notes.join("; "), row.limits()].map(|words| words.replace('|', "\\|"));
                text.push_str(&figures.row(name, &row.what, row.clients, &told));
            }
        }
        text
    }

    pub(super) fn markdown(&self) -> String {
        let mut text = self.of_fleets();
        let others: String = self.others().map(|(name, outcome)| outcome.row(name)).collect();
        if !others.is_empty() {
            text += HEAD;
        }
        text + &others
    }
}

impl Outcome {
    fn row(&self, name: &str) -> String {
        let cells: Vec<String> = match self {
            Self::Healed(row) => row.cells(),
            Self::Broken(why) => ["**broken**", "", "", "", why, ""].map(str::to_owned).into(),
            Self::Skipped(why) => ["skipped", "", "", "", why, ""].map(str::to_owned).into(),
        };
        let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
        format!("| `{name}` | {} |\n", cells.join(" | "))
    }

    fn is_of_forwarder(&self) -> bool {
        matches!(self, Self::Healed(row) if row.what.starts_with(OF_FORWARDER))
    }
}

impl Row {
    /// Cells of a row for all columns of [`HEAD`] except the first.
    fn cells(&self) -> Vec<String> {
        let mut lost = match (self.sent, self.lost) {
            (Some(sent), Some(lost)) => format!("{lost}/{sent}"),
            _ => "-".to_owned(),
        };
        for (count, word) in [(self.duplicated, "duplicated"), (self.reordered, "late")] {
            if let Some(count @ 1..) = count {
                let _ = write!(lost, ", {count} {word}");
            }
        }
        let silence = match (self.pause_ms_p50, self.pause_ms_max) {
            (Some(median), Some(longest)) => format!("{:.2}/{:.2}", median / 1e3, longest / 1e3),
            _ => "-".to_owned(),
        };
        let notes = [self.notes.join("; "), self.limits()];
        let notes: Vec<String> = notes.into_iter().filter(|words| !words.is_empty()).collect();
        vec![
            self.what.strip_prefix(OF_FORWARDER).unwrap_or(&self.what).to_owned(),
            lost,
            silence,
            self.returns.map_or_else(|| "-".to_owned(), |returns| returns.to_string()),
            notes.join("; "),
            self.change("memory", 1 << 20),
        ]
    }

    fn change(&self, name: &str, divisor: u64) -> String {
        let figure = |of: &Value| of[name].as_u64().unwrap_or_default() / divisor;
        format!("{}→{}", figure(&self.before), figure(&self.after))
    }

    fn limits(&self) -> String {
        if !self.void.is_empty() {
            return format!("VOID, repeat on an idle machine: {}", self.void.join("; "));
        }
        let told = |limit: &Limit| {
            let verdict = if limit.is_exceeded() { "ABOVE the limit of" } else { "limit" };
            format!("{}: {:.2} ({verdict} {})", limit.what, limit.value, limit.most)
        };
        self.limits.iter().map(told).collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table(value: f64) -> Table {
        let row = json!({
            "what": "it | ends", "clients": 20, "sent": 1000, "lost": 3, "duplicated": 0, "reordered": 2,
            "pause_ms_p50": 1500.0, "pause_ms_max": 2250.0, "returns": 20,
            "notes": ["known"],
            "limits": [{ "what": "seconds", "value": value, "most": 5.0 }],
            "before": { "sessions": 0, "descriptors": 27, "memory": 3 << 20 },
            "after": { "sessions": 0, "descriptors": 26, "memory": 4 << 20 },
        });
        let row = serde_json::from_value(row).expect("the figures are valid");
        Table { rows: vec![("killed".to_owned(), Outcome::Healed(Box::new(row)))] }
    }

    #[test]
    fn a_row_has_losses_limits_and_resources() {
        let markdown = table(4.5).markdown();
        let row = markdown.lines().nth(2).expect("a row follows the title");
        for words in [
            "| `killed` | it \\| ends | 3/1000, 2 late | 1.50/2.25 | 20 | ",
            " | known; seconds: 4.50 (limit 5) | 3→4 |",
        ] {
            assert!(row.contains(words), "no {words:?} in {row}");
        }
        let cells = |line: &str| line.replace("\\|", "").matches(" | ").count();
        assert_eq!(HEAD.lines().next().map(cells), Some(cells(row)), "{row}");
        assert!(!table(4.5).is_broken() && !table(4.5).is_exceeded());
    }

    #[test]
    fn a_row_from_a_busy_machine_is_void() {
        let mut table = table(5.1);
        let Some((_, Outcome::Healed(row))) = table.rows.first_mut() else { unreachable!("no row") };
        row.void.push("without: 27.00, above 10".to_owned());
        assert!(table.is_void() && !table.is_exceeded() && !table.is_broken());
        let text = table.markdown();
        assert!(text.contains("VOID, repeat on an idle machine: without: 27.00, above 10"), "{text}");
        assert!(!text.contains("5.10"), "{text}");
    }

    #[test]
    fn exceeded_broken_and_skipped_rows_are_reported() {
        assert!(table(5.1).is_exceeded() && table(5.1).markdown().contains("5.10 (ABOVE the limit of 5)"));
        let mut table = Table::default();
        let nowhere = Path::new("/nonexistent");
        let said =
            "test a ... thread 'a' panicked at x.rs:1:1:\nmedia flows for all clients: not within 60s\n";
        table.add("a", false, nowhere, said).expect("nothing is read");
        table.add("b", true, nowhere, "SKIPPED: no freezer\n").expect("nothing is read");
        assert!(table.is_broken() && table.rows.len() == 2);
        let text = table.markdown();
        assert!(
            text.contains("| **broken** |  |  |  | media flows for all clients: not within 60s |"),
            "{text}"
        );
        assert!(text.contains("| `b` | skipped |  |  |  | no freezer |"), "{text}");
    }

    #[test]
    fn a_skipped_row_sets_the_exit_code_and_prevents_writing() {
        let nowhere = Path::new("/nonexistent");
        for said in [
            "SKIPPED: no freezer\n",
            // libtest prints the name first if the test runs alone.
            "running 1 test\ntest faults::a ... SKIPPED: no freezer\nok\n",
        ] {
            let mut table = table(4.5);
            assert_eq!((table.code(), table.is_in_part()), (0, None));
            table.add("a", true, nowhere, said).expect("nothing is read");
            assert_eq!((table.skipped(), table.code()), (vec!["a"], INCOMPLETE), "{said}");
            assert!(table.is_in_part().is_some_and(|why| why.contains("skipped")), "{said}");
        }
        let mut above = table(5.1);
        above.add("a", true, nowhere, "SKIPPED: no freezer\n").expect("nothing is read");
        assert_eq!(above.code(), LIMIT_EXCEEDED);
    }

    #[test]
    fn a_passed_row_without_figures_is_broken() {
        let mut table = Table::default();
        table.add("a", true, Path::new("/nonexistent"), "test faults::a ... ok\n").expect("nothing is read");
        assert_eq!(table.code(), 1);
        assert!(table.markdown().contains("the test passed but wrote no row"), "{}", table.markdown());
    }

    #[test]
    fn new_rows_replace_only_rows_of_the_same_name() {
        let tables = |rows: &str, of_forwarder: &str| {
            format!(
                "a\n<!-- faults: written by {BY} -->\n{HEAD}{rows}<!-- end of faults -->\nb\n\
                 <!-- faults of the forwarder: written by {BY} -->\n{HEAD}{of_forwarder}<!-- end of faults of the forwarder -->\n"
            )
        };
        let before =
            tables("| `killed` | old |\n| `other` | old |\n| `is_no_more` | old |\n", "| `third` | old |\n");
        let after = table(4.5)
            .within(&before, &["first", "other", "killed", "third"])
            .expect("the document has the markers");
        let row = table(4.5).markdown().lines().nth(2).expect("a row follows the title").to_owned();
        assert_eq!(after, tables(&format!("| `other` | old |\n{row}\n"), "| `third` | old |\n"));
        assert!(table(4.5).within("no markers", &["killed"]).is_err());
    }

    #[test]
    fn the_document_has_both_tables() {
        let document = include_str!("../../../docs/dev/reliability.md");
        for table in TABLES {
            assert!(lines_of(document, table, BY).len() > 10, "{table}");
        }
    }
}
