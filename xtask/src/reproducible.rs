//! `cargo xtask reproducible`: builds the binary of a release in two directories of different names and compares the bytes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use clap::Args;

use crate::{Failure, repository};

#[derive(Args)]
pub(crate) struct Options {
    /// Where to build; some gigabytes, which are removed afterwards
    #[arg(long, default_value = "target/reproducible")]
    dir: PathBuf,
}

/// Of different lengths, so that no path fits into the place of the other.
const PLACES: [&str; 2] = ["a", "another/place"];

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let root = repository()?;
    let dir = root.join(&options.dir);
    let mut built = Vec::new();
    for place in PLACES {
        let tree = dir.join(place);
        copy_of_the_tree(&root, &tree)?;
        println!("building in {}", tree.display());
        let target = tree.join("target");
        let status = Command::new(tree.join("deploy/build"))
            .current_dir(&tree)
            .env("CARGO_TARGET_DIR", &target)
            .status()?;
        if !status.success() {
            return Err(format!("the build in {} failed", tree.display()).into());
        }
        built.push(fs::read(target.join("release/turnpike"))?);
        fs::remove_dir_all(&tree)?;
    }
    let same = built[0] == built[1];
    println!(
        "{} bytes, {} bytes: {}",
        built[0].len(),
        built[1].len(),
        if same { "the same" } else { "different" }
    );
    if !same {
        let first = built[0].iter().zip(&built[1]).position(|(one, other)| one != other);
        println!("they differ from byte {} on", first.unwrap_or_else(|| built[0].len().min(built[1].len())));
    }
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What git knows of, as it lies here.
fn copy_of_the_tree(root: &Path, to: &Path) -> Result<(), Failure> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output()?;
    if !listed.status.success() {
        return Err("git does not know this tree".into());
    }
    for name in String::from_utf8(listed.stdout)?.split_terminator('\0') {
        let (from, to) = (root.join(name), to.join(name));
        // A file that has been removed, but not committed so.
        if !from.is_file() {
            continue;
        }
        fs::create_dir_all(to.parent().ok_or("a file without a directory")?)?;
        fs::copy(&from, &to)?;
    }
    Ok(())
}
