//! Test programs with coverage counters and libFuzzer, run at idle priority.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde::Deserialize;

use super::targets::Target;
use crate::Failure;

/// Flags that make bolero link libFuzzer, add coverage counters with a pass of the stable compiler, and disable the relocation of
/// addresses, which the coverage report needs.
const FLAGS: [&str; 8] = [
    "--cfg=fuzzing",
    "--cfg=fuzzing_libfuzzer",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Crelocation-model=static",
];

pub(super) struct Places {
    repository: PathBuf,
    target_dir: PathBuf,
}

#[derive(Deserialize)]
struct Artifact {
    executable: Option<PathBuf>,
    target: ArtifactTarget,
}

#[derive(Deserialize)]
struct ArtifactTarget {
    name: String,
    kind: Vec<String>,
}

impl Places {
    pub(super) fn new(repository: PathBuf) -> Self {
        let target_dir = crate::target(&repository);
        Self { repository, target_dir }
    }

    pub(super) fn repository(&self) -> &Path {
        &self.repository
    }

    pub(super) fn memory(&self, target: &Target) -> PathBuf {
        self.repository.join("fuzz").join(target.name)
    }

    pub(super) fn ledger(&self) -> PathBuf {
        self.repository.join("fuzz/ledger.toml")
    }

    pub(super) fn scratch(&self, target: &Target) -> Result<PathBuf, Failure> {
        let scratch = self.target_dir.join("fuzz").join(target.name);
        fs::create_dir_all(&scratch)?;
        // The path must not contain spaces, which separate libFuzzer's arguments.
        let scratch = scratch.canonicalize()?;
        if scratch.to_string_lossy().contains(' ') {
            return Err(format!(
                "{} has a space in its name, which libFuzzer does not support",
                scratch.display()
            )
            .into());
        }
        Ok(scratch)
    }

    pub(super) fn build(&self, targets: &[&Target]) -> Result<Vec<PathBuf>, Failure> {
        let mut packages: Vec<_> = targets.iter().map(|target| target.package()).collect();
        packages.dedup();
        let mut built = Vec::new();
        for package in packages {
            let programs = targets.iter().filter(|target| target.package() == package);
            let options: BTreeSet<String> = programs.map(|target| target.cargo_option()).collect();
            built.extend(self.cargo_test(&package, &options)?);
        }
        targets.iter().map(|target| program_of(target, &built)).collect()
    }

    /// Builds each package separately, so that packages without TLS do not wait for it.
    fn cargo_test(&self, package: &str, options: &BTreeSet<String>) -> Result<Vec<Artifact>, Failure> {
        let host = host()?;
        let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args([
                "test",
                "--no-run",
                "--locked",
                "--profile=fuzz",
                "--message-format=json-render-diagnostics",
            ])
            // The option --target exempts build scripts and macros, which cannot link libFuzzer, from the flags.
            .args(["--target", &host, "--package", package])
            .args(options)
            .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f"))
            .env_remove("RUSTFLAGS")
            .current_dir(&self.repository)
            .stderr(Stdio::inherit())
            .output()?;
        if !output.status.success() {
            return Err(format!("the fuzz build of {package} failed").into());
        }
        let messages = String::from_utf8_lossy(&output.stdout);
        Ok(messages.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }
}

fn program_of(target: &Target, built: &[Artifact]) -> Result<PathBuf, Failure> {
    let (name, kind) = target.artifact();
    let is_it = |artifact: &&Artifact| {
        artifact.executable.is_some()
            && artifact.target.name == name
            && artifact.target.kind.iter().any(|it| it == kind)
    };
    let artifact = built.iter().find(is_it).and_then(|artifact| artifact.executable.clone());
    artifact.ok_or_else(|| format!("cargo built no program for {}", target.name).into())
}

fn host() -> Result<String, Failure> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("-vV").output().map_err(|error| format!("rustc: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| "`rustc -vV` does not print a host".into())
}

/// Command that runs a target's test in a directory at the lowest priority: SCHED_IDLE if chrt(1) works here.
pub(super) fn command(target: &Target, program: &Path, directory: &Path) -> Command {
    let idle = Command::new("chrt")
        .args(["--idle", "0", "true"])
        .output()
        .is_ok_and(|output| output.status.success());
    let mut command = Command::new("nice");
    command.args(["-n", "19"]);
    if idle {
        command.args(["chrt", "--idle", "0"]);
    }
    command
        .arg(program)
        .args([target.test, "--exact", "--nocapture", "--quiet", "--test-threads", "1"])
        .current_dir(directory)
        // libFuzzer sometimes restarts the program. These variables select the target in the new process.
        .envs([("BOLERO_LIBTEST_HARNESS", "1"), ("BOLERO_TEST_NAME", target.test)]);
    command
}

const MEMORY: &str = "/dev/shm";

/// Command for fuzzing with libFuzzer's arguments. Temporary files go to memory, because some targets write many.
pub(super) fn fuzzing(target: &Target, program: &Path, directory: &Path, arguments: &[String]) -> Command {
    let mut command = command(target, program, directory);
    command.env("TURNPIKE_FUZZ", "1").env("BOLERO_LIBFUZZER_ARGS", arguments.join(" "));
    if Path::new(MEMORY).is_dir() {
        command.env("TMPDIR", MEMORY);
    }
    command
}
