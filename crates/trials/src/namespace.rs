//! Network namespaces for tests, with addresses and ports of their own.

use std::{fs, process::Command};

use super::{Program, eventually, installed};

/// Returns a function that creates commands. Each command runs a shell script in a new network namespace, in which loopback is up and
/// `setup` has run. Returns the reason if namespaces are unavailable.
pub fn namespace(setup: &'static str) -> Result<impl Fn(&str) -> Command, String> {
    installed("ip")?;
    installed("unshare")?;
    // The shell is the first process in its PID namespace, so everything in the namespace ends with it.
    let inside = move |flags: &str, script: &str| {
        let script = format!("ip link set lo up && {setup} && {script}");
        let mut command = Command::new("unshare");
        command.args([flags, "--kill-child", "sh", "-c", &script]).env_remove("TURNPIKE_CONFIG");
        command
    };
    // A user namespace needs no privileges but is often forbidden in containers, where root can do without one.
    let allowed = |flags: &&str| Program::run(&mut inside(flags, "true")).code == Some(0);
    let flags = ["-npf", "-rnpf"].into_iter().find(allowed);
    let flags = flags.ok_or("unshare(1) and ip(8) cannot create a network namespace here")?;
    Ok(move |script: &str| inside(flags, script))
}

/// A second network namespace; the process must have the privilege to create one.
pub struct Namespace {
    holder: Program,
}

impl Namespace {
    pub fn with_loopback() -> Self {
        let holder = Program::start(Command::new("unshare").args(["-n", "sleep", "86400"]));
        let pid = holder.pid();
        let own = fs::read_link("/proc/self/ns/net").expect("this process has a namespace");
        eventually("the namespace exists", || {
            fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|other| other != own)
        });
        let namespace = Self { holder };
        namespace.inside(&["ip", "link", "set", "lo", "up"]);
        namespace
    }

    pub fn pid(&self) -> u32 {
        self.holder.pid()
    }

    pub fn inside(&self, words: &[&str]) {
        self.inside_says(words);
    }

    pub fn inside_says(&self, words: &[&str]) -> String {
        let output = Command::new("nsenter").args(self.nsenter()).args(words).output().expect("nsenter runs");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub fn nsenter(&self) -> Vec<String> {
        vec![format!("--net=/proc/{}/ns/net", self.pid()), "--".to_owned()]
    }

    pub fn command(&self, of: &Command) -> Command {
        let mut command = Command::new("nsenter");
        command.args(self.nsenter()).arg(of.get_program()).args(of.get_args()).env_clear();
        command.envs(of.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command
    }
}
