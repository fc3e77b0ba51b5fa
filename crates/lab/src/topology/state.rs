//! Registry of topologies: one small file per topology in a runtime directory, written before anything is created, so that leftovers of a
//! crash can be found.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::userns::directory;
use crate::{error::LabError, program::start_time, record::write_json};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TopologyState {
    pub(crate) id: String,
    /// Process that uses the topology; `None` after `lab up`, whose topology stays until `lab down`.
    pub(crate) owner: Option<ProcessIdentity>,
    /// True if the namespaces belong to a user namespace, which must be entered first.
    pub(crate) user_namespace: bool,
    pub(crate) spaces: Vec<SpaceState>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SpaceState {
    pub(crate) name: String,
    /// Process that sleeps in the namespace and keeps it alive.
    pub(crate) anchor: ProcessIdentity,
    pub(crate) netns: Option<String>,
}

/// Identity of a process, with its start time because process IDs are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessIdentity {
    pub(crate) pid: u32,
    pub(crate) start_time: u64,
}

impl ProcessIdentity {
    pub(crate) fn of(pid: u32) -> Option<Self> {
        start_time(pid).map(|start_time| Self { pid, start_time })
    }

    pub(crate) fn is_alive(self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }
}

impl TopologyState {
    pub(crate) fn save(&self) -> Result<(), LabError> {
        write_json(&path_of(&self.id)?, self)
    }

    pub(crate) fn load(id: &str) -> Result<Option<Self>, LabError> {
        Ok(read(&path_of(id)?))
    }

    pub(crate) fn remove(&self) -> Result<(), LabError> {
        let _ = fs::remove_file(path_of(&self.id)?);
        Ok(())
    }

    /// Returns true if the owner has exited or, for a topology without an owner, if one of its anchors has.
    pub(crate) fn is_stale(&self) -> bool {
        match self.owner {
            Some(owner) => !owner.is_alive(),
            None => !self.is_whole(),
        }
    }

    pub(crate) fn is_whole(&self) -> bool {
        !self.spaces.is_empty() && self.spaces.iter().all(|space| space.anchor.is_alive())
    }
}

pub(crate) fn all() -> Result<Vec<TopologyState>, LabError> {
    let directory = directory()?;
    let entries =
        fs::read_dir(&directory).map_err(LabError::io(format!("cannot read {}", directory.display())))?;
    Ok(entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .filter_map(|path| read(&path))
        .collect())
}

pub(crate) fn path_of(id: &str) -> Result<PathBuf, LabError> {
    Ok(directory()?.join(format!("{id}.json")))
}

fn read(path: &Path) -> Option<TopologyState> {
    // Treats an unreadable state as missing; its namespaces are found by name, and its processes by their
    // mark.
    serde_json::from_str(&fs::read_to_string(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topology_is_stale_once_its_owner_is_gone() {
        let me = ProcessIdentity::of(std::process::id()).unwrap();
        let alive = TopologyState { owner: Some(me), ..TopologyState::default() };
        assert!(!alive.is_stale());
        let reused = TopologyState {
            owner: Some(ProcessIdentity { start_time: me.start_time + 1, ..me }),
            ..TopologyState::default()
        };
        assert!(reused.is_stale(), "the process ID belongs to another process");
    }

    #[test]
    fn a_topology_without_an_owner_lives_as_long_as_its_anchors() {
        let me = ProcessIdentity::of(std::process::id()).unwrap();
        let space = SpaceState { name: "a".to_owned(), anchor: me, netns: None };
        let mut state = TopologyState { spaces: vec![space.clone()], ..TopologyState::default() };
        assert!(!state.is_stale());
        state.spaces.push(SpaceState { anchor: ProcessIdentity { pid: u32::MAX, start_time: 1 }, ..space });
        assert!(state.is_stale());
        assert!(
            TopologyState::default().is_stale(),
            "it was interrupted before the first namespace was created"
        );
    }
}
