//! Real programs through `turnpike forward`, each with its own server, and all at once through one process.

mod curl;
mod dns;
mod nginx;
mod postgres;
mod ssh;
mod together;

use crate::prelude::*;
use std::{
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _},
        process::CommandExt as _,
    },
    sync::atomic::AtomicUsize,
};

use turnpike_testkit::certificates;

const NOBODY: u32 = 65_534;

/// Files and user of a server. The user is `nobody` if the tests run as root, because initdb(1) refuses root. The
/// files are outside `target`, which that user may be unable to read.
struct Workshop {
    path: PathBuf,
    owner: Option<u32>,
}

impl Workshop {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("turnpike-interop-{}-{number}", std::process::id()));
        fs::create_dir(&path).expect("the directory for temporary files can be written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("the mode can be set");
        let owner = is_root().then_some(NOBODY);
        let workshop = Self { path, owner };
        workshop.give(&workshop.path);
        workshop
    }

    fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).expect("a fresh directory can be written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("the mode can be set");
        self.give(&path);
        path
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.path).env("LC_ALL", "C");
        if let Some(owner) = self.owner {
            command.uid(owner).gid(owner);
        }
        command
    }

    fn give(&self, path: &Path) {
        if self.owner.is_some() {
            std::os::unix::fs::chown(path, self.owner, self.owner).expect("root may change the owner");
        }
    }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn all_installed(programs: &[&str]) -> Result<(), String> {
    programs.iter().try_for_each(|program| installed(program).map(drop))
}

fn run(command: &mut Command) -> Finished {
    let name = format!("{command:?}");
    let ended = Program::start(command).wait(SOON * 2);
    assert_eq!(ended.code, Some(0), "{name}: {}", ended.output());
    ended
}

/// Bytes that do not repeat within any buffer, so that a lost or repeated part is noticed.
fn noise(len: u64) -> Vec<u8> {
    (0..len).map(|at| at.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0]).collect()
}

const NAME: &str = "forwarded.test";

struct Certificate {
    key: PathBuf,
    certificate: PathBuf,
    pem: String,
}

impl Certificate {
    fn new(workshop: &Workshop) -> Self {
        let certificates::Certificate { pem, key } = certificates::Certificate::new(&[NAME]);
        let (key, certificate) = (workshop.file("key.pem", key), workshop.file("certificate.pem", &pem));
        Self { key, certificate, pem: pem.trim().to_owned() }
    }
}
