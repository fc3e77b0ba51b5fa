//! Files and commands of a database server, which belong to a different user if the tests run as root.

use std::{
    fs,
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::Command,
};

const NOBODY: u32 = 65_534;

pub(super) fn make_dir(dir: &Path) {
    fs::create_dir(dir).expect("the directory for temporary files is writable");
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("the file belongs to this user");
    give(dir);
}

pub(super) fn file_in(dir: &Path, name: &str, content: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, content).expect("a new directory is writable");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("the file belongs to this user");
    give(&path);
    path
}

pub(super) fn command_in(dir: &Path, program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .current_dir(dir)
        .env_clear()
        .env("LC_ALL", "C")
        // MariaDB removes all temporary tables in this directory when it starts, including those of other servers.
        .env("TMPDIR", dir)
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn give(path: &Path) {
    if is_root() {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).expect("root may change the owner");
    }
}

pub(super) fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
}
