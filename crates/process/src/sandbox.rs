//! Sandbox: after reading its configuration, and before its second thread and first packet, a process gives
//! up every privilege, file and system call that it does not need. An attacker who takes over the process can
//! use only the rest.
//!
//! The restrictions of all three kinds survive execve(2) and can only become stricter, so the new process of an upgrade
//! starts in the same sandbox and adds its own restrictions.

mod files;
mod layers;
mod needs;
mod privileges;
mod system_calls;

use std::{env, sync::OnceLock};

use rustix::thread::CapabilitySet;
use turnpike_api::Sandbox;
use turnpike_config::{SandboxMode, SandboxSettings};

use self::layers::Layers;
pub use self::needs::{Needs, directory_of};

/// Contains `None` if the sandbox is off.
static IN_FORCE: OnceLock<Option<Sandbox>> = OnceLock::new();

static LAYERS: OnceLock<String> = OnceLock::new();

/// Enters the sandbox, unless it is disabled. Must be called while the process has a single thread, because
/// it applies to this thread and those started later.
pub fn enter(settings: &SandboxSettings, needs: impl FnOnce() -> Needs) {
    IN_FORCE.get_or_init(|| {
        let mut layers = Layers::inherited();
        let entered = match settings.mode {
            SandboxMode::Off => None,
            SandboxMode::On => {
                let needs = needs();
                let capabilities = privileges::drop_all_but(needs.privileges);
                let files = files::restrict(&needs, &mut layers);
                // Done last, because the other two restrictions need system calls that the list does not
                // allow.
                let system_calls = system_calls::restrict(needs.is_in_kernel(), &mut layers);
                Some(sandbox_of(capabilities, files, system_calls))
            }
        };
        LAYERS.get_or_init(|| layers.to_variable());
        entered
    });
}

fn sandbox_of(
    capabilities: Result<Vec<String>, String>,
    files: Result<(Vec<String>, Vec<String>), String>,
    system_calls: Result<u64, String>,
) -> Sandbox {
    let mut missing = Vec::new();
    let mut note = |part: &str, why: &String| missing.push(format!("{part}: {why}"));
    let capabilities = capabilities.inspect_err(|why| note("privileges are not dropped", why)).ok();
    let (read, written) = files.inspect_err(|why| note("files are not restricted", why)).ok().unzip();
    let system_calls = system_calls.inspect_err(|why| note("system calls are not restricted", why)).ok();
    Sandbox { system_calls, read, written, capabilities, missing }
}

static CORE_DUMPS: OnceLock<String> = OnceLock::new();

/// Forbids core dumps, even if the sandbox is off. Must be called before any key is read.
pub fn forbid_core_dumps() {
    if let Err(error) = privileges::forbid_core_dumps() {
        CORE_DUMPS.get_or_init(|| error.to_string());
    }
}

pub(crate) fn layers() -> &'static str {
    LAYERS.get().map_or("", String::as_str)
}

pub(crate) fn in_force() -> Option<&'static Sandbox> {
    IN_FORCE.get().and_then(Option::as_ref)
}

pub fn log() {
    if let Some(error) = CORE_DUMPS.get() {
        tracing::warn!("core dumps of this process are not disabled and would contain its keys: {error}");
    }
    let Some(sandbox) = in_force() else {
        tracing::info!("sandbox: off, as configured");
        return;
    };
    tracing::info!("sandbox: {}", summary(sandbox));
    for missing in &sandbox.missing {
        tracing::warn!("sandbox: {missing}");
    }
    let home = env::var("HOME").ok().filter(|home| home != "/");
    if let (Some(home), Some(read)) = (home, &sandbox.read)
        && read.contains(&home)
    {
        tracing::warn!(
            "sandbox: the program or a configured file is in {home} itself, so everything in it is readable: \
             move the file to a separate directory"
        );
    }
}

/// Remedy for errors that the sandbox may have caused; `None` for other errors.
#[must_use]
pub fn remedy(errors: &str) -> Option<String> {
    let Sandbox { read: Some(read), written: Some(written), .. } = in_force()? else { return None };
    // Messages from the kernel, SQLite and `config`.
    let words = [
        "Permission denied",
        "unable to open database file",
        "attempt to write a readonly database",
        "is not readable for user",
    ];
    let is_likely = words.iter().any(|words| errors.contains(words));
    is_likely.then(|| {
        format!(
            "the sandbox allows reading {} and writing {} only: restart to include the files of the current \
             configuration, or add directories to sandbox.read and sandbox.write first",
            read.join(", "),
            written.join(", ")
        )
    })
}

/// Needed privileges that the process had at startup and has dropped; a restart restores them.
#[must_use]
pub fn given_up(wanted: CapabilitySet) -> Option<String> {
    in_force()?;
    privileges::given_up(wanted)
}

fn summary(sandbox: &Sandbox) -> String {
    let calls = match sandbox.system_calls {
        Some(count) => format!("{count} system calls, {}", system_calls::OTHERS),
        None => "all system calls".to_owned(),
    };
    let files = match (&sandbox.read, &sandbox.written) {
        (Some(read), Some(written)) => {
            let places = read.len() + written.len();
            format!("{places} readable paths, {} of them writable", written.len())
        }
        _ => "all files".to_owned(),
    };
    let capabilities = match sandbox.capabilities.as_deref() {
        Some([]) => "no capabilities".to_owned(),
        Some(kept) => format!("capabilities {}", kept.join(", ")),
        None => "all capabilities".to_owned(),
    };
    format!("{calls}; {files}; {capabilities}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sandbox_is_logged_in_one_line_plus_one_per_missing_part() {
        let files = (vec!["/etc".to_owned()], vec!["/run/turnpike".to_owned()]);
        let all = sandbox_of(Ok(vec!["NET_BIND_SERVICE".to_owned()]), Ok(files), Ok(7));
        let said = summary(&all);
        assert!(said.starts_with("7 system calls, "), "{said}");
        assert!(
            said.ends_with("; 2 readable paths, 1 of them writable; capabilities NET_BIND_SERVICE"),
            "{said}"
        );
        assert!(all.missing.is_empty());
        let none = |why: &str| why.to_owned();
        let nothing = sandbox_of(Err(none("a")), Err(none("b")), Err(none("c")));
        assert_eq!(summary(&nothing), "all system calls; all files; all capabilities");
        assert_eq!(nothing.missing.len(), 3);
        assert_eq!(nothing.missing[1], "files are not restricted: b");
    }
}
