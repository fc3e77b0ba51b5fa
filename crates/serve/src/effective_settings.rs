//! Settings and addresses in effect, for the admin interface.

use std::sync::Arc;

use turnpike_config::Settings;
use turnpike_relay::RelayState;

use crate::{machine::Machine, store::Merged};

#[derive(Clone)]
pub(crate) struct EffectiveSettings {
    pub(crate) configured: Arc<Settings>,
    /// Settings in effect, including those that the store adds.
    pub(crate) in_force: Arc<Settings>,
    pub(crate) addresses: Arc<[RelayState]>,
}

impl EffectiveSettings {
    pub(crate) fn new(configured: &Settings, merged: &Merged, machine: &Machine) -> Self {
        Self {
            configured: Arc::new(configured.clone()),
            in_force: Arc::new(merged.settings.clone()),
            addresses: machine.states().into(),
        }
    }
}
