//! `[sandbox]`: whether the process gives up what it does not need, and which directories it keeps beside those that the rest of the
//! configuration names; the same for `serve` and `forward`.

use std::path::{Path, PathBuf};

use crate::key::{Kind, named};
use turnpike_convert::toml_text::strings;

/// `[sandbox]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxSettings {
    /// Whether there is one.
    pub mode: SandboxMode,
    /// More directories whose files may be read, and whose programs may take this one's place.
    pub read: Vec<PathBuf>,
    /// More directories whose files may be written.
    pub write: Vec<PathBuf>,
}

/// Whether there is a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxMode {
    /// As far as the kernel has it.
    #[default]
    On,
    /// There is none.
    Off,
}

/// `sandbox.mode`.
pub(crate) const MODE: Kind<SandboxMode> =
    named!("\"on\" or \"off\"", "on" => SandboxMode::On, "off" => SandboxMode::Off);

/// `sandbox.read`, `sandbox.write`.
pub(crate) const DIRECTORIES: Kind<Vec<PathBuf>> = Kind::list(
    "a list of directories, each from / on, such as [\"/srv/certificates\"]",
    |reader, node| {
        reader.list(node, |reader, node| {
            reader.parsed(node, |text| {
                let path = Path::new(text);
                if path.is_absolute() { Ok(path.to_owned()) } else { Err("it does not begin with /") }
            })
        })
    },
    |paths| strings(&paths.iter().map(|path| path.display()).collect::<Vec<_>>()),
);

#[cfg(test)]
mod tests {
    use crate::{Flags, Settings, Sources};

    fn read(name: &str, value: &str) -> Result<Settings, String> {
        let environment = vec![(name.to_owned(), value.to_owned())];
        let settings = Sources::new(None, environment, Flags::new()).settings();
        settings.map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn directories_begin_with_the_root_and_are_shown_as_they_are_read() {
        let settings = read("TURNPIKE_SANDBOX_READ", "/srv/one,/srv/two").unwrap();
        assert!(settings.to_toml().contains("read = [\"/srv/one\", \"/srv/two\"]"), "{}", settings.to_toml());
        let refused = read("TURNPIKE_SANDBOX_WRITE", "srv").unwrap_err();
        assert!(refused.contains("it does not begin with /"), "{refused}");
    }

    #[test]
    fn it_is_on_unless_somebody_turns_it_off() {
        assert!(Settings::default().to_toml().contains("[sandbox]\nmode = \"on\""));
        assert!(read("TURNPIKE_SANDBOX_MODE", "off").unwrap().to_toml().contains("mode = \"off\""));
        assert!(read("TURNPIKE_SANDBOX_MODE", "maybe").unwrap_err().contains("\"on\" or \"off\""));
    }
}
