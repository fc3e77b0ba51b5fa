//! A child process of a test: its output is kept, every wait for it is bounded, and it is killed on drop.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{SOON, eventually};

type Lines = Arc<Mutex<Vec<String>>>;

pub struct Program {
    name: String,
    child: Child,
    stdout: Lines,
    stderr: Lines,
    readers: Vec<JoinHandle<()>>,
}

pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    pub fn output(&self) -> String {
        format!("{}\n{}", self.stdout, self.stderr)
    }

    #[track_caller]
    pub fn ended(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.output());
        self
    }

    #[track_caller]
    pub fn says(self, text: &str) -> Self {
        assert!(self.stderr.contains(text), "no {text:?} in {}", self.output());
        self
    }
}

impl Program {
    pub fn start(command: &mut Command) -> Self {
        Self::start_with(command.stdin(Stdio::null()).stdout(Stdio::piped()))
    }

    pub fn start_with(command: &mut Command) -> Self {
        let name = format!("{command:?}");
        let mut child =
            command.stderr(Stdio::piped()).spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        let (stdout, stderr) = (Lines::default(), Lines::default());
        let of_stdout = child.stdout.take().map(|stream| collect(stream, &stdout));
        let of_stderr = child.stderr.take().map(|stream| collect(stream, &stderr));
        let readers = of_stdout.into_iter().chain(of_stderr).collect();
        Self { name, child, stdout, stderr, readers }
    }

    pub fn run(command: &mut Command) -> Finished {
        Self::start(command).wait(SOON * 2)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Output so far, line by line, standard error last.
    pub fn lines(&self) -> Vec<String> {
        [&self.stdout, &self.stderr].iter().flat_map(|lines| snapshot(lines)).collect()
    }

    pub fn line_with(&mut self, text: &str) -> String {
        eventually(&format!("{}: a line with {text:?}", self.name), || {
            // The last lines may still be in the pipe. After an upgrade, several processes share it.
            let is_silent = self.has_ended() && self.readers.iter().all(JoinHandle::is_finished);
            let found = self.lines().into_iter().find(|line| line.contains(text));
            assert!(found.is_some() || !is_silent, "{} exited without a line with {text:?}", self.name);
            found
        })
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("the test can wait for its own child").is_some()
    }

    pub fn signal(&self, name: &str) {
        // Uses the shell's built-in `kill`, because the program may be missing and a system call would need `unsafe`.
        let script = format!("kill -{name} {}", self.pid());
        let status = Command::new("sh").args(["-c", &script]).status().expect("every Linux has sh");
        assert!(status.success(), "{script}");
    }

    /// Waits for the process to end.
    ///
    /// # Panics
    /// If it is still running after `deadline`.
    pub fn wait(mut self, deadline: Duration) -> Finished {
        let until = Instant::now() + deadline;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the test can wait for its own child") {
                break status;
            }
            assert!(Instant::now() < until, "{} is still running after {deadline:?}", self.name);
            thread::sleep(Duration::from_millis(10));
        };
        self.readers.drain(..).for_each(|reader| reader.join().expect("a reader does not panic"));
        Finished {
            code: status.code(),
            stdout: snapshot(&self.stdout).join("\n"),
            stderr: snapshot(&self.stderr).join("\n"),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            println!("--- {}", self.name);
            self.lines().iter().for_each(|line| println!("    {line}"));
        }
    }
}

fn collect(stream: impl Read + Send + 'static, lines: &Lines) -> JoinHandle<()> {
    let lines = Arc::clone(lines);
    thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut bytes = Vec::new();
        // Not `lines()`, which stops at the first byte that is not UTF-8.
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|len| len > 0) {
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            lines.lock().expect("no thread panics while holding the lock").push(line);
            bytes.clear();
        }
    })
}

fn snapshot(lines: &Lines) -> Vec<String> {
    lines.lock().expect("no thread panics while holding the lock").clone()
}
