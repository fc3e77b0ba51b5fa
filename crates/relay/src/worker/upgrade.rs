//! Upgrade of a worker ([`crate::upgrade`]). The worker pauses, exports its allocations to the worker with
//! the same number in the new process, and then forgets them or resumes normal service. The new worker
//! imports them before it serves any client.

use std::{
    io, mem,
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    sync::mpsc,
};

use serde::{Deserialize, Serialize};
use turnpike_net::{SocketId, TcpSocket, UdpSocket};
use turnpike_turn::{
    server::{
        AllocationSlot, Client, Family, Link, Moved, PendingMove, RelayId, SharedPort, Transport, UserRef,
    },
    time::Now,
};
use turnpike_worker::{Channel, HandoverBatch, HandoverStep};

use super::{Command, Lingering, NO_TRAILING, PortHolder, Role, Worker, handoff, offload::PassedFlows};
use crate::{
    link::ClientLinkKind,
    listening::Named,
    ports::{LateUse, Reserved},
    upgrade::Unfit,
};

/// First message on a channel, sent before the allocations.
#[derive(Serialize, Deserialize)]
struct UpgradeHead {
    /// Last values of the kernel's drop counters for UDP and DTLS listeners that have their own socket.
    drops: Vec<(Named, u32)>,
    /// DTLS clients, which the old process keeps.
    associations: Vec<Client>,
    arrivals: Vec<PendingMove>,
    deletions: Vec<(u64, u64)>,
    /// Reservations of all workers, sent by the first worker.
    reservations: Vec<Reserved>,
    /// Relay ports in quarantine, sent by the first worker.
    #[serde(default)]
    quarantined: Vec<LateUse>,
    #[serde(default)]
    shared: Vec<PassedShared>,
    #[serde(rename = "has_granted")]
    has_replays: bool,
    has_tunnel: bool,
}

#[derive(Serialize, Deserialize)]
struct ExportedAllocation {
    moved: Moved,
    #[serde(rename = "lent")]
    sockets: Vec<PassedRelaySocket>,
    flows: Option<PassedFlows>,
}

/// A relay socket; its descriptor is passed with the message.
#[derive(Serialize, Deserialize)]
struct PassedRelaySocket {
    family: Family,
    drops: u32,
}

/// A shared relay socket; its descriptor follows those of the reservations.
#[derive(Serialize, Deserialize)]
struct PassedShared {
    port: SharedPort,
    relayed: SocketAddr,
    drops: u32,
}

/// Selects clients over plain UDP, which can be handed over with their sockets.
fn by_datagrams(link: Link) -> bool {
    ClientLinkKind::of(link) == ClientLinkKind::Datagrams
}

impl Worker {
    pub(super) fn upgrade(&mut self, now: Now, step: HandoverStep) {
        match step {
            HandoverStep::Pause(done) => {
                // Send everything that was read so far before another process starts reading.
                self.carry_out_effects(now, NO_TRAILING);
                self.flush();
                let _ = done.send(());
                self.rest(true);
            }
            HandoverStep::Resume => self.resume(),
            HandoverStep::ResumeFlows => self.resume_offload(),
            // These steps are handled only while the worker is paused.
            HandoverStep::Export(..)
            | HandoverStep::Import(..)
            | HandoverStep::Forget(_)
            | HandoverStep::Serve => {}
        }
    }

    pub(super) fn suspend_offload(&mut self, done: mpsc::Sender<()>) {
        match &mut self.offload {
            Some(offload) => {
                offload.set_active(false, &self.sockets);
                self.suspended = Some(done);
            }
            None => _ = done.send(()),
        }
    }

    pub(super) fn walk_offload(&mut self) {
        let Some(offload) = &mut self.offload else { return };
        if offload.walk(&mut self.server, &self.out.listeners)
            && let Some(done) = self.suspended.take()
        {
            let _ = done.send(());
        }
    }

    fn resume_offload(&mut self) {
        self.suspended = None;
        if let Some(offload) = &mut self.offload {
            offload.set_active(true, &self.sockets);
        }
    }

    /// Sockets of open UDP and DTLS listeners; a shared socket is listed under UDP.
    fn sockets_listened_on(&self) -> Vec<(Named, SocketId)> {
        let mut all: Vec<(Named, SocketId)> = Vec::new();
        for (transport, count) in
            [(Transport::Udp, self.listeners.len()), (Transport::Dtls, self.out.dtls.places())]
        {
            for place in 0..count {
                let Some((socket, _)) = self.listening(transport, place) else { continue };
                if all.iter().all(|(_, other)| *other != socket) {
                    all.push(((transport, place), socket));
                }
            }
        }
        all
    }

    pub(super) fn export_sockets(&self, named: &[Named]) -> io::Result<Vec<OwnedFd>> {
        let closed =
            || io::Error::new(io::ErrorKind::NotFound, "a listener was closed during the upgrade: try again");
        let lend = |(transport, place): &Named| {
            if *transport == Transport::Tcp {
                return self.out.streams.listening(*place).ok_or_else(closed)?.as_fd().try_clone_to_owned();
            }
            let socket = self.listening(*transport, *place).and_then(|(id, _)| self.sockets.get(id));
            socket.ok_or_else(closed)?.as_fd().try_clone_to_owned()
        };
        named.iter().map(lend).collect()
    }

    /// Handles upgrade steps until the worker resumes, forgets or stops. Defers other commands, except
    /// handoffs if the worker `has_served`.
    fn rest(&mut self, has_served: bool) {
        let mut taken = 0;
        while let Some(command) = self.frame.next_command() {
            match command {
                Command::Handoff(handoff) if has_served => {
                    taken += 1;
                    self.take_handoff(self.now(), *handoff);
                    self.flush();
                }
                Command::Settle(answer) => _ = answer.send(mem::take(&mut taken)),
                Command::Upgrade(HandoverStep::Export(channel, answer)) => {
                    _ = answer.send(self.export_allocations(self.now(), &channel));
                }
                Command::Upgrade(HandoverStep::Import(channel, answer)) => {
                    let imported = self.import_allocations(&channel).map_err(io::Error::other);
                    self.frame.is_stopped = imported.is_err();
                    let _ = answer.send(imported);
                    if self.frame.is_stopped {
                        return;
                    }
                }
                Command::Upgrade(HandoverStep::Resume) => return self.resume(),
                Command::Upgrade(HandoverStep::Forget(done)) => {
                    self.forget(self.now());
                    let _ = done.send(());
                    return;
                }
                Command::Upgrade(HandoverStep::Serve) => return,
                other => self.frame.defer(other),
            }
        }
    }

    fn resume(&mut self) {
        self.handed_over.clear();
        self.tunnels.close();
        self.resume_offload();
    }

    fn export_allocations(&mut self, now: Now, channel: &Channel) -> io::Result<usize> {
        let portable = self.server.portable(by_datagrams);
        let listened_on = self.sockets_listened_on();
        let drops =
            listened_on.iter().filter_map(|(named, id)| Some((*named, self.sockets.get(*id)?.lend())));
        let drops = drops.collect();
        let has_dtls = (0..self.out.dtls.places()).any(|place| self.out.dtls.listening(place).is_some());
        let tunnel = if has_dtls { Some(self.tunnels.open()?) } else { None };
        let is_first = self.frame.number == 0;
        let reserved = if is_first { self.ports.lend_reserved(now.ms)? } else { Vec::new() };
        let (reservations, sockets): (Vec<_>, Vec<_>) = reserved.into_iter().unzip();
        let quarantined = if is_first { self.ports.quarantined(now.ms) } else { Vec::new() };
        let places = self.shared.portable();
        let of_allocations =
            places.filter_map(|(port, place)| Some((port, place, self.sockets.get(place.socket)?)));
        let (shared, sockets_shared): (Vec<_>, Vec<_>) = of_allocations
            .map(|(port, place, socket)| {
                let shared = PassedShared { port, relayed: place.relayed, drops: socket.lend() };
                (shared, socket.as_fd())
            })
            .unzip();
        let head = UpgradeHead {
            drops,
            associations: self.out.dtls.clients().chain(self.tunnels.clients()).collect(),
            arrivals: self.server.expected(),
            deletions: self.server.deletions(now),
            reservations,
            quarantined,
            shared,
            has_replays: is_first,
            has_tunnel: tunnel.is_some(),
        };
        let tunnel = tunnel.as_ref().map(|end| end.as_fd());
        let of_reservations = sockets.iter().map(|end| end.as_fd());
        let descriptors: Vec<_> = tunnel.into_iter().chain(of_reservations).chain(sockets_shared).collect();
        channel.send_value(&head, &descriptors)?;
        if is_first {
            channel.send(&self.replays.to_bytes(), &[])?;
        }
        for allocations in portable.chunks(HandoverBatch::<ExportedAllocation>::MOST) {
            self.export_batch(now, channel, allocations)?;
        }
        channel
            .send_value(&HandoverBatch::<ExportedAllocation> { sessions: Vec::new(), is_last: true }, &[])?;
        let count = portable.len();
        self.handed_over = portable;
        Ok(count)
    }

    fn export_batch(
        &mut self,
        now: Now,
        channel: &Channel,
        allocations: &[AllocationSlot],
    ) -> io::Result<()> {
        let mut batch = HandoverBatch { sessions: Vec::with_capacity(allocations.len()), is_last: false };
        let mut descriptors = Vec::with_capacity(2 * allocations.len());
        for allocation in allocations {
            // The flows are exported first, because that updates the allocation's counters.
            let offload = self.offload.as_mut();
            let flows = offload.and_then(|offload| offload.export(*allocation, &mut self.server));
            let Some(mut moved) = self.server.snapshot(now, *allocation) else { continue };
            moved.keep_arrival(by_datagrams);
            let mut passed = Vec::with_capacity(2);
            for family in [Family::V4, Family::V6] {
                if moved.shared(family).is_some() {
                    continue;
                }
                let id = self.out.relay_socket(RelayId { allocation: *allocation, family });
                let Some(socket) = id.and_then(|id| self.sockets.get(id)) else { continue };
                passed.push(PassedRelaySocket { family, drops: socket.lend() });
                descriptors.push(socket.as_fd());
            }
            batch.sessions.push(ExportedAllocation { moved, sockets: passed, flows });
        }
        channel.send_value(&batch, &descriptors)
    }

    fn forget(&mut self, now: Now) {
        // GRO is off on some sockets without flows. The new worker cannot know on which, so GRO is turned on
        // again.
        if let Some(offload) = &mut self.offload {
            offload.sockets.end(&self.sockets);
        }
        // The sockets are removed from the poller explicitly, because the new process keeps them open.
        for (_, id) in self.sockets_listened_on() {
            let Some(socket) = self.sockets.get(id) else { continue };
            let _ = self.frame.poller.remove(socket);
            // The remaining associations reply through this socket.
            if !matches!(
                mem::replace(&mut self.roles[id.0 as usize], Role::Free),
                Role::Dtls(_) | Role::Both(..)
            ) {
                self.sockets.remove(id);
                let answers = self.out.listeners.iter_mut();
                answers.filter(|way| way.is_some_and(|(by, _)| by == id)).for_each(|way| *way = None);
            }
        }
        self.listeners.clear();
        self.lingering = Lingering::default();
        self.out.streams.leave_listeners(&self.frame.poller);
        if let Some(offload) = &mut self.offload {
            offload.leave();
        }
        for allocation in mem::take(&mut self.handed_over) {
            for (_, socket) in self.detach_sockets(allocation) {
                self.ports.release(socket.local_addr(), now.ms);
            }
            self.server.surrender(now, allocation);
        }
        self.server.forget_lookups(by_datagrams);
        if self.frame.number == 0 {
            self.ports.surrender_reserved(now.ms);
        }
        self.out.dtls.left_behind();
        if let Err(error) = self.tunnels.watch(&self.frame.poller) {
            tracing::error!(worker = self.frame.number, %error, "cannot receive from the new process: DTLS clients lose their allocations");
        }
        self.carry_out_effects(now, NO_TRAILING);
        self.flush();
        self.publish_now(now.ms);
    }

    pub(crate) fn run_from_handover(&mut self) {
        self.rest(false);
        // If the worker was stopped, the old process still has the allocations.
        if !self.frame.is_stopped && !self.handle_commands(self.now()) {
            self.run();
        }
    }

    fn import_allocations(&mut self, channel: &Channel) -> Result<usize, Unfit> {
        let (head, descriptors) = channel.receive_value::<UpgradeHead>()?;
        let mut descriptors = descriptors.into_iter();
        let now = self.now();
        for ((transport, place), drops) in head.drops {
            let socket = self.listening(transport, place).and_then(|(id, _)| self.sockets.get(id));
            if let Some(socket) = socket {
                socket.expect_drops(drops);
            }
        }
        if head.has_tunnel {
            let old = TcpSocket::from(descriptors.next().ok_or(Unfit::Incomplete)?);
            self.tunnels.join(old, head.associations, &self.frame.poller)?;
        }
        for pending_move in head.arrivals {
            self.server.expect(pending_move);
        }
        self.server.remember_deletions(now, &head.deletions);
        for reserved in head.reservations {
            let socket = descriptors.next().ok_or(Unfit::Incomplete)?;
            self.ports.adopt_reserved(now.ms, reserved, socket)?;
        }
        self.ports.adopt_quarantined(now.ms, &head.quarantined);
        for PassedShared { port, relayed, drops } in head.shared {
            let socket = UdpSocket::take_over(descriptors.next().ok_or(Unfit::Incomplete)?, drops)?;
            let bound = socket.local_addr();
            self.ports.adopt(bound);
            self.ports.prepare(&socket);
            let id = self.adopt(socket, Role::Relay(PortHolder::Many(port)))?;
            self.shared.adopt(port, id, bound, relayed, true);
        }
        if head.has_replays && !self.replays.take_over(&channel.receive()?.bytes) {
            return Err(Unfit::Incomplete);
        }
        let mut count = 0;
        loop {
            let (batch, descriptors) = channel.receive_value::<HandoverBatch<ExportedAllocation>>()?;
            let mut descriptors = descriptors.into_iter();
            count += batch.sessions.len();
            for exported in batch.sessions {
                self.take_in(now, exported, &mut descriptors)?;
            }
            if batch.is_last {
                return Ok(count);
            }
        }
    }

    fn take_in(
        &mut self,
        now: Now,
        exported: ExportedAllocation,
        descriptors: &mut impl Iterator<Item = OwnedFd>,
    ) -> Result<(), Unfit> {
        let ExportedAllocation { moved, sockets: passed, flows } = exported;
        let mut sockets = handoff::MovedSockets::with_capacity(passed.len());
        for PassedRelaySocket { family, drops } in &passed {
            let socket = UdpSocket::take_over(descriptors.next().ok_or(Unfit::Incomplete)?, *drops)?;
            self.ports.adopt(socket.local_addr());
            sockets.push((*family, socket));
        }
        let shared = [Family::V4, Family::V6].map(|family| Some((family, moved.shared(family)?)));
        let allocation =
            self.server.restore(now, moved, ClientLinkKind::Datagrams.link()).map_err(|moved| {
                let UserRef { realm, identity } = moved.owner();
                let (realm, user) = (realm.to_owned(), identity.to_owned());
                if self.server.has_realm(&realm) {
                    Unfit::Quota { realm, user }
                } else {
                    Unfit::Realm { realm }
                }
            })?;
        self.attach_sockets(now, allocation, sockets);
        for (family, port) in shared.into_iter().flatten() {
            let place = self.shared.get(port).ok_or(Unfit::Incomplete)?;
            self.shared.join(port);
            self.set_relay(RelayId { allocation, family }, place.socket, place.bound);
        }
        if let (Some(offload), Some(flows)) = (&mut self.offload, &flows) {
            offload.adopt(allocation, flows, &mut self.server, &self.out.listeners);
        }
        let has = |passed: &PassedRelaySocket| {
            let relay = RelayId { allocation, family: passed.family };
            self.out.relay_socket(relay).is_some()
        };
        if passed.iter().all(has) { Ok(()) } else { Err(io::Error::from(io::ErrorKind::OutOfMemory).into()) }
    }
}
