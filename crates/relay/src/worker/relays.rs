//! UDP relay sockets: opening, receiving from peers, closing. An allocation has its own socket or shares one
//! (`Config::shared_ports`).

use std::net::{IpAddr, SocketAddr};

use turnpike_net::{Event, SocketId, UdpSocket};
use turnpike_turn::{
    server::{
        AllocationSlot, ClosedReason, Family, IcmpError, OpenRelay, OpenRequest, OpenResult, PortRequest,
        RelayId, RelayTransport, SharedPort,
    },
    time::Now,
};

use super::{NO_TRAILING, Role, SHARE, Worker, offload::FlowSide, out::side};
use crate::{
    link::ClientLinkKind,
    ports::{OpenedPort, Refusal},
};

const ERRORS: usize = 16;

#[derive(Clone, Copy)]
pub(super) enum PortHolder {
    One(RelayId),
    Many(SharedPort),
}

impl Worker {
    pub(super) fn open(&mut self, now: Now, request: &OpenRequest) {
        let first = self.open_one(now, request.allocation, &request.first);
        let second = request.second.map(|wish| self.open_one(now, request.allocation, &wish));
        let verdict = self.server.opened(now, request.allocation, first, second);
        self.out.reply(verdict);
    }

    fn open_one(&mut self, now: Now, allocation: AllocationSlot, wish: &OpenRelay) -> OpenResult {
        if wish.transport == RelayTransport::Tcp {
            return self.open_tcp(now, allocation, wish);
        }
        let first = self.address_for(allocation, wish.family);
        let owner = self.server.owner(allocation).unwrap_or_default();
        // A realm with its own ports does not share them.
        if wish.port == PortRequest::Any
            && self.shared.shares(wish.family)
            && !self.ports.has_own(owner.realm)
        {
            return self.open_shared(now, allocation, wish.family, first);
        }
        let opened = match self.ports.open(wish, owner, first, now.ms) {
            Ok(opened) => opened,
            Err(refusal) => return self.refuse(refusal),
        };
        let OpenedPort { socket, relayed } = opened;
        let bound = socket.local_addr();
        let relay = RelayId { allocation, family: wish.family };
        match self.adopt(socket, Role::Relay(PortHolder::One(relay))) {
            Ok(id) => {
                self.set_relay(relay, id, bound);
                OpenResult::Opened { relayed }
            }
            Err(_) => {
                self.ports.release(bound, now.ms);
                self.refuse(Refusal::File)
            }
        }
    }

    pub(super) fn address_for(&mut self, allocation: AllocationSlot, family: Family) -> Option<IpAddr> {
        let (client, _) = self.server.reached(allocation)?;
        self.ports.address_for(family, &client)
    }

    /// Opens another shared socket if the limit allows; otherwise, uses the one with the fewest allocations.
    fn open_shared(
        &mut self,
        now: Now,
        allocation: AllocationSlot,
        family: Family,
        first: Option<IpAddr>,
    ) -> OpenResult {
        let link = self.server.link(allocation);
        let by_datagrams = link.is_some_and(|link| ClientLinkKind::of(link) == ClientLinkKind::Datagrams);
        let opened = if self.shared.may_open(family, by_datagrams, first) {
            self.open_another(now, (family, first), by_datagrams)
        } else {
            Err(Refusal::Port)
        };
        let port = match (opened, self.shared.emptiest(family, by_datagrams, first)) {
            // If no new socket can be opened, use an existing one.
            (Ok(port), _) | (Err(_), Some(port)) => port,
            (Err(refusal), None) => return self.refuse(refusal),
        };
        let Some(place) = self.shared.get(port) else { return OpenResult::NoCapacity };
        self.shared.join(port);
        self.set_relay(RelayId { allocation, family }, place.socket, place.bound);
        OpenResult::Shared { relayed: place.relayed, port }
    }

    fn open_another(
        &mut self,
        now: Now,
        (family, first): (Family, Option<IpAddr>),
        by_datagrams: bool,
    ) -> Result<SharedPort, Refusal> {
        let OpenedPort { socket, relayed } = self.ports.open_shared(family, first, now.ms)?;
        let bound = socket.local_addr();
        let Ok(id) = self.adopt(socket, Role::Free) else {
            self.ports.release(bound, now.ms);
            return Err(Refusal::File);
        };
        let port = self.shared.open(id, bound, relayed, by_datagrams);
        self.roles[id.0 as usize] = Role::Relay(PortHolder::Many(port));
        Ok(port)
    }

    pub(super) fn set_relay(&mut self, relay: RelayId, socket: SocketId, bound: SocketAddr) {
        self.out.set_relay(relay, socket);
        if let Some(offload) = &mut self.offload {
            offload.relay_opened(relay, socket, bound);
        }
    }

    pub(super) fn refuse(&mut self, refusal: Refusal) -> OpenResult {
        let remedy = match refusal {
            Refusal::Port => {
                self.counted.ports_exhausted += 1;
                "all relay ports are in use: widen --relay-ports or add a --relay-ip"
            }
            Refusal::PortsHeld => {
                self.counted.ports_exhausted += 1;
                "other programs hold the relay ports (ss -lunp): choose others with --relay-ports"
            }
            Refusal::File => {
                self.counted.files_exhausted += 1;
                "no file descriptor or memory for another relay socket: raise the limit on open files (ulimit -n)"
            }
            Refusal::Family | Refusal::Absent | Refusal::Reservation => return refusal.result(),
        };
        if !self.complained {
            self.complained = true;
            tracing::warn!(
                worker = self.frame.number,
                "allocation refused with 508: {remedy} (logged once; later refusals are only counted)"
            );
        }
        refusal.result()
    }

    pub(super) fn end_relays_at(&mut self, now: Now, gone: &[IpAddr]) {
        for relay in self.server.relays() {
            let socket = self.out.relay_socket(relay).and_then(|id| self.sockets.get(id));
            let bound = socket.map(UdpSocket::local_addr).or_else(|| self.peers.bound(relay));
            if bound.is_some_and(|bound| gone.contains(&bound.ip())) {
                self.server.end_relay(now, relay, ClosedReason::AddressGone);
            }
        }
        self.carry_out_effects(now, NO_TRAILING);
        self.frame.dirty = true;
    }

    pub(super) fn receive_from_peers(&mut self, now: Now, holder: PortHolder, event: &Event) {
        let (socket, mut share) = match holder {
            PortHolder::One(relay) => (self.out.relay_socket(relay), 1),
            PortHolder::Many(port) => (self.shared.get(port).map(|place| place.socket), SHARE),
        };
        let Some(id) = socket else { return };
        if event.error {
            self.pass_errors_on(now, holder, id);
        }
        // A shared socket may be ready at every wait, and the kernel must learn when it was empty. Only a
        // receive call that returns nothing proves that it is empty, because an ICMP error also ends a call.
        let reads_on = self.offload.is_some() && matches!(holder, PortHolder::Many(_));
        loop {
            let Some(socket) = self.sockets.get(id) else { return };
            let Ok(received) = self.rx.recv(socket) else { return };
            if let Some(offload) = &mut self.offload {
                offload.received(
                    (id, FlowSide::Peers),
                    received,
                    received.emptied && received.count == 0,
                    &self.rx,
                );
            }
            if received.count == 0 {
                return;
            }
            for buffer in self.rx.buffers(received) {
                let relay = match holder {
                    PortHolder::One(relay) => Some(relay),
                    // All datagrams of a buffer come from one peer.
                    PortHolder::Many(port) => {
                        self.server.data.claimant(port, buffer.from.ip(), buffer.count())
                    }
                };
                let Some(relay) = relay else { continue };
                for datagram in buffer.datagrams() {
                    let verdict = self.server.data.from_peer(now, relay, buffer.from, datagram);
                    self.out.carry_out(&self.rx, (buffer.tos, buffer.ttl), verdict);
                }
            }
            share = share.saturating_sub(received.count);
            if !(received.more || reads_on) || share == 0 || !self.rx.has_room() {
                return;
            }
        }
    }

    fn pass_errors_on(&mut self, now: Now, holder: PortHolder, socket: SocketId) {
        let Some(socket) = self.sockets.get(socket) else { return };
        let mut errors = [None; ERRORS];
        let mut count = 0;
        let _ = socket.read_errors(ERRORS, |error| {
            errors[count] = Some(error);
            count += 1;
        });
        for turnpike_net::QueuedError { to, icmp_type, code, info, .. } in errors.into_iter().flatten() {
            let relay = match holder {
                PortHolder::One(relay) => Some(relay),
                PortHolder::Many(port) => self.server.data.claimant(port, to.ip(), 1),
            };
            if let Some(relay) = relay {
                let verdict = self.server.data.from_icmp(now, relay, to, IcmpError { icmp_type, code, info });
                self.out.reply(verdict);
            }
        }
    }

    pub(super) fn close(&mut self, now: Now, relay: RelayId) {
        let pair = self.out.relays.get_mut(relay.allocation.index as usize);
        let Some(id) = pair.and_then(|pair| pair[side(relay.family)].take()) else { return };
        let is_last = match self.roles[id.0 as usize] {
            Role::Relay(PortHolder::Many(port)) => self.shared.leave(port),
            _ => true,
        };
        if let Some(offload) = &mut self.offload {
            offload.relay_closed(relay, is_last);
        }
        if !is_last {
            return;
        }
        // Queued datagrams must be sent before their socket is closed. The arena keeps data that has not been
        // routed yet.
        self.out.tx.flush(&mut self.sockets, &self.rx);
        self.roles[id.0 as usize] = Role::Free;
        if let Some(socket) = self.sockets.remove(id) {
            self.ports.close(socket, now.ms);
        }
    }
}
