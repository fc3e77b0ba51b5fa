//! `cargo xtask attack`: runs the attack tests in full and writes their tables into docs/dev/reliability.md.

mod condense;

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{ExitCode, Stdio},
};

use clap::Args;

use crate::{Failure, INCOMPLETE, document::with_table, program, repository, trials, why_skipped};

#[derive(Args)]
pub(crate) struct Options {
    /// Run only the tests of these modules, such as `newcomers`, and write only tables whose rows all come from them [default: all]
    #[arg(value_name = "MODULE")]
    modules: Vec<String>,

    /// The program to test [default: a release build of this repository]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

struct Table {
    name: &'static str,
    head: &'static str,
    line: &'static str,
    modules: &'static [&'static str],
    condense: fn(&[String]) -> Vec<String>,
}

const TABLES: [Table; 5] = [
    Table {
        name: "peers",
        head: "| data path | request | UDP | TCP | TLS | DTLS | accepted |",
        line: "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        modules: &["matrix", "peers"],
        condense: condense::peers,
    },
    Table {
        name: "strangers",
        head: "| transport | message | variants | unanswered | largest ratio out/in | ratio of all |",
        line: "| --- | --- | ---: | ---: | --- | ---: |",
        modules: &["matrix"],
        condense: <[String]>::to_vec,
    },
    Table {
        name: "kept",
        head: "| unauthenticated clients | count | bytes each | descriptors each | log bytes | limit |",
        line: "| --- | ---: | ---: | ---: | ---: | --- |",
        modules: &["kept"],
        condense: <[String]>::to_vec,
    },
    Table {
        name: "newcomers",
        head: "| client | transport | runs | clients per run | relayed | p50 idle, ms | p50, ms | p99 idle, ms | p99, ms |",
        line: "| --- | --- | ---: | ---: | ---: | --- | --- | --- | --- |",
        modules: &["newcomers"],
        condense: condense::newcomers,
    },
    Table {
        name: "witness",
        head: "| attack | attempts | witness datagrams | lost | UDP p99, us | TCP | TLS | DTLS |",
        line: "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        modules: &["access", "floods", "users", "wire", "witness"],
        condense: condense::witness,
    },
];

impl Table {
    /// True if a run of these modules produces all its rows; an empty list means all modules.
    fn is_asked_for(&self, modules: &[String]) -> bool {
        modules.is_empty() || self.modules.iter().all(|module| modules.iter().any(|asked| asked == module))
    }
}

const DOCUMENT: &str = "docs/dev/reliability.md";
/// Data paths, each with rows of its own in the table of peers. The kernel paths need root, and XDP also needs ethtool.
const DATAPATHS: [&str; 6] = ["basic", "mmsg", "gso", "kernel", "xdp", "xdp-generic"];

/// Runs the tests, and writes each table whose rows were all requested. Fails if a test fails. If no test failed but some could not run on
/// this machine, prints those, leaves the document unchanged, and returns exit code 5.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let root = repository()?;
    let program = program(&root, options.program.as_deref())?;
    let tables: Vec<&Table> = TABLES.iter().filter(|table| table.is_asked_for(&options.modules)).collect();
    let mut child = trials(&root)
        // The tests run in sequence, so that a witness measures only one attack and no other tests.
        .args(["--", "--include-ignored", "--nocapture", "--test-threads", "1"])
        .args(filters(&options.modules))
        .env("TURNPIKE_TEST_ATTACK", "1")
        .env("TURNPIKE_TEST_PROGRAM", program)
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().ok_or("cargo has no output")?;
    let mut said = Said::default();
    for line in BufReader::new(output).lines() {
        let line = line?;
        if !said.take(&line) {
            println!("{line}");
        }
    }
    let status = child.wait()?;
    let document = fs::read_to_string(root.join(DOCUMENT))?;
    let skipped = said.skipped(&tables);
    for table in &tables {
        if let Some(table) = said.table(table) {
            println!("\n{table}");
        }
    }
    if !status.success() {
        return Err("some tests failed, so the tables are not written".into());
    }
    if !skipped.is_empty() {
        for what in skipped {
            println!("skipped: {what}");
        }
        println!("{DOCUMENT} is unchanged, because this run did not include all of its rows");
        return Ok(ExitCode::from(INCOMPLETE));
    }
    let document = said.written_into(&document, &tables)?;
    fs::write(root.join(DOCUMENT), document)?;
    Ok(ExitCode::SUCCESS)
}

fn filters(modules: &[String]) -> Vec<String> {
    match modules {
        [] => vec!["attack::".into()],
        modules => modules.iter().map(|module| format!("attack::{module}::")).collect(),
    }
}

#[derive(Default)]
struct Said {
    rows: BTreeMap<String, Vec<String>>,
    reasons: Vec<String>,
}

impl Said {
    /// Keeps a line that contains a row or the reason for a skip; returns false for other lines, which should be printed.
    fn take(&mut self, line: &str) -> bool {
        if let Some(why) = why_skipped(line) {
            if !self.reasons.iter().any(|known| known == why) {
                self.reasons.push(why.to_owned());
            }
            return false;
        }
        let Some((table, row)) = line.split_once("ATTACK ").and_then(|(_, row)| row.split_once(' ')) else {
            return false;
        };
        let rows = self.rows.entry(table.to_owned()).or_default();
        if !rows.iter().any(|known| known == row) {
            rows.push(row.to_owned());
        }
        true
    }

    fn skipped(&self, tables: &[&Table]) -> Vec<String> {
        let peers = self.rows.get("peers").map_or(&[][..], Vec::as_slice);
        let has = |datapath: &str| peers.iter().any(|row| row.starts_with(&format!("| {datapath} |")));
        let are_asked_for = tables.iter().any(|table| table.name == "peers");
        let missing = DATAPATHS.iter().filter(|datapath| are_asked_for && !has(datapath));
        let missing = missing.map(|datapath| format!("no row for data path {datapath}"));
        let tables = tables.iter().filter(|table| !self.rows.contains_key(table.name));
        let tables = tables.map(|table| format!("no row for table {}", table.name));
        self.reasons.iter().cloned().chain(missing).chain(tables).collect()
    }

    fn table(&self, Table { name, head, line, condense, .. }: &Table) -> Option<String> {
        Some(format!("{head}\n{line}\n{}\n", condense(self.rows.get(*name)?).join("\n")))
    }

    fn written_into(&self, document: &str, tables: &[&Table]) -> Result<String, Failure> {
        tables.iter().try_fold(document.to_owned(), |document, table| {
            let name = table.name;
            let rows = self.table(table).ok_or(format!("no test has printed a row for {name}"))?;
            with_table(&document, name, "cargo xtask attack", &rows)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of a full run without rows of these data paths.
    fn said_without(left_out: &[&str]) -> Said {
        let mut said = Said::default();
        for datapath in DATAPATHS.iter().filter(|datapath| !left_out.contains(datapath)) {
            assert!(
                said.take(&format!(
                    "test attack::a ... ATTACK peers | {datapath} | send | 1 | 1 | 1 | 1 | 0 |"
                ))
            );
            assert!(
                said.take(&format!("ATTACK peers | {datapath}, after a reload | send | 1 | 1 | 1 | 1 | 0 |"))
            );
        }
        for table in ["strangers", "kept", "newcomers", "witness"] {
            assert!(said.take(&format!("ATTACK {table} | a | b |")));
        }
        said
    }

    fn document() -> String {
        let table = |Table { name, .. }: &Table| {
            format!("<!-- {name}: written by cargo xtask attack -->\nold\n<!-- end of {name} -->\n")
        };
        TABLES.iter().map(table).collect()
    }

    fn all() -> Vec<&'static Table> {
        TABLES.iter().collect()
    }

    #[test]
    fn a_run_of_some_modules_writes_only_complete_tables() {
        let named = |modules: &[&str]| -> Vec<&str> {
            let modules: Vec<String> = modules.iter().map(|module| (*module).to_owned()).collect();
            let asked = TABLES.iter().filter(|table| table.is_asked_for(&modules));
            asked.map(|table| table.name).collect()
        };
        assert_eq!(named(&["newcomers"]), ["newcomers"]);
        assert_eq!(named(&["matrix"]), ["strangers"]);
        assert_eq!(named(&["matrix", "peers"]), ["peers", "strangers"]);
        assert_eq!(named(&[]).len(), TABLES.len());

        let newcomers: Vec<&Table> = TABLES.iter().filter(|table| table.name == "newcomers").collect();
        let mut said = Said::default();
        assert!(said.take("ATTACK newcomers | 20 | 200 |"));
        assert_eq!(said.skipped(&newcomers), [""; 0]);
        let written = said.written_into(&document(), &newcomers).expect("the document has the markers");
        assert_eq!(written.matches("old").count(), TABLES.len() - 1, "{written}");
    }

    #[test]
    fn a_full_run_writes_all_tables() {
        let mut said = said_without(&[]);
        assert!(!said.take("test result: ok"));
        // A row that is printed twice is written only once.
        assert!(said.take("ATTACK kept | a | b |"));
        assert_eq!(said.skipped(&all()), [""; 0]);
        let written = said.written_into(&document(), &all()).expect("the document has all markers");
        assert!(written.contains("| all | send |") && !written.contains("old"), "{written}");
        assert_eq!(written.matches("| a | b |").count(), 3, "{written}");
    }

    #[test]
    fn missing_rows_are_reported_with_the_reason() {
        let mut said = said_without(&["xdp", "xdp-generic"]);
        for before in ["", "test attack::b ... ", ".", ".i."] {
            let line = format!("{before}SKIPPED: data paths xdp and xdp-generic: ethtool is not installed");
            assert!(!said.take(&line), "{line}");
            assert_eq!(said.reasons.len(), 1, "{line}");
        }
        let missing = [
            "data paths xdp and xdp-generic: ethtool is not installed",
            "no row for data path xdp",
            "no row for data path xdp-generic",
        ];
        assert_eq!(said.skipped(&all()), missing);
        // A missing row without a reason, and a missing row whose name is a prefix of another row's name.
        assert_eq!(said_without(&["xdp"]).skipped(&all()), ["no row for data path xdp"]);
        assert_eq!(said_without(&["kernel"]).skipped(&all()), ["no row for data path kernel"]);
        assert_eq!(Said::default().skipped(&all()).len(), DATAPATHS.len() + TABLES.len());
    }
}
