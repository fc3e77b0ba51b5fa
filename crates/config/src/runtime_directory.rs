//! Directory of a program's sockets: the service manager's, the user session's, or `/run/turnpike`.

use std::{
    env, fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

/// Used if there is neither a service manager nor a user session, as in a container.
const FALLBACK: &str = "/run/turnpike";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDirectory {
    pub path: PathBuf,
    pub origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `RUNTIME_DIRECTORY`: from systemd's `RuntimeDirectory=`, a container image, or an administrator.
    Service,
    /// `XDG_RUNTIME_DIR`: the session of a logged-in user.
    Session,
    Fallback,
}

pub fn own() -> RuntimeDirectory {
    all().swap_remove(0)
}

/// Directories where a turnpike process of this user or of the system may keep its sockets, most likely
/// first.
pub fn all() -> Vec<RuntimeDirectory> {
    of_environment(env::var_os("RUNTIME_DIRECTORY"), env::var_os("XDG_RUNTIME_DIR"))
}

fn of_environment(
    service: Option<impl Into<PathBuf>>,
    session: Option<impl Into<PathBuf>>,
) -> Vec<RuntimeDirectory> {
    // systemd separates several directories with colons.
    let first = |all: PathBuf| {
        let text = all.to_string_lossy();
        PathBuf::from(text.split(':').next().unwrap_or_default())
    };
    let service = service.map(Into::into).map(first);
    let session = session.map(Into::into);
    let session = session.filter(|path| path.is_absolute()).map(|path| path.join("turnpike"));
    let mut all: Vec<RuntimeDirectory> = Vec::new();
    for (path, origin) in
        [(service, Origin::Service), (session, Origin::Session), (Some(FALLBACK.into()), Origin::Fallback)]
    {
        let path = path.filter(|path| path.is_absolute() && all.iter().all(|other| other.path != *path));
        all.extend(path.map(|path| RuntimeDirectory { path, origin }));
    }
    all
}

impl RuntimeDirectory {
    /// Creates the directory for this user only. Fails if other users can write to it.
    pub fn prepare(&self) -> io::Result<()> {
        prepare(&self.path)
    }
}

fn prepare(directory: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let about = fs::symlink_metadata(directory)?;
    let own = rustix::process::geteuid().as_raw();
    if about.is_dir() && [0, own].contains(&about.uid()) && about.mode() & 0o022 == 0 {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, "other users can write to it"))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use turnpike_testkit::Dir;

    use super::*;

    #[test]
    fn service_comes_before_session_before_fallback() {
        let found = |service: Option<&str>, session: Option<&str>| {
            let all = of_environment(service, session);
            all.iter().map(|one| (one.path.display().to_string(), one.origin)).collect::<Vec<_>>()
        };
        let fallback = ("/run/turnpike".to_owned(), Origin::Fallback);
        assert_eq!(found(None, None), std::slice::from_ref(&fallback));
        assert_eq!(found(Some(""), Some("relative")), std::slice::from_ref(&fallback));
        assert_eq!(found(Some("/run/turnpike"), None), [("/run/turnpike".to_owned(), Origin::Service)]);
        assert_eq!(
            found(Some("/run/a:/run/b"), Some("/run/user/7")),
            [
                ("/run/a".to_owned(), Origin::Service),
                ("/run/user/7/turnpike".to_owned(), Origin::Session),
                fallback
            ]
        );
    }

    #[test]
    fn directory_that_others_can_write_to_is_refused() {
        let dir = Dir::new();
        let made = dir.at("made");
        prepare(&made).expect("created");
        assert_eq!(fs::metadata(&made).expect("the directory exists").mode() & 0o777, 0o700);
        prepare(&made).expect("the directory exists");
        fs::set_permissions(&made, fs::Permissions::from_mode(0o777)).expect("the test's own file");
        assert!(prepare(&made).is_err());
        assert!(prepare(&dir.at("not/made")).is_err());
    }
}
