//! Compilers for guest programs: the current ones, or Debian's for a different architecture.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use super::{
    architecture::Architecture,
    debian::{Mirror, Suite, said},
};
use crate::{Failure, cargo, program};

/// Debian's Rust and C compilers for arm64, with the programs that they and cargo start.
const PACKAGES: [&str; 8] = [
    "cargo",
    "rustc",
    "gcc",
    "coreutils",
    "dash",
    "gcc-aarch64-linux-gnu",
    "libc6-dev-arm64-cross",
    "libstd-rust-dev:arm64",
];

/// Runs a program in the root `$0` and the folder `$1`; `$1`, `$2` and `$3` are bind-mounted from outside. The mounts disappear with the
/// program.
const INSIDE: &str = r#"
for folder in "$1" "$2" "$3" /proc /dev; do
  mkdir -p "$0$folder"
  mount --bind "$folder" "$0$folder"
done
folder=$1
shift 3
exec chroot "$0" /usr/bin/env --chdir="$folder" "$@"
"#;

pub(super) struct Toolchain<'a> {
    architecture: &'static Architecture,
    repository: &'a Path,
    dir: &'a Path,
    root: Option<PathBuf>,
}

impl<'a> Toolchain<'a> {
    /// Prepares the compilers, and vendors crates if they must be built without a network.
    pub(super) fn of(
        architecture: &'static Architecture,
        repository: &'a Path,
        dir: &'a Path,
        mirror: &Mirror,
    ) -> Result<Self, Failure> {
        let mut toolchain = Self { architecture, repository, dir, root: None };
        if let Some(suite) = architecture.suite {
            let root = dir.join(format!("toolchain-{suite}-{}", architecture.debian));
            let linker = root.join("usr/bin/cc");
            if !linker.is_symlink() {
                let architectures = ["amd64", architecture.debian];
                let packages = Suite::open(root.with_extension("apt"), mirror, suite, &architectures)?;
                packages.unpack_with_dependencies(&PACKAGES, &root)?;
                fs::create_dir_all(root.join("tmp"))?;
                // The package's installation script would create this link, but it is not run.
                symlink("gcc", linker)?;
            }
            said(cargo(repository).args(["fetch", "--locked"]))?;
            toolchain.root = Some(root);
        }
        Ok(toolchain)
    }

    pub(super) fn is_across(&self) -> bool {
        self.root.is_some()
    }

    pub(super) fn release(&self, named: Option<&Path>) -> Result<PathBuf, Failure> {
        if self.root.is_none() || named.is_some() {
            return program(self.repository, named);
        }
        let words = ["build", "--release", "--locked", "--package=turnpike-cli", "--bin=turnpike"];
        said(self.cargo()?.args(words))?;
        Ok(self.built().join(self.architecture.target).join("release/turnpike"))
    }

    pub(super) fn cargo(&self) -> Result<Command, Failure> {
        let Some(root) = &self.root else { return Ok(cargo(self.repository)) };
        let mut cargo = self.inside(root, "cargo")?;
        let compiler = "aarch64-linux-gnu-gcc";
        cargo
            .env("CARGO_BUILD_TARGET", self.architecture.target)
            .env("CARGO_TARGET_DIR", self.built())
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", compiler)
            .env("CC_aarch64_unknown_linux_gnu", compiler)
            .env("CARGO_NET_OFFLINE", "true")
            // Guests get programs without debug symbols.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0");
        Ok(cargo)
    }

    /// Packages to build for the tests of these crates. This machine's compiler builds the whole workspace, because `./test` has already
    /// compiled it with these features.
    pub(super) fn packages(&self, crates: &[&str]) -> Vec<String> {
        match self.root {
            None => vec!["--workspace".to_owned()],
            Some(_) => crates.iter().map(|name| format!("--package=turnpike-{name}")).collect(),
        }
    }

    pub(super) fn strip(&self, program: &Path, to: &Path) -> Result<(), Failure> {
        let mut strip = match &self.root {
            None => Command::new("strip"),
            Some(root) => self.inside(root, "aarch64-linux-gnu-strip")?,
        };
        said(strip.arg("-o").arg(to).arg(program)).map(drop)
    }

    fn built(&self) -> PathBuf {
        self.dir.join(format!("target-{}", self.architecture.debian))
    }

    fn inside(&self, root: &Path, program: &str) -> Result<Command, Failure> {
        let cargo_home = match env::var_os("CARGO_HOME") {
            Some(home) => home.into(),
            None => env::home_dir().ok_or("there is no home directory")?.join(".cargo"),
        };
        let mut command = Command::new("unshare");
        command.args(["--mount", "bash", "-euc", INSIDE]).arg(root);
        command.args([self.repository, self.dir, &cargo_home]).arg(program);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("CARGO_HOME", cargo_home);
        Ok(command)
    }
}
