//! `cargo xtask static`: builds the statically linked binary of a release with deploy/build. If this machine's toolchain lacks the target,
//! Debian's compilers build it.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use clap::Args;

use crate::{
    Failure,
    builder::{Builder, MUSL, Musl},
    debian::said,
    repository, target,
};

#[derive(Args)]
pub(crate) struct Options {
    /// Architecture: x86_64 or aarch64
    architecture: String,

    /// Options for cargo build, such as --no-default-features
    #[arg(last = true)]
    cargo: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let repository = repository()?;
    let musl = of_name(&options.architecture)?;
    let builder = Compilers::of(musl, &repository)?;
    let options: Vec<&str> = options.cargo.iter().map(String::as_str).collect();
    let built = target(&repository);
    let program = builder.build(&repository, &built, &options)?;
    println!("{}", program.display());
    Ok(ExitCode::SUCCESS)
}

fn of_name(name: &str) -> Result<&'static Musl, Failure> {
    MUSL.iter().find(|musl| musl.architecture == name).ok_or_else(|| {
        let known = MUSL.map(|musl| musl.architecture).join(", ");
        format!("unknown architecture {name}; known: {known}").into()
    })
}

/// Compilers of a static binary: this machine's, or Debian's.
pub(crate) struct Compilers {
    musl: &'static Musl,
    debian: Option<Builder>,
}

impl Compilers {
    pub(crate) fn of_this_machine(repository: &Path) -> Result<Self, Failure> {
        Self::of(of_name(std::env::consts::ARCH)?, repository)
    }

    fn of(musl: &'static Musl, repository: &Path) -> Result<Self, Failure> {
        let folder = said(Command::new("rustc").args(["--print", "target-libdir", "--target", musl.target]))?;
        // The C compilers of other architectures have no musl.
        let is_installed = musl.architecture == std::env::consts::ARCH && Path::new(folder.trim()).is_dir();
        let debian = if is_installed { None } else { Some(Builder::prepare(repository)?) };
        Ok(Self { musl, debian })
    }

    /// Builds the sources in `tree`, and returns the program, which is below `built`.
    pub(crate) fn build(&self, tree: &Path, built: &Path, options: &[&str]) -> Result<PathBuf, Failure> {
        std::fs::create_dir_all(built)?;
        let (tree, built) = (tree.canonicalize()?, built.canonicalize()?);
        let script = tree.join("deploy/build");
        let mut command = match &self.debian {
            None => Command::new(script),
            Some(builder) => {
                let mut command = builder.command(&[&tree, &built], script)?;
                Builder::set_musl(&mut command, self.musl);
                command
            }
        };
        let time = said(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(repository()?))?;
        command.arg(self.musl.target).args(options).current_dir(&tree);
        command.env("CARGO_TARGET_DIR", &built).env("SOURCE_DATE_EPOCH", time.trim());
        if !command.status()?.success() {
            return Err(format!("the build of {} in {} failed", self.musl.target, tree.display()).into());
        }
        Ok(built.join(self.musl.target).join("dist/turnpike"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_architecture_lists_known_ones() {
        assert_eq!(of_name("aarch64").expect("known").target, "aarch64-unknown-linux-musl");
        let failure = of_name("arm64").expect_err("not this name").to_string();
        assert!(failure.contains("x86_64, aarch64"), "{failure}");
    }
}
