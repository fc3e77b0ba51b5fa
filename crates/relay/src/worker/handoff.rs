//! Messages between workers. With CONNECTION-IDs (RFC 6062) and mobility (RFC 8016), clients may arrive on a
//! worker other than that of their allocation. Workers never wait for replies, so packets of other clients
//! are not delayed.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use turnpike_net::UdpSocket;
use turnpike_turn::{
    server::{
        AllocationSlot, Client, ClosedReason, Family, MoveRequest, Moved, PendingMove, RelayId, Source,
        Verdict,
    },
    time::Now,
};
use turnpike_worker::Sender;

use super::{Command, NO_TRAILING, PortHolder, Role, TrailingBytes, UNMARKED, Worker, out::side};
use crate::{
    link::ClientLinkKind,
    stream::{CloseReason, Detached, Streams},
};

/// Maximum handoffs waiting for one worker. If the queue is full, requests are dropped (clients retransmit
/// them), and streams wait on their current worker.
const BACKLOG: usize = 1024;
const AGAIN_MS: u64 = 10;

/// Maximum bytes of client data sent along with a request for its allocation: about one datagram, to limit
/// the queue's size.
const CARRIED: usize = 2048;

#[derive(Clone)]
pub(crate) struct Mailbox {
    pub(crate) worker: Sender<Command>,
    pub(crate) backlog: Arc<AtomicUsize>,
}

/// Message to another worker. Allocations and streams are never dropped, because the limits on requests and
/// accepted streams already bound their number.
pub(crate) enum Handoff {
    /// A client's stream, a request received on it, and the bytes that follow the request.
    Stream(Box<Detached>, Box<[u8]>, Vec<u8>),
    /// A request whose client stays with worker `via`. If `occupied`, another allocation on that worker has
    /// the client's 5-tuple.
    Request { via: u16, occupied: bool, source: Source, request: Box<[u8]> },
    /// Returns a request, because its client does not move to `owner`.
    Declined { owner: u16, source: Source, request: Box<[u8]> },
    /// Worker `from` cancels this pending move.
    MoveOver { from: u16, pending_move: PendingMove },
    /// A forwarded request has deleted an allocation. The receiver remembers the deletion, because the
    /// client may retransmit the request.
    Deleted((u64, u64)),
    /// Reply to a forwarded request, and the move to expect, if any.
    Reply { source: Source, pending_move: Option<PendingMove>, reply: Box<[u8]> },
    /// Requests an allocation. The client's data that triggered the request is included, so that it is not
    /// lost.
    Wanted(MoveRequest, Box<[u8]>),
    /// Transfers the allocation, and returns the client's data.
    Allocation { from: u16, moved: Moved, sockets: MovedSockets, data: Box<[u8]> },
    /// The allocation does not move.
    NotMoved(Client),
    /// Returns the allocation.
    Returned { moved: Moved, sockets: MovedSockets },
}

pub(crate) type MovedSockets = Vec<(Family, UdpSocket)>;

impl Handoff {
    fn may_be_lost(&self) -> bool {
        matches!(
            self,
            Self::Request { .. }
                | Self::Declined { .. }
                | Self::Deleted(_)
                | Self::Reply { .. }
                | Self::Wanted(..)
        )
    }
}

impl Mailbox {
    pub(crate) fn of(worker: &Worker) -> Self {
        Self { worker: worker.frame.sender.clone(), backlog: Arc::default() }
    }

    fn is_full(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) >= BACKLOG
    }

    fn send(&self, handoff: Box<Handoff>) -> Result<(), Box<Handoff>> {
        if handoff.may_be_lost() && self.is_full() {
            return Err(handoff);
        }
        self.backlog.fetch_add(1, Ordering::Relaxed);
        match self.worker.send(Command::Handoff(handoff)) {
            Err(Command::Handoff(handoff)) => {
                self.backlog.fetch_sub(1, Ordering::Relaxed);
                Err(handoff)
            }
            // `send` returns the command that it could not send, so no other error occurs.
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

impl Worker {
    pub(crate) fn set_mailboxes(&mut self, mailboxes: Arc<[Mailbox]>) {
        self.mailboxes = mailboxes;
    }

    pub(super) fn own_number(&self) -> u16 {
        u16::try_from(self.frame.number).unwrap_or(u16::MAX)
    }

    /// Moves a stream and its request to another worker, or retries later if that worker's queue is full.
    pub(super) fn hand_over(
        &mut self,
        now: Now,
        client: &Client,
        worker: u16,
        request: Box<[u8]>,
        behind: TrailingBytes<'_>,
    ) {
        let behind = self.all_behind(client, behind);
        let out = &mut self.out;
        if self.mailboxes.get(usize::from(worker)).is_some_and(Mailbox::is_full) {
            return out.streams.put_back(client, [&request, &behind], now.ms + AGAIN_MS, &self.frame.poller);
        }
        if let Some(taken) = out.streams.detach(client, &self.rx, &self.frame.poller, CloseReason::HandedOver)
        {
            self.send(worker, Handoff::Stream(Box::new(taken), request, behind));
        }
    }

    pub(super) fn all_behind(&self, client: &Client, behind: TrailingBytes<'_>) -> Vec<u8> {
        let mut all = behind.to_vec(&self.rx);
        if matches!(behind, TrailingBytes::HandedOver(_)) {
            // More was read from the stream while the request waited for credentials.
            all.extend_from_slice(self.out.streams.held(client));
        }
        all
    }

    pub(super) fn fetch(&mut self, request: MoveRequest, mut data: Box<[u8]>) {
        if data.len() > CARRIED {
            data = Box::default();
        }
        if !self.send(request.owner, Handoff::Wanted(request, data)) {
            self.server.not_asked(&request.client);
        }
    }

    pub(super) fn export(&mut self, now: Now, request: &MoveRequest, data: Box<[u8]>) {
        let Some(mut moved) = self.server.export(now, request) else {
            self.send(request.to, Handoff::NotMoved(request.client));
            return;
        };
        if let Some(offload) = &mut self.offload {
            // Traffic that the kernel relayed is counted here, but logged by the worker on which the
            // allocation ends.
            let [to_peer, to_client] = offload.release(moved.from(), &mut self.server).pairs();
            moved.count_across(to_peer, to_client);
        }
        let sockets = self.detach_sockets(moved.from());
        if let Some(was) = moved.was() {
            self.out.streams.released(now.ms, &was.client);
            self.out.dtls.released(now.ms, &was.client, &mut self.out.tx);
        }
        let from = self.own_number();
        self.send(request.to, Handoff::Allocation { from, moved, sockets, data });
    }

    pub(super) fn take_handoff(&mut self, now: Now, handoff: Handoff) {
        if let Some(own) = self.mailboxes.get(self.frame.number) {
            own.backlog.fetch_sub(1, Ordering::Relaxed);
        }
        self.frame.dirty = true;
        match handoff {
            Handoff::Stream(taken, request, behind) => self.take_over(now, *taken, &request, &behind),
            Handoff::Request { via, occupied, source, request } => {
                self.server.from_elsewhere(now, via, occupied, &source, &request);
            }
            Handoff::Declined { owner, source, request } if self.is_here(&source) => {
                let verdict = self.server.declined(now, owner, &source, &request);
                self.out.reply(verdict);
            }
            Handoff::Declined { .. } => {}
            Handoff::MoveOver { from, pending_move } => self.server.move_over(from, &pending_move),
            Handoff::Deleted(deletion) => self.server.remember_deletions(now, &[deletion]),
            Handoff::Reply { source: Source { client, link }, pending_move, reply } => {
                if let Some(pending_move) = pending_move {
                    self.server.expect(pending_move);
                }
                self.out.reply_to(&client, link, &reply);
            }
            Handoff::Wanted(request, data) => self.export(now, &request, data),
            Handoff::Allocation { from, moved, sockets, data } => {
                let to = moved.to();
                match self.server.import(now, moved) {
                    Ok(allocation) => {
                        self.attach_sockets(now, allocation, sockets);
                        self.disconnect_if_gone(now, &to);
                        self.route_again(now, to, &data);
                    }
                    Err(moved) => _ = self.send(from, Handoff::Returned { moved, sockets }),
                }
            }
            Handoff::NotMoved(client) => self.server.not_moved(&client),
            Handoff::Returned { moved, sockets } => self.take_back(now, moved, sockets),
        }
        self.carry_out_effects(now, NO_TRAILING);
    }

    fn take_back(&mut self, now: Now, moved: Moved, sockets: MovedSockets) {
        let was = moved.was();
        let Some(allocation) = self.server.take_back(now, moved) else {
            return sockets.into_iter().for_each(|(_, socket)| self.ports.close(socket, now.ms));
        };
        self.attach_sockets(now, allocation, sockets);
        if let Some(source) = was {
            self.out.streams.allocated(&source.client);
            self.out.dtls.allocated(&source.client);
            self.disconnect_if_gone(now, &source);
        }
    }

    /// Returns true if the handoff was delivered. An undelivered allocation is closed.
    pub(super) fn send(&mut self, worker: u16, handoff: Handoff) -> bool {
        let undelivered = match self.mailboxes.get(usize::from(worker)) {
            Some(mailbox) => match mailbox.send(Box::new(handoff)) {
                Ok(()) => return true,
                Err(handoff) => *handoff,
            },
            None => handoff,
        };
        self.counted.handoffs_lost += 1;
        if let Handoff::Allocation { moved, sockets, .. } | Handoff::Returned { moved, sockets } = undelivered
        {
            // The target worker has ended, so the server is about to end too.
            let now_ms = self.now().ms;
            for (_, socket) in sockets {
                self.ports.close(socket, now_ms);
            }
            drop(moved);
        }
        false
    }

    fn take_over(&mut self, now: Now, taken: Detached, request: &[u8], behind: &[u8]) {
        let adopted = self.out.streams.adopt(taken, now.ms, &self.frame.poller);
        // An older connection with the same 5-tuple may have been evicted.
        self.tell_gone(now);
        let Some(source) = adopted else { return };
        let verdict = self.server.from_handed_over(now, &source, request);
        self.out.reply(verdict);
        self.carry_out_effects(now, TrailingBytes::HandedOver(behind));
        // The stream may have become a data connection, or moved to another worker.
        let ClientLinkKind::Stream(place) = ClientLinkKind::of(source.link) else { return };
        for part in behind.chunks(Streams::FEED) {
            if self.out.streams.is_paused(place.slot) {
                // The stream has kept the remaining bytes.
                break;
            }
            if self.rx.room() < Streams::ROOM {
                self.flush();
            }
            if let Some(incoming) = self.out.streams.feed(place, part, &mut self.rx) {
                self.route_stream(now, incoming);
            }
        }
        if self.out.streams.serves(place) {
            self.out.streams.close_if_ended(place.slot);
        }
    }

    /// Takes the relay sockets, except shared ones, from an allocation that moves. Allocations that move
    /// between workers never share sockets (`PortRequest::Own`).
    pub(super) fn detach_sockets(&mut self, allocation: AllocationSlot) -> MovedSockets {
        // Queued datagrams must be sent before their socket is closed. The arena keeps data that has not been
        // routed yet.
        self.out.tx.flush(&mut self.sockets, &self.rx);
        let mut detached = MovedSockets::new();
        for family in [Family::V4, Family::V6] {
            let pair = self.out.relays.get_mut(allocation.index as usize);
            let Some(id) = pair.and_then(|pair| pair[side(family)].take()) else { continue };
            let is_last = match self.roles[id.0 as usize] {
                Role::Relay(PortHolder::Many(port)) => self.shared.leave(port),
                _ => true,
            };
            if let Some(offload) = &mut self.offload {
                offload.relay_closed(RelayId { allocation, family }, is_last);
            }
            if !is_last {
                continue;
            }
            self.roles[id.0 as usize] = Role::Free;
            if let Some(socket) = self.sockets.remove(id) {
                // This fails only if the poller does not watch the socket.
                let _ = self.frame.poller.remove(&socket);
                detached.push((family, socket));
            }
        }
        detached
    }

    fn disconnect_if_gone(&mut self, now: Now, source: &Source) {
        if !self.is_here(source) {
            self.server.disconnected(now, &source.client);
        }
    }

    /// Returns true if the client's connection is open; always true for plain UDP.
    fn is_here(&self, source: &Source) -> bool {
        match ClientLinkKind::of(source.link) {
            ClientLinkKind::Datagrams => true,
            ClientLinkKind::Stream(place) => self.out.streams.serves(place),
            ClientLinkKind::Dtls(place) => self.out.dtls.serves(place),
        }
    }

    /// Routes data that the client sent before its allocation arrived. Its TOS and TTL are not preserved.
    fn route_again(&mut self, now: Now, source: Source, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        if !self.rx.has_room() {
            self.flush();
        }
        let copied = self.rx.fill(0, |room| {
            let len = data.len().min(room.len());
            room[..len].copy_from_slice(&data[..len]);
            Ok(len)
        });
        let Ok(span) = copied else { return };
        match self.server.from_client(now, &source, self.rx.bytes(span)) {
            Verdict::Wait { otherwise, .. } => self.server.not_waited(otherwise),
            verdict => _ = self.out.carry_out(&self.rx, UNMARKED, verdict),
        }
    }

    pub(super) fn attach_sockets(&mut self, now: Now, allocation: AllocationSlot, sockets: MovedSockets) {
        // Effects of an earlier allocation with the same index may still be pending.
        self.carry_out_effects(now, NO_TRAILING);
        for (family, socket) in sockets {
            let bound = socket.local_addr();
            let relay = RelayId { allocation, family };
            // The previous worker may have turned GRO off.
            self.ports.prepare(&socket);
            match self.adopt(socket, Role::Relay(PortHolder::One(relay))) {
                Ok(id) => self.set_relay(relay, id, bound),
                Err(_) => {
                    self.ports.release(bound, now.ms);
                    // Without its socket, the allocation could not relay anything.
                    self.server.close_one(now, allocation, ClosedReason::Administrator);
                }
            }
        }
        if let Some(offload) = &mut self.offload {
            offload.attached(allocation, &mut self.server, &self.out.listeners);
        }
        // This worker may have handled a reload before the sender did.
        if !self.server.has_realm_of(allocation) {
            self.server.close_one(now, allocation, ClosedReason::Administrator);
        }
    }
}

#[cfg(test)]
mod tests;
