//! Compilers for guest programs: the current ones, or Debian's for a different architecture.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::architecture::Architecture;
use crate::{Failure, builder::Builder, cargo, debian::said, program};

pub(super) struct Toolchain<'a> {
    architecture: &'static Architecture,
    repository: &'a Path,
    dir: &'a Path,
    builder: Option<Builder>,
}

impl<'a> Toolchain<'a> {
    /// Prepares Debian's compilers if the guests' file system is of another suite.
    pub(super) fn of(
        architecture: &'static Architecture,
        repository: &'a Path,
        dir: &'a Path,
    ) -> Result<Self, Failure> {
        let builder = architecture.suite.map(|_| Builder::prepare(repository)).transpose()?;
        Ok(Self { architecture, repository, dir, builder })
    }

    pub(super) fn is_across(&self) -> bool {
        self.builder.is_some()
    }

    pub(super) fn release(&self, named: Option<&Path>) -> Result<PathBuf, Failure> {
        if self.builder.is_none() || named.is_some() {
            return program(self.repository, named);
        }
        let words = ["build", "--release", "--locked", "--package=turnpike-cli", "--bin=turnpike"];
        said(self.cargo()?.args(words))?;
        Ok(self.built().join(self.architecture.target).join("release/turnpike"))
    }

    pub(super) fn cargo(&self) -> Result<Command, Failure> {
        let Some(builder) = &self.builder else { return Ok(cargo(self.repository)) };
        let mut cargo = builder.command(&[self.repository, self.dir], "cargo")?;
        let compiler = "aarch64-linux-gnu-gcc";
        cargo
            .env("CARGO_BUILD_TARGET", self.architecture.target)
            .env("CARGO_TARGET_DIR", self.built())
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", compiler)
            .env("CC_aarch64_unknown_linux_gnu", compiler)
            // Guests get programs without debug symbols.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0");
        Ok(cargo)
    }

    /// Packages to build for the tests of these crates. This machine's compiler builds the whole workspace, because `./test` has already
    /// compiled it with these features.
    pub(super) fn packages(&self, crates: &[&str]) -> Vec<String> {
        match self.builder {
            None => vec!["--workspace".to_owned()],
            Some(_) => crates.iter().map(|name| format!("--package=turnpike-{name}")).collect(),
        }
    }

    pub(super) fn strip(&self, program: &Path, to: &Path) -> Result<(), Failure> {
        let mut strip = match &self.builder {
            None => Command::new("strip"),
            Some(builder) => builder.command(&[self.repository, self.dir], "aarch64-linux-gnu-strip")?,
        };
        said(strip.arg("-o").arg(to).arg(program)).map(drop)
    }

    fn built(&self) -> PathBuf {
        self.dir.join(format!("target-{}", self.architecture.debian))
    }
}
