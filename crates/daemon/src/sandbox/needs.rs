//! What a configuration needs of the machine once the process runs, reloads and upgrades included.

use std::{
    env, fs,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::thread::CapabilitySet;
use turnpike_config::{
    AdminAddress, AdminSettings, DatapathChoice, SandboxSettings, Settings, Sources, certificates,
    forward::{ForwardLoaded, ForwardSettings, ForwardSources},
    runtime_directory,
};
use turnpike_forward::{Bind, Protocol, Rule};
use turnpike_net::CopyMode;
use turnpike_stores::StoreAddress;

use crate::store;

/// Bytes that listeners of a forwarder, and the ways from worker to worker, ask the kernel for.
const BUFFER: usize = 4 << 20;
/// Where files stand that libraries read, beside those of the system.
const VARIABLES: &[&str] =
    &["PGPASSFILE", "PGSSLCERT", "PGSSLKEY", "PGSSLROOTCERT", "SSL_CERT_DIR", "SSL_CERT_FILE", "TZDIR"];

/// What is needed.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    /// Files that are named. With each, what lies in its directory can be read: files are replaced by others.
    pub(super) files: Vec<PathBuf>,
    /// Directories of which all can be read.
    pub(super) read: Vec<PathBuf>,
    /// Directories in which all can be written.
    pub(super) written: Vec<PathBuf>,
    /// Privileges, of those that there are.
    pub(super) privileges: CapabilitySet,
}

/// What every program needs: to listen below port 1024, and to raise its own limits (of files, and of the memory of pipes).
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
    /// Of a server.
    pub(crate) fn of_server(sources: &Sources, settings: &Settings) -> Self {
        let mut needs = Self::of_any(&settings.sandbox, &settings.admin, sources.file());
        needs.files.extend(certificates::files(settings));
        let applications = &settings.credentials;
        needs.files.extend(applications.tls_cert.iter().chain(&applications.tls_key).cloned());
        if let Ok(Some((StoreAddress::Sqlite(file), _))) = store::address(settings) {
            needs.written.extend(directory_of(&file));
        }
        let url = settings.store.url.as_ref().map_or("", |url| url.reveal());
        needs.files.extend(files_of_url(url));
        use DatapathChoice as Path;
        if matches!(settings.datapath, Path::Kernel | Path::Xdp | Path::XdpGeneric) {
            needs.privileges |= IN_KERNEL;
        }
        needs.buffers(settings.listener_buffer.max(settings.relay_buffer).max(BUFFER));
        needs.made()
    }

    /// Of a forwarder.
    pub(crate) fn of_forwarder(sources: &ForwardSources, loaded: &ForwardLoaded) -> Self {
        let ForwardLoaded { settings, included, .. } = loaded;
        let mut needs = Self::of_any(&settings.sandbox, &settings.admin, sources.file());
        needs.files.extend(included.iter().cloned());
        let written = settings.pid_file.iter().chain(&settings.connection_file).map(PathBuf::as_path);
        let sockets = settings.rules.iter().filter_map(|rule| match &rule.bind {
            Bind::Unix(name) => name.path(),
            Bind::Ip(_) | Bind::Name(_) => None,
        });
        needs.written.extend(written.chain(sockets).filter_map(directory_of));
        needs.privileges |= Self::of_rules(settings).privileges;
        needs.buffers(BUFFER);
        needs.made()
    }

    /// The privileges of rules alone: a reload can bring others.
    pub(crate) fn of_rules(settings: &ForwardSettings) -> Self {
        let is_in_kernel = |rule: &Rule| {
            rule.kernel == Some(true) || rule.protocol == Protocol::Tcp && rule.copy == CopyMode::Kernel
        };
        let mut privileges = CapabilitySet::empty();
        if settings.datapath == DatapathChoice::Kernel || settings.rules.iter().any(is_in_kernel) {
            privileges |= IN_KERNEL;
        }
        if settings.rules.iter().any(|rule| rule.transparent || rule.mark.is_some()) {
            privileges |= CapabilitySet::NET_ADMIN;
        }
        if settings.rules.iter().any(|rule| rule.device.is_some()) {
            privileges |= CapabilitySet::NET_RAW;
        }
        Self { privileges, ..Self::default() }
    }

    /// Whether programs are loaded into the kernel.
    pub(super) fn is_in_kernel(&self) -> bool {
        self.privileges.contains(CapabilitySet::BPF)
    }

    fn of_any(sandbox: &SandboxSettings, admin: &AdminSettings, file: Option<&Path>) -> Self {
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
        // The one that goes on in place of this one is started from where this one was.
        let own = env::current_exe().ok();
        let files = file.into_iter().map(Path::to_owned).chain(pem.cloned()).chain(secrets).chain(own);
        let mut read = sandbox.read.clone();
        // The file alone: its directory is all that its owner has.
        read.extend(passwords);
        let written = sandbox.write.iter().cloned().chain(sockets).chain([runtime_directory::own().path]);
        Self {
            files: files.chain(of_libraries).collect(),
            read,
            written: written.collect(),
            ..Self::default()
        }
    }

    /// Buffers of sockets that are larger than the kernel gives to anybody.
    fn buffers(&mut self, bytes: usize) {
        let given =
            |name: &str| fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse().ok();
        if ["rmem_max", "wmem_max"].iter().any(|name| given(name).is_none_or(|most: usize| most < bytes)) {
            self.privileges |= CapabilitySet::NET_ADMIN;
        }
    }

    /// Makes directories that would be made later: there is no right to what does not exist. Who runs as root needs to be asked about none of
    /// these files, unless some are somebody else's.
    fn made(mut self) -> Self {
        for directory in &self.written {
            // Where it cannot be made now it could not be later.
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

/// To load programs into the kernel, attach them, and let them look at packets.
const IN_KERNEL: CapabilitySet =
    CapabilitySet::BPF.union(CapabilitySet::NET_ADMIN).union(CapabilitySet::PERFMON);

fn directory_of(file: &Path) -> Option<PathBuf> {
    std::path::absolute(file).ok()?.parent().map(Path::to_owned)
}

/// Files that the address of a store names behind its question mark, such as those of its certificates.
fn files_of_url(url: &str) -> Vec<PathBuf> {
    let options = url.split_once('?').map_or("", |(_, options)| options).split('&');
    let values =
        options.filter_map(|option| option.split_once('=')).map(|(_, value)| value.replace("%2F", "/"));
    values.filter(|value| value.starts_with('/')).map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use turnpike_config::Flags;
    use turnpike_testkit::Dir;

    use super::*;

    fn server(settings: &[(&str, &str)]) -> Needs {
        let mut flags = Flags::new();
        for (key, value) in settings {
            let key: &'static str = Box::leak((*key).to_owned().into_boxed_str());
            flags.set(key, key, Some((*value).to_owned()));
        }
        let sources = Sources::new(None, Vec::new(), flags);
        let loaded = sources.load_but_certificates().expect("the settings are right").0;
        Needs::of_server(&sources, &loaded.settings)
    }

    #[test]
    fn a_server_needs_the_kernel_only_where_that_relays() {
        let dir = Dir::new();
        let state = dir.path().to_str().expect("it is text");
        assert!(!server(&[("store.state", state)]).is_in_kernel());
        for path in ["kernel", "xdp"] {
            assert!(server(&[("store.state", state), ("server.datapath", path)]).is_in_kernel(), "{path}");
        }
    }

    #[test]
    fn what_the_configuration_names_is_needed_where_it_lies() {
        let dir = Dir::new();
        let state = dir.at("made/state");
        let needs = server(&[
            ("store.state", state.to_str().expect("it is text")),
            ("tls.cert", "/srv/tls/cert.pem"),
            ("tls.key", "/srv/tls/key.pem"),
            ("admin.listen", "unix:/srv/run/admin.sock"),
            ("sandbox.read", "/srv/more"),
        ]);
        assert!(needs.written.contains(&state) && state.is_dir(), "{needs:?}");
        assert!(needs.written.contains(&PathBuf::from("/srv/run")), "{needs:?}");
        assert!(needs.files.contains(&PathBuf::from("/srv/tls/key.pem")), "{needs:?}");
        assert!(needs.read.contains(&PathBuf::from("/srv/more")), "{needs:?}");
    }

    #[test]
    fn certificates_of_a_store_are_among_its_files() {
        let url =
            "postgres://u:p@db/turn?sslmode=verify-full&sslrootcert=/srv/ca.pem&sslkey=%2Fsrv%2Fkey.pem";
        assert_eq!(files_of_url(url), [PathBuf::from("/srv/ca.pem"), PathBuf::from("/srv/key.pem")]);
        assert!(files_of_url("redis://db/0").is_empty());
    }

    #[test]
    fn a_buffer_that_anybody_gets_needs_no_privilege() {
        let needs = |bytes| {
            let mut needs = Needs::default();
            needs.buffers(bytes);
            needs.privileges.contains(CapabilitySet::NET_ADMIN)
        };
        assert!(!needs(4096) && needs(usize::MAX));
    }
}
