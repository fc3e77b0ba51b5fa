//! eBPF programs that rules need. They are loaded for the first rule that needs them, at startup
//! or by a reload, and stay loaded until the process exits.

use std::{ops::RangeInclusive, os::fd::OwnedFd, sync::Arc};

use turnpike_offload::{Flows, Hook, Kernel, OffloadError, PassedKernel, Sockmap};
use turnpike_rules::CopyMode;

use crate::{Protocol, Settings, StartError, state::RuleState};

/// Maximum number of kernel-forwarded connections per worker; additional connections stay in user
/// space.
const MOST_PAIRS: usize = 16_384;
/// Maximum number of listeners of all rules and workers that the eBPF program can distinguish.
const MOST_LISTENERS: u32 = 65_536;

#[derive(Default)]
pub(crate) struct Loaded {
    kernel: Option<Arc<Kernel>>,
    /// Reason why the kernel path is not used although [`Settings::kernel_leases`] requests it.
    lack: Option<String>,
    has_sockmaps: bool,
}

/// Programs attached by the process being replaced.
pub(crate) type Before = Option<(PassedKernel, Vec<OwnedFd>)>;

#[derive(Default)]
pub(crate) struct Parts {
    pub(crate) flows: Option<Flows>,
    /// True if the program is not attached yet.
    pub(crate) waits: bool,
    pub(crate) sockmap: Option<Sockmap>,
}

impl Loaded {
    /// Loads, for each worker, the programs that these rules need and that are not loaded yet. The
    /// flow program is not attached as long as the previous process (`before`) has its own attached
    /// to the interfaces. On error, nothing changes.
    pub(crate) fn provide<'a>(
        &mut self,
        settings: &Settings,
        workers: usize,
        before: Option<Before>,
        mut rules: impl Iterator<Item = &'a RuleState> + Clone,
    ) -> Result<Vec<Parts>, StartError> {
        let mut parts: Vec<Parts> = std::iter::repeat_with(Parts::default).take(workers).collect();
        let passes_on =
            |state: &RuleState| state.rule.protocol == Protocol::Tcp && state.rule.copy == CopyMode::Kernel;
        let sockmaps = !self.has_sockmaps && rules.clone().any(passes_on);
        if sockmaps {
            let pairs = u32::try_from(settings.max_connections.min(MOST_PAIRS)).unwrap_or(u32::MAX);
            let loaded = Sockmap::load(workers, pairs).map_err(StartError::Copy)?;
            parts.iter_mut().zip(loaded).for_each(|(part, sockmap)| part.sockmap = Some(sockmap));
        }
        if self.kernel.is_none() && self.lack.is_none() && rules.any(|state| state.goes_across) {
            let kernel = turnpike_offload::KernelSettings {
                listeners: Vec::new(),
                relay_ports: RangeInclusive::new(1, 0),
                flows: settings.max_kernel_flows,
                sockets: (settings.max_kernel_flows / 2).saturating_add(MOST_LISTENERS),
                hook: Hook::Best,
                leases: settings.kernel_leases,
                measures: false,
            };
            let result = match before {
                // The previous process may have given up the privileges to load programs.
                Some(None) if settings.kernel_leases => Err(OffloadError::Kept),
                before => offload(&kernel, before, &mut parts),
            };
            match result {
                Ok(kernel) => self.kernel = Some(Arc::new(kernel)),
                Err(error) if settings.kernel_leases => self.lack = Some(error.to_string()),
                Err(error) => return Err(StartError::Datapath(error)),
            }
        }
        self.has_sockmaps |= sockmaps;
        Ok(parts)
    }

    pub(crate) fn kernel(&self) -> Option<&Arc<Kernel>> {
        self.kernel.as_ref()
    }

    pub(crate) fn lack(&self) -> Option<&str> {
        self.lack.as_deref()
    }
}

fn offload(
    settings: &turnpike_offload::KernelSettings,
    before: Option<Before>,
    parts: &mut [Parts],
) -> Result<Kernel, OffloadError> {
    let attach = before.is_none();
    let kernel = match before.flatten() {
        Some((passed, descriptors)) => Kernel::from_handover(settings, passed.without_flows(), descriptors)?,
        None => Kernel::load(settings)?,
    };
    if attach {
        kernel.attach()?;
    }
    let flows: Vec<Flows> = parts.iter().map(|_| kernel.flows()).collect::<Result<_, _>>()?;
    for (part, flows) in parts.iter_mut().zip(flows) {
        (part.waits, part.flows) = (!attach, Some(flows));
    }
    Ok(kernel)
}
