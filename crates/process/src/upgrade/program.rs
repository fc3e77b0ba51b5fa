//! Program to start in an upgrade.

use std::{
    env, fs,
    os::unix::{fs::MetadataExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command},
};

use turnpike_config::{UPGRADE_SANDBOX_VARIABLE, UPGRADE_VARIABLE};
use turnpike_worker::Channel;

use crate::{sandbox, service_manager::WATCHDOG_PID};

/// Suffix that the kernel appends to the path of a replaced program (proc(5), /proc/pid/exe).
const REPLACED: &str = " (deleted)";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProgramFile(PathBuf);

impl ProgramFile {
    /// The requested program, or the file that is now at this program's path.
    pub(crate) fn find(requested: Option<&Path>) -> Result<Self, String> {
        if std::process::id() == 1 {
            return Err(
                "this is process 1 of its container with sockets from a service manager, and the container would end with it: start a new \
                 container"
                    .to_owned(),
            );
        }
        match requested {
            Some(path) => Self::checked(path),
            None => Self::own(),
        }
    }

    fn own() -> Result<Self, String> {
        let running = env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
        let path = running
            .to_str()
            .and_then(|path| path.strip_suffix(REPLACED))
            .map_or_else(|| running.clone(), PathBuf::from);
        if path.is_file() {
            Ok(Self(path))
        } else {
            Err(format!("{} no longer exists: set the new program with --binary", path.display()))
        }
    }

    /// Clients of the upgrade socket may start any program that other users cannot write to.
    fn checked(path: &Path) -> Result<Self, String> {
        let refused = |why: String| format!("cannot start {}: {why}", path.display());
        if !path.is_absolute() {
            return Err(refused("not an absolute path".to_owned()));
        }
        let path = path.canonicalize().map_err(|error| refused(error.to_string()))?;
        let about = fs::metadata(&path).map_err(|error| refused(error.to_string()))?;
        if !about.is_file() {
            return Err(refused("not a file".to_owned()));
        }
        if ![0, rustix::process::geteuid().as_raw()].contains(&about.uid()) || about.mode() & 0o022 != 0 {
            return Err(refused("users other than root and this service's user can write to it".to_owned()));
        }
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn start(&self, channel: Channel) -> Result<Child, String> {
        let mut arguments = env::args_os();
        let mut command = Command::new(&self.0);
        if let Some(name) = arguments.next() {
            command.arg0(name);
        }
        let started = command
            .args(arguments)
            .env(UPGRADE_VARIABLE, "1")
            .env(UPGRADE_SANDBOX_VARIABLE, sandbox::layers())
            .env_remove(WATCHDOG_PID)
            .stdin(std::os::fd::OwnedFd::from(channel))
            .spawn();
        started.map_err(|error| {
            let failed = format!("cannot start {}: {error}", self.0.display());
            let remedy = sandbox::remedy(&failed).map(|remedy| format!("; {remedy}"));
            failed + remedy.as_deref().unwrap_or_default()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use turnpike_testkit::Dir;

    use super::*;

    #[test]
    fn the_default_program_is_the_running_one() {
        let program = ProgramFile::find(None).expect("the test program");
        assert_eq!(program.path(), env::current_exe().expect("the test program"));
    }

    #[test]
    fn a_program_writable_by_other_users_is_refused() {
        let dir = Dir::new();
        let file = dir.file("turnpike", "");
        let mode = |mode| {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("permissions can be set");
        };
        for strangers in [0o775, 0o757] {
            mode(strangers);
            let error = ProgramFile::find(Some(&file)).expect_err("other users can write to the program");
            assert!(error.contains("can write to it"), "{error}");
        }
        mode(0o755);
        assert_eq!(
            ProgramFile::find(Some(&file)).map(|program| program.0),
            Ok(file.canonicalize().expect("the file exists"))
        );
        // The link target is both checked and run.
        symlink(&file, dir.at("link")).expect("the directory is writable");
        let linked = ProgramFile::find(Some(&dir.at("link"))).expect("an acceptable program");
        assert_eq!(linked.path().file_name(), file.file_name());
        for (path, why) in [
            (dir.at("none"), "No such file"),
            (dir.path().to_owned(), "not a file"),
            (PathBuf::from("turnpike"), "absolute"),
        ] {
            let error = ProgramFile::find(Some(&path)).expect_err("no program");
            assert!(error.contains(why), "{error}");
        }
    }
}
