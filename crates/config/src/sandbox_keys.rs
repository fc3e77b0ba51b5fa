//! `[sandbox]`: the mode, and additional accessible directories. Shared by `serve` and `forward`.

use std::path::{Path, PathBuf};

use crate::key::{ValueKind, named};
use turnpike_convert::toml_text::strings;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxSettings {
    pub mode: SandboxMode,
    pub read: Vec<PathBuf>,
    pub write: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxMode {
    /// Restricts the process as far as the kernel supports it.
    #[default]
    On,
    Off,
}

pub(crate) const MODE: ValueKind<SandboxMode> =
    named!("\"on\" or \"off\"", "on" => SandboxMode::On, "off" => SandboxMode::Off);

pub(crate) const DIRECTORIES: ValueKind<Vec<PathBuf>> = ValueKind::list(
    "a list of absolute paths of directories, such as [\"/srv/certificates\"]",
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
    fn sandbox_directories_are_absolute_and_round_trip() {
        let settings = read("TURNPIKE_SANDBOX_READ", "/srv/one,/srv/two").unwrap();
        assert!(settings.to_toml().contains("read = [\"/srv/one\", \"/srv/two\"]"), "{}", settings.to_toml());
        let refused = read("TURNPIKE_SANDBOX_WRITE", "srv").unwrap_err();
        assert!(refused.contains("it does not begin with /"), "{refused}");
    }

    #[test]
    fn sandbox_is_on_by_default() {
        assert!(Settings::default().to_toml().contains("[sandbox]\nmode = \"on\""));
        assert!(read("TURNPIKE_SANDBOX_MODE", "off").unwrap().to_toml().contains("mode = \"off\""));
        assert!(read("TURNPIKE_SANDBOX_MODE", "maybe").unwrap_err().contains("\"on\" or \"off\""));
    }
}
