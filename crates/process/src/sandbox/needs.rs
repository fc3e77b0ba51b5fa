//! Files and privileges that a configuration needs at run time, including reloads and upgrades.

use std::{
    env, fs,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::thread::CapabilitySet;
use turnpike_config::{AdminAddress, AdminSettings, SandboxSettings, runtime_directory};

const VARIABLES: &[&str] =
    &["PGPASSFILE", "PGSSLCERT", "PGSSLKEY", "PGSSLROOTCERT", "SSL_CERT_DIR", "SSL_CERT_FILE", "TZDIR"];

#[derive(Clone, Debug)]
pub struct Needs {
    /// Configured files. All files in their directories become readable, because configured files may be
    /// replaced by new ones.
    pub files: Vec<PathBuf>,
    pub read: Vec<PathBuf>,
    pub written: Vec<PathBuf>,
    pub privileges: CapabilitySet,
}

/// Needs of every program: listening on ports below 1024, and raising its own limits (open files, memory for
/// pipes).
impl Default for Needs {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            read: Vec::new(),
            written: Vec::new(),
            privileges: CapabilitySet::NET_BIND_SERVICE | CapabilitySet::SYS_RESOURCE,
        }
    }
}

impl Needs {
    /// Privileges to load and attach eBPF programs that read packets.
    pub const KERNEL: CapabilitySet =
        CapabilitySet::BPF.union(CapabilitySet::NET_ADMIN).union(CapabilitySet::PERFMON);

    #[must_use]
    pub fn new(sandbox: &SandboxSettings, admin: &AdminSettings, file: Option<&Path>) -> Self {
        let AdminSettings { listen, tls_cert, tls_key, client_ca, read_client_ca, .. } = admin;
        let pem = [tls_cert, tls_key, client_ca, read_client_ca].into_iter().flatten();
        let sockets = listen.iter().filter_map(|address| match address {
            AdminAddress::Unix(name) => name.path().and_then(directory_of),
            AdminAddress::DefaultSocket | AdminAddress::Tcp(_) => None,
        });
        let secrets = env::vars_os().filter_map(|(name, value)| {
            let name = name.to_str()?;
            (name.starts_with("TURNPIKE_") && name.ends_with("_FILE")).then(|| PathBuf::from(value))
        });
        let of_libraries = VARIABLES.iter().filter_map(|name| env::var_os(name).map(PathBuf::from));
        let passwords =
            env::var_os("HOME").map(|home| Path::new(&home).join(".pgpass")).filter(|file| file.is_file());
        // An upgrade starts the new version from the same path.
        let own = env::current_exe().ok();
        let files = file.into_iter().map(Path::to_owned).chain(pem.cloned()).chain(secrets).chain(own);
        let mut read = sandbox.read.clone();
        // Adds only this file, because its directory contains all of the user's files.
        read.extend(passwords);
        let written = sandbox.write.iter().cloned().chain(sockets).chain([runtime_directory::own().path]);
        Self {
            files: files.chain(of_libraries).collect(),
            read,
            written: written.collect(),
            ..Self::default()
        }
    }

    #[must_use]
    pub fn is_in_kernel(&self) -> bool {
        self.privileges.contains(CapabilitySet::BPF)
    }

    /// Adds the privilege for socket buffers of `bytes`, if that exceeds the kernel's limit.
    pub fn add_buffers(&mut self, bytes: usize) {
        let granted =
            |name: &str| fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse().ok();
        if ["rmem_max", "wmem_max"].iter().any(|name| granted(name).is_none_or(|most: usize| most < bytes)) {
            self.privileges |= CapabilitySet::NET_ADMIN;
        }
    }

    /// Creates the writable directories, because access to a missing directory cannot be granted. Root needs
    /// privileges for other users' files only if some of these files belong to other users.
    #[must_use]
    pub fn with_directories(mut self) -> Self {
        for directory in &self.written {
            // A directory that cannot be created now could not be created later either.
            let _ = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
        }
        let own = rustix::process::geteuid().as_raw();
        let is_foreign = |path: &PathBuf| fs::metadata(path).is_ok_and(|about| about.uid() != own);
        if [&self.files, &self.read, &self.written].into_iter().flatten().any(is_foreign) {
            self.privileges |= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
        }
        self
    }
}

#[must_use]
pub fn directory_of(file: &Path) -> Option<PathBuf> {
    std::path::absolute(file).ok()?.parent().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_buffers_need_no_privilege() {
        let needs = |bytes| {
            let mut needs = Needs::default();
            needs.add_buffers(bytes);
            needs.privileges.contains(CapabilitySet::NET_ADMIN)
        };
        assert!(!needs(4096) && needs(usize::MAX));
    }
}
