//! What rules need of the kernel beside sockets: loaded for the first rule that asks for it, at the start or by a reload, and kept until the
//! end.

use std::{ops::RangeInclusive, os::fd::OwnedFd, sync::Arc};

use turnpike_net::CopyMode;
use turnpike_offload::{Flows, Kernel, PassedKernel, Sockmap};

use crate::{Protocol, Settings, StartError, state::RuleState};

/// Connections of one worker that the kernel may have at a time; more stay in user space.
const MOST_PAIRS: usize = 16_384;
/// Listeners of all rules and workers, as far as the program in the kernel can tell them apart.
const MOST_LISTENERS: u32 = 65_536;

/// What has been loaded.
#[derive(Default)]
pub(crate) struct Loaded {
    kernel: Option<Arc<Kernel>>,
    has_sockmaps: bool,
}

/// Of a process that takes another one's place: what that one has attached.
pub(crate) type Before = Option<(PassedKernel, Vec<OwnedFd>)>;

/// What one worker gets of it.
#[derive(Default)]
pub(crate) struct Parts {
    pub(crate) flows: Option<Flows>,
    /// Whether the program that looks for flows is still to be attached.
    pub(crate) waits: bool,
    pub(crate) sockmap: Option<Sockmap>,
}

impl Loaded {
    /// What each worker needs for these rules and does not have yet. Where a process `before` this one has its own program on the
    /// interfaces, this one's is not attached yet.
    ///
    /// # Errors
    /// It cannot be had; then nothing has changed.
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
        if self.kernel.is_none() && rules.any(|state| state.goes_across) {
            let kernel = turnpike_offload::Settings {
                listeners: Vec::new(),
                relay_ports: RangeInclusive::new(1, 0),
                flows: settings.max_kernel_flows,
                sockets: (settings.max_kernel_flows / 2).saturating_add(MOST_LISTENERS),
                hook: settings.kernel_hook,
            };
            let attach = before.is_none();
            let kernel = match before.flatten() {
                Some((passed, descriptors)) => {
                    Kernel::from_handover(&kernel, passed.without_flows(), descriptors)
                }
                None => Kernel::load(&kernel),
            }
            .map_err(StartError::Datapath)?;
            if attach {
                kernel.attach().map_err(StartError::Datapath)?;
            }
            for part in &mut parts {
                part.waits = !attach;
                part.flows = Some(kernel.flows().map_err(StartError::Datapath)?);
            }
            self.kernel = Some(Arc::new(kernel));
        }
        self.has_sockmaps |= sockmaps;
        Ok(parts)
    }

    pub(crate) fn kernel(&self) -> Option<&Arc<Kernel>> {
        self.kernel.as_ref()
    }
}
