//! `cargo xtask mutants`: breaks one function at a time in `wire`, `turn` and `fleet`, and prints each change that no test of the crate
//! notices. Takes minutes per file, and hours for all files.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use clap::Args;

use crate::{Failure, LIMIT_EXCEEDED, cargo, repository, target};

const VERSION: &str = "27.1.0";
const CRATES: [&str; 3] = ["wire", "turn", "fleet"];

#[derive(Args)]
pub(crate) struct Options {
    /// Files to break, such as crates/fleet/src/lease.rs [default: all of wire, turn and fleet]
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Print the changes without making them
    #[arg(long)]
    list: bool,

    /// Try only one in this many changes, to estimate the score
    #[arg(long, value_name = "N")]
    one_in: Option<u32>,
}

/// Returns exit code 3 if no test notices some change.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let root = repository()?;
    if let Some(missing) = options.files.iter().find(|file| !root.join(file).exists()) {
        return Err(format!("{} does not exist in the repository", missing.display()).into());
    }
    let folder = target(&root).join("mutants");
    fs::create_dir_all(&folder)?;
    let mut mutants = Command::new(installed(&root, &folder)?);
    mutants.current_dir(&root).env_remove("CARGO_TARGET_DIR").args(["mutants", "--no-shuffle", "--output"]);
    mutants.arg(&folder);
    for krate in crates_of(&options.files)? {
        mutants.arg(format!("--package=turnpike-{krate}"));
    }
    for file in &options.files {
        mutants.arg("--file").arg(file);
    }
    if let Some(parts) = options.one_in {
        mutants.arg(format!("--shard=0/{parts}")).arg("--sharding=round-robin");
    }
    if options.list {
        return Ok(if mutants.arg("--list").status()?.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    // Doc tests check the documentation, not the code.
    let status = mutants.args(["--", "--lib", "--tests"]).status()?;
    let found = Found::read(&folder.join("mutants.out"))?;
    println!("{}", found.score());
    found.missed.iter().for_each(|mutant| println!("survives: {mutant}"));
    match status.code() {
        Some(0) => Ok(ExitCode::SUCCESS),
        // Exit codes of cargo-mutants: some changes were missed, or there were only timeouts, which count as noticed.
        Some(2 | 3) if found.missed.is_empty() => Ok(ExitCode::SUCCESS),
        Some(2) => Ok(ExitCode::from(LIMIT_EXCEEDED)),
        _ => Err("the tests fail without any change, or cargo-mutants does not work here".into()),
    }
}

fn crates_of(files: &[PathBuf]) -> Result<BTreeSet<&'static str>, Failure> {
    let owner = |file: &PathBuf| {
        let owner = CRATES.into_iter().find(|krate| file.starts_with(Path::new("crates").join(krate)));
        owner.ok_or_else(|| format!("{} is not a file in {}", file.display(), CRATES.join(", ")).into())
    };
    if files.is_empty() { Ok(CRATES.into()) } else { files.iter().map(owner).collect() }
}

fn installed(root: &Path, folder: &Path) -> Result<PathBuf, Failure> {
    let tools = folder.join(VERSION);
    let program = tools.join("bin/cargo-mutants");
    if !program.is_file() {
        println!("installing cargo-mutants {VERSION}");
        let status = cargo(root)
            .args(["install", "--quiet", "--locked", "--version", VERSION, "cargo-mutants", "--root"])
            .arg(&tools)
            .arg("--target-dir")
            .arg(folder.join("build"))
            // cargo-mutants itself computes little, so it need not be optimised.
            .envs([("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"), ("CARGO_PROFILE_RELEASE_LTO", "off")])
            .envs([("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"), ("CARGO_PROFILE_RELEASE_DEBUG", "0")])
            .status()?;
        if !status.success() {
            return Err("cargo-mutants is not installed, and cargo could not install it (no network?)".into());
        }
        let _ = fs::remove_dir_all(folder.join("build"));
    }
    Ok(program)
}

struct Found {
    missed: Vec<String>,
    caught: usize,
    timeouts: usize,
    unviable: usize,
}

impl Found {
    fn read(folder: &Path) -> Result<Self, Failure> {
        let lines = |name: &str| -> Result<Vec<String>, Failure> {
            Ok(fs::read_to_string(folder.join(name))?.lines().map(str::to_owned).collect())
        };
        Ok(Self {
            missed: lines("missed.txt")?,
            caught: lines("caught.txt")?.len(),
            timeouts: lines("timeout.txt")?.len(),
            unviable: lines("unviable.txt")?.len(),
        })
    }

    fn score(&self) -> String {
        let noticed = self.caught + self.timeouts;
        let viable = noticed + self.missed.len();
        let percent = 100 * noticed / viable.max(1);
        format!(
            "{noticed} of {viable} changes were noticed ({percent} %), {} of them by a timeout; {} did not compile",
            self.timeouts, self.unviable
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crate_of_a_file_is_found() {
        let of = |files: &[&str]| crates_of(&files.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(of(&[]).unwrap().len(), CRATES.len());
        let files = ["crates/turn/src/client/mod.rs", "crates/fleet/src/lease.rs", "crates/turn/src/lib.rs"];
        assert_eq!(of(&files).unwrap(), BTreeSet::from(["fleet", "turn"]));
        assert!(of(&["crates/net/src/rx.rs"]).is_err());
    }

    #[test]
    fn the_score_ignores_changes_that_do_not_compile() {
        let found = Found { missed: vec!["a".to_owned()], caught: 8, timeouts: 1, unviable: 5 };
        assert_eq!(
            found.score(),
            "9 of 10 changes were noticed (90 %), 1 of them by a timeout; 5 did not compile"
        );
    }
}
