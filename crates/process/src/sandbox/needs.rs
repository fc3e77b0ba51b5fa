//! Needs of a configuration while the process runs, reloads and upgrades included.

use std::{
    env, fs,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::thread::CapabilitySet;
use turnpike_config::{AdminAddress, AdminSettings, SandboxSettings, runtime_directory};

/// Variables that name files for libraries, besides those of the system.
const VARIABLES: &[&str] =
    &["PGPASSFILE", "PGSSLCERT", "PGSSLKEY", "PGSSLROOTCERT", "SSL_CERT_DIR", "SSL_CERT_FILE", "TZDIR"];

/// Files and privileges that stay available.
#[derive(Clone, Debug)]
pub struct Needs {
    /// Named files. All files in their directories can be read, because a file is replaced by another one.
    pub files: Vec<PathBuf>,
    /// Directories whose files can be read.
    pub read: Vec<PathBuf>,
    /// Directories whose files can be written.
    pub written: Vec<PathBuf>,
    /// Privileges to keep, if the process has them.
    pub privileges: CapabilitySet,
}

/// Needs of every program: to listen below port 1024, and to raise its own limits (of files, and of the memory of pipes).
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
    /// Privileges for loading programs into the kernel, attaching them, and letting them look at packets.
    pub const KERNEL: CapabilitySet =
        CapabilitySet::BPF.union(CapabilitySet::NET_ADMIN).union(CapabilitySet::PERFMON);

    /// Needs of settings that all services have; `file` is the configuration file.
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
        // A new version is started from this one's place.
        let own = env::current_exe().ok();
        let files = file.into_iter().map(Path::to_owned).chain(pem.cloned()).chain(secrets).chain(own);
        let mut read = sandbox.read.clone();
        // The file alone: its directory has all files of its owner.
        read.extend(passwords);
        let written = sandbox.write.iter().cloned().chain(sockets).chain([runtime_directory::own().path]);
        Self {
            files: files.chain(of_libraries).collect(),
            read,
            written: written.collect(),
            ..Self::default()
        }
    }

    /// Returns true if programs are loaded into the kernel.
    #[must_use]
    pub fn is_in_kernel(&self) -> bool {
        self.privileges.contains(CapabilitySet::BPF)
    }

    /// Adds the privilege for socket buffers of this many bytes, if they are larger than the kernel grants to any process.
    pub fn add_buffers(&mut self, bytes: usize) {
        let granted =
            |name: &str| fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse().ok();
        if ["rmem_max", "wmem_max"].iter().any(|name| granted(name).is_none_or(|most: usize| most < bytes)) {
            self.privileges |= CapabilitySet::NET_ADMIN;
        }
    }

    /// Makes the written directories, because access cannot be granted to a missing one. Root needs the privilege to access files of other
    /// users only if there are such files.
    #[must_use]
    pub fn with_directories(mut self) -> Self {
        for directory in &self.written {
            // A directory that cannot be made now could not be made later.
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

/// Directory of a file.
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
