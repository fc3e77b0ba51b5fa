//! `cargo xtask kernels`: boots Debian's kernels in virtual machines, relays on each data path, runs the tests that depend on the kernel, and
//! prints a table of what each kernel can do. It needs root where programs are to be installed, and no hardware support.

mod debian;
mod machine;
mod programs;
mod report;

use std::{fs, path::PathBuf, process::ExitCode};

use clap::Args;

use self::{
    debian::{Mirror, need},
    machine::{Kernel, root},
    programs::archive,
    report::head,
};
use crate::{Failure, program, repository, target};

/// A machine to try, and the suite whose kernel it has.
struct Machine {
    name: &'static str,
    suite: &'static str,
}

const MACHINES: [Machine; 4] = [
    Machine { name: "5.10", suite: "bullseye" },
    Machine { name: "6.1", suite: "bookworm" },
    Machine { name: "6.12", suite: "trixie" },
    Machine { name: "newest", suite: "sid" },
];

/// What has to be on this machine, and the package that has it.
const TOOLS: [(&str, &str); 5] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("cpio", "cpio"),
    ("depmod", "kmod"),
    ("strip", "binutils"),
    ("dpkg-deb", "dpkg"),
];

#[derive(Args)]
pub(crate) struct Options {
    /// Only these: 5.10, 6.1, 6.12, newest [default: all]
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,

    /// Only relay, and run no tests
    #[arg(long)]
    no_tests: bool,

    /// The program to test [default: a release build of this repository]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Runs all that was asked for and prints the table. Fails where a data path that the kernel has loses datagrams at 1,000 a second, and where a
/// test fails.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let machines = chosen(&options.kernels)?;
    let repository = repository()?;
    need(&TOOLS)?;
    let dir = target(&repository).join("kernels");
    fs::create_dir_all(&dir)?;
    let dir = dir.canonicalize()?;
    let mirror = Mirror::of_this_machine()?;
    let program = program(&repository, options.program.as_deref())?;
    let ours = archive(&dir.join("programs"), &repository, &program, !options.no_tests)?;
    let base = root(&dir, &mirror)?;
    let (mut rows, mut faults, mut skipped) = (vec![head()], Vec::new(), Vec::new());
    for machine in machines {
        let kernel = Kernel::of(&dir, &mirror, machine.suite)?;
        let log = dir.join(format!("{}.log", machine.name));
        println!("{}: {}", machine.name, log.display());
        let report = kernel.boot([&base, &ours], &log)?;
        rows.push(report.row(machine.name));
        faults.extend(report.faults().into_iter().map(|fault| format!("{}: {fault}", machine.name)));
        for (why, programs) in report.skipped() {
            skipped.push(format!("{}: skipped ({}): {why}", machine.name, programs.join(", ")));
        }
    }
    println!(
        "\nlost at 1,000/s by IPv4, by IPv6, in bursts of 16 at 3,000/s by IPv4; of 5,000, 5,000 and 15,000\n"
    );
    for line in rows.iter().chain(&skipped).chain(&faults) {
        println!("{line}");
    }
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chosen(names: &[String]) -> Result<Vec<&'static Machine>, Failure> {
    if let Some(unknown) = names.iter().find(|name| MACHINES.iter().all(|machine| machine.name != **name)) {
        let all = MACHINES.map(|machine| machine.name).join(", ");
        return Err(format!("unknown kernel {unknown}; there are {all}").into());
    }
    let is_asked_for = |machine: &&Machine| names.is_empty() || names.iter().any(|name| name == machine.name);
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
        assert_eq!(names(&["newest", "6.1"]).expect("two"), ["6.1", "newest"]);
        assert!(names(&["6"]).expect_err("there is none").to_string().contains("6.12"));
    }
}
