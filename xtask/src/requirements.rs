//! `cargo xtask requirements`: checks that for each RFC requirement on a server there is a test, or an entry in docs/dev/rfcs.md with the
//! reason for a deviation.
//!
//! ```text
//! rfc ⇥ section ⇥ level ⇥ requirement ⇥ TARGET::module::test, …; rfcs.md: Entry
//! ```
//!
//! A row has tests, an entry or both. TARGET is the name that cargo gives the test program: `turn`, `relay`, `end_to_end`, or
//! `turnpike_turn` for unit tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use clap::Args;

use crate::{Failure, why_skipped};

const LIST: &str = "tests/requirements.tsv";
const DEVIATIONS: &str = "docs/dev/rfcs.md";
const HEADER: &str = "rfc\tsection\tlevel\trequirement\tevidence";
/// Prefix of evidence that is an entry of [`DEVIATIONS`].
const ENTRY: &str = "rfcs.md: ";

#[derive(Args)]
pub(crate) struct Options {
    /// Read results from the logs in this directory, as written by ./test, instead of running the tests
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
    /// Do not run tests; only check that tests and entries exist
    #[arg(long, conflicts_with = "logs")]
    list: bool,
}

struct Row<'a> {
    place: String,
    rfc: &'a str,
    tests: Vec<&'a str>,
    /// Name of a deviation: the bold words at the beginning of its entry.
    entry: Option<&'a str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Passed,
    Skipped,
    Failed,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let text = fs::read_to_string(LIST)?;
    let rows = parse(&text)?;
    let deviations = fs::read_to_string(DEVIATIONS)?;
    let tests: BTreeSet<&str> = rows.iter().flat_map(|row| &row.tests).copied().collect();
    let mut mistakes = missing_entries(&rows, &deviations);
    mistakes.extend(tests.iter().filter(|test| !exists(test)).map(|test| format!("no such test: {test}")));
    let outcomes = match &options.logs {
        _ if options.list || !mistakes.is_empty() => None,
        Some(logs) => Some(read_logs(logs)?),
        None => Some(run_tests(&tests)?),
    };
    if let Some(outcomes) = &outcomes {
        mistakes.extend(tests.iter().filter_map(|test| match outcomes.get(*test) {
            None => Some(format!("{test} did not run")),
            Some(Outcome::Failed) => Some(format!("{test} failed")),
            Some(Outcome::Passed | Outcome::Skipped) => None,
        }));
    }
    print(&rows, outcomes.as_ref());
    mistakes.iter().for_each(|mistake| println!("{mistake}"));
    Ok(if mistakes.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn parse(text: &str) -> Result<Vec<Row<'_>>, Failure> {
    let mut lines = text.lines();
    if lines.next() != Some(HEADER) {
        return Err(format!("{LIST} must start with the names of its columns").into());
    }
    lines.enumerate().map(|(at, line)| parse_row(at + 2, line)).collect()
}

fn parse_row(at: usize, line: &str) -> Result<Row<'_>, Failure> {
    let wrong = |why: &str| Failure::from(format!("{LIST}:{at}: {why}"));
    let columns: Vec<&str> = line.split('\t').collect();
    let [rfc, section, level, requirement, evidence] = columns[..] else {
        return Err(wrong("expected five columns"));
    };
    if [rfc, section, level, requirement, evidence].iter().any(|column| column.trim().is_empty()) {
        return Err(wrong("a column is empty; a requirement has a test or an entry"));
    }
    let (tests, entry) = match evidence.split_once(ENTRY) {
        Some((tests, entry)) => (tests.trim_end_matches("; "), Some(entry)),
        None => (evidence, None),
    };
    let tests = tests.split(", ").filter(|test| !test.is_empty()).collect();
    Ok(Row { place: format!("RFC {rfc} section {section}, {requirement}"), rfc, tests, entry })
}

fn missing_entries(rows: &[Row<'_>], deviations: &str) -> Vec<String> {
    let is_there = |entry: &str| deviations.contains(&format!("**{entry}"));
    let missing = rows.iter().filter_map(|row| {
        let entry = row.entry.filter(|entry| !is_there(entry))?;
        Some(format!("{DEVIATIONS} has no entry \"{entry}\" ({})", row.place))
    });
    missing.collect()
}

fn exists(test: &str) -> bool {
    let path: Vec<&str> = test.split("::").collect();
    let [target, modules @ .., name] = &path[..] else { return false };
    let is_test = |file: &Path| {
        let Ok(text) = fs::read_to_string(file) else { return false };
        let declared = format!("fn {name}(");
        // Attributes such as #[ignore] may be between `#[test]` and the function.
        text.match_indices(&declared)
            .any(|(at, _)| text[..at].rsplit("\n\n").next().is_some_and(|before| before.contains("#[test]")))
    };
    sources(target).iter().any(|root| {
        (0..=modules.len()).any(|depth| {
            let file = modules[..depth].iter().fold(root.clone(), |path, module| path.join(module));
            ["mod.rs", "main.rs", "lib.rs"].iter().any(|name| is_test(&file.join(name)))
                || is_test(&file.with_extension("rs"))
        })
    })
}

fn sources(target: &str) -> Vec<PathBuf> {
    match target.strip_prefix("turnpike_") {
        Some(name) => vec![Path::new("crates").join(name).join("src")],
        None => {
            vec![Path::new("crates").join(target).join("tests"), Path::new("crates/cli/tests").join(target)]
        }
    }
}

/// Reads the outcomes of tests, keyed by TARGET::path, from all logs in a directory.
fn read_logs(directory: &Path) -> Result<BTreeMap<String, Outcome>, Failure> {
    let mut outcomes = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "log") {
            read(&String::from_utf8_lossy(&fs::read(path)?), &mut outcomes);
        }
    }
    Ok(outcomes)
}

fn read(log: &str, outcomes: &mut BTreeMap<String, Outcome>) {
    let (mut target, mut shown) = (String::new(), String::new());
    for line in log.lines() {
        if let Some(program) = line.trim().strip_prefix("Running ").and_then(|rest| rest.split_once("/deps/"))
        {
            let (name, _) = program.1.rsplit_once('-').unwrap_or((program.1, ""));
            name.clone_into(&mut target);
        } else if let Some(name) =
            line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"))
        {
            shown = format!("{target}::{name}");
        } else if why_skipped(line).is_some() {
            // A skip takes precedence over the `ok` that libtest prints for a skipped test.
            if let Some(outcome @ Outcome::Passed) = outcomes.get_mut(&shown) {
                *outcome = Outcome::Skipped;
            }
        } else if let Some((name, said)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... "))
        {
            let outcome = match said {
                "ok" => Outcome::Passed,
                "FAILED" => Outcome::Failed,
                _ => continue,
            };
            // A test that passed once counts as passed: a failed test may have passed when run alone.
            let before = outcomes.entry(format!("{target}::{name}")).or_insert(outcome);
            *before = outcome.min(*before);
        }
    }
}

fn run_tests(tests: &BTreeSet<&str>) -> Result<BTreeMap<String, Outcome>, Failure> {
    let mut by_target: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (target, name) in tests.iter().filter_map(|test| test.split_once("::")) {
        by_target.entry(target).or_default().push(name);
    }
    let mut outcomes = BTreeMap::new();
    for (target, names) in by_target {
        let mut cargo = Command::new("cargo");
        cargo.args(["test", "--workspace", "--locked", "--no-fail-fast"]);
        match target.strip_prefix("turnpike_") {
            Some(_) => cargo.arg("--lib"),
            None => cargo.args(["--test", target]),
        };
        let output =
            cargo.args(["--", "--show-output", "--exact"]).args(names).stdin(Stdio::null()).output()?;
        // The names of the programs are on standard error, in the order of the results.
        let said = [&output.stderr[..], &output.stdout[..]].map(String::from_utf8_lossy).join("\n");
        read(&said.replace("\r", ""), &mut outcomes);
        if target.starts_with("turnpike_") {
            outcomes.extend(relabelled(target, &String::from_utf8_lossy(&output.stdout)));
        }
    }
    Ok(outcomes)
}

/// Prefixes unit tests with their target. Their results do not show the program, because program names are printed to a different stream.
fn relabelled(target: &str, said: &str) -> BTreeMap<String, Outcome> {
    let mut found = BTreeMap::new();
    read(said, &mut found);
    found.into_iter().map(|(path, outcome)| (format!("{target}{path}"), outcome)).collect()
}

fn print(rows: &[Row<'_>], outcomes: Option<&BTreeMap<String, Outcome>>) {
    let is_skipped = |test: &str| outcomes.is_some_and(|it| it.get(test) == Some(&Outcome::Skipped));
    println!("{:<10} {:>12} {:>6} {:>7} {:>9}", "RFC", "requirements", "tested", "skipped", "deviation");
    let mut counts: Vec<(&str, [usize; 4])> = Vec::new();
    for row in rows {
        if counts.last().is_none_or(|(rfc, _)| *rfc != row.rfc) {
            counts.push((row.rfc, [0; 4]));
        }
        let (_, counted) = counts.last_mut().expect("pushed above");
        counted[0] += 1;
        counted[match row.entry {
            Some(_) => 3,
            None if row.tests.iter().all(|test| is_skipped(test)) => 2,
            None => 1,
        }] += 1;
    }
    let all = counts.iter().fold([0; 4], |sum, (_, counted)| std::array::from_fn(|at| sum[at] + counted[at]));
    for (rfc, [all, tested, skipped, deviates]) in counts.iter().chain([&("all", all)]) {
        println!("{rfc:<10} {all:>12} {tested:>6} {skipped:>7} {deviates:>9}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Result<Vec<Row<'_>>, Failure> {
        parse(text)
    }

    #[test]
    fn a_row_has_tests_or_an_entry_and_no_empty_column() {
        let list = |evidence: &str| format!("{HEADER}\n8489\t5\tMUST\tFirst two bits\t{evidence}\n");
        let of = |evidence: &str| {
            let list = list(evidence);
            let rows = rows(&list).ok()?;
            Some((rows[0].tests.join(" "), rows[0].entry.map(str::to_owned)))
        };
        let expected = |tests: &str, entry: Option<&str>| Some((tests.to_owned(), entry.map(str::to_owned)));
        assert_eq!(of("turn::a::b, wire::c"), expected("turn::a::b wire::c", None));
        assert_eq!(of("rfcs.md: PADDING, all"), expected("", Some("PADDING, all")));
        assert_eq!(of("turn::a, wire::c; rfcs.md: PADDING"), expected("turn::a wire::c", Some("PADDING")));
        assert_eq!((of(""), of(" ")), (None, None));
        assert!(rows(&format!("{HEADER}\n8489\t5\tMUST\tFirst two bits\n")).is_err());
    }

    #[test]
    fn a_missing_entry_is_reported() {
        let list = format!("{HEADER}\n5780\t6.1\tSHOULD\tLength\trfcs.md: PADDING\n");
        let rows = rows(&list).expect("a list");
        assert!(missing_entries(&rows, "- **PADDING** in an answer").is_empty());
        assert_eq!(missing_entries(&rows, "- PADDING, **NONCE**").len(), 1);
    }

    #[test]
    fn logs_are_parsed_into_outcomes() {
        let log = "     Running tests/main.rs (target/debug/deps/turn-0a1b)\n\
                   test a::one ... ok\ntest a::two ... FAILED\ntest a::three ... ok\ntest a::four ... ignored\n\
                   ---- a::three stdout ----\nSKIPPED: no ip\n\
                   RERUN ALONE: a::two\n\
                   \x20    Running unittests src/lib.rs (/t/debug/deps/turnpike_net-77)\ntest a::one ... FAILED\n";
        let mut outcomes = BTreeMap::new();
        read(log, &mut outcomes);
        let expected = [
            ("turn::a::one", Outcome::Passed),
            ("turn::a::three", Outcome::Skipped),
            ("turn::a::two", Outcome::Failed),
            ("turnpike_net::a::one", Outcome::Failed),
        ];
        let expected = expected.map(|(name, outcome)| (name.to_owned(), outcome));
        assert_eq!(outcomes.clone().into_iter().collect::<Vec<_>>(), expected);
        read("Running x (t/deps/turn-1)\ntest a::two ... ok\n", &mut outcomes);
        assert_eq!(outcomes["turn::a::two"], Outcome::Passed);
    }
}
