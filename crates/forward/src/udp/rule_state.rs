//! State of a rule and its listeners in the UDP engine.

use std::{net::SocketAddr, sync::Arc};

use slab::Slab;
use turnpike_net::{SocketId, TcpListener};

use super::{
    ChosenTarget, RuleKey,
    sessions::{Lists, SessionTable},
    tokens::{LISTENER, OUTWARD, slot_of},
};
use crate::{Protocol, Rule, RuleSnapshot, TargetFailure, rate::RuleRates, tally::Tallies};

pub(super) struct Listener {
    pub(super) rule: u32,
    /// Offset of the port in the rule's range.
    pub(super) port: u16,
    pub(super) address: SocketAddr,
    pub(super) kind: SocketKind,
}

pub(super) enum SocketKind {
    Datagrams(SocketId),
    /// Until `paused_until`, the listener is not watched, because descriptors have run out.
    Streams {
        socket: TcpListener,
        paused_until: Option<u64>,
    },
}

pub(super) struct RuleState {
    pub(super) key: RuleKey,
    pub(super) rule: Rule,
    pub(super) lists: Lists,
    pub(super) counters: RuleSnapshot,
    pub(super) tallies: Tallies,
    pub(super) rates: Option<Arc<RuleRates>>,
    /// True if the kernel forwards the rule's sessions where possible.
    pub(super) goes_across: bool,
    pub(super) removed: bool,
}

impl RuleState {
    /// Counts a session at its target; for UDP it counts as connected.
    pub(super) fn took(&mut self, choice: ChosenTarget) {
        let tally = self.tallies.of(choice.target);
        tally.open += 1;
        if !matches!(self.rule.protocol, Protocol::UdpToTcp { .. }) {
            tally.connected += 1;
        }
    }

    pub(super) fn left(&mut self, choice: ChosenTarget, failure: Option<TargetFailure>) {
        self.tallies.of(choice.target).open -= 1;
        self.failed(choice, failure);
    }

    pub(super) fn failed(&mut self, choice: ChosenTarget, failure: Option<TargetFailure>) {
        if let Some(failure) = failure {
            self.tallies.of(choice.target).failed(failure);
        }
    }

    /// Counts bytes of a session. A session that has moved bytes has a target.
    #[inline]
    pub(super) fn moved(&mut self, choice: Option<ChosenTarget>, to_target: u64, to_client: u64) {
        self.counters.to_target_bytes += to_target;
        self.counters.to_client_bytes += to_client;
        if let Some(choice) = choice {
            self.tallies.moved(choice.target, to_target, to_client);
        }
    }

    /// True for UDP clients.
    pub(super) fn hears_datagrams(&self) -> bool {
        matches!(self.rule.protocol, Protocol::Udp | Protocol::UdpToTcp { .. })
    }

    pub(super) fn framed(&self) -> bool {
        matches!(
            self.rule.protocol,
            Protocol::UdpToTcp { framed: true } | Protocol::TcpToUdp { framed: true }
        )
    }
}

/// Datagram socket that an event refers to, if sessions share it or it leads to a target.
pub(super) fn socket_of(listeners: &Slab<Listener>, sessions: &SessionTable, token: u64) -> Option<SocketId> {
    let at = slot_of(token);
    match token & 3 {
        LISTENER => match listeners.get(at as usize)?.kind {
            SocketKind::Datagrams(socket) => Some(socket),
            SocketKind::Streams { .. } => None,
        },
        OUTWARD => sessions.get(at)?.outward.socket(),
        _ => None,
    }
}
