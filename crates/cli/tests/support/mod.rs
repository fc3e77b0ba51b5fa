//! Runs the program in the background and follows its log lines.
#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

/// How long anything may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// A running command of the program; ended when dropped.
pub(crate) struct Server {
    child: Child,
    lines: Receiver<String>,
    /// All log lines so far.
    pub(crate) seen: String,
}

impl Server {
    /// `turnpike serve` with one worker, relaying on loopback.
    pub(crate) fn serve(arguments: &[&str]) -> Self {
        let mut all = vec!["serve", "--relay-ip", "127.0.0.1", "--workers", "1"];
        all.extend(arguments);
        Self::start(&all)
    }

    /// Any long-running command.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_turnpike"))
            .args(arguments)
            .env_remove("TURNPIKE_CONFIG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let lines = lines_of(child.stderr.take().expect("piped"));
        Self { child, lines, seen: String::new() }
    }

    /// Waits for a log line that holds `text`, and gives what follows in that line up to a blank.
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                panic!("no line with {text:?} in\n{}", self.seen);
            };
            self.seen.push_str(&line);
            self.seen.push('\n');
            if let Some((_, rest)) = line.split_once(text) {
                return rest.split(' ').next().unwrap_or_default().to_owned();
            }
        }
    }

    /// Sends SIGTERM and the like.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &pid]).status().expect("kill runs");
        assert!(status.success());
    }

    /// How it ended, once it has.
    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                self.seen.extend(self.lines.iter().flat_map(|line| [line, "\n".to_owned()]));
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end:\n{}", self.seen);
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// All that it printed; only after its end.
    pub(crate) fn stdout(&mut self) -> String {
        let mut text = String::new();
        self.child.stdout.take().expect("piped").read_to_string(&mut text).expect("UTF-8");
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines_of(stderr: ChildStderr) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}
