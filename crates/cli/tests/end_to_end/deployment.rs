//! Checks the files in deploy/: systemd accepts the units and rates their exposure as low, the packaged
//! configuration is valid, and shellcheck accepts the scripts.

use crate::prelude::*;

/// Limit for `systemd-analyze security`, from 0 (best) to 10.
const MOST_EXPOSED: f32 = 2.0;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn units() -> PathBuf {
    repository().join("deploy/systemd")
}

const UNITS: [&str; 5] = [
    "turnpike.service",
    "turnpike-forward.service",
    "turnpike.socket",
    "turnpike-tls.socket",
    "turnpike-dtls.socket",
];

fn drop_ins() -> Vec<PathBuf> {
    let entries = fs::read_dir(units().join("drop-ins")).expect("drop-ins");
    entries.map(|entry| entry.expect("readable").path()).collect()
}

fn exposure(dir: &Path, unit: &str) -> f32 {
    let mut command = Command::new("systemd-analyze");
    command.args(["security", "--offline=true", "--no-pager"]).arg(dir.join(unit));
    let Finished { stdout, stderr, .. } = Program::run(&mut command);
    let line = stdout
        .lines()
        .find(|line| line.contains("Overall exposure level"))
        .unwrap_or_else(|| panic!("{stdout}{stderr}"));
    let (_, level) = line.rsplit_once(": ").expect("a level");
    level.split(' ').next().and_then(|level| level.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

/// Before version 250, systemd-analyze checks only installed units.
fn has_systemd_analyze() -> Result<(), &'static str> {
    let command = || Command::new("systemd-analyze").arg("--version").output().ok();
    let version = || String::from_utf8(command()?.stdout).ok()?.split(' ').nth(1)?.parse::<u32>().ok();
    let recent = version().is_some_and(|version| version >= 250);
    recent.then_some(()).ok_or("systemd-analyze from systemd 250 or later is not installed")
}

#[test]
fn units_have_low_exposure_with_every_drop_in() {
    need!(has_systemd_analyze());
    for unit in ["turnpike.service", "turnpike-forward.service"] {
        let level = exposure(&units(), unit);
        assert!(level < MOST_EXPOSED, "{unit}: {level}");
        for drop_in in drop_ins() {
            let dir = Dir::new();
            fs::copy(units().join(unit), dir.path().join(unit)).expect("the test's own directory");
            let beside = dir.path().join(format!("{unit}.d"));
            fs::create_dir(&beside).expect("the test's own directory");
            fs::copy(&drop_in, beside.join("x.conf")).expect("the test's own directory");
            let level = exposure(dir.path(), unit);
            assert!(level < MOST_EXPOSED, "{unit} with {}: {level}", drop_in.display());
        }
    }
}

/// Uses the program under test; skips settings that this systemd does not know.
#[test]
fn systemd_accepts_the_units() {
    need!(has_systemd_analyze());
    let dir = Dir::new();
    for unit in UNITS {
        let text = fs::read_to_string(units().join(unit)).expect("a unit");
        let text = text.replace("/usr/bin/turnpike", env!("CARGO_BIN_EXE_turnpike"));
        dir.file(unit, &text);
    }
    for unit in UNITS {
        let mut command = Command::new("systemd-analyze");
        let run = Program::run(
            command.args(["verify", "--man=no"]).arg(dir.path().join(unit)).current_dir(dir.path()),
        );
        let ours =
            run.stderr.lines().filter(|line| line.contains("turnpike") && !line.contains("notify-reload"));
        assert_eq!(ours.collect::<Vec<_>>(), [] as [&str; 0], "{unit}");
    }
}

#[test]
fn units_use_valid_command_lines() {
    for (unit, command, key) in [
        ("deploy/systemd/turnpike.service", "serve", "-c /etc/turnpike/turnpike.toml"),
        ("deploy/systemd/turnpike-forward.service", "forward", "-c /etc/turnpike/forward.toml"),
    ] {
        let text = read(unit);
        for line in ["Type=notify-reload", "WatchdogSec=30", "DynamicUser=yes"] {
            assert!(text.lines().any(|found| found == line), "{unit} has no {line}");
        }
        assert!(text.contains(&format!("ExecStart=/usr/bin/turnpike {command} {key}\n")), "{unit}");
    }
}

#[test]
fn packaged_configuration_is_valid() {
    let path = repository().join("deploy/package/turnpike.toml");
    let path = path.to_str().expect("UTF-8");
    Program::run(&mut turnpike(&["check-config", "-c", path])).ended(0);
    let dir = Dir::new();
    let proposed = read("deploy/package/turnpike.toml");
    let proposed: String = proposed
        .lines()
        .map(|line| {
            line.strip_prefix("# ")
                .filter(|line| line.contains(" = ") && !line.starts_with("cert") && !line.starts_with("key"))
                .unwrap_or(line)
        })
        .fold(String::new(), |text, line| text + line + "\n")
        .replace("10.0.0.5=203.0.113.5", "127.0.0.1=203.0.113.5");
    let file = dir.file("turnpike.toml", &proposed);
    let run = Program::run(&mut turnpike(&["check-config", "-c", file.to_str().expect("UTF-8")]));
    assert_eq!(run.code, Some(0), "{}\n{proposed}", run.output());
    assert!(run.stdout.contains("127.0.0.1=203.0.113.5"), "{}", run.stdout);
}

#[test]
fn shellcheck_accepts_the_scripts() {
    let shellcheck = need!(installed("shellcheck"));
    let of_packages = ["postinst", "prerm", "postrm", "apk-preinstall", "apk-postinstall"];
    let scripts = of_packages.map(|script| format!("package/scripts/{script}"));
    let mut shellcheck = Command::new(shellcheck);
    shellcheck.args(["build", "release", "try-image", "package/build"]).args(scripts);
    Program::run(shellcheck.current_dir(repository().join("deploy"))).ended(0);
}
