//! Files and privileges that a TURN server needs in its sandbox.

use std::path::PathBuf;

use turnpike_config::{DatapathChoice, Settings, Sources, certificates};
use turnpike_process::sandbox::{Needs, directory_of};
use turnpike_stores::StoreAddress;

use crate::{store, usage};

/// Socket buffer of the channels between workers, in bytes.
const BUFFER: usize = 4 << 20;

pub(crate) fn server_needs(sources: &Sources, settings: &Settings) -> Needs {
    let mut needs = Needs::new(&settings.sandbox, &settings.admin, sources.file());
    needs.files.extend(certificates::files(settings));
    needs.files.extend(settings.geoip.files.iter().cloned());
    let applications = &settings.credentials;
    needs.files.extend(applications.tls_cert.iter().chain(&applications.tls_key).cloned());
    if !settings.tls.acme.is_empty() {
        needs.written.extend(certificates::order_directory(settings));
        needs.files.extend(settings.acme.hook.iter().chain(&settings.acme.authority).cloned());
    }
    if !settings.events.webhooks.is_empty() {
        needs.written.extend(turnpike_config::event_directory(settings));
    }
    if let Ok(Some((StoreAddress::Sqlite(file), _))) = store::address(settings) {
        needs.written.extend(directory_of(&file));
    }
    if let Some(file) = usage::file(settings) {
        needs.written.extend(directory_of(&file));
    }
    let url = settings.store.url.as_ref().map_or("", |url| url.reveal());
    needs.files.extend(files_of_url(url));
    use DatapathChoice as Path;
    let is_in_kernel = match settings.datapath {
        Path::Auto => !is_only_local(settings),
        Path::Kernel | Path::Xdp | Path::XdpGeneric => true,
        Path::Step(_) => false,
    };
    if is_in_kernel {
        needs.privileges |= Needs::KERNEL;
    }
    needs.add_buffers(settings.relay.listener_buffer.max(settings.relay.buffer).max(BUFFER));
    needs.with_directories()
}

/// True if all clients are on this machine: the kernel path relays nothing on loopback.
pub(crate) fn is_only_local(settings: &Settings) -> bool {
    let listeners = [&settings.listen, &settings.tls.listen, &settings.dtls.listen];
    listeners.into_iter().flatten().all(|address| address.ip().is_loopback())
}

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

    fn needs_of(settings: &[(&str, &str)]) -> Needs {
        let mut flags = Flags::new();
        for (key, value) in settings {
            let key: &'static str = Box::leak((*key).to_owned().into_boxed_str());
            flags.set(key, key, Some((*value).to_owned()));
        }
        let sources = Sources::new(None, Vec::new(), flags);
        server_needs(&sources, &sources.settings().expect("the settings are valid"))
    }

    #[test]
    fn kernel_privileges_are_needed_only_for_the_kernel_path_and_auto() {
        let dir = Dir::new();
        let state = dir.path().to_str().expect("the path is UTF-8");
        assert!(!needs_of(&[("store.state", state), ("server.datapath", "gso")]).is_in_kernel());
        assert!(needs_of(&[("store.state", state)]).is_in_kernel());
        for path in ["kernel", "xdp"] {
            assert!(needs_of(&[("store.state", state), ("server.datapath", path)]).is_in_kernel(), "{path}");
        }
    }

    #[test]
    fn sandbox_needs_include_configured_files() {
        let dir = Dir::new();
        let state = dir.at("made/state");
        let needs = needs_of(&[
            ("store.state", state.to_str().expect("the path is UTF-8")),
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
    fn sandbox_needs_include_certificates_in_a_store_url() {
        let url =
            "postgres://u:p@db/turn?sslmode=verify-full&sslrootcert=/srv/ca.pem&sslkey=%2Fsrv%2Fkey.pem";
        assert_eq!(files_of_url(url), [PathBuf::from("/srv/ca.pem"), PathBuf::from("/srv/key.pem")]);
        assert!(files_of_url("redis://db/0").is_empty());
    }
}
