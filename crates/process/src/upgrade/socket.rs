//! Unix socket for upgrade requests to a running process, named by its process ID, in a directory that other users
//! cannot write to.
//!
//! ```text
//! upgrade [PROGRAM]                                the request, one line
//! step started /usr/bin/turnpike as process 7      the answer: one line per step,
//! done process 7 serves 812 sessions ...           and "done" or "failed" at the end
//! ```

use std::{
    fs,
    io::{self, BufRead as _, Write as _},
    os::{
        fd::AsFd as _,
        unix::{
            ffi::OsStrExt as _,
            net::{UnixListener as StdListener, UnixStream as StdStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
    sync::mpsc,
    task::AbortHandle,
    time::timeout,
};
use turnpike_config::runtime_directory;
use turnpike_net::SocketFile;
use turnpike_wire::address::UnixName;

use crate::request::{Request, UpgradeProgress, UpgradeRequest};

const ENDING: &str = "sock";
/// Maximum length of a line in bytes: a path (PATH_MAX) and a keyword.
const LINE: u64 = 5000;
/// Time for a client to send its request.
const ASKING: Duration = Duration::from_secs(5);
/// Time without a step after which [`ask`] gives up: longer than the longest step.
const SILENCE: Duration = Duration::from_secs(120);

/// The socket is open until this is dropped.
pub(crate) struct UpgradeSocket {
    task: AbortHandle,
    _file: SocketFile,
}

impl UpgradeSocket {
    /// Opens the socket if this process has a runtime directory.
    pub(crate) fn open(requests: mpsc::Sender<Request>) -> Option<Self> {
        let directory = runtime_directory::own();
        let opened = directory.prepare().and_then(|()| Self::in_directory(&directory.path, requests));
        opened
            .inspect_err(|error| {
                tracing::warn!(
                    "no socket for `turnpike upgrade` in {} ({error}); use SIGUSR2 instead",
                    directory.path.display()
                );
            })
            .ok()
    }

    fn in_directory(directory: &Path, requests: mpsc::Sender<Request>) -> io::Result<Self> {
        sweep(directory);
        let path = directory.join(format!("{}.{ENDING}", std::process::id()));
        let name = path.to_str().ok_or(io::ErrorKind::InvalidInput)?;
        let name =
            name.parse::<UnixName>().map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let (listener, file) = turnpike_net::UnixListener::bind(&name.address()?, Some(0o600))?;
        let listener = StdListener::from(listener.as_fd().try_clone_to_owned()?);
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let task = tokio::spawn(listen(listener, requests)).abort_handle();
        Ok(Self { task, _file: file })
    }
}

impl Drop for UpgradeSocket {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn listen(listener: UnixListener, requests: mpsc::Sender<Request>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => _ = tokio::spawn(answer(stream, requests.clone())),
            // Descriptors have run out.
            Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
    }
}

async fn answer(mut stream: UnixStream, requests: mpsc::Sender<Request>) {
    let us = rustix::process::geteuid().as_raw();
    let is_trusted = stream.peer_cred().is_ok_and(|peer| [0, us].contains(&peer.uid()));
    if !is_trusted {
        let _ = stream.write_all(b"failed only root and this service's user may request an upgrade\n").await;
        return;
    }
    let mut line = String::new();
    let (reading, mut writing) = stream.split();
    let asked = timeout(ASKING, BufReader::new(reading.take(LINE)).read_line(&mut line)).await;
    if !asked.is_ok_and(|read| read.is_ok()) {
        return;
    }
    let program = match line.trim_end_matches('\n').split_once(' ') {
        Some(("upgrade", program)) => Some(PathBuf::from(program)),
        None if line == "upgrade\n" => None,
        _ => {
            let _ = writing.write_all(b"failed expected `upgrade [PROGRAM]`\n").await;
            return;
        }
    };
    let (progress, mut steps) = mpsc::unbounded_channel();
    if requests.send(Request::Upgrade(UpgradeRequest { program, progress: Some(progress) })).await.is_err() {
        return;
    }
    while let Some(step) = steps.recv().await {
        let (verb, text) = match step {
            UpgradeProgress::Step(text) => ("step", text),
            UpgradeProgress::Done(text) => ("done", text),
            UpgradeProgress::Failed(text) => ("failed", text),
        };
        let line = format!("{verb} {}\n", text.replace('\n', "; "));
        if writing.write_all(line.as_bytes()).await.is_err() {
            // The client is gone; the upgrade continues.
            return;
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    Only,
    Process(u32),
    Socket(PathBuf),
}

/// Reason why an upgrade was not requested or failed; each message states a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    #[error(
        "no running turnpike found in {0}; give its socket with --socket, or send the process SIGUSR2 and read its log"
    )]
    Nobody(String),
    #[error("several processes are running: {0}; choose one with --pid")]
    Several(String),
    #[error("cannot connect to {}: {source}; send the process SIGUSR2 and read its log", path.display())]
    Connect { path: PathBuf, source: io::Error },
    #[error("the process closed the connection without an answer; see its log")]
    Silent(#[source] io::Error),
    #[error("not upgraded; the process keeps serving: {0}")]
    Failed(String),
}

/// Requests an upgrade of a running process to `program`, by default its own program. Each step goes to
/// `step`; returns a summary.
pub fn ask(which: &Which, program: Option<&Path>, mut step: impl FnMut(&str)) -> Result<String, AskError> {
    let path = match which {
        Which::Socket(path) => path.clone(),
        Which::Process(id) => only(sockets().into_iter().filter(|(other, _)| other == id).collect())?,
        Which::Only => only(sockets())?,
    };
    let unreachable = |source| AskError::Connect { path: path.clone(), source };
    let mut stream = StdStream::connect(&path).map_err(unreachable)?;
    stream.set_read_timeout(Some(SILENCE)).map_err(unreachable)?;
    let asked = match program {
        None => b"upgrade\n".to_vec(),
        Some(program) => [b"upgrade ", program.as_os_str().as_bytes(), b"\n"].concat(),
    };
    stream.write_all(&asked).map_err(AskError::Silent)?;
    for line in io::BufReader::new(stream).lines() {
        let line = line.map_err(AskError::Silent)?;
        match line.split_once(' ') {
            Some(("done", text)) => return Ok(text.to_owned()),
            Some(("failed", text)) => return Err(AskError::Failed(text.to_owned())),
            Some((_, text)) => step(text),
            None => {}
        }
    }
    Err(AskError::Silent(io::ErrorKind::UnexpectedEof.into()))
}

fn only(mut found: Vec<(u32, PathBuf)>) -> Result<PathBuf, AskError> {
    match found.len() {
        0 => {
            let named: Vec<String> = directories().iter().map(|path| path.display().to_string()).collect();
            Err(AskError::Nobody(named.join(", ")))
        }
        1 => Ok(found.remove(0).1),
        _ => {
            let numbers: Vec<String> = found.iter().map(|(id, _)| id.to_string()).collect();
            Err(AskError::Several(numbers.join(", ")))
        }
    }
}

fn sockets() -> Vec<(u32, PathBuf)> {
    let mut found: Vec<(u32, PathBuf)> =
        directories().iter().flat_map(|directory| in_directory(directory)).collect();
    found.sort();
    found.dedup();
    found.retain(|(_, path)| StdStream::connect(path).is_ok());
    found
}

fn in_directory(directory: &Path) -> Vec<(u32, PathBuf)> {
    let named = |entry: io::Result<fs::DirEntry>| {
        let path = entry.ok()?.path();
        let number = path.file_stem()?.to_str()?.parse::<u32>().ok()?;
        (path.extension()? == ENDING).then_some((number, path))
    };
    fs::read_dir(directory).map_or_else(|_| Vec::new(), |entries| entries.filter_map(named).collect())
}

/// Removes the sockets of processes that exited without removing them. Also checks the process ID,
/// because a running process may have bound its socket without listening yet.
fn sweep(directory: &Path) {
    for (id, path) in in_directory(directory) {
        let refuses =
            || StdStream::connect(&path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        if !Path::new("/proc").join(id.to_string()).exists() && refuses() {
            let _ = fs::remove_file(path);
        }
    }
}

fn directories() -> Vec<PathBuf> {
    runtime_directory::all().into_iter().map(|directory| directory.path).collect()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::MetadataExt as _, thread};

    use turnpike_testkit::Dir;

    use super::*;

    fn asked(
        program: Option<&'static str>,
        act: impl Fn(Option<PathBuf>, &mpsc::UnboundedSender<UpgradeProgress>) + Send + 'static,
    ) -> (Vec<String>, Result<String, AskError>) {
        let dir = Dir::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (sender, mut requests) = mpsc::channel(1);
            let socket = UpgradeSocket::in_directory(dir.path(), sender).expect("the directory is writable");
            let (number, path) = in_directory(dir.path()).pop().expect("a socket");
            assert_eq!(number, std::process::id());
            assert_eq!(fs::metadata(&path).expect("the socket exists").mode() & 0o777, 0o600);
            let asking = thread::spawn(move || {
                let mut steps = Vec::new();
                let which = Which::Socket(path);
                let result = ask(&which, program.map(Path::new), |step| steps.push(step.to_owned()));
                (steps, result)
            });
            let Some(Request::Upgrade(UpgradeRequest { program, progress: Some(progress) })) =
                requests.recv().await
            else {
                panic!("no request")
            };
            act(program, &progress);
            drop(progress);
            let answer =
                tokio::task::spawn_blocking(|| asking.join().expect("no panic")).await.expect("no panic");
            drop(socket);
            assert!(in_directory(dir.path()).is_empty(), "the socket is left behind");
            answer
        })
    }

    #[test]
    fn each_step_and_the_end_are_reported() {
        let (steps, result) = asked(None, |program, told| {
            assert_eq!(program, None);
            for text in ["one", "two\nlines"] {
                told.send(UpgradeProgress::Step(text.to_owned())).expect("the client listens");
            }
            told.send(UpgradeProgress::Done("all is well".to_owned())).expect("the client listens");
        });
        assert_eq!(steps, ["one", "two; lines"]);
        assert_eq!(result.expect("done"), "all is well");
    }

    #[test]
    fn a_refusal_and_silence_are_errors() {
        let (_, refused) = asked(Some("/usr/bin/new one"), |program, told| {
            assert_eq!(program.as_deref(), Some(Path::new("/usr/bin/new one")));
            told.send(UpgradeProgress::Failed("no room".to_owned())).expect("the client listens");
        });
        let text = refused.expect_err("refused").to_string();
        assert!(text.contains("no room") && text.contains("keeps serving"), "{text}");
        let (_, silent) = asked(None, |_, _| {});
        assert!(matches!(silent, Err(AskError::Silent(_))), "{silent:?}");
    }

    #[test]
    fn unknown_requests_are_answered_with_the_usage() {
        let dir = Dir::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (sender, _requests) = mpsc::channel(1);
            let _socket = UpgradeSocket::in_directory(dir.path(), sender).expect("the directory is writable");
            let path = in_directory(dir.path()).remove(0).1;
            for request in ["restart\n", "upgrade", "\n", "upgrades /x\n"] {
                let mut stream = UnixStream::connect(&path).await.expect("the process listens");
                stream.write_all(request.as_bytes()).await.expect("the process listens");
                stream.shutdown().await.expect("the stream is open");
                let mut answer = String::new();
                stream.read_to_string(&mut answer).await.expect("an end");
                assert!(
                    answer.starts_with("failed ") && answer.contains("upgrade [PROGRAM]"),
                    "{request:?}: {answer:?}"
                );
            }
        });
    }

    #[test]
    fn only_sockets_without_a_listener_are_removed() {
        let dir = Dir::new();
        // No process ID exceeds PID_MAX_LIMIT.
        let (gone, ours) = ("4194305.sock", format!("{}.sock", std::process::id()));
        drop(StdListener::bind(dir.at(gone)).expect("an unused path"));
        drop(StdListener::bind(dir.at(&ours)).expect("an unused path"));
        let _listening = StdListener::bind(dir.at("4194306.sock")).expect("an unused path");
        drop(StdListener::bind(dir.at("app.sock")).expect("an unused path"));
        sweep(dir.path());
        let left = [gone, &ours, "4194306.sock", "app.sock"].map(|name| dir.at(name).exists());
        assert_eq!(left, [false, true, true, true]);
    }

    #[test]
    fn several_or_no_processes_are_reported() {
        let at = |id| (id, PathBuf::from(format!("/run/{id}.sock")));
        assert_eq!(only(vec![at(7)]).expect("one"), PathBuf::from("/run/7.sock"));
        let several = only(vec![at(7), at(8)]).expect_err("two").to_string();
        assert!(several.contains("7, 8") && several.contains("--pid"), "{several}");
        let none = only(Vec::new()).expect_err("none").to_string();
        assert!(none.contains("/run/turnpike") && none.contains("SIGUSR2"), "{none}");
    }
}
