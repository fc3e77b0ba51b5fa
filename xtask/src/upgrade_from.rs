//! `cargo xtask upgrade-from`: upgrades a server and a forwarder under load from an earlier build to this one, back, and again. The earlier
//! build is a given program, such as the last release, or is built from its commit in a separate work tree. Most crates are the same in
//! both, so cargo reuses them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use clap::Args;

use crate::{Failure, INCOMPLETE, cargo, repository, target, trials, why_skipped};

#[derive(Args)]
pub(crate) struct Options {
    /// Program to upgrade from, or the commit or tag to build it from
    #[arg(value_name = "FILE|COMMIT")]
    previous: String,

    /// The program to upgrade to [default: a debug build of this repository]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Runs the tests. Exit code 5 if none failed but at least one could not run here.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let root = repository()?;
    let previous = match Path::new(&options.previous) {
        file if file.is_file() => file.to_owned(),
        _ => built_from(&root, &options.previous)?,
    };
    let next = match &options.program {
        Some(program) => program.clone(),
        None => build(&root, &target(&root))?,
    };
    // The sandbox lets programs in this directory be executed.
    let folder = target(&root).join("upgrade");
    fs::create_dir_all(&folder)?;
    let [previous, next] = [("previous", previous), ("next", next)].map(|(name, program)| {
        let copy = folder.join(name);
        fs::copy(&program, &copy).map(|_| copy).map_err(|why| format!("{}: {why}", program.display()))
    });
    let (previous, next) = (previous?, next?);
    let output = trials(&root)
        .args(["--", "upgrade_from::", "--include-ignored", "--nocapture", "--test-threads=1"])
        .env("TURNPIKE_TEST_PROGRAM", previous)
        .env("TURNPIKE_TEST_NEXT_BUILD", next)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}");
    if !output.status.success() {
        return Err(format!("an upgrade from {} to this build, or back, failed", options.previous).into());
    }
    Ok(if said.lines().any(|line| why_skipped(line).is_some()) {
        ExitCode::from(INCOMPLETE)
    } else {
        ExitCode::SUCCESS
    })
}

/// Builds the program of this commit in a separate work tree and keeps its build cache.
fn built_from(root: &Path, commit: &str) -> Result<PathBuf, Failure> {
    let folder = target(root).join("previous");
    let tree = folder.join("source");
    let git = |arguments: &[&str]| Command::new("git").current_dir(root).args(arguments).status();
    let _ = Command::new("git").current_dir(root).args(["worktree", "remove", "--force"]).arg(&tree).output();
    let path = tree.to_str().ok_or("a path that is not UTF-8")?;
    if !git(&["worktree", "add", "--quiet", "--detach", path, commit])?.success() {
        return Err(format!("{commit} cannot be checked out").into());
    }
    let built = build(&tree, &folder.join("target"));
    git(&["worktree", "remove", "--force", path])?;
    built
}

/// Builds with the features that cargo unifies for tests, which are already compiled.
fn build(tree: &Path, target: &Path) -> Result<PathBuf, Failure> {
    let built = cargo(tree)
        .args(["test", "--workspace", "--locked", "--no-run", "--test=command_line"])
        .env("CARGO_TARGET_DIR", target)
        .status()?;
    if built.success() {
        Ok(target.join("debug/turnpike"))
    } else {
        Err(format!("{} cannot be built", tree.display()).into())
    }
}
