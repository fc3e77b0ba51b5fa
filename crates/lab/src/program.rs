//! A running program in a process group of its own. It is terminated through its process ID and through a marker in its environment, which
//! descendants inherit, so that even daemons are found.

use std::{
    ffi::OsStr,
    fs::{self, File},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use procfs::process::{self, Process, Stat};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::{error::LabError, exit_excerpt};

/// Environment variable set for every process that the lab starts. Its name does not start with `TURNPIKE_`, because `turnpike serve` warns
/// about unknown variables with that prefix.
pub(crate) const MARK: &str = "TPLAB";

const GRACE: Duration = Duration::from_secs(2);
/// Maximum time for perf or a tracer to write its result.
const WRITE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(5);

#[derive(Clone, Debug, Default)]
pub(crate) struct Launch {
    pub(crate) name: String,
    /// Prefix command that enters a namespace; must `exec` the command to keep the process ID.
    pub(crate) entry: Vec<String>,
    pub(crate) command: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
    /// List as for `taskset -c`, such as `0` or `1-3`.
    pub(crate) cpus: Option<String>,
    pub(crate) mark: String,
    /// File for standard error, and for standard output unless `output` is set.
    pub(crate) log: PathBuf,
    /// File for standard output, if the program writes its result there instead of logging to it.
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug)]
pub(crate) struct ChildProgram {
    pub(crate) name: String,
    child: Child,
    log: PathBuf,
    /// Length of the log when the program started; everything before is from an earlier run.
    log_start: u64,
    ended: Option<ExitStatus>,
}

impl ChildProgram {
    /// Starts the program; its process ID stays the same while it enters a namespace.
    pub(crate) fn start(launch: &Launch) -> Result<Self, LabError> {
        let mut words = launch.entry.clone();
        if let Some(cpus) = &launch.cpus {
            words.extend(["taskset".to_owned(), "-c".to_owned(), cpus.clone()]);
        }
        words.extend_from_slice(&launch.command);
        let (program, arguments) =
            words.split_first().ok_or_else(|| LabError::usage(format!("{} has no command", launch.name)))?;

        let cannot_log = || LabError::io(format!("cannot write {}", launch.log.display()));
        let log = File::options().create(true).append(true).open(&launch.log).map_err(cannot_log())?;
        let log_start = log.metadata().map_or(0, |metadata| metadata.len());
        let stdout = match &launch.output {
            Some(path) => {
                File::create(path).map_err(LabError::io(format!("cannot write {}", path.display())))?
            }
            None => log.try_clone().map_err(cannot_log())?,
        };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(launch.environment.iter().map(|(name, value)| (name, value)))
            .env(MARK, &launch.mark)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(log)
            // Shields the program from Ctrl-C, because the lab stops its programs in a specific order.
            .process_group(0);
        let child = command.spawn().map_err(|error| {
            LabError::usage(format!("cannot start {} (`{}`): {error}", launch.name, launch.command.join(" ")))
        })?;
        Ok(Self { name: launch.name.clone(), child, log: launch.log.clone(), log_start, ended: None })
    }

    pub(crate) fn attach(
        name: &str,
        command: Vec<String>,
        mark: &str,
        log: PathBuf,
    ) -> Result<Self, LabError> {
        let (name, mark) = (name.to_owned(), mark.to_owned());
        Self::start(&Launch { name, command, mark, log, ..Launch::default() })
    }

    pub(crate) fn detach(mut self) {
        self.signal(Signal::INT);
        self.wait(Instant::now() + WRITE, || false);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the prefix commands have exec'ed the program, or until the timeout.
    pub(crate) fn settle(&mut self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let comm = format!("/proc/{}/comm", self.pid());
        while Instant::now() < deadline && self.ended().is_none() {
            let name = fs::read_to_string(&comm).unwrap_or_default();
            if !["nsenter", "taskset", "ip"].contains(&name.trim()) {
                return;
            }
            thread::sleep(LOOK);
        }
    }

    /// Waits until this perf process has opened its counters; if it were interrupted earlier, it would write no result.
    pub(crate) fn await_counters(&mut self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let descriptors = format!("/proc/{}/fd", self.pid());
        let counts = || {
            fs::read_dir(&descriptors).into_iter().flatten().flatten().any(|entry| {
                fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == "anon_inode:[perf_event]")
            })
        };
        while !counts() && self.ended().is_none() && Instant::now() < deadline {
            thread::sleep(LOOK);
        }
    }

    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            // Waiting cannot fail, because the child is reaped only here.
            self.ended = self.child.try_wait().unwrap_or(None);
        }
        self.ended
    }

    pub(crate) fn wait(&mut self, deadline: Instant, stop: impl Fn() -> bool) -> Option<ExitStatus> {
        loop {
            let ended = self.ended();
            if ended.is_some() || Instant::now() >= deadline || stop() {
                return ended;
            }
            thread::sleep(LOOK);
        }
    }

    pub(crate) fn stop(&mut self) {
        if self.ended().is_none() {
            self.signal(Signal::TERM);
            self.wait(Instant::now() + GRACE, || false);
        }
        self.signal(Signal::KILL);
        if self.ended.is_none() {
            self.ended = self.child.wait().ok();
        }
    }

    pub(crate) fn exit_report(&mut self) -> String {
        let how = match self.ended() {
            None => "is running".to_owned(),
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("exited with code {code}"),
                (None, Some(signal)) => format!("was killed by signal {signal}"),
                (None, None) => "ended".to_owned(),
            },
        };
        let words = exit_excerpt::of(&self.log, self.log_start);
        if words.is_empty() {
            format!("{} {how}", self.name)
        } else {
            format!("{} {how}; output: {words}", self.name)
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = to_pid(self.child.id()) {
            // The call fails only if no process of the group is left.
            let _ = kill_process_group(pid, signal);
        }
    }
}

impl Drop for ChildProgram {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Processes marked with [`MARK`]` = id`, except this one and its ancestors.
pub(crate) fn marked(id: &str) -> Vec<u32> {
    let spared = ancestors();
    let carries = |process: &Process| {
        process.environ().is_ok_and(|environ| {
            environ.get(OsStr::new(MARK)).is_some_and(|mark| mark.as_os_str() == OsStr::new(id))
        })
    };
    all_processes()
        .filter(carries)
        .filter_map(|process| pid_of(&process))
        .filter(|pid| !spared.contains(pid))
        .collect()
}

/// Kills all processes with the mark, including any that they start in the meantime.
pub(crate) fn sweep(id: &str) {
    let deadline = Instant::now() + GRACE;
    loop {
        let pids = marked(id);
        if pids.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in pids.into_iter().filter_map(to_pid) {
            let _ = kill_process(pid, Signal::KILL);
        }
        thread::sleep(LOOK);
    }
}

pub(crate) fn members(leader: u32) -> impl Iterator<Item = Process> {
    let leader = i32::try_from(leader).ok();
    all_processes().filter(move |process| process.stat().is_ok_and(|stat| Some(stat.pgrp) == leader))
}

pub(crate) fn group(leader: u32) -> Vec<u32> {
    let mut pids: Vec<u32> = members(leader).filter_map(|process| pid_of(&process)).collect();
    pids.sort_by_key(|pid| *pid != leader);
    pids
}

/// Start time in clock ticks since boot. Together with the process ID, it identifies a process.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    // A zombie counts as gone.
    stat(pid).filter(|stat| stat.state != 'Z').map(|stat| stat.starttime)
}

pub(crate) fn to_pid(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

fn all_processes() -> impl Iterator<Item = Process> {
    process::all_processes().into_iter().flatten().flatten()
}

fn pid_of(process: &Process) -> Option<u32> {
    u32::try_from(process.pid()).ok()
}

fn stat(pid: u32) -> Option<Stat> {
    Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok()
}

fn ancestors() -> Vec<u32> {
    let mut line = vec![std::process::id()];
    while let Some(&pid) = line.last()
        && let Some(parent) = stat(pid).and_then(|stat| u32::try_from(stat.ppid).ok())
        && parent > 0
        && !line.contains(&parent)
    {
        line.push(parent);
    }
    line
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use turnpike_testkit::Dir;

    use super::*;
    use crate::tools::words;

    fn launch(directory: &Path, script: &str, mark: &str) -> Launch {
        Launch {
            name: "probe".to_owned(),
            command: words(["sh", "-c", script]),
            mark: mark.to_owned(),
            log: directory.join("log"),
            ..Launch::default()
        }
    }

    #[test]
    fn a_program_that_ignores_sigterm_is_killed_with_its_children() {
        let directory = Dir::new();
        let mark = format!("test-{}-a", std::process::id());
        let mut program =
            ChildProgram::start(&launch(directory.path(), "trap '' TERM; sleep 600 & sleep 600", &mark))
                .unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while marked(&mark).len() < 3 {
            assert!(Instant::now() < deadline, "the children never started");
            thread::sleep(LOOK);
        }
        program.stop();
        assert!(program.exit_report().contains("signal 9"), "{}", program.exit_report());
        let deadline = Instant::now() + Duration::from_secs(10);
        while !marked(&mark).is_empty() {
            assert!(Instant::now() < deadline, "children were left");
            thread::sleep(LOOK);
        }
    }

    #[test]
    fn a_daemon_that_left_its_group_is_found_by_its_mark() {
        let directory = Dir::new();
        let mark = format!("test-{}-b", std::process::id());
        let mut program =
            ChildProgram::start(&launch(directory.path(), "setsid sleep 600 & exit 0", &mark)).unwrap();
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("the shell exits");
        program.stop();
        sweep(&mark);
        assert_eq!(marked(&mark), Vec::<u32>::new());
    }

    #[test]
    fn an_exit_report_has_the_exit_code_and_last_output() {
        let directory = Dir::new();
        let mut program =
            ChildProgram::start(&launch(directory.path(), "echo no such port; exit 3", "x")).unwrap();
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("the program exits");
        assert_eq!(program.exit_report(), "probe exited with code 3; output: no such port");
    }

    #[test]
    fn an_exit_report_keeps_the_error_despite_later_output() {
        let directory = Dir::new();
        let script = "echo ERROR no such port; for i in 1 2 3 4 5 6 7 8 9; do echo stopping $i; done; exit 3";
        let mut program = ChildProgram::start(&launch(directory.path(), script, "x")).unwrap();
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("the program exits");
        assert_eq!(
            program.exit_report(),
            "probe exited with code 3; output: ERROR no such port / … / stopping 7 / stopping 8 / stopping 9"
        );
    }

    #[test]
    fn an_exit_report_ignores_errors_from_earlier_runs() {
        let directory = Dir::new();
        fs::write(directory.at("log"), "ERROR from an earlier run\n").unwrap();
        let mut program =
            ChildProgram::start(&launch(directory.path(), "echo no route; exit 3", "x")).unwrap();
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("the program exits");
        assert_eq!(program.exit_report(), "probe exited with code 3; output: no route");
    }

    #[test]
    fn programs_get_no_server_settings_from_the_environment() {
        let directory = Dir::new();
        let mut program = ChildProgram::start(&launch(directory.path(), "env", "7.0")).unwrap();
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("the program exits");
        let said = fs::read_to_string(directory.at("log")).unwrap();
        assert!(said.lines().any(|line| line == format!("{MARK}=7.0")), "{said}");
        let inherited: Vec<String> = std::env::vars().map(|(name, _)| name).collect();
        let added = said
            .lines()
            .filter_map(|line| line.split_once('=').map(|(name, _)| name.to_owned()))
            .filter(|name| name.starts_with("TURNPIKE_") && !inherited.contains(name));
        assert_eq!(added.collect::<Vec<_>>(), Vec::<String>::new());
    }

    #[test]
    fn a_missing_process_has_no_start_time() {
        assert!(start_time(std::process::id()).is_some());
        assert_eq!(start_time(u32::MAX), None);
    }
}
