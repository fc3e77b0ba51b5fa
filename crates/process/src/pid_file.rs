//! File with the process ID, for scripts.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use crate::error::ProcessError;

/// The file is removed on drop, if it still belongs to this process.
pub struct PidFile(Option<(PathBuf, File)>);

impl PidFile {
    pub const NONE: Self = Self(None);

    /// Writes the file. Takes over the file of another process, because that process may be about to exit.
    /// Refuses symbolic and hard links, which would redirect the write.
    pub fn write(path: Option<&Path>) -> Result<Self, ProcessError> {
        let Some(path) = path else { return Ok(Self::NONE) };
        let file = open(path).map_err(ProcessError::file("the process ID to", path))?;
        Ok(Self(Some((path.to_owned(), file))))
    }

    pub fn leave(&mut self) {
        self.0 = None;
    }
}

fn open(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o644).custom_flags(flags);
    let mut file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => refused("symbolic links are not followed"),
        _ => error,
    })?;
    let found = file.metadata()?;
    if !found.is_file() || found.nlink() != 1 {
        return Err(refused("not a regular file with a single name"));
    }
    // Overwrites the old text in place, so that readers never see an empty file. The newline ends the number
    // even before the rest of a longer old text is removed.
    let text = format!("{}\n", std::process::id());
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)?;
    Ok(file)
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

fn is_ours(path: &Path, file: &mut File) -> io::Result<bool> {
    let (there, here) = (fs::symlink_metadata(path)?, file.metadata()?);
    let mut text = String::new();
    file.rewind()?;
    file.take(32).read_to_string(&mut text)?;
    Ok((there.dev(), there.ino()) == (here.dev(), here.ino())
        && text.trim() == std::process::id().to_string())
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let Some((path, file)) = &mut self.0 else { return };
        let removed = match is_ours(path, file) {
            Ok(true) => fs::remove_file(&*path),
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {error}", path.display());
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;

    #[test]
    fn the_file_has_the_process_id_and_is_removed_at_exit() {
        let dir = Dir::new();
        let path = dir.at("pid");
        fs::write(&path, "4194304 of an older process\n").expect("the directory is writable");
        let file = PidFile::write(Some(&path)).expect("writable");
        assert_eq!(fs::read_to_string(&path).expect("written"), format!("{}\n", std::process::id()));
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn readers_never_see_an_empty_file_during_a_rewrite() {
        let dir = Dir::new();
        let path = dir.at("pid");
        let written = || open(&path).map(drop).expect("writable");
        written();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| (0..2_000).for_each(|_| written()));
            while !writer.is_finished() {
                let text = fs::read_to_string(&path).expect("the file exists");
                assert_eq!(text.lines().next(), Some(&*std::process::id().to_string()));
            }
        });
    }

    #[test]
    fn a_file_of_another_process_is_kept() {
        let dir = Dir::new();
        let path = dir.at("pid");
        for replace in [
            |path: &Path| fs::write(path, "7\n"),
            |path: &Path| {
                fs::remove_file(path)?;
                fs::write(path, format!("{}\n", std::process::id()))
            },
        ] {
            let file = PidFile::write(Some(&path)).expect("writable");
            replace(&path).expect("the directory is writable");
            drop(file);
            assert!(path.exists());
        }
    }

    #[test]
    fn links_are_not_followed() {
        let dir = Dir::new();
        let (victim, link) = (dir.at("victim"), dir.at("pid"));
        fs::write(&victim, "precious").expect("the directory is writable");
        std::os::unix::fs::symlink(&victim, &link).expect("the directory is writable");
        let told = PidFile::write(Some(&link)).err().expect("a link").to_string();
        assert!(told.contains("symbolic links are not followed"), "{told}");
        fs::remove_file(&link).expect("the directory is writable");
        fs::hard_link(&victim, &link).expect("the directory is writable");
        assert!(PidFile::write(Some(&link)).is_err());
        assert_eq!(fs::read_to_string(&victim).expect("the file exists"), "precious");
    }
}
