//! Spools of one webhook. Usually one; after an upgrade, the previous process keeps writing its own until it exits, and its spool is
//! then delivered by the new process.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use sha2::{Digest, Sha256};

use crate::spool::Spool;

#[derive(Clone, Debug)]
pub(crate) struct SpoolDirectory {
    dir: PathBuf,
    source: Arc<str>,
    most_bytes: u64,
}

impl SpoolDirectory {
    /// The directory's name is a hash, because a URL may contain a token.
    pub(crate) fn new(all: &Path, url: &str, source: &Arc<str>, most_bytes: u64) -> Self {
        let name = hex::encode(&Sha256::digest(url.as_bytes())[..8]);
        Self { dir: all.join(name), source: Arc::clone(source), most_bytes }
    }

    /// The spool to write to, and older ones that no process writes to any more, oldest first.
    pub(crate) fn open(&self) -> io::Result<(Spool, Vec<Spool>)> {
        let mut spools = self.abandoned()?;
        if let Some(newest) = spools.pop() {
            return Ok((newest, spools));
        }
        let unix_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        for attempt in 0..100 {
            let dir = self.dir.join(format!("{:016x}", unix_us + attempt));
            if !dir.exists()
                && let Some(spool) = Spool::open(&dir, &self.source, self.most_bytes)?
            {
                return Ok((spool, spools));
            }
        }
        Err(io::Error::other("no free name for a spool"))
    }

    /// Spools that no process has locked, oldest first.
    pub(crate) fn abandoned(&self) -> io::Result<Vec<Spool>> {
        let mut dirs: Vec<PathBuf> = match fs::read_dir(&self.dir) {
            Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        dirs.retain(|dir| dir.is_dir());
        dirs.sort_unstable();
        let mut spools = Vec::new();
        for dir in dirs {
            spools.extend(Spool::open(&dir, &self.source, self.most_bytes)?);
        }
        Ok(spools)
    }
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;
    use crate::event::Event;

    #[test]
    fn a_restart_continues_the_spool_and_an_upgrade_starts_another() {
        let dir = Dir::new();
        let open = || SpoolDirectory::new(dir.path(), "https://a.example/x", &"/turnpike/a".into(), 1 << 20);
        let (mut first, old) = open().open().expect("a spool");
        assert!(old.is_empty());
        let event = [Arc::new(Event::new("", "a", &1))];
        first.append(&event).expect("it is written");
        let (mut second, old) = open().open().expect("a spool beside that of the previous process");
        assert!(second.id > first.id && old.is_empty());
        second.append(&event).expect("it is written");
        assert!(open().abandoned().expect("a directory").is_empty());
        let ids = (first.id.clone(), second.id.clone());
        drop((first, second));
        let (current, old) = open().open().expect("both");
        assert_eq!((old[0].id.clone(), current.id), ids);
        let other = SpoolDirectory::new(dir.path(), "https://a.example/y", &"".into(), 1 << 20);
        assert!(other.abandoned().expect("nothing yet").is_empty());
    }
}
