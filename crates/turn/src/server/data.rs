//! The data plane: what a packet needs, from the datagram that came in to the verdict on it. It knows no users, requests or policies; the
//! control plane changes it by effects ([`DataPlane::emit`]).

pub(crate) mod bandwidth;
pub(crate) mod data_path;
pub(crate) mod drop_reason;
pub(crate) mod forwarding;
pub(crate) mod timers;
pub(crate) mod verdict;

use std::{collections::VecDeque, sync::Arc};

use super::{Effect, ServerConfig, Stats};
use crate::time::Now;
use data_path::Indications;
use forwarding::Forwarding;

/// Queued effects beyond which unauthenticated clients cause no more.
pub(crate) const MAX_QUEUED: usize = 1024;

/// State that packets read and count in.
pub struct DataPlane {
    /// Channel numbers and peer rules.
    config: Arc<ServerConfig>,
    pub(crate) forwarding: Forwarding,
    pub(crate) stats: Stats,
    /// Effects that the runtime has not polled yet, in order.
    pub(crate) effects: VecDeque<Effect>,
    /// [`Effect::Used`] is wanted.
    pub(crate) tells_use: bool,
    pub(crate) indications: Indications,
    /// The Data indication of an ICMP error, which [`super::Verdict::Reply`] lends out.
    icmp: Vec<u8>,
}

impl DataPlane {
    /// An empty one. `salt` keeps transaction IDs of two workers apart.
    pub(crate) fn new(config: Arc<ServerConfig>, salt: [u8; 4]) -> Self {
        Self {
            config,
            forwarding: Forwarding::new(),
            stats: Stats::default(),
            effects: VecDeque::new(),
            tells_use: false,
            indications: Indications::new(salt),
            icmp: Vec::new(),
        }
    }

    pub(crate) fn reconfigure(&mut self, config: Arc<ServerConfig>) {
        self.config = config;
    }

    /// The only way from the control plane to the forwarding table and to the outside.
    pub(crate) fn emit(&mut self, now: Now, effect: Effect) {
        self.forwarding.apply(now.ms, &effect);
        self.effects.push_back(effect);
    }
}
