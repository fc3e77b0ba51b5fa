//! `cargo xtask prose`: counts phrases that make prose hard to read, per file, against a budget that may only decrease.

mod budget;
mod phrases;
mod source;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use clap::Args;

use crate::{Failure, repository};
use budget::Budget;
use phrases::Finding;
pub(crate) use source::outside_code_blocks;

const BUDGET: &str = "tests/prose.tsv";

#[derive(Args)]
pub(crate) struct Options {
    /// List every finding in these files and directories instead of comparing with the budget
    paths: Vec<PathBuf>,

    /// Lower the budget to the current counts
    #[arg(long, conflicts_with = "paths")]
    update: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let root = repository()?;
    let found = findings(&root)?;
    if !options.paths.is_empty() {
        list(&found, &options.paths);
        return Ok(ExitCode::SUCCESS);
    }
    let counts: BTreeMap<String, usize> =
        found.iter().map(|(path, found)| (path.clone(), found.len())).collect();
    let total: usize = counts.values().sum();
    let place = root.join(BUDGET);
    let mut budget = match fs::read_to_string(&place) {
        Ok(text) => Budget::parse(&text)?,
        // If the file is missing, the current counts become the budget. This is not a loophole, because review would notice a deleted
        // file.
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => Budget(counts.clone()),
        Err(why) => return Err(why.into()),
    };
    if options.update {
        budget.lower(&counts);
        fs::write(&place, budget.to_string())?;
    }
    let mistakes = budget.compare(&counts);
    for mistake in &mistakes {
        println!("{mistake}");
        if mistake.count > mistake.allowed {
            let path = &mistake.path;
            found[path].iter().for_each(|finding| println!("  {path}:{finding}"));
        }
    }
    println!("phrases: {total} in {} files, budget {}", counts.len(), budget.total());
    Ok(if mistakes.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn list(found: &BTreeMap<String, Vec<Finding>>, paths: &[PathBuf]) {
    let mut count = 0;
    let is_below = |path: &str, it: &Path| Path::new(path).starts_with(it.strip_prefix(".").unwrap_or(it));
    for (path, found) in found.iter().filter(|(path, _)| paths.iter().any(|it| is_below(path, it))) {
        found.iter().for_each(|finding| println!("{path}:{finding}"));
        count += found.len();
    }
    println!("phrases: {count}");
}

/// Findings by path relative to `root`, excluding files without findings.
fn findings(root: &Path) -> Result<BTreeMap<String, Vec<Finding>>, Failure> {
    let mut all = BTreeMap::new();
    for path in tracked_files(root)? {
        let Some(kind) = source::Kind::of(&path) else { continue };
        // Skip a file that is deleted but still in Git's index.
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        let found = kind.findings(&text).map_err(|why| format!("{path}: {why}"))?;
        if !found.is_empty() {
            all.insert(path, found);
        }
    }
    Ok(all)
}

/// Files in Git's index, and new files that it does not ignore.
pub(crate) fn tracked_files(root: &Path) -> Result<Vec<String>, Failure> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()?;
    if !output.status.success() {
        return Err(format!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let mut files: Vec<String> = String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect();
    files.sort();
    files.dedup();
    Ok(files)
}
