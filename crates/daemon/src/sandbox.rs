//! The sandbox: what a process gives up for good once it has read its configuration, before it has a second thread or has heard from
//! anybody. Whoever takes it over from then on has what is left: no privilege but those that the configuration needs, no file but those that
//! it names, and no system call that turnpike does not make.
//!
//! All three outlive execve(2) and can only become stricter. So a process that takes this one's place in an upgrade lives in the same
//! sandbox, and adds what its own has beside that.

mod files;
mod layers;
mod needs;
mod privileges;
mod system_calls;

use std::{env, fmt, sync::OnceLock};

use turnpike_config::{SandboxMode, SandboxSettings};

use self::layers::Layers;
pub(crate) use self::needs::Needs;

/// What is in force, for whoever looks. A part that is missing says why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sandbox {
    /// The privileges that are left (capabilities(7)), as in `NET_BIND_SERVICE`.
    pub(crate) capabilities: Result<Vec<&'static str>, String>,
    /// Which files can be used.
    pub(crate) files: Result<Files, String>,
    /// How many system calls can be made.
    pub(crate) system_calls: Result<usize, String>,
}

/// Directories, and files beside them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Files {
    /// What lies in these can be read.
    pub(crate) read: Vec<String>,
    /// What lies in these can be written, too.
    pub(crate) written: Vec<String>,
}

/// `None` within if it was turned off.
static IN_FORCE: OnceLock<Option<Sandbox>> = OnceLock::new();

/// What the next process is told of it.
static LAYERS: OnceLock<String> = OnceLock::new();

/// Goes into the sandbox, unless that is turned off. To be called while the process has one thread, for there is no way to tell the others.
pub(crate) fn enter(settings: &SandboxSettings, needs: impl FnOnce() -> Needs) {
    IN_FORCE.get_or_init(|| {
        let mut layers = Layers::inherited();
        let entered = match settings.mode {
            SandboxMode::Off => None,
            SandboxMode::On => {
                let needs = needs();
                let capabilities = privileges::drop_all_but(needs.privileges);
                let files = files::restrict(&needs, &mut layers);
                // Last: the other two need calls that could be left out of the list otherwise.
                let system_calls = system_calls::restrict(needs.is_in_kernel(), &mut layers);
                Some(Sandbox { capabilities, files, system_calls })
            }
        };
        LAYERS.get_or_init(|| layers.to_tell());
        entered
    });
}

/// Why the kernel may write a core dump of this process.
static CORE_DUMPS: OnceLock<String> = OnceLock::new();

/// Has the kernel write no core dump of this process, with a sandbox or without. To be called before any key is read.
pub(crate) fn forbid_core_dumps() {
    if let Err(error) = privileges::forbid_core_dumps() {
        CORE_DUMPS.get_or_init(|| error.to_string());
    }
}

/// What a process that is to take this one's place need not put in force again.
pub(crate) fn layers() -> &'static str {
    LAYERS.get().map_or("", String::as_str)
}

/// What is in force; `None` where there is none.
pub(crate) fn in_force() -> Option<&'static Sandbox> {
    IN_FORCE.get().and_then(Option::as_ref)
}

/// Says it in the log.
pub(crate) fn say() {
    if let Some(error) = CORE_DUMPS.get() {
        tracing::warn!("a core dump of this process would hold its keys: {error}");
    }
    let Some(sandbox) = in_force() else {
        tracing::info!("sandbox: off, as configured");
        return;
    };
    tracing::info!("sandbox: {sandbox}");
    for missing in sandbox.missing() {
        tracing::warn!("sandbox: {missing}");
    }
    let home = env::var("HOME").ok().filter(|home| home != "/");
    if let (Some(home), Ok(files)) = (home, &sandbox.files)
        && files.read.contains(&home)
    {
        tracing::warn!(
            "sandbox: a file that the configuration names, or the program, lies in {home} itself, of which all can be read therefore: \
             give it a directory of its own"
        );
    }
}

/// What to do about errors that the sandbox may have caused; nothing, if none is of that kind.
pub(crate) fn remedy(errors: &str) -> Option<String> {
    let files = in_force()?.files.as_ref().ok()?;
    // Words of the kernel, of SQLite and of `config`.
    let words = [
        "Permission denied",
        "unable to open database file",
        "attempt to write a readonly database",
        "is not readable for user",
    ];
    let may_be = words.iter().any(|words| errors.contains(words));
    may_be.then(|| {
        format!(
            "the sandbox lets this process read {}, and write {}, nothing else: restart it, which takes in what the configuration names \
             now, or name directories in sandbox.read and sandbox.write first",
            files.read.join(", "),
            files.written.join(", ")
        )
    })
}

/// The privileges that these `needs` name, were there when the process began, and have been given up: a restart brings them back.
pub(crate) fn given_up(needs: &Needs) -> Option<String> {
    in_force()?;
    privileges::given_up(needs.privileges)
}

impl Sandbox {
    /// A sentence for each part that is missing.
    pub(crate) fn missing(&self) -> Vec<String> {
        let parts = [
            self.capabilities.as_ref().err().map(|why| format!("privileges are kept: {why}")),
            self.files.as_ref().err().map(|why| format!("files are not restricted: {why}")),
            self.system_calls.as_ref().err().map(|why| format!("system calls are not restricted: {why}")),
        ];
        parts.into_iter().flatten().collect()
    }
}

impl fmt::Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.system_calls {
            Ok(count) => write!(f, "{count} system calls, {}; ", system_calls::OTHERS)?,
            Err(_) => f.write_str("all system calls; ")?,
        }
        match &self.files {
            Ok(Files { read, written }) => {
                write!(
                    f,
                    "files to read in {} places, to write in {}; ",
                    read.len() + written.len(),
                    written.len()
                )?;
            }
            Err(_) => f.write_str("all files; ")?,
        }
        match self.capabilities.as_deref() {
            Ok([]) => f.write_str("no capabilities"),
            Ok(kept) => write!(f, "capabilities {}", kept.join(", ")),
            Err(_) => f.write_str("all capabilities"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_force_is_one_line_and_what_is_missing_a_sentence_each() {
        let files = Files { read: vec!["/etc".to_owned()], written: vec!["/run/turnpike".to_owned()] };
        let all =
            Sandbox { capabilities: Ok(vec!["NET_BIND_SERVICE"]), files: Ok(files), system_calls: Ok(7) };
        let said = all.to_string();
        assert!(said.starts_with("7 system calls, "), "{said}");
        assert!(
            said.ends_with("; files to read in 2 places, to write in 1; capabilities NET_BIND_SERVICE"),
            "{said}"
        );
        assert!(all.missing().is_empty());
        let none = |why: &str| why.to_owned();
        let nothing =
            Sandbox { capabilities: Err(none("a")), files: Err(none("b")), system_calls: Err(none("c")) };
        assert_eq!(nothing.to_string(), "all system calls; all files; all capabilities");
        assert_eq!(nothing.missing().len(), 3);
        assert!(nothing.missing()[1].ends_with(": b"));
    }
}
