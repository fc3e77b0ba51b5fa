//! The data plane: everything needed to turn an incoming packet into a verdict. It has no notion of users,
//! requests or policies; the control plane changes it through effects ([`DataPlane::emit`]).

pub(crate) mod bandwidth;
pub(crate) mod data_path;
pub(crate) mod drop_reason;
pub(crate) mod forwarding;
pub(crate) mod quality;
pub(crate) mod tap;
pub(crate) mod tapping;
pub(crate) mod timers;
pub(crate) mod verdict;

use std::{collections::VecDeque, sync::Arc};

use super::{Effect, ServerConfig, Stats};
use crate::time::Now;
use data_path::Indications;
use forwarding::Forwarding;

/// Queue length above which unauthenticated clients cause no further effects.
pub(crate) const MAX_QUEUED: usize = 1024;

pub struct DataPlane {
    config: Arc<ServerConfig>,
    pub(crate) forwarding: Forwarding,
    pub(crate) stats: Stats,
    pub(crate) effects: VecDeque<Effect>,
    pub(crate) tells_use: bool,
    pub(crate) indications: Indications,
    /// Buffer for the Data indication of an ICMP error, which [`super::Verdict::Reply`] borrows.
    icmp: Vec<u8>,
    /// See [`super::Server::set_microseconds`].
    pub(crate) beyond_ms_us: u64,
}

impl DataPlane {
    pub(crate) fn new(config: Arc<ServerConfig>, salt: [u8; 4]) -> Self {
        Self {
            config,
            forwarding: Forwarding::new(),
            stats: Stats::default(),
            effects: VecDeque::new(),
            tells_use: false,
            indications: Indications::new(salt),
            icmp: Vec::new(),
            beyond_ms_us: 0,
        }
    }

    pub(crate) fn reconfigure(&mut self, config: Arc<ServerConfig>) {
        self.config = config;
    }

    /// The control plane's only way to the forwarding table and the runtime.
    pub(crate) fn emit(&mut self, now: Now, effect: Effect) {
        self.forwarding.apply(now.ms, &effect);
        self.effects.push_back(effect);
    }
}
