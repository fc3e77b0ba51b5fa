//! Detects changed files (certificates, databases) by polling. Unlike inotify, this works for replaced files, the symbolic
//! links that Kubernetes swaps, and network file systems.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

#[derive(Debug, Default)]
pub(crate) struct FileWatch {
    seen: Vec<(PathBuf, Option<Stamp>)>,
    /// True if the files had changed at the last poll, which means that a write may still be in progress.
    unsettled: bool,
}

/// Device, inode, length, and ctime in seconds and nanoseconds.
type Stamp = (u64, u64, u64, i64, i64);

impl FileWatch {
    pub(crate) fn new(files: impl IntoIterator<Item = PathBuf>) -> Self {
        let seen = files.into_iter().map(|path| (path.clone(), stamp(&path).ok())).collect();
        Self { seen, unsettled: false }
    }

    /// Returns true once per change, as soon as the files have been unchanged for two polls.
    pub(crate) fn has_changed(&mut self) -> bool {
        let mut changed = false;
        for (path, seen) in &mut self.seen {
            let now = stamp(path).ok();
            changed |= *seen != now;
            *seen = now;
        }
        let settled = !changed && self.unsettled;
        self.unsettled = changed;
        settled
    }
}

fn stamp(path: &Path) -> io::Result<Stamp> {
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino(), found.len(), found.ctime(), found.ctime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_reported_once_after_the_files_are_stable() {
        let dir = turnpike_testkit::Dir::new();
        let (cert, key) = (dir.file("cert.pem", "one"), dir.at("key.pem"));
        let mut watch = FileWatch::new([cert.clone(), key.clone()]);
        assert!(!watch.has_changed());
        fs::write(&cert, "longer than one").unwrap();
        assert!(!watch.has_changed(), "the key may still be written");
        fs::write(&key, "it does").unwrap();
        assert!(!watch.has_changed());
        assert!(watch.has_changed());
        assert!(!watch.has_changed(), "reported once");
        fs::remove_file(&cert).unwrap();
        assert!(!watch.has_changed());
        assert!(watch.has_changed(), "a removed file is a change");
    }
}
