//! State that a connection needs only until its target answers.

use std::{io, net::SocketAddr, time::Instant};

use crate::{Address, Rule, tally::Slot};

pub(super) struct Opening {
    pub(super) connection: usize,
    pub(super) stage: Stage,
    /// Timeout of this stage, in milliseconds.
    pub(super) deadline: u64,
    pub(super) patience: u64,
    /// Offset of the listener's port in the rule's range.
    pub(super) offset: u16,
    /// Number of rules of this process that the client has passed.
    pub(super) hops: u8,
    pub(super) tried: Vec<Slot>,
    /// Target whose queue is full.
    pub(super) queued: Option<Slot>,
    /// No name server has answered in time, so names are skipped.
    pub(super) without_names: bool,
    /// Start of the current connect. One clock read per connect, because the milliseconds of a tick are too
    /// coarse.
    pub(super) connecting: Instant,
    /// Error of the last address, for the log.
    pub(super) obstacle: Option<(Address, io::Error)>,
    /// Bytes read beyond the PROXY header.
    pub(super) inbox: Vec<u8>,
    /// Destination address from the PROXY header.
    pub(super) asked: Option<SocketAddr>,
    /// The client is a trusted proxy, which sends a header first.
    pub(super) is_proxy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not started, or waiting for a PROXY header.
    Waiting,
    Name,
    Descriptor,
    /// The queue of a Unix socket is full. (TCP would retransmit its SYN.)
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
