//! `cargo xtask kernels`: boots Debian's kernels in virtual machines, relays on each data path, runs kernel-dependent tests, and prints a
//! table of each kernel's features. Needs root only to install programs, and does not need hardware virtualisation.

mod architecture;
mod machine;
mod programs;
mod report;
mod toolchain;
mod user_mode;

use std::{
    fs::{self, File},
    path::PathBuf,
    process::ExitCode,
};

use clap::Args;

use self::{
    architecture::{AMD64, ARM64, Architecture},
    machine::{Kernel, root},
    programs::{archive, build_tests},
    report::{Report, head},
    toolchain::Toolchain,
};
use crate::{
    Failure,
    debian::{Mirror, need},
    repository, target,
};

struct Machine {
    name: &'static str,
    suite: &'static str,
    architecture: &'static Architecture,
}

const MACHINES: [Machine; 5] = [
    Machine { name: "5.10", suite: "bullseye", architecture: &AMD64 },
    Machine { name: "6.1", suite: "bookworm", architecture: &AMD64 },
    Machine { name: "6.12", suite: "trixie", architecture: &AMD64 },
    Machine { name: "newest", suite: "sid", architecture: &AMD64 },
    Machine { name: "arm64", suite: "sid", architecture: &ARM64 },
];

/// Programs needed besides QEMU, with their packages.
const TOOLS: [(&str, &str); 4] =
    [("cpio", "cpio"), ("depmod", "kmod"), ("strip", "binutils"), ("dpkg-deb", "dpkg")];

#[derive(Args)]
pub(crate) struct Options {
    /// Kernels to boot: 5.10, 6.1, 6.12, newest, arm64 [default: all except arm64, for which everything is rebuilt]
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,

    /// Only relay, without running the tests
    #[arg(long)]
    no_tests: bool,

    /// Program to test [default: a release build of this repository]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Runs the requested machines and prints the table. Fails if a supported data path loses datagrams at 1,000 a second, or if a test fails.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let machines = chosen(&options.kernels)?;
    let repository = repository()?;
    need(&TOOLS)?;
    let dir = target(&repository).join("kernels");
    fs::create_dir_all(&dir)?;
    let dir = dir.canonicalize()?;
    let mirror = Mirror::of_this_machine()?;
    let (mut rows, mut faults, mut skipped) = (vec![head()], Vec::new(), Vec::new());
    for architecture in [&AMD64, &ARM64] {
        let mut machines = machines.iter().filter(|machine| machine.architecture == architecture).peekable();
        if machines.peek().is_none() {
            continue;
        }
        let (emulator, package, _) = architecture.machine;
        need(&[(emulator, package)])?;
        if architecture.suite.is_some() {
            need(&[user_mode::EMULATOR])?;
        }
        let toolchain = Toolchain::of(architecture, &repository, &dir)?;
        let root = root(&dir, &mirror, architecture)?;
        let program = toolchain.release(options.program.as_deref())?;
        let build = |crates| if options.no_tests { Ok(Vec::new()) } else { build_tests(&toolchain, crates) };
        let of_this_kernel = if toolchain.is_across() { build(&user_mode::CRATES)? } else { Vec::new() };
        let programs = dir.join(format!("programs-{}", architecture.debian));
        let programs = archive(&programs, &repository, &toolchain, &program, &build(&programs::CRATES)?)?;
        for machine in machines {
            let kernel = Kernel::of(&dir, &mirror, machine.suite, architecture)?;
            let log = dir.join(format!("{}.log", machine.name));
            println!("{}: {}", machine.name, log.display());
            let (mut log, mut report) = (File::create(log)?, Report::default());
            user_mode::run(&of_this_kernel, &root, &mut log, &mut report)?;
            kernel.boot(&root, &programs, &dir, &mut log, &mut report)?;
            rows.push(report.row(machine.name));
            faults.extend(report.faults().into_iter().map(|fault| format!("{}: {fault}", machine.name)));
            for (why, programs) in report.skipped() {
                skipped.push(format!("{}: skipped ({}): {why}", machine.name, programs.join(", ")));
            }
        }
    }
    println!(
        "\nDatagrams lost at 1,000/s over IPv4 (of 3,000), over IPv6 (of 3,000), and in bursts of 16 at 3,000/s over IPv4 (of 9,000)\n"
    );
    for line in rows.iter().chain(&skipped).chain(&faults) {
        println!("{line}");
    }
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chosen(names: &[String]) -> Result<Vec<&'static Machine>, Failure> {
    if let Some(unknown) = names.iter().find(|name| MACHINES.iter().all(|machine| machine.name != **name)) {
        let all = MACHINES.map(|machine| machine.name).join(", ");
        return Err(format!("unknown kernel {unknown}; known: {all}").into());
    }
    let is_asked_for = |machine: &&Machine| match names {
        [] => machine.architecture == &AMD64,
        _ => names.iter().any(|name| name == machine.name),
    };
    Ok(MACHINES.iter().filter(is_asked_for).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_chosen_by_name() {
        let names = |asked: &[&str]| {
            let asked: Vec<String> = asked.iter().map(|&name| name.to_owned()).collect();
            chosen(&asked).map(|machines| machines.iter().map(|machine| machine.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).expect("all"), ["5.10", "6.1", "6.12", "newest"]);
        assert_eq!(names(&["arm64"]).expect("one"), ["arm64"]);
        assert_eq!(names(&["newest", "6.1"]).expect("two"), ["6.1", "newest"]);
        assert!(names(&["6"]).expect_err("no such kernel").to_string().contains("6.12"));
    }
}
