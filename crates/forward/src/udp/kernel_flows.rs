//! Kernel flows of sessions: installed, extended, counted and removed.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use turnpike_net::{Buffer, Received, Rx, SocketId};
use turnpike_offload::{Counted, FlowState, Flows, Installed, Kind, NewFlow, WorkerClock, WorkerSockets};

pub(super) struct Offload {
    pub(super) flows: Flows,
    pub(super) sockets: WorkerSockets,
    pub(super) clock: WorkerClock,
    /// True if sessions get kernel flows.
    pub(super) is_active: bool,
    pub(super) open: usize,
}

pub(super) struct SessionFlows {
    pub(super) to_target: (Installed, FlowState),
    pub(super) to_client: (Installed, FlowState),
    pub(super) outward: SocketId,
    /// Time in milliseconds at which the flows expire unless extended.
    pub(super) expires: u64,
}

impl Offload {
    pub(super) fn new(flows: Flows, now: u64, is_active: bool) -> Self {
        let sockets = WorkerSockets::new(&flows, now);
        Self { flows, sockets, clock: WorkerClock::at(Duration::from_millis(now)), is_active, open: 0 }
    }

    pub(super) fn due(&self) -> Option<u64> {
        (self.open > 0).then(|| self.sockets.sweep_due())
    }

    pub(super) fn received(&mut self, socket: SocketId, received: Received, is_empty: bool, rx: &Rx) {
        let goes_across = |_: &Buffer<'_>| true;
        self.sockets.received(socket, received, is_empty, rx, self.flows.can_cross().then_some(goes_across));
    }

    /// Removes the flows of a session and returns the counts since the last read.
    pub(super) fn release(&mut self, across: SessionFlows) -> [Counted; 2] {
        self.open -= 1;
        self.sockets.forget(across.outward, &self.flows);
        [across.to_target, across.to_client].map(|flow| self.remove(flow))
    }

    /// Installs the flows of a session: `client` sends to `asked`, and the session sends to `target` from
    /// `from`. Returns `None` if the table is full, which is counted, or if an address needs an interface,
    /// which a flow cannot express.
    pub(super) fn install(
        &mut self,
        [client, asked, from, target]: [SocketAddr; 4],
        [listener, outward]: [SocketId; 2],
        expires: u64,
    ) -> Option<Box<SessionFlows>> {
        let is_odd = |address: &SocketAddr| match address.ip() {
            IpAddr::V6(ip) => ip.is_unspecified() || ip.is_unicast_link_local(),
            IpAddr::V4(ip) => ip.is_unspecified(),
        };
        if [client, asked, from, target].iter().any(is_odd) {
            return None;
        }
        let [of_client, of_target] = [listener, outward].map(|socket| {
            let slot = self.sockets.slot(socket, &self.flows);
            // Earlier datagrams may still be queued.
            self.sockets.touch(socket);
            slot
        });
        let there = of_client.and_then(|socket| self.flow([client, asked, from, target], socket, expires));
        let back = there.as_ref().and(of_target);
        let back = back.and_then(|socket| self.flow([target, from, asked, client], socket, expires));
        match (there, back) {
            (Some(to_target), Some(to_client)) => {
                self.open += 1;
                Some(Box::new(SessionFlows { to_target, to_client, outward, expires }))
            }
            (there, _) => {
                if let Some(there) = there {
                    self.remove(there);
                }
                self.sockets.forget(outward, &self.flows);
                None
            }
        }
    }

    pub(super) fn flow(
        &mut self,
        [remote, local, from, to]: [SocketAddr; 4],
        socket: u32,
        expires: u64,
    ) -> Option<(Installed, FlowState)> {
        let state = self.flows.state().ok()?;
        let (kind, expires_ns) = (Kind::Forward, self.clock.ns(expires));
        let new = NewFlow { kind, remote, local, channel: None, from, to, state: &state, socket, expires_ns };
        match self.flows.install(&new) {
            Ok(flow) => Some((flow, state)),
            Err(_) => {
                self.flows.give_back_state(state);
                None
            }
        }
    }

    pub(super) fn remove(&mut self, (flow, state): (Installed, FlowState)) -> Counted {
        self.flows.remove(flow);
        self.flows.give_back_state(state)
    }

    /// Returns the counts since the last read. Extends the flows of a live session before they expire, even
    /// if only user space has seen its datagrams (last at `heard`).
    pub(super) fn counted(
        &mut self,
        across: &mut SessionFlows,
        heard: u64,
        patience: u64,
        now: u64,
    ) -> [Counted; 2] {
        let counted =
            [&mut across.to_target, &mut across.to_client].map(|(_, state)| self.flows.counted(state));
        let lives = now.saturating_sub(heard) <= patience || counted.iter().any(|counted| !counted.is_zero());
        if lives && across.expires < now.saturating_add(patience).saturating_add(patience / 2) {
            across.expires = now.saturating_add(patience.saturating_mul(2));
            let expires_ns = self.clock.ns(across.expires);
            for (flow, _) in [&mut across.to_target, &mut across.to_client] {
                // If this fails, the flow expires early and its datagrams go through user space.
                let _ = self.flows.extend(flow, expires_ns);
            }
        }
        counted
    }
}
