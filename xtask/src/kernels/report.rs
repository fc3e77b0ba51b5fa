//! Parses the console output of a guest and finds faults in it.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    process::{Command, ExitStatus, Stdio},
};

use serde::Deserialize;

use crate::Failure;

/// A data path of `serve`, and the first kernel that supports it.
pub(super) struct Path {
    pub(super) name: &'static str,
    since: (u32, u32),
}

pub(super) const PATHS: [Path; 7] = [
    Path { name: "auto", since: (0, 0) },
    Path { name: "basic", since: (0, 0) },
    Path { name: "mmsg", since: (0, 0) },
    Path { name: "gso", since: (5, 0) },
    Path { name: "kernel", since: (5, 10) },
    Path { name: "xdp", since: (5, 18) },
    Path { name: "xdp-generic", since: (5, 18) },
];

#[derive(Debug, Default)]
pub(super) struct Report {
    kernel: String,
    sandbox: String,
    paths: BTreeMap<String, Trial>,
    tests: BTreeMap<String, Tests>,
    reading: Option<String>,
    ended: bool,
}

#[derive(Debug, Default)]
struct Trial {
    way: String,
    /// Last line that the server printed if it failed to start.
    refusal: Option<String>,
    loads: BTreeMap<String, Vec<Load>>,
    across: u64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Load {
    sent: u64,
    lost: u64,
}

#[derive(Debug, Default)]
struct Tests {
    /// Number of passed tests, if the program finished.
    passed: Option<u32>,
    skipped: Vec<String>,
    passed_alone: Vec<String>,
    failed: Vec<String>,
    exit: Option<i32>,
}

impl Report {
    /// Runs a program and parses its output, which also goes to `log`.
    pub(super) fn read(&mut self, program: &mut Command, log: &mut File) -> Result<ExitStatus, Failure> {
        let mut child = program.stdout(Stdio::piped()).spawn()?;
        let mut output = BufReader::new(child.stdout.take().ok_or("a program without output")?);
        let mut line = Vec::new();
        while output.read_until(b'\n', &mut line)? > 0 {
            log.write_all(&line)?;
            if let Some(news) = self.take(String::from_utf8_lossy(&line).trim_end()) {
                println!("  {news}");
            }
            line.clear();
        }
        Ok(child.wait()?)
    }

    /// Parses a console line; returns the part worth printing.
    pub(super) fn take(&mut self, line: &str) -> Option<String> {
        let Some(words) = line.strip_prefix("@@ ") else {
            self.take_output(line);
            return None;
        };
        let (what, rest) = words.split_once(' ').unwrap_or((words, ""));
        let (name, more) = rest.split_once(' ').unwrap_or((rest, ""));
        match what {
            "kernel" => rest.clone_into(&mut self.kernel),
            "sandbox" => self.sandbox = confined_by(rest),
            "offered" => more.clone_into(&mut self.path(name).way),
            "refused" => self.path(name).refusal = Some(more.to_owned()),
            "load" => {
                let (kind, json) = more.split_once(' ')?;
                let load = serde_json::from_str(json).ok()?;
                self.path(name).loads.entry(kind.to_owned()).or_default().push(load);
            }
            "across" => {
                self.path(name).across =
                    more.split('+').filter_map(|number| number.parse::<u64>().ok()).sum();
                return Some(format!("{name}: {}", self.paths[name].cell()));
            }
            "tests" => {
                self.reading = Some(name.to_owned());
                self.tests.insert(name.to_owned(), Tests::default());
            }
            "exit" => self.test(name).exit = more.parse().ok(),
            "alone" => self.test(name).passed_alone.push(more.to_owned()),
            "failed" => self.test(name).failed.push(more.to_owned()),
            "end" => self.ended = true,
            _ => return None,
        }
        matches!(what, "kernel" | "refused" | "alone" | "failed" | "tests").then(|| words.to_owned())
    }

    fn take_output(&mut self, line: &str) {
        let Some(tests) = self.reading.as_ref().and_then(|name| self.tests.get_mut(name)) else { return };
        if let Some(why) = line.strip_prefix("SKIPPED: ") {
            tests.skipped.push(why.to_owned());
        }
        // A test program that is run again for a single test prints this line a second time.
        if tests.passed.is_none()
            && let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|it| it.split_once(". "))
        {
            tests.passed = counts.split(' ').next().and_then(|count| count.parse().ok());
        }
    }

    fn path(&mut self, name: &str) -> &mut Trial {
        self.paths.entry(name.to_owned()).or_default()
    }

    fn test(&mut self, name: &str) -> &mut Tests {
        self.tests.entry(name.to_owned()).or_default()
    }

    pub(super) fn row(&self, machine: &str) -> String {
        let mut row = format!("| {machine} | {} | {} ", self.kernel, self.sandbox);
        for path in &PATHS {
            let cell = self.paths.get(path.name).map_or_else(|| "not tried".to_owned(), Trial::cell);
            let _ = write!(row, "| {cell} ");
        }
        let tests: Vec<String> =
            self.tests.iter().map(|(name, tests)| format!("{name} {}", tests.cell())).collect();
        let _ = write!(row, "| {} |", tests.join(", "));
        row
    }

    /// Faults of a kernel: supported paths that fail to start or lose datagrams, and failing tests.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if !self.ended {
            faults.push("the guest did not finish".to_owned());
        }
        for path in &PATHS {
            let Some(trial) = self.paths.get(path.name) else {
                faults.push(format!("{}: not tried", path.name));
                continue;
            };
            let fault = match &trial.refusal {
                Some(_) if self.version() < path.since => None,
                Some(said) => Some(format!("refused: {said}")),
                None => trial.fault(),
            };
            faults.extend(fault.map(|fault| format!("{}: {fault}", path.name)));
        }
        for (name, tests) in &self.tests {
            let ended = match tests.exit {
                _ if tests.passed.is_none() => Some("did not finish"),
                // A test that fails again in its second run is reported with a line of its own.
                Some(1..) if tests.failed.is_empty() && tests.passed_alone.is_empty() => Some("failed"),
                _ => None,
            };
            faults.extend(ended.map(|how| format!("{name}: the program {how} (exit code {:?})", tests.exit)));
            faults.extend(tests.failed.iter().map(|test| format!("{name}: {test} failed")));
        }
        faults
    }

    pub(super) fn skipped(&self) -> BTreeMap<&str, Vec<String>> {
        let mut skipped: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (name, tests) in &self.tests {
            let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
            tests.skipped.iter().for_each(|why| *counts.entry(why).or_default() += 1);
            for (why, count) in counts {
                skipped.entry(why).or_default().push(format!("{count} of {name}"));
            }
        }
        skipped
    }

    fn version(&self) -> (u32, u32) {
        let mut numbers =
            self.kernel.split(|it: char| !it.is_ascii_digit()).map(|it| it.parse().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    }
}

impl Trial {
    /// Best run of one kind of load. Even a correct path loses datagrams when the host of the emulated CPU stalls, but a faulty path loses
    /// them in every run.
    fn best(&self, kind: &str) -> Option<Load> {
        self.loads.get(kind)?.iter().copied().min_by_key(|load| load.lost)
    }

    fn fault(&self) -> Option<String> {
        ["steady", "steady6"].into_iter().find_map(|kind| match self.best(kind) {
            None => Some(format!("{kind}: the generator reported no result")),
            Some(Load { sent: 0, .. }) => Some(format!("{kind}: nothing was sent")),
            Some(Load { lost: 0, .. }) => None,
            Some(Load { sent, lost }) => Some(format!("{kind}: {lost} of {sent} lost even in the best run")),
        })
    }

    fn cell(&self) -> String {
        if self.refusal.is_some() {
            return "refused".to_owned();
        }
        let lost = ["steady", "steady6", "bursts"].map(|kind| self.lost(kind));
        let across = if self.across > 0 { format!("; {} in the kernel", self.across) } else { String::new() };
        format!("{} {} lost{across}", self.way, lost.join("/"))
    }

    /// Loss in the best run of a kind, with the number of runs if there was more than one.
    fn lost(&self, kind: &str) -> String {
        let Some(best) = self.best(kind) else { return "?".to_owned() };
        match self.loads[kind].len() {
            1 => best.lost.to_string(),
            runs => format!("{} (of {runs} runs)", best.lost),
        }
    }
}

impl Tests {
    fn cell(&self) -> String {
        let Some(passed) = self.passed else { return "did not finish".to_owned() };
        let alone = u32::try_from(self.passed_alone.len()).unwrap_or(u32::MAX);
        let mut cell = format!("{}", passed.saturating_add(alone));
        if !self.failed.is_empty() {
            let _ = write!(cell, " ({} failed)", self.failed.len());
        }
        cell
    }
}

/// Sandbox features of this kernel, from the server's log line.
fn confined_by(line: &str) -> String {
    let parts = [("all system calls", "seccomp"), ("all files", "Landlock")];
    let here: Vec<&str> =
        parts.iter().filter(|(missing, _)| !line.contains(missing)).map(|(_, part)| *part).collect();
    here.join(", ")
}

pub(super) fn head() -> String {
    let names: Vec<&str> = PATHS.iter().map(|path| path.name).collect();
    let rule = "| --- ".repeat(PATHS.len() + 4);
    format!("| machine | kernel | sandbox | {} | tests passed |\n{rule}|", names.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(lines: &[&str]) -> Report {
        let mut report = Report::default();
        lines.iter().for_each(|line| _ = report.take(line));
        report
    }

    fn machine(kernel: &str, more: &[&str]) -> Report {
        let mut lines = vec![format!("@@ kernel {kernel} x86_64")];
        for path in PATHS {
            lines.push(format!("@@ offered {} gso", path.name));
            for kind in ["steady", "steady6", "bursts"] {
                lines.push(format!(
                    r#"@@ load {} {kind} {{"sent": 5000, "lost": 0, "size": 120}}"#,
                    path.name
                ));
            }
        }
        lines.extend(more.iter().map(|&line| line.to_owned()));
        lines.push("@@ end".to_owned());
        report(&lines.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[test]
    fn only_kernels_that_are_too_old_may_refuse_a_path() {
        let refused = ["@@ refused xdp error: this kernel is older than Linux 5.18"];
        assert_eq!(machine("5.10.0-32-cloud-amd64", &refused).faults(), [""; 0]);
        let faults = machine("6.1.0-50-cloud-amd64", &refused).faults();
        assert!(faults.len() == 1 && faults[0].starts_with("xdp: refused: error: this kernel"), "{faults:?}");
    }

    #[test]
    fn only_loss_in_every_run_is_a_fault() {
        let lost = |lost| format!(r#"@@ load kernel steady {{"sent": 5000, "lost": {lost}}}"#);
        let mut report = report(&["@@ kernel 6.12 aarch64", &lost(7), &lost(9)]);
        assert!(report.faults().contains(&"kernel: steady: 7 of 5000 lost even in the best run".to_owned()));
        report.take(&lost(0));
        assert!(
            !report.faults().iter().any(|fault| fault.contains("in the best run")),
            "{:?}",
            report.faults()
        );
        assert!(report.faults().contains(&"kernel: steady6: the generator reported no result".to_owned()));
        assert!(report.faults().contains(&"the guest did not finish".to_owned()));
    }

    #[test]
    fn a_test_that_fails_twice_is_a_fault() {
        let output = [
            "@@ tests net",
            "test a ... FAILED",
            "SKIPPED: no IPv6 here",
            "test result: FAILED. 71 passed; 2 failed",
        ];
        let passed_alone = [&output[..], &["@@ alone net a", "test result: ok. 1 passed; 0 failed"]].concat();
        let report = machine("6.1.0", &passed_alone);
        assert_eq!(report.faults(), [""; 0]);
        assert!(report.row("6.1").contains("| net 72 |"), "{}", report.row("6.1"));
        assert_eq!(
            report.skipped().into_iter().collect::<Vec<_>>(),
            [("no IPv6 here", vec!["1 of net".to_owned()])]
        );
        let failed = [&output[..], &["@@ failed net a"]].concat();
        assert_eq!(machine("6.1.0", &failed).faults(), ["net: a failed"]);
        let failed = [&output[..], &["@@ exit net 101"]].concat();
        assert_eq!(machine("6.1.0", &failed).faults(), ["net: the program failed (exit code Some(101))"]);
        let hung = machine("6.1.0", &["@@ tests net", "@@ exit net 124"]);
        assert_eq!(hung.faults(), ["net: the program did not finish (exit code Some(124))"]);
    }

    #[test]
    fn sandbox_without_landlock_leaves_all_files_accessible() {
        let line = "@@ sandbox 90 system calls, others end the program; all files; no capabilities";
        assert!(report(&[line]).row("5.10").contains("| seccomp |"));
        assert_eq!(confined_by("90 system calls; 3 readable paths, 1 of them writable"), "seccomp, Landlock");
    }

    #[test]
    fn a_cell_has_the_hook_the_best_runs_and_datagrams_in_both_directions() {
        let load = |kind, lost| format!(r#"@@ load kernel {kind} {{"sent": 3000, "lost": {lost}}}"#);
        let [first, second] = [load("steady", 2), load("steady", 0)];
        let report = report(&[
            "@@ offered kernel tcx",
            &first,
            &second,
            &load("bursts", 0),
            "@@ across kernel 400+380+0",
        ]);
        let cell = "| tcx 0 (of 2 runs)/?/0 lost; 780 in the kernel |";
        assert!(report.row("x").contains(cell), "{}", report.row("x"));
    }
}
