//! Fuzzing table of docs/dev/reliability.md: property, cost and coverage of each target.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use super::{
    corpus,
    coverage::{self, Lines},
    ledger,
    program::Places,
    targets::Target,
};
use crate::{
    Failure,
    document::{lines_of, with_table},
};

const NAME: &str = "fuzzing";
const BY: &str = "cargo xtask fuzz --coverage";

/// Measures coverage and updates the table; rows of targets that were not measured stay unchanged.
pub(super) fn write(places: &Places, targets: &[&Target], programs: &[PathBuf]) -> Result<ExitCode, Failure> {
    let document = places.repository().join("docs/dev/reliability.md");
    let text = fs::read_to_string(&document)?;
    let mut rows = rows(&text);
    let spent = ledger::load(&places.ledger())?;
    let mut known: BTreeMap<&Path, Vec<_>> = BTreeMap::new();
    for (target, program) in targets.iter().zip(programs) {
        let scratch = places.scratch(target)?;
        let Some(inputs) = corpus::unpack(places, target, program, super::KNOWN)? else {
            println!("{:<16} SKIPPED: its test cannot run here", target.name);
            continue;
        };
        let into = scratch.join(super::MERGED);
        let _ = fs::remove_dir_all(&into);
        fs::create_dir_all(&into)?;
        let merged = coverage::merge(target, program, &scratch, super::MERGED, &[super::KNOWN])?;
        if !known.contains_key(program.as_path()) {
            known.insert(program, coverage::places(program, &scratch)?);
        }
        let lines = coverage::lines(places.repository(), target, &merged, &known[program.as_path()]);
        let percent = percent(&lines);
        fs::write(scratch.join("unreached"), unreached(&lines))?;
        println!(
            "{:<16} {percent:>5.1} % of {} lines reached by {inputs} inputs; the other lines: {}",
            target.name,
            lines.len(),
            scratch.join("unreached").display()
        );
        let cost = spent.get(target.name).copied().unwrap_or_default();
        let faults = corpus::read(&places.memory(target).join(corpus::FAULTS))?.len();
        let row = format!(
            "| `{}` | {} | {inputs} | {:.2} | {:.1} | {faults} | {percent:.1} % of {} |",
            target.name,
            target.holds,
            hours(cost.cpu_seconds),
            millions(cost.executions),
            lines.len()
        );
        rows.insert(target.name.to_owned(), row);
    }
    let (seconds, executions) = spent.values().fold((0, 0), |(seconds, executions), spent| {
        (seconds + spent.cpu_seconds, executions + spent.executions)
    });
    let mut table = String::from(
        "| target | input: invariant | inputs | CPU hours | million runs | faults | lines reached |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for target in super::TARGETS {
        if let Some(row) = rows.get(target.name) {
            table += row;
            table.push('\n');
        }
    }
    table += &format!("| all | | | {:.2} | {:.1} | | |\n", hours(seconds), millions(executions));
    fs::write(&document, with_table(&text, NAME, BY, &table)?)?;
    Ok(ExitCode::SUCCESS)
}

fn rows(document: &str) -> BTreeMap<String, String> {
    let rows = lines_of(document, NAME, BY).into_iter().filter_map(|line| {
        let name = line.strip_prefix("| `")?.split('`').next()?;
        Some((name.to_owned(), line.to_owned()))
    });
    rows.collect()
}

fn percent(lines: &Lines) -> f64 {
    let reached = lines.values().filter(|reached| **reached).count();
    100.0 * as_float(reached as u64) / as_float(lines.len().max(1) as u64)
}

/// Unreached lines as `file:line`, one per line.
fn unreached(lines: &Lines) -> String {
    let missing = lines.iter().filter(|(_, reached)| !**reached);
    missing.map(|((file, line), _)| format!("{file}:{line}\n")).collect()
}

fn hours(seconds: u64) -> f64 {
    as_float(seconds) / 3600.0
}

fn millions(executions: u64) -> f64 {
    as_float(executions) / 1e6
}

fn as_float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_other_targets_stay_unchanged() {
        let text = with_table(
            &format!("<!-- {NAME}: written by {BY} -->\n<!-- end of {NAME} -->"),
            NAME,
            BY,
            "| target |\n| `a` | 1 |\n| `b` | 2 |\n",
        );
        assert_eq!(
            rows(&text.expect("both markers")).into_iter().collect::<Vec<_>>(),
            [("a", "| `a` | 1 |"), ("b", "| `b` | 2 |")].map(|(name, row)| (name.to_owned(), row.to_owned()))
        );
        assert!(rows("# A\n").is_empty());
    }

    #[test]
    fn unreached_lines_are_listed() {
        let lines = Lines::from([(("a.rs".to_owned(), 1), true), (("a.rs".to_owned(), 2), false)]);
        assert!((percent(&lines) - 50.0).abs() < f64::EPSILON);
        assert_eq!(unreached(&lines), "a.rs:2\n");
        assert!(percent(&Lines::new()).abs() < f64::EPSILON);
    }
}
