//! A running program: its own process group, ended by pid, and an environment mark by which even what it has started
//! in turn (daemons included) is found and ended.

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

/// Every process that the lab starts carries this variable, set to the lab's id. Its name does not begin as those do that
/// set up `turnpike serve` and `forward`: they warn of such a variable when they do not know it.
pub(crate) const MARK: &str = "TPLAB";

/// From SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(2);
/// For a perf or a tracer to write its result.
const WRITE: Duration = Duration::from_secs(20);
/// Between two looks at a process that is to end.
const LOOK: Duration = Duration::from_millis(5);

/// What to start and how.
#[derive(Clone, Debug, Default)]
pub(crate) struct Launch {
    /// For messages.
    pub(crate) name: String,
    /// Put before the command: enters a namespace; must become the command by `exec`, so that the pid stays.
    pub(crate) entry: Vec<String>,
    pub(crate) command: Vec<String>,
    pub(crate) directory: Option<PathBuf>,
    pub(crate) environment: Vec<(String, String)>,
    /// A list as `taskset -c` takes it, such as `0` or `1-3`.
    pub(crate) cpus: Option<String>,
    /// The value of [`MARK`].
    pub(crate) mark: String,
    /// Standard output and error.
    pub(crate) log: PathBuf,
    /// Standard output on its own, where it is the result.
    pub(crate) output: Option<PathBuf>,
}

/// A process group; ended when dropped.
#[derive(Debug)]
pub(crate) struct ChildProgram {
    pub(crate) name: String,
    /// Of the command, as it may begin its messages.
    file_name: String,
    child: Child,
    log: PathBuf,
    /// Length of the log when it started: what stands before is of an earlier run.
    log_start: u64,
    ended: Option<ExitStatus>,
}

impl ChildProgram {
    /// Starts the program; its pid is that of the command itself, through namespace entry and pinning.
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
            // Ctrl-C must reach the lab alone: it ends its programs in its own order.
            .process_group(0);
        if let Some(directory) = &launch.directory {
            command.current_dir(directory);
        }
        let child = command.spawn().map_err(|error| {
            LabError::usage(format!("cannot start {} (`{}`): {error}", launch.name, launch.command.join(" ")))
        })?;
        let file_name = launch.command.first().and_then(|word| word.rsplit('/').next()).unwrap_or_default();
        Ok(Self {
            name: launch.name.clone(),
            file_name: file_name.to_owned(),
            child,
            log: launch.log.clone(),
            log_start,
            ended: None,
        })
    }

    /// Starts a perf or a tracer that looks at other programs until [`ChildProgram::detach`].
    pub(crate) fn attach(
        name: &str,
        command: Vec<String>,
        mark: &str,
        log: PathBuf,
    ) -> Result<Self, LabError> {
        let (name, mark) = (name.to_owned(), mark.to_owned());
        Self::start(&Launch { name, command, mark, log, ..Launch::default() })
    }

    /// Ends it, and waits until its result is written.
    pub(crate) fn detach(mut self) {
        self.signal(Signal::INT);
        self.wait(Instant::now() + WRITE, || false);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the entry commands have become the program (they keep the pid but not the name), or `patience` is over.
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

    /// Waits until this program, a perf, has opened its counters, has ended, or `patience` is over: before that it sees
    /// nothing, and an interrupt would end it without a result.
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

    /// The exit status if the program has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            // An error means that there is no such child, which cannot be: nobody else waits for it.
            self.ended = self.child.try_wait().unwrap_or(None);
        }
        self.ended
    }

    /// Waits until the program ends, `stop` says so, or the deadline; the status if it ended.
    pub(crate) fn wait(&mut self, deadline: Instant, stop: impl Fn() -> bool) -> Option<ExitStatus> {
        loop {
            let ended = self.ended();
            if ended.is_some() || Instant::now() >= deadline || stop() {
                return ended;
            }
            thread::sleep(LOOK);
        }
    }

    /// SIGTERM to the group, and SIGKILL to what is left after a grace period.
    pub(crate) fn stop(&mut self) {
        if self.ended().is_none() {
            self.signal(Signal::TERM);
            self.wait(Instant::now() + GRACE, || false);
        }
        // The leader may be gone and its children not.
        self.signal(Signal::KILL);
        if self.ended.is_none() {
            self.ended = self.child.wait().ok();
        }
    }

    /// How it ended and its last words, for a report.
    pub(crate) fn obituary(&mut self) -> String {
        let how = match self.ended() {
            None => "is running".to_owned(),
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("exited with code {code}"),
                (None, Some(signal)) => format!("was killed by signal {signal}"),
                (None, None) => "ended".to_owned(),
            },
        };
        let words = exit_excerpt::of(&self.log, self.log_start, &self.file_name);
        if words.is_empty() {
            format!("{} {how}", self.name)
        } else {
            format!("{} {how}; it said: {words}", self.name)
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = to_pid(self.child.id()) {
            // Fails only if the whole group is gone.
            let _ = kill_process_group(pid, signal);
        }
    }
}

impl Drop for ChildProgram {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Pids of all processes, other than this one and its ancestors, that carry [`MARK`]` = id`.
pub(crate) fn marked(id: &str) -> Vec<u32> {
    let spared = ancestors();
    // Other people's processes cannot be read and are not ours.
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

/// Ends everything that carries the mark, what it starts meanwhile included.
pub(crate) fn sweep(id: &str) {
    let deadline = Instant::now() + GRACE;
    loop {
        let pids = marked(id);
        if pids.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in pids.into_iter().filter_map(to_pid) {
            // It may be gone by now.
            let _ = kill_process(pid, Signal::KILL);
        }
        thread::sleep(LOOK);
    }
}

/// The processes of a group.
pub(crate) fn members(leader: u32) -> impl Iterator<Item = Process> {
    let leader = i32::try_from(leader).ok();
    all_processes().filter(move |process| process.stat().is_ok_and(|stat| Some(stat.pgrp) == leader))
}

/// Their pids, the leader's first.
pub(crate) fn group(leader: u32) -> Vec<u32> {
    let mut pids: Vec<u32> = members(leader).filter_map(|process| pid_of(&process)).collect();
    pids.sort_by_key(|pid| *pid != leader);
    pids
}

/// When a process started, in clock ticks since boot: with the pid, its identity. `None` once it is gone.
pub(crate) fn birth(pid: u32) -> Option<u64> {
    // A zombie has all but gone.
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
    fn a_program_that_ignores_sigterm_is_ended_with_its_children() {
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
        assert!(program.obituary().contains("signal 9"), "{}", program.obituary());
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
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("the shell ends");
        program.stop();
        sweep(&mark);
        assert_eq!(marked(&mark), Vec::<u32>::new());
    }

    #[test]
    fn an_obituary_tells_the_code_and_the_last_words() {
        let directory = Dir::new();
        let mut program =
            ChildProgram::start(&launch(directory.path(), "echo no such port; exit 3", "x")).unwrap();
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("it ends");
        assert_eq!(program.obituary(), "probe exited with code 3; it said: no such port");
    }

    #[test]
    fn the_error_is_told_even_when_much_is_said_after_it() {
        let directory = Dir::new();
        let script = "echo ERROR no such port; for i in 1 2 3 4 5 6 7 8 9; do echo stopping $i; done; exit 3";
        let mut program = ChildProgram::start(&launch(directory.path(), script, "x")).unwrap();
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("it ends");
        assert_eq!(
            program.obituary(),
            "probe exited with code 3; it said: ERROR no such port / … / stopping 7 / stopping 8 / stopping 9"
        );
    }

    #[test]
    fn an_error_of_an_earlier_run_in_the_same_log_is_not_told() {
        let directory = Dir::new();
        fs::write(directory.at("log"), "ERROR of the run before\n").unwrap();
        let mut program =
            ChildProgram::start(&launch(directory.path(), "echo no route; exit 3", "x")).unwrap();
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("it ends");
        assert_eq!(program.obituary(), "probe exited with code 3; it said: no route");
    }

    #[test]
    fn a_program_gets_no_variable_that_looks_like_a_setting_of_the_server() {
        let directory = Dir::new();
        let mut program = ChildProgram::start(&launch(directory.path(), "env", "7.0")).unwrap();
        program.wait(Instant::now() + Duration::from_secs(10), || false).expect("it ends");
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
    fn birth_is_none_for_a_process_that_is_not() {
        assert!(birth(std::process::id()).is_some());
        assert_eq!(birth(u32::MAX), None);
    }
}
