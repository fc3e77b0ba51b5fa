//! The data plane: what a packet needs, from the datagram that came in to the verdict on it.

pub(crate) mod bandwidth;
pub(crate) mod data_path;
pub(crate) mod drop_reason;
pub(crate) mod forwarding;
pub(crate) mod timers;
pub(crate) mod verdict;
