//! External programs that the lab uses, and the packages that provide them.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::error::LabError;

const PACKAGES: [(&str, &str); 14] = [
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("unshare", "util-linux"),
    ("taskset", "util-linux"),
    ("ethtool", "ethtool"),
    ("perf", "linux-perf"),
    ("strace", "strace"),
    ("iperf3", "iperf3"),
    ("socat", "socat"),
    ("haproxy", "haproxy"),
    ("rinetd", "rinetd"),
    ("turnserver", "coturn"),
    ("turnutils_uclient", "coturn"),
    ("python3", "python3"),
];

pub(crate) fn find(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Path::new(program).is_file().then(|| program.into());
    }
    env::split_paths(&env::var_os("PATH")?)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

/// Finds a program; if it is missing, the error names its package. `purpose` completes "... is needed".
pub(crate) fn require(program: &str, purpose: &str) -> Result<PathBuf, LabError> {
    find(program).ok_or_else(|| LabError::usage(missing(program, purpose)))
}

pub(crate) fn missing(program: &str, purpose: &str) -> String {
    let remedy = match PACKAGES.iter().find(|(name, _)| *name == program) {
        Some((_, package)) => format!("apt-get install {package}"),
        None if program.contains('/') => "build it first, or correct its path".to_owned(),
        None => "install it, or correct its name".to_owned(),
    };
    format!("`{program}` is needed {purpose} but was not found: {remedy}")
}

pub(crate) fn output<W: AsRef<str>>(command: impl IntoIterator<Item = W>) -> Result<String, LabError> {
    let command: Vec<String> = command.into_iter().map(|word| word.as_ref().to_owned()).collect();
    let (program, arguments) =
        command.split_first().ok_or_else(|| LabError::failed("cannot run an empty command"))?;
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(LabError::io(format!("cannot start `{program}`")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let reason = String::from_utf8_lossy(&output.stderr);
    Err(LabError::failed(format!("`{}` failed: {}", command.join(" "), reason.trim())))
}

pub(crate) fn output_in(entry: &[String], command: &[&str]) -> Result<String, LabError> {
    output(entry.iter().map(String::as_str).chain(command.iter().copied()))
}

pub(crate) fn words<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    words.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_is_reported_with_its_package() {
        assert_eq!(
            missing("iperf3", "as the workload"),
            "`iperf3` is needed as the workload but was not found: apt-get install iperf3"
        );
        assert!(missing("./target/x", "as the subject").ends_with("build it first, or correct its path"));
        assert!(find("sh").is_some());
        assert!(find("/no/such/program").is_none());
        assert!(find("no-such-program-anywhere").is_none());
    }

    #[test]
    fn a_failing_command_reports_its_stderr() {
        let error = output(["sh", "-c", "echo because >&2; exit 3"]).unwrap_err().to_string();
        assert!(error.ends_with("failed: because"), "{error}");
    }
}
