//! State that a connection needs only until its target has accepted.

use std::{io, net::SocketAddr, time::Instant};

use crate::{Address, Rule, tally::TargetSlot};

pub(super) struct Opening {
    pub(super) connection: usize,
    pub(super) stage: AttemptStage,
    /// Time at which this stage times out, in milliseconds.
    pub(super) deadline: u64,
    pub(super) patience: u64,
    /// Offset of the listener's port in the rule's range.
    pub(super) offset: u16,
    /// Number of this process's rules through which the connection has come.
    pub(super) hops: u8,
    pub(super) tried: Vec<TargetSlot>,
    pub(super) queued: Option<TargetSlot>,
    /// True if names are skipped because no name server has responded in time.
    pub(super) without_names: bool,
    /// Time at which the current connect started. Each connect reads the clock once, because the milliseconds
    /// of a tick are too coarse.
    pub(super) connecting: Instant,
    pub(super) obstacle: Option<(Address, io::Error)>,
    /// Bytes read beyond the PROXY header.
    pub(super) inbox: Vec<u8>,
    /// Destination address from the PROXY header.
    pub(super) asked: Option<SocketAddr>,
    /// True if the client is a trusted proxy, which sends a header first.
    pub(super) is_proxy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttemptStage {
    /// Not started yet, or waiting for a PROXY header.
    Waiting,
    Name,
    Descriptor,
    /// Waiting because the queue of a Unix socket is full. (TCP would retransmit its SYN.)
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
            stage: AttemptStage::Waiting,
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
        self.stage == AttemptStage::Name
    }
}
