//! `cargo xtask fuzz`: fuzzes targets, keeps new inputs, and records the cost. docs/dev/reliability.md has the results,
//! CONTRIBUTING.md the instructions.

mod corpus;
mod coverage;
mod ledger;
mod program;
mod report;
mod targets;

use std::{fs, path::Path, process::ExitCode};

use clap::Args;

use self::{
    program::{Places, fuzzing},
    targets::{TARGETS, Target},
};
use crate::{Failure, repository};

/// Maximum time per input in seconds, and maximum memory of the program in megabytes.
const TIMEOUT: u32 = 20;
const MEMORY: u32 = 1500;
const MINIMISE: u32 = 60;

/// Directories of a target: committed inputs, the working corpus, and the result of a merge.
const KNOWN: &str = "known";
const CORPUS: &str = "corpus";
const MERGED: &str = "merged";

#[derive(Args)]
pub(crate) struct Options {
    /// Targets to fuzz in sequence [default: all]
    targets: Vec<String>,
    /// Minutes per target
    #[arg(long, default_value_t = 1, value_name = "N")]
    minutes: u32,
    /// Instead of fuzzing, measure the code that committed inputs reach, and write the coverage and the cost into docs/dev/reliability.md
    #[arg(long, conflicts_with = "minutes")]
    coverage: bool,
    /// List the targets
    #[arg(long)]
    list: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let places = Places::new(repository()?);
    if options.list {
        TARGETS.iter().for_each(|target| println!("{:<16} {}", target.name, target.holds));
        return Ok(ExitCode::SUCCESS);
    }
    let chosen: Vec<&Target> = if options.targets.is_empty() {
        TARGETS.iter().collect()
    } else {
        options.targets.iter().map(|name| targets::named(name)).collect::<Result<_, _>>()?
    };
    let programs = places.build(&chosen)?;
    if options.coverage {
        return report::write(&places, &chosen, &programs);
    }
    let mut faults = 0;
    for (target, program) in chosen.iter().zip(&programs) {
        faults += fuzz(&places, target, program, options.minutes)?;
    }
    if faults == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "\nFaults found: {faults}. The inputs are in fuzz/, and the targets' tests fail until they are fixed."
    );
    Ok(ExitCode::FAILURE)
}

/// Fuzzes one target and keeps its new inputs; returns the number of faults.
fn fuzz(places: &Places, target: &Target, program: &Path, minutes: u32) -> Result<usize, Failure> {
    let scratch = places.scratch(target)?;
    if corpus::unpack(places, target, program, KNOWN)?.is_none() {
        println!("{:<16} SKIPPED: its test cannot run here", target.name);
        return Ok(0);
    }
    let corpus = scratch.join(CORPUS);
    fs::create_dir_all(&corpus)?;
    let artifacts = scratch.join("artifacts");
    let _ = fs::remove_dir_all(&artifacts);
    fs::create_dir_all(&artifacts)?;

    let before = ledger::children_cpu()?;
    let log = scratch.join("log");
    let arguments = [
        format!("-max_total_time={}", 60 * minutes),
        format!("-max_len={}", target.max_len),
        format!("-timeout={TIMEOUT}"),
        format!("-rss_limit_mb={MEMORY}"),
        "-artifact_prefix=artifacts/".to_owned(),
        "-print_final_stats=1".to_owned(),
        CORPUS.to_owned(),
        KNOWN.to_owned(),
    ];
    let output = fs::File::create(&log)?;
    let status =
        fuzzing(target, program, &scratch, &arguments).stdout(output.try_clone()?).stderr(output).status()?;
    let said = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let executions = executions(&said);
    let faults = keep_faults(places, target, program, &said)?;
    let has_told_why = fs::read_dir(&artifacts)?.next().is_some();
    if !status.success() && !has_told_why {
        return Err(format!(
            "{} exited without reporting a fault ({status}): {}",
            target.name,
            log.display()
        )
        .into());
    }
    let merged = scratch.join(MERGED);
    let _ = fs::remove_dir_all(&merged);
    fs::create_dir_all(&merged)?;
    corpus::copy_given(&scratch.join(KNOWN), &merged)?;
    let found = coverage::merge(target, program, &scratch, MERGED, &[CORPUS, KNOWN])?.found;
    let kept = corpus::keep(places, target, &found)?;
    fs::remove_dir_all(&corpus)?;
    fs::rename(merged, &corpus)?;
    let spent = ledger::children_cpu()?.saturating_sub(before);
    ledger::add(&places.ledger(), target.name, spent, executions)?;
    println!(
        "{:<16} {executions} executions in {} s of CPU time, inputs kept: {kept}, faults: {faults}",
        target.name,
        spent.as_secs()
    );
    Ok(faults)
}

fn executions(log: &str) -> u64 {
    let told = log.lines().filter_map(|line| {
        let exact = line.strip_prefix("stat::number_of_executed_units:").map(str::trim);
        exact.or_else(|| line.strip_prefix('#')?.split_whitespace().next())?.parse().ok()
    });
    told.max().unwrap_or(0)
}

/// Shrinks and stores the input of each fault with its message; returns their number.
fn keep_faults(places: &Places, target: &Target, program: &Path, log: &str) -> Result<usize, Failure> {
    let scratch = places.scratch(target)?;
    let mut faults = 0;
    for entry in fs::read_dir(scratch.join("artifacts"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        // A slow input is not a fault; libFuzzer only reports it.
        if name.starts_with("slow-unit") {
            continue;
        }
        let artifact = format!("artifacts/{name}");
        // A timeout is not necessarily a fault: the machine may have been busy or suspended.
        if name.starts_with("timeout") {
            let again = [format!("-timeout={TIMEOUT}"), artifact.clone()];
            if fuzzing(target, program, &scratch, &again).output()?.status.success() {
                println!("{:<16} an input took more than {TIMEOUT} s, but less when repeated", target.name);
                continue;
            }
        }
        faults += 1;
        if name.starts_with("crash") {
            let arguments = [
                "-minimize_crash=1".to_owned(),
                format!("-max_total_time={MINIMISE}"),
                "-exact_artifact_path=smaller".to_owned(),
                artifact.clone(),
            ];
            let _ = fs::remove_file(scratch.join("smaller"));
            fuzzing(target, program, &scratch, &arguments).output()?;
        }
        let smaller = fs::read(scratch.join("smaller")).ok().filter(|_| name.starts_with("crash"));
        let input = smaller.map_or_else(|| fs::read(scratch.join(&artifact)), Ok)?;
        let why = reason(log).unwrap_or_else(|| name.clone());
        corpus::add_fault(&places.memory(target).join(corpus::FAULTS), &why, &input)?;
        println!("{:<16} FAULT {why}", target.name);
    }
    Ok(faults)
}

fn reason(log: &str) -> Option<String> {
    let mut lines = log.lines();
    let at = lines.by_ref().find(|line| line.contains("panicked at") || line.contains("ERROR: libFuzzer"))?;
    let next = lines.next().unwrap_or_default();
    let told = if at.contains("panicked at") { format!("{at} {next}") } else { at.to_owned() };
    let told: String = told.chars().filter(|c| !c.is_control()).collect();
    let told: Vec<_> = told.split(' ').map(without_machine).collect();
    Some(told.join(" ").chars().take(300).collect())
}

/// Shortens machine-specific paths: to the path from the package's directory, or else to the file's name.
fn without_machine(word: &str) -> String {
    let path = word.trim_start_matches(['"', '\'', '(']);
    let quote = &word[..word.len() - path.len()];
    if !path.starts_with('/') {
        return word.to_owned();
    }
    let package = path.split_once("/registry/src/").and_then(|(_, rest)| rest.split_once('/'));
    let (_, rest) = package.or_else(|| path.rsplit_once('/')).unwrap_or_default();
    format!("{quote}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_execution_count_is_used() {
        assert_eq!(
            executions("#2\tINITED\n#1024\tpulse  cov: 3\nstat::number_of_executed_units: 2000\n"),
            2000
        );
        assert_eq!(executions("#2\tINITED\n#1024\tpulse  cov: 3\n"), 1024);
        assert_eq!(executions("nothing"), 0);
    }

    #[test]
    fn faults_are_described_by_their_panic() {
        let log = "#2 INITED\nthread 'x' panicked at crates/wire/src/a.rs:1:2:\nbyte 7\nnote: run\n";
        assert_eq!(reason(log).as_deref(), Some("thread 'x' panicked at crates/wire/src/a.rs:1:2: byte 7"));
        assert_eq!(
            reason("==1== ERROR: libFuzzer: timeout after 20 seconds\n").as_deref(),
            Some("==1== ERROR: libFuzzer: timeout after 20 seconds")
        );
    }

    #[test]
    fn the_description_of_a_fault_is_independent_of_the_machine() {
        let log = "thread 'x' panicked at /home/me/registry/src/host-1/toml-1.0/src/a.rs:1:2:\nno file \"/home/me/x.toml\"\n";
        assert_eq!(
            reason(log).as_deref(),
            Some("thread 'x' panicked at toml-1.0/src/a.rs:1:2: no file \"x.toml\"")
        );
    }

    #[test]
    fn targets_and_input_folders_match() {
        let mut names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TARGETS.len());
        let memory = repository().expect("a repository").join("fuzz");
        for entry in fs::read_dir(memory)
            .expect("the folder is committed")
            .flatten()
            .filter(|entry| entry.path().is_dir())
        {
            let name = entry.file_name();
            assert!(names.iter().any(|known| *known == name), "no target replays {name:?}");
        }
    }
}
