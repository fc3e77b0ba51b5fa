//! What workers say to one another: CONNECTION-IDs (RFC 6062) and mobility tickets (RFC 8016) bring clients to a worker that does
//! not have what they speak of. Nothing here waits for an answer, and nothing here belongs to the life of a packet.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
    mpsc,
};

use turnpike_net::{Buffer, UdpSocket, poll::Waker};
use turnpike_turn::{
    server::{AllocationId, Arrival, Client, ClosedReason, Family, MoveRequest, Moved, RelayId, Verdict},
    time::Now,
};

use super::{Command, Role, Worker, side};
use crate::stream::{CloseReason, Streams, Taken};

/// Letters that may wait for one worker. Beyond, requests are dropped, for clients repeat them, and streams are closed.
const BACKLOG: usize = 1024;

/// Bytes of a client's data that travel with a letter: what comes over the Internet in one piece. So all that waits is bounded.
const CARRIED: usize = 2048;

/// Where one worker gets its letters.
#[derive(Clone)]
pub(crate) struct Mailbox {
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) waker: Waker,
    pub(crate) backlog: Arc<AtomicUsize>,
}

/// One letter. Those that carry an allocation always arrive: there are no more of them than requests that were let through.
pub(crate) enum Letter {
    /// A client's stream, the request on it, and what came behind that.
    HandOver(Box<Taken>, Vec<u8>, Vec<u8>),
    /// A request whose client remains with worker `via`.
    Forward { via: u16, client: Client, request: Vec<u8> },
    /// The answer to it, and whom to expect.
    Answer { client: Client, arrival: Option<Arrival>, bytes: Vec<u8> },
    /// Asks for an allocation; with the client's data that made it necessary, so that it is not lost.
    Export(MoveRequest, Vec<u8>),
    /// Brings it, and the data back.
    Import { from: u16, moved: Box<Moved>, sockets: Sockets, data: Vec<u8> },
    /// Says that it does not come.
    NotMoved(Client),
    /// Brings it back.
    TakeBack { moved: Box<Moved>, sockets: Sockets },
}

/// The relay sockets of an allocation.
pub(crate) type Sockets = Vec<(Family, UdpSocket)>;

impl Letter {
    /// Whether it may be lost.
    fn may_wait(&self) -> bool {
        matches!(self, Self::HandOver(..) | Self::Forward { .. } | Self::Answer { .. } | Self::Export(..))
    }
}

impl Mailbox {
    /// Gives the letter back if it cannot be delivered.
    fn post(&self, letter: Box<Letter>) -> Result<(), Box<Letter>> {
        if letter.may_wait() && self.backlog.load(Ordering::Relaxed) >= BACKLOG {
            return Err(letter);
        }
        self.backlog.fetch_add(1, Ordering::Relaxed);
        match self.commands.send(Command::Letter(letter)) {
            Ok(()) => {
                self.waker.wake();
                Ok(())
            }
            Err(mpsc::SendError(command)) => {
                self.backlog.fetch_sub(1, Ordering::Relaxed);
                match command {
                    Command::Letter(letter) => Err(letter),
                    // It is the one that was sent.
                    _ => Ok(()),
                }
            }
        }
    }
}

impl Worker {
    /// Who the others are.
    pub(crate) fn meet(&mut self, mailboxes: Arc<[Mailbox]>) {
        self.mailboxes = mailboxes;
    }

    pub(super) fn seat(&self) -> u16 {
        u16::try_from(self.number).unwrap_or(u16::MAX)
    }

    /// Gives a stream to another worker, with the request that makes it that one's business.
    pub(super) fn hand_over(&mut self, client: &Client, worker: u16, request: Vec<u8>, rest: Vec<u8>) {
        let out = &mut self.out;
        if let Some(taken) = out.streams.let_go(client, &self.rx, &self.poller, CloseReason::HandedOver) {
            self.post(worker, Letter::HandOver(Box::new(taken), request, rest));
        }
    }

    pub(super) fn forward(&mut self, client: Client, worker: u16, request: Vec<u8>) {
        let via = self.seat();
        self.post(worker, Letter::Forward { via, client, request });
    }

    /// A client's data asks for its allocation, which another worker has.
    pub(super) fn ask_for(&mut self, request: MoveRequest, mut data: Vec<u8>) {
        if data.len() > CARRIED {
            data.clear();
        }
        if !self.post(request.owner, Letter::Export(request, data)) {
            self.server.not_asked(&request.client);
        }
    }

    /// Gives an allocation to the worker where its client is, if it is to go there.
    pub(super) fn export(&mut self, now: Now, request: &MoveRequest, data: Vec<u8>) {
        let Some(moved) = self.server.export(now, request) else {
            self.post(request.to, Letter::NotMoved(request.client));
            return;
        };
        let sockets = self.surrender(moved.from());
        if let Some(was) = moved.was() {
            self.out.streams.released(now.ms, &was);
            self.out.dtls.released(now.ms, &was, &mut self.out.tx);
        }
        let from = self.seat();
        self.post(request.to, Letter::Import { from, moved: Box::new(moved), sockets, data });
    }

    pub(super) fn read_letter(&mut self, now: Now, letter: Letter) {
        if let Some(own) = self.mailboxes.get(self.number) {
            own.backlog.fetch_sub(1, Ordering::Relaxed);
        }
        self.dirty = true;
        match letter {
            Letter::HandOver(taken, request, rest) => self.take_over(now, *taken, request, rest),
            Letter::Forward { via, client, request } => {
                let (verdict, arrival) = self.server.from_elsewhere(now, via, client, &request);
                match verdict {
                    Verdict::Reply { client, bytes } => {
                        let bytes = bytes.to_vec();
                        self.post(via, Letter::Answer { client, arrival, bytes });
                    }
                    Verdict::Forward { worker } => {
                        self.post(worker, Letter::Forward { via, client, request });
                    }
                    _ => {}
                }
            }
            Letter::Answer { client, arrival, bytes } => {
                if let Some(arrival) = arrival {
                    self.server.expect(now, arrival);
                }
                self.out.reply_to(client, &bytes);
            }
            Letter::Export(request, data) => self.export(now, &request, data),
            Letter::Import { from, moved, sockets, data } => {
                let client = moved.client();
                match self.server.import(now, *moved) {
                    Ok(allocation) => {
                        self.move_in(now, allocation, sockets);
                        self.look_for(now, &client);
                        self.route_again(now, client, data);
                    }
                    Err(moved) => {
                        self.post(from, Letter::TakeBack { moved: Box::new(moved), sockets });
                    }
                }
            }
            Letter::NotMoved(client) => self.server.not_moved(&client),
            Letter::TakeBack { moved, sockets } => {
                let client = moved.was();
                let Some(allocation) = self.server.take_back(now, *moved) else {
                    return sockets.iter().for_each(|(_, socket)| self.ports.release(socket.local_addr()));
                };
                self.move_in(now, allocation, sockets);
                if let Some(client) = client {
                    self.out.streams.allocated(&client);
                    self.out.dtls.allocated(&client);
                    self.look_for(now, &client);
                }
            }
        }
    }

    /// Whether it will arrive. What may not be lost comes back here.
    fn post(&mut self, worker: u16, letter: Letter) -> bool {
        let undelivered = match self.mailboxes.get(usize::from(worker)) {
            Some(mailbox) => match mailbox.post(Box::new(letter)) {
                Ok(()) => return true,
                Err(letter) => *letter,
            },
            None => letter,
        };
        self.counted.letters_lost += 1;
        if let Letter::Import { moved, sockets, .. } | Letter::TakeBack { moved, sockets } = undelivered {
            // Its worker has ended, and with it the server is about to.
            for (_, socket) in &sockets {
                self.ports.release(socket.local_addr());
            }
            drop(moved);
        }
        false
    }

    /// Serves a stream that another worker has accepted.
    fn take_over(&mut self, now: Now, taken: Taken, request: Vec<u8>, rest: Vec<u8>) {
        let client = taken.client;
        let Some(slot) = self.out.streams.adopt(taken, now.ms, &self.poller) else { return };
        let verdict = self.server.from_handed_over(now, client, &request);
        if let Some(errand) = self.out.answer(verdict) {
            let behind = if errand.wants_bytes() { rest.clone() } else { Vec::new() };
            if !self.run_errand(now, &client, errand, request, behind) {
                return;
            }
        }
        for part in rest.chunks(Streams::FEED) {
            if self.rx.room() < Streams::ROOM {
                self.flush();
            }
            if let Some(incoming) = self.out.streams.feed(slot, part, &mut self.rx)
                && !self.route_stream(now, incoming)
            {
                return;
            }
        }
        self.out.streams.close_if_ended(slot);
    }

    /// Takes the relay sockets from an allocation that moves away.
    fn surrender(&mut self, allocation: AllocationId) -> Sockets {
        // What is queued leaves before its socket does. The arena keeps what is still to be routed.
        self.out.tx.flush(&mut self.sockets, &self.rx);
        let mut surrendered = Sockets::new();
        for family in [Family::V4, Family::V6] {
            let pair = self.out.relays.get_mut(allocation.index as usize);
            let Some(id) = pair.and_then(|pair| pair[side(family)].take()) else { continue };
            self.roles[id.0 as usize] = Role::Free;
            if let Some(socket) = self.sockets.remove(id) {
                // Not watched any more, whatever this says: a descriptor that is not in the set.
                let _ = self.poller.remove(&socket);
                surrendered.push((family, socket));
            }
        }
        surrendered
    }

    /// The client of an allocation that came by letter may have closed its connection meanwhile; nobody was told.
    fn look_for(&mut self, now: Now, client: &Client) {
        // Over plain UDP, whose listeners have the first numbers, nobody closes anything.
        let plain = usize::from(client.listener.0) < self.listeners.len();
        if !(plain || self.out.streams.serves(client) || self.out.dtls.serves(client)) {
            self.server.disconnected(now, client);
        }
    }

    /// What the client of an allocation said before it was here. Its TOS and TTL have been forgotten meanwhile.
    fn route_again(&mut self, now: Now, client: Client, data: Vec<u8>) {
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
        let bytes = self.rx.bytes(span);
        let buffer =
            Buffer { from: client.address, local: None, tos: 0, ttl: 0, segment_size: bytes.len(), bytes };
        let verdict = self.server.from_client(now, client, bytes);
        if let Some(errand) = self.out.carry_out(&self.rx, &buffer, verdict) {
            self.run_errand(now, &client, errand, data, Vec::new());
        }
    }

    fn move_in(&mut self, now: Now, allocation: AllocationId, sockets: Sockets) {
        // A session that ended in this tick may have had the same index.
        self.carry_out_effects(now);
        for (family, socket) in sockets {
            let bound = socket.local_addr();
            match self.adopt(socket, Role::Relay(RelayId { allocation, family })) {
                Ok(id) => self.out.set_relay(allocation, family, id),
                Err(_) => {
                    self.ports.release(bound);
                    // Without its socket it would be a session that nothing passes through.
                    self.server.close_one(now, allocation, ClosedReason::Administrator);
                }
            }
        }
        // A reload may have come here first, and the worker that sent it knew its realm still.
        if !self.server.has_realm_of(allocation) {
            self.server.close_one(now, allocation, ClosedReason::Administrator);
        }
    }
}

#[cfg(test)]
mod tests;
