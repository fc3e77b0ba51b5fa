//! Notices when one of the certificates' files changes: by looking at them now and then, which works for files that are replaced,
//! for the symbolic links that Kubernetes swaps, and over network file systems, where inotify is blind or watches the wrong thing.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use turnpike_config::{Settings, certificates};

/// What the files were like at the last look.
#[derive(Debug, Default)]
pub(crate) struct CertificateWatch {
    seen: Vec<(PathBuf, Option<Stamp>)>,
    /// Changed, and not yet as it was at the last look: somebody is still writing.
    unsettled: bool,
}

/// Device, inode, length, and time of the last change of content, owner or mode in seconds and nanoseconds.
type Stamp = (u64, u64, u64, i64, i64);

impl CertificateWatch {
    /// As the files are now.
    pub(crate) fn new(settings: &Settings) -> Self {
        let seen = certificates::files(settings).map(|path| (path.clone(), stamp(&path).ok())).collect();
        Self { seen, unsettled: false }
    }

    /// Whether they have changed since the last time that this said so, and have come to rest since the last look.
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
    fn a_change_is_told_once_and_only_when_it_has_come_to_rest() {
        let dir = turnpike_testkit::Dir::new();
        let (cert, key) = (dir.file("cert.pem", "one"), dir.at("key.pem"));
        let settings =
            Settings { tls_cert: Some(cert.clone()), tls_key: Some(key.clone()), ..Settings::default() };
        let mut watch = CertificateWatch::new(&settings);
        assert!(!watch.has_changed());
        fs::write(&cert, "longer than one").unwrap();
        assert!(!watch.has_changed(), "the key may follow");
        fs::write(&key, "it does").unwrap();
        assert!(!watch.has_changed());
        assert!(watch.has_changed());
        assert!(!watch.has_changed(), "told once");
        fs::remove_file(&cert).unwrap();
        assert!(!watch.has_changed());
        assert!(watch.has_changed(), "gone is a change too");
    }
}
