//! Rules that a request is held against: quotas and bans, peers, redirects, durations and rates.

pub(crate) mod alternate;
pub(crate) mod amplification;
pub(crate) mod gate;
pub(crate) mod own_endpoints;
pub(crate) mod peer_rules;
pub(crate) mod prefix;
pub(crate) mod session_limit;
