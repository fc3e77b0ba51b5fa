//! Namespaces without root: the lab re-executes itself inside a user namespace, where it is root.

use std::{
    env, fs,
    os::unix::{
        fs::{DirBuilderExt, MetadataExt},
        process::CommandExt,
    },
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::{error::LabError, tools};

/// State directory of the outer process, set for the inner one. Programs that it starts inherit it.
const INSIDE: &str = "TPLAB_INSIDE";

/// Re-executes the command in a user namespace through `unshare` unless this process is root.
pub(crate) fn enter_if_needed() -> Result<(), LabError> {
    tools::require("ip", "for namespaces")?;
    tools::require("nsenter", "to enter namespaces")?;
    tools::require("unshare", "for namespaces")?;
    if is_root() || inherited_directory().is_some() {
        return can_make_namespaces();
    }
    let allowed = Command::new("unshare")
        .args(["-Urn", "true"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !allowed {
        return Err(LabError::usage(
            "no permission for network namespaces: run as root, or allow user namespaces \
             (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0)",
        ));
    }
    let program = env::current_exe().map_err(LabError::io("cannot find this program"))?;
    let error = Command::new("unshare")
        .args(["-Ur", "--"])
        .arg(program)
        .args(env::args_os().skip(1))
        .env(INSIDE, directory()?)
        .exec();
    Err(LabError::failed(format!("cannot start `unshare`: {error}")))
}

/// Fails if this process, even as root in a container, may not create namespaces (CAP_SYS_ADMIN).
fn can_make_namespaces() -> Result<(), LabError> {
    tools::output(["unshare", "-n", "true"]).map(drop).map_err(|_| {
        LabError::usage(
            "no permission for network namespaces, even as root: give the container CAP_SYS_ADMIN and CAP_NET_ADMIN \
             (docker run --privileged)",
        )
    })
}

/// Returns the state directory of the outer process inside the user namespace.
pub(crate) fn inherited_directory() -> Option<PathBuf> {
    env::var_os(INSIDE).map(PathBuf::from)
}

/// Creates the directory, private to this user, if it is missing.
pub(crate) fn directory() -> Result<PathBuf, LabError> {
    let directory = match inherited_directory() {
        Some(directory) => directory,
        None if is_root() => PathBuf::from("/run/turnpike-lab"),
        None => match env::var_os("XDG_RUNTIME_DIR") {
            Some(runtime) => PathBuf::from(runtime).join("turnpike-lab"),
            None => env::temp_dir().join(format!("turnpike-lab-{}", uid())),
        },
    };
    let cannot = || LabError::io(format!("cannot use {} for the lab's state", directory.display()));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(cannot())?;
    // Another user may have created the directory first if it is in a shared /tmp.
    if fs::metadata(&directory).map_err(cannot())?.uid() != uid() {
        return Err(LabError::usage(format!("{} belongs to another user: remove it", directory.display())));
    }
    Ok(directory)
}

/// True if this process is root, but not just root of the lab's own user namespace.
pub(crate) fn is_root() -> bool {
    uid() == 0 && inherited_directory().is_none()
}

pub(crate) fn uid() -> u32 {
    fs::metadata("/proc/self").map_or(u32::MAX, |metadata| metadata.uid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inherited_variables_do_not_look_like_server_settings() {
        assert!(!INSIDE.starts_with("TURNPIKE_"), "{INSIDE}");
    }
}
