//! Programs for the guests: a release build and the kernel-dependent tests.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use super::{machine::pack, report::PATHS, toolchain::Toolchain};
use crate::{Failure, debian::said};

pub(super) const CRATES: [&str; 4] = ["net", "offload", "relay", "forward"];

pub(super) struct Tests {
    pub(super) name: String,
    pub(super) program: PathBuf,
    pub(super) dir: PathBuf,
}

pub(super) fn build_tests(toolchain: &Toolchain<'_>, crates: &[&str]) -> Result<Vec<Tests>, Failure> {
    let built = said(
        toolchain
            .cargo()?
            .args(["test", "--locked", "--no-run", "--lib"])
            .arg("--message-format=json-render-diagnostics")
            .args(toolchain.packages(crates))
            .args(crates.iter().flat_map(|name| ["--test", name])),
    )?;
    Ok(built.lines().filter_map(|message| test_program(message, crates)).collect())
}

pub(super) fn archive(
    folder: &Path,
    repository: &Path,
    toolchain: &Toolchain<'_>,
    program: &Path,
    tests: &[Tests],
) -> Result<PathBuf, Failure> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    let trial = folder.join("trial");
    fs::create_dir_all(trial.join("tests"))?;
    fs::create_dir_all(folder.join("usr/local/bin"))?;
    fs::write(folder.join("init"), include_str!("init.sh"))?;
    said(Command::new("chmod").arg("+x").arg(folder.join("init")))?;
    let paths: String = PATHS.iter().map(|path| format!("{}\n", path.name)).collect();
    fs::write(trial.join("paths"), paths)?;
    toolchain.strip(program, &folder.join("usr/local/bin/turnpike"))?;
    for test in tests {
        toolchain.strip(&test.program, &trial.join("tests").join(&test.name))?;
        let at = test.dir.to_str().ok_or("a path that is not UTF-8")?;
        fs::write(trial.join("tests").join(format!("{}.dir", test.name)), at)?;
        fs::create_dir_all(folder.join(test.dir.strip_prefix("/")?))?;
    }
    // Files that tests read: the eBPF object and inputs of fuzz targets.
    let mut files = Command::new("git");
    files.args(["ls-files", "-z", "fuzz", "crates/offload/bpf"]).current_dir(repository);
    for name in said(&mut files)?.split_terminator('\0') {
        let from = repository.join(name);
        let to = folder.join(from.strip_prefix("/")?);
        fs::create_dir_all(to.parent().ok_or("a file without a folder")?)?;
        fs::copy(from, to)?;
    }
    let archive = folder.with_extension("cpio");
    pack(folder, &archive)?;
    Ok(archive)
}

fn test_program(message: &str, crates: &[&str]) -> Option<Tests> {
    let message: Value = serde_json::from_str(message).ok()?;
    let program = message["executable"].as_str()?;
    let dir = Path::new(message["manifest_path"].as_str()?).parent()?;
    let name = crates.iter().find(|name| dir.ends_with(Path::new("crates").join(name)))?;
    let kind = message["target"]["kind"][0].as_str()?;
    let name = if kind == "test" { (*name).to_owned() } else { format!("{name}-unit") };
    Some(Tests { name, program: program.into(), dir: dir.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kernel_dependent_crates_have_test_programs() {
        let message = |name: &str, kind: &str| {
            let message = serde_json::json!({
                "executable": "/t/a-1",
                "manifest_path": format!("/r/crates/{name}/Cargo.toml"),
                "target": { "kind": [kind] },
            });
            test_program(&message.to_string(), &CRATES).map(|it| it.name)
        };
        assert_eq!(message("net", "test").as_deref(), Some("net"));
        assert_eq!(message("relay", "lib").as_deref(), Some("relay-unit"));
        assert_eq!(message("wire", "lib"), None);
    }
}
