//! State that a connection needs only until its target answers.

use std::{io, net::SocketAddr, time::Instant};

use crate::{Address, Rule, tally::Slot};

/// An attempt to reach a target for a connection.
pub(super) struct Opening {
    pub(super) connection: usize,
    pub(super) stage: Stage,
    /// When this stage has taken too long; milliseconds.
    pub(super) deadline: u64,
    pub(super) patience: u64,
    /// Place of the listener's port in the rule's range.
    pub(super) offset: u16,
    /// Number of rules of this process that the client has come through.
    pub(super) hops: u8,
    /// The targets that were given up.
    pub(super) tried: Vec<Slot>,
    /// The one whose queue was full.
    pub(super) queued: Option<Slot>,
    /// No name server has answered in time: what there is without it has to do.
    pub(super) without_names: bool,
    /// When the connect under way began. One clock read per connect, for the milliseconds of a tick are too coarse.
    pub(super) connecting: Instant,
    /// Why the last address was given up, for the log.
    pub(super) obstacle: Option<(Address, io::Error)>,
    /// Bytes read for the PROXY header and not used up by it.
    pub(super) inbox: Vec<u8>,
    /// The address that the client asked, as its PROXY header names it.
    pub(super) asked: Option<SocketAddr>,
    /// The client is a proxy of ours, whose header comes first.
    pub(super) is_proxy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing begun, or a PROXY header is awaited.
    Waiting,
    Name,
    Descriptor,
    /// The queue of a Unix socket is full, where TCP would send its SYN again.
    Queue,
    Connecting,
}

impl Opening {
    pub(super) fn new(
        connection: usize,
        rule: &Rule,
        (offset, hops): (u16, u8),
        now: u64,
        is_proxy: bool,
    ) -> Self {
        let patience = u64::try_from(rule.connect_timeout.as_millis()).unwrap_or(u64::MAX / 2);
        Self {
            connection,
            stage: Stage::Waiting,
            deadline: now.saturating_add(patience),
            patience,
            offset,
            hops,
            tried: Vec::new(),
            queued: None,
            without_names: false,
            connecting: Instant::now(),
            obstacle: None,
            inbox: Vec::new(),
            asked: None,
            is_proxy,
        }
    }

    pub(super) fn waits_for_name(&self) -> bool {
        self.stage == Stage::Name
    }
}
