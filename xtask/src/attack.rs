//! `cargo xtask attack`: runs the tests of what attackers get, thoroughly, and writes their tables into docs/reliability.md.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{ExitCode, Stdio},
};

use clap::Args;

use crate::{Failure, document::with_table, end_to_end, program, repository};

#[derive(Args)]
pub(crate) struct Options {
    /// Only print the tables
    #[arg(long)]
    dry: bool,

    /// The program to test [default: a release build of this repository]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Names of the tables in the output of the tests, and the heads that they have.
const TABLES: [(&str, &str, &str); 4] = [
    (
        "peers",
        "| data path | way in | UDP | TCP | TLS | DTLS | let in |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ),
    (
        "strangers",
        "| transport | message | variants | not answered | most bytes out per byte in | of all together |",
        "| --- | --- | ---: | ---: | --- | ---: |",
    ),
    (
        "kept",
        "| of strangers | how many | bytes kept of each | descriptors of each | bytes of log | bound |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ),
    (
        "witness",
        "| attack on the worker | so often | datagrams of the witnesses | lost | p99 of a round trip by UDP (us) | TCP | TLS | DTLS |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ),
];
const DOCUMENT: &str = "docs/reliability.md";

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let root = repository()?;
    let program = program(&root, options.program.as_deref())?;
    let mut child = end_to_end(&root)
        .arg("attack::")
        // One after the other: that a witness loses nothing is said of an attack, not of other tests.
        .args(["--", "--nocapture", "--test-threads", "1"])
        .env("TURNPIKE_TEST_ATTACK", "1")
        .env("TURNPIKE_TEST_PROGRAM", program)
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().ok_or("cargo has no output")?;
    let mut rows: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in BufReader::new(output).lines() {
        let line = line?;
        // What a test says first may stand behind its name.
        match line
            .find("ATTACK ")
            .map(|at| &line[at + "ATTACK ".len()..])
            .and_then(|rest| rest.split_once(' '))
        {
            Some((table, row)) => {
                let rows = rows.entry(table.to_owned()).or_default();
                if !rows.iter().any(|known| known == row) {
                    rows.push(row.to_owned());
                }
            }
            None => println!("{line}"),
        }
    }
    let status = child.wait()?;
    let mut document = fs::read_to_string(root.join(DOCUMENT))?;
    for (name, head, line) in TABLES {
        let Some(rows) = rows.get(name) else {
            return Err(format!("no test has printed a row of {name}").into());
        };
        let table = format!("{head}\n{line}\n{}\n", rows.join("\n"));
        println!("\n{table}");
        document = with_table(&document, name, "cargo xtask attack", &table)?;
    }
    if !status.success() {
        return Err("some tests failed: the tables are not written".into());
    }
    if !options.dry {
        fs::write(root.join(DOCUMENT), document)?;
    }
    Ok(ExitCode::SUCCESS)
}
