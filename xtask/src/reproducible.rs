//! `cargo xtask reproducible`: builds the release binary in two directories with different names and compares the bytes. Keeps both builds
//! if they differ.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use clap::Args;

use crate::{Failure, prose::tracked_files, repository, static_build::Compilers};

#[derive(Args)]
pub(crate) struct Options {
    /// Directory for the builds; needs some gigabytes and is removed afterwards
    #[arg(long, default_value = "target/reproducible")]
    dir: PathBuf,
}

/// Directories whose names differ in length, so that a path left in the binary also shifts the bytes after it.
const PLACES: [&str; 2] = ["a", "another/place"];

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let root = repository()?;
    let dir = root.join(&options.dir);
    let trees = PLACES.map(|place| dir.join(place));
    // Makes both copies, with the same timestamp, before building, because the tree may change in the meantime.
    for tree in &trees {
        copy_of_the_tree(&root, tree)?;
    }
    let compilers = Compilers::of_this_machine(&root)?;
    let mut built = Vec::new();
    for (tree, kept) in trees.into_iter().zip(["one", "other"]) {
        println!("building in {}", tree.display());
        let program = compilers.build(&tree, &tree.join("target"), &[])?;
        let kept = dir.join(kept);
        fs::rename(program, &kept)?;
        fs::remove_dir_all(&tree)?;
        Command::new("sha256sum").arg(&kept).status()?;
        built.push(kept);
    }
    let [one, other] = [fs::read(&built[0])?, fs::read(&built[1])?];
    if one == other {
        println!("both builds have the same {} bytes", one.len());
        fs::remove_dir_all(&dir)?;
        return Ok(ExitCode::SUCCESS);
    }
    let first = one.iter().zip(&other).position(|(one, other)| one != other);
    println!("{} and {} bytes, first difference at byte {first:?}", one.len(), other.len());
    Ok(ExitCode::FAILURE)
}

/// Copies all files of the repository, including uncommitted changes.
fn copy_of_the_tree(root: &Path, to: &Path) -> Result<(), Failure> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    for name in tracked_files(root)? {
        let (from, to) = (root.join(&name), to.join(&name));
        if !from.is_file() {
            continue;
        }
        fs::create_dir_all(to.parent().ok_or("a file without a directory")?)?;
        fs::copy(&from, &to)?;
    }
    Ok(())
}
