//! Files and privileges that a forwarder needs in its sandbox.

use std::path::PathBuf;

use rustix::thread::CapabilitySet;
use turnpike_config::{
    DatapathChoice,
    forward::{ForwardLoaded, ForwardSettings, ForwardSources},
};
use turnpike_forward::CopyMode;
use turnpike_forward::{Bind, Protocol, Rule};
use turnpike_process::sandbox::{Needs, directory_of};

const BUFFER: usize = 4 << 20;

pub(crate) fn forwarder_needs(sources: &ForwardSources, loaded: &ForwardLoaded) -> Needs {
    let ForwardLoaded { settings, included, .. } = loaded;
    let mut needs = Needs::new(&settings.sandbox, &settings.admin, sources.file());
    needs.files.extend(included.iter().cloned());
    let written = settings.pid_file.iter().chain(&settings.connections).map(PathBuf::as_path);
    let sockets = settings.rules.iter().filter_map(|rule| match &rule.bind {
        Bind::Unix(name) => name.path(),
        Bind::Ip(_) | Bind::Name(_) => None,
    });
    needs.written.extend(written.chain(sockets).filter_map(directory_of));
    needs.privileges |= rule_privileges(settings);
    if has_leases(settings) {
        needs.privileges |= Needs::KERNEL;
    }
    needs.add_buffers(BUFFER);
    needs.with_directories()
}

/// True if `auto` may use the kernel path. Decided at startup, because privileges given up then cannot be
/// regained for a rule added later.
pub(crate) fn has_leases(settings: &ForwardSettings) -> bool {
    let is_remote = |rule: &Rule| !matches!(rule.bind, Bind::Ip(at) if at.ip().is_loopback());
    let may_cross = |rule: &Rule| {
        rule.protocol == Protocol::Udp
            && rule.kernel != Some(false)
            && rule.kernel_obstacle().is_none()
            && is_remote(rule)
    };
    settings.datapath == DatapathChoice::Auto
        && settings.rules.iter().all(|rule| rule.kernel != Some(true))
        && settings.rules.iter().any(may_cross)
}

/// Privileges needed only for the rules, which a reload can change.
pub(crate) fn rule_privileges(settings: &ForwardSettings) -> CapabilitySet {
    let is_in_kernel = |rule: &Rule| {
        rule.kernel == Some(true) || rule.protocol == Protocol::Tcp && rule.copy == CopyMode::Kernel
    };
    let mut privileges = CapabilitySet::empty();
    if settings.datapath == DatapathChoice::Kernel || settings.rules.iter().any(is_in_kernel) {
        privileges |= Needs::KERNEL;
    }
    if settings.rules.iter().any(|rule| rule.transparent || rule.mark.is_some()) {
        privileges |= CapabilitySet::NET_ADMIN;
    }
    if settings.rules.iter().any(|rule| rule.device.is_some()) {
        privileges |= CapabilitySet::NET_RAW;
    }
    privileges
}
